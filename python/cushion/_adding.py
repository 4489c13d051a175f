"""How the parts of a step add up to the whole step: the weight of each part, and the factor for its gradients and
results. Nothing is guessed: the program states it, or the step is not split."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

from . import _functions, _parts
from ._parts import Arguments

Loss = Literal["mean", "sum"]
Weight = Callable[..., Any]
Combine = Callable[[list[Any]], Any]


class Adding:
    """How the parts of one step add up."""

    def __init__(
        self,
        step: Callable[..., Any],
        split: _parts.Split,
        loss: Loss | None,
        weight: Weight | None,
        combine: Combine | None,
    ) -> None:
        self._split, self._loss, self._weight, self._combine = split, loss, weight, combine
        self._name = _functions.name_of(step)
        self.names = _positional_names(step)
        self._takes_share = _takes_share(step)
        self._check()

    def _check(self) -> None:
        if self._loss not in (None, "mean", "sum"):
            raise ValueError(f'cushion.retry: loss is {self._loss!r}, and has to be "mean" or "sum"')
        if self._loss == "sum" and self._weight is not None:
            raise TypeError('cushion.retry: parts of a sum have no weight: remove loss="sum" or weight=')
        if self._takes_share and self._loss is not None:
            raise TypeError(
                f"cushion.retry: {self._name} takes `share` and multiplies by it itself: remove loss={self._loss!r}"
            )
        if not (self._takes_share or self._loss or self._weight or self._combine):
            raise TypeError(
                f"cushion.retry: a batch is split only if the program states how the parts of {self._name} add up. "
                "Add one of these:\n"
                '    loss="mean"     the loss is a mean over the samples of a batch\n'
                '    loss="sum"      the loss is a sum over the samples of a batch\n'
                "    weight=lambda inputs, targets: (targets != -100).sum()     a mean over what this counts\n"
                "    combine=torch.cat     the step returns one result for each sample, and no loss\n"
                "or give the step a parameter `share=1.0`, and multiply its loss by that"
            )

    @property
    def has_loss(self) -> bool:
        """Whether the step computes a loss, and so may compute gradients."""
        return bool(self._takes_share or self._loss or self._weight)

    def cut(self, parts: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Arguments]:
        """Returns the arguments of `parts` parts, or of fewer if the split cannot make that many."""
        split: Any = self._split
        if isinstance(split, _parts.SplitBatch):
            split = split.named(self.names)
        return list(split(parts, *args, **kwargs))

    def check_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises if these arguments cannot be split or weighed. Called at the first call, before any shortage."""
        if isinstance(self._split, _parts.SplitBatch):
            self._split.check(args, kwargs, self.names)
            self._check_weight(*self._without_share((args, kwargs)))

    def _check_weight(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            signature = inspect.signature(self._weight) if self._weight is not None else None
        except (TypeError, ValueError):
            return
        if signature is None:
            return
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            given = [*self.names[: len(args)], *kwargs]
            raise TypeError(
                f"cushion.retry: weight= cannot be called with the arguments of {self._name}, which are "
                f"({', '.join(given)}): {error}"
            ) from None

    def shares(self, parts: Sequence[Arguments], whole: Arguments) -> list[float]:
        """Returns the share of the whole that each part has. The shares of a mean add up to 1."""
        says_itself = not isinstance(self._split, _parts.SplitBatch) and "share" not in whole[1]
        if says_itself and self._weight is None and all("share" in kwargs for _, kwargs in parts):
            return [float(kwargs["share"]) for _, kwargs in parts]
        if self._loss == "sum" or not self.has_loss:
            return [1.0] * len(parts)
        weights = [self._weight_of(part) for part in parts]
        total = math.fsum(weights)
        if total == 0:
            # No part has any weight. The whole step would divide by zero, and so does each part.
            return [1 / len(parts)] * len(parts)
        return [weight / total for weight in weights]

    def _weight_of(self, part: Arguments) -> float:
        if self._weight is not None:
            args, kwargs = self._without_share(part)
            weight = float(self._weight(*args, **kwargs))
            if not (math.isfinite(weight) and weight >= 0):
                raise ValueError(f"cushion.retry: weight= returned {weight}, and has to return 0 or more")
            return weight
        split = self._split
        if isinstance(split, _parts.SplitBatch):
            return float(split.length(*part, self.names))
        return float(_parts.rows(part))

    def _without_share(self, arguments: Arguments) -> Arguments:
        """Returns the arguments that `weight` is called with."""
        args, kwargs = arguments
        at = self.names.index("share") if self._takes_share and "share" in self.names else len(args)
        return (*args[:at], *args[at + 1 :]), {name: it for name, it in kwargs.items() if name != "share"}

    def factor(self, share: float) -> float:
        """Returns the factor for the gradients and the loss of a part; 1 if the step takes `share` and multiplies."""
        return share if self._loss == "mean" or (self._weight is not None and not self._takes_share) else 1.0

    def with_share(self, part: Arguments, share: float, whole: Arguments) -> Arguments:
        """Returns the arguments of a part, with its share of the batch if the step takes `share`."""
        args, kwargs = part
        if not self._takes_share:
            return args, {name: it for name, it in kwargs.items() if name != "share"} if "share" in kwargs else kwargs
        at = self.names.index("share") if "share" in self.names else len(args)
        if at < len(args):
            return (*args[:at], whole[0][at] * share, *args[at + 1 :]), kwargs
        return args, {**kwargs, "share": whole[1].get("share", 1.0) * share}

    @property
    def wants_every_result(self) -> bool:
        return self._combine is not None

    def check_result(self, result: Any) -> None:
        """Raises if results of parts could not be added up. Also called for a step that ran as one part."""
        if self._combine is None and result is not None and not _is_loss(result):
            raise TypeError(
                f"cushion.retry: {self._name} returned a {type(result).__name__}, and only a loss can be added up "
                "over parts, as a float or as a floating-point tensor with no dimensions: return the loss alone, or "
                "give combine=, which combines the results of the parts"
            )

    def combine(self, results: list[Any], factors: list[float]) -> Any:
        if self._combine is not None:
            if len(results) == 1 and _only_joins(self._combine):
                # Not copied.
                return results[0]
            return self._combine(results)
        if len(results) == 1 or all(result is None for result in results):
            return results[0]
        if any(result is None for result in results):
            raise TypeError(
                f"cushion.retry: {self._name} returned a loss for some parts of a batch and None for others: "
                "return a loss for every part, or for none"
            )
        terms = [result if factor == 1.0 else result * factor for result, factor in zip(results, factors)]
        return sum(terms[1:], terms[0])


def _is_loss(value: Any) -> bool:
    if isinstance(value, float):
        return True
    if getattr(value, "shape", None) != ():
        return False
    floating = getattr(value, "is_floating_point", None)
    return bool(floating()) if callable(floating) else getattr(getattr(value, "dtype", None), "kind", "") == "f"


def _only_joins(combine: Combine) -> bool:
    torch = sys.modules.get("torch")
    joins = (getattr(torch, name, None) for name in ("cat", "concat", "concatenate"))
    return any(combine is join for join in joins if join is not None)


def _takes_share(step: Callable[..., Any]) -> bool:
    found = _signature(step).get("share")
    return found is not None and found.kind in (found.POSITIONAL_OR_KEYWORD, found.KEYWORD_ONLY)


def _positional_names(step: Callable[..., Any]) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, it in _signature(step).items() if it.kind in kinds]


def _signature(step: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    # The __call__() of a module takes any arguments; its forward() has the names.
    shown = getattr(step, "forward", step) if hasattr(step, "named_modules") else step
    try:
        return dict(inspect.signature(shown).parameters)
    except (TypeError, ValueError):
        return {}
