"""What tests of exact gradients share: small models in float64, steps that run out of memory, and comparisons."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

from support import TorchCase


class ExactCase(TorchCase):
    """On the CPU, in float64, from one seed."""

    policy = None

    def setUp(self) -> None:
        import torch

        self.torch = torch
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(0)
        # Models this small gain nothing from more, and lose much where others use the machine.
        torch.set_num_threads(1)
        # A full collection would look through all of PyTorch after each failed try.
        gc.freeze()

    # ---- models and batches ----

    def plain(self, inputs: int = 6, outputs: int = 4) -> Any:
        nn = self.torch.nn
        return nn.Sequential(nn.Linear(inputs, 9), nn.Tanh(), nn.Linear(9, outputs))

    def labelled(self, rows: int = 11, length: int = 5, classes: int = 4) -> tuple[Any, Any]:
        """Sequences whose labels are ignored after their ends, which differ."""
        inputs = self.torch.randn(rows, length, 6)
        labels = self.torch.randint(0, classes, (rows, length))
        for row in range(rows):
            labels[row, 1 + row % length :] = -100
        return inputs, labels

    def cross_entropy(self, model: Any, inputs: Any, labels: Any, **options: Any) -> Any:
        outputs = model(inputs).flatten(0, -2)
        return self.torch.nn.functional.cross_entropy(outputs, labels.flatten(), **options)

    # ---- failures ----

    def out_of_memory(self) -> Exception:
        error: Exception = self.torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return error

    def at_most(self, rows: int, batch: Any) -> None:
        """As if memory were enough for so many rows."""
        if len(batch) > rows:
            raise self.out_of_memory()

    # ---- gradients ----

    def gradients(self, parameters: Any) -> list[Any]:
        """Copies of them, with zeros where there are none; they are then taken away."""
        parameters = list(parameters.parameters() if hasattr(parameters, "parameters") else parameters)
        found = [self.torch.zeros_like(it) if it.grad is None else it.grad.to_dense().clone() for it in parameters]
        for parameter in parameters:
            parameter.grad = None
        return found

    def expected(self, model: Any, compute: Callable[[], Any]) -> tuple[Any, list[Any]]:
        """The loss and the gradients of a step that nobody retries."""
        loss = compute()
        loss.backward()
        return loss.detach(), self.gradients(model)

    def assert_close(self, got: Iterable[Any], expected: Iterable[Any], tolerance: float = 1e-12) -> None:
        """All values together: relative to the norm of what is expected."""
        join = self.torch.cat
        got, expected = join([it.flatten() for it in got]), join([it.flatten() for it in expected])
        self.assertTrue(bool(expected.isfinite().all()), "what is expected is no number")
        size = float(expected.norm())
        self.assertGreater(size, 0)
        self.assertLessEqual(float((got - expected).norm()) / size, tolerance)

    def assert_equal_bits(self, got: Iterable[Any], expected: Iterable[Any]) -> None:
        for one, other in zip(got, expected, strict=True):
            self.assertTrue(self.torch.equal(one, other))
