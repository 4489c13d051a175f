"""Forks while other threads hold Cushion's locks: the child must not wait for such a lock. No PyTorch, no GPU."""

from __future__ import annotations

import os
import threading
import unittest
from collections.abc import Callable

from simulated import Simulated
from support import MIB, fork_while


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
        engine.receipt_for("not a refusal")
        engine.refuse_after_all("not a refusal")
        engine.kept_notes()

    def in_children(self, act: Callable[[], object], end: Callable[[int], object] = os._exit) -> None:
        def work(_number: int) -> None:
            self.use()
            self.engine.deallocate(self.engine.allocate(512))

        fork_while(work, act, children=150, end=end)

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

        self.in_children(act)
        self.engine.deallocate(kept)

    def test_a_child_can_exit(self) -> None:
        import ctypes

        self.engine.allocate(MIB)
        # The exit of the C library, with the thread-local state of each thread, and not Python's shutdown.
        self.in_children(self.use, ctypes.CDLL(None).exit)


if __name__ == "__main__":
    unittest.main()
