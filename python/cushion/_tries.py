"""One call of `cushion.retry`: runs the tries.

An error refers to the frames of the failed call, and they refer to its tensors: a program that tries again inside
`except` has less memory than before. Here the frames of a failed try are cleared and its changes are undone before the
next try begins."""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from . import _collectives, _failures, _functions, _known, _layers, _log, _parts, _ranks, _receipts, _undo, _wrapped
from ._adding import Adding
from ._parts import Arguments
from ._ranks import OthersFailed
from ._splitting import Part, Splitting


class Plan(NamedTuple):
    """The options of a call of `cushion.retry`."""

    step: Callable[..., Any]
    #: how its parts add up; None if the step must not be split
    adding: Adding | None
    holders: _undo.Holders | None
    layers: _layers.Layers
    reset: Callable[[], object] | None
    tries: int
    random_numbers: bool
    inexact: bool
    #: a process group whose ranks run the step together, or "world"
    group: Any
    local: bool
    timeout: float | None

    @property
    def name(self) -> str:
        return _functions.name_of(self.step)


def refuse_lazy(name: str) -> NoReturn:
    raise TypeError(
        f"cushion.retry: {name} is async or a generator, whose work is done after it has returned, "
        "where nothing can be tried again: put the code that allocates into a plain function, and retry that"
    )


def run(
    plan: Plan,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    known: _known.Known | None,
    counts: _known.Counts | None,
) -> Any:
    begun = time.perf_counter()
    handled = sys.exc_info()[1]
    one = _Run(plan, args, kwargs, known)
    try:
        with _receipts.Expecting():
            return one.result()
    except Exception as error:
        if one.refused is None:
            _tell_of_refusal_behind(error, handled)
        raise
    finally:
        if one.refused is not None:
            _receipts.refuse_after_all(one.refused)
        for count in (_known.totals, counts):
            if count is not None:
                split = one.done and len(one.splitting.parts) > 1
                count.add(tries=one.tries, split=split, gave_up=one.refused is not None)
        if one.tries > 1:
            ended = "is done" if one.done else "failed otherwise" if one.refused is None else "gave up"
            lost = (one.last_try if one.done else time.perf_counter()) - begun
            text = "%s ran out of memory, and %s: %s; %.3f s were lost"
            _log.logger.warning(text, plan.name, ended, one.story(), lost)


def _tell_of_refusal_behind(error: BaseException, handled: BaseException | None) -> None:
    """Reports the refusal behind another error: if a step turns a refusal into its own error, there is no other try."""
    for one in _failures.chain(error, handled):
        if _failures.is_out_of_memory(one):
            _receipts.refuse_after_all(str(one))
            return


