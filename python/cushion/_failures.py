"""Out-of-memory errors: recognises them, and releases the tensors that their frames hold."""

from __future__ import annotations

import sys
import traceback

from . import _cushion

# Messages of out-of-memory errors that are a plain RuntimeError. They come from libraries that allocate without
# PyTorch's allocator.
_TEXTS = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "cudaErrorMemoryAllocation",
    "Cuda failure 2 'out of memory'",
    "Cuda failure 'out of memory'",
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "CUFFT_ALLOC_FAILED",
    "CURAND_STATUS_ALLOCATION_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "CUSPARSE_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error says that memory ran out, on the GPU or on the host. It recognises the errors of PyTorch
    and Cushion, of the CUDA driver and runtime, of cuBLAS, cuDNN, cuFFT, cuRAND, cuSOLVER, cuSPARSE, NCCL and Triton,
    and Python's MemoryError."""
    if isinstance(error, MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    torch = sys.modules.get("torch")
    for module in (torch, getattr(torch, "cuda", None)):
        kind = getattr(module, "OutOfMemoryError", None)
        if isinstance(kind, type) and isinstance(error, kind):
            return True
    said = str(error)
    return any(text in said for text in _TEXTS)


def chain(error: BaseException, end: BaseException | None) -> list[BaseException]:
    """Returns an error with its causes and contexts, up to but without `end`."""
    found: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and one is not end and not any(one is other for other in found):
            found.append(one)
            waiting += [one.__cause__, one.__context__]
    return found


def let_go(error: BaseException, end: BaseException | None) -> list[BaseException]:
    """Clears the frames of the errors that `chain` returns, and returns these errors. The frames hold the tensors of
    the failed call. Running frames cannot be cleared, so call this after the `except` block."""
    found = chain(error, end)
    for one in found:
        traceback.clear_frames(one.__traceback__)
    return found


def give_back_cached() -> None:
    """Empties the cache, so that the next try, with other sizes, does not split the blocks of the try before."""
    torch = sys.modules.get("torch")
    if torch is None or _cushion.is_simulated():
        _cushion.empty_cache()
    elif torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def was_in_backward(error: BaseException) -> bool:
    """Returns whether an error was raised inside PyTorch's backward(), which may have added to some gradients."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if code.co_name == "backward" and code.co_filename.replace("\\", "/").endswith("torch/autograd/__init__.py"):
            return True
    return False
