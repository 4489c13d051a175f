"""What a failed try of a step leaves behind, taken back: gradients, buffers of modules such as BatchNorm's running
statistics, random numbers and the state of a GradScaler.

Before a try, gradients and buffers are copied. A step that begins with no gradients, as after `zero_grad()`, has none
to copy. The step then works on the originals, so a step that goes well computes the same bits as without Cushion."""

from __future__ import annotations

import gc
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

# ---- what `grads=` names ----


class Holders:
    """The parameters whose gradients a step adds to, and the modules that own them."""

    def __init__(self, given: Any) -> None:
        #: modules, optimizers and tensors, as they were given
        self._given = list(_flat(given))
        self._roots: list[weakref.ref[Any]] | None = None
        self._by_batch: list[tuple[str, weakref.ref[Any]]] | None = None

    def parameters(self) -> list[Any]:
        found: dict[int, Any] = {}
        for holder in self._given:
            for parameter in _parameters_of(holder):
                found[id(parameter)] = parameter
        return list(found.values())

    def modules(self) -> list[Any]:
        """The modules given, and those that own a parameter of an optimizer or a list: the outermost ones, found once
        among all objects of the program."""
        given = [holder for holder in self._given if _is_module(holder)]
        if len(given) == len(self._given):
            return given
        if self._roots is None:
            self._roots = [weakref.ref(root) for root in _owners(self.parameters())]
        return given + [root for root in (it() for it in self._roots) if root is not None]

    def whole_batch_layers(self, look_again: bool = False) -> list[str]:
        """The names of layers whose result depends on the whole batch, as they are set now. They are looked for once,
        unless told to look again."""
        if self._by_batch is None or look_again:
            found = (named for root in self.modules() for named in root.named_modules() if _sees_the_batch(named[1]))
            self._by_batch = [(f"{name or 'the module'} ({type(it).__name__})", weakref.ref(it)) for name, it in found]
        layers = ((name, layer()) for name, layer in self._by_batch)
        return [name for name, layer in layers if layer is not None and _depends_now(layer)]


def _flat(given: Any) -> Iterator[Any]:
    if _is_module(given) or hasattr(given, "param_groups") or hasattr(given, "requires_grad"):
        yield given
    elif isinstance(given, Iterable) and not isinstance(given, (str, bytes)):
        for one in given:
            yield from _flat(one)
    else:
        raise TypeError(
            f"cushion.retry: grads is {given!r}: it takes a module, an optimizer, parameters, or a list of those"
        )


def _is_module(value: Any) -> bool:
    return hasattr(value, "parameters") and hasattr(value, "buffers")


def _parameters_of(holder: Any) -> Iterable[Any]:
    if hasattr(holder, "param_groups"):
        return [parameter for group in holder.param_groups for parameter in group["params"]]
    return list(holder.parameters()) if _is_module(holder) else [holder]


