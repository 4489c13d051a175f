"""Steps that run again when memory runs out: released memory, decorators and counts."""

from __future__ import annotations

import asyncio
import gc
import unittest
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import support  # puts the package under test on the path
from steps import Card, Held, Rows, caught, difference, failing, frames
from support import MIB, StandinCase, in_threads

import cushion
from cushion import _cushion, _known, _receipts


class Running(unittest.TestCase):
    def test_a_step_that_succeeds_runs_once(self) -> None:
        step = mock.Mock(return_value=7, spec=[])
        self.assertEqual(cushion.retry(step, 1, key=2), 7)
        step.assert_called_once_with(1, key=2)

    def test_a_step_without_arguments(self) -> None:
        step = mock.Mock(return_value=7, spec=[])
        self.assertEqual(cushion.retry(step), 7)
        step.assert_called_once_with()

    def test_runs_again(self) -> None:
        self.assertEqual(cushion.retry(failing(2)), "done")

    def test_tries_are_bounded(self) -> None:
        for tries in (1, 3, 5):
            step = mock.Mock(side_effect=MemoryError("CUDA out of memory."), spec=[])
            with self.assertRaises(MemoryError):
                cushion.retry(step, tries=tries)
            self.assertEqual(step.call_count, tries)

    def test_the_last_error_is_raised_unchanged(self) -> None:
        errors = [MemoryError(f"CUDA out of memory. {number}") for number in range(3)]
        with self.assertRaises(MemoryError) as raised:
            cushion.retry(mock.Mock(side_effect=errors, spec=[]))
        self.assertIs(raised.exception, errors[2])
        self.assertEqual(str(raised.exception), "CUDA out of memory. 2")

    @unittest.skipUnless(hasattr(BaseException, "add_note"), "Python 3.11 and later have notes")
    def test_the_last_error_has_a_note(self) -> None:
        with self.assertRaises(MemoryError) as raised:
            cushion.retry(failing(9))
        (note,) = raised.exception.__notes__  # type: ignore[attr-defined]
        self.assertTrue(note.startswith("cushion.retry: 3 tries, the last in 1 part; no more are allowed"), note)
        with self.assertRaises(MemoryError) as raised:
            cushion.retry(Card(0).step, Rows(range(5)), split=cushion.split_batch, combine=sum)
        (note,) = raised.exception.__notes__  # type: ignore[attr-defined]
        self.assertEqual(note, "cushion.retry: 4 tries, the last in 5 parts; a part cannot be made smaller")

    def test_the_last_error_keeps_its_traceback(self) -> None:
        def deep() -> None:
            raise MemoryError

        def step() -> None:
            deep()

        error = caught(MemoryError, lambda: cushion.retry(step))
        self.assertEqual([frame.f_code.co_name for frame in frames(error)][-2:], ["step", "deep"])

    def test_other_errors_are_raised_at_once(self) -> None:
        for kind in (ValueError, RuntimeError, KeyboardInterrupt, SystemExit, GeneratorExit):
            with self.subTest(kind.__name__):
                error = kind("something else")
                seen = []

                def step(rows: Rows) -> None:
                    held = "still here"
                    seen.append(1)
                    raise error

                reset = mock.Mock()
                split = {"split": cushion.split_batch, "combine": list}
                raised = caught(kind, lambda: cushion.retry(step, Rows(range(2)), reset=reset, **split))
                self.assertIs(raised, error)
                self.assertEqual(seen, [1])
                reset.assert_not_called()
                self.assertEqual(frames(raised)[-1].f_locals["held"], "still here")
                self.assertFalse(hasattr(error, "__notes__"))

    def test_another_error_in_a_later_try_is_raised(self) -> None:
        step = mock.Mock(side_effect=[MemoryError(), ValueError("no")], spec=[])
        before = cushion.retry_stats()
        with self.assertRaisesRegex(ValueError, "no"), self.assertLogs("cushion", "WARNING") as logs:
            cushion.retry(step)
        self.assertEqual(difference(before), {"calls": 1, "tries": 2, "retried": 1})
        self.assertIn("failed otherwise: 2 tries", logs.output[0])

    def test_reset_is_called_before_each_try_except_the_first(self) -> None:
        order: list[str] = []
        again = failing(2)

        def step() -> None:
            order.append("step")
            again()

        cushion.retry(step, reset=lambda: order.append("reset"))
        self.assertEqual(order, ["step", "reset", "step", "reset", "step"])

    def test_reset_is_not_called_when_it_gives_up(self) -> None:
        reset = mock.Mock()
        with self.assertRaises(MemoryError):
            cushion.retry(failing(9), tries=1, reset=reset)
        reset.assert_not_called()

    def test_nested(self) -> None:
        again = failing(4)
        calls: list[str] = []

        def inner() -> str:
            calls.append("inner")
            return str(again())

        def outer() -> str:
            calls.append("outer")
            return cushion.retry(inner)

        self.assertEqual(cushion.retry(outer), "done")
        self.assertEqual(calls, ["outer", "inner", "inner", "inner", "outer", "inner", "inner"])

    def test_logs_nothing_without_a_shortage(self) -> None:
        with self.assertNoLogs("cushion"), mock.patch.object(gc, "collect") as collect:
            cushion.retry(lambda: None)
        collect.assert_not_called()

    def test_logs_the_lost_time_once(self) -> None:
        with self.assertLogs("cushion", "WARNING") as logs:
            cushion.retry(Card(2).step, Rows(range(8)), split=cushion.split_batch, combine=sum)
        (line,) = logs.output
        text = r"Card.step ran out of memory, and is done: 3 tries, the last in 4 parts; 0\.\d{3} s were lost"
        self.assertRegex(line, text)
        with self.assertLogs("cushion", "WARNING") as logs, self.assertRaises(MemoryError):
            cushion.retry(failing(9))
        (line,) = logs.output
        self.assertRegex(line, r"step ran out of memory, and gave up: 3 tries, the last in 1 part; ")

    def test_reports_the_refusal_to_the_engine(self) -> None:
        said: list[Any] = []
        with (
            mock.patch.object(_cushion, "expect_refusals", lambda expected: said.append(expected)),
            mock.patch.object(_receipts, "refuse_after_all", lambda text: said.append(text)),
        ):
            cushion.retry(failing(2))
            self.assertEqual(said, [True, False])
            with self.assertRaises(MemoryError):
                cushion.retry(failing(9))
            self.assertEqual(said[2:], [True, False, "CUDA out of memory."])
            with self.assertRaises(ZeroDivisionError):
                cushion.retry(lambda: 1 / 0)
            self.assertEqual(said[5:], [True, False])

    def test_invalid_arguments(self) -> None:
        for why, call in (
            ("step is 5", lambda: cushion.retry(5)),  # type: ignore[call-overload]
            ("split is 2", lambda: cushion.retry(print, split=2)),  # type: ignore[call-overload]
            ("reset is 'now'", lambda: cushion.retry(print, reset="now")),  # type: ignore[call-overload]
            ("grads is 5", lambda: cushion.retry(print, grads=5)),
            ("without split=", lambda: cushion.retry(print, loss="mean")),
            ("without split=", lambda: cushion.retry(print, weight=len)),
            ("without split=", lambda: cushion.retry(print, combine=sum)),
            ("give one", lambda: cushion.retry(print, local=True, group="world")),
            ("the step comes first", lambda: cushion.retry(None, 1)),  # type: ignore[call-overload]
            ("the step comes first", lambda: cushion.retry(spilt=1)),  # type: ignore[call-overload]
        ):
            with self.assertRaisesRegex(TypeError, why):
                call()
        with self.assertRaisesRegex(ValueError, "tries is 0"):
            cushion.retry(print, tries=0)

    def test_lazy_functions_are_refused(self) -> None:
        async def later() -> None: ...

        def one_by_one() -> Iterator[int]:
            yield 1

        async def both() -> Any:
            yield 1

        for step in (later, one_by_one, both, lambda: later()):
            with self.assertRaisesRegex(TypeError, "plain function"):
                cushion.retry(step)
        for step in (later, one_by_one, both):
            with self.assertRaisesRegex(TypeError, "plain function"):
                cushion.retry()(step)

        async def program() -> Any:
            return cushion.retry(failing(1))

        self.assertEqual(asyncio.run(program()), "done")


