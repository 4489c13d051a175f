"""What `cushion.retry` remembers of shortages: for how long a step runs in parts, and what makes it forget."""

from __future__ import annotations

import sys
import threading
import unittest
from typing import Any

import support  # puts the package under test on the path
from steps import Card, Rows

import cushion
from cushion import _known


class Patience(unittest.TestCase):
    def test_each_passing_shortage_costs_the_same(self) -> None:
        """Six shortages of one step, with successful steps between: each is remembered as long as the first."""
        card = Card(8)

        @cushion.retry(split=cushion.split_batch, combine=sum)
        def step(rows: Rows) -> int:
            return card.step(rows)

        def in_parts() -> bool:
            card.seen.clear()
            step(Rows(range(8)))
            return card.seen[-1] < 8

        in_a_row = []
        for _ in range(6):
            card.room = 4
            self.assertTrue(in_parts())
            card.room = 8
            steps = 1
            while in_parts():
                steps += 1
            in_a_row.append(steps)
            for _ in range(100):
                self.assertFalse(in_parts())
        self.assertEqual(in_a_row, [_known.FIRST_PATIENCE] * 6)
        self.assertEqual(step.stats()["retried"], 6)

    def test_after_giving_up_the_next_call_begins_whole(self) -> None:
        card = Card(0)

        @cushion.retry(split=cushion.split_batch, combine=sum)
        def step(rows: Rows) -> int:
            return card.step(rows)

        for _ in range(2):
            with self.assertRaises(MemoryError):
                step(Rows(range(64)))
        card.room = 64
        card.seen.clear()
        for _ in range(3):
            step(Rows(range(64)))
        self.assertEqual(card.seen, [64] * 3)


class Forgetting(unittest.TestCase):
    def test_while_a_call_is_being_split(self) -> None:
        """The remembered size is reset between the read and the split."""
        room = 2

        def split(parts: int, rows: Rows) -> Any:
            step.forget()
            return cushion.split_batch(parts, rows)

        @cushion.retry(split=split, combine=sum)
        def step(rows: Rows) -> int:
            if len(rows.values) > room:
                raise MemoryError
            return sum(rows.values)

        for _ in range(3):
            self.assertEqual(step(Rows(range(8))), 28)

    def test_between_two_reads(self) -> None:
        """Another thread may reset the size: a second read may return None."""

        class Fleeting(_known.Known):
            looks = 0

            @property  # type: ignore[override]
            def too_large(self) -> int | None:
                Fleeting.looks += 1
                return 8 if Fleeting.looks == 1 else None

            @too_large.setter
            def too_large(self, value: int | None) -> None: ...

        card = Card(100)
        known = Fleeting()
        Fleeting.looks = 0
        plan = _plan_of(card.step)
        from cushion import _tries

        self.assertEqual(_tries.run(plan, (Rows(range(8)),), {}, known, None), 28)
        self.assertEqual(card.seen, [4, 4])

    def test_from_another_thread(self) -> None:
        card = Card(2)
        errors: list[str] = []
        done = threading.Event()

        @cushion.retry(split=cushion.split_batch, combine=sum)
        def step(rows: Rows) -> int:
            if len(rows.values) > card.room:
                raise MemoryError
            return sum(rows.values)

        def work() -> None:
            try:
                for _ in range(30):
                    if step(Rows(range(16))) != 120:
                        errors.append("a wrong sum")
            except Exception as error:
                errors.append(repr(error))

        def forget() -> None:
            while not done.is_set():
                step.forget()

        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            threads = [threading.Thread(target=work) for _ in range(3)]
            forgetting = threading.Thread(target=forget)
            for thread in (forgetting, *threads):
                thread.start()
            for thread in threads:
                thread.join()
            done.set()
            forgetting.join()
        finally:
            sys.setswitchinterval(before)
        self.assertEqual(errors, [])


def _plan_of(step: Any) -> Any:
    """Returns the plan that `cushion.retry` makes from its options."""
    from unittest import mock

    from cushion import _tries

    with mock.patch.object(_tries, "run", side_effect=lambda plan, *_: plan):
        return cushion.retry(step, Rows(range(2)), split=cushion.split_batch, combine=sum)


if __name__ == "__main__":
    unittest.main()
