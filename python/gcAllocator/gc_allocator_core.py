"""Tracking of memory that is not Cushion's, counted separately in `get_stats().tracked`. Cushion counts its own memory,
including that of PyTorch's tensors, without these functions."""

from __future__ import annotations

from cushion._tensors import whole

from ._ledger import ledger


def track_allocation(ptr: int, size: int, device: int = 0) -> None:
    """Counts `size` bytes at `ptr` on a device, unless they are Cushion's and therefore counted already.

    :raises TypeError: if an argument is not a whole number
    :raises ValueError: if an argument is negative
    """
    ptr, size, device = whole("ptr", ptr), whole("size", size), whole("device", device)
    if ptr != 0:
        ledger.add(ptr, size, device)


def track_deallocation(ptr: int) -> None:
    """Counts the free of memory that `track_allocation` counted. Does nothing for Cushion's memory and for unknown
    addresses.

    :raises TypeError: if the address is not a whole number
    :raises ValueError: if the address is negative
    """
    ledger.remove(whole("ptr", ptr))
