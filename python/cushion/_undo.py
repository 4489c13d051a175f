"""Undoes the changes of a failed try of a step: gradients, buffers of modules such as BatchNorm's running statistics,
random numbers and the state of a GradScaler.

Gradients and buffers are copied before a try. A step that begins without gradients, as after `zero_grad()`, has none to
copy. The step works on the originals, so a step that succeeds computes the same bits as without Cushion."""

from __future__ import annotations

import functools
import gc
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from . import _collectives, _layers, _ranks

# ---- the parameters of `grads=` ----


class Holders:
    """The parameters whose gradients a step adds to, and the modules that own them."""

    def __init__(self, given: Any, step: Callable[..., Any] | None = None) -> None:
        #: modules, optimizers and tensors, as they were given
        self._given = list(flat(given))
        self._step = step

    def parameters(self) -> list[Any]:
        found: dict[int, Any] = {}
        for holder in self._given:
            for parameter in _parameters_of(holder):
                found[id(parameter)] = parameter
        return list(found.values())

    def modules(self) -> list[Any]:
        """Returns the given modules, and the outermost modules that own a parameter of a given optimizer or list. The
        latter are searched for once, among all objects of the program."""
        given = [holder for holder in self._given if _is_module(holder)]
        others = [holder for holder in self._given if not _is_module(holder)]
        if _ranks.in_use():
            given = _with_ddp(given, self._step)
        if not others:
            return given
        return list({id(it): it for it in given + _roots_of(others, self._step)}.values())


def flat(given: Any) -> Iterator[Any]:
    """Returns the modules, optimizers and tensors in `grads=`, without the lists around them."""
    if _is_module(given) or hasattr(given, "param_groups") or hasattr(given, "requires_grad"):
        yield given
    elif isinstance(given, Iterable) and not isinstance(given, (str, bytes)):
        for one in given:
            yield from flat(one)
    else:
        raise TypeError(
            f"cushion.retry: grads is {given!r}, and has to be a module, an optimizer, parameters, or a list of those"
        )


def _is_module(value: Any) -> bool:
    return hasattr(value, "parameters") and hasattr(value, "buffers")


def _parameters_of(holder: Any) -> Iterable[Any]:
    if hasattr(holder, "param_groups"):
        return [parameter for group in holder.param_groups for parameter in group["params"]]
    return list(holder.parameters()) if _is_module(holder) else [holder]


def _with_ddp(given: list[Any], step: Callable[..., Any] | None) -> list[Any]:
    """Returns these modules, each replaced by the DistributedDataParallel around it, if there is one: a program may
    give the module that it wrapped, and it is the wrapper that has to forget a failed try."""
    ddp = sys.modules["torch"].nn.parallel.DistributedDataParallel
    if not given or any(isinstance(it, ddp) for root in given for it in root.modules()):
        return given
    around = [it for root in _roots_of(given, step) for it in root.modules() if isinstance(it, ddp)]
    inside = {id(module): it for it in around for module in it.modules()}
    return list({id(it): it for it in (inside.get(id(module), module) for module in given)}.values())


class _Roots(NamedTuple):
    holders: list[weakref.ref[Any]]
    parameters: int
    roots: list[weakref.ref[Any]]


# By the ids of the holders. A cache, because the search through all objects takes longer than many steps.
_known_roots: dict[tuple[int, ...], _Roots] = {}


def _roots_of(holders: list[Any], step: Callable[..., Any] | None) -> list[Any]:
    """Returns the outermost modules that own a parameter of these optimizers and tensors."""
    parameters = [parameter for holder in holders for parameter in _parameters_of(holder)]
    key = tuple(map(id, holders))
    known = _known_roots.get(key)
    same = known is not None and all(ref() is it for ref, it in zip(known.holders, holders))
    if known is None or not same or known.parameters != len(parameters):
        for old in [it for it, one in list(_known_roots.items()) if any(ref() is None for ref in one.holders)]:
            _known_roots.pop(old, None)
        roots = [weakref.ref(it) for it in _owners(parameters, _layers.modules_of(step))]
        known = _known_roots[key] = _Roots([weakref.ref(it) for it in holders], len(parameters), roots)
    return [root for root in (ref() for ref in known.roots) if root is not None]


