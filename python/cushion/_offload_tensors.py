"""Finds the tensors in what an offloader's function names, the modules and optimizers that hold them, and the objects
that cannot be moved.

An optimizer may be inside a framework's wrapper. A tensor may be a subclass without memory of its own: the memory of a
DTensor is that of its local tensor."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

# The names under which wrappers have their optimizer if it is not among their plain attributes.
_INNER_NAMES = ("optimizer", "_optimizer", "optim", "base_optimizer", "inner_optimizer")
_PROXIES = (weakref.ProxyType, weakref.CallableProxyType)
_TAKES = "it takes a tensor, a module, an optimizer, or a mapping or list of those"


class Part(NamedTuple):
    """A tensor with memory of its own."""

    tensor: Any
    #: the tensor that was named: this one, or the subclass that holds it
    named: Any
    storage: Any
    size: int
    device: int


class Named:
    """What one call of a function named.

    :ivar parts: the tensors on a GPU that have memory, in the order in which they are named
    :ivar modules: every module that was named, with its submodules
    :ivar optimizers: every `torch.optim.Optimizer` that was named, without its wrappers
    :ivar refused: for each object that cannot be moved, the reason
    """

    def __init__(self, value: Any, can_be_guarded: Callable[[Any], bool]) -> None:
        self.parts: list[Part] = []
        self.modules: list[Any] = []
        self.optimizers: list[Any] = []
        self.refused: list[str] = []
        self._can_be_guarded = can_be_guarded
        torch = sys.modules.get("torch")
        # PyTorch may be imported only in part, by another thread.
        self._torch: Any = torch if hasattr(torch, "nn") and hasattr(torch, "optim") else None
        self._seen: set[int] = set()
        # Keeps the objects in `_seen` alive, so that their ids stay unique.
        self._kept: list[Any] = []
        if self._torch is None:
            self._add(value, in_state=False)
            return
        # Keeps tensors that are away from coming back: only attributes outside their memory are read here.
        with self._torch._C.DisableTorchFunctionSubclass():
            self._add(value, in_state=False)

    def by_storage(self) -> list[list[Part]]:
        """Returns the parts, grouped by storage."""
        found: dict[int, list[Part]] = {}
        for part in self.parts:
            found.setdefault(part.storage._cdata, []).append(part)
        return list(found.values())

    def _add(self, value: Any, *, in_state: bool) -> None:
        """Adds the tensors in a value. The state of an optimizer may hold other objects too, which are skipped."""
        if value is None or isinstance(value, (str, bytes, bool, int, float, complex)):
            return
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        self._kept.append(value)
        torch = self._torch
        if torch is not None and isinstance(value, torch.Tensor):
            self._add_tensor(value, value)
        elif torch is not None and isinstance(value, torch.nn.Module):
            self._add_module(value)
        elif torch is not None and _is_like_an_optimizer(torch, value):
            self._add_optimizer(value)
        elif isinstance(value, Mapping):
            for one in list(value.values()):
                self._add(one, in_state=in_state)
        elif isinstance(value, Iterable) and not hasattr(value, "__array_interface__"):
            for one in list(value):
                self._add(one, in_state=in_state)
        elif not in_state:
            self.refused.append(f"{value!r} names no tensors: {_TAKES}")

    # ---- modules and optimizers ----

    def _add_module(self, module: Any) -> None:
        for inner in module.modules():
            if isinstance(inner, self._torch.jit.ScriptModule):
                self.refused.append(
                    f"{_class_of(inner)} is a ScriptModule: it uses its tensors outside of Python, where Cushion "
                    "cannot bring them back. Name the module that it was made from, and script it again afterwards"
                )
                return
        self.modules += module.modules()
        for tensor in (*module.parameters(), *module.buffers()):
            self._add(tensor, in_state=False)

    def _add_optimizer(self, named: Any) -> None:
        found = _optimizers_in(self._torch, named)
        if not found:
            self.refused.append(
                f"{_class_of(named)} is not a torch.optim.Optimizer and holds none, so Cushion cannot bring its state "
                "back before its step(). Name the tensors of its state, and use `with` around the code that uses them"
            )
        for optimizer in found:
            if any(optimizer is known for known in self.optimizers):
                continue
            self.optimizers.append(optimizer)
            self._kept.append(optimizer)
            self._add(optimizer.state, in_state=True)
            # Reports parameters whose future state could not be moved: state has the class of its parameter.
            for parameter in _parameters_without_state(self._torch, optimizer):
                self._parts_of(parameter, parameter)

    # ---- tensors ----

    def _add_tensor(self, tensor: Any, named: Any) -> None:
        self.parts += self._parts_of(tensor, named)

    def _parts_of(self, tensor: Any, named: Any) -> list[Part]:
        torch = self._torch
        if hasattr(tensor, "__tensor_flatten__"):
            try:
                names, _ = tensor.__tensor_flatten__()
                inside = [getattr(tensor, name) for name in names]
            except Exception as error:
                self._refuse_tensor(named, f"its __tensor_flatten__ failed ({type(error).__name__}: {error})")
                return []
            parts = [part for one in inside if isinstance(one, torch.Tensor) for part in self._parts_of(one, named)]
            return parts if not parts or self._is_guarded(named) else []
        if not tensor.is_cuda or tensor.layout is not torch.strided:
            return []
        why = None
        try:
            storage = tensor.untyped_storage()
            size = torch.UntypedStorage.nbytes(storage)
            if size and torch.UntypedStorage.data_ptr(storage) == 0:
                why = "it has no memory"
        except (RuntimeError, NotImplementedError) as error:
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
        if why is not None:
            self._refuse_tensor(named, why)
            return []
        # A storage without bytes is empty, or away already.
        if size == 0 or not self._is_guarded(named):
            return []
        return [Part(tensor, named, storage, size, tensor.device.index)]

    def _is_guarded(self, named: Any) -> bool:
        if self._can_be_guarded(named):
            return True
        self._refuse_tensor(named, "Python does not allow its class to be changed, so its use cannot be noticed")
        return False

    def _refuse_tensor(self, named: Any, why: str) -> None:
        text = (
            f"a tensor of the class {_class_of(named)} cannot be moved to the host: {why}. A subclass needs memory of "
            "its own, or a __tensor_flatten__ that names the tensors inside"
        )
        if text not in self.refused:
            self.refused.append(text)


def _class_of(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _parameters_without_state(torch: Any, optimizer: Any) -> list[Any]:
    found = [one for group in optimizer.param_groups for one in group["params"]]
    return [one for one in found if isinstance(one, torch.Tensor) and not optimizer.state.get(one)]


def _is_like_an_optimizer(torch: Any, value: Any) -> bool:
    if isinstance(value, torch.optim.Optimizer):
        return True
    if isinstance(value, type) or isinstance(value, (Mapping, list, tuple)):
        return False
    return callable(getattr(value, "step", None)) and hasattr(value, "param_groups")


def _optimizers_in(torch: Any, named: Any, depth: int = 0) -> list[Any]:
    """Returns an optimizer, and the optimizers that it holds as a wrapper: some wrappers are optimizers themselves."""
    attributes = getattr(named, "__dict__", {})
    # A wrapper may have the class of an optimizer without the attributes that `step()` needs.
    is_one = isinstance(named, torch.optim.Optimizer) and "_optimizer_step_pre_hooks" in attributes
    found = [named] if is_one else []
    # Wrappers are nested two or three levels deep. More would be a cycle.
    if depth < 4:
        inner = [one for value in list(attributes.values()) for one in _each_held(value)]
        if not any(_is_optimizer_held(torch, one) for one in inner):
            inner = [] if is_one else [getattr(named, name, None) for name in _INNER_NAMES]
        for one in inner:
            if one is not named and _is_optimizer_held(torch, one):
                found += _optimizers_in(torch, one, depth + 1)
    return found


def _each_held(value: Any) -> Iterable[Any]:
    if isinstance(value, (list, tuple)):
        return value
    return value.values() if type(value) is dict else [value]


def _is_optimizer_held(torch: Any, value: Any) -> bool:
    # Any access to a dead weak proxy raises.
    if type(value) in _PROXIES or isinstance(value, (torch.Tensor, torch.nn.Module)):
        return False
    return _is_like_an_optimizer(torch, value)
