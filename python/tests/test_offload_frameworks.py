"""Offloaders with what frameworks hand out: wrapped optimizers, DTensors, compiled modules; what they refuse; and every
way to use what is away, which brings it back first."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import io
import logging
import pickle
import sys
import unittest
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import support
from support import MIB, Standin


def needs(package: str) -> Any:
    return unittest.skipIf(importlib.util.find_spec(package) is None, f"{sys.executable} has no {package}")


@functools.cache
def _scale_class() -> Any:
    import torch

    class Scale(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, mib: int) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(mib * MIB // 4, device="cuda"))

        def forward(self, x: Any) -> Any:
            return x * self.weight

    # Where pickle looks for it.
    Scale.__qualname__ = "Scale"
    globals()["Scale"] = Scale
    return Scale


def _self_copying_class() -> Any:
    """Tensors that make of themselves what they are and how large, and ask PyTorch nothing about it."""
    import torch

    class Own(torch.Tensor):  # type: ignore[misc]
        def facts(self) -> tuple[str, int]:
            return type(self).__name__, torch.UntypedStorage.nbytes(self.untyped_storage())

        def __deepcopy__(self, _memo: Any) -> Any:
            return self.facts()

        def __reduce_ex__(self, _protocol: Any) -> Any:
            return tuple, (self.facts(),)

    return Own


class OffloadCase(support.TorchCase):
    def setUp(self) -> None:
        warnings.simplefilter("ignore")
        self.torch = self.install(wait_ms=0)
        import cushion

        self.cushion = cushion

    def offloader(self, function: Any) -> Any:
        """With time enough on a machine that is busy."""
        return self.cushion.offloader(function, budget_ms=60_000)

    def scale(self, mib: int = 32) -> Any:
        """A module with one weight, whose forward pass the stand-in can do."""
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
        """What offloaders said in the last shortage."""
        return [answer.said for answer in self.cushion.receipts()[-1].answers]

    def short(self) -> list[str]:
        """Asks for more than there is, and no more than there could be; what offloaders said."""
        self.torch.cuda.empty_cache()
        with contextlib.suppress(self.torch.cuda.OutOfMemoryError):
            self.empty(min(1024 - self.allocated() + 8, 1000))
        return self.said()

    def step_with_state(self, wrapper: Any, mover: Any, inner: Any, mib: int) -> None:
        """A step of a wrapper has its state, and afterwards it may leave."""
        inside: list[int] = []
        handle = inner.register_step_pre_hook(lambda *_: inside.append(mover.bytes_away))
        self.assertEqual(mover.away(), mib * MIB)
        wrapper.step()
        self.assertEqual((inside, mover.bytes_away), ([0], 0))
        handle.remove()
        self.assertEqual(mover.away(), mib * MIB)
        mover.back()


class Frameworks(OffloadCase):
    @needs("accelerate")
    def test_an_optimizer_of_accelerate(self) -> None:
        from accelerate import Accelerator

        model = self.scale()
        inner = self.torch.optim.AdamW(model.parameters())
        _, optimizer = Accelerator().prepare(model, inner)
        self.assertIsNot(optimizer, inner)
        model.weight.grad = self.torch.zeros_like(model.weight)
        optimizer.step()
        state = self.offloader(lambda: optimizer)
        self.step_with_state(optimizer, state, inner, 64)
        for use in (optimizer.state_dict, lambda: optimizer.load_state_dict(inner.state_dict())):
            self.assertEqual(state.away(), 64 * MIB)
            use()
            self.assertEqual(state.bytes_away, 0)

    @needs("accelerate")
    def test_an_optimizer_of_accelerate_with_a_scaler(self) -> None:
        from accelerate import Accelerator
        from accelerate.optimizer import AcceleratedOptimizer

        Accelerator()
        model = self.scale()
        inner = self.torch.optim.AdamW(model.parameters())

        class Scaler:
            def step(self, optimizer: Any, closure: Any) -> None:
                optimizer.step(closure)

            def update(self) -> None:
                pass

        # It puts a function of its own over the step of the optimizer.
        optimizer = AcceleratedOptimizer(inner, scaler=Scaler())
        model.weight.grad = self.torch.zeros_like(model.weight)
        optimizer.step()
        self.step_with_state(optimizer, self.offloader(lambda: optimizer), inner, 64)

    @needs("lightning")
    def test_a_trainer_of_lightning(self) -> None:
        import lightning.pytorch as lightning

        test, torch = self, self.torch
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        away, inside = [], []

        class Model(lightning.LightningModule):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.weight = torch.nn.Parameter(torch.zeros(100 * MIB // 4))

            def training_step(self, _batch: Any, number: int) -> Any:
                if number > 0:
                    # There is no room for this beside weights, gradients and state.
                    test.empty(750)
                    away.append(state.bytes_away // MIB)
                return (self.weight * 2).sum()

            def configure_optimizers(self) -> Any:
                optimizer = torch.optim.AdamW(self.parameters())
                optimizer.register_step_post_hook(lambda *_: inside.append(state.bytes_away))
                return optimizer

        model = Model()
        # There is no trainer yet, and no optimizer.
        state = self.offloader(lambda: model.optimizers())
        trainer = lightning.Trainer(
            accelerator="gpu",
            devices=1,
            max_steps=3,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, torch.utils.data.DataLoader(torch.zeros(3, 1)))
        self.assertIn("Lightning", type(model.optimizers()).__name__)
        # The whole training step runs inside of `step()`, as its closure.
        self.assertEqual((away, inside), ([200, 200], [0, 0, 0]))

    @needs("lightning")
    def test_an_optimizer_of_fabric(self) -> None:
        from lightning.fabric import Fabric

        model = self.scale()
        inner = self.optimizer(model)
        fabric = Fabric(accelerator="cuda", devices=1)
        _, optimizer = fabric.setup(model, inner)
        self.step_with_state(optimizer, self.offloader(lambda: optimizer), inner, 64)

    def test_other_wrappers_of_optimizers(self) -> None:
        torch = self.torch

        class Wrapper:
            def __init__(self, inner: Any) -> None:
                self.what_it_is_called_here = inner
                self.param_groups: list[Any] = []

            def step(self) -> None:
                self.what_it_is_called_here.step()

        class Slots:
            __slots__ = ("_optimizer",)

            def __init__(self, inner: Any) -> None:
                self._optimizer = inner

            @property
            def param_groups(self) -> Any:
                return self._optimizer.param_groups

            def step(self) -> None:
                self._optimizer.step()

        class Several:
            def __init__(self, *inner: Any) -> None:
                self.chained = list(inner)
                self.param_groups: list[Any] = []

            def step(self) -> None:
                for one in self.chained:
                    one.step()

        for make in (Wrapper, Slots, Several, lambda inner: Wrapper(Slots(inner)), lambda inner: [{"it": inner}]):
            inner = self.optimizer(self.scale())
            wrapper = make(inner)
            mover = self.offloader(lambda wrapper=wrapper: wrapper)
            step = wrapper if hasattr(wrapper, "step") else inner
            self.step_with_state(step, mover, inner, 64)
            mover.remove()

        class Sharpness(torch.optim.Optimizer):  # type: ignore[misc, name-defined]
            """An optimizer with state of its own and another inside."""

            def __init__(self, parameters: Any) -> None:
                super().__init__(parameters, {})
                self.base_optimizer = torch.optim.SGD(self.param_groups, momentum=0.9)

            def step(self, closure: Any = None) -> None:
                for group in self.param_groups:
                    for parameter in group["params"]:
                        self.state[parameter]["old"] = parameter.clone()
                self.base_optimizer.step()

        both = self.optimizer(self.scale(), make=Sharpness)
        mover = self.offloader(lambda: both)
        self.step_with_state(both, mover, both.base_optimizer, 64)

    def test_an_optimizer_that_is_named_later(self) -> None:
        optimizers: list[Any] = []
        state = self.offloader(lambda: optimizers)
        # It is not one of those.
        self.optimizer(self.scale()).step()
        model = self.scale()
        optimizers.append(self.torch.optim.AdamW(model.parameters()))
        model.weight.grad = self.torch.zeros_like(model.weight)
        optimizers[0].step()
        # Known by its first step, and not only by a shortage.
        optimizers[0].step(lambda: self.assertEqual(state.away(), 64 * MIB))
        self.assertEqual(state.bytes_away, 0)

    def test_the_closure_of_a_step_may_use_the_memory_of_the_state(self) -> None:
        torch, used = self.torch, []

        class Twice(torch.optim.Optimizer):  # type: ignore[misc, name-defined]
            """Uses its state between calls of the closure, as LBFGS does."""

            def __init__(self, parameters: Any) -> None:
                super().__init__(parameters, {})
                self.state["average"] = torch.zeros(60 * MIB // 4, device="cuda")

            def step(self, closure: Any = None) -> Any:
                average = self.state["average"]
                for _ in range(2):
                    result = closure()
                    used.append((type(average), average.untyped_storage().nbytes() // MIB))
                return result

        for make in (torch.optim.AdamW, Twice):
            model = self.scale(60)
            optimizer = make(model.parameters())
            model.weight.grad = torch.zeros_like(model.weight)
            optimizer.step(lambda: 1)
            state = self.offloader(lambda optimizer=optimizer: optimizer)
            said: list[str] = []

            def closure(said: list[str] = said) -> int:
                said.append(" ".join(self.short()))
                return 7

            self.assertEqual(optimizer.step(closure), 7)
            self.assertEqual(optimizer.step(closure=closure), 7)
            self.assertGreaterEqual(len(said), 2)
            for one in said:
                self.assertRegex(one, r"moved [12] tensors, [1-9]\d+\.00 MiB, to the host")
            self.assertEqual(state.bytes_away, 0)
            state.remove()
        self.assertEqual(set(used), {(torch.Tensor, 60)})

    def test_a_closure_that_fails_leaves_the_state_free_to_leave(self) -> None:
        model = self.scale()
        optimizer = self.optimizer(model)
        state = self.offloader(lambda: optimizer)

        def closure() -> Any:
            self.empty(2048)
            raise AssertionError("there is no such room")

        with self.assertRaises(self.torch.cuda.OutOfMemoryError):
            optimizer.step(closure)
        self.assertEqual(state.away(), 64 * MIB)

    def test_the_state_stays_in_a_step_and_may_leave_after_one_that_failed(self) -> None:
        optimizer = self.optimizer(self.scale())
        state = self.offloader(lambda: optimizer)
        handle = optimizer.register_step_post_hook(lambda *_: self.short())
        optimizer.step()
        self.assertEqual((self.said(), state.bytes_away), (["its tensors are in use"], 0))
        handle.remove()

        def fail(*_: Any) -> None:
            raise ValueError("of the program's")

        handle = optimizer.register_step_post_hook(fail)
        with self.assertRaises(ValueError):
            optimizer.step()
        handle.remove()
        self.assertEqual(self.short(), ["moved 2 tensors, 64.00 MiB, to the host"])


class Subclasses(OffloadCase):
    def setUp(self) -> None:
        super().setUp()
        from torch.distributed import init_process_group
        from torch.testing._internal.distributed.fake_pg import FakeStore

        init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        from torch.distributed.device_mesh import init_device_mesh

        self.mesh = init_device_mesh("cuda", (2,))

    def test_parameters_and_state_of_fsdp(self) -> None:
        torch = self.torch
        if support.TORCH_VERSION < (2, 6):
            self.skipTest(f"torch {torch.__version__} has no fully_shard in torch.distributed.fsdp")
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import DTensor

        model = torch.nn.Sequential(self.scale(), self.scale())
        for part in (*model, model):
            fully_shard(part, mesh=self.mesh)

        x = torch.zeros(32 * MIB // 4, device="cuda")

        def backward() -> None:
            model(x).sum().backward()

        backward()
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        self.assertIsInstance(optimizer.state[model[0].weight]["exp_avg"], DTensor)
        state, weights = self.offloader(lambda: optimizer), self.offloader(lambda: model)
        # Each rank has a half.
        before = self.allocated()
        self.assertEqual(state.away(), 64 * MIB)
        self.assertEqual(self.allocated(), before - 64)
        self.assertEqual(weights.away(), 32 * MIB)
        seen: list[int] = []
        # Its own hooks gather the weights before the forward pass of the module.
        hooks = [part.register_forward_pre_hook(lambda *_: seen.append(weights.bytes_away)) for part in (model, *model)]
        for hook in hooks:
            for part in (model, *model):
                part._forward_pre_hooks.move_to_end(hook.id, last=False) if hook.id in part._forward_pre_hooks else None
        backward()
        self.assertEqual((seen[1:], weights.bytes_away, state.bytes_away), ([0, 0], 0, 64 * MIB))
        optimizer.step()
        self.assertEqual(state.bytes_away, 0)
        for one in (*model.parameters(), *[t for it in optimizer.state.values() for t in it.values()][1:3]):
            self.assertIs(type(one), DTensor)
            self.assertIs(type(one._local_tensor), torch.Tensor)
        for use in (
            lambda: optimizer.state[model[0].weight]["exp_avg"] + 1,
            lambda: optimizer.state[model[0].weight]["exp_avg"].to_local() + 1,
            lambda: optimizer.state[model[0].weight]["exp_avg"].full_tensor(),
            optimizer.state_dict,
        ):
            self.assertEqual(state.away(), 64 * MIB)
            use()
            self.assertEqual(state.bytes_away, 0)

    def test_dtensors_by_themselves(self) -> None:
        torch = self.torch
        from torch.distributed.tensor import DTensor, Shard

        local = torch.zeros(32 * MIB // 4, device="cuda")
        tensor = DTensor.from_local(local, self.mesh, [Shard(0)], run_check=False)
        mover = self.offloader(lambda: {"average": tensor, "the same": local})
        self.assertEqual(mover.away(), 32 * MIB)
        self.assertEqual((tensor.shape, tensor.device.type), ((64 * MIB // 4,), "cuda"))
        self.assertEqual((mover.bytes_away, self.allocated()), (32 * MIB, 0))
        mover.back()
        for use in (
            tensor.clone,
            local.clone,
            lambda: copy.deepcopy(tensor),
            lambda: tensor.to_local() + 1,
            lambda: tensor._local_tensor.data_ptr(),
        ):
            self.assertEqual((mover.away(), self.allocated()), (32 * MIB, 0))
            use()
            self.assertEqual(mover.bytes_away, 0)
        self.assertIs(type(tensor), DTensor)

    def test_other_subclasses(self) -> None:
        torch = self.torch
        from torch.testing._internal.two_tensor import TwoTensor

        class Plain(torch.Tensor):  # type: ignore[misc, name-defined]
            pass

        class Named(torch.Tensor):  # type: ignore[misc, name-defined]
            """Answers for itself."""

            @classmethod
            def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                asked.append(function)
                return super().__torch_function__(function, types, args, kwargs or {})

        def part() -> Any:
            return torch.zeros(16 * MIB // 4, device="cuda")

        asked: list[Any] = []
        tensors = [TwoTensor(part(), part()), part().as_subclass(Plain), part().as_subclass(Named)]
        kinds = [type(tensor) for tensor in tensors]
        mover = self.offloader(lambda: tensors)
        self.assertEqual(mover.away(), 64 * MIB)
        for index in range(3):
            self.assertEqual((mover.away(), mover.bytes_away, self.allocated()), (0, 64 * MIB, 0))
            tensors[index] + 1
            self.assertEqual((mover.bytes_away, [type(tensor) for tensor in tensors]), (0, kinds))
            self.assertEqual(mover.away(), 64 * MIB)
        self.assertTrue(asked)
        # What copies itself does so as what it is.
        mover.back()
        tensors.append(part().as_subclass(_self_copying_class()))
        for use in (copy.deepcopy, lambda tensor: pickle.loads(pickle.dumps(tensor))):
            self.assertEqual(mover.away(), 80 * MIB)
            self.assertEqual((use(tensors[3]), mover.bytes_away), (("Own", 16 * MIB), 0))
        del tensors[3]
        # A part of one that is back while another is not: it is still away as a whole.
        mover.back()
        one = tensors[0]
        self.assertEqual(mover.away(at_least=1), 16 * MIB)
        self.assertNotEqual(type(one), TwoTensor)
        one + 1
        self.assertIs(type(one), TwoTensor)


class Refused(OffloadCase):
    def refused(self, text: str, named: Any) -> None:
        with self.assertRaisesRegex(TypeError, text):
            self.offloader(lambda: named)
        # Nobody is asked in a shortage.
        kept = self.empty(100)
        self.assertEqual(self.short(), [])
        del kept

    def hollow(self) -> Any:
        """A tensor whose memory nobody can find."""
        torch = self.torch

        class Hollow(torch.Tensor):  # type: ignore[misc, name-defined]
            @staticmethod
            def __new__(cls: Any, inner: Any) -> Any:
                made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
                made.hidden = inner
                return made

            @classmethod
            def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                return cls(args[0].hidden) if function is torch.ops.aten.detach.default else NotImplemented

        return Hollow(torch.zeros(MIB, device="cuda"))

    def test_what_is_refused_is_refused_at_once(self) -> None:
        torch = self.torch
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            fake = torch.zeros(MIB, device="cuda")

        class Step:
            param_groups: list[Any] = []

            def step(self) -> None: ...

        model = self.scale()
        scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters()), 1)
        for text, named in (
            ("names no tensors: it takes a tensor, a module, an optimizer", object()),
            ("names no tensors", [model, {"deep": object()}]),
            ("names no tensors", scheduler),
            ("names no tensors", torch.zeros(3).numpy()),
            ("Hollow cannot leave the GPU: .*invalid python storage", self.hollow()),
            ("Hollow cannot leave the GPU", {"of a mapping": [self.hollow()]}),
            ("Hollow cannot leave the GPU", torch.optim.SGD([torch.nn.Parameter(self.hollow())])),
            ("FakeTensor cannot leave the GPU: it has no memory", fake),
            ("Step is no torch.optim.Optimizer and holds none", Step()),
            ("is a ScriptModule", torch.jit.script(torch.nn.PReLU(device="cuda"))),
            ("is a ScriptModule", torch.nn.Sequential(torch.jit.script(torch.nn.PReLU(device="cuda")))),
        ):
            with self.subTest(text):
                self.refused(text, named)

    def test_functions_that_cannot_be_called(self) -> None:
        async def later() -> Any: ...

        for text, function in (
            ("is no function", 5),
            (
                "is called with no arguments when memory runs out: missing a required argument: 'device'",
                lambda device: 1,
            ),
            ("is a coroutine function", later),
        ):
            with self.assertRaisesRegex(TypeError, text):
                self.offloader(function)

        def broken() -> Any:
            raise ValueError("of its own")

        with self.assertRaisesRegex(ValueError, "of its own"):
            self.offloader(broken)

    def test_what_is_not_there_yet_is_looked_at_later(self) -> None:
        names: dict[str, Any] = {}
        missing = [
            lambda: names["model"],
            lambda: names.get("model").weight,
            lambda: [names.get("model")],
            lambda: not_yet,  # type: ignore[name-defined]  # noqa: F821
        ]
        movers = [self.offloader(function) for function in missing]
        model = names["model"] = self.scale()
        self.assertEqual(sum("moved 1 tensors, 32.00 MiB" in (said or "") for said in self.short()), 1)
        self.assertTrue(model.weight.is_cuda)
        self.assertEqual(sum(mover.bytes_away for mover in movers), 32 * MIB)
        model(self.torch.zeros(32 * MIB // 4, device="cuda"))
        self.assertEqual(sum(mover.bytes_away for mover in movers), 0)

    def test_what_comes_later_and_cannot_leave_stays_and_is_told(self) -> None:
        optimizer = self.optimizer(self.scale())
        state = self.offloader(lambda: optimizer)
        (parameter,) = optimizer.param_groups[0]["params"]
        optimizer.state[parameter]["other"] = self.hollow()
        # At the first step, before memory runs out.
        with self.assertLogs("cushion", "WARNING") as logs:
            optimizer.step()
        self.assertRegex(logs.output[0], "offloader .*Hollow cannot leave the GPU")
        (said,) = self.short()
        self.assertRegex(said, "moved 2 tensors, 64.00 MiB, to the host; left what cannot leave: .*Hollow")
        state.back()
        with self.assertRaisesRegex(TypeError, "Hollow cannot leave the GPU"):
            state.away()


class Uses(OffloadCase):
    """Every way to use what is away."""

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

    def test_everything_that_reads_or_writes_brings_back_first(self) -> None:
        model = self.model()
        weights = self.offloader(lambda: model)
        for name, use in self.uses(model):
            with self.subTest(name):
                self.assertEqual(weights.away(), 80 * MIB)
                use()
                self.assertEqual(weights.bytes_away, 0)
                self.assertNotEqual(model[0].weight.data_ptr(), 0)
                self.check_nothing_left(model)

    def test_what_asks_for_no_numbers_leaves_them_away(self) -> None:
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

    def test_copies_have_everything_and_know_nothing_of_it(self) -> None:
        torch = self.torch
        model = self.model()
        # Two that name the same: each has moved a part of it.
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
        # A shallow one has the same tensors, and they know it.
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

    def test_what_a_call_works_on_does_not_leave_in_the_middle(self) -> None:
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
                # Those of no use to it do.
                self.assertEqual(sorted(said[0]), ["its tensors are in use", "moved 1 tensors, 32.00 MiB, to the host"])
                self.assertEqual(weights.bytes_away, 0)
                del model[2:]
        self.torch.cuda.empty_cache()
        # A copy that does not fit, of what is named: it is not taken from under the copy.
        large = self.scale(600)
        mover = self.offloader(lambda: large)
        with self.assertRaises(torch.cuda.OutOfMemoryError):
            copy.deepcopy(large)
        self.assertIn("its tensors are in use", self.said())
        # And afterwards nothing is.
        self.assertGreaterEqual(mover.away(), 600 * MIB)

    def test_where_there_is_no_room_it_says_so_and_nothing_is_lost(self) -> None:
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

    def test_in_a_capture_they_cannot_come_back(self) -> None:
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

    def test_where_tensors_are_made_on_the_gpu_by_default(self) -> None:
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
                # It compiles as it does without.
                self.assertEqual(len(graphs), count)
            # What an optimizer is given is nothing to a compiled step.
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