def _owners(parameters: list[Any], near: list[Any]) -> list[Any]:
    """Returns the outermost modules that own one of the parameters. It searches all objects, and the modules that the
    step refers to: `gc.freeze()` hides objects from the search."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    wanted = {id(parameter) for parameter in parameters}
    # type() instead of isinstance(): the `__class__` of a proxy object may run any code.
    modules = [it for it in gc.get_objects() if issubclass(type(it), torch.nn.Module)]
    modules += [it for root in near for it in root.modules()]
    above: dict[int, list[Any]] = {}
    for module in modules:
        for child in module.__dict__.get("_modules", {}).values():
            if child is not None:
                above.setdefault(id(child), []).append(module)
    owning = (it for it in modules if any(id(own) in wanted for own in it.__dict__.get("_parameters", {}).values()))
    waiting = list(owning)
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
    # Modules that own each other in a cycle have no outermost one.
    return roots or list(seen.values())


# ---- the state itself ----


class Undo:
    """The state before a try."""

    def __init__(self, holders: Holders | None, random_numbers: bool) -> None:
        self._random = _RandomState() if random_numbers else None
        self._gradients = _Gradients(holders.parameters()) if holders is not None else None
        self._buffers = _Buffers(holders.modules()) if holders is not None else None
        self._scalers: list[_Scaler] = []

    def has_added(self) -> bool:
        """Returns whether gradients have changed since the try began."""
        return self._gradients is not None and not self._gradients.are_the_same()

    def note_scaler(self, scaler: Any) -> None:
        """Copies the state of a GradScaler that is about to change in the try."""
        if not any(it.scaler is scaler for it in self._scalers):
            self._scalers.append(_Scaler(scaler))

    def back(self) -> None:
        """Restores the state."""
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
        self._versions = [grad._version for _, grad, _ in self._some]

    def are_the_same(self) -> bool:
        """Returns whether nothing was added to the gradients."""
        same = all(it.grad is grad and grad._version == seen for (it, grad, _), seen in zip(self._some, self._versions))
        return same and all(it.grad is None for it in self._none)

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
                # Moves the copy to the host, so that the next try can use its memory.
                self._some.append((parameter, grad, copy.to("cpu")))
        self._versions = [grad._version for _, grad, _ in self._some]


class _Buffers:
    """The buffers of modules in training mode; other modules do not change theirs."""

    def __init__(self, modules: list[Any]) -> None:
        inside = {id(it): it for root in modules for it in root.modules() if it.training}
        #: the buffer under each name: a step may replace a buffer by another tensor
        self._places = [(it, name, buffer) for it in inside.values() for name, buffer in it._buffers.items()]
        once = {id(buffer): buffer for _, _, buffer in self._places if buffer is not None}
        self._copies = [(buffer, _copy(buffer)) for buffer in once.values()]

    def back(self) -> None:
        for module, name, buffer in self._places:
            module._buffers[name] = buffer
        if self._copies:
            with sys.modules["torch"].no_grad():
                for buffer, copy in self._copies:
                    _local(buffer).copy_(copy)


def _local(tensor: Any) -> Any:
    """Returns the local tensor of a DTensor; any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def _copy(tensor: Any) -> Any:
    local = _local(tensor).detach()
    try:
        return local.clone()
    except (RuntimeError, MemoryError):
        # The GPU has no room for a copy.
        return local.to("cpu", copy=True)


class _RandomState:
    """The random state of PyTorch, on the CPU and on the GPUs in use, of NumPy and of Python."""

    def __init__(self) -> None:
        self._python = random.getstate()
        # NumPy imports it at the first use. If it is not imported, the program has drawn no random numbers from it.
        self._numpy_random: Any = sys.modules.get("numpy.random")
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


# ---- calls that a step makes ----


