"""One call of `cushion.retry`: the tries that it takes.

An error keeps the frames of what failed, and they keep its tensors: a program that tries again inside of `except` has
less memory than before. Here a failed try is let go of first, and what it changed is taken back. Only then is the next
one begun."""

from __future__ import annotations

import gc
import sys
import time
import traceback
import types
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from . import _collectives, _cushion, _failures, _known, _layers, _log, _parts, _ranks, _receipts, _undo, _wrapped
from ._adding import Adding
from ._parts import Arguments

# Twice as many parts, so often, are more than any batch has rows: a split that never says no comes to an end, too.
MOST_SPLITS = 30
# Their work is done after they are called, where nobody would see it fail.
_LATER = (types.CoroutineType, types.GeneratorType, types.AsyncGeneratorType)


class Plan(NamedTuple):
    """How a step is tried, as the program has said it."""

    step: Callable[..., Any]
    #: how its parts add up; nothing if it is not to be split
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
        return getattr(self.step, "__qualname__", None) or type(self.step).__name__


def refuse_later(name: str) -> NoReturn:
    raise TypeError(
        f"cushion.retry: {name} is async or a generator, whose work is done after it has returned, "
        "where nothing can be tried again: put what needs memory into a plain function, and retry that"
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
                split = one.done and len(one.parts) > 1
                count.add(tries=one.tries, split=split, gave_up=one.refused is not None)
        if one.tries > 1:
            ended = "is done" if one.done else "failed otherwise" if one.refused is None else "gave up"
            lost = (one.last_try if one.done else time.perf_counter()) - begun
            text = "%s ran out of memory, and %s: %s; %.3f s were lost"
            _log.logger.warning(text, plan.name, ended, one.story(), lost)


def _tell_of_refusal_behind(error: BaseException, handled: BaseException | None) -> None:
    """What a step makes of a refusal is not tried again: the refusal was the end."""
    for one in _failures.chain(error, handled):
        if _failures.is_out_of_memory(one):
            _receipts.refuse_after_all(str(one))
            return


class _Part(NamedTuple):
    arguments: Arguments
    #: what its gradients and its loss are multiplied by
    factor: float
    #: it adds nothing: other ranks run as many parts, and this one keeps them company
    stands_in: bool = False
    #: its labels are all ignored, say: its loss may be no number, so its backward() is left out
    adds_nothing: bool = False


class _Run:
    def __init__(self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], known: _known.Known | None) -> None:
        self.plan = plan
        self.whole: Arguments = (args, kwargs)
        self.parts = [_Part(self.whole, 1.0)]
        # With those that weigh nothing, and are not run.
        self.cut_into = 1
        self.current = self.parts[0]
        self.results: list[Any] = []
        self.tries = 0
        self.splits = 0
        self.last_try = 0.0
        self.done = False
        # What the error says that it gave up with.
        self.refused: str | None = None
        self.known = None
        if plan.adding is not None:
            self.known = known or _known.known_of(plan.step)
        self.ranks = _ranks_of(plan)
        self.wrapped: _wrapped.Wrapped | None = None
        self.undo: _undo.Undo
        self.has_updated = False
        self.has_added = False

    def result(self) -> Any:
        _undo.watch_updates()
        self._check()
        # What the caller is handling is the context of our errors, and not ours to let go of.
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
            _give_back_cached()
            verdict = self._vote(error, why_not_again)
            if self.wrapped is not None:
                self.wrapped.back()
            self.undo.back()
            if why_not_again is not None or (verdict is not None and verdict.ended != _ranks.OUT_OF_MEMORY):
                if self.known is not None:
                    # No size is known that would be small enough.
                    self.known.forget()
                error = self._last_error(error, why_not_again, verdict)
                try:
                    raise error
                finally:
                    # They hold this frame, which holds them.
                    del error, failed, one
            for one in failed:
                one.with_traceback(None)
            del error, failed, one
            if verdict is not None:
                self._make_as_many_parts(verdict.parts)
            if self.plan.reset is not None:
                self.plan.reset()
            error = self._try()
        self.done = True
        return self._combined()

    # ---- before the first try ----

    def _check(self) -> None:
        """What would be wrong under a shortage is refused at the first call, before anything is computed."""
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
                "it give other gradients: leave split= out (the whole is then tried again, which is exact), put the "
                "layers in evaluation, or accept it with inexact=True"
            )

    def _begin_below_what_failed(self) -> None:
        parts = 1
        # Read once: another thread may forget it meanwhile.
        too_large = None if self.known is None else self.known.too_large
        if too_large is not None:
            while self._largest(self.parts) >= too_large:
                if self._prepare_next() is not None:
                    # As small as can be is worth a try.
                    break
            parts = len(self.parts)
        if self.ranks is not None and self.known is not None:
            agreed = self.ranks.begin(parts, remembers=parts > 1 or self.known.too_large is not None)
            if agreed != parts:
                self._make_as_many_parts(agreed)

    # ---- a try ----

    def _try(self) -> BaseException | None:
        """Returns the error, so that its frames are left: none that runs can be cleared."""
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
        for at, part in enumerate(self.parts):
            self.current = part
            if self.wrapped is not None:
                self.wrapped.part(at == len(self.parts) - 1)
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

    def _run_part(self, part: _Part) -> Any:
        args, kwargs = part.arguments
        result = self.plan.step(*args, **kwargs)
        if isinstance(result, _LATER):
            if isinstance(result, types.CoroutineType):
                result.close()
            refuse_later(self.plan.name)
        return result

    def _check_result(self, result: Any, part: _Part, attempt: _undo.Attempt) -> None:
        adding = self.plan.adding
        if adding is None:
            return
        adding.check_result(result)
        torch = sys.modules.get("torch")
        if torch is None or not adding.has_loss or not torch.is_grad_enabled():
            return
        if getattr(result, "requires_grad", False):
            # It is the program that calls backward(), on the sum of the parts.
            return
        if self.plan.holders is None and self.plan.reset is None:
            raise TypeError(
                f"cushion.retry: {self.plan.name} returned no loss with a graph. If it has called backward(), a failed "
                "try must take back what that has added: say whose gradients they are with grads=, such as grads=model "
                "or grads=optimizer; grads=() if there are none"
            )
        if part.factor != 1.0 and attempt.backwards == 0 and self.undo.has_added():
            raise RuntimeError(
                f"cushion.retry: {self.plan.name} has added to gradients otherwise than by backward(), so parts of it "
                "cannot be weighed: give it a parameter `share=1.0`, and multiply the loss by that"
            )

    # ---- with other ranks ----

    def _end_on_all_ranks(self) -> None:
        """Leaves a try that has gone well here; raises if it has not on another rank."""
        assert self.ranks is not None
        verdict = self.ranks.vote(_ranks.DONE, 0)
        if verdict.ended != _ranks.DONE:
            raise _OthersFailed(verdict)

    def _leave(self, error: BaseException) -> BaseException:
        """A try has failed here: what is not out of memory is told to the other ranks, and passes."""
        assert self.ranks is not None
        if isinstance(error, (_OthersFailed, _ranks.RankError)):
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
        if isinstance(error, _OthersFailed):
            return error.verdict
        short_here = _failures.is_out_of_memory(error)
        ended = _ranks.GAVE_UP if short_here and why_not_again is not None else _ranks.OUT_OF_MEMORY
        return self.ranks.vote(ended, len(self.parts), str(error))

    def _last_error(
        self, error: BaseException, why_not_again: str | None, verdict: _ranks.Verdict | None
    ) -> BaseException:
        why = "" if self.ranks is None or verdict is None else self.ranks.why(verdict.rank)
        if verdict is not None and (verdict.ended == _ranks.FAILED or not _failures.is_out_of_memory(error)):
            if verdict.ended == _ranks.FAILED:
                return _ranks.RankError(f"cushion.retry: rank {verdict.rank} failed in {self.plan.name}: {why}")
            self.refused = ""
            return _receipts.out_of_memory_class()(
                f"CUDA out of memory. Rank {verdict.rank} ran out of memory in {self.plan.name} and cannot go on in "
                f"smaller parts, so all ranks give up. It said: {why}"
            )
        self._note(error, why_not_again or "another rank gave up")
        return error

    # ---- what comes next ----

    def _may_have_added(self, error: BaseException) -> str | None:
        """Why there is no other try, if a failed one has changed what cannot be put back."""
        if not _failures.is_out_of_memory(error):
            return None
        self._remember()
        if self.has_updated:
            return "an optimizer has changed the parameters, which cannot be taken back: call its step() afterwards"
        has_added = self.has_added or _failures.was_in_backward(error)
        if self.plan.holders is None and self.plan.reset is None and has_added:
            return "backward() has added to gradients, which can be taken back with grads=model or grads=optimizer"
        return None

    def _remember(self) -> None:
        if self.known is not None:
            self.known.failed(_parts.size(self.current.arguments))

    def _prepare_next(self) -> str | None:
        """Makes the parts smaller, if they may be; or returns why there is no other try."""
        adding = self.plan.adding
        if adding is None:
            more = self.tries < self.plan.tries
            return None if more else "no more are allowed: with split= it goes on in smaller parts"
        self.splits += 1
        before, cut_into = self.parts, self.cut_into
        why = ""
        if self.splits <= MOST_SPLITS:
            try:
                self._make_parts(2 * self.cut_into)
            except _parts.CannotSplit as error:
                why = f": {error}"
        # Fewer than asked for but more than before are the smallest that there are.
        if _own(self.parts) > _own(before) or self._largest(self.parts) < self._largest(before):
            return None
        self.parts, self.cut_into = before, cut_into
        return f"a part cannot be made smaller{why}"

    def _make_as_many_parts(self, number: int) -> None:
        """As many parts as the other ranks run. A batch that cannot be split is one of them: it was not too large."""
        try:
            self._make_parts(number)
        except _parts.CannotSplit:
            self.parts = self._without_weight([_Part(self.whole, 1.0)], [1.0], number)
            self.cut_into = len(self.parts)

    def _make_parts(self, number: int) -> None:
        """So many parts, or as many as there can be; on several ranks, those of the others are kept company."""
        adding = self.plan.adding
        if adding is None or number == 1:
            self.parts, self.cut_into = [_Part(self.whole, 1.0)], 1
            return
        self._refuse_whole_batch_layers(look_again=True)
        cut = adding.cut(number, *self.whole)
        if not cut:
            raise _parts.CannotSplit("the split gave no parts")
        shares = adding.shares(cut, self.whole)
        made = [
            _Part(adding.with_share(part, share, self.whole), adding.factor(share)) for part, share in zip(cut, shares)
        ]
        self.parts = self._without_weight(made, shares, number)
        self.cut_into = max(len(cut), len(self.parts))

    def _without_weight(self, made: list[_Part], shares: list[float], number: int) -> list[_Part]:
        """Parts that weigh nothing add nothing. They are left out, or only their results are wanted; where other ranks
        run as many parts, one that does weigh something is run in their place, times zero, so that every collective has
        its partner."""
        adding = self.plan.adding
        assert adding is not None
        counted = [part for part, share in zip(made, shares) if share > 0]
        if len(counted) < len(made) and adding.wants_every_result:
            if self.ranks is not None:
                raise _parts.CannotSplit(
                    "a part weighs nothing, and combine= wants its result, which needs the collectives of its backward "
                    "pass: leave combine= out, and return the loss"
                )
            return [
                part if share > 0 else part._replace(factor=0.0, adds_nothing=True) for part, share in zip(made, shares)
            ]
        if self.ranks is not None and len(counted) < number:
            company = _Part(adding.with_share(counted[0].arguments, 0.0, self.whole), 0.0, stands_in=True)
            # Not last, where some models end their step; the last is one of its own.
            counted[-1:-1] = [company] * (number - len(counted))
        return counted

    def _largest(self, parts: list[_Part]) -> int:
        return max(_parts.size(part.arguments) for part in parts)

    def _combined(self) -> Any:
        adding = self.plan.adding
        if self.known is not None:
            self.known.worked(self._largest(self.parts), whole=self.cut_into == 1)
            self.known.is_checked = True
        if adding is None:
            return self.results[0]
        return adding.combine(self.results, [part.factor for part in self.parts if not part.stands_in])

    def _note(self, error: BaseException, why: str) -> None:
        self.refused = str(error)
        # Python 3.11 and later: its text stays as it is, because programs match against that.
        if hasattr(error, "add_note"):
            error.add_note(f"cushion.retry: {self.story()}; {why}")

    def story(self) -> str:
        tries = "1 try" if self.tries == 1 else f"{self.tries} tries"
        parts = "1 part" if len(self.parts) == 1 else f"{len(self.parts)} parts"
        return f"{tries}, the last in {parts}"


