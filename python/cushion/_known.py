"""What `cushion.retry` remembers of a step: the size that was too large, and counts of calls and tries."""

from __future__ import annotations

import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

# After this many calls in smaller parts the whole batch is tried again.
FIRST_PATIENCE = 16


class Known:
    """The smallest size that ran out of memory.

    A shortage may pass, so a size that was too large is tried again after a number of calls. The number doubles each
    time, so that a step that never fits again loses little. Once a step has run whole, the number starts over."""

    def __init__(self) -> None:
        self.too_large: int | None = None
        #: whether the arguments and the result of the step were checked
        self.is_checked = False
        self._calm = 0
        self._patience = FIRST_PATIENCE

    def failed(self, size: int) -> None:
        # Arguments without tensors have no size to compare.
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
        """Makes the next call begin with the whole batch."""
        self.too_large = None


_lock = threading.Lock()
# By owner, then by function: Python creates a bound method at each access, but its owner and function stay.
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
        # The step cannot be hashed or weakly referenced: what is learnt applies to this call only.
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
    """Returns counts of what `cushion.retry` did in this process: `calls`; `tries` of all calls together; `retried`,
    the calls with more than one try; `split`, the calls that ended in several parts; `gave_up`, the calls that ended
    out of memory."""
    return totals.read()
