"""Cushion inside PyTorch: installation, PyTorch's environment variables, the profiler, the GIL, forks, and the end of a
program."""

from __future__ import annotations

import os
import random
import sys
import tempfile
import textwrap
import threading
import time
import unittest
from typing import Any

import support
from support import GIB, MIB, Standin, TorchCase, process


class Installing(TorchCase):
    def test_twice(self) -> None:
        import cushion
        from cushion import _cushion

        torch = self.install()
        kept = torch.empty(MIB, dtype=torch.uint8, device="cuda")
        cushion.install(conf="max_split_size_mb:64")
        self.assertIn("max_split_size_mb:64", _cushion.conf())
        self.assertEqual(torch.cuda.memory_allocated(), MIB)
        self.assertEqual(torch.cuda.memory_stats()["max_split_size"], 64 * MIB)
        del kept

    def test_too_late(self) -> None:
        import torch

        import cushion

        kept = torch.empty(MIB, dtype=torch.uint8, device="cuda")
        with self.assertRaises(cushion.InstallError) as raised:
            cushion.install()
        self.assertIn("CUDA is in use already", str(raised.exception))
        self.assertFalse(cushion.is_installed())
        # PyTorch's own allocator goes on.
        self.assertEqual(torch.cuda.memory_allocated(), MIB)
        self.assertEqual(torch.cuda.get_allocator_backend(), "native")
        del kept

    def test_after_a_query_that_does_not_initialize_cuda(self) -> None:
        import torch

        self.assertTrue(torch.cuda.is_available())
        self.assertEqual(torch.cuda.device_count(), 1)
        self.install()
        torch.empty(MIB, device="cuda")
        self.assertGreater(Standin().held(), 0)

    def test_conf_argument(self) -> None:
        torch = self.install(conf="per_process_memory_fraction:0.5,roundup_power2_divisions:4")
        with self.assertRaises(torch.cuda.OutOfMemoryError):
            torch.empty(600 * MIB, dtype=torch.uint8, device="cuda")
        torch.empty(500 * MIB, dtype=torch.uint8, device="cuda")

    @process(CUSHION_POLICY="expandable", CUSHION_MAX_SPLIT_SIZE_MB="64")
    def test_variables(self) -> None:
        import torch

        import cushion

        cushion.install()
        torch.empty(MIB, dtype=torch.uint8, device="cuda")
        (segment,) = torch.cuda.memory_snapshot()
        self.assertTrue(segment["is_expandable"])
        self.assertEqual(torch.cuda.memory_stats()["max_split_size"], 64 * MIB)

    def test_out_of_memory_is_the_error_of_pytorch(self) -> None:
        from cushion import _cushion

        self.install()
        raised = _cushion.start(_cushion.gather_settings({}))
        self.assertEqual(raised, "torch.OutOfMemoryError")

    def test_a_second_install_changes_only_given_options(self) -> None:
        import torch

        import cushion
        from cushion import _cushion

        cushion.install(policy="segments", conf="per_process_memory_fraction:0.5,max_split_size_mb:64")
        kept = torch.empty(MIB, dtype=torch.uint8, device="cuda")
        cushion.install()
        self.assertEqual(_cushion.memory_fraction(0), 0.5)
        self.assertEqual(torch.cuda.memory_stats()["max_split_size"], 64 * MIB)
        cushion.install(policy="paged", conf="per_process_memory_fraction:1.0")
        self.assertEqual(_cushion.conf(), "max_split_size_mb:64")
        self.assertEqual(_cushion.memory_fraction(0), 1.0)
        self.assertEqual(torch.cuda.memory_stats()["max_split_size"], 64 * MIB)
        # Memory in use keeps its layout, and new memory has the new policy.
        large = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        kinds = [segment["is_expandable"] for segment in torch.cuda.memory_snapshot()]
        self.assertEqual(sorted(kinds), [False, True])


