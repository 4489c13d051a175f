"""The statistics of gcAllocator, read from Cushion's counters. Sizes are those of blocks, as in
`torch.cuda.memory_allocated()`: a little more than was requested."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from cushion import _cushion


@dataclass(frozen=True)
class _Counts:
    """Counts of allocations and frees."""

    total_allocations: int = 0
    total_deallocations: int = 0
    current_bytes_allocated: int = 0
    peak_bytes_allocated: int = 0
    total_bytes_allocated: int = 0
    total_bytes_freed: int = 0

    def __str__(self) -> str:
        return (
            f"{human(self.current_bytes_allocated)} in use (peak {human(self.peak_bytes_allocated)}); "
            f"allocations: {self.total_allocations} ({human(self.total_bytes_allocated)}), "
            f"frees: {self.total_deallocations} ({human(self.total_bytes_freed)})"
        )


@dataclass(frozen=True)
class TrackedStats(_Counts):
    """Memory that is not Cushion's, as reported to `gc_allocator_core`."""

    bytes_by_device: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class DeviceStats(_Counts):
    """The statistics of one device. `oom_count` is how often an allocation was refused."""

    oom_count: int = 0

    def __str__(self) -> str:
        return f"{super().__str__()}; out of memory: {self.oom_count}"


@dataclass(frozen=True)
class AllocatorStats(_Counts):
    """The statistics of this process since Cushion was installed, for all devices together and for each.

    `peak_bytes_allocated` is the sum of the devices' peaks. With several devices it is an upper bound, because their
    peaks may be at different times. `torch.cuda.reset_peak_memory_stats()` and the like reset these statistics too.
    Memory that is not Cushion's is counted only in `tracked`.
    """

    oom_count: int = 0
    device_stats: dict[int, DeviceStats] = field(default_factory=dict)
    tracked: TrackedStats = field(default_factory=TrackedStats)

    def __str__(self) -> str:
        lines = [f"{super().__str__()}; out of memory: {self.oom_count}"]
        if len(self.device_stats) > 1:
            lines += [f"  GPU {device}: {stats}" for device, stats in self.device_stats.items()]
        if self.tracked.total_allocations:
            lines.append(f"  tracked, not Cushion's: {self.tracked}")
        return "\n".join(lines)


def gather(tracked: TrackedStats) -> AllocatorStats:
    """Returns the present statistics."""
    devices = {device: _of_device(_cushion.memory_stats(device)) for device in _cushion.devices_in_use()}
    names = [one.name for one in fields(DeviceStats)]
    sums = {name: sum(getattr(stats, name) for stats in devices.values()) for name in names}
    return AllocatorStats(**sums, device_stats=devices, tracked=tracked)


def _of_device(figures: dict[str, Any]) -> DeviceStats:
    count, size = figures["allocation"]["all"], figures["allocated_bytes"]["all"]
    return DeviceStats(
        total_allocations=count["allocated"],
        total_deallocations=count["freed"],
        current_bytes_allocated=size["current"],
        peak_bytes_allocated=size["peak"],
        total_bytes_allocated=size["allocated"],
        total_bytes_freed=size["freed"],
        oom_count=figures["num_ooms"],
    )


def human(size: int) -> str:
    """Formats a number of bytes: 1.50 GiB, 20.00 MiB, 512 bytes."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} bytes"
