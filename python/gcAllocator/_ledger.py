"""Counts memory that is not Cushion's and that a program reports. Cushion counts its own memory itself."""

from __future__ import annotations

import threading

from cushion import _cushion, _log

from ._stats import TrackedStats, human


class Ledger:
    """The reported memory. Thread-safe."""

    def __init__(self) -> None:
        # Reentrant: a finaliser may call remove() while this thread holds the lock.
        self._lock = threading.RLock()
        self._live: dict[int, tuple[int, int]] = {}
        self._allocations = self._deallocations = 0
        self._current = self._peak = self._allocated = self._freed = 0

    def add(self, ptr: int, size: int, device: int) -> None:
        is_cushion_s = _cushion.device_of(ptr) is not None
        entry = (size, device)
        with self._lock:
            # An address has one owner at a time, so an earlier allocation there has ended without a report.
            self._drop(ptr)
            if is_cushion_s:
                return
            self._live[ptr] = entry
            self._allocations += 1
            self._allocated += size
            self._current += size
            self._peak = max(self._peak, self._current)
        _log.logger.info("gcAllocator: GPU %d: tracks %s at %#x, which is not Cushion's", device, human(size), ptr)

    def remove(self, ptr: int) -> None:
        with self._lock:
            size = self._drop(ptr)
        if size is not None:
            _log.logger.info("gcAllocator: no longer tracks %s at %#x", human(size), ptr)

    def _drop(self, ptr: int) -> int | None:
        if ptr not in self._live:
            return None
        size, _ = self._live.pop(ptr)
        self._deallocations += 1
        self._freed += size
        self._current -= size
        return size

    def figures(self) -> TrackedStats:
        with self._lock:
            by_device: dict[int, int] = {}
            for size, device in self._live.values():
                by_device[device] = by_device.get(device, 0) + size
            return TrackedStats(
                total_allocations=self._allocations,
                total_deallocations=self._deallocations,
                current_bytes_allocated=self._current,
                peak_bytes_allocated=self._peak,
                total_bytes_allocated=self._allocated,
                total_bytes_freed=self._freed,
                bytes_by_device=dict(sorted(by_device.items())),
            )


ledger = Ledger()
