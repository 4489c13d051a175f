"""Offloading: tensors that may leave the GPU when memory runs out, and come back when they are needed.

A tensor keeps its place in the program: only the memory behind it goes, so that views of it, and optimizers that hold
it, see the same numbers when it is back, at another address. PyTorch does not notice that a tensor is away: who uses it
reads address zero, and who saves it saves nothing. So an optimizer that is named brings its state back by itself."""

from __future__ import annotations

import functools
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, NamedTuple, overload

from . import _cushion, _shortage, _tensors

#: what names the tensors: called each time, so that it may name others later
Named = Callable[[], "Mapping[Any, Any] | Iterable[Any]"]


class Offloader:
    """Moves the tensors that a function names to pinned host memory when memory runs out, and back.

    :ivar name: of the function
    """

    def __init__(self, named: Named, priority: int = 0, budget_ms: int | None = None) -> None:
        _shortage.check(named)
        functools.update_wrapper(self, named)
        self.name = f"offloader {getattr(named, '__qualname__', repr(named))}"
        self._named = named
        # It may be called by an allocation of its own, on the same thread.
        self._lock = threading.RLock()
        self._busy = False
        self._kept = 0
        self._away: list[_Away] = []
        self._in_step = False
        #: optimizers and modules that bring their tensors back themselves
        self._watched: weakref.WeakSet[Any] = weakref.WeakSet()
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
        all of them if neither is given. Returns the bytes that became free."""
        with self._lock:
            if self._busy or self._kept:
                return 0
            self._busy = True
            try:
                return self._move_away(at_least, device, seconds)
            finally:
                self._busy = False

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

    def before_last_call(self) -> None:
        """The request is refused, so its memory is no use to it: a checkpoint can have it."""
        if self._away:
            self.back()

    def _watch(self, named: Any) -> None:
        """An optimizer that is named brings its state back when it is needed, and a module when it is saved."""
        if named in self._watched:
            return
        if _is_optimizer(named) and hasattr(named, "register_step_pre_hook"):
            named.register_step_pre_hook(self._before_step)
            named.register_step_post_hook(self._after_step)
        if hasattr(named, "register_state_dict_pre_hook"):
            named.register_state_dict_pre_hook(lambda *_: self.back())
        self._watched.add(named)

    def _before_step(self, *_: object) -> None:
        with self._lock:
            # A step that failed left it so.
            if not self._in_step:
                self.__enter__()
                self._in_step = True
            else:
                self.back()

    def _after_step(self, *_: object) -> None:
        with self._lock:
            if self._in_step:
                self._in_step = False
                self.__exit__(None, None, None)

    def _on_shortage(self, device: int, wanted: int, seconds_left: float) -> str:
        # Another thread may be bringing tensors back, and wait for this very memory.
        if not self._lock.acquire(blocking=False):
            return "busy on another thread"
        try:
            if self._busy or self._kept:
                return "its tensors are in use"
            before = len(self._away)
            freed = self.away(wanted, device, seconds_left)
            return f"moved {len(self._away) - before} tensors, {freed / (1 << 20):.2f} MiB, to the host"
        finally:
            self._lock.release()

    def _move_away(self, at_least: int | None, device: int | None, seconds: float | None) -> int:
        torch = _tensors.torch_with_gpu(f"the {self.name}")
        self._forget_those_nobody_has(torch)
        began, freed = time.monotonic(), 0
        gone = {away.storage._cdata for away in self._away}
        synchronized: set[int] = set()
        for tensor in _each(self._named(), self._watch):
            if at_least is not None and freed >= at_least:
                break
            if seconds is not None and time.monotonic() - began >= seconds / 2:
                # The next may take as long as all so far.
                break
            if getattr(tensor, "layout", torch.strided) is not torch.strided:
                continue
            storage = tensor.untyped_storage()
            size, index = storage.nbytes(), tensor.device.index
            if not tensor.is_cuda or size == 0 or storage._cdata in gone or device not in (None, index):
                continue
            if not storage.resizable():
                # Memory of somebody else's: it would not go.
                continue
            if index not in synchronized:
                # Work on whatever stream may still write to it.
                torch.cuda.synchronize(index)
                synchronized.add(index)
            host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            host.copy_(_bytes_of(torch, storage, index))
            self._away.append(_Away(storage, size, host, index, _cushion.stream_of(storage.data_ptr())))
            try:
                storage.resize_(0)
            except BaseException:
                self._away.pop()
                raise
            gone.add(storage._cdata)
            freed += size
        return freed

    def _move_back(self) -> None:
        if not self._away:
            return
        torch = _tensors.torch_with_gpu(f"the {self.name}")
        self._forget_those_nobody_has(torch)
        devices = set()
        while self._away:
            away = self._away[-1]
            # For the stream that it was made for: whoever frees it counts on that.
            with torch.cuda.device(away.device), torch.cuda.stream(_stream(torch, away)):
                away.storage.resize_(away.size)
                _bytes_of(torch, away.storage, away.device).copy_(away.host)
            devices.add(away.device)
            self._away.pop()
        for index in devices:
            # The next to use them may do so on another stream.
            torch.cuda.synchronize(index)

    def _forget_those_nobody_has(self, torch: Any) -> None:
        """The program may have dropped a tensor while it was away."""
        users = getattr(torch._C, "_storage_Use_Count", None)
        if users is not None:
            # Our own is one of each: of the storage, and of Python's object for it, which is shared.
            self._away = [
                away for away in self._away if users(away.storage._cdata) > 1 or sys.getrefcount(away.storage) > 2
            ]


class _Away(NamedTuple):
    """What is away."""

    storage: Any
    size: int
    #: its copy
    host: Any
    device: int
    #: that it was made for, if Cushion knows it
    stream: int | None


def _stream(torch: Any, away: _Away) -> Any:
    if away.stream is None:
        return torch.cuda.current_stream(away.device)
    if away.stream == 0:
        return torch.cuda.default_stream(away.device)
    return torch.cuda.ExternalStream(away.stream, device=away.device)


def _is_optimizer(named: Any) -> bool:
    return hasattr(named, "param_groups") and hasattr(named, "state")


def _each(named: Any, watch: Callable[[Any], None]) -> Iterable[Any]:
    """Tensors in whatever they are named in: a mapping, a list, a module, an optimizer."""
    if hasattr(named, "untyped_storage"):
        yield named
    elif isinstance(named, Mapping):
        for value in named.values():
            yield from _each(value, watch)
    elif hasattr(named, "parameters") and hasattr(named, "buffers"):
        watch(named)
        yield from named.parameters()
        yield from named.buffers()
    elif _is_optimizer(named):
        watch(named)
        yield from _each(named.state, watch)
    elif named is None or isinstance(named, (str, bytes, bool, int, float)):
        # Among the tensors of an optimizer there are numbers, too.
        return
    elif isinstance(named, Iterable):
        for value in named:
            yield from _each(value, watch)
    else:
        raise TypeError(
            f"{named!r} names no tensors: it takes a tensor, a module, an optimizer, or a mapping or list of those"
        )


def _bytes_of(torch: Any, storage: Any, index: int) -> Any:
    return torch.empty(0, dtype=torch.uint8, device=f"cuda:{index}").set_(storage)


@overload
def offloader(named: Named, priority: int = 0, *, budget_ms: int | None = None) -> Offloader: ...
@overload
def offloader(
    named: None = None, priority: int = 0, *, budget_ms: int | None = None
) -> Callable[[Named], Offloader]: ...
def offloader(named: Named | None = None, priority: int = 0, *, budget_ms: int | None = None) -> Any:
    """Lets tensors leave the GPU when memory runs out:

        @cushion.offloader
        def optimizer_state():
            return optimizer              # its state: AdamW's is twice as large as the weights

    The function names them: an optimizer, whose state is meant; a module; a tensor; or a mapping or list of those. It
    is called each time. As many tensors as the request wants bytes go to pinned host memory, in the order they are
    named.

    An optimizer's state comes back by itself, before its `step()` and its `state_dict()`. All else comes back by
    `with`, and stays until the block ends:

        with averages:
            evaluate()

    Name what the work under way does not need, and not what autograd has saved. Whatever is used while it is away is
    read at address zero, which ends CUDA for the process; what is saved then is saved without its numbers.

    :param priority: offloaders and other callbacks of higher priority are asked first
    :param budget_ms: how long it may take, as for `on_shortage`
    """
    if named is None:
        return lambda named: Offloader(named, priority, budget_ms)
    return Offloader(named, priority, budget_ms)
