"""The plug-in's C functions, called as PyTorch calls them, over the stand-in for the driver."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import textwrap
import threading
import unittest

import support
from support import GIB, MIB, Standin, StandinCase, fork_while, process

WORD = ctypes.c_uint64


class Pool(ctypes.Structure):
    _fields_ = [("first", WORD), ("second", WORD)]


class Plugin:
    """The library, with the types of its functions."""

    def __init__(self, conf: str | None = None, policy: str | None = None) -> None:
        from cushion import _cushion

        self.module = _cushion
        _cushion.start(_cushion.gather_settings({}, policy, conf))
        library = ctypes.CDLL(_cushion.__file__)
        number, pointer = ctypes.c_int, ctypes.c_void_p
        self._alloc = self.typed(library.cushion_alloc, pointer, ctypes.c_size_t, number, pointer)
        self._free = self.typed(library.cushion_free, None, pointer, ctypes.c_size_t, number, pointer)
        self.init = self.typed(library.cushion_init, None, number)
        self.reset = self.typed(library.cushion_reset, None)
        self.memory_fraction = self.typed(library.cushion_memory_fraction, None, ctypes.c_double, number)
        self.base_alloc = self.typed(library.cushion_base_alloc, pointer, pointer, ctypes.POINTER(ctypes.c_size_t))
        self.record_stream = self.typed(library.cushion_record_stream, None, pointer, pointer)
        self.begin_pool = self.typed(library.cushion_begin_allocate_to_pool, None, number, Pool, pointer)
        self.end_pool = self.typed(library.cushion_end_allocate_to_pool, None, number, Pool)
        self.release_pool = self.typed(library.cushion_release_pool, None, number, Pool)

    @staticmethod
    def typed(function: object, result: object, *arguments: object) -> object:
        function.restype, function.argtypes = result, arguments  # type: ignore[attr-defined]
        return function

    def alloc(self, size: int, stream: int = 0, device: int = 0) -> int:
        return self._alloc(size, device, stream) or 0

    def free(self, address: int, size: int = 0, stream: int = 0, device: int = 0) -> None:
        self._free(address, size, device, stream)

    def stat(self, name: str, device: int = 0) -> int:
        figures = self.module.memory_stats(device)
        for part in name.split("."):
            figures = figures[part]
        return figures

    def live(self) -> int:
        return self.stat("allocated_bytes.all.current")

    def reserved(self) -> int:
        return self.stat("reserved_bytes.all.current")


class Basics(StandinCase):
    policy = "segments"

    def setUp(self) -> None:
        if self.in_own_process:
            self.plugin = Plugin(policy=self.policy)
            self.addCleanup(self.plugin.module.check_invariants, 0)

    def test_alloc_and_free(self) -> None:
        plugin = self.plugin
        a, b = plugin.alloc(1000), plugin.alloc(5 * MIB)
        self.assertTrue(a and b and a != b)
        self.assertEqual((a % 512, b % 512), (0, 0))
        self.assertEqual(plugin.live(), 1024 + 5 * MIB)
        self.assertEqual(plugin.reserved(), Standin().held())
        plugin.free(a)
        self.assertEqual(plugin.live(), 5 * MIB)
        self.assertEqual(plugin.alloc(700), a)
        plugin.free(a)
        plugin.free(b)
        self.assertEqual(plugin.live(), 0)
        plugin.reset()
        self.assertEqual((plugin.reserved(), Standin().held()), (0, 0))

    def test_no_device_is_created_before_its_first_use(self) -> None:
        self.plugin.init(4)
        standin = Standin()
        self.assertEqual(standin.library.standin_contexts(), 0)
        self.plugin.alloc(512)
        self.assertEqual(standin.library.standin_contexts(), 1)

    def test_size_zero_and_null(self) -> None:
        plugin = self.plugin
        self.assertEqual(plugin.alloc(0), 0)
        plugin.free(0)
        plugin.record_stream(0, 7)
        self.assertIsNone(plugin.base_alloc(0, None))
        self.assertEqual(plugin.stat("allocation.all.allocated"), 0)

    def test_addresses_that_are_not_ours(self) -> None:
        plugin = self.plugin
        ours = plugin.alloc(4096)
        for address in (1, ours + 8, ours + 512, 2**48, 2**64 - 1):
            with self.subTest(address):
                plugin.free(address)
                plugin.record_stream(address, 7)
        self.assertEqual(plugin.live(), 4096)
        plugin.free(ours)
        plugin.free(ours)
        self.assertEqual((plugin.live(), plugin.stat("allocation.all.freed")), (0, 1))

    def test_devices_that_do_not_exist(self) -> None:
        plugin = self.plugin
        ours = plugin.alloc(4096)
        for device in (1, 127, 128, -1, 2**31 - 1):
            with self.subTest(device):
                plugin.free(ours, device=device)
                plugin.release_pool(device, Pool(1, 0))
        self.assertEqual(plugin.live(), 4096)
        for device in (128, -1):
            with self.assertRaises(RuntimeError):
                plugin.module.memory_stats(device)

    def test_base_of_an_allocation(self) -> None:
        plugin = self.plugin
        first, second = plugin.alloc(2 * MIB), plugin.alloc(2 * MIB)
        size = ctypes.c_size_t(0)
        self.assertEqual(plugin.base_alloc(second, ctypes.byref(size)), first)
        self.assertGreaterEqual(size.value, 4 * MIB)
        self.assertIsNone(plugin.base_alloc(12345, ctypes.byref(size)))

    def test_record_stream_keeps_memory_until_the_work_is_done(self) -> None:
        plugin, standin = self.plugin, Standin()
        a = plugin.alloc(MIB)
        standin.launch(0x77)
        plugin.record_stream(a, 0x77)
        plugin.free(a)
        self.assertEqual(plugin.live(), 0)
        self.assertEqual(plugin.stat("active_bytes.all.current"), MIB)
        b = plugin.alloc(MIB)
        self.assertNotEqual(a, b)
        standin.finish(0x77)
        self.assertEqual(plugin.alloc(MIB), a)

    def test_memory_of_one_stream_does_not_serve_another(self) -> None:
        plugin = self.plugin
        a = plugin.alloc(MIB, stream=0x10)
        plugin.free(a, stream=0x10)
        b = plugin.alloc(MIB, stream=0x20)
        self.assertNotEqual(a, b)
        self.assertEqual(plugin.alloc(MIB, stream=0x10), a)

    def test_private_pools(self) -> None:
        plugin, pool = self.plugin, Pool(3, 0)
        plugin.begin_pool(0, pool, None)
        a = plugin.alloc(MIB)
        plugin.end_pool(0, pool)
        b = plugin.alloc(MIB)
        pools = {segment["segment_pool_id"]: segment for segment in plugin.module.memory_snapshot()["segments"]}
        self.assertEqual(set(pools), {(0, 0), (3, 0)})
        self.assertEqual(pools[3, 0]["blocks"][0]["address"], a)
        plugin.free(a)
        # Cached in the pool, which still exists.
        plugin.reset()
        self.assertIn((3, 0), {segment["segment_pool_id"] for segment in plugin.module.memory_snapshot()["segments"]})
        plugin.release_pool(0, pool)
        plugin.reset()
        self.assertEqual(
            {segment["segment_pool_id"] for segment in plugin.module.memory_snapshot()["segments"]}, {(0, 0)}
        )
        plugin.free(b)

    def test_memory_fraction(self) -> None:
        plugin = self.plugin
        plugin.memory_fraction(0.25, 0)
        self.assertEqual(plugin.module.memory_fraction(0), 0.25)
        with self.assertRaises(RuntimeError):
            plugin.module.memory_fraction(1)

    def test_before_the_first_use_any_device_index_is_accepted(self) -> None:
        self.assertEqual(self.plugin.module.memory_fraction(5), 1.0)
        self.assertEqual(self.plugin.stat("num_ooms", 5), 0)
        self.plugin.init(2)
        with self.assertRaises(RuntimeError):
            self.plugin.module.memory_fraction(5)

    def test_own_statistics(self) -> None:
        plugin = self.plugin
        a = plugin.alloc(3 * MIB)
        plugin.free(a)
        plugin.alloc(3 * MIB)
        own = plugin.module.stats(0)
        self.assertEqual((own["hits"], own["misses"]), (1, 1))
        self.assertEqual(own["cached_bytes"], plugin.reserved() - 3 * MIB)
        self.assertEqual(own["largest_free_block"], own["cached_bytes"])
        self.assertEqual((own["blocks"], own["free_blocks"]), (2, 1))

    def test_snapshot_adds_up(self) -> None:
        plugin = self.plugin
        kept = [plugin.alloc(size) for size in (1, 512, 513, 2 * MIB, 30 * MIB)]
        plugin.free(kept[2])
        snapshot = plugin.module.memory_snapshot()
        self.assertEqual(sum(s["total_size"] for s in snapshot["segments"]), plugin.reserved())
        self.assertEqual(sum(s["allocated_size"] for s in snapshot["segments"]), plugin.live())
        requested = sum(s["requested_size"] for s in snapshot["segments"])
        self.assertEqual(requested, 1 + 512 + 2 * MIB + 30 * MIB)
        for segment in snapshot["segments"]:
            at = segment["address"]
            for block in segment["blocks"]:
                self.assertEqual(block["address"], at)
                at += block["size"]
            self.assertEqual(at, segment["address"] + segment["total_size"])
        self.assertEqual(snapshot["device_traces"], [[]])

    @process(STANDIN_DEVICES="2")
    def test_two_devices(self) -> None:
        plugin, standin = self.plugin, Standin()
        a, b = plugin.alloc(MIB), plugin.alloc(MIB, device=1)
        self.assertEqual(plugin.stat("allocated_bytes.all.current", 1), MIB)
        plugin.free(b, device=0)
        self.assertEqual(plugin.stat("allocated_bytes.all.current", 1), MIB)
        plugin.free(b, device=1)
        plugin.free(a)
        plugin.reset()
        self.assertEqual((standin.held(0), standin.held(1)), (0, 0))
        plugin.module.check_invariants(1)

    @process(STANDIN_CAPACITY=str(64 * MIB))
    def test_a_driver_call_that_fails_in_a_free_loses_nothing(self) -> None:
        plugin, standin = self.plugin, Standin()
        a = plugin.alloc(MIB)
        standin.launch(0x77)
        plugin.record_stream(a, 0x77)
        standin.fail(1, Standin.UNKNOWN)
        plugin.free(a)
        self.assertEqual(plugin.live(), 0)
        standin.finish(0x77)
        b = plugin.alloc(MIB)
        plugin.free(b)
        plugin.reset()
        self.assertEqual((plugin.reserved(), standin.held()), (0, 0))


class BasicsExpandable(Basics):
    policy = "expandable"


class BasicsPaged(Basics):
    policy = "paged"


@support.needs_standin
class LastWords(unittest.TestCase):
    """Nothing catches the C++ exceptions that the plug-in throws at ctypes: the process ends with their message."""

    def last_words(self, code: str, **changes: str) -> str:
        head = "from test_plugin import *\nplugin = Plugin()\n"
        done = support.python("-c", head + textwrap.dedent(code), changes=dict(changes))
        self.assertEqual(done.returncode, -signal.SIGABRT, done.stderr)
        return done.stderr

    def test_out_of_memory(self) -> None:
        self.assertIn("CUDA out of memory. Tried to allocate 2.00 GiB.", self.last_words("plugin.alloc(2 * GIB)"))

    def test_no_such_device(self) -> None:
        self.assertIn("GPU 5", self.last_words("plugin.alloc(512, device=5)"))
        self.assertIn("GPU -1", self.last_words("plugin.alloc(512, device=-1)"))

    def test_no_device_at_all(self) -> None:
        text = self.last_words("plugin.alloc(512)", STANDIN_DEVICES="0")
        self.assertIn("Cushion cannot use GPU 0", text)

    def test_no_driver(self) -> None:
        done = support.python(
            "-c",
            "from test_plugin import *\nPlugin().alloc(512)",
            changes={"LD_PRELOAD": None, "LD_LIBRARY_PATH": None},
        )
        self.assertEqual(done.returncode, -signal.SIGABRT, done.stderr)
        self.assertIn("Cushion cannot use GPU 0", done.stderr)


class Forks(StandinCase):
    def test_while_other_threads_allocate(self) -> None:
        plugin = Plugin()
        kept = plugin.alloc(MIB)

        def churn(number: int) -> None:
            stream = 0x10 * (number + 1)
            plugin.free(plugin.alloc(3 * MIB, stream), stream=stream)

        def act() -> None:
            plugin.free(kept)
            plugin.record_stream(kept, 7)
            plugin.reset()
            plugin.release_pool(0, Pool(1, 0))
            assert plugin.live() == 0 and plugin.module.memory_snapshot()["segments"] == []
            plugin.module.check_invariants(0)

        fork_while(churn, act, children=30)
        self.assertEqual(plugin.live(), MIB)
        plugin.free(kept)
        plugin.module.check_invariants(0)

    def test_a_child_that_allocates_gets_an_error(self) -> None:
        plugin = Plugin()
        plugin.alloc(512)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.dup2(writing, 2)
            plugin.alloc(512)
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as errors:
            text = errors.read()
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), -signal.SIGABRT)
        self.assertIn("fork", text)
        self.assertIn("spawn", text)

    def test_multiprocessing_by_fork(self) -> None:
        import multiprocessing

        plugin = Plugin()
        kept = plugin.alloc(MIB)
        worker = multiprocessing.get_context("fork").Process(target=plugin.free, args=(kept,))
        worker.start()
        worker.join()
        self.assertEqual(worker.exitcode, 0)
        self.assertEqual(plugin.live(), MIB)


class Ends(StandinCase):
    def run_to_the_end(self, code: str) -> None:
        head = "from test_plugin import *\nfrom cushion import _cushion\nimport atexit\nplugin = Plugin()\n"
        done = support.python("-c", head + textwrap.dedent(code))
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_threads_that_free_while_the_interpreter_shuts_down(self) -> None:
        self.run_to_the_end(
            """
            _cushion.record_memory_history("all", "all", 1000, False, [])
            atexit.register(_cushion.stop)
            started = threading.Barrier(4)
            def churn(stream):
                first = True
                while True:
                    plugin.free(plugin.alloc(MIB, stream), stream=stream)
                    if first:
                        started.wait()
                        first = False
            for n in range(3):
                threading.Thread(target=churn, args=(n,), daemon=True).start()
            started.wait()
            """
        )

    def test_frees_after_the_shutdown(self) -> None:
        self.run_to_the_end(
            """
            _cushion.record_memory_history("all", "all", 1000, False, [])
            kept = plugin.alloc(MIB)
            class Late:
                def __del__(self):
                    plugin.free(kept)
            _cushion.stop()
            late = Late()
            sys.late = late
            """
        )

    def test_a_driver_that_is_gone(self) -> None:
        self.run_to_the_end(
            """
            kept = plugin.alloc(MIB)
            Standin().library.standin_shut_down()
            plugin.free(kept)
            """
        )


if __name__ == "__main__":
    unittest.main()
