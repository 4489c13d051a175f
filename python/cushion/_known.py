"""What `cushion.retry` learns of a step: which size was too large, and how often it was run."""

from __future__ import annotations

import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

# After so many calls in smaller parts the whole is tried again.
FIRST_PATIENCE = 16


class Known:
    """The smallest size that was out of memory.

    A shortage may pass. So what was too large is tried again after a while, each time after twice as long: a step that
    never fits again loses less and less by it. Once a step has run whole, that is forgotten too, and the next shortage
    is met as the first was."""

    def __init__(self) -> None:
        self.too_large: int | None = None
        #: whether the arguments of the step and what it returns were looked at
        self.is_checked = False
        self._calm = 0
        self._patience = FIRST_PATIENCE

    def failed(self, size: int) -> None:
        # Without tensors there is no size to know again.
        if size > 0:
            known = self.too_large
            self.too_large = size if known is None else min(known, size)
            self._calm = 0

    def worked(self, size: int, whole: bool) -> None:
        known = self.too_large
        if known is None:
            if whole:
                self._patience = FIRST_PATIENCE
            return
        self._calm += 1
        if size >= known:
            self.too_large, self._patience = None, FIRST_PATIENCE
        elif self._calm >= self._patience:
            self.too_large, self._calm = None, 0
            self._patience *= 2

    def forget(self) -> None:
        """The next call begins with the whole batch."""
        self.too_large = None


_lock = threading.Lock()
# By owner, then by function: a bound method is made anew whenever it is named, and its parts last.
_known: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, Known]] = weakref.WeakKeyDictionary()


def known_of(step: Callable[..., Any]) -> Known:
    owner = step.__self__ if isinstance(step, types.MethodType) else step
    function = getattr(step, "__func__", step)
    try:
        with _lock:
            of_owner = _known.setdefault(owner, weakref.WeakKeyDictionary())
            known = of_owner.get(function)
            if known is None:
                known = of_owner[function] = Known()
            return known
    except TypeError:
        # It cannot be hashed or referred to weakly: what is learnt is for this call alone.
        return Known()


class Counts:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(("calls", "retried", "tries", "split", "gave_up"), 0)

    def add(self, *, tries: int, split: bool, gave_up: bool) -> None:
        with self._lock:
            self._counts["calls"] += 1
            self._counts["retried"] += tries > 1
            self._counts["tries"] += tries
            self._counts["split"] += split
            self._counts["gave_up"] += gave_up

    def read(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)


totals = Counts()


def retry_stats() -> dict[str, int]:
    """What `cushion.retry` did in this process: `calls`; `tries`, all of them together; `retried`, the calls that took
    more than one try; `split`, those that ended in more than one part; `gave_up`, those that ended out of memory."""
    return totals.read()
