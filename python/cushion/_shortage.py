"""How a program handles shortages: callbacks, a last call before a refusal, budgets, and injected failures."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import ContextDecorator
from types import TracebackType
from typing import Any, TypeVar, overload

from . import _cushion, _functions
from ._log import logger
from ._receipts import Receipt, from_json

#: a callback, called with the device, the bytes that would serve the request, and the seconds it may take
OnShortage = Callable[[int, int, float], object]
OnRefusal = Callable[[Receipt], object]
_Shortage = TypeVar("_Shortage", bound=OnShortage)
_Refusal = TypeVar("_Refusal", bound=OnRefusal)
_Function = TypeVar("_Function", bound=Callable[..., Any])

# Reentrant: removing a function may run destructors, and those may remove another function.
_lock = threading.RLock()
# Functions and their numbers. A list, because a callable may not be hashable.
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

    The function may free, offload, call `torch.cuda.empty_cache()` and allocate; its own allocations call no callbacks
    and never wait. Callbacks of higher priority are called first, until the request can be served. The function runs on
    the thread that is short of memory, which may be one of autograd's, and never twice at once. Its result, or its
    error, is recorded in the receipt; an error does not end the request. A function that takes longer than
    `seconds_left` is not called again until it is registered again.

    Works as a decorator, with or without arguments. Registering a function again replaces its earlier registration.

    :param priority: the highest is called first
    :param budget_ms: how long it may take; by default as long as the request may still wait, and at least
        `callback_ms` (CUSHION_CALLBACK_MS, one second)
    """
    if function is None:
        return lambda function: on_shortage(function, priority, budget_ms=budget_ms)
    check(function)
    register(function, _name(function), priority, budget_ms)
    return function


def register(function: Any, name: str, priority: int, budget_ms: int | None) -> None:
    """As `on_shortage`, with a name for receipts."""
    number = _cushion.add_callback(function, name, priority, budget_ms)
    _replace(_shortage, function, number, _cushion.remove_callback)


def on_refusal(function: _Refusal) -> _Refusal:
    """Calls `function(receipt)` before an allocation is refused, so that a program can save a checkpoint. The exception
    is raised afterwards in any case.

    It is not called for a refusal after which `cushion.retry` or `cushion.allocate_tensor` goes on, only for the one
    they give up with. An error that the function raises goes to `sys.unraisablehook`. Works as a decorator.
    """
    check(function)
    number = _cushion.add_last_call(lambda text: _call_last(function, text))
    _replace(_refusal, function, number, _cushion.remove_last_call)
    return function


# Keeps two refused threads from saving to the same file at the same time.
_last_call_lock = threading.RLock()
# How many seconds a last call waits for another one that does not end.
_LONGEST_LAST_CALL = 600.0
# Offloaders that bring their tensors back before a last call.
before_last_calls: weakref.WeakSet[Any] = weakref.WeakSet()


def _call_last(function: OnRefusal, text: str) -> None:
    locked = _last_call_lock.acquire(timeout=_LONGEST_LAST_CALL)
    try:
        for offloader in list(before_last_calls):
            try:
                offloader.before_last_call()
            except Exception as error:
                # The function may still be able to save other tensors.
                logger.warning("%s cannot bring its tensors back for the last call: %s", offloader.name, error)
        function(from_json(text))
    finally:
        if locked:
            _last_call_lock.release()


def remove_callback(function: OnShortage | OnRefusal) -> bool:
    """Removes a function that was given to `on_shortage` or `on_refusal`. Returns False if it is not registered. A call
    that is running is not interrupted."""
    removed = [
        _replace(_shortage, function, None, _cushion.remove_callback),
        _replace(_refusal, function, None, _cushion.remove_last_call),
    ]
    return any(removed)


def is_on(function: OnShortage) -> bool:
    """Returns whether a function is called on a shortage: it is registered, and not switched off for being too slow."""
    with _lock:
        numbers = [number for known, number in _shortage if known is function or known == function]
    return any(_cushion.is_callback_on(number) for number in numbers)


def check(function: Any) -> None:
    """Raises TypeError if an object cannot be called."""
    if not callable(function):
        raise TypeError(f"{function!r} is not callable, and has to be called when memory runs out")


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


# The `with` blocks that are open on this thread, the latest last.
_open_blocks = threading.local()


class budget(ContextDecorator):  # noqa: N801
    """Sets how long requests of this thread may wait for memory, and which rungs of the ladder they skip:

        with cushion.budget(ms=0):
            batch = largest_that_fits()

    It also applies to autograd's threads that work for this thread, and to futures made inside. Blocks may be nested:
    an argument that is not given keeps its outer value. It belongs to the thread, not to the task: if code `await`s
    inside, other tasks of the thread run with this budget until the block ends.

    :param ms: milliseconds for each request, instead of `wait_ms`; 0 to not wait
    :param skip: names of rungs, such as "wait" or "spill", in addition to those in `skip_rungs`
    """

    def __init__(self, ms: float | None = None, skip: Iterable[str] = ()) -> None:
        self._ms, self._skip = ms, [skip] if isinstance(skip, str) else list(skip)

    def __call__(self, function: _Function) -> _Function:
        if _functions.is_lazy(function):
            raise TypeError(
                f"cushion.budget cannot decorate {function!r}, whose work is done after it has returned: use "
                "`with cushion.budget(...)` inside it"
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
        # This is not always the latest block: tasks alternate. And another thread may close a generator.
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
    """Makes allocations fail by rules, to test how a program handles it (docs/inject.md), from now on or for a block:

        cushion.inject("nth=5")          # the fifth from now on; cushion.inject(None) ends it
        with cushion.inject("every=1000"):
            train()

    The rules replace earlier ones, on every device and for every thread. The variable `CUSHION_INJECT` does the same
    with no change to the program.

    :raises ValueError: if the rules cannot be parsed
    """

    def __init__(self, rules: str | None) -> None:
        self._before = _cushion.inject(rules)

    def __enter__(self) -> inject:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _cushion.inject(self._before)
