"""Recognition of out-of-memory errors: those of every library that PyTorch uses, and no others."""

from __future__ import annotations

import unittest

import support  # puts the package under test on the path
from exact import ExactCase

import cushion
from cushion import _failures

# The messages as the libraries write them.
OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
    "CUDA driver error: out of memory",
    "cudaErrorMemoryAllocation: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "cuFFT error: CUFFT_ALLOC_FAILED",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "CUDA error: out of memory when calling `cusparseCreate(handle)`",
    "CUDA error: CUSPARSE_STATUS_ALLOC_FAILED when calling `cusparseCreate(handle)`",
    "CURAND_STATUS_ALLOCATION_FAILED",
    "Triton Error [CUDA]: out of memory",
    "NCCL error in: ProcessGroupNCCL.cpp:268, unhandled cuda error. Last error:\nCuda failure 2 'out of memory'",
    "NCCL error in: ProcessGroupNCCL.cpp:268, unhandled cuda error. Last error:\nCuda failure 'out of memory'",
    "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "400000000000 bytes. Error code 12 (Cannot allocate memory)",
    "[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes.",
)
OTHERS = (
    "CUDA error: device-side assert triggered",
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: misaligned address",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(handle)`",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
    "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    "cuFFT error: CUFFT_INTERNAL_ERROR",
    "out of resource: shared memory, Required: 131072, Hardware limit: 101376. Reducing block sizes may help.",
    "NCCL error in: ProcessGroupNCCL.cpp:268, unhandled system error",
    "The size of tensor a (3) must match the size of tensor b (4) at non-singleton dimension 0",
    "DataLoader worker (pid 7) is killed by signal: Killed.",
    "the allocation failed",
    "",
)


class Texts(unittest.TestCase):
    def test_out_of_memory(self) -> None:
        for text in OUT_OF_MEMORY:
            self.assertIs(cushion.is_out_of_memory(RuntimeError(text)), True, text)
            # Libraries raise subclasses of RuntimeError.
            self.assertIs(cushion.is_out_of_memory(type("Error", (RuntimeError,), {})(text)), True, text)

    def test_others(self) -> None:
        for text in OTHERS:
            self.assertIs(cushion.is_out_of_memory(RuntimeError(text)), False, text)

    def test_classes(self) -> None:
        for error in (MemoryError(), type("Mine", (MemoryError,), {})("any"), cushion.OutOfMemoryError("any")):
            self.assertIs(cushion.is_out_of_memory(error), True, repr(error))
        said = "CUDA error: out of memory"
        for other in (ValueError(said), OSError(12, "Cannot allocate memory"), KeyError(said), KeyboardInterrupt(said)):
            self.assertIs(cushion.is_out_of_memory(other), False, repr(other))

    def test_which_errors_are_retried(self) -> None:
        for text, tries in ((OUT_OF_MEMORY[8], 3), (OTHERS[0], 1)):
            calls: list[str] = []

            def step() -> None:
                calls.append(text)
                raise RuntimeError(text)

            with self.assertRaises(RuntimeError):
                cushion.retry(step)
            self.assertEqual(len(calls), tries)


class Chains(unittest.TestCase):
    def test_causes_and_contexts_end_at_the_handled_error(self) -> None:
        handled, first, second, last = ValueError("handled"), KeyError("1"), MemoryError("2"), RuntimeError("3")
        first.__context__ = handled
        second.__cause__ = first
        last.__context__ = second
        self.assertEqual(_failures.chain(last, handled), [last, second, first])
        # A cycle of contexts ends too.
        handled.__context__ = last
        self.assertEqual(set(map(str, _failures.chain(last, None))), {"3", "2", "'1'", "handled"})


class OfTorch(ExactCase):
    def test_errors_of_pytorch(self) -> None:
        torch = self.torch
        self.assertIs(cushion.is_out_of_memory(torch.cuda.OutOfMemoryError("anything")), True)
        # PyTorch's error for host memory.
        with self.assertRaises(RuntimeError) as raised:
            torch.empty(1 << 60, dtype=torch.uint8)
        self.assertIs(cushion.is_out_of_memory(raised.exception), True, raised.exception)
        with self.assertRaises(RuntimeError) as raised:
            torch.ones(3) + torch.ones(4)
        self.assertIs(cushion.is_out_of_memory(raised.exception), False)

    def test_was_in_backward(self) -> None:
        torch = self.torch

        class Fails(torch.autograd.Function):  # type: ignore[misc, name-defined]
            @staticmethod
            def forward(context: object, value: object) -> object:
                return value

            @staticmethod
            def backward(context: object, gradient: object) -> object:
                raise self.out_of_memory()

        weight = torch.ones(3, requires_grad=True)
        for call, expected in (
            (lambda: Fails.apply(weight * 2).sum().backward(), True),
            (lambda: torch.autograd.backward(Fails.apply(weight * 2).sum()), True),
            # autograd.grad() does not add to gradients.
            (lambda: torch.autograd.grad(Fails.apply(weight * 2).sum(), weight), False),
            (lambda: self.at_most(2, weight), False),
        ):
            try:
                call()
            except RuntimeError as error:
                self.assertIs(_failures.was_in_backward(error), expected)
            else:
                self.fail("nothing failed")


if __name__ == "__main__":
    unittest.main()