class LettingGo(unittest.TestCase):
    """Objects of a failed try are freed before the next begins, without the garbage collector if possible."""

    def gone(self, fail: Callable[[Held], None], collector: bool = False) -> None:
        seen: list[Any] = []

        def step() -> None:
            if seen:
                seen.append(seen[0]())
                return
            held = Held()
            seen.append(weakref.ref(held))
            fail(held)

        gc.disable()
        self.addCleanup(gc.enable)
        with mock.patch.object(gc, "collect", gc.collect if collector else lambda: 0):
            cushion.retry(step)
        self.assertEqual(seen[1:], [None])

    def test_objects_in_frames(self) -> None:
        def fail(held: Held) -> None:
            raise MemoryError

        self.gone(fail)

    def test_objects_in_frames_of_a_context(self) -> None:
        kept: list[ValueError] = []

        def fail(held: Held) -> None:
            try:
                self.log(kept, held)
            except ValueError:
                raise MemoryError  # noqa: B904

        self.gone(fail)
        self.assertIsNone(kept[0].__traceback__)

    def test_objects_in_frames_of_a_cause(self) -> None:
        kept: list[ValueError] = []

        def fail(held: Held) -> None:
            try:
                self.log(kept, held)
            except ValueError:
                pass
            raise MemoryError from kept[0]

        self.gone(fail)
        self.assertIsNone(kept[0].__traceback__)

    def log(self, kept: list[ValueError], held: Held) -> None:
        """Fails, and keeps the error, as code that reports errors later does."""
        try:
            raise ValueError
        except ValueError as error:
            kept.append(error)
            raise

    def test_objects_in_a_cycle(self) -> None:
        def fail(held: Held) -> None:
            held.itself = held  # type: ignore[attr-defined]
            raise MemoryError

        self.gone(fail, collector=True)

    def test_results_of_earlier_parts(self) -> None:
        kept: list[weakref.ref[Held]] = []
        alive: list[bool] = []

        def step(rows: Rows) -> Held:
            if len(rows.values) > 2:
                raise MemoryError
            if len(rows.values) == 2 and len(kept) == 1:
                raise MemoryError
            if len(rows.values) == 1:
                alive.append(kept[0]() is not None)
            result = Held()
            kept.append(weakref.ref(result))
            return result

        cushion.retry(step, Rows(range(4)), split=cushion.split_batch, combine=list)
        self.assertEqual(alive, [False] * 4)

    def test_objects_of_the_last_try_when_it_gives_up(self) -> None:
        seen: list[weakref.ref[Held]] = []

        def step(_given: Held) -> None:
            held = Held()
            seen.append(weakref.ref(held))
            raise MemoryError

        given = Held()
        seen_given = weakref.ref(given)
        gc.disable()
        self.addCleanup(gc.enable)
        try:
            cushion.retry(step, given)
        except MemoryError:
            # Inside `except`: the frames of the step are cleared, those of the caller are not.
            self.assertEqual([ref() for ref in seen], [None] * 3)
        del given
        self.assertIsNone(seen_given(), "the error and its frames hold each other")

    def test_frames_of_the_error_that_the_caller_handles_stay(self) -> None:
        def handled() -> None:
            held = "still here"
            raise KeyError("handled")

        try:
            handled()
        except KeyError as error:
            cushion.retry(failing(2))
            self.assertEqual(frames(error)[-1].f_locals, {"held": "still here"})
        else:
            self.fail("nothing was handled")


