"""The functions of custom_cuda_allocator. Those that allocate make Cushion PyTorch's allocator if it is not yet; those
that only read statistics do not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypedDict, TypeVar

from cushion import _cushion, _doors
from cushion._log import logger
from cushion._memory import largest
from cushion._tensors import current_stream, device_of, dtype_of, torch_with_gpu, whole

from ._settings import RetrySettings, settings
from ._tensors import TensorOptions, lend_names

_T = TypeVar("_T")

# A GB in the original package.
_GB = 1 << 30


class MemoryStats(TypedDict):
    """The memory of one device. A GB is 1024³ bytes."""

    device: int
    #: used by all processes together
    used_gb: float
    free_gb: float
    total_gb: float
    #: in tensors and other allocations of this process
    allocated_gb: float
    peak_allocated_gb: float
    #: held by this process: allocated, or cached for the next allocation
    reserved_gb: float
    cached_gb: float
    #: how often an allocation was tried again after cached memory was released, and how often one was refused
    retry_count: int
    oom_count: int


def setup_allocator() -> None:
    """Makes Cushion PyTorch's allocator, and checks the variables. Call it before CUDA is used. A second call changes
    nothing.

    :raises cushion.InstallError: if Cushion cannot become PyTorch's allocator; the message says why, and what to do
    :raises ValueError: if the value of a variable is not valid
    """
    _set_up(settings())


def _set_up(chosen: RetrySettings, *, without_torch: bool = False) -> None:
    _doors.enter(True if chosen.verbose else None, without_torch=without_torch)
    lend_names()


def get_memory_stats(device: Any = -1) -> MemoryStats:
    """Returns the memory of a device; by default of the current one."""
    _doors.simulated()
    index = device_of(device)
    free, total = _cushion.memory_info(index)
    figures = _cushion.memory_stats(index)
    allocated, reserved = figures["allocated_bytes"]["all"], figures["reserved_bytes"]["all"]
    return {
        "device": index,
        "used_gb": (total - free) / _GB,
        "free_gb": free / _GB,
        "total_gb": total / _GB,
        "allocated_gb": allocated["current"] / _GB,
        "peak_allocated_gb": allocated["peak"] / _GB,
        "reserved_gb": reserved["current"] / _GB,
        "cached_gb": (reserved["current"] - allocated["current"]) / _GB,
        "retry_count": figures["num_alloc_retries"],
        "oom_count": figures["num_ooms"],
    }


def allocate_tensor(
    num_elements: int | None = None, dtype: Any = None, device: Any = 0, *, elements: int | None = None
) -> Any:
    """Returns an uninitialized tensor of one dimension. If it does not fit, a smaller one is tried after a delay, as
    the variables say. `tensor.numel()` tells how large it is.

    :param num_elements: the number of elements; `elements` is the same
    :param dtype: a dtype of PyTorch or NumPy, a type of Python or a name; `float32` by default
    :param device: a number, "cuda", "cuda:1" or a `torch.device`
    :raises torch.OutOfMemoryError: if the last try does not fit either
    """
    if (num_elements is None) == (elements is None):
        raise TypeError("allocate_tensor() takes num_elements or elements, which mean the same: give one of them")
    count = whole("num_elements", elements if num_elements is None else num_elements)
    chosen = settings()
    _set_up(chosen)
    return _tensor("allocate_tensor()", count, dtype, device, chosen)


def clear_cache() -> None:
    """Releases cached memory to the driver, on every device."""
    _cushion.empty_cache()


def get_retry_count() -> int:
    """Returns how often an allocation was tried again: by these functions after a delay, and by the allocator itself
    after it released cached memory, on all devices."""
    by_itself = sum(_cushion.memory_stats(device)["num_alloc_retries"] for device in _cushion.devices_in_use())
    return _retries.count + int(by_itself)


class _Retries:
    """Counts how often these functions tried again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0

    def add(self) -> None:
        with self._lock:
            self.count += 1


_retries = _Retries()


