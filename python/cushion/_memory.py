"""Ways to allocate other than `torch.empty`: as much as fits, as a future, and ahead of time."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NoReturn, TypeVar

from . import _cushion, _install, _receipts, _tensors
from ._log import logger
from ._shortage import budget

_T = TypeVar("_T")


class Memory:
    """Bytes of device memory that do not belong to a tensor. They are freed when this object, and every tensor made
    from it, is gone.

    Only `alloc_future` and `alloc_async` create it. The object owns its bytes: two objects for one address would free
    it twice, the second time under its next owner. Therefore it cannot be copied or pickled: pass the object itself, or
    copy the bytes with `memory.tensor().clone()`."""

    __slots__ = ("__weakref__", "_address", "_device", "_nbytes")
    _address: int
    _device: int
    _nbytes: int

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        raise TypeError(
            "cushion.Memory is created only by cushion.alloc_future() and cushion.alloc_async(): an object made from "
            "an address would not own its memory"
        )

    @classmethod
    def _own(cls, address: int, nbytes: int, device: int) -> Memory:
        """Returns the owner of memory that was just allocated."""
        memory = cls.__new__(cls)
        memory._address, memory._nbytes, memory._device = address, nbytes, device
        return memory

    @property
    def address(self) -> int:
        return self._address

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def device(self) -> int:
        return self._device

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self._nbytes,), "typestr": "|u1", "data": (self._address, False), "version": 3}

    def tensor(self, dtype: Any = None) -> Any:
        """Returns a tensor of one dimension over this memory, which it keeps alive; `float32` by default. Bytes after
        the last whole element are not part of it."""
        torch = _tensors.torch_with_gpu("Memory.tensor()")
        dtype = _tensors.dtype_of(torch, dtype)
        size = dtype.itemsize if hasattr(dtype, "itemsize") else torch.empty(0, dtype=dtype).element_size()
        elements = self._nbytes // size
        if elements == 0:
            return torch.empty(0, dtype=dtype, device=f"cuda:{self._device}")
        whole = torch.as_tensor(self, device=f"cuda:{self._device}")
        return whole[: elements * size].view(dtype)

    def __repr__(self) -> str:
        return f"<cushion.Memory: {self._nbytes} bytes at {self._address:#x} of device {self._device}>"

    def __copy__(self) -> Any:
        self._refuse_copy("copied")

    def __deepcopy__(self, _memo: Any) -> Any:
        self._refuse_copy("copied")

    # Python calls this before `__reduce__`, which a subclass might define.
    def __reduce_ex__(self, _protocol: Any) -> Any:
        self._refuse_copy("pickled")

    def __reduce__(self) -> Any:
        self._refuse_copy("pickled")

    def _refuse_copy(self, what: str) -> NoReturn:
        raise TypeError(
            f"cushion.Memory cannot be {what}: the {self._nbytes} bytes at {self._address:#x} of device {self._device} "
            "would have two owners, and be freed twice. Pass the object itself, or copy its bytes: "
            "memory.tensor().clone()"
        )

    def __del__(self) -> None:
        # An object whose __init__ raised owns nothing. While Python shuts down, the memory is left to the end of the
        # process.
        address = getattr(self, "_address", 0)
        if address and not sys.is_finalizing():
            _cushion.deallocate(address)


# ---- ahead of time ----


def prefetch(size: str | int, device: Any = None) -> None:
    """Gets memory from the driver ahead of time: afterwards one request of this size on the current stream is served
    from the cache. If memory is short, the ladder is tried as for an allocation.

    :param size: "8GiB", "500MB" or a number of bytes
    :raises torch.OutOfMemoryError: if it does not fit
    """
    _require_cushion("cushion.prefetch()")
    index = _tensors.device_of(device)
    _cushion.prefetch(_bytes(size), index, _tensors.current_stream(index))


def _require_cushion(call: str) -> None:
    """Raises if PyTorch uses another allocator: memory that Cushion holds would be missing there."""
    if _tensors.torch_in_use() is not None and not _install.is_installed():
        raise RuntimeError(f"{call} is for programs whose PyTorch uses Cushion: call cushion.install() first")


def _bytes(size: str | int) -> int:
    return _cushion.parse_bytes(size) if isinstance(size, str) else _tensors.whole("size", size)


# ---- as a future ----


def alloc_future(size: str | int, *, dtype: Any = None, device: Any = None) -> Future[Any]:
    """Allocates memory as a `concurrent.futures.Future`, without a waiting thread. Requests, of threads and of futures,
    are served in the order in which they were made, and wait at most as long as `cushion.budget()` allows.

    `cancel()` gives up the place in the queue, as long as the future is not done.

    :param size: with a dtype, the number of elements of a tensor; otherwise the bytes of a `Memory`, as a number or
        "8GiB"
    :param dtype: of the tensor
    """
    _require_cushion("cushion.alloc_future()")
    index = _tensors.device_of(device)
    nbytes, finish = _wanted(size, dtype)
    future: Future[Any] = Future()

    def done(address: int | None, why: str | None, out_of_memory: bool) -> None:
        # This is the only reference: if the future was cancelled, the memory is freed on return.
        memory = None if address is None else Memory._own(address, nbytes, index)
        if not future.set_running_or_notify_cancel():
            return
        try:
            if memory is None:
                raise (_receipts.out_of_memory_class() if out_of_memory else RuntimeError)(why)
            result = finish(memory)
        except BaseException as error:  # noqa: BLE001
            future.set_exception(error)
        else:
            future.set_result(result)

    pending = _cushion.allocate_later(nbytes, done, index, _tensors.current_stream(index))
    future.add_done_callback(lambda it: pending.cancel() if it.cancelled() else None)
    return future


async def alloc_async(size: str | int, *, dtype: Any = None, device: Any = None) -> Any:
    """As `alloc_future`, as a coroutine. A task that is cancelled while it waits gives up its place in the queue."""
    return await asyncio.wrap_future(alloc_future(size, dtype=dtype, device=device))


def _wanted(size: str | int, dtype: Any) -> tuple[int, Callable[[Memory], Any]]:
    if dtype is None:
        return _bytes(size), lambda memory: memory
    torch = _tensors.torch_with_gpu("a tensor")
    dtype = _tensors.dtype_of(torch, dtype)
    elements = _tensors.whole("size", size)
    return elements * torch.empty(0, dtype=dtype).element_size(), lambda memory: memory.tensor(dtype)


# ---- as much as fits ----


def allocate_tensor(
    elements: int, *, min_elements: int = 1, factor: float = 0.7, dtype: Any = None, device: Any = None
) -> Any:
    """Returns an uninitialized tensor of one dimension, of `elements` elements or of as many as fit. If there are
    fewer, `tensor.numel()` tells, and the logger `cushion` warns.

    If the tensor does not fit, `factor` times as many elements are tried, and so on down to `min_elements`. Only the
    first try waits for memory that other threads may free.

    :raises torch.OutOfMemoryError: if `min_elements` do not fit
    """
    torch = _tensors.torch_with_gpu("allocate_tensor()")
    elements = _tensors.whole("elements", elements)
    min_elements = min(_tensors.whole("min_elements", min_elements), elements)
    if not 0 < factor < 1:
        raise ValueError(f"factor is {factor}, and has to be above 0 and below 1")
    dtype, index = _tensors.dtype_of(torch, dtype), _tensors.device_of(device)

    def make(count: int) -> Any:
        return torch.empty(count, dtype=dtype, device=f"cuda:{index}")

    def smaller(count: int, _tries: int) -> int | None:
        return max(min_elements, int(count * factor)) if count > min_elements else None

    return largest(make, elements, smaller)


def largest(
    make: Callable[[int], _T],
    count: int,
    smaller: Callable[[int, int], int | None],
    *,
    first_budget_ms: float | None = None,
) -> _T:
    """Returns `make(count)`, or what `make` returns for the first smaller number that fits. `smaller` is called with
    the number that did not fit and the number of tries; it returns the next number, or None to give up."""
    asked, tries = count, 0
    try:
        with _receipts.Expecting():
            while True:
                error: BaseException
                try:
                    with budget(ms=first_budget_ms if tries == 0 else 0):
                        made = make(count)
                    break
                except (_receipts.out_of_memory_class(), MemoryError) as caught:
                    error = caught.with_traceback(None)
                tries += 1
                following = smaller(count, tries)
                if following is None:
                    raise error
                count = following
    except (_receipts.out_of_memory_class(), MemoryError) as last:
        _receipts.refuse_after_all(str(last))
        raise
    if count < asked:
        logger.warning("asked for %d elements, got %d: the largest of %d tries that fits", asked, count, tries + 1)
    return made