def _own(parts: list[_Part]) -> int:
    return len([part for part in parts if not part.stands_in])


class _OthersFailed(Exception):
    """The try went well here, and not on another rank."""

    def __init__(self, verdict: _ranks.Verdict) -> None:
        super().__init__("another rank failed")
        self.verdict = verdict


def _ranks_of(plan: Plan) -> _ranks.Ranks | None:
    if plan.local or _ranks.several() == 1:
        return None
    if plan.group is not None and plan.holders is None:
        raise TypeError(
            f"cushion.retry: with group=, whose gradients does {plan.name} add to? Say it with grads=, such as "
            "grads=model: models that are distributed over ranks are found by it. grads=() if there are none"
        )
    if plan.group is None:
        raise RuntimeError(
            f"cushion.retry: this program has {_ranks.several()} ranks, and {plan.name} may be tried again on one of "
            'them alone, while the others wait in a collective. Say group="world" if all ranks run the step together, '
            "or local=True if it has no collectives, in it or in its backward pass"
        )
    return _ranks.of(plan.group, plan.timeout)


def _give_back_cached() -> None:
    """So that the next try, with other sizes, does not begin by cutting up the blocks of the one before."""
    torch = sys.modules.get("torch")
    if torch is None or _cushion.is_simulated():
        _cushion.empty_cache()
    elif torch.cuda.is_initialized():
        torch.cuda.empty_cache()
