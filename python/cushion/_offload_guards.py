"""Notices the use of a tensor that is on the host ("away"), and brings it back first.

PyTorch does not know that the memory of a tensor can be on the host: an operation would read address zero, and a saved
file would lack the numbers. Therefore a tensor that is away, and its storage, have another class, which brings the
tensors back before anything is done with them. Modules bring them back before their forward pass, for code that is not
in Python or that is compiled. All of this is removed when the tensors are back.

`in_use` prevents the opposite: it tells whether a running call works on a tensor that is about to be moved."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any

# These can be called without the memory of a tensor.
_ATTRIBUTES = """_backward_hooks _grad _post_accumulate_grad_hooks _version device dtype grad grad_fn is_cpu is_cuda
    is_leaf is_meta is_mkldnn is_mps is_nested is_quantized is_sparse is_sparse_csr is_xpu itemsize layout name names
    nbytes ndim output_nr requires_grad retains_grad shape""".split()
_ATTRIBUTES_SET = "_backward_hooks _grad grad requires_grad".split()
_METHODS = """__hash__ __len__ _is_view dim element_size get_device is_complex is_contiguous is_floating_point
    is_inference is_signed ndimension nelement numel register_hook register_post_accumulate_grad_hook requires_grad_
    size storage_offset stride untyped_storage""".split()
_FUNCTIONS = "is_complex is_floating_point is_inference is_same_size numel".split()
_COMPILED = "_compiled_call_impl"
_OF_STORAGE = {"_cdata", "__class__", "__dict__", "__weakref__", "_weak_ref", "device", "is_cuda"}


class Guard:
    """Guards the tensors of one offloader while they are away.

    :param offloader: its `back()` brings the tensors back; a `with` block of it also keeps them on the GPU
    """

    def __init__(self, offloader: Any) -> None:
        self._offloader = offloader
        self._classes: dict[type, type] = {}
        # By id: the tensor, and how many of its storages are away.
        self._tensors: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._hooks: list[tuple[weakref.ref[Any], Any]] = []

    # ---- tensors ----

    def can_guard(self, tensor: Any) -> bool:
        """Returns whether Python allows the class of a tensor to be changed. Tries it."""
        original = type(tensor)
        if original in self._classes or is_guarded(tensor):
            return True
        try:
            tensor.__class__ = self._class_for(original)
            tensor.__class__ = original
        except TypeError:
            self._classes.pop(original, None)
            return False
        return True

    def put(self, storage: Any, tensors: Iterable[Any]) -> list[tuple[int, weakref.ref[Any]]]:
        """Guards a storage and the tensors on it. Returns the guarded tensors, for `lift`."""
        guarded = []
        for tensor in tensors:
            key = id(tensor)
            ref, count = self._tensors.get(key, (None, 0))
            if ref is None or ref() is not tensor:
                # The tensor that had this id is gone.
                ref, count = weakref.ref(tensor), 0
                tensor.__class__ = self._class_for(type(tensor))
            self._tensors[key] = ref, count + 1
            guarded.append((key, ref))
        storage.__class__ = self._class_for(type(storage))
        return guarded

    def lift(self, storage: Any, guarded: list[tuple[int, weakref.ref[Any]]]) -> None:
        """Restores the classes of a storage and its tensors."""
        _restore(storage)
        for key, ref in guarded:
            known, count = self._tensors.get(key, (None, 0))
            if known is not ref:
                continue
            if count > 1:
                # Another storage of the tensor is still away.
                self._tensors[key] = ref, count - 1
                continue
            del self._tensors[key]
            tensor = ref()
            if tensor is not None:
                _restore(tensor)
                # If only C++ referred to the tensor, PyTorch has to restore its ownership after a weak reference.
                getattr(tensor, "_fix_weakref", bool)()

    def has(self, tensor: Any) -> bool:
        """Returns whether this guard guards a tensor."""
        ref, _ = self._tensors.get(id(tensor), (None, 0))
        return ref is not None and ref() is tensor

    def _class_for(self, original: type) -> type:
        made = self._classes.get(original)
        if made is None:
            torch = sys.modules["torch"]
            make = _class_of_tensors if issubclass(original, torch.Tensor) else _class_of_storages
            made = self._classes[original] = make(torch, original, self._offloader)
        return made

    # ---- modules ----

    def put_on_modules(self, modules: Iterable[Any]) -> None:
        """Makes modules bring the tensors back before their forward pass, and before they are copied or pickled, so
        that a copy does not get these hooks."""
        known = {id(ref()) for ref, _ in self._hooks}
        module_class = sys.modules["torch"].nn.Module
        for module in modules:
            if id(module) in known:
                continue
            hook = _BeforeForward(self._offloader)
            # Before the program's own hooks, which may use the tensors.
            handle = module_class.register_forward_pre_hook(module, hook, prepend=True)
            self._hooks.append((weakref.ref(module), handle))
            _stand_in(module, "__getstate__", _BeforeCopy, self._offloader)
            if module.__dict__.get(_COMPILED) is not None:
                # Set by `module.compile()`. It would run the hooks it was compiled with, or compile this one.
                _stand_in(module, _COMPILED, _BeforeCompiled, self._offloader)

    def lift_from_modules(self) -> None:
        while self._hooks:
            ref, handle = self._hooks.pop()
            handle.remove()
            module = ref()
            if module is not None:
                for name in ("__getstate__", _COMPILED):
                    _end_stand_in(module, name, self._offloader)


def is_guarded(value: Any) -> bool:
    """Returns whether a tensor is away, for any offloader."""
    return hasattr(type(value), "cushion_original")


def _restore(value: Any) -> None:
    original = getattr(type(value), "cushion_original", None)
    if original is not None:
        value.__class__ = original


def _class_of_tensors(torch: Any, original: Any, offloader: Any) -> type:
    """Creates the class of tensors that are away."""
    # A subclass with its own __torch_function__ may read its memory for anything.
    usual = [_function_of(torch._C._disabled_torch_function_impl), _function_of(torch.Tensor.__torch_function__)]
    harmless = _harmless(torch) if _function_of(original.__torch_function__) in usual else frozenset()

    def torch_function(
        _cls: type, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in harmless:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        with offloader:
            # A tensor that was created with this class and is not guarded would recurse here without end.
            _restore_all((args, kwargs))
            return function(*args, **kwargs)

    def new(_cls: type, *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    def copied(self: Any, memo: dict[int, Any]) -> Any:
        with offloader:
            _restore(self)
            return self.__deepcopy__(memo)

    def pickled(self: Any, protocol: Any) -> Any:
        with offloader:
            _restore(self)
            return self.__reduce_ex__(protocol)

    methods = {
        "__torch_function__": classmethod(torch_function),
        "__new__": new,
        "__deepcopy__": copied,
        "__reduce_ex__": pickled,
    }
    return _away_class(original, methods)


def _class_of_storages(_torch: Any, original: Any, offloader: Any) -> type:
    """Creates the class of storages that are away. PyTorch uses the storage to save or copy a tensor, also for tensors
    that were not named but share the storage, such as those of a state dict."""

    def attribute(self: Any, name: str) -> Any:
        if name in _OF_STORAGE:
            return original.__getattribute__(self, name)
        offloader.back()
        _restore(self)
        return getattr(self, name)

    def length(self: Any) -> int:
        offloader.back()
        _restore(self)
        return len(self)

    return _away_class(original, {"__getattribute__": attribute, "__len__": length})


def _away_class(original: Any, methods: dict[str, Any]) -> type:
    names = {**methods, "__module__": original.__module__, "cushion_original": original}
    made: type = type(original)(f"Away{original.__name__}", (original,), names)
    return made


def _function_of(method: Any) -> Any:
    return getattr(method, "__func__", method)


def _restore_all(values: Any) -> None:
    if is_guarded(values):
        _restore(values)
    elif isinstance(values, (list, tuple)):
        for value in values:
            _restore_all(value)
    elif isinstance(values, dict):
        _restore_all(list(values.values()))


def _harmless(torch: Any) -> frozenset[Any]:
    """Returns the functions that may be called for a tensor that is away."""
    tensor = torch.Tensor
    return frozenset(
        [getattr(tensor, name).__get__ for name in _ATTRIBUTES if hasattr(tensor, name)]
        + [getattr(tensor, name).__set__ for name in _ATTRIBUTES_SET if hasattr(tensor, name)]
        + [getattr(tensor, name) for name in _METHODS if hasattr(tensor, name)]
        + [getattr(torch, name) for name in _FUNCTIONS if hasattr(torch, name)]
    )


class _BeforeForward:
    """The forward pre-hook of a module."""

    def __init__(self, offloader: Any) -> None:
        self._offloader = offloader

    def __call__(self, _module: Any, _args: Any) -> None:
        # The compiler would record the class of a tensor that is away.
        if self._offloader is not None and not sys.modules["torch"].compiler.is_compiling():
            self._offloader.back()

    def __reduce__(self) -> Any:
        # For a copy of the module that began before the tensors were moved: its hook does nothing.
        return _BeforeForward, (None,)


class _StandIn:
    """Replaces an attribute of a module, and brings the tensors of its offloaders back before each call."""

    def __init__(self, module: Any, attribute: Any) -> None:
        self._module = weakref.ref(module)
        self.attribute = attribute
        self.offloaders: list[Any] = []

    def _back(self) -> Any:
        module = self._module()
        for offloader in list(self.offloaders):
            offloader.back()
        return module


class _BeforeCompiled(_StandIn):
    """Replaces the function that `module.compile()` made."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._back()
        return self.attribute(*args, **kwargs)