class Decorating(unittest.TestCase):
    def test_with_and_without_options(self) -> None:
        card = Card(2)

        @cushion.retry()
        def plain(value: int) -> int:
            """What it does."""
            return value + 1

        @cushion.retry(split=cushion.split_batch, combine=sum)
        def split(rows: Rows) -> int:
            return card.step(rows)

        self.assertEqual((plain(1), plain.__name__, plain.__doc__), (2, "plain", "What it does."))
        self.assertEqual(split(Rows(range(4))), 6)
        self.assertEqual(split.stats(), {"calls": 1, "retried": 1, "tries": 2, "split": 1, "gave_up": 0})
        self.assertEqual(plain.stats(), {"calls": 1, "retried": 0, "tries": 1, "split": 0, "gave_up": 0})

    def test_remembers_and_forgets(self) -> None:
        card = Card(2)

        @cushion.retry(split=cushion.split_batch, combine=sum)
        def step(rows: Rows) -> int:
            return card.step(rows)

        for _ in range(2):
            step(Rows(range(4)))
        self.assertEqual(card.seen, [4, 2, 2, 2, 2])
        card.seen.clear()
        step.forget()
        step(Rows(range(4)))
        self.assertEqual(card.seen, [4, 2, 2])

    def test_the_whole_is_tried_again_after_more_and_more_calls(self) -> None:
        card = Card(2)

        @cushion.retry(split=cushion.split_batch, combine=sum)
        def step(rows: Rows) -> int:
            return card.step(rows)

        first = _known.FIRST_PATIENCE
        for _ in range(first + 2 * first + 4 * first):
            step(Rows(range(4)))
        whole = [at for at, call in enumerate(self.calls(card.seen)) if call[0] == 4]
        self.assertEqual(whole, [0, first, 3 * first])
        # The shortage has passed: the next try of the whole fits, and later calls begin whole.
        card.room = 4
        card.seen.clear()
        for _ in range(10):
            step(Rows(range(4)))
        self.assertEqual(card.seen, [4] * 10)

    def calls(self, seen: list[int]) -> list[list[int]]:
        """Returns the rows of each part, grouped by calls of 4 rows."""
        left = list(seen)
        found = []
        while left:
            size = 3 if left[0] == 4 else 2
            found.append(left[:size])
            left = left[size:]
        return found

    def test_methods(self) -> None:
        class Trainer:
            def __init__(self) -> None:
                self.card = Card(2)

            @cushion.retry(split=cushion.split_batch, grads=())
            def step(self, rows: Rows, share: float = 1.0) -> float:
                self.card.step(rows)
                return share

        trainer = Trainer()
        self.assertEqual(trainer.step(Rows(range(4))), 1.0)
        self.assertEqual(trainer.card.seen, [4, 2, 2])
        self.assertEqual(trainer.step.stats()["split"], 1)  # type: ignore[attr-defined]


