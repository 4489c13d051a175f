"""Steps and batches that tests of `cushion.retry` share."""

from __future__ import annotations

import traceback
import types
from collections.abc import Callable
from typing import Any

import cushion


class Held:
    """An object that a failed step refers to."""


class Rows:
    """The attributes of a tensor that splitting needs: rows of `width` elements each."""

    def __init__(self, values: Any, width: int = 1) -> None:
        self.values = list(values)
        self.width = width

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.values), self.width

    def __getitem__(self, index: tuple[slice, ...]) -> Rows:
        return Rows(self.values[index[0]], self.width)


class Card:
    """A step that runs out of memory with more than `room` rows."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.seen: list[int] = []

    def step(self, rows: Rows) -> int:
        self.seen.append(len(rows.values))
        if len(rows.values) > self.room:
            raise MemoryError("CUDA out of memory.")
        return sum(rows.values)


def failing(times: int, then: Any = "done") -> Callable[..., Any]:
    """Returns a step that runs out of memory the first `times` times."""
    left = [times]

    def step(*_args: Any, **_kwargs: Any) -> Any:
        if left[0] > 0:
            left[0] -= 1
            raise MemoryError("CUDA out of memory.")
        return then

    return step


def caught(kind: type[BaseException], call: Callable[[], Any]) -> BaseException:
    """Returns the error of a call with its traceback, which `assertRaises` would clear."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__} was raised")


def frames(error: BaseException) -> list[types.FrameType]:
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)]


def difference(before: dict[str, int]) -> dict[str, int]:
    return {name: count - before[name] for name, count in cushion.retry_stats().items() if count != before[name]}
