"""The functions of custom_cuda_allocator on Cushion: memory of the device, memory by address, and tensors.

    python examples/python/custom_cuda_allocator_door.py

With PyTorch and a GPU it makes tensors too. Otherwise it says so, and uses a simulated device.
"""

from __future__ import annotations

import cushion
import custom_cuda_allocator
from custom_cuda_allocator import CUDAAllocator

GIB = 1 << 30


def there_is_a_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def tell(when: str) -> None:
    stats = custom_cuda_allocator.get_memory_stats()
    print(
        f"{when}: {stats['used_gb']:.2f} GB used / {stats['total_gb']:.2f} GB total, "
        f"{stats['allocated_gb']:.2f} GB allocated, {stats['cached_gb']:.2f} GB cached"
    )


def tensors(allocator: CUDAAllocator) -> None:
    import torch

    first = custom_cuda_allocator.allocate_tensor(num_elements=1_000_000, dtype=torch.float32, device=0)
    first.fill_(1.0)
    # The package adds these names to PyTorch.
    options = torch.TensorOptions().dtype(torch.float16).device(torch.kCUDA)  # type: ignore[attr-defined]
    second = allocator.create_tensor(1_000_000, options)
    print(f"Tensors: {first.dtype} and {second.dtype} on {second.device}")


def main() -> None:
    gpu = there_is_a_gpu()
    if not gpu:
        print("There is no GPU with PyTorch here: on a simulated device of 16 GiB.")
        cushion.simulate("16GiB")
    custom_cuda_allocator.setup_allocator()
    tell("At first")
    allocator = CUDAAllocator()
    address = allocator.allocate(GIB, device=0)
    tell("With 1 GiB")
    allocator.deallocate(address)
    tell("Given back")
    custom_cuda_allocator.clear_cache()
    tell("Cleared")
    if gpu:
        tensors(allocator)
    try:
        allocator.allocate(1 << 50)
    # With PyTorch the error is torch.OutOfMemoryError, a RuntimeError.
    except (MemoryError, RuntimeError) as error:
        print(f"A PiB is refused: {error}")
    print(f"Retries: {custom_cuda_allocator.get_retry_count()}")
    print("ok")


if __name__ == "__main__":
    main()
