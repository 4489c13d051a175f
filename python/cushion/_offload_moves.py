"""Moves the storages of one offloader to pinned host memory, and back."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from . import _cushion
from ._offload_guards import Guard, is_guarded
from ._offload_tensors import Named


class _Away(NamedTuple):
    """A storage that is on the host."""

    storage: Any
    size: int
    #: the copy in host memory
    host: Any
    device: int
    #: the stream that the storage was allocated for, if Cushion knows it
    stream: int | None
    #: the guarded tensors on the storage, for `Guard.lift`
    guarded: Any


class OnHost:
    """The storages of one offloader that are on the host. The caller holds the offloader's lock.

    :param name: of the offloader, for messages
    """

    def __init__(self, name: str, guard: Guard) -> None:
        self._name, self._guard = name, guard
        self._away: list[_Away] = []

    def __bool__(self) -> bool:
        return bool(self._away)

    @property
    def nbytes(self) -> int:
        return sum(away.size for away in list(self._away))

    # ---- to the host ----

    def send(
        self, torch: Any, found: Named, at_least: int | None, device: int | None, seconds: float | None
    ) -> tuple[int, int]:
        """Moves storages to the host, in the order they are named, until `at_least` bytes are free or half of the time
        is used. Returns how many storages were moved, and their bytes."""
        began, count, freed = time.monotonic(), 0, 0
        # A storage whose way back failed may have memory again, but not its contents.
        gone = {away.storage._cdata for away in self._away}
        synchronized: set[int] = set()
        for parts in found.by_storage():
            _, _, storage, size, index = parts[0]
            if at_least is not None and freed >= at_least:
                break
            if seconds is not None and time.monotonic() - began >= seconds / 2:
                # The next storage may take as long as all before it.
                break
            tensors = {id(one): one for part in parts for one in (part.tensor, part.named)}.values()
            if storage._cdata in gone or device not in (None, index):
                continue
            if any(is_guarded(one) and not self._guard.has(one) for one in tensors):
                # Another offloader has moved a part of it.
                continue
            if not torch.UntypedStorage.resizable(storage):
                # The memory does not belong to PyTorch, so PyTorch cannot free it.
                continue
            if index not in synchronized:
                # Work on any stream may still write to the storage.
                torch.cuda.synchronize(index)
                synchronized.add(index)
            self._send_one(torch, storage, size, index, tensors)
            count, freed = count + 1, freed + size
        return count, freed

    def _send_one(self, torch: Any, storage: Any, size: int, index: int, tensors: Iterable[Any]) -> None:
        stream = _cushion.stream_of(torch.UntypedStorage.data_ptr(storage))
        host = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        # From here on a thread that uses one of the tensors waits for the lock.
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

    # ---- back to the GPU ----

    def bring_back(self, torch: Any) -> None:
        """Moves all storages back. If memory runs out, the remaining ones stay on the host, and the error is raised."""
        self.forget_dropped(torch)
        if self._away and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"the {self._name} has {self._mebibytes()} of tensors on the host, and they cannot come back while a "
                "CUDA graph is captured: call its back(), or use `with`, before the capture begins"
            )
        returned: list[_Away] = []
        try:
            while self._away:
                away = self._away[-1]
                # On the stream that the storage was allocated for: a free of it assumes that stream.
                with torch.cuda.device(away.device), torch.cuda.stream(_stream(torch, away)):
                    torch.UntypedStorage.resize_(away.storage, away.size)
                    _bytes_of(torch, away.storage, away.device).copy_(away.host)
                returned.append(self._away.pop())
        except BaseException as error:
            # Python 3.10 has no notes.
            if hasattr(error, "add_note"):
                error.add_note(f"{self._mebibytes()} of the {self._name} are still on the host")
            raise
        finally:
            for index in {away.device for away in returned}:
                # The next use may be on another stream.
                torch.cuda.synchronize(index)
            for away in returned:
                self._guard.lift(away.storage, away.guarded)
            if not self._away:
                self._guard.lift_from_modules()

    def forget_dropped(self, torch: Any) -> None:
        """Frees the host copies of storages that the program has dropped meanwhile."""
        users = getattr(torch._C, "_storage_Use_Count", None)
        if users is None:
            return
        known, self._away = self._away, []
        for away in known:
            # One use of the storage, and one reference to Python's object for it, are ours.
            if users(away.storage._cdata) > 1 or sys.getrefcount(away.storage) > 2:
                self._away.append(away)
            else:
                self._guard.lift(away.storage, away.guarded)
        if not self._away:
            self._guard.lift_from_modules()

    def _mebibytes(self) -> str:
        return f"{self.nbytes / (1 << 20):.2f} MiB"


def _stream(torch: Any, away: _Away) -> Any:
    if away.stream is None:
        return torch.cuda.current_stream(away.device)
    if away.stream == 0:
        return torch.cuda.default_stream(away.device)
    return torch.cuda.ExternalStream(away.stream, device=away.device)


def _bytes_of(torch: Any, storage: Any, index: int) -> Any:
    return torch.empty(0, dtype=torch.uint8, device=f"cuda:{index}").set_(storage)
