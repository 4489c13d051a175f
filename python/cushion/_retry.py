"""`cushion.retry`: runs a step again when memory runs out, whole or in smaller parts, with the same results.

_parts.py        splits a batch
_adding.py       how its parts add up to the whole
_splitting.py    the parts of one call
_layers.py       finds layers that see the whole batch, and cannot be split
_undo.py         undoes the changes of a failed try
_tries.py        one call: runs the tries
_ranks.py        agreement between ranks, with _collectives.py and _wrapped.py
_known.py        what is remembered and counted
_failures.py     recognises out-of-memory errors"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, overload

from . import _functions, _known, _layers, _tries, _undo
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
        """Makes the next call begin with the whole batch, even if it was too large before."""


# The overloads give the type of the result: that of the step, or that of `combine`. Type checkers need every keyword
# spelled out in each of them.


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
    """Runs `step(*args, **kwargs)`. When memory runs out, undoes the changes of the step and runs it again.

        loss = cushion.retry(step, inputs, targets, grads=model)
        loss = cushion.retry(step, inputs, targets, grads=model, split=cushion.split_batch, loss="mean")

    Without a step it is a decorator, always with parentheses: `@cushion.retry()`. The decorated function has its own
    `stats()` and `forget()`. Arguments of the step must not have the names of these options.

    A step runs forward and backward; the optimizer's update comes after it. Errors other than out of memory are raised
    at once. If no try succeeds, the last error is raised unchanged.

    With `split`, each new try runs twice as many parts as the one before, until parts cannot be made smaller. The size
    that was too large is remembered, and the next call begins with smaller parts. State how parts add up with `loss`,
    `weight`, `combine` or a parameter `share` of the step.

    With several ranks (`torch.distributed`), `group="world"` makes all of them try again together, so that they compute
    the same gradients as without a shortage; see docs/retry.md.

    :param split: called as `split(parts, *args, **kwargs)`, returns a list with the arguments of each part as
        `(args, kwargs)`, or of fewer parts if that many cannot be made, or raises `cushion.CannotSplit`. See
        `cushion.split_batch`
    :param loss: "mean" or "sum": how the loss of the step is computed from the samples of a batch
    :param weight: called with the arguments of a part, returns the number of items that the loss is a mean over, such
        as the number of labels that are not ignored. A part with the weight 0 adds nothing
    :param combine: called with the list of the results of the parts, returns the result of the step. Without it the
        step returns a loss, or None
    :param grads: the owner of the gradients that the step adds to: a module, an optimizer, parameters, or a list of
        those. The gradients, the buffers of modules and a GradScaler are restored after a failed try
    :param reset: called before each try except the first, to restore other state that the step has changed
    :param tries: how often the step runs at most, without `split`
    :param rng: whether each try begins with the same random state of PyTorch, NumPy and Python
    :param inexact: allows splitting layers whose result depends on the whole batch, such as BatchNorm in training
    :param group: a process group whose ranks run this step together, or "world" for all ranks
    :param local: the step has no collectives, and each rank tries again by itself
    :param timeout: how many seconds a rank waits for the others to end a step; by default the group's own timeout
    :raises TypeError: if the step is async or a generator, or if it is not stated how parts add up
    """
    if step is not None and not callable(step):
        raise TypeError(f"cushion.retry: the step is {step!r}, and has to be callable: give its arguments after it")
    for name, value in (("split", split), ("weight", weight), ("combine", combine), ("reset", reset)):
        if value is not None and not callable(value):
            raise TypeError(f"cushion.retry: {name} is {value!r}, and has to be callable")
    if tries < 1:
        raise ValueError(f"cushion.retry: tries is {tries}, and has to be 1 or more")
    if split is None and not (loss is None and weight is None and combine is None):
        raise TypeError(
            "cushion.retry: loss=, weight= and combine= state how parts add up, and without split= there are no parts"
        )
    if local and group is not None:
        raise TypeError("cushion.retry: group= makes ranks try again together, local=True each by itself: give one")
    if _is_zero_grad(reset):
        # As `grads`, it keeps the gradients of earlier micro-batches and removes only those of the failed try.
        owner = getattr(reset, "__self__")
        grads, reset = owner if grads is None else [grads, owner], None
    # A generator, such as model.parameters(), can be read only once.
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
        raise TypeError(f"cushion.retry: arguments ({names}) without a step: the step comes first")
    return lambda step: _decorate(plan(step))


def _is_zero_grad(reset: Any) -> bool:
    owner = getattr(reset, "__self__", None)
    holds = hasattr(owner, "param_groups") or hasattr(owner, "parameters")
    return holds and getattr(reset, "__name__", "") == "zero_grad"


def _decorate(plan: _tries.Plan) -> Retried[..., Any]:
    if _functions.is_lazy(plan.step):
        _tries.refuse_lazy(plan.name)
    counts, known = _known.Counts(), _known.Known()

    @functools.wraps(plan.step)
    def retried(*args: Any, **kwargs: Any) -> Any:
        return _tries.run(plan, args, kwargs, known, counts)

    function: Any = retried
    function.stats, function.forget = counts.read, known.forget
    return cast(Retried[..., Any], function)
