"""Forks while other threads hold Cushion's locks: the child must not wait for such a lock. No PyTorch, no GPU."""

from __future__ import annotations

import os
import signal
import sys
import threading
import unittest
from collections.abc import Callable
from typing import Any

from simulated import Simulated
from support import MIB

CHILDREN = 150
# Seconds after which a child counts as hanging.
SECONDS = 20


class Forks(Simulated):
    def use(self) -> None:
        """Calls the functions that need no device."""
        engine = self.engine
        number = engine.add_callback(print, "a callback")
        engine.is_callback_on(number)
        engine.remove_callback(number)
        engine.remove_last_call(engine.add_last_call(print))
        engine.expect_refusals(True)
        engine.expect_refusals(False)
        engine.set_wishes(1.0, [])
        engine.set_metadata("of this thread")
        engine.metadata()
        engine.observe_receipts(None)
        engine.kept_notes()

    def in_children(self, act: Callable[[], Any], end: Callable[[int], Any]) -> None:
        stop, failures = threading.Event(), []

        def work() -> None:
            try:
                while not stop.is_set():
                    self.use()
                    self.engine.deallocate(self.engine.allocate(512))
            except BaseException as error:  # noqa: BLE001
                failures.append(error)

        workers = [threading.Thread(target=work) for _ in range(3)]
        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        for worker in workers:
            worker.start()
        try:
            for _ in range(CHILDREN):
                child = os.fork()
                if child == 0:
                    signal.alarm(SECONDS)
                    try:
                        act()
                    except BaseException:  # noqa: BLE001
                        os._exit(3)
                    end(0)
                self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)
        finally:
            stop.set()
            for worker in workers:
                worker.join()
            sys.setswitchinterval(before)
        self.assertEqual(failures, [])

    def test_a_child_can_call_functions_that_need_no_device(self) -> None:
        kept = self.engine.allocate(MIB)
        self.engine.record_memory_history("all", "all", 100, True, [])

        def act() -> None:
            for _ in range(3):
                self.use()
            self.engine.deallocate(kept)
            assert self.engine.memory_snapshot()["segments"] == []
            thread = threading.Thread(target=self.use)
            thread.start()
            thread.join()

        self.in_children(act, os._exit)
        self.engine.deallocate(kept)

    def test_a_child_can_exit(self) -> None:
        import ctypes

        self.engine.allocate(MIB)
        # The exit of the C library, with the thread-local state of each thread, and not Python's shutdown.
        self.in_children(self.use, ctypes.CDLL(None).exit)


if __name__ == "__main__":
    unittest.main()
