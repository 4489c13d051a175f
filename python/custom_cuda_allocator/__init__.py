"""custom_cuda_allocator on Cushion, for programs that were written for custom_cuda_allocator.

    import torch, custom_cuda_allocator
    custom_cuda_allocator.setup_allocator()                # before CUDA is used
    tensor = custom_cuda_allocator.allocate_tensor(num_elements=1_000_000, dtype=torch.float32, device=0)

Cushion allocates the memory; docs/doors.md lists the differences. `torch.TensorOptions` and `torch.kCUDA`, which
programs know from C++, are added to PyTorch if it lacks them. New programs need only `cushion.install()` and
`torch.cuda.memory`.
"""

from ._allocator import (
    CUDAAllocator,
    MemoryStats,
    allocate_tensor,
    clear_cache,
    get_memory_stats,
    get_retry_count,
    setup_allocator,
)
from ._settings import RetrySettings, settings
from ._tensors import TensorOptions, lend_names

__all__ = [
    "CUDAAllocator",
    "MemoryStats",
    "RetrySettings",
    "TensorOptions",
    "allocate_tensor",
    "clear_cache",
    "get_memory_stats",
    "get_retry_count",
    "settings",
    "setup_allocator",
]

lend_names()
