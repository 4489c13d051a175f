"""Offloading: tensors that may leave the GPU when memory runs out, and come back when they are needed.

A tensor keeps its place in the program: only the memory behind it goes, so that views of it, and optimizers that hold
it, see the same numbers when it is back, at another address. What is used while it is away comes back first
(`_offload_guards`)."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, NamedTuple, overload

from . import _cushion, _shortage, _tensors
from ._log import logger
from ._offload_guards import Closure, Guard, in_use, is_guarded
from ._offload_tensors import Named

#: what names the tensors: called each time, so that it may name others later. What it returns is looked at then: no
#: type of Python's is right for optimizers, modules and tensors that all may be there or not
Names = Callable[[], object]

# What a function raises that names things which are not there yet. A LightningModule without its Trainer raises the
# last one.
_NOT_YET = (NameError, AttributeError, LookupError, ReferenceError, RuntimeError)


class Offloader:
    """Moves the tensors that a function names to pinned host memory when memory runs out, and back.

    :ivar name: of the function
    """

    def __init__(self, named: Names, priority: int = 0, budget_ms: int | None = None) -> None:
        _check(named)
        functools.update_wrapper(self, named)
        self.name = f"offloader {getattr(named, '__qualname__', repr(named))}"
        self._named = named
        # It may be called by an allocation of its own, on the same thread.
        self._lock = threading.RLock()
        self._busy = False
        self._kept = 0
        self._away: list[_Away] = []
        self._guard = Guard(self)
        #: what an optimizer was given, to take it back
        self._hooks: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
        #: optimizers that were looked at, and are not named
        self._others: weakref.WeakSet[Any] = weakref.WeakSet()
        self._stepped: weakref.WeakSet[Any] = weakref.WeakSet()
        self._hook_of_all: Any = None
        self._told: set[str] = set()
        self._look_now()
        _shortage.register(self._on_shortage, self.name, priority, budget_ms)
        _shortage.before_last_calls.add(self)

    def __call__(self) -> Any:
        """The tensors, as the function names them."""
        return self._named()

    @property
    def bytes_away(self) -> int:
        """Bytes that are in host memory now."""
        return sum(away.size for away in list(self._away))

    def away(self, at_least: int | None = None, device: int | None = None, seconds: float | None = None) -> int:
        """Moves tensors to the host, in the order they are named, until `at_least` bytes are free or the time is up;
        all of them if neither is given. Returns the bytes that became free: none inside a `with` block of this
        offloader, and none while a thread is in a step, a forward pass or a copy of what is named.

        :raises TypeError: if the function names what cannot leave
        """
        with self._lock:
            if self._busy or self._kept:
                return 0
            _, freed = self._send_away(self._look(self._named(), strict=True), at_least, device, seconds)
            return freed

    def back(self) -> None:
        """Brings everything back. Where there is no room, what is not back yet stays on the host, and out of memory is
        raised; nothing is lost."""
        with self._lock:
            busy, self._busy = self._busy, True
            try:
                self._move_back()
            finally:
                self._busy = busy

    def __enter__(self) -> Offloader:
        """The tensors are back, and stay, until the block ends."""
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
        """Brings everything back, and moves nothing any more."""
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
        """The request is refused, so its memory is no use to it: a checkpoint can have it."""
        if self._away:
            self.back()

    # ---- what is named ----

    def _look_now(self) -> None:
        """What cannot leave is refused here, and not when memory runs out."""
        try:
            value = self._named()
        except _NOT_YET as error:
            text = "%s names what is not there yet (%s: %s): it is looked at again later"
            logger.info(text, self.name, type(error).__name__, error)
            value = None
        self._look(value, strict=True)
        optim = sys.modules.get("torch.optim.optimizer")
        if optim is not None:
            self._hook_of_all = optim.register_optimizer_step_pre_hook(_not_compiled(self._before_any_step))

    def _look(self, value: Any, *, strict: bool = False) -> Named:
        """What is in what the function named; TypeError, where that is asked for, if some of it cannot leave."""
        with self._lock:
            found = Named(value, self._guard.can_guard)
            if strict and found.refused:
                raise TypeError(found.refused[0])
            for optimizer in found.optimizers:
                if optimizer not in self._hooks:
                    self._hooks[optimizer] = self._watch(optimizer)
        return found

    def _watch(self, optimizer: Any) -> list[Any]:
        """An optimizer brings its state back when it is needed."""
        before = _not_compiled(self._before_state_dict)
        return [
            optimizer.register_step_pre_hook(_not_compiled(self._before_step)),
            optimizer.register_step_post_hook(_not_compiled(self._after_step)),
            optimizer.register_state_dict_pre_hook(before),
            optimizer.register_load_state_dict_pre_hook(before),
        ]

    def _before_any_step(self, optimizer: Any, *_: Any) -> None:
        """An optimizer that was made since the last look may be named: it is watched from its first step on."""
        if optimizer in self._hooks or optimizer in self._others:
            return
        try:
            self._tell(self._look(self._named()).refused)
        except _NOT_YET:
            return
        except Exception as error:
            self._tell([f"what it names cannot be looked at: {type(error).__name__}: {error}"])
        if optimizer not in self._hooks:
            self._others.add(optimizer)

    def _before_state_dict(self, *_: Any) -> None:
        self.back()

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.back()
        # The first of them is the optimizer.
        if len(args) > 1 and callable(args[1]):
            return (args[0], Closure(self, optimizer, args[1]), *args[2:]), kwargs
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": Closure(self, optimizer, kwargs["closure"])}
        return None

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        """The first step makes the state: what of it cannot leave is told then."""
        if optimizer not in self._stepped:
            self._stepped.add(optimizer)
            self._tell(Named(optimizer, self._guard.can_guard).refused)

    def _tell(self, refused: list[str]) -> None:
        for why in refused:
            if why not in self._told:
                self._told.add(why)
                logger.warning("%s: %s", self.name, why)

    # ---- to the host and back ----

    def _on_shortage(self, device: int, wanted: int, seconds_left: float) -> str:
        # Another thread may be bringing tensors back, and wait for this very memory.
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
            return f"{said}; left what cannot leave: {found.refused[0]}" if found.refused else said
        finally:
            self._lock.release()

    def _send_away(
        self, found: Named, at_least: int | None, device: int | None, seconds: float | None
    ) -> tuple[int, int]:
        """How many tensors left, and how many bytes became free."""
        if not found.parts:
            return 0, 0
        torch = _tensors.torch_with_gpu(f"the {self.name}")
        self._busy = True
        try:
            self._forget_those_nobody_has(torch)
            # First what brings them back, then the look at the threads: who comes in between is seen by one of the two.
            self._guard.put_on_modules(found.modules)
            if _is_in_use(found):
                return 0, 0
            return self._move_away(torch, found, at_least, device, seconds)
        finally:
            if not self._away:
                self._guard.lift_from_modules()
            self._busy = False

    def _move_away(
        self, torch: Any, found: Named, at_least: int | None, device: int | None, seconds: float | None
    ) -> tuple[int, int]:
        began, count, freed = time.monotonic(), 0, 0
        # One that could not come back has its memory, and not yet its numbers.
        gone = {away.storage._cdata for away in self._away}
        synchronized: set[int] = set()
        for parts in found.by_storage():
            _, _, storage, size, index = parts[0]
            if at_least is not None and freed >= at_least:
                break
            if seconds is not None and time.monotonic() - began >= seconds / 2:
                # The next may take as long as all so far.
                break
            tensors = {id(one): one for part in parts for one in (part.tensor, part.named)}.values()
            if storage._cdata in gone or device not in (None, index):
                continue
            if any(is_guarded(one) and not self._guard.has(one) for one in tensors):
                # Another offloader has moved a part of it.
                continue
            if not torch.UntypedStorage.resizable(storage):
                # Memory of somebody else's: it would not go.
                continue
            if index not in synchronized:
                # Work on whatever stream may still write to it.
                torch.cuda.synchronize(index)
                synchronized.add(index)
            self._move_one_away(torch, storage, size, index, tensors)
            count, freed = count + 1, freed + size
        return count, freed

    def _move_one_away(self, torch: Any, storage: Any, size: int, index: int, tensors: Iterable[Any]) -> None:
        stream = _cushion.stream_of(torch.UntypedStorage.data_ptr(storage))
        host = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        # Who uses it from now on waits for the lock.
        guarded = self._guard.put(storage, tensors)
        try:
            host.copy_(_bytes_of(torch, storage, index))
            self._away.append(_Away(storage, size, host, index, stream, guarded))
            try:
                torch.UntypedStorage.resize_(storage, 0)
            except BaseException:
                self._away.pop()
                raise
        except BaseException:
            self._guard.lift(storage, guarded)
            raise

    def _move_back(self) -> None:
        if not self._away:
            return
        torch = _tensors.torch_with_gpu(f"the {self.name}")
        self._forget_those_nobody_has(torch)
        if self._away and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"the {self.name} has {self.bytes_away / (1 << 20):.2f} MiB of tensors on the host, and they cannot "
                "come back while a CUDA graph is captured: call its back(), or use `with`, before the capture begins"
            )
        returned: list[_Away] = []
        try:
            while self._away:
                away = self._away[-1]
                # For the stream that it was made for: whoever frees it counts on that.
                with torch.cuda.device(away.device), torch.cuda.stream(_stream(torch, away)):
                    torch.UntypedStorage.resize_(away.storage, away.size)
                    _bytes_of(torch, away.storage, away.device).copy_(away.host)
                returned.append(self._away.pop())
        except BaseException as error:
            _add_note(error, f"{self.bytes_away / (1 << 20):.2f} MiB of the {self.name} are still on the host")
            raise
        finally:
            for index in {away.device for away in returned}:
                # The next to use them may do so on another stream.
                torch.cuda.synchronize(index)
            for away in returned:
                self._guard.lift(away.storage, away.guarded)
            if not self._away:
                self._guard.lift_from_modules()

    def _forget_those_nobody_has(self, torch: Any) -> None:
        """The program may have dropped a tensor while it was away."""
        users = getattr(torch._C, "_storage_Use_Count", None)
        if users is None:
            return
        known, self._away = self._away, []
        for away in known:
            # Our own is one of each: of the storage, and of Python's object for it, which is shared.
            if users(away.storage._cdata) > 1 or sys.getrefcount(away.storage) > 2:
                self._away.append(away)
            else:
                self._guard.lift(away.storage, away.guarded)
        if not self._away:
            self._guard.lift_from_modules()


class _Away(NamedTuple):
    """What is away."""

    storage: Any
    size: int
    #: its copy
    host: Any
    device: int
    #: that it was made for, if Cushion knows it
    stream: int | None
    #: its tensors, as the guard knows them
    guarded: Any


def _check(named: Any) -> None:
    """Whether it can be called, before memory runs out."""
    _shortage.check(named)
    if inspect.iscoroutinefunction(named):
        raise TypeError(f"{named!r} is a coroutine function, and nobody awaits what it names: use a plain function")
    try:
        inspect.signature(named).bind()
    except TypeError as error:
        raise TypeError(f"{named!r} is called with no arguments when memory runs out: {error}") from None
    except ValueError:
        # Some that are not in Python do not tell.
        pass


def _not_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that a compiled step leaves out. What is away has another class, which such a step looks at first."""
    is_compiling = sys.modules["torch"].compiler.is_compiling

    def hook(*args: Any) -> Any:
        return None if is_compiling() else function(*args)

    return hook


