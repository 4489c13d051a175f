"""What a program can do about shortages: callbacks, a last call before a refusal, budgets, and failures made up to
test it all."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import ContextDecorator
from types import TracebackType
from typing import Any, TypeVar, overload

from . import _cushion
from ._log import logger
from ._receipts import Receipt, from_json

#: what a callback is called with: the device, the bytes that would help, and the seconds it may take
OnShortage = Callable[[int, int, float], object]
OnRefusal = Callable[[Receipt], object]
_Shortage = TypeVar("_Shortage", bound=OnShortage)
_Refusal = TypeVar("_Refusal", bound=OnRefusal)
_Function = TypeVar("_Function", bound=Callable[..., Any])

# What a function holds may go in the middle of this, and its end may take another function away.
_lock = threading.RLock()
# Functions and their numbers: a list, since a function need not have a hash.
_shortage: list[tuple[Any, int]] = []
_refusal: list[tuple[Any, int]] = []


@overload
def on_shortage(function: _Shortage, priority: int = 0, *, budget_ms: int | None = None) -> _Shortage: ...
@overload
def on_shortage(
    function: None = None, priority: int = 0, *, budget_ms: int | None = None
) -> Callable[[_Shortage], _Shortage]: ...
def on_shortage(function: Any = None, priority: int = 0, *, budget_ms: int | None = None) -> Any:
    """Calls `function(device, bytes, seconds_left)` when memory runs out, before an allocation waits or is refused.

    It may free, offload, call `torch.cuda.empty_cache()` and even allocate; what it allocates asks no callbacks and
    never waits. Those of higher priority are called first, until the request can be served. It runs on the thread that
    is short of memory, which may be one of PyTorch's for gradients, and never twice at once. What it returns and what
    it raises is in the receipt, and ends nothing. One that takes longer than `seconds_left` is not called again until
    it is given to `on_shortage` once more.

    Works as a decorator, with or without arguments. A function given again takes the place of itself.

    :param priority: the highest is called first
    :param budget_ms: how long it may take; if not given, as long as the request may still wait, and at least
        `callback_ms` (CUSHION_CALLBACK_MS, a second)
    """
    if function is None:
        return lambda function: on_shortage(function, priority, budget_ms=budget_ms)
    check(function)
    register(function, _name(function), priority, budget_ms)
    return function


def register(function: Any, name: str, priority: int, budget_ms: int | None) -> None:
    """As `on_shortage`, under a name that people know it by."""
    number = _cushion.add_callback(function, name, priority, budget_ms)
    _replace(_shortage, function, number, _cushion.remove_callback)


def on_refusal(function: _Refusal) -> _Refusal:
    """Calls `function(receipt)` one last time before an allocation is refused, so that a program can save its
    checkpoint. It changes nothing: the exception is raised afterwards.

    Not for refusals that `cushion.retry` or `cushion.allocate_tensor` goes on after; for the one it gives up with. What
    it raises is shown as Python shows errors that nobody can catch. Works as a decorator.
    """
    check(function)
    number = _cushion.add_last_call(lambda text: _call_last(function, text))
    _replace(_refusal, function, number, _cushion.remove_last_call)
    return function


# Two threads that are refused at once do not save to one file at once.
_last_call_lock = threading.RLock()
# A last call that never ends is not to keep the others waiting for ever.
_LONGEST_LAST_CALL = 600.0
# Offloaders, which bring their tensors back before a last call.
before_last_calls: weakref.WeakSet[Any] = weakref.WeakSet()


def _call_last(function: OnRefusal, text: str) -> None:
    locked = _last_call_lock.acquire(timeout=_LONGEST_LAST_CALL)
    try:
        for offloader in list(before_last_calls):
            try:
                offloader.before_last_call()
            except Exception as error:
                # What can be saved without it is to be saved all the same.
                logger.warning("%s cannot bring its tensors back for the last call: %s", offloader.name, error)
        function(from_json(text))
    finally:
        if locked:
            _last_call_lock.release()


def remove_callback(function: OnShortage | OnRefusal) -> bool:
    """Takes away what was given to `on_shortage` or `on_refusal`; false if it is gone already. One that runs now runs
    on."""
    removed = [
        _replace(_shortage, function, None, _cushion.remove_callback),
        _replace(_refusal, function, None, _cushion.remove_last_call),
    ]
    return any(removed)


def is_on(function: OnShortage) -> bool:
    """Whether a function is called on a shortage: it was given, and not switched off for taking too long."""
    with _lock:
        numbers = [number for known, number in _shortage if known is function or known == function]
    return any(_cushion.is_callback_on(number) for number in numbers)


def check(function: Any) -> None:
    """Whether it can be called, before memory runs out."""
    if not callable(function):
        raise TypeError(f"{function!r} is no function: it is called when memory runs out")


def _name(function: Any) -> str:
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return f"{getattr(function, '__module__', None) or '?'}.{name}"


def _replace(known: list[tuple[Any, int]], function: Any, number: int | None, remove: Callable[[int], bool]) -> bool:
    with _lock:
        old = [it for it in known if it[0] is function or it[0] == function]
        known[:] = [it for it in known if it not in old]
        if number is not None:
            known.append((function, number))
    return any([remove(number) for _, number in old])


# The blocks that are open on this thread, the latest last.
_open_blocks = threading.local()


class budget(ContextDecorator):  # noqa: N801
    """How long requests of this thread may wait for memory, and which rungs of the ladder they leave out:

        with cushion.budget(ms=0):
            batch = largest_that_fits()

    Holds for PyTorch's threads for gradients that work for this thread, too, and for futures made inside. Blocks may be
    nested: what is not given stays. It is the thread's, not the task's: code that `await`s inside gives it to whoever
    runs meanwhile, until the block ends.

    :param ms: milliseconds for each request, in the place of `wait_ms`; 0 waits for nobody
    :param skip: names of rungs, such as "wait" or "spill", beside those that `skip_rungs` leaves out
    """

    def __init__(self, ms: float | None = None, skip: Iterable[str] = ()) -> None:
        self._ms, self._skip = ms, [skip] if isinstance(skip, str) else list(skip)

    def __call__(self, function: _Function) -> _Function:
        later = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
        if any(is_later(function) for is_later in later):
            raise TypeError(
                f"cushion.budget cannot be around {function!r}, which does its work after it has returned: use "
                "`with cushion.budget(...)` inside of it"
            )
        return super().__call__(function)

    def __enter__(self) -> budget:
        blocks = _open_blocks.__dict__.setdefault("all", [])
        blocks.append(self)
        try:
            _apply(blocks)
        except BaseException:
            blocks.pop()
            _apply(blocks)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Not always the latest: tasks take turns. And a generator may be closed by another thread.
        blocks = _open_blocks.__dict__.get("all", [])
        for index in reversed(range(len(blocks))):
            if blocks[index] is self:
                del blocks[index]
                _apply(blocks)
                break

    def _recreate_cm(self) -> budget:
        return self


def _apply(blocks: list[budget]) -> None:
    ms = [block._ms for block in blocks if block._ms is not None]
    skip = {name for block in blocks for name in block._skip}
    _cushion.set_wishes(ms[-1] if ms else None, sorted(skip))


class inject:  # noqa: N801
    """Makes allocations fail by rules, to test how a program takes it (docs/inject.md), from now on or for a block:

        cushion.inject("nth=5")          # the fifth from now on; cushion.inject(None) ends it
        with cushion.inject("every=1000"):
            train()

    The rules take the place of those before, on every device and for every thread. The variable `CUSHION_INJECT` does
    the same with no change to the program.

    :raises ValueError: if they cannot be read
    """

    def __init__(self, rules: str | None) -> None:
        self._before = _cushion.inject(rules)

    def __enter__(self) -> inject:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _cushion.inject(self._before)
