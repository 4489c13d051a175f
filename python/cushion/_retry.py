"""Steps that run again when memory runs out: as they are, or in smaller parts.

An error keeps the frames of what failed, and they keep its tensors: whoever tries again inside `except` has less memory
than before. Here a failed try is let go of first. Only then is the next one begun."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import math
import sys
import threading
import time
import traceback
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, NoReturn, ParamSpec, Protocol, TypeVar, cast, overload

from . import _cushion, _log, _receipts

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

# The arguments of one part: those by position, and those by name.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Split = Callable[..., Sequence[Arguments]]

# What is out of memory, and is a plain RuntimeError: the libraries under PyTorch ask the driver themselves.
TEXTS = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
# Twice as many parts, so often, are more than any batch has rows: a split that never says no comes to an end, too.
MOST_SPLITS = 30
# After so many calls in smaller parts the whole is tried again.
FIRST_PATIENCE = 128
# Their work is done after they are called, where nobody would see it fail.
LATER = (types.CoroutineType, types.GeneratorType, types.AsyncGeneratorType)


class CannotSplit(ValueError):
    """A batch cannot be split into so many parts: raised by a `split` of `cushion.retry`, which then gives up."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: PyTorch's, Cushion's, cuBLAS's or cuDNN's, or Python's own."""
    if isinstance(error, MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    torch = sys.modules.get("torch")
    for module in (torch, getattr(torch, "cuda", None)):
        kind = getattr(module, "OutOfMemoryError", None)
        if isinstance(kind, type) and isinstance(error, kind):
            return True
    said = str(error)
    return any(text in said for text in TEXTS)


# ---- splitting ----


class SplitBatch:
    """Splits a batch by rows; `cushion.split_batch` is one, and `cushion.split_batch.along(1)` splits by columns.

    The first tensor among the arguments says how long the batch is. Every tensor of that length, also inside of tuples,
    lists and dicts, is cut into parts as equal as can be; all else is given whole to every part. A tensor is whatever
    has a `shape` and can be sliced. A batch that is a list of samples needs a split of its own.

    A step that has a parameter `share` is told which share of the batch its part is: a mean times that adds up, over
    the parts, to the mean of the whole. A step without it has to use sums.
    """

    def __init__(self, dim: int = 0) -> None:
        if dim < 0:
            raise ValueError(f"a batch cannot be split along dimension {dim}: count from the first, which is 0")
        self.dim = dim

    def along(self, dim: int) -> SplitBatch:
        """The same along another dimension."""
        return SplitBatch(dim)

    def __call__(self, parts: int, /, *args: Any, **kwargs: Any) -> list[Arguments]:
        """The arguments of so many parts, or of as many as there are rows."""
        length = next((t.shape[self.dim] for t in _tensors((args, kwargs)) if len(t.shape) > self.dim), None)
        if length is None:
            raise CannotSplit(f"no argument is a tensor with a dimension {self.dim}")
        parts = min(parts, length)
        whole_share = kwargs.get("share", 1.0)
        split = []
        for part in range(parts):
            begin, end = length * part // parts, length * (part + 1) // parts
            cut_args, cut_kwargs = self._cut((args, kwargs), length, slice(begin, end))
            split.append((cut_args, {**cut_kwargs, "share": whole_share * (end - begin) / length}))
        return split

    def _cut(self, value: Any, length: int, rows: slice) -> Any:
        if _is_tensor(value):
            belongs = len(value.shape) > self.dim and value.shape[self.dim] == length
            return value[(slice(None),) * self.dim + (rows,)] if belongs else value
        if isinstance(value, (tuple, list)):
            cut = [self._cut(inner, length, rows) for inner in value]
            named = getattr(type(value), "_make", None)
            return named(cut) if named is not None else type(value)(cut)
        if isinstance(value, MutableMapping):
            mapping = copy.copy(value)
            for key in value:
                mapping[key] = self._cut(value[key], length, rows)
            return mapping
        return value


split_batch = SplitBatch()


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "__getitem__")


def _tensors(value: Any) -> Iterator[Any]:
    if _is_tensor(value):
        yield value
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from _tensors(inner)
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors(inner)


def _size(arguments: Arguments) -> int:
    """How large a part is: the elements of its tensors."""
    return sum(math.prod(tensor.shape) for tensor in _tensors(arguments))


def _add_up(results: list[Any]) -> Any:
    """What the parts returned, as one: numbers and tensors of no dimension added up, also in tuples and dicts; nothing
    if all returned nothing; else the list. Whether other tensors are to be added or joined, only the program knows."""
    first = results[0]
    if len(results) == 1 or all(result is None for result in results):
        return first
    if all(isinstance(result, (int, float, complex)) or getattr(result, "shape", None) == () for result in results):
        return sum(results[1:], first)
    if all(type(result) is tuple and len(result) == len(first) for result in results):
        return tuple(_add_up(list(column)) for column in zip(*results))
    if all(type(result) is dict and result.keys() == first.keys() for result in results):
        return {key: _add_up([result[key] for result in results]) for key in first}
    return results


