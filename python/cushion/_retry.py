"""`cushion.retry`: steps that run again when memory runs out, as they are or in smaller parts, with the same numbers.

_parts.py        how a batch is cut
_adding.py       how its parts add up to the whole
_layers.py       layers that see the whole batch, and cannot be split
_undo.py         what a failed try leaves behind, taken back
_tries.py        one call: try after try
_ranks.py        agreement between ranks, with _collectives.py and _wrapped.py
_known.py        what is remembered and counted
_failures.py     which errors say that memory ran out"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, overload

from . import _known, _layers, _tries, _undo
from ._adding import Adding, Combine, Loss, Weight
from ._parts import Split

P = ParamSpec("P")
Q = ParamSpec("Q")
T = TypeVar("T")
R = TypeVar("R")
T_co = TypeVar("T_co", covariant=True)


class Retried(Protocol[P, T_co]):
    """A function under `@cushion.retry()`."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T_co: ...

    @overload
    def __get__(self, instance: None, owner: type | None = None, /) -> Retried[P, T_co]: ...
    @overload
    def __get__(
        self: Retried[Concatenate[Any, Q], T_co], instance: object, owner: type | None = None, /
    ) -> Retried[Q, T_co]: ...

    def stats(self) -> dict[str, int]:
        """As `cushion.retry_stats()`, of this function alone."""

    def forget(self) -> None:
        """The next call begins with the whole batch, whatever was too large before."""


# What comes back is of the type that the step returns, or of that which `combine` returns.


@overload
def retry(
    step: Callable[..., T],
    /,
    *args: Any,
    split: Split | None = None,
    loss: Loss | None = None,
    weight: Weight | None = None,
    combine: None = None,
    grads: Any = None,
    reset: Callable[[], object] | None = None,
    tries: int = 3,
    rng: bool = True,
    inexact: bool = False,
    group: Any = None,
    local: bool = False,
    timeout: float | None = None,
    **kwargs: Any,
) -> T: ...


@overload
def retry(
    step: Callable[..., T],
    /,
    *args: Any,
    split: Split | None = None,
    loss: Loss | None = None,
    weight: Weight | None = None,
    combine: Callable[[list[T]], R],
    grads: Any = None,
    reset: Callable[[], object] | None = None,
    tries: int = 3,
    rng: bool = True,
    inexact: bool = False,
    group: Any = None,
    local: bool = False,
    timeout: float | None = None,
    **kwargs: Any,
) -> R: ...


@overload
def retry(
    *,
    split: Split | None = None,
    loss: Loss | None = None,
    weight: Weight | None = None,
    combine: None = None,
    grads: Any = None,
    reset: Callable[[], object] | None = None,
    tries: int = 3,
    rng: bool = True,
    inexact: bool = False,
    group: Any = None,
    local: bool = False,
    timeout: float | None = None,
) -> Callable[[Callable[P, T]], Retried[P, T]]: ...


@overload
def retry(
    *,
    split: Split | None = None,
    loss: Loss | None = None,
    weight: Weight | None = None,
    combine: Callable[[list[Any]], R],
    grads: Any = None,
    reset: Callable[[], object] | None = None,
    tries: int = 3,
    rng: bool = True,
    inexact: bool = False,
    group: Any = None,
    local: bool = False,
    timeout: float | None = None,
) -> Callable[[Callable[P, object]], Retried[P, R]]: ...