class Environment(TorchCase):
    """PyTorch reads its variable at import, so these run in fresh processes."""

    warm = False

    def assert_pinning_works(self) -> None:
        import torch

        import cushion

        cushion.install()
        kept = torch.empty(MIB, dtype=torch.uint8, device="cuda")
        # Here PyTorch reads its variable again, and compares the backend.
        torch.empty(16).pin_memory()
        torch.empty(16, pin_memory=True)
        self.assertEqual(torch.cuda.memory_allocated(), MIB)
        del kept

    @process(PYTORCH_CUDA_ALLOC_CONF="backend:native,max_split_size_mb:64")
    def test_backend_native(self) -> None:
        self.assert_pinning_works()
        import torch

        self.assertEqual(torch.cuda.memory_stats()["max_split_size"], 64 * MIB)

    @process(PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync")
    def test_backend_cuda_malloc_async(self) -> None:
        self.assert_pinning_works()

    @process(PYTORCH_ALLOC_CONF="backend:native")
    def test_backend_in_the_newer_variable(self) -> None:
        self.assert_pinning_works()

    @process(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True,pinned_num_register_threads:2")
    def test_other_keys_reach_cushion_and_pytorch(self) -> None:
        self.assert_pinning_works()
        import torch

        self.assertTrue(torch.cuda.memory_snapshot()[0]["is_expandable"])


@support.needs_torch
class Programs(unittest.TestCase):
    """Whole programs, to their end."""

    def program(self, code: str, *before: str, **changes: str | None) -> str:
        done = support.python(*before, "-c", textwrap.dedent(code), changes=changes)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stderr, "")
        return done.stdout

    # Threads that allocate during the shutdown are tested without torch: PyTorch aborts when Python stops such a
    # thread, with its own allocator too.
    def test_tensors_that_live_until_the_shutdown(self) -> None:
        out = self.program(
            """
            import cushion, torch
            cushion.install()
            torch.cuda.memory._record_memory_history(stacks="python")
            class Late:
                def __del__(self):
                    tensor = torch.empty(1000, device="cuda") if torch is not None else None
            late = Late()
            kept = [torch.empty(1 << n, dtype=torch.uint8, device="cuda") for n in range(24)]
            side = torch.cuda.Stream()
            kept[-1].record_stream(side)
            print("end")
            """
        )
        self.assertEqual(out, "end\n")

    def test_cushion_run(self) -> None:
        code = "import torch; torch.empty(1 << 20, device='cuda'); print(torch.cuda.get_allocator_backend())"
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "program.py")
            with open(path, "w") as file:
                file.write(code)
            done = support.python("-m", "cushion", "run", "--policy", "expandable", "--log", path)
        self.assertEqual((done.stdout, done.returncode), ("pluggable\n", 0), done.stderr)
        self.assertIn("policy expandable", done.stderr)


class Forking(TorchCase):
    def test_workers_of_a_data_loader(self) -> None:
        torch = self.install()
        kept = torch.empty(MIB, dtype=torch.uint8, device="cuda")
        stop = threading.Event()

        def churn() -> None:
            while not stop.is_set():
                torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")

        thread = threading.Thread(target=churn)
        thread.start()
        loader = torch.utils.data.DataLoader(range(64), batch_size=8, num_workers=2, multiprocessing_context="fork")
        try:
            for _ in range(2):
                self.assertEqual(sum(int(batch.sum()) for batch in loader), sum(range(64)))
        finally:
            stop.set()
            thread.join()
        self.assertEqual(torch.cuda.memory_allocated(), MIB)
        del kept

    def test_a_child_frees_what_it_inherited(self) -> None:
        torch = self.install()
        held = [torch.empty(MIB, dtype=torch.uint8, device="cuda") for _ in range(4)]
        child = os.fork()
        if child == 0:
            held.clear()
            os._exit(0)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)
        self.assertEqual(torch.cuda.memory_allocated(), 4 * MIB)

    def test_a_child_forked_before_cuda_was_used_may_use_it(self) -> None:
        torch = self.install()
        child = os.fork()
        if child == 0:
            kept = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
            os._exit(0 if torch.cuda.memory_allocated() == 3 * MIB else 1)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)
        kept = torch.empty(MIB, dtype=torch.uint8, device="cuda")
        self.assertEqual(torch.cuda.memory_allocated(), MIB)


