"""`torch.cuda`'s questions about memory: true answers, in PyTorch's form."""

from __future__ import annotations

from support import GIB, MIB, Standin, TorchCase, process


class MemoryApi(TorchCase):
    changes = {"STANDIN_CAPACITY": str(4 * GIB)}

    def test_allocated_reserved_and_peaks(self) -> None:
        torch = self.install()
        self.assertEqual(torch.cuda.memory_allocated(), 0)
        a = torch.empty(1000, dtype=torch.uint8, device="cuda")
        b = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
        self.assertEqual(torch.cuda.memory_allocated(), 1024 + 3 * MIB)
        self.assertEqual(torch.cuda.memory_reserved(), 22 * MIB)
        del b
        self.assertEqual(torch.cuda.memory_allocated(), 1024)
        self.assertEqual(torch.cuda.max_memory_allocated(), 1024 + 3 * MIB)
        self.assertEqual(torch.cuda.max_memory_reserved(), 22 * MIB)
        torch.cuda.empty_cache()
        self.assertEqual(torch.cuda.memory_reserved(), 2 * MIB)
        self.assertEqual(Standin().held(), 2 * MIB)
        torch.cuda.reset_peak_memory_stats()
        self.assertEqual(torch.cuda.max_memory_allocated(), 1024)
        self.assertEqual(torch.cuda.max_memory_reserved(), 2 * MIB)
        del a
