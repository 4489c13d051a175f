"""The parts that one call of `cushion.retry` runs its step in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from . import _parts
from ._adding import Adding
from ._parts import Arguments

# Doubling the number of parts this often makes more parts than any batch has rows. It ends a split that never raises
# CannotSplit.
MOST_SPLITS = 30


class Part(NamedTuple):
    arguments: Arguments
    #: the factor for its gradients and its loss
    factor: float
    #: the part adds nothing: it runs because other ranks run more parts, so that their collectives have a partner
    stands_in: bool = False
    #: the part weighs nothing, for example because all labels are ignored. Its loss may be NaN: backward() is skipped
    adds_nothing: bool = False


class Splitting:
    """The parts of one call, at first one: the whole batch.

    :param adding: how parts add up; None if the step must not be split
    :param with_ranks: several ranks run the step together, and have to run the same number of parts
    """

    def __init__(self, adding: Adding | None, whole: Arguments, with_ranks: bool) -> None:
        self._adding, self._whole, self._with_ranks = adding, whole, with_ranks
        self.parts = [Part(whole, 1.0)]
        #: the number of parts, with those that weigh nothing and are not run
        self.cut_into = 1
        self._splits = 0

    @property
    def largest(self) -> int:
        """The size of the largest part."""
        return _largest(self.parts)

    def make_smaller(self, check: Callable[[], None]) -> str | None:
        """Doubles the number of parts. Returns None, or the reason if the parts cannot be made smaller.

        :param check: raises CannotSplit if the step must not be split
        """
        self._splits += 1
        before, cut_into = self.parts, self.cut_into
        why = ""
        if self._splits <= MOST_SPLITS:
            try:
                self._make(2 * self.cut_into, check)
            except _parts.CannotSplit as error:
                why = f": {error}"
        # A split may make fewer parts than asked for. If there are more than before, these are the smallest.
        if _own(self.parts) > _own(before) or _largest(self.parts) < _largest(before):
            return None
        self.parts, self.cut_into = before, cut_into
        return f"a part cannot be made smaller{why}"

    def make_as_many(self, number: int, check: Callable[[], None]) -> None:
        """Makes as many parts as the other ranks run. A batch that cannot be split runs as one part, with stand-ins for
        the others: this rank was not short of memory."""
        try:
            self._make(number, check)
        except _parts.CannotSplit:
            self.parts = self._without_weight([Part(self._whole, 1.0)], [1.0], number)
            self.cut_into = len(self.parts)

    def _make(self, number: int, check: Callable[[], None]) -> None:
        """Makes `number` parts, or as many as there can be. With several ranks, stand-ins make up the number."""
        adding = self._adding
        if adding is None or number == 1:
            self.parts, self.cut_into = [Part(self._whole, 1.0)], 1
            return
        check()
        cut = adding.cut(number, *self._whole)
        if not cut:
            raise _parts.CannotSplit("the split returned no parts")
        shares = adding.shares(cut, self._whole)
        made = [
            Part(adding.with_share(part, share, self._whole), adding.factor(share)) for part, share in zip(cut, shares)
        ]
        self.parts = self._without_weight(made, shares, number)
        self.cut_into = max(len(cut), len(self.parts))

    def _without_weight(self, made: list[Part], shares: list[float], number: int) -> list[Part]:
        """Handles parts that weigh nothing, and so add nothing. They are removed, or run only for their results if
        `combine` needs them. With several ranks, a part with weight runs in their place with the factor 0, so that
        every collective has its partner."""
        adding = self._adding
        assert adding is not None
        counted = [part for part, share in zip(made, shares) if share > 0]
        if len(counted) < len(made) and adding.wants_every_result:
            if self._with_ranks:
                raise _parts.CannotSplit(
                    "a part weighs nothing, and combine= needs its result, which needs the collectives of its backward "
                    "pass: remove combine=, and return the loss"
                )
            return [
                part if share > 0 else part._replace(factor=0.0, adds_nothing=True) for part, share in zip(made, shares)
            ]
        if self._with_ranks and len(counted) < number:
            stand_in = Part(adding.with_share(counted[0].arguments, 0.0, self._whole), 0.0, stands_in=True)
            # Before the last part: DDP reduces gradients in the last one, which has to be a real part.
            counted[-1:-1] = [stand_in] * (number - len(counted))
        return counted

    def combine(self, results: list[Any]) -> Any:
        """Returns the result of the whole step, from the results of the parts that are not stand-ins."""
        if self._adding is None:
            return results[0]
        return self._adding.combine(results, [part.factor for part in self.parts if not part.stands_in])


def _own(parts: list[Part]) -> int:
    return len([part for part in parts if not part.stands_in])


def _largest(parts: list[Part]) -> int:
    return max(_parts.size(part.arguments) for part in parts)
