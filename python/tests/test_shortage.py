"""What a program can do about shortages, on simulated devices: no PyTorch, no GPU."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ctypes
import gc
import json
import os
import signal
import sys
import tempfile
import threading
import unittest
from pathlib import Path
from typing import Any

import support
from support import GIB, MIB


class Simulated(support.ProcessCase):
    changes = {"LD_PRELOAD": None, "LD_LIBRARY_PATH": None}

    def setUp(self) -> None:
        import cushion
        from cushion import _cushion

        cushion.simulate("1GiB")
        self.cushion, self.engine = cushion, _cushion
        self.addCleanup(_cushion.check_invariants, 0)

    def fill(self) -> int:
        """Takes all there is."""
        return self.engine.allocate(GIB)

    def refused(self, size: int = 100 * MIB) -> Any:
        """Asks for what is refused; returns the exception."""
        with self.assertRaises(self.cushion.OutOfMemoryError) as raised:
            self.engine.allocate(size)
        return raised.exception

    @contextlib.contextmanager
    def another_holds(self, size: int) -> Any:
        """Another thread holds memory meanwhile; it gives it back when it is told to, or at the end."""
        taken, let_go, done = threading.Event(), threading.Event(), threading.Event()

        def hold() -> None:
            address = self.engine.allocate(size)
            taken.set()
            let_go.wait()
            self.engine.deallocate(address)
            done.wait()

        thread = threading.Thread(target=hold)
        thread.start()
        taken.wait()
        try:
            yield let_go
        finally:
            let_go.set()
            done.set()
            thread.join()


class Callbacks(Simulated):
    def test_one_that_frees_saves_the_allocation(self) -> None:
        held, told = [self.fill()], []

        @self.cushion.on_shortage
        def give_up(device: int, wanted: int, seconds_left: float) -> str:
            told.append((device, wanted, seconds_left))
            self.engine.deallocate(held.pop())
            return "gave up a GiB"

        self.engine.allocate(600 * MIB)
        ((device, wanted, seconds_left),) = told
        self.assertEqual((device, wanted), (0, 600 * MIB))
        self.assertTrue(1 <= seconds_left <= 3)
        (receipt,) = self.cushion.receipts()
        self.assertEqual((receipt.survived, receipt.survived_by), (True, "callbacks"))
        (answer,) = receipt.answers
        self.assertEqual((answer.said, answer.failed, answer.won), ("gave up a GiB", None, GIB))
        self.assertIn("give_up", answer.callback)
        self.assertEqual([it.won for it in receipt.tried if it.rung == "callbacks"], [GIB])

    def test_the_highest_priority_first_until_it_is_enough(self) -> None:
        held, called = [self.fill()], []

        @self.cushion.on_shortage(priority=-1)
        def last(*_: object) -> None:
            called.append("last")

        @self.cushion.on_shortage(priority=5)
        def first(*_: object) -> None:
            called.append("first")

        @self.cushion.on_shortage()
        def second(*_: object) -> None:
            called.append("second")
            self.engine.deallocate(held.pop())

        self.engine.allocate(600 * MIB)
        self.assertEqual(called, ["first", "second"])

    def test_what_they_raise_is_told_and_ends_nothing(self) -> None:
        self.fill()

        class Odd:
            def __str__(self) -> str:
                raise RuntimeError("no words")

        self.cushion.on_shortage(lambda *_: 1 // 0, priority=2)
        self.cushion.on_shortage(lambda *_: Odd(), priority=1)
        self.cushion.on_shortage(lambda *_: 42)
        error = self.refused()
        first, second, third = error.receipt.answers
        self.assertRegex(first.failed, r"^ZeroDivisionError: .* \(.*test_shortage\.py:\d+\)$")
        self.assertRegex(second.failed, "RuntimeError: no words")
        self.assertEqual((third.said, third.failed), ("42", None))
        self.assertIn("ZeroDivisionError", str(error))
        self.assertEqual(len(self.cushion.receipts()), 1)

    def test_ctrl_c_in_a_callback_reaches_the_program(self) -> None:
        self.fill()
        # A process in the background may have been told to ignore it.
        signal.signal(signal.SIGINT, signal.default_int_handler)

        def interrupted(*_: object) -> None:
            signal.raise_signal(signal.SIGINT)
            sum(range(1000))

        self.cushion.on_shortage(interrupted)
        with self.assertRaises(KeyboardInterrupt):
            with contextlib.suppress(self.cushion.OutOfMemoryError):
                self.engine.allocate(MIB)
            sum(range(1000))
        self.assertIn("KeyboardInterrupt", self.cushion.receipts()[0].answers[0].failed)

    @support.process(CUSHION_WAIT_MS="0", CUSHION_CALLBACK_MS="50")
    def test_one_that_takes_too_long_is_not_called_again(self) -> None:
        from cushion import _shortage

        self.fill()
        calls: list[float] = []

        def slow(_device: int, _wanted: int, seconds_left: float) -> None:
            calls.append(seconds_left)
            threading.Event().wait(seconds_left + 0.05)

        self.cushion.on_shortage(slow)
        (answer,) = self.refused().receipt.answers
        self.assertTrue(answer.switched_off)
        self.assertGreater(answer.seconds, 0.05)
        self.assertFalse(_shortage.is_on(slow))
        self.assertEqual(self.refused().receipt.answers, ())
        self.assertEqual(len(calls), 1)
        self.assertTrue(0 < calls[0] <= 0.05)
        # Given again, with more time, it is.
        self.cushion.on_shortage(slow, budget_ms=60_000)
        self.cushion.remove_callback(slow)
        patient: list[float] = []
        self.cushion.on_shortage(lambda *told: patient.append(told[2]), budget_ms=60_000)
        self.refused()
        self.assertTrue(50 < patient[0] <= 60)

    def test_none_is_entered_again(self) -> None:
        self.fill()
        calls: list[str] = []

        def asks(*_: object) -> None:
            calls.append(threading.current_thread().name)
            # By itself, and by another thread that is short of memory meanwhile.
            self.refused()
            thread = threading.Thread(target=self.refused, name="another")
            thread.start()
            thread.join()

        self.cushion.on_shortage(asks)
        self.refused()
        self.assertEqual(len(calls), 1)
        self.assertEqual(self.engine.stats()["shortages"], 3)

    def test_it_may_allocate_free_and_empty_the_cache(self) -> None:
        held = [self.fill()]

        def busy(*_: object) -> None:
            self.engine.deallocate(held.pop())
            self.engine.empty_cache()
            held.append(self.engine.allocate(100 * MIB))

        self.cushion.on_shortage(busy)
        self.engine.allocate(900 * MIB)
        self.assertEqual(self.cushion.receipts()[-1].survived_by, "callbacks")

    def test_taken_away(self) -> None:
        self.fill()
        calls: list[object] = []

        class Many:
            """Two of these are equal, and have no hash."""

            def __eq__(self, other: object) -> bool:
                return isinstance(other, Many)

            __hash__ = None  # type: ignore[assignment]

            def __call__(self, *_: object) -> None:
                calls.append(self)

        self.cushion.on_shortage(Many())
        self.cushion.on_shortage(Many())
        self.refused()
        self.assertEqual(len(calls), 1, "given again, it takes the place of itself")
        self.assertTrue(self.cushion.remove_callback(Many()))
        self.assertFalse(self.cushion.remove_callback(Many()))
        self.refused()
        self.assertEqual(len(calls), 1)
        with self.assertRaisesRegex(TypeError, "is no function"):
            self.cushion.on_shortage(7)

    def test_one_may_be_taken_away_while_it_goes(self) -> None:
        cushion = self.cushion

        class Owner:
            def __init__(self) -> None:
                self.cycle = self
                cushion.on_shortage(self.helper())

            def helper(self) -> Any:
                self.function = lambda *_: None
                return self.function

            def __del__(self) -> None:
                cushion.remove_callback(self.function)

        gc.set_threshold(1)
        for _ in range(50):
            Owner()
        self.addCleanup(gc.set_threshold, 700)

    def test_a_slow_one_keeps_nobody_else_s_from_being_called(self) -> None:
        held = [self.engine.allocate(900 * MIB)]
        slow_begins, go_on = threading.Event(), threading.Event()

        def slow(*_: object) -> None:
            if not slow_begins.is_set():
                slow_begins.set()
                go_on.wait(60)

        self.cushion.on_shortage(slow, priority=1, budget_ms=60_000)
        # On the thread of futures, which Python does not know.
        future = self.cushion.alloc_future("800MiB")
        slow_begins.wait()
        self.cushion.on_shortage(lambda *_: held and self.engine.deallocate(held.pop()))
        self.engine.allocate(600 * MIB)
        self.assertEqual(self.cushion.receipts()[-1].survived_by, "callbacks")
        go_on.set()
        future.exception(60)

    def test_one_that_was_not_called_is_not_switched_off(self) -> None:
        from cushion import _shortage

        self.fill()
        self.engine.configure("spill_limit_mb:1024,callback_ms:100,wait_ms:0")
        called: list[object] = []
        function = self.cushion.on_shortage(lambda *_: called.append(1))
        library = ctypes.CDLL(self.engine.__file__)
        library.cushion_alloc.restype = ctypes.c_void_p
        library.cushion_alloc.argtypes = [ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
        thread = threading.Thread(target=lambda: library.cushion_alloc(100 * MIB, 0, None))
        thread.start()
        ctypes.PyDLL(None).sleep(1)
        thread.join()
        if not called:
            self.assertTrue(_shortage.is_on(function))
            self.assertFalse(self.cushion.receipts()[-1].answers[0].switched_off)

    def test_every_device_asks_also_those_made_later(self) -> None:
        told: list[int] = []
        self.cushion.on_shortage(lambda device, *_: told.append(device))
        for device in (0, 3):
            self.engine.allocate(GIB, device)
            with self.assertRaises(MemoryError):
                self.engine.allocate(MIB, device)
        self.assertEqual(told, [0, 3])
        self.assertEqual([it.device for it in self.cushion.receipts()], [0, 3])
        self.assertEqual([it.device for it in self.cushion.receipts(3)], [3])

    def test_a_thread_without_python_s_lock_gives_up_rather_than_wait_for_ever(self) -> None:
        called: list[object] = []
        self.cushion.on_shortage(lambda *_: called.append(1))
        self.fill()
        self.engine.configure("spill_limit_mb:4096")
        library = ctypes.CDLL(self.engine.__file__)
        library.cushion_alloc.restype = ctypes.c_void_p
        library.cushion_alloc.argtypes = [ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
        served: list[int] = []

        def without_the_lock() -> None:
            served.append(library.cushion_alloc(100 * MIB, 0, None))

        # The first shows that such a thread may call Python at all.
        thread = threading.Thread(target=without_the_lock)
        thread.start()
        thread.join()
        self.assertEqual(len(called), 1)
        # Now another thread keeps the lock and waits for it, as C code that joins a thread does. Which of the two comes
        # first is up to the system.
        keeps_the_lock = ctypes.PyDLL(None)
        for _ in range(8):
            before = len(called)
            thread = threading.Thread(target=without_the_lock)
            thread.start()
            keeps_the_lock.sleep(3)
            thread.join()
            self.assertEqual(self.cushion.receipts()[-1].survived_by, "spill")
            if len(called) == before:
                break
        self.assertIn("Python's lock was not to be had", self.cushion.receipts()[-1].answers[0].failed)


class LastCall(Simulated):
    def test_one_last_call_with_the_receipt(self) -> None:
        self.fill()
        told: list[Any] = []

        @self.cushion.on_refusal
        def save(receipt: Any) -> None:
            told.append(receipt)
            # What is refused meanwhile does not call it again.
            self.refused(200 * MIB)

        error = self.refused()
        (receipt,) = told
        self.assertEqual(receipt, error.receipt)
        self.assertEqual((receipt.outcome, receipt.requested), ("full", 100 * MIB))
        self.assertTrue(self.cushion.remove_callback(save))
        self.refused()
        self.assertEqual(len(told), 1)

    def test_what_it_raises_is_shown_and_the_refusal_goes_on(self) -> None:
        self.fill()
        shown: list[Any] = []
        sys.unraisablehook = lambda caught: shown.append(caught.exc_value)

        @self.cushion.on_refusal
        def broken(_receipt: Any) -> None:
            raise OSError("the disk is full, too")

        self.refused()
        self.assertEqual([str(error) for error in shown], ["the disk is full, too"])

    def test_not_for_refusals_that_somebody_goes_on_after(self) -> None:
        self.fill()
        told: list[int] = []
        self.cushion.on_refusal(lambda receipt: told.append(receipt.number))
        self.engine.expect_refusals(True)
        error = self.refused()
        self.assertEqual(told, [])
        self.engine.expect_refusals(False)
        # Who gave up says so.
        self.engine.refuse_after_all(0, error.receipt.number)
        self.assertEqual(told, [1])
        self.refused()
        self.assertEqual(told, [1, 2])
        # What another thread expects is not expected here.
        gone = threading.Event()
        ready = threading.Event()

        def expects() -> None:
            self.engine.expect_refusals(True)
            ready.set()
            gone.wait()

        thread = threading.Thread(target=expects)
        thread.start()
        ready.wait()
        self.refused()
        self.assertEqual(told, [1, 2, 3])
        gone.set()
        thread.join()

    def test_one_after_the_other(self) -> None:
        self.fill()
        at_once: list[int] = []
        inside: list[object] = []

        @self.cushion.on_refusal
        def save(_receipt: Any) -> None:
            inside.append(1)
            at_once.append(len(inside))
            threading.Event().wait(0.02)
            inside.pop()

        threads = [threading.Thread(target=self.refused) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(at_once, [1] * 4)

    def test_what_a_step_makes_of_a_refusal(self) -> None:
        self.fill()
        told: list[Any] = []
        self.cushion.on_refusal(told.append)

        def step() -> None:
            try:
                self.engine.allocate(MIB)
            except MemoryError as error:
                raise RuntimeError("the step failed") from error

        with self.assertRaisesRegex(RuntimeError, "the step failed"):
            self.cushion.retry(step)
        self.assertEqual(len(told), 1)

    def test_inside_of_one_for_a_future(self) -> None:
        kept = self.engine.allocate(900 * MIB)
        told: list[Any] = []
        self.cushion.on_refusal(lambda _: told.append(self.cushion.alloc_future(MIB).result(60)))
        error = self.cushion.alloc_future("500MiB").exception(60)
        self.assertIs(type(error), self.cushion.OutOfMemoryError)
        self.assertEqual(told[0].nbytes, MIB)
        self.engine.deallocate(kept)

    def test_not_for_what_a_callback_is_refused(self) -> None:
        held, told = [self.fill()], []
        self.cushion.on_refusal(told.append)

        def tries_more(*_: object) -> None:
            self.refused(2 * GIB)
            self.engine.deallocate(held.pop())

        self.cushion.on_shortage(tries_more)
        self.engine.allocate(600 * MIB)
        self.assertEqual(told, [])

    def test_where_no_receipt_is_kept(self) -> None:
        told: list[Any] = []
        self.cushion.on_refusal(told.append)
        self.cushion.keep_receipts(0)
        self.fill()
        error = self.refused()
        self.assertEqual([it.number for it in told], [1])
        self.assertEqual(error.receipt, told[0])
        with self.assertRaisesRegex(self.cushion.OutOfMemoryError, "more than 1EB") as raised:
            self.engine.allocate(1 << 62)
        self.assertEqual(raised.exception.receipt.number, 2)
        self.assertEqual(len(told), 2)


class Receipts(Simulated):
    def test_of_an_exception(self) -> None:
        self.fill()
        error = self.refused()
        receipt = error.receipt
        self.assertEqual((receipt.number, receipt.device, receipt.survived), (1, 0, False))
        self.assertEqual((receipt.requested, receipt.wanted), (100 * MIB, 100 * MIB))
        self.assertIn("grow", [it.rung for it in receipt.tried])
        self.assertEqual([(it.bytes, it.count) for it in receipt.groups], [(GIB, 1)])
        self.assertIn("needs 100.00 MiB more", receipt.remedies)
        self.assertIn("refused", str(receipt))
        self.assertEqual(receipt.as_dict()["shortage"]["device_total"], GIB)
        self.assertEqual(self.cushion.receipt_of(error), receipt)
        here = os.getpid()
        for other in (
            "1",
            f"9 on GPU 0 of process {here}.",
            f"1 on GPU 77 of process {here}.",
            "1 on GPU 0 of process 1.",
        ):
            self.assertIsNone(self.cushion.receipt_of(ValueError(f"Cushion's receipt: {other}")))

    def test_so_many_are_kept(self) -> None:
        self.fill()
        self.cushion.keep_receipts(3)
        errors = [self.refused() for _ in range(5)]
        self.assertEqual([it.number for it in self.cushion.receipts()], [3, 4, 5])
        self.assertIsNone(errors[0].receipt)
        self.assertEqual(errors[4].receipt.number, 5)
        with self.assertRaises(ValueError):
            self.cushion.keep_receipts(1 << 40)

    def test_stacks_say_who_holds_the_memory(self) -> None:
        self.engine.record_memory_history("all", "all", 100, True, [])

        def makes_the_large_one() -> int:
            return self.engine.allocate(900 * MIB)

        makes_the_large_one()
        error = self.refused(200 * MIB)
        (group,) = error.receipt.groups
        self.assertRegex(group.stack[0], r"test_shortage\.py:\d+ makes_the_large_one$")
        self.assertRegex(error.receipt.stack[0], r"test_shortage\.py:\d+ refused$")
        self.assertRegex(str(error), r"900\.00 MiB in 1 allocation of 900\.00 MiB, made at .*makes_the_large_one from ")
        self.assertNotIn("names the lines", str(error))

    def test_the_log_has_one_warning_for_each_shortage(self) -> None:
        from cushion import _log

        _log.enable(True)
        self.cushion.on_shortage(lambda *_: 1 // 0)
        self.fill()
        with self.assertLogs("cushion", "WARNING") as logs:
            self.refused()
        (line,) = logs.output
        self.assertIn("100.00 MiB for thread 1", line)
        self.assertIn("ZeroDivisionError", line)
        _log.enable(False)
        with self.assertNoLogs("cushion", "WARNING"):
            self.refused()

    def test_figures(self) -> None:
        held = [self.fill()]
        self.refused()
        self.cushion.on_shortage(lambda *_: held and self.engine.deallocate(held.pop()))
        self.engine.allocate(600 * MIB)
        stats = self.cushion.stats()
        self.assertEqual((stats["shortages"], stats["shortages_survived"], stats["shortages_refused"]), (2, 1, 1))
        self.assertGreater(stats["shortage_seconds"], 0)
        self.assertEqual((stats["waiting"], stats["spilled_bytes"], stats["receipts_lost"]), (0, 0, 0))


def write_receipts(path: str) -> None:
    import cushion
    from cushion import _cushion

    cushion.simulate("1GiB")
    for device in (0, 1):
        with contextlib.suppress(MemoryError):
            _cushion.allocate(2 * GIB, device)


class ReceiptFile(unittest.TestCase):
    changes = {"LD_PRELOAD": None, "LD_LIBRARY_PATH": None}

    def test_the_variable_names_a_file(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "receipts.jsonl")
            for _ in range(2):
                support.call(write_receipts, path, changes={**self.changes, "CUSHION_RECEIPTS": path}, warm=False)
            lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
            self.assertEqual([(it["device"], it["number"]) for it in lines], [(0, 1), (1, 1)] * 2)
            self.assertEqual({it["outcome"] for it in lines}, {"never_fits"})

    def test_a_file_that_cannot_be(self) -> None:
        changes = {**self.changes, "CUSHION_RECEIPTS": "/nowhere/at/all"}
        with self.assertRaisesRegex(AssertionError, "receipts cannot be written to /nowhere/at/all: No such file"):
            support.call(write_receipts, "", changes=changes, warm=False)


class Budgets(Simulated):
    def test_a_block_waits_for_nobody(self) -> None:
        with self.another_holds(900 * MIB) as let_go:
            with self.cushion.budget(ms=0):
                receipt = self.refused(500 * MIB).receipt
                self.assertEqual([it.ended for it in receipt.tried if it.rung == "wait"], ["time_is_up"])
                self.assertNotIn("waited", str(receipt))
            let_go_soon = threading.Timer(0.1, let_go.set)
            let_go_soon.start()
            self.engine.allocate(500 * MIB)
            self.assertEqual(self.cushion.receipts()[-1].survived_by, "wait")

    def test_rungs_that_are_left_out(self) -> None:
        called: list[object] = []
        self.cushion.on_shortage(lambda *_: called.append(1))
        self.fill()
        with self.cushion.budget(skip=["callbacks"]), self.cushion.budget(skip="wait"):
            error = self.refused()
        off = [it.rung for it in error.receipt.tried if it.ended == "off"]
        self.assertEqual((off, called), (["callbacks", "wait"], []))
        self.assertIn("maybe enough: callbacks, wait", str(error))
        # Not for what can never fit.
        with self.cushion.budget(skip=["callbacks"]):
            self.assertNotIn("maybe enough", str(self.refused(2 * GIB)))
        self.refused()
        self.assertEqual(called, [1])

    def test_blocks_inside_each_other_and_around_functions(self) -> None:
        read = self.engine.wishes
        once = self.cushion.budget(ms=7)

        @self.cushion.budget(ms=250, skip=["spill"])
        def work(depth: int) -> tuple[float | None, list[str]]:
            return work(depth - 1) if depth else read()

        with self.cushion.budget(ms=10), once, once:
            with self.cushion.budget(skip=["poll"]):
                self.assertEqual(work(2), (250, ["poll", "spill"]))
            with self.assertRaises(ZeroDivisionError), self.cushion.budget(ms=3):
                1 // 0  # noqa: B018
            self.assertEqual(read()[0], 7)
        self.assertEqual(read(), (None, []))
        with self.assertRaisesRegex(ValueError, "there is no rung `roof`"), self.cushion.budget(skip=["roof"]):
            pass
        with self.assertRaisesRegex(TypeError, "does its work after it has returned"):

            @self.cushion.budget(ms=0)
            async def later() -> None: ...

        for bad in (-1, float("nan")):
            with self.assertRaisesRegex(ValueError, "milliseconds"), self.cushion.budget(ms=bad):
                pass
        self.assertEqual(read(), (None, []))

    def test_tasks_that_take_turns(self) -> None:
        async def main() -> None:
            first_is_in, second_is_in, first_is_out = asyncio.Event(), asyncio.Event(), asyncio.Event()

            async def first() -> None:
                with self.cushion.budget(ms=0):
                    first_is_in.set()
                    await second_is_in.wait()
                first_is_out.set()

            async def second() -> None:
                await first_is_in.wait()
                with self.cushion.budget(ms=5000):
                    second_is_in.set()
                    await first_is_out.wait()
                    self.assertEqual(self.engine.wishes()[0], 5000)

            await asyncio.gather(first(), second())

        asyncio.run(main())
        self.assertEqual(self.engine.wishes(), (None, []))


class Injected(Simulated):
    def test_from_now_on_and_for_a_block(self) -> None:
        self.cushion.inject("nth=2")
        self.engine.allocate(MIB)
        error = self.refused(MIB)
        self.assertTrue(error.receipt.injected)
        self.assertIn("made up", str(error))
        self.engine.allocate(MIB)
        with self.cushion.inject("over=10MiB"):
            self.engine.allocate(MIB)
            self.refused(10 * MIB)
        # What was in force before is again, and counts from the beginning.
        self.engine.allocate(10 * MIB)
        self.refused(10 * MIB)
        # Settings that say nothing of it leave it.
        self.cushion.inject("nth=1")
        self.engine.start(self.engine.gather_settings({}))
        self.refused(MIB)
        self.cushion.inject(None)
        self.engine.allocate(10 * MIB)
        with self.assertRaisesRegex(ValueError, "`soon` is no rule for injected failures"):
            self.cushion.inject("soon")

    @support.process(CUSHION_INJECT="nth=1")
    def test_by_the_variable_on_every_device(self) -> None:
        for device in (0, 1):
            with self.assertRaises(self.cushion.OutOfMemoryError):
                self.engine.allocate(MIB, device)
            self.engine.allocate(MIB, device)

    @support.process(CUSHION_INJECT="nth=1")
    def test_the_variable_can_be_undone_before_the_first_allocation(self) -> None:
        self.cushion.inject(None)
        self.engine.allocate(MIB)

    @support.process(CUSHION_INJECT="sometimes")
    def test_a_bad_variable(self) -> None:
        with self.assertRaisesRegex(RuntimeError, "CUSHION_INJECT: `sometimes` is no rule"):
            self.engine.allocate(MIB)
        with self.assertRaisesRegex(ValueError, "CUSHION_INJECT"):
            self.cushion.install()


class Futures(Simulated):
    def test_served_when_there_is_memory(self) -> None:
        with self.another_holds(900 * MIB) as let_go:
            future = self.cushion.alloc_future("500MiB")
            while self.cushion.stats()["waiting"] != 1:
                pass
            self.assertFalse(future.done())
            let_go.set()
            memory = future.result(60)
        self.assertEqual((memory.nbytes, memory.device), (500 * MIB, 0))
        self.assertEqual(self.engine.device_of(memory.address), 0)
        self.assertEqual(self.engine.memory_stats(0)["allocated_bytes"]["all"]["current"], 500 * MIB)
        del memory, future
        gc.collect()
        self.assertEqual(self.engine.memory_stats(0)["allocated_bytes"]["all"]["current"], 0)

    def test_refused(self) -> None:
        self.fill()
        error = self.cushion.alloc_future(MIB).exception(60)
        self.assertIs(type(error), self.cushion.OutOfMemoryError)
        self.assertEqual(error.receipt.requested, MIB)
        with self.assertRaises(ValueError):
            self.cushion.alloc_future("a lot")

    def test_inside_of_a_callback(self) -> None:
        held, got = [self.fill()], []

        def makes_room(*_: object) -> None:
            got.append(self.cushion.alloc_future(MIB).exception(60))
            self.engine.deallocate(held.pop())
            got.append(self.cushion.alloc_future(MIB).result(60))

        self.cushion.on_shortage(makes_room)
        # On the thread of futures itself, which must not wait for itself.
        self.cushion.alloc_future("500MiB").result(60)
        self.assertIs(type(got[0]), self.cushion.OutOfMemoryError)
        self.assertEqual(got[1].nbytes, MIB)

    def test_cancelled(self) -> None:
        with self.another_holds(900 * MIB):
            future = self.cushion.alloc_future(500 * MIB)
            while self.cushion.stats()["waiting"] != 1:
                pass
            self.assertTrue(future.cancel())
            done, _ = concurrent.futures.wait([future], 60)
            self.assertEqual(done, {future})
            while self.cushion.stats()["waiting"] != 0:
                pass
            self.assertTrue(future.cancelled())
        (receipt,) = self.cushion.receipts()
        self.assertEqual(receipt.outcome, "given_up")
        done = self.cushion.alloc_future(MIB)
        done.result(60)
        self.assertFalse(done.cancel())

    def test_in_the_order_of_asking(self) -> None:
        order: list[int] = []
        with self.another_holds(900 * MIB) as let_go:
            futures = []
            for number in range(4):
                futures.append(self.cushion.alloc_future("800MiB"))
                while self.cushion.stats()["waiting"] != number + 1:
                    pass

                def note(future: Any, number: int = number) -> None:
                    order.append(number)
                    # Given back at once, so that the next can be served.
                    address = future.result()._address
                    future.result()._address = 0
                    self.engine.deallocate(address)

                futures[-1].add_done_callback(note)
            let_go.set()
            for future in futures:
                future.result(60)
        self.assertEqual(order, [0, 1, 2, 3])

    def test_await(self) -> None:
        async def main() -> None:
            kept = await self.cushion.alloc_async("600MiB")
            with self.another_holds(300 * MIB) as let_go:
                waits = asyncio.create_task(self.cushion.alloc_async("200MiB"))
                gives_up = asyncio.create_task(self.cushion.alloc_async("200MiB"))
                while self.cushion.stats()["waiting"] != 2:
                    await asyncio.sleep(0)
                gives_up.cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await gives_up
                let_go.set()
                self.assertEqual((await waits).nbytes, 200 * MIB)
            del kept

        asyncio.run(main())
        while self.cushion.stats()["waiting"] != 0:
            pass

    def test_a_thousand_cancelled_or_served_leave_nothing(self) -> None:
        for number in range(1000):
            future = self.cushion.alloc_future(64 * MIB)
            if number % 2:
                future.cancel()
            else:
                future.result(60)
        del future
        # Those that were cancelled too late went back when nobody wanted them.
        while self.engine.memory_stats(0)["allocated_bytes"]["all"]["current"]:
            gc.collect()
        self.assertEqual(self.cushion.stats()["waiting"], 0)

    def test_at_the_end_of_python(self) -> None:
        program = (
            "import cushion\ncushion.simulate('1GiB')\nkept = cushion.alloc_future('900MiB').result()\n"
            "waits = [cushion.alloc_future('500MiB') for _ in range(5)]\nprint('end')"
        )
        done = support.python("-c", program, changes=self.changes)
        self.assertEqual((done.returncode, done.stdout), (0, "end\n"), done.stderr)

    def test_prefetch(self) -> None:
        self.cushion.prefetch("500MiB")
        misses = self.cushion.stats()["misses"]
        self.assertEqual(self.cushion.stats()["cached_bytes"], 500 * MIB)
        self.engine.allocate(500 * MIB)
        self.assertEqual(self.cushion.stats()["misses"], misses)
        with self.assertRaises(self.cushion.OutOfMemoryError):
            self.cushion.prefetch("2GiB")
        with self.assertRaises(ValueError):
            self.cushion.prefetch("many")


if __name__ == "__main__":
    unittest.main()
