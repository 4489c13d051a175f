"""Steps and models that tests of `cushion.find_batch_size` share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def plain_probes(start: int, largest: int, limit: int | None = None) -> int:
    """Returns how many tries plain doubling and bisection take."""
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
    """A step that fits up to a size. It records the sizes it was called with."""

    def __init__(self, largest: int, error: Callable[[], BaseException] = lambda: MemoryError("out")) -> None:
        self.largest, self.error = largest, error
        self.tried: list[int] = []

    def step(self, batch_size: int) -> str:
        self.tried.append(batch_size)
        if batch_size > self.largest:
            raise self.error()
        return "a result that nobody wants"


class Shaped:
    def __init__(self, *shape: int) -> None:
        self.shape, self.dtype, self.requires_grad, self.grad = shape, "float32", True, None


class Model:
    """The attributes of a module that remembering an answer needs."""

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
