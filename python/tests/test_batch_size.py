"""The largest batch size that fits: that it is exact, how many tries it takes, and that nothing stays allocated."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import inspect
import io
import random
import subprocess
import sys
import tempfile
import unittest
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import support  # puts the package under test on the path
from batch_sizes import Card, plain_probes
from simulated import Simulated
from steps import Held, caught, frames
from support import GIB, MIB

import cushion
from cushion import _batch_search


class Bracket(unittest.TestCase):
    """The search, with right and wrong guesses."""

    def search(self, start: int, limit: int | None, largest: int, guess: Callable[[int], int | None]) -> list[int]:
        """Runs a search, checks its answer, and returns the sizes that were tried."""
        bracket = _batch_search.Search(start, limit)
        tried: list[int] = []
        while not bracket.is_done:
            size = bracket.next(guess(bracket.fits))
            self.assertGreater(size, bracket.fits)
            self.assertTrue(bracket.fails is None or size < bracket.fails)
            self.assertTrue(limit is None or size <= limit)
            tried.append(size)
            bracket.tell(size, size <= largest)
        expected = largest if limit is None else min(largest, limit)
        self.assertEqual(bracket.fits, expected, (start, limit, largest))
        if expected != limit:
            self.assertEqual(bracket.fails, expected + 1)
        self.assertEqual(len(set(tried)), len(tried))
        return tried

    def cases(self) -> Iterator[tuple[int, int | None, int]]:
        for start in (1, 2, 3, 7, 8, 100, 128):
            for largest in (0, 1, 2, 3, 7, 8, 9, 15, 16, 50, 100, 127, 128, 129, 1000, 4097):
                for limit in (None, 1, 5, 64, 100, 4096):
                    yield start, limit, largest

    def test_without_guesses_it_doubles_and_bisects(self) -> None:
        for start, limit, largest in self.cases():
            tried = self.search(start, limit, largest, lambda _: None)
            self.assertEqual(len(tried), plain_probes(start, largest, limit), (start, limit, largest, tried))

    def test_right_guesses_take_few_tries(self) -> None:
        for start, limit, largest in self.cases():
            tried = self.search(start, limit, largest, lambda fits: largest if fits else None)
            self.assertLessEqual(len(tried), plain_probes(start, largest, limit), (start, limit, largest, tried))
        # Each size is 16 times the one before; then the answer, and the size after it.
        self.assertEqual(
            self.search(1, None, 4097, lambda fits: 4097 if fits else None), [1, 16, 256, 4096, 4097, 4098]
        )

    def test_wrong_guesses_cost_at_most_two_tries(self) -> None:
        chance = random.Random(1)
        wrong: list[Callable[[int, int], int | None]] = [
            lambda fits, largest: fits,
            lambda fits, largest: fits + 1,
            lambda fits, largest: 1 << 50,
            lambda fits, largest: 0,
            lambda fits, largest: largest - 1,
            lambda fits, largest: largest + 1,
            lambda fits, largest: largest * 9 // 10,
            lambda fits, largest: largest * 11 // 10 + 1,
            lambda fits, largest: chance.choice((None, chance.randrange(2 * largest + 2))),
        ]
        for start, limit, largest in self.cases():
            for number, guess in enumerate(wrong):
                tried = self.search(start, limit, largest, lambda fits, guess=guess, it=largest: guess(fits, it))
                most = plain_probes(start, largest, limit) + 2
                self.assertLessEqual(len(tried), most, (number, start, limit, largest, tried))


class Answers(unittest.TestCase):
    """Steps that use no device memory, so that there is nothing to predict from."""

    def test_exact(self) -> None:
        for start, largest, multiple_of, limit in (
            *((start, largest, 1, None) for start in (1, 8, 100) for largest in (1, 7, 8, 9, 100, 777)),
            (8, 100, 8, None),
            (1, 103, 8, None),
            (20, 103, 8, None),
            (8, 8, 8, None),
            (4096, 100, 16, None),
            (8, 100, 1, 64),
            (8, 100, 1, 100),
            (8, 100, 1, 101),
            (100, 1000, 1, 32),
            (8, 1000, 16, 100),
            (1, 1, 1, 1),
        ):
            with self.subTest(start=start, largest=largest, multiple_of=multiple_of, limit=limit):
                card = Card(largest)
                found = cushion.find_batch_size(card.step, start, multiple_of=multiple_of, limit=limit)
                most = largest if limit is None else min(largest, limit)
                self.assertEqual(found, most // multiple_of * multiple_of)
                self.assertIn(found, card.tried)
                if limit is None or found + multiple_of <= limit:
                    self.assertIn(found + multiple_of, card.tried)
                self.assertTrue(all(size % multiple_of == 0 for size in card.tried))
                in_multiples = [max(1, start // multiple_of), largest // multiple_of]
                plain = plain_probes(*in_multiples, None if limit is None else limit // multiple_of)
                self.assertEqual(len(card.tried), plain)

    def test_start_by_name(self) -> None:
        self.assertEqual(cushion.find_batch_size(Card(12).step, start=8), 12)
        self.assertEqual(cushion.find_batch_size(function=Card(12).step, start=8), 12)

    def test_raises_the_error_of_the_smallest_size(self) -> None:
        errors: list[BaseException] = []

        def fail() -> BaseException:
            errors.append(MemoryError(f"out {len(errors)}"))
            return errors[-1]

        card = Card(0, fail)
        error = caught(MemoryError, lambda: cushion.find_batch_size(card.step, 8))
        self.assertEqual(card.tried, [8, 4, 2, 1])
        self.assertIs(error, errors[-1])
        self.assertEqual(str(error), "out 3")
        # The traceback ends in the step.
        self.assertEqual(frames(error)[-1].f_code.co_name, "step")
        if hasattr(error, "add_note"):
            note = (
                "cushion.find_batch_size: Card.step does not fit with a batch size of 1, the smallest; tried 8, 4, 2, 1"
            )
            self.assertEqual(error.__notes__, [note])
        with self.assertRaises(MemoryError):
            cushion.find_batch_size(Card(31).step, 64, multiple_of=32)

    def test_other_errors_are_raised_at_once(self) -> None:
        for kind in (ValueError, KeyboardInterrupt, RuntimeError):
            card = Card(4, lambda kind=kind: kind("something else"))
            with self.assertRaisesRegex(kind, "something else"):
                cushion.find_batch_size(card.step, 1)
            self.assertEqual(card.tried, [1, 2, 4, 8])

    def test_frames_of_a_failed_try_are_cleared_before_the_next_size(self) -> None:
        left: list[weakref.ref[Held]] = []
        alive: list[int] = []

        def step(batch_size: int) -> Held:
            alive.append(sum(it() is not None for it in left))
            held = Held()
            left.append(weakref.ref(held))
            if batch_size > 5:
                try:
                    raise MemoryError("the first")
                except MemoryError as first:
                    # In a reference cycle, as objects that errors refer to often are.
                    error = MemoryError("the second")
                    held.error, held.itself = error, held  # type: ignore[attr-defined]
                    raise error from first
            return held

        gc.disable()
        self.addCleanup(gc.enable)
        self.assertEqual(cushion.find_batch_size(step, 2), 5)
        self.assertEqual(alive, [0] * len(alive))
        self.assertEqual(sum(it() is not None for it in left), 0)

    def test_the_error_that_the_caller_handles_is_not_cleared(self) -> None:
        held = Held()

        def fail() -> None:
            kept = held
            raise ValueError("the caller's")

        try:
            fail()
        except ValueError as error:
            self.assertEqual(cushion.find_batch_size(Card(3).step, 2), 3)
            self.assertIs(frames(error)[-1].f_locals["kept"], held)

    def test_a_step_that_always_fits_needs_a_limit(self) -> None:
        with mock.patch.object(_batch_search, "LARGEST", 1 << 10), self.assertRaisesRegex(RuntimeError, "limit="):
            cushion.find_batch_size(Card(1 << 60).step, 1)

    def test_each_size_gets_the_same_random_numbers(self) -> None:
        seen = []

        def step(batch_size: int) -> None:
            seen.append(random.random())
            if batch_size > 5:
                raise MemoryError

        random.seed(3)
        state = random.getstate()
        cushion.find_batch_size(step, 2)
        self.assertEqual(random.getstate(), state)
        self.assertEqual(len(set(seen)), 1)

    def test_invalid_arguments_are_refused(self) -> None:
        find: Any = cushion.find_batch_size

        async def later(batch_size: int) -> None: ...

        def yields(batch_size: int) -> Iterator[int]:
            yield batch_size

        step = Card(3).step
        for kind, text, call in (
            (TypeError, "callable", lambda: find(128)),
            (TypeError, "starting_batch_size", lambda: find(start=8)),
            (TypeError, "are for a decorated function", lambda: find(step, 8, starting_batch_size=8)),
            (TypeError, "are for a decorated function", lambda: find(step, 8, lambda: 4)),
            (TypeError, "limit= is an option of the search", lambda: find(step, limit=8)),
            (TypeError, "progress= is an option of the search", lambda: find(progress=True)),
            (TypeError, "whole number", lambda: find(step, 1.5)),
            (ValueError, "negative", lambda: find(step, -1)),
            (ValueError, "start is 0", lambda: find(step, 0)),
            (ValueError, "multiple_of is 0", lambda: find(step, 8, multiple_of=0)),
            (
                ValueError,
                "limit is 7, and the smallest size that is tried is 8",
                lambda: find(step, 8, multiple_of=8, limit=7),
            ),
            (TypeError, "group=", lambda: find(step, 8, group="world", local=True)),
            (TypeError, "find_batch_size: grads is 'no': it takes a module", lambda: find(step, 8, grads="no")),
            (TypeError, "find_batch_size: model is 'no': it takes a module", lambda: find(step, 8, model="no")),
            (TypeError, "async or a generator", lambda: find(later, 8)),
            (TypeError, "async or a generator", lambda: find(yields, 8)),
            (TypeError, "async or a generator", lambda: find(later)),
            (TypeError, "async or a generator", lambda: find(lambda size: yields(size), 8)),
            (TypeError, "remember= needs the model", lambda: find(step, 8, remember=True)),
        ):
            with self.subTest(text), self.assertRaisesRegex(kind, text):
                call()


class Device(Simulated):
    """On a simulated device, whose statistics guide the search."""

    def search(self, needed: Callable[[int], int], start: int, **options: Any) -> tuple[int, list[int]]:
        """Searches with a step that allocates twice; returns the answer and the sizes that were tried."""
        tried = []

        def step(batch_size: int) -> None:
            tried.append(batch_size)
            held = []
            try:
                held.append(self.engine.allocate(needed(batch_size) // 4))
                held.append(self.engine.allocate(needed(batch_size) - needed(batch_size) // 4))
            finally:
                for address in held:
                    self.engine.deallocate(address)

        return self.cushion.find_batch_size(step, start, **options), tried

    def live(self) -> int:
        return int(self.engine.memory_stats(0)["allocated_bytes"]["all"]["current"])

    def test_every_shape_of_memory(self) -> None:
        # Memory that the program has before the search.
        kept = self.engine.allocate(100 * MIB)
        for name, needed, most_probes in (
            ("linear", lambda size: size * MIB, 6),
            ("affine", lambda size: 300 * MIB + size * 777_777, 8),
            ("steps", lambda size: -(-size // 64) * 32 * MIB, 99),
            ("quadratic", lambda size: MIB + size * size * 1000, 99),
        ):
            largest = 1
            while self.fits(needed(largest + 1)):
                largest += 1
            for start in (1, 8, 100, 5000):
                with self.subTest(name, start=start):
                    found, tried = self.search(needed, start)
                    self.assertEqual(found, largest)
                    self.assertLessEqual({found, found + 1}, set(tried))
                    plain = plain_probes(start, largest)
                    self.assertLessEqual(len(tried), min(most_probes, plain + 2), tried)
                    self.assertEqual(self.live(), 100 * MIB)
        self.engine.deallocate(kept)

    def fits(self, size: int) -> bool:
        try:
            held = [self.engine.allocate(size // 4)]
        except MemoryError:
            return False
        try:
            held.append(self.engine.allocate(size - size // 4))
        except MemoryError:
            return False
        finally:
            for address in held:
                self.engine.deallocate(address)
            self.engine.empty_cache()
        return True

    def test_multiples_and_a_limit(self) -> None:
        self.assertEqual(self.search(lambda size: size * MIB, 8, multiple_of=48)[0], 1024 // 48 * 48)
        found, tried = self.search(lambda size: size * MIB, 8, limit=500)
        self.assertEqual((found, tried), (500, [8, 128, 500]))

    def test_the_memory_fraction_of_the_process_limits_the_search(self) -> None:
        self.engine.configure("per_process_memory_fraction:0.5")
        found, tried = self.search(lambda size: size * MIB, 8)
        self.assertEqual((found, tried), (512, [8, 128, 512, 513]))

    def test_injected_failures_predict_nothing(self) -> None:
        with self.cushion.inject("nth=3"):
            found, tried = self.search(lambda size: size * MIB, 8)
        # The injected failure came far below the memory of the device.
        self.assertEqual((found, tried), (127, [8, 128, 127]))

    def test_probes_neither_call_callbacks_nor_wait(self) -> None:
        asked = mock.Mock(return_value=None, spec=[])
        self.cushion.on_shortage(asked)
        with self.another_holds(500 * MIB):
            found, _ = self.search(lambda size: size * MIB, 8)
            self.assertEqual(found, 1024 - 500)
        asked.assert_not_called()
        receipts = self.cushion.receipts()
        self.assertGreater(len(receipts), 0)
        for receipt in receipts:
            ended = {it.rung: it.ended for it in receipt.tried}
            self.assertEqual({ended[rung] for rung in ("callbacks", "wait", "spill")}, {"off"}, ended)
        # The budget applies only to the search.
        self.assertEqual(self.engine.wishes(), (None, []))
        kept = self.fill()
        self.refused()
        asked.assert_called()
        self.engine.deallocate(kept)

    def test_last_calls_come_only_when_the_search_gives_up(self) -> None:
        last = mock.Mock(return_value=None, spec=[])
        self.cushion.on_refusal(last)
        self.search(lambda size: size * MIB, 8)
        last.assert_not_called()
        with self.assertRaises(self.cushion.OutOfMemoryError):
            self.search(lambda size: 2 * GIB, 8)
        self.assertEqual(last.call_count, 1)
        self.refused(2 * GIB)
        self.assertEqual(last.call_count, 2)

    # ---- training that restarts with a smaller size ----

    def test_training_restarts_with_the_predicted_size(self) -> None:
        tried = []

        @self.cushion.find_batch_size(starting_batch_size=4096)
        def training(batch_size: int) -> int:
            tried.append(batch_size)
            self.engine.deallocate(self.engine.allocate(batch_size * MIB))
            return batch_size

        with self.assertLogs("cushion", "WARNING") as logs:
            self.assertEqual(training(), 1024)
        self.assertEqual(tried, [4096, 1024])
        self.assertTrue(
            any("ran out of memory with a batch size of 4096, and restarts with 1024" in it for it in logs.output)
        )

    def test_training_calls_callbacks_as_usual(self) -> None:
        kept = [self.engine.allocate(600 * MIB)]

        def offload(*_: object) -> None:
            self.engine.deallocate(kept.pop())

        self.cushion.on_shortage(offload)

        @self.cushion.find_batch_size(starting_batch_size=1000)
        def training(batch_size: int) -> int:
            self.engine.deallocate(self.engine.allocate(batch_size * MIB))
            return batch_size

        self.assertEqual(training(), 1000)

    def test_training_that_gives_up_makes_last_calls_once(self) -> None:
        last = mock.Mock(return_value=None, spec=[])
        self.cushion.on_refusal(last)

        @self.cushion.find_batch_size
        def training(batch_size: int) -> None:
            self.engine.allocate(2 * GIB)

        with self.assertRaisesRegex(RuntimeError, "No executable batch size found, reached zero.") as raised:
            training()
        self.assertIsInstance(raised.exception.__cause__, self.cushion.OutOfMemoryError)
        self.assertEqual(last.call_count, 1)


class Decorator(unittest.TestCase):
    """The decorator that replaces Accelerate's. A RuntimeError stands for PyTorch's error here."""

    def error(self) -> BaseException:
        return RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def test_three_forms(self) -> None:
        def training(batch_size: int, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
            if batch_size > 100:
                raise self.error()
            return batch_size, args, kwargs

        self.assertEqual(cushion.find_batch_size(training)(), (92, (), {}))
        self.assertEqual(cushion.find_batch_size(training, starting_batch_size=50)(1, a=2), (50, (1,), {"a": 2}))
        self.assertEqual(cushion.find_batch_size(starting_batch_size=110)(training)(1), (99, (1,), {}))
        self.assertEqual(cushion.find_batch_size()(training)(), (92, (), {}))

    def test_multiples(self) -> None:
        card = Card(60, self.error)
        cushion.find_batch_size(card.step, starting_batch_size=100, multiple_of=8)()
        self.assertEqual(card.tried, [96, 80, 72, 64, 56])

    def test_the_size_that_worked_comes_first_in_the_next_call(self) -> None:
        card = Card(100, self.error)
        training = cushion.find_batch_size(card.step)
        training()
        training()
        self.assertEqual(card.tried, [128, 115, 103, 92, 92])

    def test_a_size_that_does_not_get_smaller_is_refused(self) -> None:
        with self.assertRaisesRegex(ValueError, "reduce_batch_size_fn returned 128 after 128 did not fit"):
            cushion.find_batch_size(Card(1, self.error).step, reduce_batch_size_fn=lambda: 128)()

    def test_the_caller_must_not_pass_a_batch_size(self) -> None:
        @cushion.find_batch_size
        def training(batch_size: int, model: str) -> str:
            """What it does."""
            return model

        self.assertEqual(training("a model"), "a model")
        wrong: Any = training
        for call in (lambda: wrong(8, "a model"), lambda: wrong("a model", batch_size=8)):
            with self.assertRaisesRegex(TypeError, r"Batch size was passed into `.*training` .* `.*training\(model\)`"):
                call()
        with self.assertRaises(TypeError):
            wrong()
        self.assertEqual(list(inspect.signature(training).parameters), ["model"])
        self.assertEqual((training.__name__, training.__doc__), ("training", "What it does."))

    def test_a_failed_run_releases_its_memory(self) -> None:
        left: list[weakref.ref[Held]] = []

        def training(batch_size: int) -> int:
            self.assertFalse(any(it() is not None for it in left))
            held = Held()
            left.append(weakref.ref(held))
            if batch_size > 100:
                raise self.error()
            return batch_size

        self.assertEqual(cushion.find_batch_size(training)(), 92)
        self.assertEqual(len(left), 4)


class Progress(unittest.TestCase):
    def shown(self, is_terminal: bool, **options: Any) -> str:
        stream = io.StringIO()
        stream.isatty = lambda: is_terminal  # type: ignore[method-assign]
        out = io.StringIO()
        with contextlib.redirect_stderr(stream), contextlib.redirect_stdout(out):
            cushion.find_batch_size(Card(5).step, 2, **options)
        self.assertEqual(out.getvalue(), "")
        return stream.getvalue()

    def test_one_progress_line_on_a_terminal(self) -> None:
        expected = [
            "batch size: trying 2",
            "batch size: 2 fits, trying 4",
            "batch size: 4 fits, trying 8",
            "batch size: 4 fits, 8 does not, trying 6",
            "batch size: 4 fits, 6 does not, trying 5",
            "batch size: 5 fits, 6 does not",
        ]
        shown = self.shown(True)
        self.assertEqual([line.rstrip(" ") for line in shown.rstrip("\n").split("\r")], ["", *expected])
        self.assertTrue(shown.endswith(" " * (len(expected[-2]) - len(expected[-1])) + "\n"), shown)
        self.assertEqual(self.shown(False, progress=True), shown)
        self.assertTrue(self.shown(True, limit=4).endswith("batch size: 4 fits, the limit\n"))

    def test_nothing_else_is_shown(self) -> None:
        self.assertEqual(self.shown(False), "")
        self.assertEqual(self.shown(True, progress=False), "")
        with mock.patch.object(sys, "stderr", None):
            self.assertEqual(cushion.find_batch_size(Card(5).step, 2), 5)

    def test_the_progress_line_ends_after_an_error(self) -> None:
        stream = io.StringIO()
        with contextlib.redirect_stderr(stream), self.assertRaises(ValueError):
            cushion.find_batch_size(Card(3, lambda: ValueError("no")).step, 2, progress=True)
        self.assertTrue(stream.getvalue().endswith("trying 4\n"))


# ---- types ----

TYPED = """
from collections.abc import Callable

