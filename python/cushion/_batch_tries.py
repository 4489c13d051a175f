"""Tries batch sizes one after the other, for `cushion.find_batch_size`. Each try begins with the same state. With
several ranks, a try ends on all ranks before the next one begins."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

from . import _batch_search, _collectives, _failures, _functions, _ranks, _receipts, _undo, _wrapped
from ._ranks import OthersFailed

# Training restarts after these errors too, as with Accelerate: they are out of memory on other devices, and sizes that
# cuDNN does not support.
_ALSO_SMALLER = (
    " out of memory.",
    "MPS backend out of memory",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",
    "PT_DEVMEM Allocation failed",
)


class Ended(NamedTuple):
    """How the try of a size ended."""

    result: Any = None
    #: the error on this rank
    error: BaseException | None = None
    #: if the try failed, what the ranks agreed on, and the message of the rank named there
    verdict: _ranks.Verdict | None = None
    why: str = ""


class _Probe(_undo.Attempt):
    """A step that is only tried. An optimizer must not change the parameters in it: that cannot be undone."""

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
                "a size is tried: remove that call, since an update uses as much memory for any batch size. Make one "
                "update before the search, so that the optimizer has its state by then"
            )


class Tries:
    """The tries of one function.

    :ivar is_probe: whether the function is a step that is only tried; otherwise it is the training itself
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
        self.name = _functions.name_of(function)
        if _functions.is_lazy(function):
            self._refuse_lazy()
        self._holders, self._group, self._local, self._timeout = holders, group, local, timeout
        self.ranks: _ranks.Ranks | None = None
        self._wrapped: _wrapped.Wrapped | None = None
        self._undo: _undo.Undo | None = None

    def _refuse_lazy(self) -> NoReturn:
        raise TypeError(
            f"cushion.find_batch_size: {self.name} is async or a generator, whose work is done after it has returned: "
            "put the code that allocates into a plain function"
        )

    # ---- before the first try ----

    def meet(self) -> None:
        """Finds the ranks that try together."""
        if self._local or _ranks.several() == 1:
            return
        if self._group is None:
            raise RuntimeError(
                f"cushion.find_batch_size: this program has {_ranks.several()} ranks, and each would find its own size "
                f'for {self.name}. Give group="world" if all ranks run it together, or local=True if neither it nor '
                "its backward pass has collectives"
            )
        if self.is_probe and self._holders is None:
            raise TypeError(
                f"cushion.find_batch_size: group= needs grads=, the model whose gradients {self.name} adds to, such "
                "as grads=model: models that are distributed over ranks are found through it. Give grads=() if there "
                "are no gradients"
            )
        self.ranks = _ranks.of(self._group, self._timeout)

    @property
    def shows(self) -> bool:
        """Whether this rank shows the progress line."""
        return self.ranks is None or self.ranks.rank == 0

    def must_agree(self, **numbers: int) -> None:
        """Raises on every rank if the ranks were given different numbers. 0 stands for "not given"."""
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
        """Returns the smallest value of a number over the ranks."""
        return number if self.ranks is None else -self.ranks.agree(-number)[0]

    def smallest_known(self, number: int | None) -> int | None:
        """Returns the smallest value over the ranks that have one; None if no rank has."""
        if self.ranks is None:
            return number
        unknown = _batch_search.LARGEST * _batch_search.LARGEST_JUMP
        found = self.smallest(unknown if number is None else min(number, unknown))
        return None if found == unknown else found

    def prepare(self) -> None:
        """Records the state that every try begins with."""
        if self._holders is not None and _ranks.in_use():
            self._wrapped = _wrapped.Wrapped(self._holders.modules(), None if self.ranks is None else self.ranks.board)
        self._undo = _undo.Undo(self._holders, random_numbers=True)
        # This moves the copies of gradients to the host: a try has as much memory as the program will have.
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
        """Calls the function with a size. On return no rank is inside the function, and nothing holds the tensors of a
        failed try.

        :param refused: called with an out-of-memory error, before its frames are cleared
        :raises RankError: if another rank failed for another reason
        """
        # An exception that the caller is handling is the context of our errors. Its frames are not ours to clear.
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
            # Other ranks may be waiting in a collective. Joining it takes memory.
            self._collect()
            if isinstance(error, OthersFailed):
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
            # The error refers to this frame, which refers to the error: breaks the cycle.
            del error

    def _call(self, size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, BaseException | None]:
        """Returns the error instead of raising it: its frames can be cleared only once they have been left."""
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
                    raise OthersFailed(verdict)
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
        if _functions.is_lazy_result(result):
            self._refuse_lazy()
        return result

    def _may_go_on(self, error: Exception) -> bool:
        """Returns whether another size may be tried after an error. The other ranks are told of any other error."""
        if isinstance(error, _ranks.RankError):
            return False
        if isinstance(error, OthersFailed) or self._is_reason(error):
            return True
        if self.ranks is not None:
            if self.ranks.board.is_frozen:
                # Another rank failed first, and this error is a consequence.
                return True
            self._lose(_ranks.FAILED, f"{type(error).__name__}: {error}")
        if self._wrapped is not None:
            self._wrapped.back()
        return False

    def _is_reason(self, error: BaseException) -> bool:
        """Returns whether an error says that memory ran out."""
        if _failures.is_out_of_memory(error):
            return True
        also = isinstance(error, RuntimeError) and not self.is_probe
        return also and any(text in str(error) for text in _ALSO_SMALLER)

    def _lose(self, ended: int, said: str) -> tuple[_ranks.Verdict, str]:
        """Ends, on every rank, a try that failed on this one. Every rank has to read the reason, also the failed rank:
        that read is a collective."""
        assert self.ranks is not None
        verdict = self.ranks.vote(ended, 0, said)
        return verdict, self.ranks.why(verdict.rank)

    # ---- after a try ----

    def put_back(self) -> None:
        """Restores the state before the tries."""
        if self._undo is not None:
            self._undo.back()
        self._collect()

    def _collect(self) -> None:
        gc.collect()
        _failures.give_back_cached()

    def last_error(self, ended: Ended, what: str) -> BaseException:
        """Returns the error to raise after the last try."""
        assert ended.error is not None
        if ended.verdict is None or self._is_reason(ended.error):
            return ended.error
        rank, said = ended.verdict.rank, ended.why
        return _receipts.out_of_memory_class()(
            f"CUDA out of memory. Rank {rank} ran out of memory in {self.name} {what}. Its error: {said}"
        )


@contextlib.contextmanager
def _hooking_models(board: _collectives.Board) -> Iterator[None]:
    """Registers hooks on every DistributedDataParallel that the training function creates inside the block."""
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
