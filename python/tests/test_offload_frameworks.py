"""Offloaders with objects of frameworks: wrapped optimizers, DTensors and other tensor subclasses; and objects that
they refuse at once."""

from __future__ import annotations

import copy
import importlib.util
import logging
import pickle
import sys
import unittest
from typing import Any

import support
from offloading import OffloadCase
from support import MIB


def needs(package: str) -> Any:
    return unittest.skipIf(importlib.util.find_spec(package) is None, f"{sys.executable} has no {package}")


def _self_copying_class() -> Any:
    """Returns a tensor class that copies and pickles itself without PyTorch's functions."""
    import torch

    class Own(torch.Tensor):  # type: ignore[misc]
        def facts(self) -> tuple[str, int]:
            return type(self).__name__, torch.UntypedStorage.nbytes(self.untyped_storage())

        def __deepcopy__(self, _memo: Any) -> Any:
            return self.facts()

        def __reduce_ex__(self, _protocol: Any) -> Any:
            return tuple, (self.facts(),)

    return Own


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

        # Accelerate replaces the step of the optimizer by its own function.
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
                    # Weights, gradients and state leave no room for this.
                    test.empty(750)
                    away.append(state.bytes_away // MIB)
                return (self.weight * 2).sum()

            def configure_optimizers(self) -> Any:
                optimizer = torch.optim.AdamW(self.parameters())
                optimizer.register_step_post_hook(lambda *_: inside.append(state.bytes_away))
                return optimizer

        model = Model()
        # The trainer and the optimizer do not exist yet.
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
        # The whole training step runs inside `step()`, as its closure.
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
            """An optimizer with its own state and another optimizer inside."""

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
        # This optimizer is not named.
        self.optimizer(self.scale()).step()
        model = self.scale()
        optimizers.append(self.torch.optim.AdamW(model.parameters()))
        model.weight.grad = self.torch.zeros_like(model.weight)
        optimizers[0].step()
        # Found at its first step, before any shortage.
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

    def test_after_a_failed_closure_the_state_may_be_moved(self) -> None:
        model = self.scale()
        optimizer = self.optimizer(model)
        state = self.offloader(lambda: optimizer)

        def closure() -> Any:
            self.empty(2048)
            raise AssertionError("there is no such room")

        with self.assertRaises(self.torch.cuda.OutOfMemoryError):
            optimizer.step(closure)
        self.assertEqual(state.away(), 64 * MIB)

    def test_the_state_stays_in_a_step_and_may_be_moved_after_a_failed_one(self) -> None:
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


@unittest.skipIf(support.TORCH_VERSION < (2, 5), f"torch {support.TORCH} has no torch.distributed.tensor")
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
        # Each rank holds a half.
        before = self.allocated()
        self.assertEqual(state.away(), 64 * MIB)
        self.assertEqual(self.allocated(), before - 64)
        seen: list[int] = []
        # FSDP gathers the weights in its own hook, which runs after this one.
        model.register_forward_pre_hook(lambda *_: seen.append(weights.bytes_away), prepend=True)
        self.assertEqual(weights.away(), 32 * MIB)
        backward()
        self.assertEqual((seen, weights.bytes_away, state.bytes_away), ([0], 0, 64 * MIB))
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

    def test_dtensors_without_fsdp(self) -> None:
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
            """Has its own __torch_function__."""

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
        # A tensor that copies itself does so with its original class.
        mover.back()
        tensors.append(part().as_subclass(_self_copying_class()))
        for use in (copy.deepcopy, lambda tensor: pickle.loads(pickle.dumps(tensor))):
            self.assertEqual(mover.away(), 80 * MIB)
            self.assertEqual((use(tensors[3]), mover.bytes_away), (("Own", 16 * MIB), 0))
        del tensors[3]
        # One inner tensor is back and the other is not: the outer tensor is still guarded.
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
        # The offloader is not called in a shortage.
        kept = self.empty(100)
        self.assertEqual(self.short(), [])
        del kept

    def hollow(self) -> Any:
        """Returns a tensor whose memory cannot be found."""
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

    def test_objects_that_cannot_be_moved_are_refused_at_once(self) -> None:
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
            ("Hollow cannot be moved to the host: .*invalid python storage", self.hollow()),
            ("Hollow cannot be moved to the host", {"of a mapping": [self.hollow()]}),
            ("Hollow cannot be moved to the host", torch.optim.SGD([torch.nn.Parameter(self.hollow())])),
            ("FakeTensor cannot be moved to the host: it has no memory", fake),
            ("Step is not a torch.optim.Optimizer and holds none", Step()),
            ("is a ScriptModule", torch.jit.script(torch.nn.PReLU(device="cuda"))),
            ("is a ScriptModule", torch.nn.Sequential(torch.jit.script(torch.nn.PReLU(device="cuda")))),
        ):
            with self.subTest(text):
                self.refused(text, named)

    def test_a_refused_offloader_leaves_no_hooks(self) -> None:
        optimizer = self.optimizer(self.scale())
        with self.assertRaises(TypeError):
            self.offloader(lambda: [optimizer, object()])
        for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "_optimizer_state_dict_pre_hooks"):
            self.assertEqual(len(getattr(optimizer, hooks)), 0)

    def test_functions_that_cannot_be_called(self) -> None:
        async def later() -> Any: ...

        for text, function in (
            ("is not callable", 5),
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

    def test_objects_that_do_not_exist_yet_are_found_later(self) -> None:
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

    def test_later_objects_that_cannot_be_moved_stay_with_a_warning(self) -> None:
        optimizer = self.optimizer(self.scale())
        state = self.offloader(lambda: optimizer)
        (parameter,) = optimizer.param_groups[0]["params"]
        optimizer.state[parameter]["other"] = self.hollow()
        # At the first step, before a shortage.
        with self.assertLogs("cushion", "WARNING") as logs:
            optimizer.step()
        self.assertRegex(logs.output[0], "offloader .*Hollow cannot be moved to the host")
        (said,) = self.short()
        self.assertRegex(said, "moved 2 tensors, 64.00 MiB, to the host; not all could be moved: .*Hollow")
        state.back()
        with self.assertRaisesRegex(TypeError, "Hollow cannot be moved to the host"):
            state.away()


if __name__ == "__main__":
    unittest.main()
