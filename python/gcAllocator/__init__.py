"""gcAllocator on Cushion, for programs that were written for gcAllocator.

    import gcAllocator
    allocator = gcAllocator.install(enable_logging=True)   # before CUDA is used
    ...
    print(gcAllocator.get_stats())

or, around a part of a program, `with GCAllocator(enable_logging=True) as allocator`. Cushion allocates the memory and
counts it; docs/doors.md lists the differences. New programs need only `cushion.install()` and `torch.cuda.memory`.
"""

from . import gc_allocator_core
from ._allocator import GCAllocator, get_stats, install, uninstall
from ._stats import AllocatorStats, DeviceStats, TrackedStats

__all__ = [
    "AllocatorStats",
    "DeviceStats",
    "GCAllocator",
    "TrackedStats",
    "gc_allocator_core",
    "get_stats",
    "install",
    "uninstall",
]
