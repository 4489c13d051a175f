"""Tracking by hand. Cushion counts its own memory, PyTorch's tensors among it, without being told: these two are for
memory from elsewhere, which they count apart, in `get_stats().tracked`."""

from __future__ import annotations

from cushion._tensors import whole

from ._ledger import ledger


def track_allocation(ptr: int, size: int, device: int = 0) -> None:
    """Counts `size` bytes at `ptr` on a device, unless they are Cushion's and so counted already.

    :raises TypeError: if an argument is no whole number
    :raises ValueError: if one is negative
    """
    ptr, size, device = whole("ptr", ptr), whole("size", size), whole("device", device)
    if ptr != 0:
        ledger.add(ptr, size, device)


def track_deallocation(ptr: int) -> None:
    """Counts the end of what `track_allocation` counted; of Cushion's memory, or of any that it was not told of, there
    is nothing to count.

    :raises TypeError: if the address is no whole number
    :raises ValueError: if it is negative
    """
    ledger.remove(whole("ptr", ptr))
