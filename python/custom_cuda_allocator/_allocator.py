"""The calls of custom_cuda_allocator. Those that allocate make Cushion PyTorch's allocator if nothing has yet; those
that only ask do not."""

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

# What the original called a GB.
_GB = 1 << 30


class MemoryStats(TypedDict):
    """The memory of one device. A GB is 1024³ bytes."""

    device: int
    #: held by anybody, other processes included
    used_gb: float
    #: held by nobody
    free_gb: float
    total_gb: float
    #: in tensors and other allocations of this process
    allocated_gb: float
    peak_allocated_gb: float
    #: held by this process: allocated, or cached for the next allocation
    reserved_gb: float
    cached_gb: float
    #: how often memory had to be given back before an allocation was tried again, and how often it was refused
    retry_count: int
    oom_count: int


def setup_allocator() -> None:
    """Makes Cushion PyTorch's allocator, before CUDA is used, and checks the variables. A second call changes nothing.

    :raises cushion.InstallError: if PyTorch does not let Cushion in; the text says why, and what to do
    :raises ValueError: if a variable is no good
    """
    _set_up(settings())


def _set_up(chosen: RetrySettings, *, without_torch: bool = False) -> None:
    _doors.enter(True if chosen.verbose else None, without_torch=without_torch)
    lend_names()


def get_memory_stats(device: Any = -1) -> MemoryStats:
    """The memory of a device; of the current one if none is given."""
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
    """A tensor of one dimension, not filled. Where it does not fit it is tried again, later and smaller, as the
    variables say: `tensor.numel()` tells how large it is.

    :param num_elements: how many numbers it holds; `elements` is the same
    :param dtype: of PyTorch, of NumPy, a type of Python's or a name; `float32` if not given
    :param device: a number, "cuda", "cuda:1" or a `torch.device`
    :raises torch.OutOfMemoryError: if the last try does not fit either
    """
    if (num_elements is None) == (elements is None):
        raise TypeError("allocate_tensor() takes num_elements, or elements, which is the same: one of them")
    count = whole("num_elements", elements if num_elements is None else num_elements)
    chosen = settings()
    _set_up(chosen)
    return _tensor("allocate_tensor()", count, dtype, device, chosen)


def clear_cache() -> None:
    """Gives back to the driver what is cached, on every device."""
    _cushion.empty_cache()


def get_retry_count() -> int:
    """How often an allocation was tried again: by these calls after a delay, and by the allocator itself, on all
    devices, after memory had been given back."""
    by_itself = sum(_cushion.memory_stats(device)["num_alloc_retries"] for device in _cushion.devices_in_use())
    return _retries.count + int(by_itself)


class _Retries:
    """How often these calls tried again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0

    def add(self) -> None:
        with self._lock:
            self.count += 1


_retries = _Retries()


def _trying_again(make: Callable[[int], _T], count: int, chosen: RetrySettings, *, shrinks: bool) -> _T:
    """What `make` makes of `count`, or, where that does not fit, of less and later."""

    def smaller(count: int, tries: int) -> int | None:
        if tries > chosen.max_retries:
            return None
        delay = chosen.delay_of(tries - 1)
        following = max(1, int(count * chosen.size_factor)) if shrinks else count
        logger.info("retry %d of %d: %d after %.0f ms", tries, chosen.max_retries, following, delay)
        time.sleep(delay / 1e3)
        _retries.add()
        return following

    # The delays are what these calls wait.
    return largest(make, count, smaller, first_budget_ms=0)


class _Given:
    """The addresses that `allocate` gave and nobody gave back, of all `CUDAAllocator`s: there is one allocator in a
    process. Safe from every thread."""

    def __init__(self) -> None:
        # A finaliser may give memory back in the middle of anything here, on the same thread.
        self._lock = threading.RLock()
        self._addresses: set[int] = set()

    def add(self, address: int) -> None:
        with self._lock:
            self._addresses.add(address)

    def take(self, address: int) -> None:
        """One of all who give an address back can; ValueError for the others."""
        with self._lock:
            if address in self._addresses:
                self._addresses.remove(address)
                return
        if _cushion.stream_of(address) is not None:
            raise ValueError(
                f"CUDAAllocator.allocate() did not give the memory at {address:#x}, so that nothing is freed: it is "
                "live, and a tensor's or somebody else's, who gives it back"
            )
        raise ValueError(
            f"no live allocation starts at {address:#x} that CUDAAllocator.allocate() gave, so that nothing is freed: "
            "it was given back before, or this is no address of allocate()'s"
        )


_given = _Given()


class CUDAAllocator:
    """Memory by address, and tensors. Makes Cushion PyTorch's allocator if nothing has yet; without PyTorch, memory by
    address is there all the same."""

    def __init__(self) -> None:
        #: what the variables said
        self.settings = settings()
        _set_up(self.settings, without_torch=True)

    def allocate(self, size: int, device: Any = 0) -> int:
        """The address of `size` bytes, for work on the device's current stream of PyTorch, or on its default stream
        where PyTorch does not use it. They are counted with PyTorch's, and stay until `deallocate`. Where they do not
        fit they are tried again later, as the variables say, and never fewer: nobody could know how many there are.

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
        """Gives back what `allocate` gave, of this `CUDAAllocator` or another, on whichever device; 0 is what
        `allocate(0)` gives, and nothing to give back.

        :raises ValueError: if `allocate` did not give it, or it was given back before; nothing is freed then
        """
        address = whole("ptr", ptr)
        if address == 0:
            return
        _given.take(address)
        try:
            _cushion.deallocate(address)
        except BaseException:
            # It is there as before.
            _given.add(address)
            raise

    def create_tensor(
        self, num_elements: int, options: TensorOptions | Any = None, *, dtype: Any = None, device: Any = None
    ) -> Any:
        """A tensor of one dimension, not filled, as `allocate_tensor()` makes it.

        :param options: `torch.TensorOptions()`, or a dtype
        :param dtype: wins over that of the options
        :param device: wins over that of the options; the current device if neither names one
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
