"""Shared by tests of exact gradients: small models in float64, steps that run out of memory, and comparisons."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

from support import TorchCase


class ExactCase(TorchCase):
    """Tests on the CPU, in float64, with a fixed seed."""

    policy = None

    def setUp(self) -> None:
        import torch

        self.torch = torch
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(0)
        # Small models gain nothing from more threads, and are slowed by them on a busy machine.
        torch.set_num_threads(1)
        # Otherwise each failed try runs a full collection over all objects of PyTorch.
        gc.freeze()

    # ---- models and batches ----

    def plain(self, inputs: int = 6, outputs: int = 4) -> Any:
        nn = self.torch.nn
        return nn.Sequential(nn.Linear(inputs, 9), nn.Tanh(), nn.Linear(9, outputs))

    def labelled(self, rows: int = 11, length: int = 5, classes: int = 4) -> tuple[Any, Any]:
        """Returns sequences of different lengths. Labels after the end of a sequence are ignored."""
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
        """Raises out of memory if a batch has more than `rows` rows."""
        if len(batch) > rows:
            raise self.out_of_memory()

    # ---- gradients ----

    def gradients(self, parameters: Any) -> list[Any]:
        """Returns copies of the gradients, with zeros for missing ones, and sets the gradients to None."""
        parameters = list(parameters.parameters() if hasattr(parameters, "parameters") else parameters)
        found = [self.torch.zeros_like(it) if it.grad is None else it.grad.to_dense().clone() for it in parameters]
        for parameter in parameters:
            parameter.grad = None
        return found

    def expected(self, model: Any, compute: Callable[[], Any]) -> tuple[Any, list[Any]]:
        """Returns the loss and the gradients of a step without `cushion.retry`."""
        loss = compute()
        loss.backward()
        return loss.detach(), self.gradients(model)

    def assert_close(self, got: Iterable[Any], expected: Iterable[Any], tolerance: float = 1e-12) -> None:
        """Compares all values together, relative to the norm of the expected ones."""
        join = self.torch.cat
        got, expected = join([it.flatten() for it in got]), join([it.flatten() for it in expected])
        self.assertTrue(bool(expected.isfinite().all()), "what is expected is no number")
        size = float(expected.norm())
        self.assertGreater(size, 0)
        self.assertLessEqual(float((got - expected).norm()) / size, tolerance)

    def assert_equal_bits(self, got: Iterable[Any], expected: Iterable[Any]) -> None:
        for one, other in zip(got, expected, strict=True):
            self.assertTrue(self.torch.equal(one, other))
