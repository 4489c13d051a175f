"""The code in the READMEs of gcAllocator and custom_cuda_allocator, without comments. Such programs have to run
unchanged. python/tests runs them too, with smaller tensors."""

from __future__ import annotations

GC_TRACKING = """
import gcAllocator
import torch

def test_allocation_tracking():
    print("=== Testing Manual Allocation Tracking ===")
    allocator = gcAllocator.install(enable_logging=True)
    tensor = torch.randn(100000, 100000, device='cuda')
    ptr = tensor.data_ptr()
    size = tensor.numel() * tensor.element_size()
    device = tensor.device.index or 0
    print(f"Created tensor: ptr={hex(ptr)}, size={size}, device={device}")
    gcAllocator.gc_allocator_core.track_allocation(ptr, size, device)
    stats = gcAllocator.get_stats()
    print(f"After manual tracking: {stats}")
    del tensor
    torch.cuda.empty_cache()
    gcAllocator.gc_allocator_core.track_deallocation(ptr)
    stats = gcAllocator.get_stats()
    print(f"After deallocation: {stats}")
    gcAllocator.uninstall()

if __name__ == "__main__":
    test_allocation_tracking()
"""

GC_CONTEXT = """
import torch
from gcAllocator import GCAllocator

with GCAllocator(enable_logging=True) as allocator:
    tensor = torch.randn(5000, 5000, device='cuda')
    stats = allocator.get_stats()
    print(f"Peak memory: {stats.peak_bytes_allocated / 1024**3:.2f} GB")
"""

CUSTOM_USAGE = """
import torch
import custom_cuda_allocator

custom_cuda_allocator.setup_allocator()

stats = custom_cuda_allocator.get_memory_stats()
print(f"GPU memory: {stats['used_gb']:.2f} GB used / {stats['total_gb']:.2f} GB total")

tensor = custom_cuda_allocator.allocate_tensor(
    num_elements=1000000000,
    dtype=torch.float32,
    device=0
)

tensor.fill_(1.0)

custom_cuda_allocator.clear_cache()
"""

# Continues the block above. The two sizes are names in the README.
CUSTOM_CLASS = """
import torch
size_in_bytes, num_elements = 1 << 20, 1000

from custom_cuda_allocator import CUDAAllocator

allocator = CUDAAllocator()

ptr = allocator.allocate(size_in_bytes, device=0)
allocator.deallocate(ptr)

tensor = allocator.create_tensor(num_elements, torch.TensorOptions().dtype(torch.float32).device(torch.kCUDA))
"""

CUSTOM_ENVIRONMENT = {
    "OOM_MAX_RETRIES": "5",
    "OOM_SIZE_FACTOR": "0.8",
    "OOM_DELAY_MS": "100",
    "OOM_VERBOSE": "1",
}
