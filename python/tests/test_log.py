"""The logger `cushion`: shortages reach the program's own logging, and standard error with `enable_logging`, once."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import unittest
from typing import Any
from unittest import mock

import support
from simulated import Simulated
from support import GIB, MIB, TorchCase, in_threads

SHORTAGE = "100.00 MiB for thread 1"


class Listening(Simulated):
    """Without PyTorch and without `enable_logging`."""

    def setUp(self) -> None:
        super().setUp()
        self.fill()
        self.root = io.StringIO()

    def configure(self, **changes: Any) -> None:
        form = "%(name)s %(levelname)s %(message)s"
        logging.basicConfig(**{"stream": self.root, "format": form, "force": True, **changes})

    def lines(self) -> list[str]:
        """Returns the new messages in the program's own log."""
        lines = self.root.getvalue().splitlines()
        self.root.truncate(0)
        self.root.seek(0)
        return lines

    def test_the_program_s_own_log_gets_every_shortage(self) -> None:
        self.configure()
        self.refused()
        (line,) = self.lines()
        self.assertRegex(line, rf"^cushion WARNING shortage 1 on device 0: {SHORTAGE}, refused")
        self.refused()
        self.assertEqual(len(self.lines()), 1)

    def test_a_shortage_that_was_served(self) -> None:
        self.configure()
        device, held = 1, []
        held.append(self.engine.allocate(GIB, device))
        self.cushion.on_shortage(lambda *_: held and self.engine.deallocate(held.pop()))
        self.engine.allocate(100 * MIB, device)
        (line,) = self.lines()
        self.assertRegex(line, rf"shortage 1 on device 1: {SHORTAGE}, survived by callbacks")

    def test_handlers_added_later_get_later_shortages(self) -> None:
        self.refused()
        self.configure()
        self.refused()
        self.assertEqual(len(self.lines()), 1)
        logging.getLogger().handlers.clear()
        self.refused()
        self.assertEqual(self.lines(), [])

    def test_handlers_and_levels_that_exclude_warnings(self) -> None:
        logger = logging.getLogger("cushion")
        self.configure(level=logging.DEBUG)
        for silence, again in (
            (lambda: logger.setLevel(logging.ERROR), lambda: logger.setLevel(logging.NOTSET)),
            (lambda: setattr(logger, "disabled", True), lambda: setattr(logger, "disabled", False)),
            (lambda: setattr(logger, "propagate", False), lambda: setattr(logger, "propagate", True)),
            (lambda: logging.disable(logging.WARNING), lambda: logging.disable(logging.NOTSET)),
            (lambda: logging.root.handlers[0].setLevel(40), lambda: logging.root.handlers[0].setLevel(0)),
        ):
            silence()
            self.refused()
            self.assertEqual(self.lines(), [])
            again()
            self.refused()
            self.assertEqual(len(self.lines()), 1)

    def test_without_handlers_nothing_is_written_or_parsed(self) -> None:
        from cushion import _log

        err = io.StringIO()
        with contextlib.redirect_stderr(err), mock.patch.object(_log, "from_json", side_effect=AssertionError):
            self.refused()
        self.assertEqual(err.getvalue(), "")

    def test_on_a_thread_that_python_did_not_start(self) -> None:
        """The thread of futures is one."""
        self.configure()
        self.engine.configure("wait_ms:50")
        with self.assertRaises(MemoryError):
            self.cushion.alloc_future("100MiB").result(60)
        (line,) = self.lines()
        self.assertIn("100.00 MiB", line)

    def test_a_handler_that_is_short_of_memory_itself(self) -> None:
        """Its own shortage is logged inside the message of the first, on the same thread, without a deadlock."""

        class Hungry(logging.Handler):
            depth = 0

            def emit(handler, record: logging.LogRecord) -> None:
                handler.depth += 1
                if handler.depth == 1:
                    self.refused(200 * MIB)
                told.append(record.getMessage())

        told: list[str] = []
        logging.getLogger().addHandler(Hungry())
        self.refused()
        self.assertEqual(len(told), 2)
        self.assertIn("200.00 MiB", told[0])
        self.assertIn("100.00 MiB", told[1])

    def test_a_handler_that_fails_does_not_end_the_request(self) -> None:
        class Broken(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                raise OSError("the disk is full")

        logging.getLogger().addHandler(Broken())
        with contextlib.redirect_stderr(io.StringIO()):
            self.refused()

    def test_shortages_on_many_threads_while_others_log(self) -> None:
        self.configure()
        logger = logging.getLogger("program")

        def work() -> None:
            for _ in range(20):
                with self.assertRaises(MemoryError), self.cushion.budget(0):
                    self.engine.allocate(100 * MIB)
                logger.warning("at work")

        in_threads([work] * 4)
        lines = self.lines()
        self.assertEqual((len(lines), sum("at work" in line for line in lines)), (160, 80))

    def test_at_the_shutdown_of_python(self) -> None:
        """Shortages while Python shuts down are refused as usual, and logged until the shutdown begins."""
        program = """
import atexit, cushion, logging, sys
logging.basicConfig(stream=sys.stdout, format="%(message)s")
def short():
    try:
        cushion._cushion.allocate(2 << 30)
    except BaseException as error:
        return type(error).__name__
class Last:
    def __del__(self, short=short, write=sys.stdout.write):
        write(f"{short()} at the very end\\n")
atexit.register(lambda: print(short(), "at exit"))
cushion.simulate("1GiB")
last = Last()
short()
"""
        done = support.python("-c", program, changes=self.changes)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stderr, "")
        first, second, at_exit, end = done.stdout.splitlines()
        self.assertRegex(first, "^shortage 1 on device 0: 2.00 GiB")
        self.assertRegex(second, "^shortage 2 on device 0: 2.00 GiB")
        self.assertEqual(at_exit, "OutOfMemoryError at exit")
        # The class may be gone by then; its base class is raised instead.
        self.assertRegex(end, "^(OutOf)?MemoryError at the very end$")