import cushion
from cushion import find_batch_size

def step(batch_size: int) -> None: ...
def training(batch_size: int, model: str, *, rate: float = 0.1) -> float: return rate

found: int = find_batch_size(step, 8, limit=64, grads=(), remember="sizes.json", progress=False)
named: int = cushion.find_batch_size(step, start=8)
plain: float = find_batch_size(training)("model", rate=0.5)
sized: float = find_batch_size(training, starting_batch_size=32)("model")
reduced: float = find_batch_size(training, reduce_batch_size_fn=lambda: 3, multiple_of=8)("model")

@find_batch_size
def first(batch_size: int, model: str) -> list[str]: return [model]

@find_batch_size(starting_batch_size=64, group="world")
def second(batch_size: int, model: str) -> list[str]: return [model]

texts: list[str] = first("model") + second(model="model")
first(8, "model")  # type: ignore[call-arg, arg-type]
second("model", batch_size=8)  # type: ignore[call-arg]
wrong: str = find_batch_size(step, 8)  # type: ignore[assignment]
find_batch_size(training, 8)  # type: ignore[arg-type]
find_batch_size(step, 8, starting_batch_size=8)  # type: ignore[call-overload]
"""


@unittest.skipUnless(importlib.util.find_spec("mypy"), f"{sys.executable} has no mypy")
class Types(unittest.TestCase):
    def test_what_programs_write(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "typed.py").write_text(TYPED)
            command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "typed.py"]
            command += ["--ignore-missing-imports", "--cache-dir", str(Path(folder, "cache")), "--no-site-packages"]
            environment = support.environment({"MYPYPATH": support.PACKAGE})
            done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
        self.assertEqual(done.stdout, "Success: no issues found in 1 source file\n")


if __name__ == "__main__":
    unittest.main()