class _BeforeCopy(_StandIn):
    """Replaces `__getstate__`, which Python calls first when a module is copied or pickled."""

    def __call__(self) -> Any:
        module = self._back()
        # `_back` has removed this replacement. Before Python 3.11 not every object has a __getstate__.
        own = getattr(module, "__getstate__", None)
        return module.__dict__ if own is None else own()


def _stand_in(module: Any, name: str, kind: type[_StandIn], offloader: Any) -> None:
    there = module.__dict__.get(name)
    if not isinstance(there, kind):
        there = module.__dict__[name] = kind(module, there)
    there.offloaders.append(offloader)


def _end_stand_in(module: Any, name: str, offloader: Any) -> None:
    there = module.__dict__.get(name)
    if not isinstance(there, _StandIn) or offloader not in there.offloaders:
        return
    there.offloaders.remove(offloader)
    if there.offloaders:
        return
    if there.attribute is None:
        del module.__dict__[name]
    else:
        module.__dict__[name] = there.attribute


# ---- tensors in use ----


class Closure:
    """Wraps the closure that an optimizer's `step()` calls to compute the loss. The closure does not need the
    optimizer's state, so the state may be moved while it runs. Lightning runs its whole training step in it."""

    def __init__(self, offloader: Any, optimizer: Any, closure: Callable[..., Any]) -> None:
        self._offloader, self._closure = offloader, closure
        self.optimizer = optimizer
        self.running = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.running = True
        try:
            result = self._closure(*args, **kwargs)
        finally:
            self.running = False
        self._offloader.back()
        return result


