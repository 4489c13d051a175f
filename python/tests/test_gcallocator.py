"""gcAllocator: the code of its README, with PyTorch over the stand-ins, and its statistics on simulated devices,
without PyTorch."""

from __future__ import annotations

import contextlib
import io
import sys
import threading
import unittest
import warnings
from functools import partial

import support
from support import GIB, MIB, in_threads

sys.path.insert(0, str(support.ROOT / "tests" / "gpu"))
import blocks

FOREIGN = 0x7F00_0000_0000


def said_by(block: str) -> tuple[list[str], str, list[warnings.WarningMessage]]:
    """Runs a program. Returns its output, its log messages and its warnings."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            exec(compile(block, "block", "exec"), {"__name__": "__main__"})
    return out.getvalue().splitlines(), err.getvalue(), caught


class Readme(support.TorchCase):
    def setUp(self) -> None:
        import torch

        torch.randn(1)
        self.addCleanup(self.check)

    def test_tracking_by_hand(self) -> None:
        lines, log, caught = said_by(blocks.GC_TRACKING.replace("100000", "1000"))
        self.assertIn("size=4000000, device=0", lines[1])
        live = "After manual tracking: 3.81 MiB in use (peak 3.81 MiB); allocations: 1 (3.81 MiB), frees: 0 (0 bytes)"
        self.assertTrue(lines[2].startswith(live), lines[2])
        gone = "After deallocation: 0 bytes in use (peak 3.81 MiB); allocations: 1 (3.81 MiB), frees: 1 (3.81 MiB)"
        self.assertTrue(lines[3].startswith(gone), lines[3])
        self.assertEqual(len(lines), 4, lines)
        self.assertIn("installed: policy paged", log)
        self.assertNotIn("tracks", log)
        self.assertEqual([warning.filename for warning in caught], ["block"])
        self.assertIn("cannot change its allocator back", str(caught[0].message))

        import gcAllocator

        self.assertEqual(gcAllocator.get_stats().tracked, gcAllocator.TrackedStats())

    def test_context_manager(self) -> None:
        lines, log, caught = said_by(blocks.GC_CONTEXT)
        self.assertEqual(lines, ["Peak memory: 0.09 GB"])
        self.assertIn("installed", log)
        self.assertEqual(len(caught), 1, caught)

    def test_after_uninstall_memory_is_served_and_statistics_stay(self) -> None:
        import torch

        import cushion
        import gcAllocator

        allocator = gcAllocator.install()
        first = torch.empty(MIB, dtype=torch.uint8, device="cuda")
        with self.assertWarns(UserWarning):
            allocator.uninstall()
        second = torch.empty(2 * MIB, dtype=torch.uint8, device="cuda")
        self.assertTrue(cushion.is_installed())
        self.assertEqual(torch.cuda.memory_allocated(), 3 * MIB)
        self.assertEqual(gcAllocator.get_stats().current_bytes_allocated, MIB)
        self.assertEqual(allocator.get_stats().total_allocations, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            gcAllocator.uninstall()
            with gcAllocator.GCAllocator() as again:
                self.assertEqual(again.get_stats().current_bytes_allocated, 3 * MIB)
            del second
            self.assertEqual(again.get_stats().current_bytes_allocated, 3 * MIB)

    def test_a_block_inside_an_installation_does_not_uninstall(self) -> None:
        import torch

        import gcAllocator

        gcAllocator.install()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with gcAllocator.GCAllocator():
                pass
        kept = torch.empty(MIB, dtype=torch.uint8, device="cuda")
        self.assertEqual(gcAllocator.get_stats().current_bytes_allocated, MIB)

    def test_cushion_installed_before_keeps_its_settings(self) -> None:
        import cushion
        import gcAllocator
        from cushion import _cushion

        cushion.install(policy="expandable")
        gcAllocator.install(enable_logging=True)
        self.assertIn("expandable_segments:True", _cushion.conf())

    def test_out_of_memory_is_counted(self) -> None:
        import torch

        import gcAllocator

        gcAllocator.install()
        with self.assertRaises(torch.cuda.OutOfMemoryError):
            torch.empty(64 * GIB, dtype=torch.uint8, device="cuda")
        stats = gcAllocator.get_stats()
        self.assertEqual((stats.oom_count, stats.device_stats[0].oom_count), (1, 1))

    @support.process(GC_ALLOCATOR_LOG="1")
    def test_log_from_the_environment(self) -> None:
        import gcAllocator

        err = io.StringIO()
        with contextlib.redirect_stderr(err):
            gcAllocator.install()
        self.assertIn("installed", err.getvalue())

    def test_too_late_raises_install_error(self) -> None:
        import torch

        import cushion
        import gcAllocator

        torch.empty(1, device="cuda")
        with self.assertRaisesRegex(cushion.InstallError, "CUDA is in use already"):
            gcAllocator.install()


class Simulated(support.ProcessCase):
    changes = {"CUSHION_SIMULATE": "1GiB", "LD_PRELOAD": None, "LD_LIBRARY_PATH": None}

    def test_figures(self) -> None:
        import gcAllocator
        from cushion import _cushion

        allocator = gcAllocator.install()
        self.assertIsInstance(allocator, gcAllocator.GCAllocator)
        self.assertEqual(gcAllocator.get_stats(), gcAllocator.AllocatorStats())
        first = _cushion.allocate(3 * MIB, 0)
        second = _cushion.allocate(2 * MIB, 1)
        _cushion.deallocate(first)
        with self.assertRaises(MemoryError):
            _cushion.allocate(2 * GIB, 1)
        stats = gcAllocator.get_stats()
        self.assertEqual(stats, allocator.get_stats())
        self.assertEqual((stats.total_allocations, stats.total_deallocations), (2, 1))
        self.assertEqual((stats.current_bytes_allocated, stats.peak_bytes_allocated), (2 * MIB, 5 * MIB))
        self.assertEqual((stats.total_bytes_allocated, stats.total_bytes_freed, stats.oom_count), (5 * MIB, 3 * MIB, 1))
        self.assertEqual(list(stats.device_stats), [0, 1])
        self.assertEqual(stats.device_stats[1].current_bytes_allocated, 2 * MIB)
        self.assertEqual(
            str(stats).splitlines(),
            [
                "2.00 MiB in use (peak 5.00 MiB); allocations: 2 (5.00 MiB), frees: 1 (3.00 MiB); out of memory: 1",
                "  GPU 0: 0 bytes in use (peak 3.00 MiB); allocations: 1 (3.00 MiB), frees: 1 (3.00 MiB);"
                " out of memory: 0",
                "  GPU 1: 2.00 MiB in use (peak 2.00 MiB); allocations: 1 (2.00 MiB), frees: 0 (0 bytes);"
                " out of memory: 1",
            ],
        )
        self.assertNotIn("torch", sys.modules)

    def test_uninstall_without_pytorch_does_not_warn(self) -> None:
        import gcAllocator
        from cushion import _cushion

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with gcAllocator.GCAllocator() as allocator:
                _cushion.allocate(MIB)
            _cushion.allocate(MIB)
            gcAllocator.uninstall()
        self.assertEqual(allocator.get_stats().current_bytes_allocated, MIB)

    def test_tracking_memory_of_cushion_counts_nothing(self) -> None:
        import gcAllocator
        from cushion import _cushion

        gcAllocator.install()
        core = gcAllocator.gc_allocator_core
        address = _cushion.allocate(MIB)
        before = gcAllocator.get_stats()
        for _ in range(2):
            core.track_allocation(address, MIB, 0)
        core.track_allocation(address + 1000, 1, 0)
        core.track_deallocation(address)
        self.assertEqual(gcAllocator.get_stats(), before)
        _cushion.deallocate(address)
        core.track_allocation(address, MIB, 0)
        core.track_deallocation(address)
        _cushion.empty_cache()
        core.track_deallocation(address)
        self.assertEqual(gcAllocator.get_stats().tracked, before.tracked)

    def test_tracked_memory_is_counted_separately(self) -> None:
        import gcAllocator

        gcAllocator.install()
        core = gcAllocator.gc_allocator_core
        core.track_allocation(FOREIGN, 3 * MIB, 0)
        core.track_allocation(FOREIGN + GIB, MIB, 2)
        core.track_deallocation(FOREIGN)
        # Its free was not reported.
        core.track_allocation(FOREIGN + GIB, 2 * MIB, 2)
        core.track_deallocation(FOREIGN + 2 * GIB)
        core.track_allocation(0, 0, 0)
        stats = gcAllocator.get_stats()
        self.assertEqual(stats.total_allocations, 0)
        tracked = stats.tracked
        self.assertEqual((tracked.total_allocations, tracked.total_deallocations), (3, 2))
        self.assertEqual((tracked.current_bytes_allocated, tracked.peak_bytes_allocated), (2 * MIB, 4 * MIB))
        self.assertEqual((tracked.total_bytes_allocated, tracked.total_bytes_freed), (6 * MIB, 4 * MIB))
        self.assertEqual(tracked.bytes_by_device, {2: 2 * MIB})
        self.assertIn("tracked, not Cushion's: 2.00 MiB in use", str(stats))

    def test_tracking_invalid_addresses(self) -> None:
        import gcAllocator

        core = gcAllocator.gc_allocator_core
        with self.assertRaisesRegex(TypeError, "ptr is None"):
            core.track_allocation(None, 1, 0)  # type: ignore[arg-type]
        with self.assertRaisesRegex(ValueError, "size is -1"):
            core.track_allocation(FOREIGN, -1, 0)
        with self.assertRaisesRegex(TypeError, "ptr is 1.5"):
            core.track_deallocation(1.5)  # type: ignore[arg-type]
        with self.assertRaisesRegex(ValueError, r"less than 2 \*\* 64"):
            core.track_allocation(1 << 64, 1, 0)

    def test_finalisers_may_report_frees(self) -> None:
        import gc
        import weakref

        import gcAllocator

        class Foreign:
            def __init__(self, ptr: int) -> None:
                # A reference cycle: only the garbage collector frees it.
                self.itself = self
                gcAllocator.gc_allocator_core.track_allocation(ptr, 10, 0)
                weakref.finalize(self, gcAllocator.gc_allocator_core.track_deallocation, ptr)

        gcAllocator.install()
        before = gc.get_threshold()
        gc.set_threshold(1)
        for number in range(1, 2000):
            Foreign(FOREIGN + number)
            gcAllocator.get_stats()
        gc.set_threshold(*before)
        gc.collect()
        tracked = gcAllocator.get_stats().tracked
        self.assertEqual((tracked.total_allocations, tracked.current_bytes_allocated), (1999, 0))

    def test_nested_blocks_of_one_allocator(self) -> None:
        import gcAllocator
        from cushion import _cushion

        allocator = gcAllocator.GCAllocator()
        with allocator:
            with allocator:
                _cushion.allocate(MIB)
            _cushion.allocate(MIB)
        _cushion.allocate(MIB)
        self.assertEqual(allocator.get_stats().total_allocations, 2)

    def test_from_many_threads(self) -> None:
        import gcAllocator

        core = gcAllocator.gc_allocator_core
        barrier = threading.Barrier(8)

        def work(number: int) -> None:
            barrier.wait()
            for i in range(200):
                with gcAllocator.GCAllocator() as allocator:
                    core.track_allocation(FOREIGN + number * GIB + i, 10, 0)
                    allocator.get_stats()
                    core.track_deallocation(FOREIGN + number * GIB + i)

        in_threads([partial(work, number) for number in range(8)])
        with gcAllocator.GCAllocator() as allocator:
            tracked = allocator.get_stats().tracked
        self.assertEqual((tracked.total_allocations, tracked.current_bytes_allocated), (1600, 0))

    @support.process(GC_ALLOCATOR_LOG="perhaps")
    def test_a_bad_flag(self) -> None:
        import gcAllocator

        with self.assertRaisesRegex(ValueError, "GC_ALLOCATOR_LOG cannot be `perhaps`: it takes `1` or `0`"):
            gcAllocator.install()

    @support.process(CUSHION_SIMULATE=None)
    def test_without_pytorch_and_without_simulation(self) -> None:
        import cushion
        import gcAllocator

        sys.modules["torch"] = None  # type: ignore[assignment]
        with self.assertRaisesRegex(cushion.InstallError, "needs PyTorch"):
            gcAllocator.install()


if __name__ == "__main__":
    unittest.main()
