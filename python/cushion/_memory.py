"""Memory in other ways than `torch.empty`: as much as fits, as a future, and ahead of time."""

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
    """Bytes of a device that are no tensor's. They go back when nobody has this object, or a tensor made of it, any
    more.

    `alloc_future` and `alloc_async` make it, and nothing else does: the object is the owner of its bytes, so that two
    of them for one address would give it back twice, the second time from under whoever has it then. It cannot be
    copied or pickled for that reason: hand on the object itself, or copy the bytes with `memory.tensor().clone()`."""

    __slots__ = ("__weakref__", "_address", "_device", "_nbytes")
    _address: int
    _device: int
    _nbytes: int

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        raise TypeError(
            "cushion.Memory is made by cushion.alloc_future() and cushion.alloc_async() alone: knowing an address "
            "is not owning its memory"
        )

    @classmethod
    def _own(cls, address: int, nbytes: int, device: int) -> Memory:
        """The owner of what was just allocated."""
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
        """A tensor of one dimension over this memory, which it keeps; `float32` if no dtype is given. Bytes past the
        last whole element are left out."""
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

    # Asked before `__reduce__`, so that one of a subclass does not get round it.
    def __reduce_ex__(self, _protocol: Any) -> Any:
        self._refuse_copy("pickled")

    def __reduce__(self) -> Any:
        self._refuse_copy("pickled")

    def _refuse_copy(self, what: str) -> NoReturn:
        raise TypeError(
            f"cushion.Memory cannot be {what}: the {self._nbytes} bytes at {self._address:#x} of device {self._device} "
            "would have two owners, and be given back twice. Hand on the object itself, or copy its bytes: "
            "memory.tensor().clone()"
        )

    def __del__(self) -> None:
        # What was never made owns nothing. At the end of Python nothing is there any more, and the process gives
        # everything back.
        address = getattr(self, "_address", 0)
        if address and not sys.is_finalizing():
            _cushion.deallocate(address)


# ---- ahead of time ----


def prefetch(size: str | int, device: Any = None) -> None:
    """Gets memory from the driver now, rather than in the middle of something: afterwards one request of this size on
    the current stream is served from what is cached. What there is no room for is won as for an allocation.

    :param size: "8GiB", "500MB" or a number of bytes
    :raises torch.OutOfMemoryError: if it does not fit
    """
    _require_cushion("cushion.prefetch()")
    index = _tensors.device_of(device)
    _cushion.prefetch(_bytes(size), index, _tensors.current_stream(index))


def _require_cushion(call: str) -> None:
    """Beside PyTorch's own allocator, what is made ready here would only be taken from it."""
    if _tensors.torch_in_use() is not None and not _install.is_installed():
        raise RuntimeError(f"{call} is for programs whose PyTorch uses Cushion: call cushion.install() first")


def _bytes(size: str | int) -> int:
    return _cushion.parse_bytes(size) if isinstance(size, str) else _tensors.whole("size", size)


# ---- as a future ----


def alloc_future(size: str | int, *, dtype: Any = None, device: Any = None) -> Future[Any]:
    """Memory as a `concurrent.futures.Future`: no thread waits for it. Requests are served in the order of asking, as
    threads are, within the same budget.

    `cancel()` gives its place back, as long as it is not done.

    :param size: with a dtype, the number of elements of a tensor; else bytes, or "8GiB", of a `Memory`
    :param dtype: of the tensor
    """
    _require_cushion("cushion.alloc_future()")
    index = _tensors.device_of(device)
    nbytes, finish = _wanted(size, dtype)
    future: Future[Any] = Future()

    def done(address: int | None, why: str | None, out_of_memory: bool) -> None:
        # Nobody else has it: if it is not wanted any more it goes back here.
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
    """As `alloc_future`, to be awaited. A task that is cancelled while it waits gives its place back."""
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
    """A tensor of one dimension, not filled: of `elements` elements, or of as many as fit. `tensor.numel()` says how
    many; fewer than asked for is a warning of the logger `cushion`, too.

    Where it does not fit, `factor` times as many are tried, and so on down to `min_elements`. Only the first try waits
    for memory that others may give back.

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
    """What `make` makes of `count`, or of the first smaller number that fits. `smaller` is told the number that did
    not, and how many tries there were; nothing ends it."""
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