def in_use(modules: list[Any], optimizers: list[Any], tensors: list[Any]) -> bool:
    """Returns whether a thread is inside a call that works on one of these: a forward pass, a step, a copy.

    This is read from the stacks of the threads, so that a program has no cost before a shortage, and a call that fails
    leaves no mark."""
    torch = sys.modules["torch"]
    codes = _codes_of(
        torch.nn.Module._call_impl,
        torch.nn.Module._apply,
        torch.nn.Module.load_state_dict,
        torch.nn.Module.state_dict,
        torch.nn.Parameter.__deepcopy__,
        torch.Tensor.__deepcopy__,
        torch.optim.Optimizer.load_state_dict,
        torch.optim.Optimizer.state_dict,
        getattr(torch.nn.Module, "_wrapped_call_impl", None),
        *{type(optimizer).step for optimizer in optimizers},
    )
    ids = {id(one) for one in (*modules, *optimizers, *tensors)}
    return any(_works_on(frame, codes, ids) for frame in list(sys._current_frames().values()))


def _codes_of(*functions: Any) -> set[CodeType]:
    """Returns the code objects of functions, and of the functions that they wrap."""
    codes = set()
    for function in functions:
        while function is not None:
            code = getattr(function, "__code__", None)
            if code is not None:
                codes.add(code)
            function = getattr(function, "__wrapped__", None)
    return codes


_CLOSURE = inspect.unwrap(Closure.__call__).__code__


def _works_on(innermost: FrameType, codes: set[CodeType], ids: set[int]) -> bool:
    frame: FrameType | None = innermost
    left_by_closure: set[int] = set()
    while frame is not None:
        if frame.f_code is _CLOSURE:
            closure = frame.f_locals["self"]
            if closure.running:
                left_by_closure.add(id(closure.optimizer))
        elif frame.f_code in codes:
            one = _self_of(frame)
            if (id(one) in ids or id(_compiled(one)) in ids) and id(one) not in left_by_closure:
                return True
        frame = frame.f_back
    return False


def _self_of(frame: FrameType) -> Any:
    found = frame.f_locals
    args = found.get("args")
    return found["self"] if "self" in found else args[0] if isinstance(args, tuple) and args else None


def _compiled(one: Any) -> Any:
    """Returns the module that a compiled module was made from."""
    modules = getattr(one, "__dict__", {}).get("_modules")
    return modules.get("_orig_mod") if isinstance(modules, dict) else None