def retry(
    step: Callable[..., Any] | None = None,
    /,
    *args: Any,
    split: Split | None = None,
    loss: Loss | None = None,
    weight: Weight | None = None,
    combine: Combine | None = None,
    grads: Any = None,
    reset: Callable[[], object] | None = None,
    tries: int = 3,
    rng: bool = True,
    inexact: bool = False,
    group: Any = None,
    local: bool = False,
    timeout: float | None = None,
    **kwargs: Any,
) -> Any:
    """Runs `step(*args, **kwargs)`; when memory runs out, takes back what the step has changed and runs it again.

        loss = cushion.retry(step, inputs, targets, grads=model)
        loss = cushion.retry(step, inputs, targets, grads=model, split=cushion.split_batch, loss="mean")

    Without a step it is a decorator, which always has its parentheses: `@cushion.retry()`. The function then has
    `stats()` and `forget()` of its own. The names of the options cannot be those of arguments of the step.

    A step runs forward and backward; the optimizer's update comes after it. Every error but out of memory passes at
    once. When nothing helps, the last error is raised as it came.

    With `split`, each new try is in twice as many parts as the one before, until they cannot be made smaller. Which
    size was too large is known for the next call: that begins with parts below it. How parts add up has to be said, by
    `loss`, `weight`, `combine` or a parameter `share` of the step.

    With ranks (`torch.distributed`), `group="world"` has all of them try again together, so that they compute the same
    gradients as without a shortage; see docs/retry.md.

    :param split: called as `split(parts, *args, **kwargs)`, returns the arguments of each part as `(args, kwargs)`, or
        of fewer if there cannot be so many, or raises `cushion.CannotSplit`. `cushion.split_batch` is one
    :param loss: "mean" or "sum", over the samples of a batch: what the loss of the step is
    :param weight: called with the arguments of a part, returns what the loss is a mean over, such as the number of
        labels that are not ignored. A part that weighs 0 adds nothing
    :param combine: makes one result of the list of those of the parts. Without it the step returns a loss, or nothing
    :param grads: whose gradients the step adds to: a module, an optimizer, parameters, or a list of those. They, the
        buffers of modules and a GradScaler are put back after a failed try
    :param reset: called before each try but the first, to put back what else the step has changed
    :param tries: how often the step is run at most, without `split`
    :param rng: whether random numbers, of PyTorch, NumPy and Python, begin again at each try
    :param inexact: splits layers whose result depends on the whole batch, such as BatchNorm in training
    :param group: a process group whose ranks run this step together, or "world" for all ranks
    :param local: the step has no collectives, and each rank tries again by itself
    :param timeout: the seconds that a rank waits for the others to end a step; if not given, the group's own time-out
    :raises TypeError: if the step is async or a generator, or if it is not said how parts add up
    """
    if step is not None and not callable(step):
        raise TypeError(f"cushion.retry: the step is {step!r}, and has to be callable: give its arguments after it")
    for name, value in (("split", split), ("weight", weight), ("combine", combine), ("reset", reset)):
        if value is not None and not callable(value):
            raise TypeError(f"cushion.retry: {name} is {value!r}, and has to be callable")
    if tries < 1:
        raise ValueError(f"cushion.retry: tries is {tries}, and the first is one, too: it takes 1 or more")
    if split is None and not (loss is None and weight is None and combine is None):
        raise TypeError(
            "cushion.retry: loss=, weight= and combine= say how parts add up, and without split= there are none"
        )
    if local and group is not None:
        raise TypeError("cushion.retry: group= has ranks try again together, and local=True each by itself: give one")
    if _is_zero_grad(reset):
        # Gradients of earlier micro-batches are kept this way, and those of the failed try are not.
        owner = getattr(reset, "__self__")
        grads, reset = owner if grads is None else [grads, owner], None
    # A generator, such as model.parameters(), is there once.
    given = None if grads is None else list(_undo.flat(grads))

    def plan(step: Callable[..., Any]) -> _tries.Plan:
        adding = None if split is None else Adding(step, split, loss, weight, combine)
        holders = None if given is None else _undo.Holders(given, step)
        return _tries.Plan(
            step, adding, holders, _layers.Layers(step), reset, tries, rng, inexact, group, local, timeout
        )

    if step is not None:
        return _tries.run(plan(step), args, kwargs, None, None)
    if args or kwargs:
        names = ", ".join([*map(repr, args), *kwargs])
        raise TypeError(f"cushion.retry: arguments ({names}) for no step: the step comes first")
    return lambda step: _decorate(plan(step))


def _is_zero_grad(reset: Any) -> bool:
    owner = getattr(reset, "__self__", None)
    holds = hasattr(owner, "param_groups") or hasattr(owner, "parameters")
    return holds and getattr(reset, "__name__", "") == "zero_grad"


def _decorate(plan: _tries.Plan) -> Retried[..., Any]:
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    if any(is_kind(plan.step) for is_kind in kinds):
        _tries.refuse_later(plan.name)
    counts, known = _known.Counts(), _known.Known()

    @functools.wraps(plan.step)
    def retried(*args: Any, **kwargs: Any) -> Any:
        return _tries.run(plan, args, kwargs, known, counts)

    function: Any = retried
    function.stats, function.forget = counts.read, known.forget
    return cast(Retried[..., Any], function)