class Profiler(TorchCase):
    def test_sees_allocations(self) -> None:
        torch = self.install()
        torch.empty(1, device="cuda")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            kept = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
            torch.empty(MIB, dtype=torch.uint8, device="cuda")
            del kept
        changes = [event for event in profile.events() if event.name == "[memory]"]
        used = [
            getattr(event, "device_memory_usage", None) or getattr(event, "cuda_memory_usage", 0) for event in changes
        ]
        # Allocations of an operator are counted there; those between operators are separate events.
        averages = {average.key: average for average in profile.key_averages()}
        made = averages["aten::empty"]
        total = getattr(made, "self_device_memory_usage", None)
        total = getattr(made, "self_cuda_memory_usage", 0) if total is None else total
        self.assertEqual(total + sum(used), 0, (total, used))
        self.assertEqual(total, 4 * MIB)

    def test_the_memory_timeline(self) -> None:
        torch = self.install()
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(
            activities=activities, profile_memory=True, record_shapes=True, with_stack=True
        ) as profile:
            kept = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
            address = kept.data_ptr()
            with self.assertRaises(torch.cuda.OutOfMemoryError):
                torch.empty(8 * GIB, dtype=torch.uint8, device="cuda")
            del kept
        found = []

        def visit(events: Any) -> None:
            for event in events:
                if event.tag.name == "Allocation":
                    found.append(event.extra_fields)
                visit(event.children)

        visit(profile.profiler.kineto_results.experimental_event_tree())
        ours = [field for field in found if field.device == torch.device("cuda", 0)]
        self.assertEqual([(field.ptr, field.alloc_size) for field in ours], [(address, 3 * MIB), (address, -3 * MIB)])
        self.assertEqual([field.total_allocated for field in ours], [3 * MIB, 0])
        self.assertEqual([field.total_reserved for field in ours], [20 * MIB, 20 * MIB])


