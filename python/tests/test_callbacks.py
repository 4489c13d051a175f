"""Functions that the program registers for shortages, on simulated devices: callbacks and last calls."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import signal
import sys
import threading
import unittest
from typing import Any

import support
from simulated import Simulated
from support import GIB, MIB, in_threads


class Callbacks(Simulated):
    def test_a_callback_that_frees_serves_the_allocation(self) -> None:
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

    def test_callbacks_run_by_priority_until_there_is_enough(self) -> None:
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

    def test_errors_of_callbacks_are_recorded_and_do_not_end_the_request(self) -> None:
        self.fill()

        class Odd:
            def __str__(self) -> str:
                raise RuntimeError("no words")

        self.cushion.on_shortage(lambda *_: 1 // 0, priority=2)
        self.cushion.on_shortage(lambda *_: Odd(), priority=1)
        self.cushion.on_shortage(lambda *_: 42)
        error = self.refused()
        first, second, third = error.receipt.answers
        self.assertRegex(first.failed, r"^ZeroDivisionError: .* \(.*test_callbacks\.py:\d+\)$")
        self.assertRegex(second.failed, "RuntimeError: no words")
        self.assertEqual((third.said, third.failed), ("42", None))
        self.assertIn("ZeroDivisionError", str(error))
        self.assertEqual(len(self.cushion.receipts()), 1)

    def test_ctrl_c_in_a_callback_reaches_the_program(self) -> None:
        self.fill()
        # A process in the background may ignore the signal.
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
    def test_a_slow_callback_is_not_called_again(self) -> None:
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
        # Registered again with more time, it is called.
        self.cushion.on_shortage(slow, budget_ms=60_000)
        self.cushion.remove_callback(slow)
        patient: list[float] = []
        self.cushion.on_shortage(lambda *told: patient.append(told[2]), budget_ms=60_000)
        self.refused()
        self.assertTrue(50 < patient[0] <= 60)

    def test_a_callback_is_not_reentered(self) -> None:
        self.fill()
        calls: list[str] = []

        def asks(*_: object) -> None:
            calls.append(threading.current_thread().name)
            # Shortages of the callback itself, and of another thread.
            self.refused()
            thread = threading.Thread(target=self.refused, name="another")
            thread.start()
            thread.join()

        self.cushion.on_shortage(asks)
        self.refused()
        self.assertEqual(len(calls), 1)
        self.assertEqual(self.engine.stats()["shortages"], 3)

    def test_a_callback_may_allocate_free_and_empty_the_cache(self) -> None:
        held = [self.fill()]

        def busy(*_: object) -> None:
            self.engine.deallocate(held.pop())
            self.engine.empty_cache()
            held.append(self.engine.allocate(100 * MIB))

        self.cushion.on_shortage(busy)
        self.engine.allocate(900 * MIB)
        self.assertEqual(self.cushion.receipts()[-1].survived_by, "callbacks")

    def test_removed(self) -> None:
        self.fill()
        calls: list[object] = []

        class Many:
            """Objects that are equal, and not hashable."""

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
        with self.assertRaisesRegex(TypeError, "is not callable"):
            self.cushion.on_shortage(7)

    def test_a_destructor_may_remove_another_callback(self) -> None:
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

    def test_a_slow_callback_does_not_block_other_callbacks(self) -> None:
        held = [self.engine.allocate(900 * MIB)]
        slow_begins, go_on = threading.Event(), threading.Event()

        def slow(*_: object) -> None:
            if not slow_begins.is_set():
                slow_begins.set()
                go_on.wait(60)

        self.cushion.on_shortage(slow, priority=1, budget_ms=60_000)
        # On the thread of futures, which Python did not start.
        future = self.cushion.alloc_future("800MiB")
        slow_begins.wait()
        self.cushion.on_shortage(lambda *_: held and self.engine.deallocate(held.pop()))
        self.engine.allocate(600 * MIB)
        self.assertEqual(self.cushion.receipts()[-1].survived_by, "callbacks")
        go_on.set()
        future.exception(60)

    def test_a_callback_that_was_not_called_is_not_switched_off(self) -> None:
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

    def test_every_device_calls_callbacks_also_devices_used_later(self) -> None:
        told: list[int] = []
        self.cushion.on_shortage(lambda device, *_: told.append(device))
        for device in (0, 3):
            self.engine.allocate(GIB, device)
            with self.assertRaises(MemoryError):
                self.engine.allocate(MIB, device)
        self.assertEqual(told, [0, 3])
        self.assertEqual([it.device for it in self.cushion.receipts()], [0, 3])
        self.assertEqual([it.device for it in self.cushion.receipts(3)], [3])

    def test_a_thread_that_cannot_get_the_gil_skips_callbacks(self) -> None:
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

        # First: such a thread can call Python.
        thread = threading.Thread(target=without_the_lock)
        thread.start()
        thread.join()
        self.assertEqual(len(called), 1)
        # Then another thread holds the GIL and waits for the thread, as C code that joins a thread does. Either of the
        # two may come first.
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
        self.assertIn("Python's lock was not free", self.cushion.receipts()[-1].answers[0].failed)


class LastCall(Simulated):
    def test_a_last_call_gets_the_receipt(self) -> None:
        self.fill()
        told: list[Any] = []

        @self.cushion.on_refusal
        def save(receipt: Any) -> None:
            told.append(receipt)
            # A refusal inside does not call it again.
            self.refused(200 * MIB)

        error = self.refused()
        (receipt,) = told
        self.assertEqual(receipt, error.receipt)
        self.assertEqual((receipt.outcome, receipt.requested), ("full", 100 * MIB))
        self.assertTrue(self.cushion.remove_callback(save))
        self.refused()
        self.assertEqual(len(told), 1)

    def test_an_error_in_a_last_call_is_shown_and_the_refusal_raised(self) -> None:
        self.fill()
        shown: list[Any] = []
        sys.unraisablehook = lambda caught: shown.append(caught.exc_value)

        @self.cushion.on_refusal
        def broken(_receipt: Any) -> None:
            raise OSError("the disk is full, too")

        self.refused()
        self.assertEqual([str(error) for error in shown], ["the disk is full, too"])

    def test_no_last_call_for_expected_refusals(self) -> None:
        self.fill()
        told: list[int] = []
        self.cushion.on_refusal(lambda receipt: told.append(receipt.number))
        self.engine.expect_refusals(True)
        error = self.refused()
        self.assertEqual(told, [])
        self.engine.expect_refusals(False)
        # The program gives up after all.
        self.engine.refuse_after_all(str(error))
        self.assertEqual(told, [1])
        self.refused()
        self.assertEqual(told, [1, 2])
        # A refusal that another thread expects is not expected on this thread.
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

    def test_last_calls_do_not_overlap(self) -> None:
        self.fill()
        at_once: list[int] = []
        inside: list[object] = []

        @self.cushion.on_refusal
        def save(_receipt: Any) -> None:
            inside.append(1)
            at_once.append(len(inside))
            threading.Event().wait(0.02)
            inside.pop()

        in_threads([self.refused] * 4)
        self.assertEqual(at_once, [1] * 4)

    def test_a_step_that_raises_its_own_error_after_a_refusal(self) -> None:
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

    def test_a_last_call_for_a_future(self) -> None:
        kept = self.engine.allocate(900 * MIB)
        told: list[Any] = []
        self.cushion.on_refusal(lambda _: told.append(self.cushion.alloc_future(MIB).result(60)))
        error = self.cushion.alloc_future("500MiB").exception(60)
        self.assertIs(type(error), self.cushion.OutOfMemoryError)
        self.assertEqual(told[0].nbytes, MIB)
        self.engine.deallocate(kept)

    def test_no_last_call_for_refusals_inside_a_callback(self) -> None:
        held, told = [self.fill()], []
        self.cushion.on_refusal(told.append)

        def tries_more(*_: object) -> None:
            self.refused(2 * GIB)
            self.engine.deallocate(held.pop())

        self.cushion.on_shortage(tries_more)
        self.engine.allocate(600 * MIB)
        self.assertEqual(told, [])

    def test_without_kept_receipts(self) -> None:
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


if __name__ == "__main__":
    unittest.main()