# ---- what is known, and what is counted ----


class _Known:
    """What retry knows of a step that may be split: the smallest size that was out of memory, and whether it has a
    parameter `share`; neither until it was needed.

    A shortage may pass. So what was too large is tried again after a while, each time after twice as long: a step that
    never fits again loses less and less by it."""

    def __init__(self) -> None:
        self.too_large: int | None = None
        self.takes_share: bool | None = None
        self._calm = 0
        self._patience = FIRST_PATIENCE

    def failed(self, size: int) -> None:
        # Without tensors there is no size to know again.
        if size > 0:
            self.too_large = size if self.too_large is None else min(self.too_large, size)
            self._calm = 0

    def worked(self, size: int) -> None:
        if self.too_large is None:
            return
        self._calm += 1
        if size >= self.too_large:
            self.too_large, self._patience = None, FIRST_PATIENCE
        elif self._calm >= self._patience:
            self.too_large, self._calm = None, 0
            self._patience *= 2


def _takes_share(step: Callable[..., Any]) -> bool:
    try:
        found = inspect.signature(step).parameters.get("share")
    except (TypeError, ValueError):
        return False
    return found is not None and found.kind in (found.POSITIONAL_OR_KEYWORD, found.KEYWORD_ONLY)


_lock = threading.Lock()
# By owner, then by function: a bound method is made anew whenever it is named, and its parts last.
_known: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, _Known]] = weakref.WeakKeyDictionary()


def _known_of(step: Callable[..., Any]) -> _Known:
    owner = step.__self__ if isinstance(step, types.MethodType) else step
    function = getattr(step, "__func__", step)
    try:
        with _lock:
            of_owner = _known.setdefault(owner, weakref.WeakKeyDictionary())
            known = of_owner.get(function)
            if known is None:
                known = of_owner[function] = _Known()
            return known
    except TypeError:
        # It cannot be hashed or referred to weakly: what is learnt is for this call alone.
        return _Known()


class _Counts:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(("calls", "retried", "tries", "split", "gave_up"), 0)

    def add(self, run: _Run) -> None:
        with self._lock:
            self._counts["calls"] += 1
            self._counts["retried"] += run.tries > 1
            self._counts["tries"] += run.tries
            self._counts["split"] += run.done and len(run.parts) > 1
            self._counts["gave_up"] += run.refused is not None

    def read(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)


_totals = _Counts()


def retry_stats() -> dict[str, int]:
    """What `cushion.retry` did in this process: `calls`; `tries`, all of them together; `retried`, the calls that took
    more than one try; `split`, those that ended in more than one part; `gave_up`, those that ended out of memory."""
    return _totals.read()


# ---- what allocators are told ----


def _give_back_cached() -> None:
    """So that the next try, with other sizes, does not begin by cutting up the blocks of the one before."""
    torch = sys.modules.get("torch")
    if torch is None or _cushion.is_simulated():
        _cushion.empty_cache()
    elif torch.cuda.is_initialized():
        torch.cuda.empty_cache()


# ---- running ----


