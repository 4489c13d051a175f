"""A simulated device for tests of shortages, without PyTorch and without a GPU."""

from __future__ import annotations

import contextlib
import threading
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
        """Allocates all memory."""
        return self.engine.allocate(GIB)

    def refused(self, size: int = 100 * MIB) -> Any:
        """Makes an allocation that is refused, and returns the exception."""
        with self.assertRaises(self.cushion.OutOfMemoryError) as raised:
            self.engine.allocate(size)
        return raised.exception

    @contextlib.contextmanager
    def another_holds(self, size: int) -> Any:
        """Lets another thread hold memory inside the block. It frees the memory on request, or at the end."""
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
