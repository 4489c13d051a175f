"""Shared by tests of offloaders: modules and optimizers that the stand-ins for CUDA can run, and shortages."""

from __future__ import annotations

import contextlib
import functools
import warnings
from typing import Any

import support
from support import MIB


@functools.cache
def _scale_class() -> Any:
    import torch

    class Scale(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, mib: int) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(mib * MIB // 4, device="cuda"))

        def forward(self, x: Any) -> Any:
            return x * self.weight

    # The name by which pickle finds the class.
    Scale.__qualname__ = "Scale"
    globals()["Scale"] = Scale
    return Scale


class OffloadCase(support.TorchCase):
    def setUp(self) -> None:
        warnings.simplefilter("ignore")
        self.torch = self.install(wait_ms=0)
        import cushion

        self.cushion = cushion

    def offloader(self, function: Any) -> Any:
        """Creates an offloader with a budget that is long enough for a busy machine."""
        return self.cushion.offloader(function, budget_ms=60_000)

    def scale(self, mib: int = 32) -> Any:
        """Returns a module with one weight, whose forward pass the stand-in can run."""
        return _scale_class()(mib)

    def optimizer(self, *modules: Any, make: Any = None) -> Any:
        parameters = [parameter for module in modules for parameter in module.parameters()]
        optimizer = (make or self.torch.optim.AdamW)(parameters)
        for parameter in parameters:
            parameter.grad = self.torch.zeros_like(parameter)
        optimizer.step()
        return optimizer

    def empty(self, mib: int) -> Any:
        return self.torch.empty(mib * MIB, dtype=self.torch.uint8, device="cuda")

    def allocated(self) -> int:
        return int(self.torch.cuda.memory_allocated()) // MIB

    def said(self) -> list[str]:
        """Returns the answers of the offloaders in the last shortage."""
        return [answer.said for answer in self.cushion.receipts()[-1].answers]

    def short(self) -> list[str]:
        """Allocates more than is free, but less than the device has. Returns the answers of the offloaders."""
        self.torch.cuda.empty_cache()
        with contextlib.suppress(self.torch.cuda.OutOfMemoryError):
            self.empty(min(1024 - self.allocated() + 8, 1000))
        return self.said()

    def step_with_state(self, wrapper: Any, mover: Any, inner: Any, mib: int) -> None:
        """Checks that a step of a wrapper brings the state back, and that the state may be moved afterwards."""
        inside: list[int] = []
        handle = inner.register_step_pre_hook(lambda *_: inside.append(mover.bytes_away))
        self.assertEqual(mover.away(), mib * MIB)
        wrapper.step()
        self.assertEqual((inside, mover.bytes_away), ([0], 0))
        handle.remove()
        self.assertEqual(mover.away(), mib * MIB)
        mover.back()