def _owners(parameters: list[Any]) -> list[Any]:
    """The outermost modules that own one of the parameters."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    wanted = {id(parameter) for parameter in parameters}
    modules = [it for it in gc.get_objects() if isinstance(it, torch.nn.Module)]
    above: dict[int, list[Any]] = {}
    for module in modules:
        for child in module._modules.values():
            if child is not None:
                above.setdefault(id(child), []).append(module)
    waiting = [it for it in modules if any(id(own) in wanted for own in it._parameters.values())]
    seen: dict[int, Any] = {}
    roots = []
    while waiting:
        module = waiting.pop()
        if id(module) not in seen:
            seen[id(module)] = module
            parents = above.get(id(module), [])
            waiting += parents
            if not parents:
                roots.append(module)
    return roots


# ---- layers that see the whole batch ----

# Losses and layers whose result for one sample depends on the others, by the names of their classes.
_WHOLE_BATCH = frozenset(
    ("ClipLoss", "SigLipLoss", "CoCaLoss", "NTXentLoss", "NT_Xent", "SupConLoss", "InfoNCE", "BarlowTwinsLoss")
    + ("VICRegLoss", "MultipleNegativesRankingLoss", "CLIPModel", "SiglipModel", "InPlaceABN")
)


def _sees_the_batch(layer: Any) -> bool:
    kind = type(layer)
    package = kind.__module__.partition(".")[0]
    return _is_batch_norm(kind) or kind.__name__ in _WHOLE_BATCH or package == "pytorch_metric_learning"


def _is_batch_norm(kind: type) -> bool:
    return any("BatchNorm" in base.__name__ for base in kind.__mro__) and "Frozen" not in kind.__name__


def _depends_now(layer: Any) -> bool:
    # In evaluation batch norm divides by what it has learnt, if it has learnt anything.
    learnt = _is_batch_norm(type(layer)) and getattr(layer, "running_mean", None) is not None
    return bool(layer.training) or (_is_batch_norm(type(layer)) and not learnt)


# ---- the state itself ----


class Undo:
    """The state before a try, and the way back to it."""

    def __init__(self, holders: Holders | None, random_numbers: bool) -> None:
        self._random = _RandomState() if random_numbers else None
        self._gradients = _Gradients(holders.parameters()) if holders is not None else None
        self._buffers = _Buffers(holders.modules()) if holders is not None else None
        self._scalers: list[_Scaler] = []

    def note_scaler(self, scaler: Any) -> None:
        """A GradScaler is about to change its state within the try."""
        if not any(it.scaler is scaler for it in self._scalers):
            self._scalers.append(_Scaler(scaler))

    def back(self) -> None:
        """As if the try had not happened."""
        if self._gradients is not None:
            self._gradients.back()
        if self._buffers is not None:
            self._buffers.back()
        for scaler in self._scalers:
            scaler.back()
        self._scalers.clear()
        if self._random is not None:
            self._random.back()


class _Gradients:
    def __init__(self, parameters: list[Any]) -> None:
        self._none = [it for it in parameters if it.grad is None]
        self._some = [(it, it.grad, _copy(it.grad)) for it in parameters if it.grad is not None]

    def back(self) -> None:
        for parameter in self._none:
            parameter.grad = None
        if not self._some:
            return
        torch = sys.modules["torch"]
        some, self._some = self._some, []
        with torch.no_grad():
            for parameter, grad, copy in some:
                if grad.layout is torch.strided:
                    _local(grad).copy_(copy)
                else:
                    grad = copy.to(grad.device).clone()
                parameter.grad = grad
                # The next try gets the memory of the copy.
                self._some.append((parameter, grad, copy.to("cpu")))


class _Buffers:
    """Of modules in training; others do not change theirs."""

    def __init__(self, modules: list[Any]) -> None:
        found: dict[int, Any] = {}
        for root in modules:
            for module in root.modules():
                if module.training:
                    found.update({id(it): it for it in module._buffers.values() if it is not None})
        self._copies = [(buffer, _copy(buffer)) for buffer in found.values()]

    def back(self) -> None:
        if self._copies:
            with sys.modules["torch"].no_grad():
                for buffer, copy in self._copies:
                    _local(buffer).copy_(copy)


def _local(tensor: Any) -> Any:
    """The part of a DTensor that is here; any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def _copy(tensor: Any) -> Any:
    local = _local(tensor).detach()
    try:
        return local.clone()
    except (RuntimeError, MemoryError):
        # There is no room for a copy beside it. The host has some.
        return local.to("cpu", copy=True)


class _RandomState:
    """The random numbers of PyTorch, on the CPU and on the GPUs in use, of NumPy and of Python."""

    def __init__(self) -> None:
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy_random = getattr(numpy, "random", None)
        if self._numpy_random is not None:
            self._numpy = self._numpy_random.get_state()
        self._torch: Any = sys.modules.get("torch")
        if self._torch is None or not hasattr(self._torch, "get_rng_state"):
            self._torch = None
            return
        self._cpu = self._torch.get_rng_state()
        cuda = self._torch.cuda
        self._cuda = [(at, cuda.get_rng_state(at)) for at in _devices(cuda)] if cuda.is_initialized() else []

    def back(self) -> None:
        random.setstate(self._python)
        if self._numpy_random is not None:
            self._numpy_random.set_state(self._numpy)
        if self._torch is not None:
            self._torch.set_rng_state(self._cpu)
            for at, state in self._cuda:
                self._torch.cuda.set_rng_state(state, at)


def _devices(cuda: Any) -> Iterable[int]:
    return range(cuda.device_count())


