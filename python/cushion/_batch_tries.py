"""One try of a batch size after the other, for `cushion.find_batch_size`: each begins with the same state, and on
several ranks each has ended on all of them before the next begins."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

from . import _batch_search, _collectives, _failures, _ranks, _receipts, _undo, _wrapped

# Training begins again after these, too, as with Accelerate: on other devices, and where cuDNN does not take a size.
_ALSO_SMALLER = (
    " out of memory.",
    "MPS backend out of memory",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",
    "PT_DEVMEM Allocation failed",
)
# Their work is done after they are called, where nobody would see it fail.
_LATER = (types.CoroutineType, types.GeneratorType, types.AsyncGeneratorType)


class Ended(NamedTuple):
    """How the try of a size ended."""

    result: Any = None
    #: what it failed with on this rank
    error: BaseException | None = None
    #: what the ranks have agreed on, if it failed, and what the rank that it names has said
    verdict: _ranks.Verdict | None = None
    why: str = ""


class _OthersFailed(Exception):
    """The try went well here, and not on another rank."""

    def __init__(self, verdict: _ranks.Verdict) -> None:
        super().__init__("another rank failed")
        self.verdict = verdict


class _Probe(_undo.Attempt):
    """A step that is only tried: an optimizer must not change the parameters in it, which cannot be taken back."""

    def __init__(self, undo: _undo.Undo, refuses_updates: bool) -> None:
        self._refuses_updates = refuses_updates
        super().__init__(undo, only_once=False)

    @property
    def updated(self) -> bool:
        return False

    @updated.setter
    def updated(self, is_about_to: bool) -> None:
        if is_about_to and self._refuses_updates:
            raise RuntimeError(
                "cushion.find_batch_size: the step calls an optimizer's step(), which changes the parameters each time "
                "a size is tried: leave it out, since an update needs as much memory for any batch size. Make one "
                "update before the search, so that the optimizer has its state by then"
            )


class Tries:
    """Tries of one function.

    :ivar is_probe: the function is a step that is only tried; else it is the training itself
    """

    def __init__(
        self,
        function: Callable[..., Any],
        is_probe: bool,
        holders: _undo.Holders | None,
        group: Any,
        local: bool,
        timeout: float | None,
    ) -> None:
        self.function, self.is_probe = function, is_probe
        self.name: str = getattr(function, "__qualname__", None) or type(function).__name__
        kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
        if any(is_kind(function) for is_kind in kinds):
            self._refuse_later()
        self._holders, self._group, self._local, self._timeout = holders, group, local, timeout
        self.ranks: _ranks.Ranks | None = None
        self._wrapped: _wrapped.Wrapped | None = None
        self._undo: _undo.Undo | None = None

    def _refuse_later(self) -> NoReturn:
        raise TypeError(
            f"cushion.find_batch_size: {self.name} is async or a generator, whose work is done after it has returned: "
            "put what needs memory into a plain function"
        )

    # ---- before the first ----

    def meet(self) -> None:
        """Finds the ranks that try together."""
        if self._local or _ranks.several() == 1:
            return
        if self._group is None:
            raise RuntimeError(
                f"cushion.find_batch_size: this program has {_ranks.several()} ranks, and each would come to a size of "
                f'its own for {self.name}. Say group="world" if all ranks run it together, or local=True if it has no '
                "collectives, in it or in its backward pass"
            )
        if self.is_probe and self._holders is None:
            raise TypeError(
                f"cushion.find_batch_size: with group=, whose gradients does {self.name} add to? Say it with grads=, "
                "such as grads=model: models that are distributed over ranks are found by it. grads=() if there are "
                "none"
            )
        self.ranks = _ranks.of(self._group, self._timeout)

    @property
    def shows(self) -> bool:
        """Whether it is this rank that tells people."""
        return self.ranks is None or self.ranks.rank == 0

    def must_agree(self, **numbers: int) -> None:
        """Raises on every rank if they were given different numbers. 0 stands for none."""
        if self.ranks is None:
            return
        said = list(numbers.values())
        agreed = self.ranks.agree(*said, *(-number for number in said))
        for at, name in enumerate(numbers):
            largest, smallest = agreed[at], -agreed[at + len(said)]
            if largest != smallest:
                raise ValueError(
                    f"cushion.find_batch_size: {name} is {smallest or 'not given'} on one rank and {largest} on "
                    "another, and has to be the same on all of them"
                )

    def smallest(self, number: int) -> int:
        """The smallest of a number over the ranks."""
        return number if self.ranks is None else -self.ranks.agree(-number)[0]

    def smallest_known(self, number: int | None) -> int | None:
        """The smallest over those ranks that know one."""
        if self.ranks is None:
            return number
        unknown = _batch_search.LARGEST * _batch_search.LARGEST_JUMP
        found = self.smallest(unknown if number is None else min(number, unknown))
        return None if found == unknown else found

    def prepare(self) -> None:
        """Notes the state that every try begins with."""
        if self._holders is not None and _ranks.in_use():
            self._wrapped = _wrapped.Wrapped(self._holders.modules(), None if self.ranks is None else self.ranks.board)
        self._undo = _undo.Undo(self._holders, random_numbers=True)
        # Copies of gradients go to the host by this: the tries have as much memory as the program.
        self.put_back()

    # ---- a try ----

    def run(
        self,
        size: int,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        refused: Callable[[BaseException], object],
    ) -> Ended:
        """Calls the function with a size. Afterwards no rank is inside of it, and nothing keeps what a failed try had.

        :param refused: called with an error that says that memory ran out, before its frames are let go of
        :raises RankError: if another rank failed otherwise
        """
        # What the caller is handling is the context of our errors, and not ours to let go of.
        handled = sys.exc_info()[1]
        result, error = self._call(size, args, kwargs or {})
        if error is None:
            return Ended(result=result)
        if self._is_reason(error):
            refused(error)
        for one in _failures.let_go(error, handled):
            if one is not error:
                one.with_traceback(None)
        del one
        verdict, why = None, ""
        if self.ranks is not None:
            # The others may be waiting in a collective, which takes memory to join.
            self._collect()
            if isinstance(error, _OthersFailed):
                verdict, why = error.verdict, self.ranks.why(error.verdict.rank)
            else:
                verdict, why = self._lose(_ranks.OUT_OF_MEMORY, str(error))
        if self._wrapped is not None:
            self._wrapped.back()
        try:
            if verdict is not None and verdict.ended == _ranks.FAILED:
                raise _ranks.RankError(f"cushion.find_batch_size: rank {verdict.rank} failed in {self.name}: {why}")
            return Ended(error=error, verdict=verdict, why=why)
        finally:
            # It holds this frame, which holds it.
            del error

    def _call(self, size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, BaseException | None]:
        """Returns the error, so that its frames are left: none that runs can be cleared."""
        board = None if self.ranks is None else self.ranks.board
        if self._wrapped is not None:
            self._wrapped.begin()
        if board is not None:
            board.open()
        try:
            if board is not None and board.is_frozen:
                raise _collectives.LeftStep("another rank has left this step")
            if self._wrapped is not None:
                self._wrapped.part(True)
            result = self._call_function(size, args, kwargs)
            if self.ranks is not None:
                verdict = self.ranks.vote(_ranks.DONE, 0)
                if verdict.ended != _ranks.DONE:
                    raise _OthersFailed(verdict)
            if self._wrapped is not None:
                self._wrapped.end()
            return result, None
        except Exception as error:
            if not self._may_go_on(error):
                raise
            return None, error
        finally:
            if board is not None:
                board.close()

    def _call_function(self, size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._undo is not None
        around: contextlib.AbstractContextManager[Any]
        if self.is_probe:
            _undo.watch_updates()
            around = _Probe(self._undo, refuses_updates=self._holders is not None)
        elif self.ranks is not None:
            around = _hooking_models(self.ranks.board)
        else:
            around = contextlib.nullcontext()
        with around:
            result = self.function(size, *args, **kwargs)
        if isinstance(result, _LATER):
            if isinstance(result, types.CoroutineType):
                result.close()
            self._refuse_later()
        return result

    def _may_go_on(self, error: Exception) -> bool:
        """Whether another size may be tried after an error. One that says something else is told to the other ranks."""
        if isinstance(error, _ranks.RankError):
            return False
        if isinstance(error, _OthersFailed) or self._is_reason(error):
            return True
        if self.ranks is not None:
            if self.ranks.board.is_frozen:
                # Another rank failed first, and this is what became of it here.
                return True
            self._lose(_ranks.FAILED, f"{type(error).__name__}: {error}")
        if self._wrapped is not None:
            self._wrapped.back()
        return False

    def _is_reason(self, error: BaseException) -> bool:
        """Whether it says that memory ran out."""
        if _failures.is_out_of_memory(error):
            return True
        also = isinstance(error, RuntimeError) and not self.is_probe
        return also and any(text in str(error) for text in _ALSO_SMALLER)

    def _lose(self, ended: int, said: str) -> tuple[_ranks.Verdict, str]:
        """Ends a try that has failed here, on every rank. Each of them reads why, also one that knows it: they do so
        together."""
        assert self.ranks is not None
        verdict = self.ranks.vote(ended, 0, said)
        return verdict, self.ranks.why(verdict.rank)

    # ---- after it ----

    def put_back(self) -> None:
        """As if there had been no try."""
        if self._undo is not None:
            self._undo.back()
        self._collect()

    def _collect(self) -> None:
        gc.collect()
        _failures.give_back_cached()

    def last_error(self, ended: Ended, what: str) -> BaseException:
        """What is raised after a try that none follows."""
        assert ended.error is not None
        if ended.verdict is None or self._is_reason(ended.error):
            return ended.error
        rank, said = ended.verdict.rank, ended.why
        return _receipts.out_of_memory_class()(
            f"CUDA out of memory. Rank {rank} ran out of memory in {self.name} {what}. It said: {said}"
        )


@contextlib.contextmanager
def _hooking_models(board: _collectives.Board) -> Iterator[None]:
    """Training makes its models itself: those of DistributedDataParallel get their hooks as they are made."""
    ddp = sys.modules["torch"].nn.parallel.DistributedDataParallel
    original = ddp.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _wrapped.Wrapped([self], board)

    ddp.__init__ = init
    try:
        yield
    finally:
        ddp.__init__ = original
