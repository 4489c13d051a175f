"""Steps of PyTorch that run again: on the CPU, and over the stand-ins with memory that really runs out."""

from __future__ import annotations

import unittest
import weakref
from typing import Any

import support  # puts the package under test on the path
from support import MIB, TorchCase

import cushion


class WithTorch(TorchCase):
    """On the CPU, without Cushion as the allocator."""

    policy = None

    def model(self) -> Any:
        import torch

        torch.manual_seed(0)
        layers = (torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 2))
        return torch.nn.Sequential(*layers).double()

    def test_gradients_of_parts_add_up(self) -> None:
        torch = self.install()
        model = self.model()
        inputs, targets = torch.randn(11, 6).double(), torch.randn(11, 2).double()
        room = 11

        def step(inputs: Any, targets: Any, share: float = 1.0) -> Any:
            loss = torch.nn.functional.mse_loss(model(inputs), targets) * share
            loss.backward()
            # Fails after backward(), so that the gradients have to be restored.
            if len(inputs) > room:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
            return loss.detach()

        whole = cushion.retry(step, inputs, targets, split=cushion.split_batch, reset=model.zero_grad)
        expected = [parameter.grad.clone() for parameter in model.parameters()]
        for room in (6, 5, 3, 2, 1):
            with self.subTest(room):
                model.zero_grad()
                loss = cushion.retry(step, inputs, targets, split=cushion.split_batch, reset=model.zero_grad)
                torch.testing.assert_close(loss, whole)
                torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected)

    def test_combine_joins_outputs(self) -> None:
        torch = self.install()
        model = self.model()
        inputs = torch.randn(11, 6).double()

        @torch.no_grad()
        def infer(inputs: Any) -> Any:
            if len(inputs) > 3:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
            return model(inputs)

        outputs = cushion.retry(infer, inputs, split=cushion.split_batch, combine=torch.cat)
        torch.testing.assert_close(outputs, model(inputs).detach())
        self.assertEqual(len(cushion.retry(infer, inputs, split=cushion.split_batch, combine=list)), 4)
        # The forward() of a module does not take `share`.
        self.assertEqual(cushion.retry(model, inputs, split=cushion.split_batch, combine=torch.cat).shape, (11, 2))

    def test_along_another_dimension(self) -> None:
        torch = self.install()

        def step(inputs: Any) -> Any:
            if inputs.shape[1] > 2:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
            return inputs.sum()

        inputs = torch.arange(20.0).reshape(4, 5)
        total = cushion.retry(step, inputs, split=cushion.split_batch.along(1), loss="sum", grads=())
        self.assertEqual(total, inputs.sum())

    def test_a_mean_along_another_dimension(self) -> None:
        torch = self.install()

        def step(inputs: Any) -> Any:
            if inputs.shape[1] > 2:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
            return inputs.mean()

        inputs = torch.arange(20.0).reshape(4, 5)
        mean = cushion.retry(step, inputs, split=cushion.split_batch.along(1), loss="mean", grads=())
        torch.testing.assert_close(mean, inputs.mean())

    def test_each_try_gets_the_same_random_numbers(self) -> None:
        torch = self.install()
        drawn: list[Any] = []

        def step() -> None:
            drawn.append(torch.rand(3).tolist())
            if len(drawn) % 2:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

        cushion.retry(step)
        self.assertEqual(drawn[0], drawn[1])
        cushion.retry(step, rng=False)
        self.assertNotEqual(drawn[2], drawn[3])
        self.assertIs(torch.cuda.is_initialized(), False)

    def test_each_try_gets_the_same_random_numbers_of_the_gpu(self) -> None:
        torch = self.install()
        torch.cuda.init()
        torch.cuda.manual_seed(5)
        states: list[Any] = []

        def step() -> None:
            states.append(torch.cuda.get_rng_state().tolist())
            torch.cuda.manual_seed(7)
            if len(states) % 2:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

        cushion.retry(step)
        self.assertEqual(states[0], states[1])

    def test_cpu_memory(self) -> None:
        torch = self.install()
        held: list[Any] = []

        def step() -> None:
            if held:
                self.assertIsNone(held[0]())
                return
            tensor = torch.ones(8, requires_grad=True)
            graph = (tensor * 2).sum()
            held.append(weakref.ref(graph))
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

        cushion.retry(step)


class Refused(TorchCase):
    """Over the stand-ins, with Cushion: memory that really runs out."""

    changes = {"STANDIN_CAPACITY": str(512 * MIB)}

    def test_a_batch_that_does_not_fit(self) -> None:
        torch = self.install()
        seen: list[int] = []

        def step(rows: Any) -> int:
            seen.append(len(rows))
            first = torch.empty(len(rows) * 64 * MIB, dtype=torch.uint8, device="cuda")
            second = torch.empty(len(rows) * 64 * MIB, dtype=torch.uint8, device="cuda")
            return len(rows)

        for _ in range(2):
            self.assertEqual(cushion.retry(step, torch.zeros(8, 3), split=cushion.split_batch, combine=sum), 8)
        self.assertEqual(seen, [8, 4, 4, 4, 4])
        self.assertEqual(torch.cuda.memory_allocated(), 0)

    def test_the_memory_of_the_failed_try_is_free_for_the_next(self) -> None:
        # Also its cached memory: if 300 of the cached 400 MiB were used again, another 200 MiB would not fit.
        torch = self.install()
        sizes = [400, 300]

        def step() -> None:
            size = sizes.pop(0)
            first = torch.empty(size * MIB, dtype=torch.uint8, device="cuda")
            second = torch.empty(200 * MIB, dtype=torch.uint8, device="cuda")

        cushion.retry(step)
        self.assertEqual(torch.cuda.memory_allocated(), 0)


if __name__ == "__main__":
    unittest.main()
