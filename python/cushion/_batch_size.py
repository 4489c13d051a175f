"""`cushion.find_batch_size`: the largest batch size that fits, and training that begins again with a smaller one.

_batch_search.py   which size is tried next, and what the figures predict
_batch_tries.py    one try of a size, on every rank
_remembered.py     answers of earlier programs

Sizes are tried as `cushion.retry` tries steps: a failed try is let go of before the next one, gradients, buffers and
random numbers are put back, and ranks agree."""

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

# As Accelerate's.
_FIRST_SIZE = 128
# A size that did not fit is followed by one that is smaller by a tenth at least.
_SMALLER = 0.9
# A probe asks whether the step fits by itself. These would make room by what others have or give up meanwhile, and
# training would depend on that in every step. Frees that wait for this program's own GPU work are waited for, as
# PyTorch does.
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
    """The largest batch size that fits:

        size = cushion.find_batch_size(step, 8, grads=model)

    `step(batch_size)` runs one step of that size, forward and backward. It is tried with `start`, and then with larger
    or smaller sizes, guided by the memory that those before have needed. The size that is returned was tried, and
    fitted; the next larger one was tried, and did not fit, unless the size is `limit`. Nothing stays allocated. While a
    size is tried no callbacks are asked, nobody is waited for, and nothing goes to host memory.

    Without `start` it is a decorator in the place of Accelerate's `find_executable_batch_size`:

        @cushion.find_batch_size(starting_batch_size=128)
        def training(batch_size, model): ...

        training(model)

    The function is called with `starting_batch_size`, and when memory runs out again with a smaller size, at most 0.9
    times as large. The size that worked is the first one of the next call.

    With ranks (`torch.distributed`), `group="world"` has all of them try the same sizes; see docs/batch-size.md.

    :param start: the first size that is tried
    :param reduce_batch_size_fn: called without arguments, returns the next smaller size; only for the decorator
    :param starting_batch_size: the first size of the decorated function, 128 if not given
    :param limit: the largest size that is of use
    :param multiple_of: only multiples of this are tried
    :param grads: whose gradients the step adds to, as for `cushion.retry`: they, buffers and random numbers are as
        before afterwards
    :param group: a process group whose ranks run the step together, or "world" for all ranks
    :param local: the step has no collectives, and each rank searches by itself
    :param timeout: the seconds that a rank waits for the others; if not given, the group's own time-out
    :param remember: True or the path of a file: an answer is kept for the next program, which tries it once
    :param model: whose answer is remembered, if it is not `grads`
    :param progress: shows what is tried on standard error; if not given, where that is a terminal
    :returns: the size, or the decorated function, or a decorator
    :raises torch.OutOfMemoryError: if the smallest size does not fit; the error of the step itself
    """
    if function is not None and not callable(function):
        raise TypeError(f"cushion.find_batch_size: the function is {function!r}, and has to be callable")
    if reduce_batch_size_fn is not None and not callable(reduce_batch_size_fn):
        raise TypeError(f"cushion.find_batch_size: reduce_batch_size_fn is {reduce_batch_size_fn!r}, not callable")
    if local and group is not None:
        raise TypeError("cushion.find_batch_size: group= has ranks search together, and local=True each by itself")
    step_of = _tensors.whole("multiple_of", multiple_of)
    if step_of == 0:
        raise ValueError("cushion.find_batch_size: multiple_of is 0, and has to be 1 or more")

    def tries(function: Callable[..., Any], is_probe: bool) -> Tries:
        holders = None if grads is None else _holders("grads", grads, function)
        return Tries(function, is_probe, holders, group, local, timeout)

    if start is None:
        searching = {"limit": limit, "remember": remember, "model": model, "progress": progress}
        for name, value in searching.items():
            if value is not None:
                raise TypeError(
                    f"cushion.find_batch_size: {name}= is for the search, find_batch_size(function, start), and a "
                    "decorated function has none"
                )
        first = _FIRST_SIZE if starting_batch_size is None else starting_batch_size
        first = _tensors.whole("starting_batch_size", first)

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            return _decorate(lambda: tries(function, False), first, reduce_batch_size_fn, step_of)

        return decorate if function is None else decorate(function)
    if function is None:
        raise TypeError(
            "cushion.find_batch_size: start= begins a search, which needs the function to try; for a decorator it is "
            "starting_batch_size="
        )
    if starting_batch_size is not None or reduce_batch_size_fn is not None:
        raise TypeError(
            "cushion.find_batch_size: starting_batch_size= and reduce_batch_size_fn= are for a decorated function, and "
            "start= begins a search"
        )
    first = _tensors.whole("start", start)
    most = None if limit is None else _tensors.whole("limit", limit)
    if first == 0:
        raise ValueError("cushion.find_batch_size: start is 0, and has to be 1 or more")
    if most is not None and most < step_of:
        raise ValueError(
            f"cushion.find_batch_size: limit is {most}, and the smallest size that is tried is {step_of}: "
            "give a larger limit, or a smaller multiple_of"
        )
    if model is not None:
        _holders("model", model, function)
    if remember and model is None and grads is None:
        raise TypeError(
            "cushion.find_batch_size: the answer for which model is to be remembered? Give it as model=, or as grads="
        )
    wanted = _Wanted(first, step_of, most, remember or None, grads if model is None else model, progress)
    return _search(tries(function, True), wanted)


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
    start: int
    multiple_of: int
    limit: int | None
    remember: bool | str | os.PathLike[str] | None
    model: Any
    progress: bool | None


