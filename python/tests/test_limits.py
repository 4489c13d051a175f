"""Features that do not work with Cushion. If the program can go on without the feature, one warning says so. Otherwise
an error names Cushion and an alternative, and the program still works afterwards."""

from __future__ import annotations

import contextlib
import unittest
import warnings
from collections.abc import Iterator
from typing import Any

from support import MIB, TorchCase


class Case(TorchCase):
    @contextlib.contextmanager
    def refused(self, *words: str) -> Iterator[None]:
        with self.assertRaises(RuntimeError) as raised:
            yield
        text = str(raised.exception)
        for word in ("Cushion", "without Cushion", *words):
            self.assertIn(word, text)
        self.assertNotIn("CUDAPluggableAllocator", text)

    @contextlib.contextmanager
    def warned(self, *words: str, times: int = 1) -> Iterator[None]:
        """Checks that there is one warning of Cushion, with a line of this file as its place."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
        # PyTorch also warns.
        ours = [warning for warning in caught if "Cushion" in str(warning.message)]
        self.assertEqual(len(ours), times, ours)
        for warning in ours:
            for word in ("with Cushion", "without Cushion", *words):
                self.assertIn(word, str(warning.message))
            self.assertEqual(warning.filename, __file__)

    def silent(self) -> contextlib.AbstractContextManager[None]:
        return self.warned(times=0)

    def works(self, torch: Any) -> None:
        self.assertEqual(torch.empty(MIB, dtype=torch.uint8, device="cuda").numel(), MIB)


class Limits(Case):
    def test_mem_pool(self) -> None:
        torch = self.install()
        if not hasattr(torch.cuda, "MemPool"):
            self.skipTest(f"torch {torch.__version__} has no MemPool")
        with self.refused("torch.cuda.MemPool()", "graph_pool_handle"):
            torch.cuda.MemPool()
        with self.refused("torch.cuda.MemPool()"):
            torch.cuda.memory.MemPool(None)
        self.works(torch)

    def test_cudnn_benchmark_after(self) -> None:
        torch = self.install()
        with self.warned("torch.backends.cudnn.benchmark stays False", "slower"):
            torch.backends.cudnn.benchmark = True
        self.assertIs(torch.backends.cudnn.benchmark, False)
        with self.silent():
            torch.backends.cudnn.benchmark = True
            torch.backends.cudnn.benchmark = False
        self.assertIs(torch.backends.cudnn.benchmark, False)
        with self.assertRaisesRegex(RuntimeError, "expects a bool"):
            torch.backends.cudnn.benchmark = "yes"
        self.works(torch)

    def test_cudnn_benchmark_in_flags(self) -> None:
        torch = self.install()
        with self.warned("torch.backends.cudnn.benchmark stays False"):
            with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=True):
                self.assertEqual((torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic), (False, True))
        self.assertEqual((torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic), (False, False))
        with self.silent(), torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
            self.assertTrue(torch.backends.cudnn.deterministic)
        self.works(torch)

    def test_cudnn_benchmark_before(self) -> None:
        import torch

        import cushion

        torch.backends.cudnn.benchmark = True
        with self.warned("torch.backends.cudnn.benchmark stays False"):
            cushion.install(policy=self.policy)
        self.assertTrue(cushion.is_installed())
        self.assertIs(torch.backends.cudnn.benchmark, False)
        with self.silent():
            torch.backends.cudnn.benchmark = True
        self.works(torch)

    def test_other_settings_of_cudnn(self) -> None:
        torch = self.install()
        torch.backends.cudnn.deterministic = True
        self.assertTrue(torch.backends.cudnn.deterministic)
        torch.backends.cudnn.enabled = False
        self.assertFalse(torch.backends.cudnn.enabled)

    def test_tensors_to_another_process(self) -> None:
        torch = self.install()
        from multiprocessing.reduction import ForkingPickler

        import torch.multiprocessing  # noqa: F401

        tensor = torch.empty(MIB, dtype=torch.uint8, device="cuda")
        with self.refused("another process", "tensor.cpu()"):
            ForkingPickler.dumps(tensor)
        with self.refused("another process"):
            tensor.untyped_storage()._share_cuda_()
        with self.refused("another process"):
            torch.UntypedStorage._new_shared_cuda(0, b"", 0, 0, b"", 0, b"", True)
        ForkingPickler.dumps(torch.empty(16))
        self.works(torch)

    def test_graph_trees(self) -> None:
        torch = self.install()
        for name in ("_cuda_checkPoolLiveAllocations", "_cuda_getCheckpointState", "_cuda_setCheckpointPoolState"):
            with self.subTest(name), self.refused("torch.compile", 'backend="inductor"'):
                getattr(torch._C, name)(0, (0, 1), set())
        self.works(torch)

    def test_graph_trees_called_directly(self) -> None:
        torch = self.install()
        try:
            from torch._inductor import cudagraph_trees
        except ImportError as error:
            self.skipTest(str(error))
        with self.refused("torch.compile"):
            cudagraph_trees.check_memory_pool(0, (0, 1), [])
        self.works(torch)


class Compiling(Case):
    """The compiler decides whether a function gets CUDA graphs before anything runs. The last step of the compiler
    needs a GPU: here it is replaced by a function that records the decision and runs the graph without compiling it."""

    policy = "paged"

    def compile(self, torch: Any, **asked: Any) -> list[Any]:
        """Compiles a function. Returns the decisions for the forward and the backward pass."""
        from unittest import mock

        if not torch._dynamo.is_dynamo_supported():
            self.skipTest(f"torch {torch.__version__} compiles nothing here")
        from torch._inductor import compile_fx, config

        decided = []

        def inner(graph: Any, inputs: Any, **given: Any) -> Any:
            decided.append((bool(given["cudagraphs"]), config.triton.cudagraphs))
            return graph

        whole = compile_fx.compile_fx

        def outer(model: Any, inputs: Any, **given: Any) -> Any:
            # The compiler calls itself with these arguments.
            return whole(model, inputs, **{"inner_compile": inner, **given})

        torch._dynamo.reset()
        compiled = torch.compile(lambda x: (x * x).sum(), **asked)
        with mock.patch.object(compile_fx, "compile_fx", outer):
            x = torch.ones(4, requires_grad=True)
            compiled(x).backward()
        self.assertEqual(x.grad.tolist(), [2.0] * 4)
        return decided

    def test_modes(self) -> None:
        torch = self.install()
        for first, asked in enumerate(
            (
                {"mode": "reduce-overhead"},
                {"mode": "max-autotune"},
                {"options": {"triton.cudagraphs": True}},
                {"backend": "inductor", "mode": "reduce-overhead"},
            )
        ):
            with self.subTest(**asked):
                said = self.silent() if first else self.warned("torch.compile", 'mode="default"', "slower")
                with said:
                    torch.compile(torch.nn.Identity(), **asked)
                self.assertEqual(self.compile(torch, **asked), [(False, False)] * 2)

    def test_the_setting_of_the_whole_process(self) -> None:
        torch = self.install()
        from torch._inductor import config

        with self.silent():
            torch.compile(torch.nn.Identity())
        with config.patch({"triton.cudagraphs": True}), self.warned("torch.compile"):
            self.assertEqual(self.compile(torch), [(False, False)] * 2)

    def test_modes_without_graphs_are_unchanged(self) -> None:
        torch = self.install()
        for asked in ({}, {"mode": "default"}, {"mode": "max-autotune-no-cudagraphs"}):
            with self.subTest(**asked):
                with self.silent():
                    compiled = torch._TorchCompileInductorWrapper(asked.get("mode"), None, None)
                self.assertNotIn("triton.cudagraphs", compiled.config)
                self.assertEqual(self.compile(torch, **asked), [(False, False)] * 2)


class LimitsExpandable(Limits):
    policy = "expandable"


class LimitsPaged(Limits):
    policy = "paged"


if __name__ == "__main__":
    unittest.main()
