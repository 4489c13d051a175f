"""The allocator as gcAllocator names it. There is one in a process, whatever number of `GCAllocator`s is made: PyTorch
has one allocator, changes it once, and never back."""

from __future__ import annotations

import threading
import warnings
from types import TracebackType

import cushion
from cushion import _doors, _log

from ._ledger import ledger
from ._stats import AllocatorStats, gather

# A finaliser may ask for figures in the middle of anything here, on the same thread.
_lock = threading.RLock()
_installed = False
_frozen: AllocatorStats | None = None
_said = False


class GCAllocator:
    """Cushion as PyTorch's allocator, from `install()`, or the beginning of a `with` block, on.

    :param enable_logging: whether what was installed, every allocation that is refused, and memory of others that is
        tracked, is said on standard error, through Python's logger `cushion`; what `GC_ALLOCATOR_LOG` says if it is not
        given
    """

    def __init__(self, enable_logging: bool | None = None) -> None:
        self.enable_logging = enable_logging
        # Of each block that is open: whether it changed anything.
        self._changed: list[bool] = []

    def install(self) -> GCAllocator:
        """Makes Cushion PyTorch's allocator, before CUDA is used, and counts from now on.

        :raises cushion.InstallError: if PyTorch does not let Cushion in; the text says why, and what to do
        """
        self._install()
        return self

    def uninstall(self) -> None:
        """Ends the counting: `get_stats()` stays as it is now. Cushion serves on, since PyTorch cannot change its
        allocator back; that is said once."""
        _uninstall()

    def get_stats(self) -> AllocatorStats:
        """What the allocator has done so far, or had when it was uninstalled."""
        return get_stats()

    def __enter__(self) -> GCAllocator:
        self._changed.append(self._install())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Not what a program around this block installed.
        if self._changed.pop():
            _uninstall()

    def _install(self) -> bool:
        """Returns whether that changed anything."""
        global _installed, _frozen
        wanted = _doors.flag("GC_ALLOCATOR_LOG") if self.enable_logging is None else self.enable_logging
        _doors.enter(wanted)
        with _lock:
            changed = not _installed
            _installed, _frozen = True, None
        return changed


def install(enable_logging: bool | None = None) -> GCAllocator:
    """As `GCAllocator(enable_logging).install()`."""
    return GCAllocator(enable_logging).install()


def uninstall() -> None:
    """As `GCAllocator.uninstall()`."""
    _uninstall()


def get_stats() -> AllocatorStats:
    """As `GCAllocator.get_stats()`."""
    with _lock:
        return _frozen if _frozen is not None else gather(ledger.figures())


def _uninstall() -> None:
    global _installed, _frozen, _said
    with _lock:
        if not _installed:
            return
        stats = gather(ledger.figures())
        _installed, _frozen = False, stats
        say = cushion.is_installed() and not _said
        _said = _said or say
    _log.logger.info("gcAllocator: uninstalled with %s", stats)
    if say:
        warnings.warn(
            "PyTorch cannot change its allocator back: Cushion goes on serving this process, and gcAllocator's "
            "get_stats() stays as it is now",
            stacklevel=3,
        )