def _search(tries: Tries, wanted: _Wanted) -> int:
    tries.meet()
    remembers = int(wanted.remember is not None)
    tries.must_agree(start=wanted.start, multiple_of=wanted.multiple_of, limit=wanted.limit or 0, remember=remembers)
    searching = _Searching(tries, wanted)
    try:
        with _receipts.Expecting(), budget(skip=_NOT_IN_PROBES):
            return searching.result()
    except BaseException:
        # CUDA may not work any more, and what the program is told is the first error.
        with contextlib.suppress(Exception):
            tries.put_back()
        raise
    finally:
        searching.line.end()
        if searching.refused is not None:
            _receipts.refuse_after_all(searching.refused)


class _Searching:
    """One search. Sizes are counted in multiples inside of it."""

    def __init__(self, tries: Tries, wanted: _Wanted) -> None:
        self._tries, self._wanted = tries, wanted
        self._each = wanted.multiple_of
        limit = None if wanted.limit is None else wanted.limit // self._each
        self._bracket = _batch_search.Search(max(1, wanted.start // self._each), limit)
        self._figures = _batch_search.Figures()
        self._tried: list[int] = []
        self.line = _Line(wanted.progress, tries.shows)
        # What the error says that the search ended with.
        self.refused: str | None = None

    def result(self) -> int:
        tries = self._tries
        tries.prepare()
        path, about = self._remembered()
        known = 0 if path is None else _remembered.look_up(path, about) or 0
        if path is not None:
            # The smallest of all ranks; 0 if one of them knows none.
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
                    f"cushion.find_batch_size: {tries.name} fits with a batch size of {found}: it needs no more memory "
                    "for a larger batch. Say with limit= which size is large enough"
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
        # A folder that one rank alone lacks must not keep it from asking the others.
        if wanted.remember is None or self._tries.smallest(int(path is not None)) == 0:
            return None, {}
        name = f"{getattr(self._tries.function, '__module__', None)}.{self._tries.name}"
        ranks = 1 if self._tries.ranks is None else len(self._tries.ranks)
        return path, _remembered.about(name, wanted.model, self._each, wanted.limit, ranks)

    def _probe(self, number: int) -> None:
        """Tries so many multiples, on every rank, and tells the search whether they fit."""
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
        # What the step returned may hold all of its memory.
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
            # They hold this frame, which holds them.
            del error, ended

    def story(self) -> str:
        return ", ".join(map(str, self._tried))

    def _used(self) -> str:
        return f" ({self._figures.peak / (1 << 30):.1f} GiB)" if self._figures.peak else ""


class _Line:
    """One line on standard error, which is written anew as the search goes on."""

    def __init__(self, progress: bool | None, shows: bool) -> None:
        self._stream = sys.stderr
        self._shown = 0
        self._shows = shows and progress is not False and self._stream is not None
        if self._shows and progress is None:
            self._shows = self._stream.isatty()

    def show(self, text: str) -> None:
        if self._shows:
            # Blanks take away what is left of a longer line; a file has no other way.
            self._write("\r" + text.ljust(self._shown))
            self._shown = len(text)

    def end(self) -> None:
        if self._shown > 0:
            self._write("\n")
            self._shown = 0

    def _write(self, text: str) -> None:
        # The program may have closed it. That is no reason to end a search.
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()


# ---- training that begins again ----


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
            what = f"begins again with {smaller}" if smaller else "gives up"
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
    """The size after one that did not fit."""
    if reduce is None:
        smaller = int(size * _SMALLER)
        # The figures are those of a run that failed, which would have needed more in the end: it is worth a try.
        return smaller if predicted is None else max(min(predicted, smaller), min(1, smaller))
    smaller = _tensors.whole("the size that reduce_batch_size_fn returned", reduce())
    if smaller >= size:
        raise ValueError(
            f"cushion.find_batch_size: reduce_batch_size_fn returned {smaller} after {size} did not fit: it has to "
            "return less each time it is called"
        )
    return smaller


def _refuse_batch_size(function: Callable[..., Any], name: str, args: Any, kwargs: Any) -> None:
    """The batch size comes from here: with one of the caller's own there would be two."""
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