class _Scaler:
    def __init__(self, scaler: Any) -> None:
        self.scaler = scaler
        self._tensors = {name: _clone(getattr(scaler, name, None)) for name in ("_scale", "_growth_tracker")}
        self._by_optimizer = {key: {**state} for key, state in scaler._per_optimizer_states.items()}

    def back(self) -> None:
        for name, value in self._tensors.items():
            setattr(self.scaler, name, value)
        states = self.scaler._per_optimizer_states
        states.clear()
        states.update({key: {**state} for key, state in self._by_optimizer.items()})


def _clone(tensor: Any) -> Any:
    return None if tensor is None else tensor.detach().clone()


# ---- what the step does meanwhile ----


class Attempt:
    """One part of one try, while it runs on its thread.

    :ivar only_once: what is done once per step, such as an update, must not be done inside of it
    :ivar factor: what gradients of this part are multiplied by
    :ivar backwards: how often backward() was called
    :ivar updated: an optimizer has changed the parameters, which cannot be taken back
    """

    def __init__(self, undo: Undo, only_once: bool) -> None:
        self.undo = undo
        self.only_once = only_once
        self.factor = 1.0
        self.backwards = 0
        self.updated = False

    def __enter__(self) -> Attempt:
        running = _running.__dict__.setdefault("attempts", [])
        running.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _running.attempts.remove(self)


_running = threading.local()
_lock = threading.Lock()
_watching = False
_weighing = False


def _now() -> Attempt | None:
    attempts = getattr(_running, "attempts", None)
    return attempts[-1] if attempts else None


def _all_now() -> list[Attempt]:
    return list(getattr(_running, "attempts", ()))


def watch_updates() -> None:
    """From now on attempts learn of optimizers that step and of scalers that unscale inside of them."""
    global _watching
    torch = sys.modules.get("torch")
    if _watching or torch is None:
        return
    with _lock:
        if _watching:
            return
        torch.optim.optimizer.register_optimizer_step_pre_hook(_before_step)
        scaler = torch.amp.GradScaler
        for name in ("unscale_", "step", "update"):
            setattr(scaler, name, _noting_scaler(name, getattr(scaler, name)))
        _watching = True


def _before_step(optimizer: Any, *_: Any) -> None:
    for attempt in _all_now():
        if attempt.only_once:
            _refuse_more_than_once(f"{type(optimizer).__name__}.step()")
        attempt.updated = True


def _noting_scaler(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        for attempt in _all_now():
            if attempt.only_once:
                _refuse_more_than_once(f"GradScaler.{name}()")
            attempt.undo.note_scaler(self)
        return original(self, *args, **kwargs)

    noting.__name__, noting.__qualname__, noting.__doc__ = name, original.__qualname__, original.__doc__
    return noting


def _refuse_more_than_once(call: str) -> None:
    raise RuntimeError(
        f"cushion.retry: {call} is called inside of a step that may be run in parts, or again because another rank "
        "failed, and would be applied more than once: call it after cushion.retry has returned"
    )


def weigh_gradients() -> None:
    """From now on backward() multiplies by the factor of the attempt that it is called in."""
    global _weighing
    torch = sys.modules.get("torch")
    if _weighing or torch is None:
        return
    with _lock:
        if _weighing:
            return
        original = torch.autograd.backward

        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
            factor = 1.0
            for attempt in _all_now():
                attempt.backwards += 1
                factor *= attempt.factor
            if factor != 1.0:
                grad_tensors = _weighed(torch, tensors, grad_tensors, factor)
            return original(tensors, grad_tensors, *args, **kwargs)

        backward.__doc__ = original.__doc__
        torch.autograd.backward = backward
        _weighing = True


def _weighed(torch: Any, tensors: Any, grads: Any, factor: float) -> Any:
    if isinstance(tensors, torch.Tensor):
        tensors = (tensors,)
    if grads is None or isinstance(grads, torch.Tensor):
        grads = (grads,) * len(tensors) if grads is None else (grads,)
    return tuple(
        # Only a scalar needs no gradient of its own; PyTorch refuses all else.
        grad * factor if grad is not None else torch.full_like(tensor, factor) if _is_scalar(torch, tensor) else None
        for tensor, grad in zip(tensors, grads)
    )


def _is_scalar(torch: Any, tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.numel() == 1
