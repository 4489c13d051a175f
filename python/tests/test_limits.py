"""What cannot work with Cushion says so: it names Cushion and a way out, and leaves a program that works."""

from __future__ import annotations

import contextlib
import unittest
from collections.abc import Iterator
from typing import Any

from support import MIB, TorchCase, process


class Limits(TorchCase):
    @contextlib.contextmanager
    def refused(self, *words: str) -> Iterator[None]:
        with self.assertRaises(RuntimeError) as raised:
            yield
        text = str(raised.exception)
        for word in ("Cushion", "without Cushion", *words):
            self.assertIn(word, text)
        self.assertNotIn("CUDAPluggableAllocator", text)

    def works(self, torch: Any) -> None:
        self.assertEqual(torch.empty(MIB, dtype=torch.uint8, device="cuda").numel(), MIB)

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
        with self.refused("torch.backends.cudnn.benchmark", "False"):
            torch.backends.cudnn.benchmark = True
        self.assertFalse(torch.backends.cudnn.benchmark)
        torch.backends.cudnn.benchmark = False
        self.works(torch)

    def test_cudnn_benchmark_in_flags(self) -> None:
        torch = self.install()
        with self.refused("torch.backends.cudnn.benchmark"):
            with torch.backends.cudnn.flags(enabled=True, benchmark=True):
                pass
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
            self.assertTrue(torch.backends.cudnn.deterministic)
        self.works(torch)

    def test_cudnn_benchmark_before(self) -> None:
        import torch

        import cushion

        torch.backends.cudnn.benchmark = True
        with self.assertRaises(cushion.InstallError) as raised:
            cushion.install()
        self.assertIn("torch.backends.cudnn.benchmark", str(raised.exception))
        self.assertFalse(cushion.is_installed())
        torch.backends.cudnn.benchmark = False
        cushion.install()
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
            with self.subTest(name), self.refused("torch.compile", "reduce-overhead", 'mode="default"'):
                getattr(torch._C, name)(0, (0, 1), set())
        self.works(torch)

    def test_compile_with_graphs(self) -> None:
        torch = self.install()
        try:
            from torch._inductor import cudagraph_trees
        except ImportError as error:
            self.skipTest(str(error))
        with self.refused("torch.compile"):
            cudagraph_trees.check_memory_pool(0, (0, 1), [])


class LimitsExpandable(Limits):
    policy = "expandable"


class LimitsPaged(Limits):
    policy = "paged"


if __name__ == "__main__":
    unittest.main()
