"""Layers and losses whose result for one sample depends on the whole batch, such as BatchNorm in training.

Such a layer computes other numbers for parts of a batch, so `cushion.retry` does not split a step that uses one. It
looks for them in the modules given as `grads=`, and in those that the step refers to: a loss is often a separate
module."""

from __future__ import annotations

import functools
import itertools
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

# Losses that compare the samples of a batch with each other, by the names of their classes.
_LOSSES = frozenset(
    ("ClipLoss", "SigLipLoss", "CoCaLoss", "NTXentLoss", "NT_Xent", "SupConLoss", "InfoNCE", "BarlowTwinsLoss")
    + ("VICRegLoss", "MultipleNegativesRankingLoss")
)
# Layers and models that compare samples in training only.
_IN_TRAINING = frozenset(("CLIPModel", "SiglipModel", "InPlaceABN"))
# How many levels of functions and containers are searched for the modules that a step refers to.
_DEEP = 4
# How many values of a list or a dict are searched: a list of models is short, and a list of data is long.
_WIDE = 64


class Layers:
    """The layers of a step that see the whole batch. They are searched for once, unless `look_again` is set."""

    def __init__(self, step: Callable[..., Any]) -> None:
        self._step = step
        self._found: list[tuple[str, weakref.ref[Any]]] | None = None

    def names(self, modules: list[Any], look_again: bool = False) -> list[str]:
        """Returns the names of the layers, in the step or in `modules`, that depend on the whole batch in their present
        mode."""
        if self._found is None or look_again:
            found: dict[int, tuple[str, Any]] = {}
            for root in (*modules, *modules_of(self._step)):
                for name, layer in root.named_modules():
                    kind: Any = type(layer)
                    if _sees_the_batch(kind):
                        found.setdefault(id(layer), (name, layer))
            self._found = [
                (f"{name or 'the module'} ({type(layer).__name__})", weakref.ref(layer))
                for name, layer in found.values()
            ]
        layers = ((name, layer()) for name, layer in self._found)
        return [name for name, layer in layers if layer is not None and _depends_now(layer)]


@functools.lru_cache(maxsize=4096)
def _sees_the_batch(kind: Any) -> bool:
    return _is_batch_norm(kind) or _is_loss(kind) or kind.__name__ in _IN_TRAINING


def _is_loss(kind: type) -> bool:
    return kind.__name__ in _LOSSES or kind.__module__.partition(".")[0] == "pytorch_metric_learning"


def _is_batch_norm(kind: type) -> bool:
    return any("BatchNorm" in base.__name__ for base in kind.__mro__) and "Frozen" not in kind.__name__


def _depends_now(layer: Any) -> bool:
    # A loss compares samples in evaluation too. Batch norm in evaluation uses its running statistics, if it has any.
    kind = type(layer)
    always = _is_loss(kind) or (_is_batch_norm(kind) and getattr(layer, "running_mean", None) is None)
    return always or bool(layer.training)


# ---- the modules that a step refers to ----


def modules_among(values: Iterable[Any]) -> list[Any]:
    """Returns the values that are modules."""
    module_class = _module_class()
    return [] if module_class is None else [it for it in values if issubclass(type(it), module_class)]


def _module_class() -> Any:
    # PyTorch may be imported only in part, by another thread.
    return getattr(getattr(sys.modules.get("torch"), "nn", None), "Module", None)


def modules_of(step: Callable[..., Any] | None) -> list[Any]:
    """Returns the modules that a step refers to: itself, its owner, its closure, its globals, and their attributes."""
    module_class = _module_class()
    if module_class is None or step is None:
        return []
    looking = _Looking(module_class)
    looking.at(step, frozenset(), _DEEP)
    return list(looking.found.values())


class _Looking:
    """Searches values for modules. It follows only attributes whose name occurs in the code of a function: the step
    does not use others."""

    def __init__(self, module_class: type) -> None:
        self._module_class = module_class
        self.found: dict[int, Any] = {}
        # The values are kept alive here, so that no other object gets the same id.
        self._seen: dict[tuple[int, frozenset[str]], Any] = {}

    def at(self, value: Any, names: frozenset[str], deep: int) -> None:
        if deep == 0 or (id(value), names) in self._seen:
            return
        self._seen[id(value), names] = value
        # type() instead of isinstance(): the `__class__` of a proxy object may run any code.
        kind = type(value)
        if issubclass(kind, self._module_class):
            self.found[id(value)] = value
        elif kind is types.MethodType:
            self._function(value.__func__, value.__self__, deep)
        elif kind is types.FunctionType:
            self._function(value, None, deep)
        elif kind is functools.partial:
            self._all([value.func, *value.args, *value.keywords.values()], names, deep)
        elif kind in (list, tuple, dict):
            inside = value.values() if kind is dict else value
            self._all(list(itertools.islice(inside, _WIDE)), names, deep)
        elif not issubclass(kind, (type, types.ModuleType, types.BuiltinFunctionType)):
            self._attributes(value, names, deep)

    def _all(self, values: list[Any], names: frozenset[str], deep: int) -> None:
        for value in values:
            self.at(value, names, deep - 1)

    def _function(self, function: Any, owner: Any, deep: int) -> None:
        # PyTorch's own functions do not refer to modules of the program.
        if type(function) is types.FunctionType and (function.__module__ or "").partition(".")[0] != "torch":
            names = _names_in(function.__code__)
            named = [function.__globals__[name] for name in names if name in function.__globals__]
            defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
            self._all([*_closed_over(function), *named, *defaults], names, deep)
            if owner is not None:
                self.at(owner, names, deep)

    def _attributes(self, value: Any, names: frozenset[str], deep: int) -> None:
        attributes = getattr(value, "__dict__", None)
        if type(attributes) is dict:
            self._all([attributes[name] for name in names if name in attributes], names, deep)
        for name in (*names, "__call__"):
            method = getattr(type(value), name, None)
            if type(method) is types.FunctionType:
                self.at(types.MethodType(method, value), names, deep - 1)


def _closed_over(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            # Not yet assigned.
            continue


def _names_in(code: types.CodeType) -> frozenset[str]:
    inner = [_names_in(it) for it in code.co_consts if isinstance(it, types.CodeType)]
    return frozenset(code.co_names).union(*inner)
