"""Offloading: moves tensors to the host when memory runs out, and back when they are used.

The tensor objects stay: only their memory is freed, so that views, and optimizers that refer to them, see the same
numbers after the return, at another address.

_offload_tensors.py   finds the tensors, modules and optimizers that a function names
_offload_moves.py     moves their storages to the host and back
_offload_guards.py    notices the use of a tensor that is on the host, and brings it back first"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, overload

from . import _shortage, _tensors
from ._log import logger
from ._offload_guards import Closure, Guard, in_use
from ._offload_moves import OnHost
from ._offload_tensors import Named

#: a function that returns the tensors, modules and optimizers to move. It is called at each shortage, so it may return
#: others later
Names = Callable[[], object]

# Errors of a function that names objects which do not exist yet. A LightningModule without its Trainer raises
# RuntimeError.
_NOT_YET = (NameError, AttributeError, LookupError, ReferenceError, RuntimeError)


class Offloader:
    """Moves the tensors that a function names to pinned host memory when memory runs out, and back.

    :ivar name: of the function, for receipts and messages
    """

    def __init__(self, named: Names, priority: int = 0, budget_ms: int | None = None) -> None:
        _check(named)
        functools.update_wrapper(self, named)
        self.name = f"offloader {getattr(named, '__qualname__', repr(named))}"
        self._named = named
        # Reentrant: its own allocations may run out of memory and call it on the same thread.
        self._lock = threading.RLock()
        self._busy = False
        self._kept = 0
        self._guard = Guard(self)
        self._on_host = OnHost(self.name, self._guard)
        #: the hooks on each optimizer, for `remove`
        self._hooks: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
        #: optimizers that the function does not name
        self._others: weakref.WeakSet[Any] = weakref.WeakSet()
        self._stepped: weakref.WeakSet[Any] = weakref.WeakSet()
        self._hook_of_all: Any = None
        self._told: set[str] = set()
        self._look_now()
        _shortage.register(self._on_shortage, self.name, priority, budget_ms)
        _shortage.before_last_calls.add(self)

    def __call__(self) -> Any:
        """Returns what the function names."""
        return self._named()

    @property
    def bytes_away(self) -> int:
        """How many bytes are in host memory now."""
        return self._on_host.nbytes

    def away(self, at_least: int | None = None, device: int | None = None, seconds: float | None = None) -> int:
        """Moves tensors to the host, in the order they are named, until `at_least` bytes are free or the time is up;
        all of them if neither is given. Returns the bytes that became free. It moves nothing inside a `with` block of
        this offloader, or while a thread is in a step, a forward pass or a copy of a named object.

        :raises TypeError: if the function names an object that cannot be moved
        """
        with self._lock:
            if self._busy or self._kept:
                return 0
            _, freed = self._send_away(self._look(self._named(), strict=True), at_least, device, seconds)
            return freed

    def back(self) -> None:
        """Moves all tensors back to the GPU. If memory runs out, the remaining ones stay on the host, and the
        out-of-memory error is raised; no contents are lost."""
        with self._lock:
            busy, self._busy = self._busy, True
            try:
                if self._on_host:
                    self._on_host.bring_back(_tensors.torch_with_gpu(f"the {self.name}"))
            finally:
                self._busy = busy

    def __enter__(self) -> Offloader:
        """Brings the tensors back, and keeps them on the GPU until the block ends."""
        with self._lock:
            self._kept += 1
            try:
                self.back()
            except BaseException:
                self._kept -= 1
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._kept -= 1

    def remove(self) -> None:
        """Brings all tensors back, and stops offloading."""
        _shortage.remove_callback(self._on_shortage)
        self.back()
        with self._lock:
            for handles in self._hooks.values():
                for handle in handles:
                    handle.remove()
            self._hooks.clear()
            if self._hook_of_all is not None:
                self._hook_of_all.remove()
                self._hook_of_all = None

    def before_last_call(self) -> None:
        """Brings the tensors back for a checkpoint. The refused request does not need the memory any more."""
        if self._on_host:
            self.back()

    # ---- what the function names ----

    def _look_now(self) -> None:
        """Calls the function once, so that an object that cannot be moved is reported now, before a shortage."""
        try:
            value = self._named()
        except _NOT_YET as error:
            text = "%s names an object that does not exist yet (%s: %s): it is called again at each shortage"
            logger.info(text, self.name, type(error).__name__, error)
            value = None
        self._look(value, strict=True)
        optim = sys.modules.get("torch.optim.optimizer")
        if optim is not None:
            self._hook_of_all = optim.register_optimizer_step_pre_hook(_not_compiled(self._before_any_step))

    def _look(self, value: Any, *, strict: bool = False) -> Named:
        """Returns the tensors in what the function named. Raises TypeError, if `strict`, for what cannot be moved."""
        with self._lock:
            found = Named(value, self._guard.can_guard)
            if strict and found.refused:
                raise TypeError(found.refused[0])
            for optimizer in found.optimizers:
                if optimizer not in self._hooks:
                    self._hooks[optimizer] = self._watch(optimizer)
        return found

    def _watch(self, optimizer: Any) -> list[Any]:
        """Registers hooks on an optimizer that bring its state back before it is used."""
        before = _not_compiled(self._before_state_dict)
        return [
            optimizer.register_step_pre_hook(_not_compiled(self._before_step)),
            optimizer.register_step_post_hook(_not_compiled(self._after_step)),
            optimizer.register_state_dict_pre_hook(before),
            optimizer.register_load_state_dict_pre_hook(before),
        ]

    def _before_any_step(self, optimizer: Any, *_: Any) -> None:
        """Finds an optimizer that was created since the last call of the function, at its first step."""
        if optimizer in self._hooks or optimizer in self._others:
            return
        try:
            self._tell(self._look(self._named()).refused)
        except _NOT_YET:
            return
        except Exception as error:
            self._tell([f"the function failed: {type(error).__name__}: {error}"])
        if optimizer not in self._hooks:
            self._others.add(optimizer)

    def _before_state_dict(self, *_: Any) -> None:
        self.back()

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.back()
        # args[0] is the optimizer.
        if len(args) > 1 and callable(args[1]):
            return (args[0], Closure(self, optimizer, args[1]), *args[2:]), kwargs
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": Closure(self, optimizer, kwargs["closure"])}
        return None

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        """Warns, after the first step, of state that cannot be moved: the first step creates the state."""
        if optimizer not in self._stepped:
            self._stepped.add(optimizer)
            self._tell(Named(optimizer, self._guard.can_guard).refused)

    def _tell(self, refused: list[str]) -> None:
        for why in refused:
            if why not in self._told:
                self._told.add(why)
                logger.warning("%s: %s", self.name, why)

    # ---- to the host ----

    def _on_shortage(self, device: int, wanted: int, seconds_left: float) -> str:
        # Another thread may hold the lock while it brings tensors back, and wait for the memory of this shortage.
        if not self._lock.acquire(blocking=False):
            return "busy on another thread"
        try:
            if self._busy or self._kept:
                return "its tensors are in use"
            found = self._look(self._named())
            self._tell(found.refused)
            count, freed = self._send_away(found, wanted, device, seconds_left)
            if count == 0 and found.parts and _is_in_use(found):
                return "its tensors are in use"
            said = f"moved {count} tensors, {freed / (1 << 20):.2f} MiB, to the host"
            return f"{said}; not all could be moved: {found.refused[0]}" if found.refused else said
        finally:
            self._lock.release()

    def _send_away(
        self, found: Named, at_least: int | None, device: int | None, seconds: float | None
    ) -> tuple[int, int]:
        """Returns how many storages were moved, and how many bytes became free."""
        if not found.parts:
            return 0, 0
        torch = _tensors.torch_with_gpu(f"the {self.name}")
        self._busy = True
        try:
            self._on_host.forget_dropped(torch)
            # The guards come before the look at the threads: a call that begins in between meets one of the two.
            self._guard.put_on_modules(found.modules)
            if _is_in_use(found):
                return 0, 0
            return self._on_host.send(torch, found, at_least, device, seconds)
        finally:
            if not self._on_host:
                self._guard.lift_from_modules()
            self._busy = False


def _check(named: Any) -> None:
    """Raises TypeError if `named` cannot be called without arguments."""
    _shortage.check(named)
    if inspect.iscoroutinefunction(named):
        raise TypeError(f"{named!r} is a coroutine function, and its result is not awaited: use a plain function")
    try:
        inspect.signature(named).bind()
    except TypeError as error:
        raise TypeError(f"{named!r} is called with no arguments when memory runs out: {error}") from None
    except ValueError:
        # Some functions that are not written in Python have no signature.
        pass


def _not_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a hook that does nothing while a step is compiled. The compiler would record the class of a tensor that
    is on the host."""
    is_compiling = sys.modules["torch"].compiler.is_compiling

    def hook(*args: Any) -> Any:
        return None if is_compiling() else function(*args)

    return hook


