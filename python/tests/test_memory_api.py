"""The memory functions of `torch.cuda`: correct results, in PyTorch's form."""

from __future__ import annotations

import unittest
import warnings

import support
from support import GIB, MIB, Standin, TorchCase, process


def native_keys() -> list[str]:
    import torch

    torch.empty(1, device="cuda")
    return list(torch.cuda.memory_stats())


def our_keys() -> list[str]:
    import cushion

    cushion.install()
    return native_keys()


@support.needs_torch
class Keys(unittest.TestCase):
    def test_every_statistic_of_pytorch_in_its_order(self) -> None:
        theirs, ours = support.call(native_keys), support.call(our_keys)
        self.assertGreater(len(theirs), 80)
        self.assertEqual([key for key in ours if key in theirs], theirs)


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

    def test_accumulated(self) -> None:
        torch = self.install()
        for _ in range(3):
            torch.empty(512, dtype=torch.uint8, device="cuda")
        figures = torch.cuda.memory_stats()
        self.assertEqual(figures["allocation.small_pool.allocated"], 3)
        self.assertEqual(figures["allocation.all.freed"], 3)
        self.assertEqual(figures["requested_bytes.all.allocated"], 3 * 512)
        torch.cuda.reset_accumulated_memory_stats()
        figures = torch.cuda.memory_stats()
        self.assertEqual(figures["allocation.small_pool.allocated"], 0)
        self.assertEqual(figures["allocation.all.peak"], 1)

    def test_deprecated_names(self) -> None:
        torch = self.install()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            a = torch.empty(MIB, dtype=torch.uint8, device="cuda")
            self.assertEqual(torch.cuda.memory_cached(), torch.cuda.memory_reserved())
            self.assertEqual(torch.cuda.max_memory_cached(), torch.cuda.max_memory_reserved())
            del a
            torch.cuda.reset_max_memory_allocated()
            self.assertEqual(torch.cuda.max_memory_allocated(), 0)
            torch.cuda.reset_max_memory_cached()

    def test_all_forms_of_devices(self) -> None:
        torch = self.install()
        kept = torch.empty(512, dtype=torch.uint8, device="cuda")
        for device in (None, 0, "cuda", "cuda:0", torch.device("cuda:0")):
            self.assertEqual(torch.cuda.memory_allocated(device), 512)
        del kept

    def test_summary(self) -> None:
        torch = self.install()
        kept = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
        for text in (torch.cuda.memory_summary(), torch.cuda.memory_summary(abbreviated=True)):
            self.assertIn("Allocated memory", text)
            self.assertIn("3072 KiB", text)
        del kept

    def test_mem_get_info(self) -> None:
        torch = self.install()
        kept = torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
        self.assertEqual(torch.cuda.mem_get_info(), (4 * GIB - 40 * MIB, 4 * GIB))
        del kept

    def test_snapshot(self) -> None:
        torch = self.install()
        kept = torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
        (segment,) = torch.cuda.memory_snapshot()
        self.assertEqual(segment["address"], kept.data_ptr())
        self.assertEqual(segment["segment_type"], "large")
        self.assertEqual(segment["is_expandable"], self.policy != "segments")
        self.assertEqual([block["state"] for block in segment["blocks"]], ["active_allocated"])

    def test_memory_fraction(self) -> None:
        torch = self.install()
        torch.cuda.set_per_process_memory_fraction(0.25)
        if hasattr(torch.cuda, "get_per_process_memory_fraction"):
            self.assertEqual(torch.cuda.get_per_process_memory_fraction(), 0.25)
        with self.assertRaises(torch.cuda.OutOfMemoryError) as refused:
            torch.empty(GIB + MIB, dtype=torch.uint8, device="cuda")
        self.assertIn("1.00 GiB allowed", str(refused.exception).replace("1024.00 MiB", "1.00 GiB"))
        kept = torch.empty(GIB - 2 * MIB, dtype=torch.uint8, device="cuda")
        del kept
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.empty(GIB + MIB, dtype=torch.uint8, device="cuda")
        for bad in (-0.1, 1.5):
            with self.assertRaises(ValueError):
                torch.cuda.set_per_process_memory_fraction(bad)

    def test_raw_memory(self) -> None:
        torch = self.install()
        address = torch.cuda.caching_allocator_alloc(1000)
        self.assertEqual(torch.cuda.memory_allocated(), 1024)
        torch.cuda.caching_allocator_delete(address)
        self.assertEqual(torch.cuda.memory_allocated(), 0)

    def test_backend(self) -> None:
        torch = self.install()
        self.assertEqual(torch.cuda.get_allocator_backend(), "pluggable")

    def test_metadata(self) -> None:
        torch = self.install()
        if not hasattr(torch.cuda.memory, "_set_memory_metadata"):
            self.skipTest(f"torch {torch.__version__} has no metadata")
        if hasattr(torch.cuda.memory, "_memory_metadata_supported"):
            self.assertTrue(torch.cuda.memory._memory_metadata_supported())
        torch.cuda.memory._record_memory_history()
        torch.cuda.memory._set_memory_metadata("step 1")
        self.assertEqual(torch.cuda.memory._get_memory_metadata(), "step 1")
        a = torch.empty(512, device="cuda")
        torch.cuda.memory._set_memory_metadata("")
        b = torch.empty(512, device="cuda")
        noted = {
            entry["addr"]: entry["user_metadata"]
            for entry in torch.cuda.memory._snapshot()["device_traces"][0]
            if entry["action"] == "alloc"
        }
        self.assertEqual((noted[a.data_ptr()], noted[b.data_ptr()]), ("step 1", ""))

    def test_accelerator(self) -> None:
        torch = self.install()
        if not hasattr(torch, "accelerator") or not hasattr(torch.accelerator, "memory_stats"):
            self.skipTest(f"torch {torch.__version__} has no memory in torch.accelerator")
        kept = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
        self.assertEqual(torch.accelerator.memory_allocated(), 3 * MIB)
        self.assertEqual(torch.accelerator.memory_reserved(), 20 * MIB)
        self.assertEqual(torch.accelerator.memory_stats(), torch.cuda.memory_stats())
        del kept
        self.assertEqual(torch.accelerator.max_memory_allocated(), 3 * MIB)
        torch.accelerator.empty_cache()
        self.assertEqual(torch.accelerator.memory_reserved(), 0)
        torch.accelerator.reset_peak_memory_stats()
        torch.accelerator.reset_accumulated_memory_stats()
        self.assertEqual(torch.accelerator.max_memory_allocated(), 0)
        self.assertEqual(torch.accelerator.memory_stats()["allocation.all.allocated"], 0)
        if hasattr(torch.accelerator, "get_memory_info"):
            self.assertEqual(torch.accelerator.get_memory_info(), (4 * GIB, 4 * GIB))

    def test_settings_at_run_time(self) -> None:
        from cushion import _cushion

        torch = self.install()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            set_settings = torch.cuda.memory._set_allocator_settings
            set_settings("max_split_size_mb:64")
            self.assertIn("max_split_size_mb:64", _cushion.conf())
            torch.empty(512, device="cuda")
            self.assertEqual(torch.cuda.memory_stats()["max_split_size"], 64 * MIB)
            set_settings("roundup_power2_divisions:4")
            # PyTorch's own parser drops it too.
            self.assertNotIn("max_split_size_mb", _cushion.conf())
            a = torch.empty(5 * MIB // 4 * 4 - 5, dtype=torch.uint8, device="cuda")
            self.assertEqual(torch.cuda.memory_stats()["requested_bytes.large_pool.current"], 5 * MIB - 5)
            with self.assertRaises(ValueError):
                set_settings("no_such:1")
            with self.assertRaises(ValueError):
                set_settings("max_split_size_mb:1")
            self.assertIn("roundup_power2_divisions", _cushion.conf())
            set_settings("pinned_num_register_threads:4,backend:native")
            set_settings("expandable_segments:True" if self.policy == "segments" else "paged:False")
        before = len(torch.cuda.memory_snapshot())
        b = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        kinds = {segment["is_expandable"] for segment in torch.cuda.memory_snapshot()}
        self.assertEqual((len(torch.cuda.memory_snapshot()) - before, kinds), (1, {True, False}))
        del a, b

    def test_before_cuda_is_used(self) -> None:
        torch = self.install()
        self.assertEqual(torch.cuda.memory_allocated(), 0)
        self.assertEqual(torch.cuda.max_memory_reserved(), 0)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self.assertEqual(torch.cuda.memory_snapshot(), [])
        self.assertFalse(torch.cuda.is_initialized() and Standin().library.standin_contexts() > 1)

    @process(STANDIN_DEVICES="2")
    def test_two_devices(self) -> None:
        torch = self.install()
        a = torch.empty(512, dtype=torch.uint8, device="cuda:1")
        self.assertEqual((torch.cuda.memory_allocated(0), torch.cuda.memory_allocated(1)), (0, 512))
        with torch.cuda.device(1):
            self.assertEqual(torch.cuda.memory_allocated(), 512)
        self.assertEqual({segment["device"] for segment in torch.cuda.memory_snapshot()}, {1})
        self.assertEqual(Standin().library.standin_contexts() & 2, 2)
        with self.assertRaises((ValueError, AssertionError, RuntimeError)):
            torch.cuda.memory_stats(7)
        del a


class MemoryApiExpandable(MemoryApi):
    policy = "expandable"


class MemoryApiPaged(MemoryApi):
    policy = "paged"
    # These expect PyTorch's sizes, to the byte.
    test_accelerator = None  # type: ignore[assignment]
    test_allocated_reserved_and_peaks = None  # type: ignore[assignment]
    test_mem_get_info = None  # type: ignore[assignment]
    test_snapshot = None  # type: ignore[assignment]


if __name__ == "__main__":
    unittest.main()