class PythonsLock(TorchCase):
    """A thread that waits inside Cushion releases the GIL."""

    def while_blocked(self, name: str, act: Any) -> None:
        """Runs `act` in a thread, and runs Python code here while its driver call waits."""
        standin = Standin()
        done = threading.Event()

        def work() -> None:
            act()
            done.set()

        standin.block(name)
        thread = threading.Thread(target=work)
        thread.start()
        standin.await_blocked()
        # If the other thread kept the GIL, the process would hang here until its timeout.
        counted = sum(range(1000))
        self.assertEqual((counted, done.is_set()), (499500, False))
        standin.unblock()
        thread.join()
        self.assertTrue(done.is_set())

    CALL = {"segments": "cuMemAlloc_v2", "expandable": "cuMemCreate", "paged": "cuMemCreate"}
    BACK = {"segments": "cuMemFree_v2", "expandable": "cuMemUnmap", "paged": "cuMemUnmap"}

    @process(timeout=30)
    def test_a_torch_operation(self) -> None:
        torch = self.install()
        torch.empty(1, device="cuda")
        self.while_blocked(self.CALL[self.policy], lambda: torch.empty(64 * MIB, dtype=torch.uint8, device="cuda"))

    def functions(self) -> tuple[Any, Any, Any]:
        """Returns functions of the plug-in, called with the GIL held, as some functions of PyTorch do."""
        import ctypes

        from cushion import _cushion

        library = ctypes.PyDLL(_cushion.__file__)
        alloc, free = library.cushion_alloc, library.cushion_free
        alloc.restype, alloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
        free.restype, free.argtypes = None, [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
        return alloc, free, library.cushion_reset

    @process(timeout=30)
    def test_waiting_for_memory_with_the_lock_held(self) -> None:
        torch = self.install()
        alloc, free, reset = self.functions()
        side = torch.cuda.Stream()
        kept = torch.empty(600 * MIB, dtype=torch.uint8, device="cuda")
        kept.record_stream(side)
        Standin().launch(side.cuda_stream)
        del kept
        got: list[int] = []
        thread = threading.Thread(target=lambda: got.append(alloc(600 * MIB, 0, None)))
        thread.start()
        asked = Standin().calls("cuEventQuery")
        # It polls whether the work is done. If it kept the GIL, this loop would not run before it gives up.
        while Standin().calls("cuEventQuery") < asked + 5:
            time.sleep(0.001)
        self.assertEqual(got, [])
        Standin().finish_all()
        thread.join()
        self.assertNotEqual(got, [None])
        free(got[0], 600 * MIB, 0, None)
        self.while_blocked(self.BACK[self.policy], reset)

    def held_by_another(self, alloc: Any, free: Any, turns: int, enough: bool = False) -> int:
        """Returns how often three threads found a mutex taken. Each thread takes the mutex only with the GIL held, and
        releases it before the GIL; `enough` stops at the first time.

        Each turn is one call for Python, so that Python does not switch threads inside: only the called function can
        have released the GIL. Nothing waits for the mutex: with the GIL held that would be a deadlock."""
        import ctypes
        import functools
        import gc

        reset = self.functions()[2]
        process = ctypes.PyDLL(None)
        mutex = ctypes.create_string_buffer(64)
        lock = functools.partial(process.pthread_mutex_trylock, mutex)
        unlock = functools.partial(process.pthread_mutex_unlock, mutex)
        call = functools.partial.__call__
        taken: list[int] = []

        def work(seed: int) -> None:
            dice = random.Random(seed)
            address, size = None, 1
            for number in range(turns):
                wanted = dice.randrange(1, 8 * MIB)
                give_back = functools.partial(free, address, size, 0, None)
                turn = [lock, functools.partial(alloc, wanted, 0, None), give_back, unlock]
                failed, address, *_ = list(map(call, turn))
                size = wanted
                if failed:
                    taken.append(failed)
                if enough and taken:
                    break
                if number % 50 == 0:
                    # So that some allocations need the driver.
                    reset()
            free(address, size, 0, None)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        before = sys.getswitchinterval()
        # A thread always waits for the GIL, so a thread that releases it gets it back only after another.
        sys.setswitchinterval(1e-6)
        # A collection may run Python code.
        gc.disable()
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            gc.enable()
            sys.setswitchinterval(before)
        return len(taken)

    @process(timeout=60)
    def test_the_gil_is_kept_if_nothing_has_to_be_waited_for(self) -> None:
        """A caller that holds a mutex and the GIL keeps both if Cushion has nothing to wait for. Otherwise another
        thread could take the GIL and wait for the mutex: a deadlock."""
        import ctypes

        from cushion import _cushion

        torch = self.install()
        torch.empty(1, device="cuda")
        alloc, free, _ = self.functions()
        self.assertEqual(self.held_by_another(alloc, free, 3000), 0)
        self.assertEqual(torch.cuda.memory_allocated(), 0)
        # The same functions, called so that each call releases the GIL: the test notices that.
        for function in (alloc, free):
            gives_up = getattr(ctypes.CDLL(_cushion.__file__), function.__name__)
            gives_up.restype, gives_up.argtypes = function.restype, function.argtypes
            of_each = (gives_up, free) if function is alloc else (alloc, gives_up)
            self.assertGreater(self.held_by_another(*of_each, 10**6, enough=True), 0)
        self.assertEqual(torch.cuda.memory_allocated(), 0)

    @process(timeout=30)
    def test_queries(self) -> None:
        torch = self.install()
        kept = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        standin = Standin()
        standin.block(self.CALL[self.policy])
        first = threading.Thread(target=lambda: torch.empty(32 * MIB, dtype=torch.uint8, device="cuda"))
        first.start()
        standin.await_blocked()
        answers: list[Any] = []
        asking = threading.Event()

        def ask() -> None:
            asking.set()
            answers.append(torch.cuda.memory_stats()["allocated_bytes.all.current"])
            answers.append(len(torch.cuda.memory_snapshot()))
            torch.cuda.reset_peak_memory_stats()

        second = threading.Thread(target=ask)
        second.start()
        asking.wait()
        for _ in range(1000):
            threading.Event().set()
        standin.unblock()
        first.join()
        second.join()
        self.assertIn(answers[0], (64 * MIB, 96 * MIB))
        del kept


class PythonsLockExpandable(PythonsLock):
    policy = "expandable"


class PythonsLockPaged(PythonsLock):
    policy = "paged"


if __name__ == "__main__":
    unittest.main()
