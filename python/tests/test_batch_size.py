"""The largest batch size that fits: that it is exact, how many tries it takes, and what is left behind."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import io
import json
import os
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

import ranks
import support  # puts the package under test on the path
from simulated import Simulated
from steps import Held, caught, frames
from support import GIB, MIB, TorchCase

import cushion
from cushion import _batch_search, _remembered


def plain_probes(start: int, largest: int, limit: int | None = None) -> int:
    """How many tries doubling and bisection take, as they are known."""
    start = start if limit is None else min(start, limit)
    probes, fits, fails, size = 0, 0, None, start
    while fails is None and fits != limit:
        probes += 1
        if size <= largest:
            fits, size = size, 2 * size if limit is None else min(2 * size, limit)
        else:
            fails = size
    while fails is not None and fails - fits > 1:
        probes += 1
        middle = (fits + fails) // 2
        fits, fails = (middle, fails) if middle <= largest else (fits, middle)
    return probes


class Card:
    """A step that fits up to a size, and keeps the sizes that it was tried with."""

    def __init__(self, largest: int, error: Callable[[], BaseException] = lambda: MemoryError("out")) -> None:
        self.largest, self.error = largest, error
        self.tried: list[int] = []

    def step(self, batch_size: int) -> str:
        self.tried.append(batch_size)
        if batch_size > self.largest:
            raise self.error()
        return "a result that nobody wants"


class Bracket(unittest.TestCase):
    """The search itself, with guesses of every kind."""

    def search(self, start: int, limit: int | None, largest: int, guess: Callable[[int], int | None]) -> list[int]:
        """The sizes that were tried; that the answer is right is checked."""
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

    def test_without_guesses_it_is_doubling_and_bisection(self) -> None:
        for start, limit, largest in self.cases():
            tried = self.search(start, limit, largest, lambda _: None)
            self.assertEqual(len(tried), plain_probes(start, largest, limit), (start, limit, largest, tried))

    def test_guesses_that_are_right_take_few_tries(self) -> None:
        for start, limit, largest in self.cases():
            tried = self.search(start, limit, largest, lambda fits: largest if fits else None)
            self.assertLessEqual(len(tried), plain_probes(start, largest, limit), (start, limit, largest, tried))
        # 16 times as large each time, the answer, and the one after it.
        self.assertEqual(
            self.search(1, None, 4097, lambda fits: 4097 if fits else None), [1, 16, 256, 4096, 4097, 4098]
        )

    def test_guesses_that_are_wrong_cost_two_tries_at_most(self) -> None:
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
    """Steps that say nothing of their memory."""

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

    def test_when_the_smallest_does_not_fit_its_error_is_raised(self) -> None:
        errors: list[BaseException] = []

        def fail() -> BaseException:
            errors.append(MemoryError(f"out {len(errors)}"))
            return errors[-1]

        card = Card(0, fail)
        error = caught(MemoryError, lambda: cushion.find_batch_size(card.step, 8))
        self.assertEqual(card.tried, [8, 4, 2, 1])
        self.assertIs(error, errors[-1])
        self.assertEqual(str(error), "out 3")
        # It says where it happened.
        self.assertEqual(frames(error)[-1].f_code.co_name, "step")
        if hasattr(error, "add_note"):
            note = (
                "cushion.find_batch_size: Card.step does not fit with a batch size of 1, the smallest; tried 8, 4, 2, 1"
            )
            self.assertEqual(error.__notes__, [note])
        with self.assertRaises(MemoryError):
            cushion.find_batch_size(Card(31).step, 64, multiple_of=32)

    def test_other_errors_pass_at_once(self) -> None:
        for kind in (ValueError, KeyboardInterrupt, RuntimeError):
            card = Card(4, lambda kind=kind: kind("something else"))
            with self.assertRaisesRegex(kind, "something else"):
                cushion.find_batch_size(card.step, 1)
            self.assertEqual(card.tried, [1, 2, 4, 8])

    def test_failed_frames_are_let_go_of_before_the_next_size(self) -> None:
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
                    # In a cycle, as errors that are kept often are.
                    error = MemoryError("the second")
                    held.error = error  # type: ignore[attr-defined]
                    raise error from first
            return held

        gc.disable()
        self.addCleanup(gc.enable)
        self.assertEqual(cushion.find_batch_size(step, 2), 5)
        self.assertEqual(alive, [0] * len(alive))
        self.assertEqual(sum(it() is not None for it in left), 0)

    def test_inside_of_except_the_callers_error_is_left_alone(self) -> None:
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

    def test_random_numbers_begin_again_with_each_size(self) -> None:
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

    def test_what_is_no_good_is_refused(self) -> None:
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
            (TypeError, "limit= is for the search", lambda: find(step, limit=8)),
            (TypeError, "progress= is for the search", lambda: find(progress=True)),
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
            (TypeError, "which model", lambda: find(step, 8, remember=True)),
        ):
            with self.subTest(text), self.assertRaisesRegex(kind, text):
                call()


class Device(Simulated):
    """On a simulated device, whose figures lead the search."""

    def search(self, needed: Callable[[int], int], start: int, **options: Any) -> tuple[int, list[int]]:
        """A step that allocates twice; returns the answer and the sizes that were tried."""
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
        # Beside what the program has already.
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

    def test_a_limit_on_the_memory_of_the_process_is_known(self) -> None:
        self.engine.configure("per_process_memory_fraction:0.5")
        found, tried = self.search(lambda size: size * MIB, 8)
        self.assertEqual((found, tried), (512, [8, 128, 512, 513]))

    def test_failures_that_are_made_up_predict_nothing(self) -> None:
        with self.cushion.inject("over=100MiB,every=1"):
            found, _ = self.search(lambda size: size * MIB, 8)
        # Three quarters of it are the larger request.
        self.assertEqual(found, 133)

    def test_nobody_is_asked_for_memory_or_waited_for(self) -> None:
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
        # Afterwards it is as before.
        self.assertEqual(self.engine.wishes(), (None, []))
        kept = self.fill()
        self.refused()
        asked.assert_called()
        self.engine.deallocate(kept)

    def test_last_calls_are_made_for_the_end_alone(self) -> None:
        last = mock.Mock(return_value=None, spec=[])
        self.cushion.on_refusal(last)
        self.search(lambda size: size * MIB, 8)
        last.assert_not_called()
        with self.assertRaises(self.cushion.OutOfMemoryError):
            self.search(lambda size: 2 * GIB, 8)
        self.assertEqual(last.call_count, 1)
        self.refused(2 * GIB)
        self.assertEqual(last.call_count, 2)

    # ---- training that begins again ----

    def test_training_jumps_to_what_the_receipt_predicts(self) -> None:
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
            any("ran out of memory with a batch size of 4096, and begins again with 1024" in it for it in logs.output)
        )

    def test_training_asks_for_memory_as_ever(self) -> None:
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
    """In the place of Accelerate's. Errors are PyTorch's where that is loaded, and a RuntimeError is enough here."""

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

    def test_the_batch_size_is_not_the_callers(self) -> None:
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
        import inspect

        self.assertEqual(list(inspect.signature(training).parameters), ["model"])
        self.assertEqual((training.__name__, training.__doc__), ("training", "What it does."))

    def test_a_failed_run_is_let_go_of(self) -> None:
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

    def test_one_line_on_a_terminal(self) -> None:
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

    def test_the_line_ends_with_an_error_too(self) -> None:
        stream = io.StringIO()
        with contextlib.redirect_stderr(stream), self.assertRaises(ValueError):
            cushion.find_batch_size(Card(3, lambda: ValueError("no")).step, 2, progress=True)
        self.assertTrue(stream.getvalue().endswith("trying 4\n"))


class Shaped:
    def __init__(self, *shape: int) -> None:
        self.shape, self.dtype, self.requires_grad, self.grad = shape, "float32", True, None


class Model:
    """As much of a module as remembering takes."""

    training = False

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        self._parameters = [Shaped(*shape) for shape in shapes]
        self._buffers: dict[str, Any] = {}

    def parameters(self) -> list[Shaped]:
        return self._parameters

    def buffers(self) -> list[Any]:
        return []

    def modules(self) -> list[Any]:
        return [self]


class Remembering(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.path = self.folder / "deep" / "sizes.json"
        self.model = Model((3, 4), (4,))

    def find(self, largest: int, **options: Any) -> tuple[int, list[int]]:
        card = Card(largest)
        options = {"model": self.model, "remember": self.path, **options}
        return cushion.find_batch_size(card.step, 8, **options), card.tried

    def test_an_answer_is_tried_once(self) -> None:
        self.assertEqual(self.find(100)[0], 100)
        self.assertEqual(self.find(100), (100, [100]))
        # It does not know that there is more room now, and that is what it says.
        self.assertEqual(self.find(200), (100, [100]))

    def test_an_answer_that_does_not_fit_is_searched_anew(self) -> None:
        self.find(100)
        found, tried = self.find(50)
        self.assertEqual((found, tried[0]), (50, 100))
        self.assertLess(max(tried[1:]), 100)
        self.assertEqual(self.find(50), (50, [50]))

    def test_only_for_the_same(self) -> None:
        self.find(100)
        others: tuple[dict[str, Any], ...] = (
            {"model": Model((3, 4), (5,))},
            {"model": Model((3, 4), (4,), (1,))},
            {"model": type("Other", (Model,), {})((3, 4), (4,))},
            {"multiple_of": 2},
            {"limit": 300},
        )
        for options in others:
            with self.subTest(options):
                self.assertEqual(self.find(200, **options)[0], 200)
        with mock.patch.object(_remembered, "_device", lambda _: {"gpu": "another"}):
            self.assertEqual(self.find(200)[0], 200)
        # All of them are there.
        self.assertEqual(self.find(200), (100, [100]))
        self.assertEqual(self.find(200, limit=300), (200, [200]))

    def test_in_the_users_cache(self) -> None:
        with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(self.folder)}):
            self.find(100, remember=True)
        self.assertTrue((self.folder / "cushion" / "batch_sizes.json").exists())
        with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": "relative", "HOME": str(self.folder / "home")}):
            self.find(100, remember=True)
        self.assertTrue((self.folder / "home" / ".cache" / "cushion" / "batch_sizes.json").exists())

    def test_garbage_is_ignored_with_a_warning(self) -> None:
        self.find(100)
        good = json.loads(self.path.read_text())

        def with_size(size: Any) -> bytes:
            return json.dumps({**good, "answers": [{**good["answers"][0], "batch_size": size}]}).encode()

        for garbage in (
            b"",
            b"no json",
            b"\xff\xfe\x00",
            b"[" * 200_000,
            b"[]",
            b"null",
            b'{"version": 99, "answers": []}',
            b'{"version": 1, "answers": {}}',
            b'{"version": 1, "answers": [1, null, {}, {"about": {}}]}',
            b" " * (1 << 21),
            *map(with_size, (0, -5, True, 2.5, "100", None, [], 1 << 80)),
            b'{"version": 1, "answers": [{"about": {}, "batch_size": ' + b"9" * 5000 + b"}]}",
        ):
            with self.subTest(garbage[:60]):
                self.path.write_bytes(garbage)
                with self.assertLogs("cushion", "WARNING") as logs:
                    found, tried = self.find(100)
                self.assertEqual((found, tried[0]), (100, 8))
                self.assertIn("ignored", logs.output[0])
                # And the file is good again.
                self.assertEqual(self.find(100), (100, [100]))

    def test_answers_that_cannot_be_meant_are_not_tried(self) -> None:
        self.find(100, multiple_of=10, limit=200)
        text = self.path.read_text()
        for wrong in (105, 210):
            self.path.write_text(text.replace('"batch_size": 100', f'"batch_size": {wrong}'))
            found, tried = self.find(100, multiple_of=10, limit=200)
            self.assertEqual(found, 100)
            self.assertNotIn(wrong, tried)

    def test_a_file_that_cannot_be_used_is_no_error(self) -> None:
        pipe = self.folder / "pipe"
        os.mkfifo(pipe)
        (self.folder / "file").write_text("")
        for path in (self.folder, pipe, self.folder / "file" / "below", "/dev/full/sizes.json"):
            with self.subTest(path), self.assertLogs("cushion", "WARNING"):
                self.assertEqual(self.find(100, remember=path)[0], 100)

    def test_a_link_stays_one(self) -> None:
        link = self.folder / "link.json"
        link.symlink_to(self.folder / "real.json")
        self.find(100, remember=link)
        self.assertTrue(link.is_symlink())
        self.assertEqual(self.find(100, remember=link), (100, [100]))

    def test_as_many_as_are_kept(self) -> None:
        for number in range(_remembered.MOST_ANSWERS + 3):
            _remembered.store(self.path, {"number": number}, number + 1)
        answers = json.loads(self.path.read_text())["answers"]
        self.assertEqual([it["batch_size"] for it in answers], list(range(4, _remembered.MOST_ANSWERS + 4)))
        self.assertEqual(sorted(it.name for it in self.path.parent.iterdir()), ["sizes.json", "sizes.json.lock"])

    def test_processes_that_write_at_once_lose_nothing(self) -> None:
        children = []
        for child in range(6):
            pid = os.fork()
            if pid == 0:
                try:
                    for number in range(5):
                        _remembered.store(self.path, {"child": child, "number": number}, 1 + number)
                finally:
                    os._exit(0)
            children.append(pid)
        for pid in children:
            os.waitpid(pid, 0)
        for child in range(6):
            for number in range(5):
                self.assertEqual(_remembered.look_up(self.path, {"child": child, "number": number}), 1 + number)


class RememberingOnDevices(Simulated):
    def test_free_memory_counts(self) -> None:
        model = Model((3,))

        def find() -> list[int]:
            tried: list[int] = []

            def step(batch_size: int) -> None:
                tried.append(batch_size)
                self.engine.deallocate(self.engine.allocate(batch_size * MIB))

            self.cushion.find_batch_size(step, 8, remember="sizes.json", model=model)
            return tried

        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            self.assertEqual(find()[-2:], [1024, 1025])
            self.assertEqual(find(), [1024])
            kept = self.engine.allocate(300 * MIB)
            self.assertEqual(find()[0], 8)
            self.assertEqual(find(), [724])
            (about, _) = (it["about"] for it in json.loads(Path("sizes.json").read_text())["answers"])
            self.assertEqual((about["gpu"], about["memory"], about["free"]), ("simulated", GIB, GIB))
            self.assertEqual((about["function"].rpartition(".")[2], about["model"]), ("step", "Model"))
            os.chdir("/")
        self.engine.deallocate(kept)


class Torch(TorchCase):
    """With PyTorch's tensors, over the stand-ins."""

    def gpu_step(self, tried: list[int]) -> Callable[[int], Any]:
        import torch

        def step(batch_size: int) -> Any:
            tried.append(batch_size)
            first = torch.empty(batch_size * MIB // 2, dtype=torch.uint8, device="cuda")
            return first, torch.empty(batch_size * MIB // 2, dtype=torch.uint8, device="cuda")

        return step

    def test_tensors_on_the_gpu(self) -> None:
        torch = self.install()
        kept = torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
        before = torch.cuda.memory_allocated()
        tried: list[int] = []
        found = cushion.find_batch_size(self.gpu_step(tried), 8)
        self.assertEqual(torch.cuda.memory_allocated(), before)
        self.assertLessEqual({found, found + 1}, set(tried))
        self.assertLessEqual(len(tried), 12)
        # It is as much as there is, but for the rounding of segments.
        total = torch.cuda.mem_get_info()[1] // MIB
        self.assertGreater(found, (total - 100) * 0.9)
        self.assertLessEqual(found, total - 100)
        tried.clear()
        self.assertEqual(cushion.find_batch_size(self.gpu_step(tried), 4 * total), found)

    @support.process(STANDIN_DEVICES="2")
    def test_the_device_that_is_short_decides(self) -> None:
        torch = self.install()
        tried = []

        def step(batch_size: int) -> Any:
            tried.append(batch_size)
            return [torch.empty(batch_size * share * MIB, dtype=torch.uint8, device=it) for it, share in shares.items()]

        largest = []
        for shares in ({"cuda:0": 1, "cuda:1": 3}, {"cuda:0": 3, "cuda:1": 1}):
            tried.clear()
            largest.append(cushion.find_batch_size(step, 8))
            self.assertLessEqual({largest[-1], largest[-1] + 1}, set(tried))
            self.assertLess(len(tried), plain_probes(8, largest[-1]), tried)
        self.assertEqual(largest[0], largest[1])

    def test_the_progress_says_how_much(self) -> None:
        self.install()
        stream = io.StringIO()
        with contextlib.redirect_stderr(stream):
            cushion.find_batch_size(self.gpu_step([]), 512, limit=512, progress=True)
        self.assertTrue(stream.getvalue().endswith("batch size: 512 fits (0.5 GiB), the limit\n"), stream.getvalue())

    def test_gradients_buffers_and_random_numbers_are_as_before(self) -> None:
        import torch

        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        model(torch.randn(6, 4)).sum().backward()
        model[2].bias.grad = None
        grads = [None if it.grad is None else it.grad.clone() for it in model.parameters()]
        objects = [it.grad for it in model.parameters()]
        state = {name: it.clone() for name, it in model.state_dict().items()}
        numbers = torch.get_rng_state()
        drawn = []

        def step(batch_size: int) -> Any:
            inputs = torch.randn(batch_size, 4)
            drawn.append(inputs[0, 0].item())
            loss = model(inputs).sum()
            loss.backward()
            if batch_size > 21:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return loss

        for given in (model, torch.optim.SGD(model.parameters(), lr=1.0), [model[0], *model[1:].parameters()]):
            self.assertEqual(cushion.find_batch_size(step, 4, grads=given), 21)
            for parameter, grad, it in zip(model.parameters(), grads, objects):
                self.assertIs(parameter.grad, it)
                self.assertTrue(grad is None or torch.equal(parameter.grad, grad))
            self.assertTrue(all(torch.equal(it, state[name]) for name, it in model.state_dict().items()))
            self.assertTrue(torch.equal(torch.get_rng_state(), numbers))
        self.assertEqual(len(set(drawn)), 1)
        with self.assertRaises(ZeroDivisionError):
            cushion.find_batch_size(lambda size: (step(size), 1 / 0), 4, grads=model)
        self.assertTrue(torch.equal(model[0].weight.grad, grads[0]))
        self.assertTrue(all(torch.equal(it, state[name]) for name, it in model.state_dict().items()))

    def test_updates_are_refused_before_they_are_made(self) -> None:
        import torch

        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        before = model.weight.detach().clone()

        def step(batch_size: int) -> None:
            model(torch.ones(batch_size, 2)).sum().backward()
            optimizer.step()

        with self.assertRaisesRegex(RuntimeError, "find_batch_size: the step calls an optimizer's step"):
            cushion.find_batch_size(step, 4, grads=model, limit=8)
        self.assertTrue(torch.equal(model.weight, before))
        # Who does not say what is to be as before may do as he likes.
        self.assertEqual(cushion.find_batch_size(step, 4, limit=8), 8)

    def test_a_scaler_is_as_before(self) -> None:
        import torch

        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        before = scaler.state_dict()

        def step(batch_size: int) -> None:
            scaler.scale(model(torch.full((batch_size, 2), float("inf"))).sum()).backward()
            scaler.unscale_(optimizer)
            scaler.update()

        self.assertEqual(cushion.find_batch_size(step, 4, grads=model, limit=8), 8)
        self.assertEqual(scaler.state_dict(), before)

    def test_remembered_by_shapes(self) -> None:
        torch = self.install()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "sizes.json")
            step = self.gpu_step([])
            for width in (3, 4):
                cushion.find_batch_size(step, 8, limit=8, grads=torch.nn.Linear(width, 1), remember=path)
            first, second = (it["about"] for it in json.loads(path.read_text())["answers"])
        self.assertEqual(first["torch"], torch.__version__)
        self.assertEqual(first["gpu"], torch.cuda.get_device_name())
        self.assertEqual(first["memory"], torch.cuda.mem_get_info()[1])
        self.assertEqual((first["model"], first["parameters"]), ("Linear", 2))
        self.assertNotEqual(first.pop("shapes"), second.pop("shapes"))
        self.assertEqual(first, second)


class TorchPaged(Torch):
    policy = "paged"


class TorchAlone(Torch):
    """Under PyTorch's own allocator."""

    policy = None


HAS_ACCELERATE = importlib.util.find_spec("accelerate") is not None


@unittest.skipUnless(HAS_ACCELERATE, "Accelerate is not installed")
class BesideAccelerate(TorchCase):
    """The decorator beside Accelerate's own: the same sizes are tried, and the same comes of it."""

    @support.process(timeout=180)
    def test_the_same_outcomes(self) -> None:
        import torch
        from accelerate.utils import find_executable_batch_size

        texts = (
            "CUDA out of memory. Tried",
            "MPS backend out of memory",
            "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear",
            "DefaultCPUAllocator: can't allocate memory",
            "XPU out of memory. Tried",
        )
        errors: list[Callable[[], BaseException]] = [lambda: torch.OutOfMemoryError("CUDA out of memory. Tried")]
        errors += [lambda text=text: RuntimeError(text) for text in texts]  # type: ignore[misc]
        errors += [lambda: RuntimeError("something else"), lambda: ValueError("CUDA out of memory.")]
        for first in (None, 128, 10, 1, 0):
            for largest in (200, 100, 37, 1, 0):
                for number, error in enumerate(errors):
                    # The sizes are looked at with the first error; with the others, whether they are a reason.
                    if number and (first, largest) != (10, 1):
                        continue
                    self.compare(find_executable_batch_size, first, largest, error, None)
                self.compare(find_executable_batch_size, first, largest, errors[0], [90, 50, 20, 3, 0])

    def compare(self, theirs: Any, first: int | None, largest: int, error: Any, reduced: list[int] | None) -> None:
        seen = []
        for find in (theirs, cushion.find_batch_size):
            options = {} if first is None else {"starting_batch_size": first}
            if reduced is not None:
                left = iter([size for size in reduced if size < (128 if first is None else first)] or [0])
                options["reduce_batch_size_fn"] = lambda left=left: next(left)  # type: ignore[assignment, misc]
            card = Card(largest, error)

            @find(**options)
            def training(batch_size: int, *, name: str) -> tuple[str, str]:
                return card.step(batch_size), name

            outcomes = []
            for _ in range(2):
                try:
                    outcomes.append(training(name="a name"))
                except Exception as raised:
                    outcomes.append((type(raised), str(raised)))
            seen.append((outcomes, card.tried))
        self.assertEqual(seen[0], seen[1], (first, largest, reduced))

    def test_the_same_refusals(self) -> None:
        from accelerate.utils import find_executable_batch_size

        for find in (find_executable_batch_size, cushion.find_batch_size):

            @find(starting_batch_size=4)
            def training(batch_size: int, model: str) -> int:
                return batch_size

            self.assertEqual(training("model"), 4)
            with self.assertRaisesRegex(TypeError, "Batch size was passed into `.*training` as the first argument"):
                training(4, "model")


# ---- ranks ----


def _distributed_search(rank: int, world: int, kind: str, largest: list[int]) -> list[Any]:
    """A search on one rank, which fits up to `largest[rank]`; a failure comes before, in or after the collectives."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    if kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(plain)
    else:
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (world,))
        for layer in plain:
            fully_shard(layer, mesh=mesh)
        model = fully_shard(plain, mesh=mesh)
    results: list[Any] = []
    for place in ("before", "forward", "backward", "after"):
        tried = []

        def step(batch_size: int) -> None:
            tried.append(batch_size)
            short = batch_size > largest[rank]

            def out_of_memory(*_: Any) -> None:
                raise torch.OutOfMemoryError(f"CUDA out of memory. On rank {rank}")

            if short and place == "before":
                out_of_memory()
            inputs = torch.ones(batch_size, 4, requires_grad=True)
            if short and place == "backward":
                inputs.register_hook(out_of_memory)
            loss = model(inputs).sum()
            if short and place == "forward":
                out_of_memory()
            torch.distributed.all_reduce(loss.detach().clone())
            loss.backward()
            if short and place == "after":
                out_of_memory()

        found = cushion.find_batch_size(step, 4, grads=model, group="world", timeout=20)
        clean = all(it.grad is None for it in model.parameters())
        results.append([found, tried, clean])
    # The model still works, with the mean of the ranks.
    model(torch.full((1, 4), float(rank))).sum().backward()
    grads = [it.grad.full_tensor() if kind == "fsdp" else it.grad for it in model.parameters()]
    results.append([round(float(grads[3][0]), 6), float(grads[0].abs().sum()) > 0])
    return results


def _simulated_search(rank: int, world: int) -> list[Any]:
    """Ranks whose devices have other sizes, and whose steps need other amounts: each would try something else."""
    import torch

    from cushion import _cushion

    cushion.simulate(["1GiB", "600MiB"][rank])
    results = []
    for each in ([3 * MIB, 1 * MIB], [1 * MIB, 3 * MIB]):
        tried = []

        def step(batch_size: int) -> None:
            tried.append(batch_size)
            address = _cushion.allocate((rank * 100 * MIB) + batch_size * each[rank])
            torch.distributed.all_reduce(torch.ones(1))
            _cushion.deallocate(address)

        results.append([cushion.find_batch_size(step, 8, grads=(), group="world", timeout=20), tried])
    return results


def _odd_ends(rank: int, world: int) -> dict[str, str]:
    """What goes wrong on ranks, each in the same order on every rank."""
    import torch

    said = {}

    def note(name: str, call: Callable[[], Any]) -> None:
        try:
            said[name] = f"returned {call()}"
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"

    def step(batch_size: int) -> None:
        torch.distributed.all_reduce(torch.ones(1))
        if batch_size > 5 + rank:
            raise torch.OutOfMemoryError(f"CUDA out of memory. {batch_size} on rank {rank}")

    def fails_on_one(batch_size: int) -> None:
        if rank == 1:
            raise ValueError("a mistake")
        torch.distributed.all_reduce(torch.ones(1))

    def never_fits_on_one(batch_size: int) -> None:
        if rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Never enough")
        torch.distributed.all_reduce(torch.ones(1))

    together: dict[str, Any] = {"grads": (), "group": "world", "timeout": 20}
    note("no group", lambda: cushion.find_batch_size(step, 2))
    note("no grads", lambda: cushion.find_batch_size(step, 2, group="world"))
    note("other start", lambda: cushion.find_batch_size(step, 2 + rank, **together))
    note("other limit", lambda: cushion.find_batch_size(step, 2, limit=9 if rank else None, **together))
    note("together", lambda: cushion.find_batch_size(step, 2, **together))
    note("a mistake", lambda: cushion.find_batch_size(fails_on_one, 2, **together))
    note("never", lambda: cushion.find_batch_size(never_fits_on_one, 2, **together))
    note("local", lambda: cushion.find_batch_size(Card(5 + rank).step, 2, local=True))
    return said


def _remembered_by_ranks(rank: int, world: int, folder: str) -> list[Any]:
    import torch

    results = []
    # One file for both, and then one that a rank does not have.
    for path in (f"{folder}/both.json", f"{folder}/both.json", f"{folder}/rank{rank}.json"):
        tried = []

        def step(batch_size: int) -> None:
            tried.append(batch_size)
            torch.distributed.all_reduce(torch.ones(1))
            if batch_size > 5 + rank:
                raise torch.OutOfMemoryError("CUDA out of memory.")

        find = cushion.find_batch_size
        results.append([find(step, 2, grads=(), group="world", timeout=20, remember=path, model=Model((1,))), tried])
        if rank == 0 and "both" not in path:
            os.unlink(path)
    return results


def _training(rank: int, world: int) -> list[Any]:
    """A whole training with a model of its own, which is short of memory on one rank in its second step."""
    import torch

    tried = []

    @cushion.find_batch_size(starting_batch_size=16, group="world", timeout=20)
    def training(batch_size: int, width: int) -> float:
        tried.append(batch_size)
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(width, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(3):
            optimizer.zero_grad()
            loss = model(torch.full((batch_size, width), 1.0 + rank)).sum()
            if number == 1 and rank == 1 and batch_size > 12:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            loss.backward()
            optimizer.step()
        return round(float(model.module.weight.sum()), 4)

    result = training(3)
    original = torch.nn.parallel.DistributedDataParallel.__init__
    return [result, tried, hasattr(original, "__wrapped__")]


class Together(TorchCase):
    """Two ranks, forked in the process of a test."""

    def test_one_rank_is_shorter_than_the_other(self) -> None:
        kinds = ["ddp"] if support.TORCH_VERSION < (2, 6) else ["ddp", "fsdp"]
        for kind, largest in zip(kinds, ([40, 23], [5, 9])):
            first, second = ranks.run(2, _distributed_search, kind, largest)
            self.assertEqual(first, second)
            for found, tried, clean in first[:-1]:
                self.assertEqual((found, clean), (min(largest), True))
                self.assertLessEqual({found, found + 1}, set(tried))
            self.assertEqual(first[-1], [1.0, True])

    def test_the_rank_with_the_least_room_leads(self) -> None:
        first, second = ranks.run(2, _simulated_search)
        self.assertEqual(first, second)
        for (found, tried), largest in zip(first, (1024 // 3, 500 // 3)):
            self.assertEqual(found, largest)
            self.assertLessEqual(len(tried), 6, tried)

    def test_what_goes_wrong_is_told_on_every_rank(self) -> None:
        first, second = ranks.run(2, _odd_ends)
        for said in (first, second):
            self.assertIn("RuntimeError: cushion.find_batch_size: this program has 2 ranks", said["no group"])
            self.assertIn("TypeError: cushion.find_batch_size: with group=, whose gradients", said["no grads"])
            self.assertIn("ValueError: cushion.find_batch_size: start is 2 on one rank and 3 on", said["other start"])
            self.assertIn("limit is not given on one rank and 9 on another", said["other limit"])
            self.assertEqual(said["together"], "returned 5")
        self.assertIn("RankError: cushion.find_batch_size: rank 1 failed in", first["a mistake"])
        self.assertIn("ValueError: a mistake", first["a mistake"])
        self.assertEqual(second["a mistake"], "ValueError: a mistake")
        self.assertIn("OutOfMemoryError: CUDA out of memory. Rank 1 ran out of memory in", first["never"])
        self.assertIn("with a batch size of 1. It said: CUDA out of memory. Never enough", first["never"])
        self.assertEqual(second["never"], "OutOfMemoryError: CUDA out of memory. Never enough")
        self.assertEqual((first["local"], second["local"]), ("returned 5", "returned 6"))

    def test_answers_are_remembered_if_all_ranks_know_them(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            first, second = ranks.run(2, _remembered_by_ranks, folder)
            self.assertEqual(first, second)
            self.assertEqual([found for found, _ in first], [5, 5, 5])
            self.assertEqual(first[1][1], [5])
            self.assertEqual(first[2][1][0], 2)
            again, other = ranks.run(2, _remembered_by_ranks, folder)
            self.assertEqual((again, again[2][1][0]), (other, 2))

    def test_training_begins_again_on_every_rank(self) -> None:
        first, second = ranks.run(2, _training)
        self.assertEqual(first, second)
        self.assertEqual(first[1], [16, 14, 12])
        self.assertFalse(first[2])


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
