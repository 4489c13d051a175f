"""The largest batch size that fits, with PyTorch over the stand-ins, and compared with Accelerate's own search."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import support
from batch_sizes import Card, plain_probes
from support import MIB, TorchCase

import cushion


class Torch(TorchCase):
    """With PyTorch's tensors, over the stand-ins."""

    def gpu_step(self, tried: list[int]) -> Callable[[int], Any]:
        import torch

        def step(batch_size: int) -> Any:
            tried.append(batch_size)
            first = torch.empty(batch_size * MIB // 2, dtype=torch.uint8, device="cuda")
            return first, torch.empty(batch_size * MIB // 2, dtype=torch.uint8, device="cuda")

        return step

    def test_tensors_on_the_gpu(self) -> None:
        torch = self.install()
        kept = torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
        before = torch.cuda.memory_allocated()
        tried: list[int] = []
        found = cushion.find_batch_size(self.gpu_step(tried), 8)
        self.assertEqual(torch.cuda.memory_allocated(), before)
        self.assertLessEqual({found, found + 1}, set(tried))
        self.assertLessEqual(len(tried), 12)
        # The answer uses all memory, except for the rounding of segments.
        total = torch.cuda.mem_get_info()[1] // MIB
        self.assertGreater(found, (total - 100) * 0.9)
        self.assertLessEqual(found, total - 100)
        tried.clear()
        self.assertEqual(cushion.find_batch_size(self.gpu_step(tried), 4 * total), found)

    @support.process(STANDIN_DEVICES="2")
    def test_the_device_with_the_least_room_decides(self) -> None:
        torch = self.install()
        tried = []

        def step(batch_size: int) -> Any:
            tried.append(batch_size)
            return [torch.empty(batch_size * share * MIB, dtype=torch.uint8, device=it) for it, share in shares.items()]

        largest = []
        for shares in ({"cuda:0": 1, "cuda:1": 3}, {"cuda:0": 3, "cuda:1": 1}):
            tried.clear()
            largest.append(cushion.find_batch_size(step, 8))
            self.assertLessEqual({largest[-1], largest[-1] + 1}, set(tried))
            self.assertLess(len(tried), plain_probes(8, largest[-1]), tried)
        self.assertEqual(largest[0], largest[1])

    def test_the_progress_line_has_the_memory(self) -> None:
        self.install()
        stream = io.StringIO()
        with contextlib.redirect_stderr(stream):
            cushion.find_batch_size(self.gpu_step([]), 512, limit=512, progress=True)
        self.assertTrue(stream.getvalue().endswith("batch size: 512 fits (0.5 GiB), the limit\n"), stream.getvalue())

    def test_remembered_by_shapes(self) -> None:
        torch = self.install()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "sizes.json")
            step = self.gpu_step([])
            for width in (3, 4):
                cushion.find_batch_size(step, 8, limit=8, grads=torch.nn.Linear(width, 1), remember=path)
            first, second = (it["about"] for it in json.loads(path.read_text())["answers"])
        self.assertEqual(first["torch"], torch.__version__)
        self.assertEqual(first["gpu"], torch.cuda.get_device_name())
        self.assertEqual(first["memory"], torch.cuda.mem_get_info()[1])
        self.assertEqual((first["model"], first["parameters"]), ("Linear", 2))
        self.assertNotEqual(first.pop("shapes"), second.pop("shapes"))
        self.assertEqual(first, second)


class TorchPaged(Torch):
    policy = "paged"


class TorchAlone(Torch):
    """With PyTorch's own allocator."""

    policy = None


class State(TorchCase):
    """The state that a step changes, with tensors on the CPU."""

    def setUp(self) -> None:
        import torch

        # Several threads are slow on a busy machine.
        torch.set_num_threads(1)

    def test_gradients_buffers_and_random_numbers_are_restored(self) -> None:
        import torch

        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        model(torch.randn(6, 4)).sum().backward()
        model[2].bias.grad = None
        grads = [None if it.grad is None else it.grad.clone() for it in model.parameters()]
        objects = [it.grad for it in model.parameters()]
        state = {name: it.clone() for name, it in model.state_dict().items()}
        numbers = torch.get_rng_state()
        drawn = []

        def step(batch_size: int) -> Any:
            inputs = torch.randn(batch_size, 4)
            drawn.append(inputs[0, 0].item())
            loss = model(inputs).sum()
            loss.backward()
            if batch_size > 21:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return loss

        for given in (model, torch.optim.SGD(model.parameters(), lr=1.0), [model[0], *model[1:].parameters()]):
            self.assertEqual(cushion.find_batch_size(step, 4, grads=given), 21)
            for parameter, grad, it in zip(model.parameters(), grads, objects):
                self.assertIs(parameter.grad, it)
                self.assertTrue(grad is None or torch.equal(parameter.grad, grad))
            self.assertTrue(all(torch.equal(it, state[name]) for name, it in model.state_dict().items()))
            self.assertTrue(torch.equal(torch.get_rng_state(), numbers))
        self.assertEqual(len(set(drawn)), 1)
        with self.assertRaises(ZeroDivisionError):
            cushion.find_batch_size(lambda size: (step(size), 1 / 0), 4, grads=model)
        self.assertTrue(torch.equal(model[0].weight.grad, grads[0]))
        self.assertTrue(all(torch.equal(it, state[name]) for name, it in model.state_dict().items()))

    def test_updates_are_refused_before_they_are_made(self) -> None:
        import torch

        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        before = model.weight.detach().clone()

        def step(batch_size: int) -> None:
            model(torch.ones(batch_size, 2)).sum().backward()
            optimizer.step()

        with self.assertRaisesRegex(RuntimeError, "find_batch_size: the step calls an optimizer's step"):
            cushion.find_batch_size(step, 4, grads=model, limit=8)
        self.assertTrue(torch.equal(model.weight, before))
        # Without grads= the step may update.
        self.assertEqual(cushion.find_batch_size(step, 4, limit=8), 8)

    def test_a_scaler_is_restored(self) -> None:
        import torch

        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        before = scaler.state_dict()

        def step(batch_size: int) -> None:
            scaler.scale(model(torch.full((batch_size, 2), float("inf"))).sum()).backward()
            scaler.unscale_(optimizer)
            scaler.update()

        self.assertEqual(cushion.find_batch_size(step, 4, grads=model, limit=8), 8)
        self.assertEqual(scaler.state_dict(), before)


HAS_ACCELERATE = importlib.util.find_spec("accelerate") is not None


@unittest.skipUnless(HAS_ACCELERATE, "Accelerate is not installed")
class BesideAccelerate(TorchCase):
    """The decorator compared with Accelerate's: both try the same sizes, with the same result."""

    @support.process(timeout=180)
    def test_the_same_outcomes(self) -> None:
        import torch
        from accelerate.utils import find_executable_batch_size

        texts = (
            "CUDA out of memory. Tried",
            "MPS backend out of memory",
            "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear",
            "DefaultCPUAllocator: can't allocate memory",
            "XPU out of memory. Tried",
        )
        errors: list[Callable[[], BaseException]] = [lambda: torch.OutOfMemoryError("CUDA out of memory. Tried")]
        errors += [lambda text=text: RuntimeError(text) for text in texts]  # type: ignore[misc]
        errors += [lambda: RuntimeError("something else"), lambda: ValueError("CUDA out of memory.")]
        for first in (None, 128, 10, 1, 0):
            for largest in (200, 100, 37, 1, 0):
                for number, error in enumerate(errors):
                    # Only the first error is tried with all sizes. The others only have to lead to a smaller size.
                    if number and (first, largest) != (10, 1):
                        continue
                    self.compare(find_executable_batch_size, first, largest, error, None)
                self.compare(find_executable_batch_size, first, largest, errors[0], [90, 50, 20, 3, 0])

    def compare(self, theirs: Any, first: int | None, largest: int, error: Any, reduced: list[int] | None) -> None:
        seen = []
        for find in (theirs, cushion.find_batch_size):
            options = {} if first is None else {"starting_batch_size": first}
            if reduced is not None:
                left = iter([size for size in reduced if size < (128 if first is None else first)] or [0])
                options["reduce_batch_size_fn"] = lambda left=left: next(left)  # type: ignore[assignment, misc]
            card = Card(largest, error)

            @find(**options)
            def training(batch_size: int, *, name: str) -> tuple[str, str]:
                return card.step(batch_size), name

            outcomes = []
            for _ in range(2):
                try:
                    outcomes.append(training(name="a name"))
                except Exception as raised:
                    outcomes.append((type(raised), str(raised)))
            seen.append((outcomes, card.tried))
        self.assertEqual(seen[0], seen[1], (first, largest, reduced))

    def test_the_same_refusals(self) -> None:
        from accelerate.utils import find_executable_batch_size

        for find in (find_executable_batch_size, cushion.find_batch_size):

            @find(starting_batch_size=4)
            def training(batch_size: int, model: str) -> int:
                return batch_size

            self.assertEqual(training("model"), 4)
            with self.assertRaisesRegex(TypeError, "Batch size was passed into `.*training` as the first argument"):
                training(4, "model")


if __name__ == "__main__":
    unittest.main()
