"""What an offloader's function names: the tensors in it, the modules and optimizers that hold them, and what of it
cannot leave the GPU.

A function names things as programs have them. An optimizer may be inside a framework's wrapper, and a tensor may be a
subclass that has no memory of its own: a DTensor's is that of its local part."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

# The names under which wrappers keep their optimizer where it is not among their plain attributes.
_INNER_NAMES = ("optimizer", "_optimizer", "optim", "base_optimizer", "inner_optimizer")
_PROXIES = (weakref.ProxyType, weakref.CallableProxyType)
_TAKES = "it takes a tensor, a module, an optimizer, or a mapping or list of those"


class Part(NamedTuple):
    """A tensor with memory of its own."""

    tensor: Any
    #: the tensor that was named: the same one, or the subclass that it is inside of
    named: Any
    storage: Any
    size: int
    device: int


class Named:
    """What a function named, looked at once.

    :ivar parts: the tensors on a GPU that have memory, in the order in which they are named
    :ivar modules: every module that was named, and those in it
    :ivar optimizers: every `torch.optim.Optimizer` that was named, outside of its wrappers
    :ivar refused: for each thing that cannot leave, why
    """

    def __init__(self, value: Any, can_be_guarded: Callable[[Any], bool]) -> None:
        self.parts: list[Part] = []
        self.modules: list[Any] = []
        self.optimizers: list[Any] = []
        self.refused: list[str] = []
        self._can_be_guarded = can_be_guarded
        torch = sys.modules.get("torch")
        # Another thread may be importing it.
        self._torch: Any = torch if hasattr(torch, "nn") and hasattr(torch, "optim") else None
        self._seen: set[int] = set()
        # Alive while this is: `_seen` knows things by their id.
        self._kept: list[Any] = []
        if self._torch is None:
            self._add(value, in_state=False)
            return
        # Of tensors that are away, too, only the form is asked for.
        with self._torch._C.DisableTorchFunctionSubclass():
            self._add(value, in_state=False)

    def by_storage(self) -> list[list[Part]]:
        """The parts: those that lie on one storage go together."""
        found: dict[int, list[Part]] = {}
        for part in self.parts:
            found.setdefault(part.storage._cdata, []).append(part)
        return list(found.values())

    def _add(self, value: Any, *, in_state: bool) -> None:
        """Adds what is in a value. The state of an optimizer may hold anything beside its tensors."""
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
                    f"{_class_of(inner)} is a ScriptModule: it uses its tensors outside of Python, where nothing can "
                    "bring them back. Name the module that it was made of, and script it anew when it is back"
                )
                return
        self.modules += module.modules()
        for tensor in (*module.parameters(), *module.buffers()):
            self._add(tensor, in_state=False)

    def _add_optimizer(self, named: Any) -> None:
        found = _optimizers_in(self._torch, named)
        if not found:
            self.refused.append(
                f"{_class_of(named)} is no torch.optim.Optimizer and holds none, so that nothing can bring its state "
                "back for its step(). Name the tensors of its state, and use `with` around what uses them"
            )
        for optimizer in found:
            if any(optimizer is known for known in self.optimizers):
                continue
            self.optimizers.append(optimizer)
            self._kept.append(optimizer)
            self._add(optimizer.state, in_state=True)
            # State that is made later will be like its parameter.
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
                self._refuse_tensor(named, f"its parts cannot be had ({type(error).__name__}: {error})")
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
        # What has no bytes is empty, or away already.
        if size == 0 or not self._is_guarded(named):
            return []
        return [Part(tensor, named, storage, size, tensor.device.index)]

    def _is_guarded(self, named: Any) -> bool:
        if self._can_be_guarded(named):
            return True
        self._refuse_tensor(named, "Python does not let its class be changed, so that nothing notices its use")
        return False

    def _refuse_tensor(self, named: Any, why: str) -> None:
        text = (
            f"a tensor of the class {_class_of(named)} cannot leave the GPU: {why}. A subclass can whose memory is its "
            "own, or that names its parts by __tensor_flatten__"
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
    """An optimizer, or those that a wrapper holds, or both: some are optimizers with another inside."""
    attributes = getattr(named, "__dict__", {})
    # A wrapper may have the class of an optimizer, and not what `step()` needs.
    is_one = isinstance(named, torch.optim.Optimizer) and "_optimizer_step_pre_hooks" in attributes
    found = [named] if is_one else []
    # Wrappers are wrapped two or three times. More would be a circle.
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
    # What a dead proxy stands for cannot be asked.
    if type(value) in _PROXIES or isinstance(value, (torch.Tensor, torch.nn.Module)):
        return False
    return _is_like_an_optimizer(torch, value)