class Attempt:
    """One part of one try, while it runs on its thread.

    :ivar only_once: raise if the step does what must be done once per step, such as an optimizer's update
    :ivar factor: the factor for the gradients of this part
    :ivar adds_nothing: compute no gradients: the part weighs nothing, and only its result is needed
    :ivar backwards: how often backward() was called
    :ivar updated: an optimizer has changed the parameters, which cannot be undone
    """

    def __init__(self, undo: Undo, only_once: bool) -> None:
        self.undo = undo
        self.only_once = only_once
        self.factor = 1.0
        self.adds_nothing = False
        self.backwards = 0
        self.updated = False

    def __enter__(self) -> Attempt:
        running = _running.__dict__.setdefault("attempts", [])
        running.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _running.attempts.remove(self)


_running = threading.local()
# Attempts whose backward() is running. For tensors on a GPU it runs on autograd's own threads.
_in_backward: list[Attempt] = []
_lock = threading.Lock()
_watching = False


def _all_now() -> list[Attempt]:
    """Returns the attempts that this thread works for."""
    own = getattr(_running, "attempts", None)
    if own:
        return list(own)
    return list(_in_backward) if _in_backward and _collectives.is_autograd_thread() else []


def watch_updates() -> None:
    """Installs hooks, once, that report calls of backward(), of optimizers' step() and of GradScalers to the attempts.
    backward() multiplies gradients by their factors."""
    global _watching
    torch = sys.modules.get("torch")
    # PyTorch may be imported only in part, by another thread.
    if _watching or torch is None or not hasattr(torch, "amp") or not hasattr(torch, "optim"):
        return
    with _lock:
        if _watching:
            return
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        register_optimizer_step_pre_hook(_before_step)
        scaler = torch.amp.GradScaler
        for name in ("unscale_", "step", "update"):
            setattr(scaler, name, _noting_scaler(name, getattr(scaler, name)))
        torch.autograd.backward = _noting_backward(torch, torch.autograd.backward)
        _watching = True


def _before_step(optimizer: Any, *_: Any) -> None:
    for attempt in _all_now():
        if attempt.only_once:
            _refuse_more_than_once(f"{type(optimizer).__name__}.step()")
        attempt.updated = True


def _noting_scaler(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        for attempt in _all_now():
            if attempt.only_once:
                _refuse_more_than_once(f"GradScaler.{name}()")
            attempt.undo.note_scaler(self)
        return original(self, *args, **kwargs)

    return noting


def _refuse_more_than_once(call: str) -> None:
    raise RuntimeError(
        f"cushion.retry: {call} is called inside a step that may run in parts, or again because another rank failed, "
        "and would be applied more than once: call it after cushion.retry has returned"
    )


def _noting_backward(torch: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
        # A nested backward(), as of activation checkpointing, gets gradients that are multiplied already.
        attempts = [attempt for attempt in _all_now() if attempt not in _in_backward]
        if not attempts:
            return original(tensors, grad_tensors, *args, **kwargs)
        factor = 1.0
        for attempt in attempts:
            attempt.backwards += 1
            factor *= attempt.factor
        if any(attempt.adds_nothing for attempt in attempts):
            return None
        if factor != 1.0:
            grad_tensors = _weighted(torch, tensors, grad_tensors, factor)
        _in_backward.extend(attempts)
        try:
            return original(tensors, grad_tensors, *args, **kwargs)
        finally:
            for attempt in attempts:
                _in_backward.remove(attempt)

    return backward


def _weighted(torch: Any, tensors: Any, grads: Any, factor: float) -> Any:
    if isinstance(tensors, (torch.Tensor, torch.autograd.graph.GradientEdge)):
        tensors = (tensors,)
    if grads is None or isinstance(grads, torch.Tensor):
        grads = (grads,) * len(tensors) if grads is None else (grads,)
    return tuple(
        grad * factor if grad is not None else _one(torch, tensor, factor) for tensor, grad in zip(tensors, grads)
    )


def _one(torch: Any, tensor: Any, factor: float) -> Any:
    """Returns the gradient of a scalar with respect to itself, times a factor; None for other tensors, for which
    PyTorch raises if there is no gradient."""
    if not isinstance(tensor, torch.Tensor):
        raise RuntimeError(
            "cushion.retry: backward() was called with an edge of the graph and no gradient, so a part cannot be "
            "weighted: give the step a parameter `share=1.0`, and multiply its loss by that"
        )
    return torch.full_like(tensor, factor) if tensor.numel() == 1 else None
