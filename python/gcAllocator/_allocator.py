"""gcAllocator's interface to Cushion. All `GCAllocator` objects of a process share one state: PyTorch has one
allocator, which can be changed once, and never back."""

from __future__ import annotations

import threading
import warnings
from types import TracebackType

import cushion
from cushion import _doors, _log

from ._ledger import ledger
from ._stats import AllocatorStats, gather

# Reentrant: a finaliser may call get_stats() while this thread holds the lock.
_lock = threading.RLock()
_installed = False
_frozen: AllocatorStats | None = None
_said = False


class GCAllocator:
    """Makes Cushion PyTorch's allocator, at `install()` or at the beginning of a `with` block.

    :param enable_logging: whether the installation, every refused allocation, and tracked memory that is not Cushion's,
        are reported on standard error, through Python's logger `cushion`; by default the value of `GC_ALLOCATOR_LOG`
    """

    def __init__(self, enable_logging: bool | None = None) -> None:
        self.enable_logging = enable_logging
        # For each open `with` block, whether it installed the allocator.
        self._changed: list[bool] = []

    def install(self) -> GCAllocator:
        """Makes Cushion PyTorch's allocator, and starts counting. Call it before CUDA is used.

        :raises cushion.InstallError: if Cushion cannot become PyTorch's allocator; the message says why, and what to do
        """
        self._install()
        return self

    def uninstall(self) -> None:
        """Stops counting: `get_stats()` keeps its present values. Cushion stays PyTorch's allocator, because PyTorch
        cannot change it back; a warning says so once."""
        _uninstall()

    def get_stats(self) -> AllocatorStats:
        """Returns the statistics so far, or those at the time of `uninstall()`."""
        return get_stats()

    def __enter__(self) -> GCAllocator:
        self._changed.append(self._install())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # If the allocator was installed outside this block, it stays.
        if self._changed.pop():
            _uninstall()

    def _install(self) -> bool:
        """Returns whether the allocator was not installed before."""
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
            "PyTorch cannot change its allocator back: Cushion stays the allocator of this process, and gcAllocator's "
            "get_stats() keeps its present values",
            stacklevel=3,
        )
