"""`cushion.find_batch_size`: finds the largest batch size that fits, or restarts training with a smaller one.

_batch_search.py   chooses the next size, with predictions from the memory used so far
_batch_tries.py    tries one size, on every rank
_remembered.py     keeps answers of earlier programs in a file

Sizes are tried as `cushion.retry` tries steps: the memory of a failed try is released before the next try, gradients,
buffers and random numbers are restored, and ranks agree on the result."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any, Concatenate, NamedTuple, NoReturn, ParamSpec, TypeVar, overload

from . import _batch_search, _log, _receipts, _remembered, _tensors, _undo
from ._batch_tries import Ended, Tries
from ._shortage import budget

P = ParamSpec("P")
T = TypeVar("T")

# The default of Accelerate's find_executable_batch_size.
_FIRST_SIZE = 128
# After a size that did not fit, training restarts with at most this fraction of it.
_SMALLER = 0.9
# Rungs that a probe skips. They make room with memory that callbacks or other threads give up, or that is moved to the
# host, and every training step would depend on that. Pending frees of this program are still waited for, as PyTorch
# does.
_NOT_IN_PROBES = ("callbacks", "wait", "spill")


@overload
def find_batch_size(
    function: Callable[[int], object],
    start: int,
    reduce_batch_size_fn: None = None,
    *,
    limit: int | None = None,
    multiple_of: int = 1,
    grads: Any = None,
    group: Any = None,
    local: bool = False,
    timeout: float | None = None,
    remember: bool | str | os.PathLike[str] | None = None,
    model: Any = None,
    progress: bool | None = None,
) -> int: ...


@overload
def find_batch_size(
    function: Callable[Concatenate[int, P], T],
    start: None = None,
    reduce_batch_size_fn: Callable[[], int] | None = None,
    *,
    starting_batch_size: int | None = None,
    multiple_of: int = 1,
    grads: Any = None,
    group: Any = None,
    local: bool = False,
    timeout: float | None = None,
) -> Callable[P, T]: ...


@overload
def find_batch_size(
    function: None = None,
    start: None = None,
    reduce_batch_size_fn: Callable[[], int] | None = None,
    *,
    starting_batch_size: int | None = None,
    multiple_of: int = 1,
    grads: Any = None,
    group: Any = None,
    local: bool = False,
    timeout: float | None = None,
) -> Callable[[Callable[Concatenate[int, P], T]], Callable[P, T]]: ...


def find_batch_size(
    function: Callable[..., Any] | None = None,
    start: int | None = None,
    reduce_batch_size_fn: Callable[[], int] | None = None,
    *,
    starting_batch_size: int | None = None,
    limit: int | None = None,
    multiple_of: int = 1,
    grads: Any = None,
    group: Any = None,
    local: bool = False,
    timeout: float | None = None,
    remember: bool | str | os.PathLike[str] | None = None,
    model: Any = None,
    progress: bool | None = None,
) -> Any:
    """Returns the largest batch size that fits:

        size = cushion.find_batch_size(step, 8, grads=model)

    `step(batch_size)` runs one step of that size, forward and backward. It is tried with `start`, and then with larger
    or smaller sizes, chosen from the memory that earlier tries used. The returned size was tried and fitted; the next
    larger one was tried and did not fit, unless the size is `limit`. Nothing stays allocated. A try does not call
    callbacks, does not wait for other threads to free memory, and does not spill to host memory.

    Without `start` it is a decorator that replaces Accelerate's `find_executable_batch_size`:

        @cushion.find_batch_size(starting_batch_size=128)
        def training(batch_size, model): ...

        training(model)

    The function is called with `starting_batch_size`. Each time memory runs out, it is called again with at most 0.9
    times the size. The next call begins with the size that worked.

    With several ranks (`torch.distributed`), `group="world"` makes all of them try the same sizes; see
    docs/batch-size.md.

    :param start: the first size to try
    :param reduce_batch_size_fn: called without arguments, returns the next smaller size; only for the decorator
    :param starting_batch_size: the first size of the decorated function; 128 by default
    :param limit: the largest size to try
    :param multiple_of: only multiples of this are tried
    :param grads: the module, optimizer or parameters whose gradients the step adds to, as for `cushion.retry`. The
        gradients, buffers and random numbers are restored afterwards
    :param group: a process group whose ranks run the step together, or "world" for all ranks
    :param local: the step has no collectives, and each rank searches by itself
    :param timeout: how many seconds a rank waits for the others; by default the group's own timeout
    :param remember: True, or the path of a file: the answer is kept for the next program, which tries it first
    :param model: the model that the answer is remembered for; by default `grads`
    :param progress: shows the sizes being tried on standard error; by default if that is a terminal
    :returns: the size, or the decorated function, or a decorator
    :raises torch.OutOfMemoryError: if the smallest size does not fit; this is the error of the step itself
    """
    if function is not None and not callable(function):
        raise TypeError(f"cushion.find_batch_size: the function is {function!r}, and has to be callable")
    if reduce_batch_size_fn is not None and not callable(reduce_batch_size_fn):
        raise TypeError(f"cushion.find_batch_size: reduce_batch_size_fn is {reduce_batch_size_fn!r}, not callable")
    if local and group is not None:
        raise TypeError("cushion.find_batch_size: group= makes ranks search together, local=True each by itself")
    step_of = _tensors.whole("multiple_of", multiple_of)
    if step_of == 0:
        raise ValueError("cushion.find_batch_size: multiple_of is 0, and has to be 1 or more")

    def tries(function: Callable[..., Any], is_probe: bool) -> Tries:
        holders = None if grads is None else _holders("grads", grads, function)
        return Tries(function, is_probe, holders, group, local, timeout)

    if start is None:
        searching = {"limit": limit, "remember": remember, "model": model, "progress": progress}
        first = _first_size(starting_batch_size, searching)

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            return _decorate(lambda: tries(function, False), first, reduce_batch_size_fn, step_of)

        return decorate if function is None else decorate(function)
    if function is None:
        raise TypeError(
            "cushion.find_batch_size: start= begins a search, which needs the function to try; for a decorator, give "
            "starting_batch_size="
        )
    if starting_batch_size is not None or reduce_batch_size_fn is not None:
        raise TypeError(
            "cushion.find_batch_size: starting_batch_size= and reduce_batch_size_fn= are for a decorated function, and "
            "start= begins a search"
        )
    wanted = _wanted(function, start, step_of, limit, remember or None, model, grads, progress)
    return _search(tries(function, True), wanted)


def _first_size(starting_batch_size: int | None, searching: dict[str, Any]) -> int:
    """Returns the first size of a decorated function, after a check that no option of the search is given."""
    for name, value in searching.items():
        if value is not None:
            raise TypeError(
                f"cushion.find_batch_size: {name}= is an option of the search, find_batch_size(function, start), and "
                "not of a decorated function"
            )
    return _tensors.whole("starting_batch_size", _FIRST_SIZE if starting_batch_size is None else starting_batch_size)


def _holders(name: str, given: Any, function: Callable[..., Any]) -> _undo.Holders:
    try:
        return _undo.Holders(given, function)
    except TypeError:
        raise TypeError(
            f"cushion.find_batch_size: {name} is {given!r}: it takes a module, an optimizer, parameters, or a list of "
            "those"
        ) from None


# ---- the search ----


class _Wanted(NamedTuple):
    """The options of a search."""

    start: int
    multiple_of: int
    limit: int | None
    remember: bool | str | os.PathLike[str] | None
    model: Any
    progress: bool | None


def _wanted(
    function: Callable[..., Any],
    start: int,
    multiple_of: int,
    limit: int | None,
    remember: bool | str | os.PathLike[str] | None,
    model: Any,
    grads: Any,
    progress: bool | None,
) -> _Wanted:
    """Returns the options of a search, after a check of each."""
    first = _tensors.whole("start", start)
    most = None if limit is None else _tensors.whole("limit", limit)
    if first == 0:
        raise ValueError("cushion.find_batch_size: start is 0, and has to be 1 or more")
    if most is not None and most < multiple_of:
        raise ValueError(
            f"cushion.find_batch_size: limit is {most}, and the smallest size that is tried is {multiple_of}: "
            "give a larger limit, or a smaller multiple_of"
        )
    if model is not None:
        _holders("model", model, function)
    if remember and model is None and grads is None:
        raise TypeError(
            "cushion.find_batch_size: remember= needs the model that the answer is for: give model= or grads="
        )
    return _Wanted(first, multiple_of, most, remember, grads if model is None else model, progress)


def _search(tries: Tries, wanted: _Wanted) -> int:
    tries.meet()
    remembers = int(wanted.remember is not None)
    tries.must_agree(start=wanted.start, multiple_of=wanted.multiple_of, limit=wanted.limit or 0, remember=remembers)
    searching = _Searching(tries, wanted)
    try:
        with _receipts.Expecting(), budget(skip=_NOT_IN_PROBES):
            return searching.result()
    except BaseException:
        # CUDA may be unusable by now; the program gets the first error.
        with contextlib.suppress(Exception):
            tries.put_back()
        raise
    finally:
        searching.line.end()
        if searching.refused is not None:
            _receipts.refuse_after_all(searching.refused)


class _Searching:
    """One search. Inside, sizes are counted in units of `multiple_of`."""

    def __init__(self, tries: Tries, wanted: _Wanted) -> None:
        self._tries, self._wanted = tries, wanted
        self._each = wanted.multiple_of
        limit = None if wanted.limit is None else wanted.limit // self._each
        self._bracket = _batch_search.Search(max(1, wanted.start // self._each), limit)
        self._figures = _batch_search.Figures()
        self._tried: list[int] = []
        self.line = _Line(wanted.progress, tries.shows)
        # The message of the error that the search ended with.
        self.refused: str | None = None

    def result(self) -> int:
        tries = self._tries
        tries.prepare()
        path, about = self._remembered()
        known = 0 if path is None else _remembered.look_up(path, about) or 0
        if path is not None:
            # The smallest answer of all ranks; 0 if one of them remembers none.
            known = tries.smallest(known)
        if known > 0 and known % self._each == 0 and (self._wanted.limit is None or known <= self._wanted.limit):
            self._probe(known // self._each)
            if self._bracket.fits > 0:
                self.line.show(f"batch size: {known} fits{self._used()}, as remembered")
                return known
        while not self._bracket.is_done:
            guess = self._figures.largest()
            self._probe(self._bracket.next(tries.smallest_known(guess)))
            found = self._bracket.fits * self._each
            if found >= _batch_search.LARGEST and self._wanted.limit is None:
                raise RuntimeError(
                    f"cushion.find_batch_size: {tries.name} fits with a batch size of {found}: it does not use more "
                    "memory for a larger batch. Give the largest size to try as limit="
                )
        found = self._bracket.fits * self._each
        end = "the limit" if self._bracket.fails is None else f"{self._bracket.fails * self._each} does not"
        self.line.show(f"batch size: {found} fits{self._used()}, {end}")
        _log.logger.info(
            "%s: the largest batch size that fits is %d, %s; tried %s", tries.name, found, end, self.story()
        )
        if path is not None:
            _remembered.store(path, about, found)
        return found

    def _remembered(self) -> tuple[Any, dict[str, Any]]:
        wanted = self._wanted
        path = None if wanted.remember is None else _remembered.path_of(wanted.remember)
        # All ranks have to take part in this agreement, also one that has no folder to remember in.
        if wanted.remember is None or self._tries.smallest(int(path is not None)) == 0:
            return None, {}
        name = f"{getattr(self._tries.function, '__module__', None)}.{self._tries.name}"
        ranks = 1 if self._tries.ranks is None else len(self._tries.ranks)
        return path, _remembered.about(name, wanted.model, self._each, wanted.limit, ranks)

    def _probe(self, number: int) -> None:
        """Tries `number` times `multiple_of`, on every rank, and records whether that fits."""
        size = number * self._each
        fits, fails = self._bracket.fits * self._each, self._bracket.fails
        known = [f"{fits} fits{self._used()}"] if fits else []
        known += [f"{fails * self._each} does not"] if fails is not None else []
        self.line.show(f"batch size: {', '.join([*known, f'trying {size}'])}")
        self._tried.append(size)
        figures = self._figures
        figures.begin()
        ended = self._tries.run(size, refused=lambda error: figures.refused(number, error))
        if ended.error is None:
            figures.fitted(number)
        # The result of the step may hold all of its memory.
        ended = ended._replace(result=None)
        self._tries.put_back()
        figures.look_at_room()
        if ended.error is not None and number == 1:
            self._give_up(ended)
        self._bracket.tell(number, ended.error is None)

    def _give_up(self, ended: Ended) -> NoReturn:
        error = self._tries.last_error(ended, f"with a batch size of {self._each}")
        self.refused = str(error)
        smallest = f"{self._tries.name} does not fit with a batch size of {self._each}, the smallest"
        if hasattr(error, "add_note"):
            error.add_note(f"cushion.find_batch_size: {smallest}; tried {self.story()}")
        try:
            raise error
        finally:
            # The error refers to this frame, which refers to the error: breaks the cycle.
            del error, ended

    def story(self) -> str:
        return ", ".join(map(str, self._tried))

    def _used(self) -> str:
        return f" ({self._figures.peak / (1 << 30):.1f} GiB)" if self._figures.peak else ""


class _Line:
    """A progress line on standard error, rewritten as the search goes on."""

    def __init__(self, progress: bool | None, shows: bool) -> None:
        self._stream = sys.stderr
        self._shown = 0
        self._shows = shows and progress is not False and self._stream is not None
        if self._shows and progress is None:
            self._shows = self._stream.isatty()

    def show(self, text: str) -> None:
        if self._shows:
            # Blanks overwrite the end of a longer line. Control sequences would be noise in a file.
            self._write("\r" + text.ljust(self._shown))
            self._shown = len(text)

    def end(self) -> None:
        if self._shown > 0:
            self._write("\n")
            self._shown = 0

    def _write(self, text: str) -> None:
        # The program may have closed standard error. The search goes on without the line.
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()


# ---- training that restarts with a smaller size ----


def _decorate(
    begin: Callable[[], Tries], first: int, reduce: Callable[[], int] | None, multiple_of: int
) -> Callable[..., Any]:
    function, name = begin().function, begin().name
    known = first // multiple_of * multiple_of

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal known
        _refuse_batch_size(function, name, args, kwargs)
        tries = begin()
        tries.meet()
        size = tries.smallest(known)
        last: BaseException | None = None
        if size > 0:
            tries.prepare()
        while size > 0:
            figures = _batch_search.Figures()
            figures.begin(reset_peaks=False)
            with _receipts.Expecting():
                ended = tries.run(size, args, kwargs, refused=functools.partial(figures.refused, size))
            if ended.error is None:
                return ended.result
            tries.put_back()
            figures.look_at_room()
            last = tries.last_error(ended, f"with a batch size of {size}").with_traceback(None)
            smaller = tries.smallest(_smaller(size, figures.largest(), reduce) // multiple_of * multiple_of)
            what = f"restarts with {smaller}" if smaller else "gives up"
            _log.logger.warning("%s ran out of memory with a batch size of %d, and %s", name, size, what)
            known = size = smaller
        if last is not None:
            _receipts.refuse_after_all(str(last))
        try:
            raise RuntimeError("No executable batch size found, reached zero.") from last
        finally:
            del last

    with contextlib.suppress(TypeError, ValueError):
        signature = inspect.signature(function)
        described: Any = run
        described.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])
    return run


def _smaller(size: int, predicted: int | None, reduce: Callable[[], int] | None) -> int:
    """Returns the size to restart with after `size` did not fit; 0 to give up."""
    if reduce is None:
        smaller = int(size * _SMALLER)
        # The prediction comes from a run that failed before its peak. A predicted 0 is still followed by a try of 1.
        return smaller if predicted is None else max(min(predicted, smaller), min(1, smaller))
    smaller = _tensors.whole("the size that reduce_batch_size_fn returned", reduce())
    if smaller >= size:
        raise ValueError(
            f"cushion.find_batch_size: reduce_batch_size_fn returned {smaller} after {size} did not fit: it has to "
            "return a smaller size each time it is called"
        )
    return smaller


def _refuse_batch_size(function: Callable[..., Any], name: str, args: Any, kwargs: Any) -> None:
    """Raises TypeError if the caller passed a batch size, which the decorator adds itself."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return
    by_position = [it for it in parameters if it.kind in (it.POSITIONAL_ONLY, it.POSITIONAL_OR_KEYWORD)]
    any_number = any(it.kind is it.VAR_POSITIONAL for it in parameters)
    named = bool(by_position) and by_position[0].kind is not inspect.Parameter.POSITIONAL_ONLY
    if (len(args) >= len(by_position) and not any_number) or (named and by_position[0].name in kwargs):
        others = ", ".join(it.name for it in by_position[1:])
        raise TypeError(
            f"Batch size was passed into `{name}` as the first argument when called. Remove this, as the decorator "
            f"already does so: `{name}({others})`"
        )