class Counting(unittest.TestCase):
    def test_counts(self) -> None:
        for expected, call in (
            ({"calls": 1, "tries": 1}, lambda: cushion.retry(lambda: None)),
            ({"calls": 1, "tries": 3, "retried": 1}, lambda: cushion.retry(failing(2))),
            ({"calls": 1, "tries": 3, "retried": 1, "gave_up": 1}, lambda: cushion.retry(failing(9))),
            ({"calls": 1, "tries": 1, "gave_up": 1}, lambda: cushion.retry(failing(9), tries=1)),
            ({"calls": 1, "tries": 1}, lambda: cushion.retry(lambda: 1 / 0)),
            (
                {"calls": 1, "tries": 3, "retried": 1, "gave_up": 1},
                lambda: cushion.retry(Card(0).step, Rows(range(4)), split=cushion.split_batch, combine=sum),
            ),
            (
                {"calls": 1, "tries": 3, "retried": 1, "split": 1},
                lambda: cushion.retry(Card(2).step, Rows(range(8)), split=cushion.split_batch, combine=sum),
            ),
        ):
            before = cushion.retry_stats()
            try:
                call()
            except (MemoryError, ZeroDivisionError):
                pass
            self.assertEqual(difference(before), expected)

    def test_from_many_threads(self) -> None:
        card = Card(4)
        results: list[int] = []
        before = cushion.retry_stats()

        @cushion.retry(split=cushion.split_batch, combine=sum)
        def step(rows: Rows) -> int:
            if len(rows.values) > 4:
                raise MemoryError
            return sum(rows.values)

        def work() -> None:
            for _ in range(50):
                results.append(step(Rows(range(16))))
                results.append(cushion.retry(card.step, Rows(range(16)), split=cushion.split_batch, combine=sum))

        in_threads([work] * 8)
        self.assertEqual(results, [sum(range(16))] * 800)
        counted = difference(before)
        self.assertEqual((counted["calls"], counted["split"]), (800, 800))
        self.assertEqual((step.stats()["calls"], step.stats()["split"]), (400, 400))


class Simulated(StandinCase):
    def test_memory_of_a_simulated_device(self) -> None:
        from cushion import _cushion

        cushion.simulate("64MiB")
        kept = [_cushion.allocate(40 * MIB)]

        def step() -> int:
            return _cushion.allocate(40 * MIB)

        with self.assertRaises(MemoryError):
            cushion.retry(step)
        address = cushion.retry(step, reset=lambda: kept and _cushion.deallocate(kept.pop()))
        _cushion.deallocate(address)
        self.assertEqual(cushion.retry_stats()["gave_up"], 1)


if __name__ == "__main__":
    unittest.main()