def _trying_again(make: Callable[[int], _T], count: int, chosen: RetrySettings, *, shrinks: bool) -> _T:
    """Returns `make(count)`. If that does not fit, tries again after a delay, with less if `shrinks` is set."""

    def smaller(count: int, tries: int) -> int | None:
        if tries > chosen.max_retries:
            return None
        delay = chosen.delay_of(tries - 1)
        following = max(1, int(count * chosen.size_factor)) if shrinks else count
        logger.info("retry %d of %d: %d after %.0f ms", tries, chosen.max_retries, following, delay)
        time.sleep(delay / 1e3)
        _retries.add()
        return following

    # The delays above are the only waits: the first try does not wait for memory.
    return largest(make, count, smaller, first_budget_ms=0)


class _Given:
    """The addresses that `allocate` of any `CUDAAllocator` returned and that are not freed yet. Thread-safe."""

    def __init__(self) -> None:
        # Reentrant: a finaliser may call deallocate() while this thread holds the lock.
        self._lock = threading.RLock()
        self._addresses: set[int] = set()

    def add(self, address: int) -> None:
        with self._lock:
            self._addresses.add(address)

    def take(self, address: int) -> None:
        """Removes an address. Raises ValueError if it is not there: of several threads that free it, one succeeds."""
        with self._lock:
            if address in self._addresses:
                self._addresses.remove(address)
                return
        if _cushion.stream_of(address) is not None:
            raise ValueError(
                f"CUDAAllocator.allocate() did not return the address {address:#x}, so nothing is freed: the memory "
                "there is live, and belongs to a tensor or another owner"
            )
        raise ValueError(
            f"no live allocation of CUDAAllocator.allocate() starts at {address:#x}, so nothing is freed: it was "
            "freed before, or allocate() never returned this address"
        )


_given = _Given()


class CUDAAllocator:
    """Allocates memory by address, and tensors. Makes Cushion PyTorch's allocator if it is not yet; memory by address
    works without PyTorch too."""

    def __init__(self) -> None:
        #: the values of the variables
        self.settings = settings()
        _set_up(self.settings, without_torch=True)

    def allocate(self, size: int, device: Any = 0) -> int:
        """Allocates `size` bytes and returns their address, for work on PyTorch's current stream of the device, or on
        the default stream without PyTorch. The bytes are counted with PyTorch's, and stay until `deallocate`. If they
        do not fit, the same size is tried again after a delay, as the variables say.

        :raises torch.OutOfMemoryError: if they do not fit; without PyTorch, MemoryError
        """
        size, index = whole("size", size), device_of(device)

        def make(size: int) -> int:
            return _cushion.allocate(size, index, current_stream(index))

        address = _trying_again(make, size, self.settings, shrinks=False)
        if address != 0:
            _given.add(address)
        return address

    def deallocate(self, ptr: int) -> None:
        """Frees memory that `allocate` of any `CUDAAllocator` returned, on any device. Does nothing for 0, which
        `allocate(0)` returns.

        :raises ValueError: if `allocate` did not return the address, or it was freed before; nothing is freed then
        """
        address = whole("ptr", ptr)
        if address == 0:
            return
        _given.take(address)
        try:
            _cushion.deallocate(address)
        except BaseException:
            # The memory is still live.
            _given.add(address)
            raise

    def create_tensor(
        self, num_elements: int, options: TensorOptions | Any = None, *, dtype: Any = None, device: Any = None
    ) -> Any:
        """Returns an uninitialized tensor of one dimension, as `allocate_tensor()` does.

        :param options: `torch.TensorOptions()`, or a dtype
        :param dtype: overrides that of the options
        :param device: overrides that of the options; by default the current device
        """
        count = whole("num_elements", num_elements)
        if not isinstance(options, TensorOptions):
            options = TensorOptions(options)
        dtype = options.chosen_dtype if dtype is None else dtype
        device = options.chosen_device if device is None else device
        return _tensor("create_tensor()", count, dtype, device, self.settings)


def _tensor(call: str, count: int, dtype: Any, device: Any, chosen: RetrySettings) -> Any:
    torch = torch_with_gpu(call, ": CUDAAllocator().allocate() can")
    dtype, index = dtype_of(torch, dtype), device_of(device)

    def make(count: int) -> Any:
        return torch.empty(count, dtype=dtype, device=f"cuda:{index}")

    return _trying_again(make, count, chosen, shrinks=True)