def _is_in_use(found: Named) -> bool:
    return in_use(found.modules, found.optimizers, [part.named for part in found.parts])


def _add_note(error: BaseException, text: str) -> None:
    # Python 3.10 has no notes.
    if hasattr(error, "add_note"):
        error.add_note(text)


def _stream(torch: Any, away: _Away) -> Any:
    if away.stream is None:
        return torch.cuda.current_stream(away.device)
    if away.stream == 0:
        return torch.cuda.default_stream(away.device)
    return torch.cuda.ExternalStream(away.stream, device=away.device)


def _bytes_of(torch: Any, storage: Any, index: int) -> Any:
    return torch.empty(0, dtype=torch.uint8, device=f"cuda:{index}").set_(storage)


@overload
def offloader(named: Names, priority: int = 0, *, budget_ms: int | None = None) -> Offloader: ...
@overload
def offloader(
    named: None = None, priority: int = 0, *, budget_ms: int | None = None
) -> Callable[[Names], Offloader]: ...
def offloader(named: Names | None = None, priority: int = 0, *, budget_ms: int | None = None) -> Any:
    """Lets tensors leave the GPU when memory runs out:

        @cushion.offloader
        def optimizer_state():
            return optimizer              # its state: AdamW's is twice as large as the weights

    The function names them: an optimizer, whose state is meant, also inside the wrapper of a framework; a module; a
    tensor, also a DTensor or another subclass; or a mapping or list of those. As many tensors as the request wants
    bytes go to pinned host memory, in the order they are named.

    The function is called once now, and each time when memory runs out. What cannot leave is refused now, with
    TypeError: what is no tensor and holds none, a subclass of tensors whose memory cannot be found, a ScriptModule, an
    optimizer that is none of PyTorch's and holds none. A function that raises NameError, AttributeError, LookupError,
    ReferenceError or RuntimeError names what is not there yet, and is accepted. What cannot leave and comes later stays
    on the GPU; the receipt and a warning of the logger `cushion` say so.

    What is away comes back by itself when it is used:

    - an optimizer's state before `step()`, where it stays until that is done, `state_dict()` and `load_state_dict()`.
      While `step()` runs the closure that it was given, the state may leave
    - a module's tensors before its forward pass, `state_dict()`, `load_state_dict()`, `to()` and its like, and before
      it is copied or pickled. They stay until the call is done
    - a tensor before any operation of PyTorch's on it, and before it or what lies on its storage is saved. What can be
      asked without its memory, such as `shape` and `grad`, leaves it where it is

    Where there is no room to come back, out of memory is raised, and nothing is lost. In a `with` block they are back
    and stay until it ends:

        with averages:
            evaluate()

    So name what the work under way does not need. These uses are not noticed, and read address zero, which ends CUDA
    for the process:

    - of what autograd has saved for a backward pass, and by a CUDA graph
    - by the very operation, or the compiled function, that memory runs out in, outside of a module and of `step()`; and
      by an operation of another thread in the moment when tensors leave
    - of another tensor that lies on the same memory, such as a view, by an operation
    - by code in C or C++ that is given the tensor outside of a module's forward pass

    :param priority: offloaders and other callbacks of higher priority are asked first
    :param budget_ms: how long it may take, as for `on_shortage`
    :raises TypeError: if what is named now cannot leave
    """
    if named is None:
        return lambda named: Offloader(named, priority, budget_ms)
    return Offloader(named, priority, budget_ms)