class _Run:
    def __init__(self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], known: _known.Known | None) -> None:
        self.plan = plan
        self.whole: Arguments = (args, kwargs)
        self.results: list[Any] = []
        self.tries = 0
        self.last_try = 0.0
        self.done = False
        # The message of the error that the call gave up with.
        self.refused: str | None = None
        self.known = None
        if plan.adding is not None:
            self.known = known or _known.known_of(plan.step)
        self.ranks = _ranks_of(plan)
        self.splitting = Splitting(plan.adding, self.whole, with_ranks=self.ranks is not None)
        self.current = self.splitting.parts[0]
        self.wrapped: _wrapped.Wrapped | None = None
        self.undo: _undo.Undo
        self.has_updated = False
        self.has_added = False

    def result(self) -> Any:
        _undo.watch_updates()
        self._check()
        # An exception that the caller is handling is the context of our errors. Its frames are not ours to clear.
        handled = sys.exc_info()[1]
        if self.plan.holders is not None and _ranks.in_use():
            board = None if self.ranks is None else self.ranks.board
            self.wrapped = _wrapped.Wrapped(self.plan.holders.modules(), board)
        self._begin_below_what_failed()
        self.undo = _undo.Undo(self.plan.holders, self.plan.random_numbers)
        error = self._try()
        while error is not None:
            failed = _failures.chain(error, handled)
            may_have_added = self._may_have_added(error)
            for one in failed:
                traceback.clear_frames(one.__traceback__)
            why_not_again = may_have_added
            if why_not_again is None and _failures.is_out_of_memory(error):
                why_not_again = self._prepare_next()
            gc.collect()
            _failures.give_back_cached()
            verdict = self._vote(error, why_not_again)
            if self.wrapped is not None:
                self.wrapped.back()
            self.undo.back()
            if why_not_again is not None or (verdict is not None and verdict.ended != _ranks.OUT_OF_MEMORY):
                if self.known is not None:
                    # No size was small enough: there is nothing to remember.
                    self.known.forget()
                error = self._last_error(error, why_not_again, verdict)
                try:
                    raise error
                finally:
                    # The errors refer to this frame, which refers to them: breaks the cycle.
                    del error, failed, one
            for one in failed:
                one.with_traceback(None)
            del error, failed, one
            if verdict is not None:
                self.splitting.make_as_many(verdict.parts, self._check_layers_again)
            if self.plan.reset is not None:
                self.plan.reset()
            error = self._try()
        self.done = True
        return self._combined()

    # ---- before the first try ----

    def _check(self) -> None:
        """Raises at the first call, before anything is computed, for a step that could not be split in a shortage."""
        adding = self.plan.adding
        if adding is None or self.known is None:
            return
        if not self.known.is_checked:
            adding.check_arguments(*self.whole)
        self._refuse_whole_batch_layers()

    def _refuse_whole_batch_layers(self, look_again: bool = False) -> None:
        if self.plan.inexact:
            return
        modules = [] if self.plan.holders is None else self.plan.holders.modules()
        given = _layers.modules_among((*self.whole[0], *self.whole[1].values()))
        layers = self.plan.layers.names(modules + given, look_again or bool(given))
        if layers:
            more = f" and {len(layers) - 3} more" if len(layers) > 3 else ""
            raise _parts.CannotSplit(
                f"cushion.retry: the result of {', '.join(layers[:3])}{more} depends on the whole batch, so parts of "
                "it give other gradients: remove split= (the whole is then tried again, which is exact), put the "
                "layers in evaluation mode, or accept it with inexact=True"
            )

    def _begin_below_what_failed(self) -> None:
        parts = 1
        # Read once: another thread may reset it meanwhile.
        too_large = None if self.known is None else self.known.too_large
        if too_large is not None:
            while self.splitting.largest >= too_large:
                if self._prepare_next() is not None:
                    # The smallest parts are still tried.
                    break
            parts = len(self.splitting.parts)
        if self.ranks is not None and self.known is not None:
            agreed = self.ranks.begin(parts, remembers=parts > 1 or self.known.too_large is not None)
            if agreed != parts:
                self.splitting.make_as_many(agreed, self._check_layers_again)

    # ---- a try ----

    def _try(self) -> BaseException | None:
        """Returns the error instead of raising it: its frames can be cleared only once they have been left."""
        self.tries += 1
        self.last_try = time.perf_counter()
        self.results = []
        failed: BaseException | None = None
        if self.wrapped is not None:
            self.wrapped.begin()
        if self.ranks is not None:
            self.ranks.board.open()
        try:
            self._run_parts()
        except Exception as error:
            if self.ranks is None:
                if not _failures.is_out_of_memory(error):
                    raise
                failed = error
            else:
                failed = self._leave(error)
        finally:
            if self.ranks is not None:
                self.ranks.board.close()
        return failed

    def _run_parts(self) -> None:
        only_once = self.plan.adding is not None or self.ranks is not None
        if self.ranks is not None and self.ranks.board.is_frozen:
            raise _collectives.LeftStep("another rank has left this step")
        parts = self.splitting.parts
        for at, part in enumerate(parts):
            self.current = part
            if self.wrapped is not None:
                self.wrapped.part(at == len(parts) - 1)
            with _undo.Attempt(self.undo, only_once) as attempt:
                attempt.factor, attempt.adds_nothing = part.factor, part.adds_nothing
                try:
                    result = self._run_part(part)
                finally:
                    self.has_updated = self.has_updated or attempt.updated
                    self.has_added = self.has_added or attempt.backwards > 0
            self._check_result(result, part, attempt)
            if not part.stands_in:
                self.results.append(result)
        if self.ranks is not None:
            self._end_on_all_ranks()
        if self.wrapped is not None:
            self.wrapped.end()

    def _run_part(self, part: Part) -> Any:
        args, kwargs = part.arguments
        result = self.plan.step(*args, **kwargs)
        if _functions.is_lazy_result(result):
            refuse_lazy(self.plan.name)
        return result

    def _check_result(self, result: Any, part: Part, attempt: _undo.Attempt) -> None:
        adding = self.plan.adding
        if adding is None:
            return
        adding.check_result(result)
        torch = sys.modules.get("torch")
        if torch is None or not adding.has_loss or not torch.is_grad_enabled():
            return
        if getattr(result, "requires_grad", False):
            # The program itself calls backward(), on the sum of the parts.
            return
        if self.plan.holders is None and self.plan.reset is None:
            raise TypeError(
                f"cushion.retry: {self.plan.name} returned no loss with a graph. If it has called backward(), a failed "
                "try must undo what that added to gradients: give their owner as grads=, such as grads=model or "
                "grads=optimizer; grads=() if there are no gradients"
            )
        if part.factor != 1.0 and attempt.backwards == 0 and self.undo.has_added():
            raise RuntimeError(
                f"cushion.retry: {self.plan.name} has added to gradients without backward(), so its parts cannot be "
                "weighted: give it a parameter `share=1.0`, and multiply the loss by that"
            )

    # ---- with other ranks ----

    def _end_on_all_ranks(self) -> None:
        """Ends a try that succeeded on this rank. Raises OthersFailed if it failed on another rank."""
        assert self.ranks is not None
        verdict = self.ranks.vote(_ranks.DONE, 0)
        if verdict.ended != _ranks.DONE:
            raise OthersFailed(verdict)

    def _leave(self, error: BaseException) -> BaseException:
        """Returns an out-of-memory error, or that of another rank. Tells the ranks of other errors, and raises them."""
        assert self.ranks is not None
        if isinstance(error, (OthersFailed, _ranks.RankError)):
            if isinstance(error, _ranks.RankError):
                raise error
            return error
        if _failures.is_out_of_memory(error) or self.ranks.board.is_frozen:
            return error
        self.ranks.why(self.ranks.vote(_ranks.FAILED, 0, f"{type(error).__name__}: {error}").rank)
        if self.wrapped is not None:
            self.wrapped.back()
        raise error

    def _vote(self, error: BaseException, why_not_again: str | None) -> _ranks.Verdict | None:
        if self.ranks is None:
            return None
        if isinstance(error, OthersFailed):
            return error.verdict
        short_here = _failures.is_out_of_memory(error)
        ended = _ranks.GAVE_UP if short_here and why_not_again is not None else _ranks.OUT_OF_MEMORY
        return self.ranks.vote(ended, len(self.splitting.parts), str(error))

    def _last_error(
        self, error: BaseException, why_not_again: str | None, verdict: _ranks.Verdict | None
    ) -> BaseException:
        why = "" if self.ranks is None or verdict is None else self.ranks.why(verdict.rank)
        if verdict is not None and (verdict.ended == _ranks.FAILED or not _failures.is_out_of_memory(error)):
            if verdict.ended == _ranks.FAILED:
                return _ranks.RankError(f"cushion.retry: rank {verdict.rank} failed in {self.plan.name}: {why}")
            self.refused = ""
            return _receipts.out_of_memory_class()(
                f"CUDA out of memory. Rank {verdict.rank} ran out of memory in {self.plan.name} and cannot make its "
                f"parts smaller, so all ranks give up. Its error: {why}"
            )
        self._note(error, why_not_again or "another rank gave up")
        return error

    # ---- the next try ----

    def _may_have_added(self, error: BaseException) -> str | None:
        """Returns why there is no other try, if a failed try made a change that cannot be undone; otherwise None."""
        if not _failures.is_out_of_memory(error):
            return None
        self._remember()
        if self.has_updated:
            return "an optimizer has changed the parameters, which cannot be undone: call its step() afterwards"
        has_added = self.has_added or _failures.was_in_backward(error)
        if self.plan.holders is None and self.plan.reset is None and has_added:
            return "backward() has added to gradients, which can be undone with grads=model or grads=optimizer"
        return None

    def _remember(self) -> None:
        if self.known is not None:
            self.known.failed(_parts.size(self.current.arguments))

    def _prepare_next(self) -> str | None:
        """Makes the parts smaller, if the step may be split. Returns why there is no other try, or None."""
        if self.plan.adding is None:
            more = self.tries < self.plan.tries
            return None if more else "no more are allowed: with split= it goes on in smaller parts"
        return self.splitting.make_smaller(self._check_layers_again)

    def _check_layers_again(self) -> None:
        self._refuse_whole_batch_layers(look_again=True)

    def _combined(self) -> Any:
        if self.known is not None:
            self.known.worked(self.splitting.largest, whole=self.splitting.cut_into == 1)
            self.known.is_checked = True
        return self.splitting.combine(self.results)

    def _note(self, error: BaseException, why: str) -> None:
        self.refused = str(error)
        # A note, from Python 3.11 on: the message itself stays, because programs match it.
        if hasattr(error, "add_note"):
            error.add_note(f"cushion.retry: {self.story()}; {why}")

    def story(self) -> str:
        tries = "1 try" if self.tries == 1 else f"{self.tries} tries"
        number = len(self.splitting.parts)
        parts = "1 part" if number == 1 else f"{number} parts"
        return f"{tries}, the last in {parts}"


def _ranks_of(plan: Plan) -> _ranks.Ranks | None:
    if plan.local or _ranks.several() == 1:
        return None
    if plan.group is not None and plan.holders is None:
        raise TypeError(
            f"cushion.retry: group= needs grads=, the model whose gradients {plan.name} adds to, such as grads=model: "
            "models that are distributed over ranks are found through it. Give grads=() if there are no gradients"
        )
    if plan.group is None:
        raise RuntimeError(
            f"cushion.retry: this program has {_ranks.several()} ranks, and one of them could try {plan.name} again "
            'alone, while the others wait in a collective. Give group="world" if all ranks run the step together, or '
            "local=True if neither the step nor its backward pass has collectives"
        )
    return _ranks.of(plan.group, plan.timeout)
