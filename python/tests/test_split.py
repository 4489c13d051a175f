"""Steps that run in parts: how a batch is split, and which size is remembered as too large."""

from __future__ import annotations

import types
import unittest
import weakref
from collections import UserDict, namedtuple
from typing import Any
from unittest import mock

import support  # puts the package under test on the path
from steps import Card, Rows, failing

import cushion
from cushion import _adding


class Splitting(unittest.TestCase):
    def test_in_twice_as_many_parts(self) -> None:
        card = Card(2)
        self.assertEqual(cushion.retry(card.step, Rows(range(8)), split=cushion.split_batch, combine=sum), 28)
        self.assertEqual(card.seen, [8, 4, 2, 2, 2, 2])

    def test_until_parts_cannot_be_smaller(self) -> None:
        card = Card(0)
        with self.assertRaises(MemoryError):
            cushion.retry(card.step, Rows(range(5)), split=cushion.split_batch, combine=sum)
        # Of 4 parts one has two rows. 8 parts cannot be made, but 5 can.
        self.assertEqual(card.seen, [5, 2, 1, 1])
        card.room = 1
        self.assertEqual(cushion.retry(card.step, Rows(range(3)), split=cushion.split_batch, combine=sum), 3)

    def test_all_parts_run_again(self) -> None:
        seen: list[int] = []

        def step(rows: Rows) -> None:
            seen.append(len(rows.values))
            if len(seen) in (1, 3):
                raise MemoryError

        cushion.retry(step, Rows(range(8)), split=cushion.split_batch, combine=list)
        self.assertEqual(seen, [8, 4, 4, 2, 2, 2, 2])

    def test_a_custom_split(self) -> None:
        def halves(parts: int, names: list[str]) -> list[tuple[tuple[list[str]], dict[str, Any]]]:
            if parts > 2:
                raise cushion.CannotSplit("2 at most")
            return [((names[:1],), {}), ((names[1:],), {})]

        def step(names: list[str]) -> str:
            if len(names) > 2:
                raise MemoryError
            return "+".join(names)

        self.assertEqual(cushion.retry(step, ["a", "b", "c"], split=halves, combine=list), ["a", "b+c"])
        with self.assertRaises(MemoryError) as raised:
            cushion.retry(step, list("abcdef"), split=halves, combine=list)
        if hasattr(raised.exception, "__notes__"):
            self.assertIn("a part cannot be made smaller: 2 at most", raised.exception.__notes__[0])

    def test_a_split_that_never_raises(self) -> None:
        asked: list[int] = []

        def split(parts: int) -> list[tuple[tuple[()], dict[str, Any]]]:
            asked.append(parts)
            return [((), {})] * (len(asked) + 1)

        with self.assertRaises(MemoryError):
            cushion.retry(failing(1000), split=split, combine=list)
        self.assertEqual(len(asked), 30)

    def test_an_error_in_a_split_is_raised(self) -> None:
        with self.assertRaises(ZeroDivisionError):
            cushion.retry(failing(1), split=lambda parts: 1 // 0, combine=list)

    def test_no_tensor_to_split(self) -> None:
        # Refused before the step has run, without a shortage.
        step = mock.Mock(return_value=1, spec=[])
        for arguments in ((), (1, "two", None), (types.SimpleNamespace(shape=()),)):
            with self.assertRaisesRegex(cushion.CannotSplit, "no argument is a tensor with a dimension 0"):
                cushion.retry(step, *arguments, split=cushion.split_batch, combine=list)
        step.assert_not_called()

    def test_no_rows_to_split(self) -> None:
        with self.assertRaises(MemoryError):
            cushion.retry(failing(1), Rows([]), split=cushion.split_batch, combine=list)

    def test_split_and_whole_arguments(self) -> None:
        Pair = namedtuple("Pair", "rows name")
        whole = Rows(range(3))
        arguments = (Rows(range(5)), [Rows(range(5, 10)), "text"], Pair(Rows(range(5)), "pair"), None, 3)
        given = {"more": {"deep": Rows(range(5))}, "user": UserDict(rows=Rows(range(5))), "whole": whole}
        parts = cushion.split_batch(2, *arguments, **given)
        self.assertEqual(len(parts), 2)
        for (args, kwargs), rows in zip(parts, ([0, 1], [2, 3, 4])):
            self.assertEqual(args[0].values, rows)
            self.assertEqual(args[1][0].values, [row + 5 for row in rows])
            self.assertEqual(args[1][1], "text")
            self.assertIsInstance(args[2], Pair)
            self.assertEqual((args[2].rows.values, args[2].name), (rows, "pair"))
            self.assertEqual(args[3:], (None, 3))
            self.assertEqual(kwargs["more"]["deep"].values, rows)
            self.assertIsInstance(kwargs["user"], UserDict)
            self.assertEqual(kwargs["user"]["rows"].values, rows)
            self.assertIs(kwargs["whole"], whole)
            self.assertEqual(kwargs.keys(), given.keys())
        self.assertEqual(given["more"]["deep"].values, list(range(5)))

    def test_parts_are_nearly_equal(self) -> None:
        for length in range(1, 40):
            for parts in (2, 4, 8, 16, 32):
                split = [args[0].values for args, _ in cushion.split_batch(parts, Rows(range(length)))]
                self.assertEqual(sum(split, []), list(range(length)))
                self.assertEqual(len(split), min(parts, length))
                self.assertLessEqual(max(map(len, split)) - min(map(len, split)), 1)

    def test_no_such_dimension(self) -> None:
        with self.assertRaisesRegex(ValueError, "dimension -1"):
            cushion.split_batch.along(-1)
        with self.assertRaisesRegex(cushion.CannotSplit, "dimension 2"):
            cushion.split_batch.along(2)(2, Rows(range(4)))

    def test_share_is_passed_to_steps_that_take_it(self) -> None:
        shares: list[Any] = []

        def takes(rows: Rows, share: float = 1.0) -> None:
            shares.append(share)
            if len(rows.values) > 2:
                raise MemoryError

        def takes_by_name(rows: Rows, *, share: float = 1.0) -> None:
            takes(rows, share)

        def takes_anything(rows: Rows, **kwargs: Any) -> None:
            shares.append(kwargs)
            if len(rows.values) > 2:
                raise MemoryError

        def run(step: Any, *args: Any, **kwargs: Any) -> list[Any]:
            shares.clear()
            cushion.retry(step, *args, split=cushion.split_batch, grads=(), **kwargs)
            return list(shares)

        self.assertEqual(run(takes, Rows(range(3))), [1.0, 1 / 3, 2 / 3])
        self.assertEqual(run(takes_by_name, Rows(range(3))), [1.0, 1 / 3, 2 / 3])
        # A share that the program passes is divided among the parts.
        self.assertEqual(run(takes, Rows(range(4)), share=0.5), [0.25, 0.25])
        self.assertEqual(run(takes, Rows(range(4)), 0.5), [0.25, 0.25])
        self.assertEqual(run(takes_anything, Rows(range(3)), key=1, loss="sum"), [{"key": 1}] * 3)

    def test_share_by_weight(self) -> None:
        shares: list[float] = []

        def step(rows: Rows, more: Any = None, share: float = 1.0) -> None:
            shares.append(share)
            if len(rows.values) > 2:
                raise MemoryError

        # The weight function does not get the share.
        def weight(rows: Rows, more: Any = None) -> int:
            return sum(rows.values)

        for args, kwargs in (((), {}), ((None, 1.0), {}), ((), {"share": 1.0}), ((None,), {"share": 1.0})):
            shares.clear()
            options: Any = {"split": cushion.split_batch, "weight": weight, "grads": ()}
            cushion.retry(step, Rows([1, 2, 3, 4]), *args, **kwargs, **options)
            self.assertEqual(shares[-2:], [0.3, 0.7])

    def test_a_split_that_returns_the_shares(self) -> None:
        shares: list[float] = []

        def step(names: str, share: float = 1.0) -> None:
            shares.append(share)
            if len(names) > 1:
                raise MemoryError

        def halves(parts: int, names: str) -> list[Any]:
            return [(("a",), {"share": 0.25}), (("b",), {"share": 0.75})]

        cushion.retry(step, "ab", split=halves, grads=())
        self.assertEqual(shares, [1.0, 0.25, 0.75])


class Knowing(unittest.TestCase):
    def seen(self, card: Card, length: int, width: int = 1) -> list[int]:
        card.seen.clear()
        cushion.retry(card.step, Rows(range(length), width), split=cushion.split_batch, combine=sum)
        return list(card.seen)

    def test_begins_below_what_failed(self) -> None:
        card = Card(4)
        self.assertEqual(self.seen(card, 16), [16, 8, 4, 4, 4, 4])
        # 8 failed.
        self.assertEqual(self.seen(card, 16), [4, 4, 4, 4])
        self.assertEqual(self.seen(card, 8), [4, 4])
        self.assertEqual(self.seen(card, 6), [6, 3, 3])
        # 6 failed.
        self.assertEqual(self.seen(card, 4), [4])
        self.assertEqual(self.seen(card, 7), [3, 4])
        self.assertEqual(self.seen(card, 40), [5] + [2, 3] * 8)

    def test_size_is_elements(self) -> None:
        card = Card(4)
        self.seen(card, 8, width=10)
        self.assertEqual(self.seen(card, 4, width=40), [1, 1, 1, 1])

    def test_after_giving_up_the_next_call_begins_whole(self) -> None:
        # One row was too large. That is not remembered: another program may have used the memory.
        card = Card(0)
        with self.assertRaises(MemoryError):
            self.seen(card, 4)
        card.room = 100
        self.assertEqual(self.seen(card, 4), [4])

    def test_a_success_at_the_size_that_failed(self) -> None:
        card = Card(4)
        self.seen(card, 8)
        card.room = 100
        # 8 failed, so it is not tried whole; but this split can make only parts of 8, and they work.
        self.assertEqual(self.seen(card, 8), [4, 4])

        def halves(parts: int, rows: Rows) -> Any:
            return cushion.split_batch(2, rows)

        card.seen.clear()
        cushion.retry(card.step, Rows(range(16)), split=halves, combine=sum)
        self.assertEqual(card.seen, [8, 8])
        self.assertEqual(self.seen(card, 8), [8])

    def test_the_smallest_that_failed(self) -> None:
        card = Card(4)
        self.assertEqual(self.seen(card, 8, width=10), [8, 4, 4])
        self.assertEqual(self.seen(card, 6, width=10), [6, 3, 3])
        # 60 elements failed, and so did 80.
        self.assertEqual(self.seen(card, 7, width=10), [3, 4])
        self.assertEqual(self.seen(card, 5, width=10), [5, 2, 3])

    def test_the_part_that_failed(self) -> None:
        card = Card(3)
        self.assertEqual(self.seen(card, 7), [7, 3, 4, 1, 2, 2, 2])
        # 4 failed, and 3 did not.
        self.assertEqual(self.seen(card, 3), [3])

    def test_methods_are_remembered_by_their_owner(self) -> None:
        small, large = Card(2), Card(100)
        self.seen(small, 8)
        self.assertEqual(self.seen(large, 8), [8])
        self.assertEqual(self.seen(small, 8), [2, 2, 2, 2])

    def test_nothing_is_kept_alive(self) -> None:
        card = Card(2)
        self.seen(card, 8)
        gone = weakref.ref(card)
        del card
        self.assertIsNone(gone())

    def test_steps_that_cannot_be_remembered(self) -> None:
        class Unhashable(Card):
            __hash__ = None  # type: ignore[assignment]

        card = Unhashable(4)
        for _ in range(2):
            self.assertEqual(self.seen(card, 8), [8, 4, 4])

    def test_nothing_is_remembered_without_a_split(self) -> None:
        card = Card(4)
        with self.assertRaises(MemoryError):
            cushion.retry(card.step, Rows(range(8)))
        self.assertEqual(self.seen(card, 8), [8, 4, 4])

    def test_nothing_is_remembered_without_tensors(self) -> None:
        seen: list[int] = []

        def step(names: str) -> None:
            seen.append(len(names))
            if len(names) > 1:
                raise MemoryError

        def letters(parts: int, names: str) -> list[tuple[tuple[str], dict[str, Any]]]:
            return [((name,), {}) for name in names]

        for _ in range(2):
            cushion.retry(step, "ab", split=letters, combine=list)
        self.assertEqual(seen, [2, 1, 1] * 2)

    def test_signatures_are_read_once(self) -> None:
        card = Card(4)
        with mock.patch.object(_adding, "_takes_share", wraps=_adding._takes_share) as looked:

            @cushion.retry(split=cushion.split_batch, combine=sum)
            def step(rows: Rows) -> int:
                return card.step(rows)

            for length in (4, 8, 8):
                step(Rows(range(length)))
        looked.assert_called_once()


if __name__ == "__main__":
    unittest.main()