def _is_in_use(found: Named) -> bool:
    return in_use(found.modules, found.optimizers, [part.named for part in found.parts])


@overload
def offloader(named: Names, priority: int = 0, *, budget_ms: int | None = None) -> Offloader: ...
@overload
def offloader(
    named: None = None, priority: int = 0, *, budget_ms: int | None = None
) -> Callable[[Names], Offloader]: ...
def offloader(named: Names | None = None, priority: int = 0, *, budget_ms: int | None = None) -> Any:
    """Moves tensors to the host when memory runs out:

        @cushion.offloader
        def optimizer_state():
            return optimizer              # its state: AdamW's is twice as large as the weights

    The function returns them: an optimizer, for its state, also inside the wrapper of a framework; a module; a tensor,
    also a DTensor or another subclass; or a mapping or list of those. Tensors go to pinned host memory, in the order
    they are named, until the bytes that the request needs are free.

    The function is called once now, and at each shortage. An object that cannot be moved raises TypeError now: an
    object that is not a tensor and holds none, a tensor subclass whose memory cannot be found, a ScriptModule, an
    optimizer that is not PyTorch's and holds none. A function that raises NameError, AttributeError, LookupError,
    ReferenceError or RuntimeError now is accepted: it names objects that do not exist yet. An object that cannot be
    moved and is named later stays on the GPU; the receipt and a warning of the logger `cushion` say so.

    Tensors on the host come back when they are used:

    - an optimizer's state before `step()`, `state_dict()` and `load_state_dict()`. It stays until `step()` returns,
      except while `step()` runs the closure that it was given
    - a module's tensors before its forward pass, `state_dict()`, `load_state_dict()`, `to()` and the like, and before
      it is copied or pickled. They stay until the call returns
    - a tensor before any PyTorch operation on it, and before it, or another tensor on its storage, is saved. Attributes
      that are not in its memory, such as `shape` and `grad`, can be read without that

    If there is no room for the return, the out-of-memory error is raised, and no contents are lost. In a `with` block
    the tensors are on the GPU until the block ends:

        with averages:
            evaluate()

    Name only tensors that the work under way does not need. The following uses are not noticed. They read address zero,
    which makes CUDA unusable for the process:

    - tensors that autograd saved for a backward pass, or that a CUDA graph uses
    - tensors of the operation, or compiled function, in which memory runs out, outside a module and `step()`; and of an
      operation that another thread runs at that moment
    - an operation on another tensor that shares the memory, such as a view
    - C or C++ code that is given the tensor outside a module's forward pass

    :param priority: callbacks and offloaders of higher priority are called first
    :param budget_ms: how long it may take, as for `on_shortage`
    :raises TypeError: if an object that is named now cannot be moved
    """
    if named is None:
        return lambda named: Offloader(named, priority, budget_ms)
    return Offloader(named, priority, budget_ms)