class Asked(TorchCase):
    """`enable_logging=True`: each message is on standard error once, whatever the program's own logging does."""

    policy = "paged"

    def setUp(self) -> None:
        self.err = sys.stderr = io.StringIO()
        self.addCleanup(setattr, sys, "stderr", sys.__stderr__)

    def said(self, torch: Any) -> list[str]:
        """Returns what a shortage writes to standard error."""
        self.err.truncate(0)
        self.err.seek(0)
        with self.assertRaises(torch.cuda.OutOfMemoryError):
            torch.empty(64 * GIB, dtype=torch.uint8, device="cuda")
        return self.err.getvalue().splitlines()

    def test_by_itself(self) -> None:
        torch = self.install(enable_logging=True)
        (line,) = self.said(torch)
        self.assertRegex(line, r"^cushion: shortage 1 on device 0: 64\.00 GiB")

    def test_beside_a_log_on_standard_error(self) -> None:
        import cushion

        logging.basicConfig(format="theirs: %(message)s")
        torch = self.install()
        (line,) = self.said(torch)
        self.assertTrue(line.startswith("theirs: shortage 1"), line)
        cushion.install(enable_logging=True)
        (line,) = self.said(torch)
        self.assertTrue(line.startswith("theirs: shortage 2"), line)
        # The program's handler does not show warnings any more, so Cushion's does.
        logging.getLogger().handlers[0].setLevel(logging.ERROR)
        (line,) = self.said(torch)
        self.assertTrue(line.startswith("cushion: shortage 3"), line)
        cushion.install(enable_logging=False)
        self.assertEqual(self.said(torch), [])

    def test_beside_a_log_elsewhere(self) -> None:
        file = io.StringIO()
        logging.basicConfig(stream=file, format="%(levelname)s %(message)s")
        torch = self.install(enable_logging=True)
        (line,) = self.said(torch)
        self.assertTrue(line.startswith("cushion: shortage 1"), line)
        installed, shortage = file.getvalue().splitlines()
        self.assertRegex(installed, "^INFO cushion .* installed: policy paged")
        self.assertRegex(shortage, "^WARNING shortage 1 on device 0")

    def test_beside_a_log_on_the_first_standard_error(self) -> None:
        """Notebooks and progress bars replace sys.stderr by an object that writes to the original one."""
        torch = self.install(enable_logging=True)
        with mock.patch.object(sys, "__stderr__", io.StringIO()):
            logging.basicConfig(stream=sys.__stderr__, format="%(message)s")
            self.assertEqual(self.said(torch), [])
            self.assertEqual(sys.__stderr__.getvalue().count("shortage 1"), 1)  # type: ignore[union-attr]

    def test_the_present_standard_error(self) -> None:
        torch = self.install(enable_logging=True)
        self.assertEqual(len(self.said(torch)), 1)
        before, self.err = self.err, io.StringIO()
        before.close()
        sys.stderr = self.err
        self.assertEqual(len(self.said(torch)), 1)

    def test_without_standard_error(self) -> None:
        torch = self.install(enable_logging=True)
        sys.stderr = None  # type: ignore[assignment]
        self.assertEqual(self.said(torch), [])


if __name__ == "__main__":
    unittest.main()