class _Options(NamedTuple):
    split: Split | None
    combine: Callable[[list[Any]], Any] | None
    reset: Callable[[], object] | None
    tries: int
    rng: bool

    def check(self) -> None:
        for name in ("split", "combine", "reset"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise TypeError(f"cushion.retry: {name} is {value!r}, and has to be callable")
        if self.tries < 1:
            raise ValueError(f"cushion.retry: tries is {self.tries}, and the first is one, too: it takes 1 or more")


class _RandomState:
    """PyTorch's, as it is now; of the GPUs only the current one's, and only if CUDA is in use."""

    def __init__(self) -> None:
        self._torch: Any = sys.modules.get("torch")
        if self._torch is None:
            return
        self._cpu = self._torch.get_rng_state()
        self._cuda: Any = None
        cuda = self._torch.cuda
        if cuda.is_initialized():
            self._device = cuda.current_device()
            self._cuda = cuda.get_rng_state(self._device)

    def restore(self) -> None:
        if self._torch is not None:
            self._torch.set_rng_state(self._cpu)
            if self._cuda is not None:
                self._torch.cuda.set_rng_state(self._cuda, self._device)


class Retried(Protocol[P, T_co]):
    """A function under `@cushion.retry()`."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T_co: ...

    def __get__(self, instance: Any, owner: type | None = None, /) -> Callable[..., T_co]: ...

    def stats(self) -> dict[str, int]:
        """As `cushion.retry_stats()`, of this function alone."""

    def forget(self) -> None:
        """The next call begins with the whole batch, whatever was too large before."""


@overload
def retry(
    step: Callable[..., T],
    /,
    *args: Any,
    split: Split | None = None,
    combine: Callable[[list[Any]], Any] | None = None,
    reset: Callable[[], object] | None = None,
    tries: int = 3,
    rng: bool = True,
    **kwargs: Any,
) -> T: ...


@overload
def retry(
    *,
    split: Split | None = None,
    combine: Callable[[list[Any]], Any] | None = None,
    reset: Callable[[], object] | None = None,
    tries: int = 3,
    rng: bool = True,
) -> Callable[[Callable[P, T]], Retried[P, T]]: ...


def retry(
    step: Callable[..., Any] | None = None,
    /,
    *args: Any,
    split: Split | None = None,
    combine: Callable[[list[Any]], Any] | None = None,
    reset: Callable[[], object] | None = None,
    tries: int = 3,
    rng: bool = True,
    **kwargs: Any,
) -> Any:
    """Runs `step(*args, **kwargs)`; when memory runs out, lets go of what the step held and runs it again.

        loss = cushion.retry(step, inputs, targets)
        loss = cushion.retry(step, inputs, targets, split=cushion.split_batch, reset=optimizer.zero_grad)

    Without a step it is a decorator, which always has its parentheses: `@cushion.retry()`. The function then has
    `stats()` and `forget()` of its own. The names of the options cannot be those of arguments of the step.

    A step has to be one that can be run again from its beginning. What a failed try has changed, such as gradients that
    were added to, `reset` puts back. Every error but out of memory passes at once. When nothing helps, the last error
    is raised as it came.

    With `split`, each new try is in twice as many parts as the one before, until they cannot be made smaller. Which
    size was too large is known for the next call: that begins with parts below it.

    :param split: called as `split(parts, *args, **kwargs)`, returns the arguments of each part as `(args, kwargs)`, or
        of fewer if there cannot be so many, or raises `cushion.CannotSplit`. `cushion.split_batch` is one
    :param combine: makes one result of the list of those of the parts. Without it numbers and tensors of no dimension
        are added up, also in tuples and dicts, and else it is the list. Return `loss.detach()`: a loss keeps the
        memory of its part for as long as it is kept
    :param reset: called before each try but the first, such as `optimizer.zero_grad`
    :param tries: how often the step is run at most, without `split`
    :param rng: whether PyTorch's random numbers, of the CPU and of the current GPU, begin again at each try
    :raises TypeError: if the step is async or a generator, whose work is done after it has returned
    """
    options = _Options(split, combine, reset, tries, rng)
    options.check()
    if step is not None:
        if not callable(step):
            raise TypeError(f"cushion.retry: the step is {step!r}, and has to be callable: give its arguments after it")
        return _run(_Run(step, args, kwargs, options), None)
    if args or kwargs:
        given = ", ".join([*map(repr, args), *kwargs])
        raise TypeError(f"cushion.retry: arguments ({given}) for no step: the step comes first")
    return functools.partial(_decorate, options)


def _decorate(options: _Options, step: Callable[..., Any]) -> Retried[..., Any]:
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    if any(is_kind(step) for is_kind in kinds):
        _refuse_later(step)
    counts, known = _Counts(), _Known()

    @functools.wraps(step)
    def retried(*args: Any, **kwargs: Any) -> Any:
        return _run(_Run(step, args, kwargs, options, known), counts)

    def forget() -> None:
        known.too_large = None

    function: Any = retried
    function.stats, function.forget = counts.read, forget
    return cast(Retried[..., Any], function)


def _tell_of_refusal_behind(error: BaseException, handled: BaseException | None) -> None:
    """What a step makes of a refusal is not tried again: the refusal was the end."""
    for one in _chain(error, handled):
        if is_out_of_memory(one):
            _receipts.refuse_after_all(str(one))
            return


def _refuse_later(step: Callable[..., Any]) -> NoReturn:
    raise TypeError(
        f"cushion.retry: {_name(step)} is async or a generator, whose work is done after it has returned, "
        "where nothing can be tried again: put what needs memory into a plain function, and retry that"
    )


def _name(step: Callable[..., Any]) -> str:
    return getattr(step, "__qualname__", None) or repr(step)


def _run(run: _Run, counts: _Counts | None) -> Any:
    begun = time.perf_counter()
    handled = sys.exc_info()[1]
    try:
        with _receipts.Expecting():
            return run.result()
    except Exception as error:
        if run.refused is None:
            _tell_of_refusal_behind(error, handled)
        raise
    finally:
        if run.refused is not None:
            _receipts.refuse_after_all(run.refused)
        _totals.add(run)
        if counts is not None:
            counts.add(run)
        if run.tries > 1:
            ended = "is done" if run.done else "failed otherwise" if run.refused is None else "gave up"
            lost = (run.last_try if run.done else time.perf_counter()) - begun
            text = "%s ran out of memory, and %s: %s; %.3f s were lost"
            _log.logger.warning(text, _name(run.step), ended, run.story(), lost)


class _Run:
    """One call: the tries that it takes."""

    def __init__(
        self,
        step: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: _Options,
        known: _Known | None = None,
    ) -> None:
        self.step = step
        self.args = args
        self.kwargs = kwargs
        self.options = options
        self.parts: list[Arguments] = [(args, kwargs)]
        self.results: list[Any] = []
        self.tries = 0
        self.splits = 0
        self.last_try = 0.0
        self.done = False
        # What the error says that it gave up with.
        self.refused: str | None = None
        self.known = None
        if options.split is not None:
            self.known = known or _known_of(step)

    def result(self) -> Any:
        # What the caller is handling is the context of our errors, and not ours to let go of.
        handled = sys.exc_info()[1]
        random = _RandomState() if self.options.rng else None
        self._begin_below_what_failed()
        error = self._try()
        while error is not None:
            failed = _chain(error, handled)
            for one in failed:
                traceback.clear_frames(one.__traceback__)
            why_not_again = self._prepare_next()
            if why_not_again is not None:
                self._note(error, why_not_again)
                try:
                    raise error
                finally:
                    # They hold this frame, which holds them.
                    del error, failed, one
            for one in failed:
                one.with_traceback(None)
            del error, failed, one
            gc.collect()
            _give_back_cached()
            if self.options.reset is not None:
                self.options.reset()
            if random is not None:
                random.restore()
            error = self._try()
        self.done = True
        if self.known is not None and self.known.too_large is not None:
            self.known.worked(max(map(_size, self.parts)))
        if len(self.parts) == 1:
            return self.results[0]
        return (self.options.combine or _add_up)(self.results)

    def _try(self) -> BaseException | None:
        """Returns the error, so that its frames are left: none that runs can be cleared."""
        self.tries += 1
        self.last_try = time.perf_counter()
        results: list[Any] = []
        try:
            for args, kwargs in self.parts:
                result = self.step(*args, **kwargs)
                if isinstance(result, LATER):
                    if isinstance(result, types.CoroutineType):
                        result.close()
                    _refuse_later(self.step)
                results.append(result)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failed = error
        else:
            self.results = results
            return None
        if self.known is not None:
            self.known.failed(_size(self.parts[len(results)]))
        return failed

    def _begin_below_what_failed(self) -> None:
        if self.known is None or self.known.too_large is None:
            return
        while max(map(_size, self.parts)) >= self.known.too_large:
            if self._prepare_next() is not None:
                # As small as can be is worth a try.
                return

    def _prepare_next(self) -> str | None:
        """Makes the parts smaller, if they may be; or returns why there is no other try."""
        split = self.options.split
        if split is None:
            more = self.tries < self.options.tries
            return None if more else "no more are allowed: with split= it goes on in smaller parts"
        self.splits += 1
        parts: list[Arguments] = []
        why = ""
        if self.splits <= MOST_SPLITS:
            try:
                parts = list(split(2 * len(self.parts), *self.args, **self.kwargs))
            except CannotSplit as error:
                why = f": {error}"
        # Fewer than asked for but more than before are the smallest that there are.
        if len(parts) <= len(self.parts):
            return f"a part cannot be made smaller{why}"
        self.parts = [self._with_share(*part) for part in parts]
        return None

    def _with_share(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        assert self.known is not None
        if self.known.takes_share is None:
            self.known.takes_share = _takes_share(self.step)
        if not self.known.takes_share and "share" not in self.kwargs:
            kwargs = {name: value for name, value in kwargs.items() if name != "share"}
        return args, kwargs

    def _note(self, error: BaseException, why: str) -> None:
        self.refused = str(error)
        # Python 3.11 and later: its text stays as it is, because programs match against that.
        if hasattr(error, "add_note"):
            error.add_note(f"cushion.retry: {self.story()}; {why}")

    def story(self) -> str:
        tries = "1 try" if self.tries == 1 else f"{self.tries} tries"
        parts = "1 part" if len(self.parts) == 1 else f"{len(self.parts)} parts"
        return f"{tries}, the last in {parts}"


def _chain(error: BaseException, end: BaseException | None) -> list[BaseException]:
    """An error with its causes and contexts, up to one that is not meant."""
    found: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and one is not end and not any(one is other for other in found):
            found.append(one)
            waiting += [one.__cause__, one.__context__]
    return found
