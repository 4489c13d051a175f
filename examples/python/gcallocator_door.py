"""The functions of gcAllocator on Cushion: statistics of this process, and of memory that other code allocated.

    python examples/python/gcallocator_door.py

With PyTorch and a GPU it makes tensors. Otherwise it says so, and allocates by address on a simulated device.
"""

from __future__ import annotations

import cushion
import gcAllocator

MIB = 1 << 20


def there_is_a_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def with_tensors() -> None:
    import torch

    kept = torch.ones(1000, 1000, device="cuda")
    dropped = torch.ones(2000, 2000, device="cuda")
    del dropped
    print(f"A tensor is kept: {gcAllocator.get_stats()}")
    # Cushion counts its tensors itself: this changes nothing.
    gcAllocator.gc_allocator_core.track_allocation(kept.data_ptr(), kept.nbytes, 0)


def with_addresses() -> None:
    from custom_cuda_allocator import CUDAAllocator

    allocator = CUDAAllocator()
    kept = allocator.allocate(4 * MIB)
    allocator.deallocate(allocator.allocate(16 * MIB))
    print(f"4 MiB are kept: {gcAllocator.get_stats()}")
    # Cushion counts this memory itself: this changes nothing.
    gcAllocator.gc_allocator_core.track_allocation(kept, 4 * MIB, 0)


def main() -> None:
    gpu = there_is_a_gpu()
    if not gpu:
        print("There is no GPU with PyTorch here: on a simulated device of 16 GiB.")
        cushion.simulate("16GiB")
    with gcAllocator.GCAllocator(enable_logging=True) as allocator:
        if gpu:
            with_tensors()
        else:
            with_addresses()
        # Only the program knows of memory that Cushion did not allocate.
        gcAllocator.gc_allocator_core.track_allocation(0x1000, 64 * MIB, 0)
        stats = allocator.get_stats()
        print(f"With 64 MiB of other memory: {stats}")
    print(f"Peak memory: {stats.peak_bytes_allocated / MIB:.2f} MiB, and {stats.oom_count} times out of memory")
    print("ok")


if __name__ == "__main__":
    main()
