"""All uses of tensors that an offloader has moved to the host: they come back first, and all guards are removed."""

from __future__ import annotations

import copy
import io
import pickle
import sys
import unittest
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import support
from offloading import OffloadCase
from support import MIB, Standin


class Uses(OffloadCase):
    """All uses of tensors that are away."""

    def check_nothing_left(self, model: Any) -> None:
        torch = self.torch
        for part in model.modules():
            self.assertEqual((list(part._forward_pre_hooks), "__getstate__" in vars(part)), ([], False))
        for tensor, kind in ((model[0].weight, torch.nn.Parameter), (model[1].mean, torch.Tensor)):
            self.assertIs(type(tensor), kind)
            self.assertIs(type(tensor.untyped_storage()), torch.UntypedStorage)

    def model(self) -> Any:
        model = self.torch.nn.Sequential(self.scale(), self.scale())
        model[1].register_buffer("mean", self.torch.zeros(16 * MIB // 4, device="cuda"))
        return model

    def uses(self, model: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
        torch = self.torch
        x = torch.zeros(32 * MIB // 4, device="cuda")
        cpu = {name: torch.zeros(tensor.shape) for name, tensor in model.state_dict().items()}
        earlier, kept = model.state_dict(), model.state_dict(keep_vars=True)
        view = model[0].weight.detach()[7:]
        first, second = model[0], model[1]
        yield "forward", lambda: model(x)
        yield "forward of a part", lambda: first(x)
        yield "state_dict", model.state_dict
        yield "state_dict of a part", first.state_dict
        yield "load_state_dict", lambda: model.load_state_dict(cpu)
        yield "load_state_dict of a part", lambda: first.load_state_dict({"weight": cpu["0.weight"]})
        yield "deepcopy", lambda: copy.deepcopy(model)
        yield "copy", lambda: copy.copy(model)
        yield "pickle", lambda: pickle.dumps(model)
        yield "save", lambda: torch.save(model, io.BytesIO())
        yield "save of a state dict made before", lambda: torch.save(earlier, io.BytesIO())
        yield "save of one with the parameters", lambda: torch.save(kept, io.BytesIO())
        yield "save of a view", lambda: torch.save(view, io.BytesIO())
        yield "copy of a state dict made before", lambda: copy.deepcopy(earlier)
        yield "_apply", lambda: model._apply(lambda tensor: tensor.clone())
        yield "cuda of another type", lambda: model.to("cuda", torch.float64) and model.float()
        yield "half", lambda: model.half() and model.float()
        yield "an operation on a parameter", lambda: first.weight * 2
        yield "an operation on several", lambda: torch._foreach_mul([first.weight, second.mean], 2)
        yield "an operation that writes", lambda: second.mean.zero_()
        yield "its data", lambda: first.weight.data
        yield "other data", lambda: setattr(first.weight, "data", torch.zeros(32 * MIB // 4, device="cuda"))
        yield "its address", lambda: second.mean.data_ptr()
        yield "for other libraries", lambda: second.mean.__cuda_array_interface__
        yield "DLPack", lambda: second.mean.__dlpack__()
        yield "text", lambda: str(second.mean)
        yield "copy of a parameter", lambda: copy.deepcopy(first.weight)
        yield "copy of a buffer", lambda: copy.deepcopy(second.mean)
        yield "shallow copy", lambda: copy.copy(second.mean)
        yield "pickle of a parameter", lambda: pickle.dumps(first.weight)
        yield "clone of the storage", lambda: second.mean.untyped_storage().clone()
        yield "length of the storage", lambda: len(second.mean.untyped_storage())
        yield "a list of its numbers", lambda: second.mean[:3].tolist()
        yield "all in one", lambda: torch.nn.utils.parameters_to_vector(model.parameters())
        yield "comparison", lambda: torch.equal(second.mean, second.mean)
        yield "a call with other parameters", lambda: torch.func.functional_call(model, dict(kept), (x,))

    def test_reads_and_writes_bring_tensors_back_first(self) -> None:
        model = self.model()
        weights = self.offloader(lambda: model)
        for name, use in self.uses(model):
            with self.subTest(name):
                self.assertEqual(weights.away(), 80 * MIB)
                use()
                self.assertEqual(weights.bytes_away, 0)
                self.assertNotEqual(model[0].weight.data_ptr(), 0)
                self.check_nothing_left(model)

    def test_attributes_outside_the_memory_do_not_bring_tensors_back(self) -> None:
        torch = self.torch
        model = self.model()
        optimizer = torch.optim.SGD(model.parameters())
        weights = self.offloader(lambda: model)
        weight = model[0].weight
        weights.away()
        facts = [
            weight.shape,
            weight.dtype,
            weight.device,
            weight.numel(),
            weight.size(0),
            weight.requires_grad,
            weight.grad,
            weight.is_cuda,
            weight.is_leaf,
            weight.nbytes,
            weight.untyped_storage().device,
            len(weight),
            weight.is_floating_point(),
            torch.is_floating_point(weight),
            {weight: 1}[weight],
            [name for name, _ in model.named_parameters()],
            isinstance(weight, torch.nn.Parameter),
        ]
        optimizer.zero_grad()
        model.zero_grad()
        model.requires_grad_(False)
        model.eval()
        self.assertEqual(facts[:4], [(32 * MIB // 4,), torch.float32, torch.device("cuda:0"), 32 * MIB // 4])
        self.assertEqual((weights.bytes_away, self.allocated()), (80 * MIB, 0))

    def test_to_the_host(self) -> None:
        model = self.model()
        weights = self.offloader(lambda: model)
        self.assertEqual(weights.away(), 80 * MIB)
        model.to("cpu")
        self.assertEqual((weights.bytes_away, model[0].weight.device.type), (0, "cpu"))
        self.assertEqual(model[0].weight.untyped_storage().nbytes(), 32 * MIB)
        self.check_nothing_left(model)
        self.assertEqual(weights.away(), 0)

    def test_copies_have_all_data_and_no_guards(self) -> None:
        torch = self.torch
        model = self.model()
        # Two offloaders that name the same module: each has moved a part.
        first = self.offloader(lambda: model[0])
        weights = self.offloader(lambda: model)

        def away() -> None:
            self.assertEqual((first.away(), weights.away()), (32 * MIB, 48 * MIB))

        away()
        copied = copy.deepcopy(model)
        self.check_nothing_left(copied)
        self.check_nothing_left(model)
        self.assertNotEqual(copied[0].weight.data_ptr(), 0)
        away()
        data = io.BytesIO()
        torch.save(model, data)
        self.assertNotIn(b"cushion", data.getvalue())
        self.assertGreater(len(data.getvalue()), 80 * MIB, "storages of nothing are small")
        self.check_nothing_left(torch.load(io.BytesIO(data.getvalue()), weights_only=False))
        away()
        shallow = copy.copy(model)
        self.assertEqual(list(shallow._forward_pre_hooks), [])
        # A shallow copy shares the tensors, which are guarded.
        first.back()
        away()
        shallow[0].weight + 1
        self.assertEqual((first.bytes_away, weights.bytes_away), (0, 48 * MIB))
        shallow[1].state_dict()
        self.assertEqual(weights.bytes_away, 0)

    def test_uses_of_an_optimizer(self) -> None:
        torch = self.torch
        model = self.scale()
        optimizer = self.optimizer(model)
        saved = optimizer.state_dict()
        state = self.offloader(lambda: optimizer)
        average = optimizer.state[model.weight]["exp_avg"]
        for name, use in (
            ("step", optimizer.step),
            ("state_dict", optimizer.state_dict),
            ("load_state_dict", lambda: optimizer.load_state_dict(saved)),
            ("deepcopy", lambda: copy.deepcopy(optimizer)),
            ("pickle", lambda: pickle.dumps(optimizer)),
            ("save of what was made before", lambda: torch.save(saved, io.BytesIO())),
            ("its state", lambda: optimizer.state[model.weight]["exp_avg"].norm()),
        ):
            with self.subTest(name):
                self.assertEqual(state.away(), 64 * MIB)
                use()
                self.assertEqual(state.bytes_away, 0)
                self.assertIs(type(optimizer.state[model.weight]["exp_avg"]), torch.Tensor)
        self.assertEqual(state.away(), 64 * MIB)
        optimizer.zero_grad()
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
        self.assertEqual(state.bytes_away, 64 * MIB)
        del average
        state.remove()
        self.assertEqual(len(optimizer._optimizer_step_pre_hooks), 0)
        self.assertEqual(state.bytes_away, 0)

    def test_tensors_of_a_running_call_are_not_moved(self) -> None:
        torch, test = self.torch, self
        model = self.model()
        other = self.scale()
        weights = self.offloader(lambda: model)
        idle = self.offloader(lambda: other)

        class Short(torch.nn.Module):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.weight = model[0].weight

            def forward(self, x: Any) -> Any:
                said.append(test.short())
                return x

        def short(tensor: Any) -> Any:
            said.append(self.short())
            return tensor

        said: list[list[str]] = []
        uses = {
            "forward": lambda: model.append(Short())(torch.zeros(32 * MIB // 4, device="cuda")),
            "_apply": lambda: model._apply(short),
        }
        for name, use in uses.items():
            with self.subTest(name):
                del said[:]
                idle.back()
                use()
                # Tensors that the call does not use are moved.
                self.assertEqual(sorted(said[0]), ["its tensors are in use", "moved 1 tensors, 32.00 MiB, to the host"])
                self.assertEqual(weights.bytes_away, 0)
                del model[2:]
        self.torch.cuda.empty_cache()
        # A copy of a named module that does not fit: the module is not moved during the copy.
        large = self.scale(600)
        mover = self.offloader(lambda: large)
        with self.assertRaises(torch.cuda.OutOfMemoryError):
            copy.deepcopy(large)
        self.assertIn("its tensors are in use", self.said())
        # Afterwards nothing is in use.
        self.assertGreaterEqual(mover.away(), 600 * MIB)

    def test_without_room_to_return_it_raises_and_loses_nothing(self) -> None:
        torch = self.torch
        model = self.scale(100)
        weights = self.offloader(lambda: model)
        weights.away()
        kept = self.empty(1000)
        for use in (
            lambda: model(torch.zeros(1, device="cuda")),
            lambda: model.weight + 1,
            lambda: copy.deepcopy(model),
            model.state_dict,
            lambda: torch.save(model.weight, io.BytesIO()),
        ):
            with self.assertRaises(torch.cuda.OutOfMemoryError) as raised:
                use()
            if sys.version_info >= (3, 11):
                (note,) = raised.exception.__notes__
                self.assertRegex(note, r"^100\.00 MiB of the offloader .* are still on the host$")
            self.assertEqual(weights.bytes_away, 100 * MIB)
        del kept
        self.assertEqual(model.weight.data_ptr() != 0, weights.bytes_away == 0)

    def test_a_failed_return_is_not_overwritten_by_the_next_move(self) -> None:
        from cushion import _offload_moves

        tensor = self.empty(10)
        mover = self.offloader(lambda: tensor)
        mover.away()
        with mock.patch.object(_offload_moves, "_bytes_of", side_effect=RuntimeError("the copy failed")):
            with self.assertRaisesRegex(RuntimeError, "the copy failed"):
                mover.back()
        # The tensor has memory again, but its contents are only on the host.
        self.assertEqual((mover.away(), mover.bytes_away), (0, 10 * MIB))
        tensor + 1
        self.assertEqual((mover.bytes_away, mover.away()), (0, 10 * MIB))

    def test_tensors_cannot_come_back_in_a_capture(self) -> None:
        torch = self.torch
        tensor = self.empty(10)
        mover = self.offloader(lambda: tensor)
        mover.away()
        side, standin = torch.cuda.Stream(), Standin()
        with torch.cuda.stream(side):
            standin.begin_capture(side.cuda_stream)
            try:
                with self.assertRaisesRegex(
                    RuntimeError, r"10\.00 MiB of tensors on the host.*before the capture begins"
                ):
                    tensor + 1
            finally:
                standin.end_capture(side.cuda_stream)
        self.assertEqual(mover.bytes_away, 10 * MIB)
        tensor + 1
        self.assertEqual(mover.bytes_away, 0)

    def test_with_the_gpu_as_the_default_device(self) -> None:
        tensor = self.empty(10)
        mover = self.offloader(lambda: tensor)
        with self.torch.device("cuda"):
            self.assertEqual(mover.away(), 10 * MIB)
            mover.back()

    @support.process(timeout=180)
    def test_compiled_modules_and_steps(self) -> None:
        torch = self.torch
        graphs: list[Any] = []

        def backend(graph: Any, _inputs: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        x = torch.zeros(32 * MIB // 4, device="cuda")
        original, in_place = self.model(), self.model()
        compiled = torch.compile(original, backend=backend, fullgraph=True)
        in_place.compile(backend=backend, fullgraph=True)
        optimizer = self.optimizer(self.scale())
        step = torch.compile(lambda: optimizer.step(), backend=backend)
        with torch.no_grad():
            for named, call, size in (
                (original, lambda: compiled(x), 80),
                (compiled, lambda: compiled(x), 80),
                (in_place, lambda: in_place(x), 80),
                (optimizer, step, 64),
            ):
                call()
                count = len(graphs)
                mover = self.offloader(lambda named=named: named)
                for _ in range(2):
                    self.assertGreaterEqual(mover.away(), size * MIB)
                    call()
                    self.assertEqual(mover.bytes_away, 0)
                mover.remove()
                # It compiles as often as without an offloader.
                self.assertEqual(len(graphs), count)
            # The hooks on an optimizer do not affect a compiled step.
            mover = self.offloader(lambda: optimizer)
            hooks = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
            self.assertEqual(len(hooks), 2)

            def stepping(x: Any) -> Any:
                for hook in hooks:
                    hook(optimizer, (optimizer,), {})
                return x + 1

            torch.compile(stepping, backend=backend, fullgraph=True)(x)


if __name__ == "__main__":
    unittest.main()
