"""Chooses the batch size that `cushion.find_batch_size` tries next.

Doubling and bisection alone find the largest size that fits. Memory is nearly linear in the batch size, so the memory
that earlier tries used predicts that size. `Figures` makes the prediction. `Search` tries it as long as the search
takes at most two probes more than doubling and bisection, however the memory of the step really grows."""

from __future__ import annotations

import contextlib
import re
from typing import Any, NamedTuple

from . import _cushion, _install, _receipts, _tensors

# Wrong predictions may cost a search this many probes more than doubling and bisection.
MOST_WASTED = 2
# A size is at most this many times the largest size that fits: a prediction from small sizes may be far off, and a much
# too large step may take too long or exhaust host memory.
LARGEST_JUMP = 16
# A step that fits with this size does not use more memory for a larger batch.
LARGEST = 1 << 40


# ---- the bracket ----


class Search:
    """Finds the largest number, from 1 on, that fits.

    Plain doubling and bisection would try `start`, twice `start` and so on, and then the middle between the largest
    size that fits and the smallest that does not. `_Plain` counts the probes that they would have taken by now: the
    difference to the probes taken tells how many the guesses have saved or wasted."""

    def __init__(self, start: int, limit: int | None) -> None:
        self.limit = limit
        #: the largest size known to fit; 0 if none is known
        self.fits = 0
        #: the smallest size known not to fit
        self.fails: int | None = None
        self._plain = _Plain(start if limit is None else min(start, limit), limit)
        self._tried = 0
        # How many consecutive guesses at an edge of the bracket were wrong. Each one doubles the distance of the next.
        self._wrong = 0
        # 1 if the guess being tried is next to `fits`, -1 if it is next to `fails`, 0 if neither.
        self._edge = 0

    @property
    def is_done(self) -> bool:
        return self.fits == self.limit or (self.fails is not None and self.fails - self.fits == 1)

    def next(self, guess: int | None) -> int:
        """Returns the size to try next.

        :param guess: the predicted largest size that fits
        """
        plain = self._plain.follow(self.fits, self.fails)
        knows_nothing = self.fits == 0 and self.fails is None
        if guess is None or knows_nothing or self._tried + 1 - self._plain.probes > MOST_WASTED:
            return plain
        if self.fits == 0:
            # The guess is too large: a failed step would have used more memory than was counted when it failed.
            guess = min(guess, plain)
        elif guess <= self.fits:
            guess, self._edge = self.fits + (1 << self._wrong), 1
        elif self.fails is not None and guess >= self.fails - 1:
            guess, self._edge = self.fails - (1 << self._wrong), -1
        top = self.fails - 1 if self.fails is not None else self.limit
        if self.fits > 0:
            jump = LARGEST_JUMP * self.fits
            top = jump if top is None else min(top, jump)
        return max(guess if top is None else min(guess, top), self.fits + 1)

    def tell(self, size: int, fits: bool) -> None:
        """Records whether a size fits. The size lies between `fits` and `fails`."""
        self._tried += 1
        self._wrong = self._wrong + 1 if self._edge == (1 if fits else -1) else 0
        self._edge = 0
        if fits:
            self.fits = size
        else:
            self.fails = size


class _Plain:
    """Doubling and bisection, given the results of sizes that `Search` tried."""

    def __init__(self, start: int, limit: int | None) -> None:
        self._start, self._limit = start, limit
        self._fits, self._fails = 0, 0
        #: how many probes doubling and bisection would have taken so far
        self.probes = 0

    def follow(self, fits: int, fails: int | None) -> int:
        """Goes through the sizes whose results are known; returns the first size whose result is not."""
        while True:
            size = self._next()
            if size <= fits:
                self._fits = size
            elif fails is not None and size >= fails:
                self._fails = size
            else:
                return size
            self.probes += 1

    def _next(self) -> int:
        if self._fails > 0:
            return (self._fits + self._fails) // 2
        size = 2 * self._fits or self._start
        return size if self._limit is None else min(size, self._limit)


# ---- the figures ----


class Use(NamedTuple):
    """Memory of one device, in bytes."""

    live: int
    #: the most bytes live at once since `begin`
    peak: int


class Figures:
    """The memory that each try of a step used on each device, and the memory that this process can have there."""

    def __init__(self) -> None:
        self._before: dict[int, Use] = {}
        # (size, bytes) of each try, by device.
        self._fitted: dict[int, list[tuple[int, int]]] = {}
        self._refused: dict[int, list[tuple[int, int]]] = {}
        self._room: dict[int, int] = {}
        #: the peak of the last size that fitted, on the device where it was largest
        self.peak = 0

    def begin(self, reset_peaks: bool = True) -> None:
        """Reads the memory in use before a try."""
        self._before = uses(reset_peaks)

    def fitted(self, size: int) -> None:
        """Records the memory of a try that succeeded."""
        self.peak = 0
        for device, use in uses().items():
            self._fitted.setdefault(device, []).append((size, use.peak))
            self.peak = max(self.peak, use.peak)

    def refused(self, size: int, error: BaseException) -> None:
        """Records the memory of a try that failed. The frames of the error must still hold its tensors."""
        found = _needed(error)
        if found is not None:
            device, needed = found
            self._refused.setdefault(device, []).append((size, needed))

    def look_at_room(self) -> None:
        """Reads how much memory this process can have on each device. The try must have released its memory."""
        for device in {*self._fitted, *self._refused}:
            room = room_of(device)
            if room is not None:
                self._room[device] = room

    def largest(self) -> int | None:
        """Returns the predicted largest size that fits; None without enough figures."""
        each = [self._largest_on(device) for device in self._room]
        return min((size for size in each if size is not None), default=None)

    def _largest_on(self, device: int) -> int | None:
        before = self._before[device].live if device in self._before else 0
        fitted = sorted(self._fitted.get(device, ()))
        refused = sorted(self._refused.get(device, ()))
        # A refused amount is more than there is room for, even if the driver reports more: that memory is fragmented.
        room = min([self._room[device], *(needed - 1 for _, needed in refused)])
        room = max([room, *(peak for _, peak in fitted)])
        small, large = ([(0, before)] * 2 + fitted)[-2:]
        predicted = _reached(room, small, large)
        if refused and (predicted is None or predicted >= refused[0][0]):
            # Memory grows faster than between the smaller sizes, or nothing has fitted yet.
            predicted = _reached(room, large, refused[0])
        return predicted


def _reached(room: int, low: tuple[int, int], high: tuple[int, int]) -> int | None:
    """Returns the size at which the line through two (size, bytes) points reaches `room` bytes."""
    (size, needed), (larger, needed_more) = low, high
    if larger <= size or needed_more <= needed:
        return None
    return size + (room - needed) * (larger - size) // (needed_more - needed)


# Matches the messages of PyTorch's own allocator and of Cushion.
_REQUEST = re.compile(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)\. GPU (\d+) ")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def _needed(error: BaseException) -> tuple[int, int] | None:
    """Returns the device that was short and the bytes that would have been live there; None if the error has neither
    a receipt nor figures."""
    receipt = _receipts.receipt_of(error)
    if receipt is not None:
        # An injected failure says nothing about the memory of the device.
        shortage = receipt.as_dict()["shortage"]
        return None if receipt.injected else (receipt.device, shortage["allocated"] + receipt.requested)
    found = _REQUEST.search(str(error))
    if found is None:
        return None
    device = int(found[3])
    use = uses().get(device)
    return None if use is None else (device, use.live + int(float(found[1]) * _UNITS[found[2]]))


# ---- where the figures come from ----


def uses(reset_peaks: bool = False) -> dict[int, Use]:
    """Returns the memory of each device that this process uses."""
    torch = _tensors.torch_in_use()
    if torch is None:
        found = {}
        for device in _cushion.devices_in_use():
            if reset_peaks:
                _cushion.reset_peak_memory_stats(device)
            counted = _cushion.memory_stats(device)["allocated_bytes"]["all"]
            found[device] = Use(counted["current"], counted["peak"])
        return found
    try:
        return {device: _use_of_torch(torch, device, reset_peaks) for device in range(torch.cuda.device_count())}
    except RuntimeError:
        # Another pluggable allocator has no statistics.
        return {}


def _use_of_torch(torch: Any, device: int, reset_peaks: bool) -> Use:
    if reset_peaks:
        torch.cuda.reset_peak_memory_stats(device)
    return Use(torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device))


def room_of(device: int) -> int | None:
    """Returns how many bytes of a device this process can have at most, including those it has; None if it uses no
    memory there."""
    torch = _tensors.torch_in_use()
    if torch is not None and torch.cuda.max_memory_allocated(device) == 0:
        # Asking the driver would create a CUDA context there, which takes memory.
        return None
    free, reserved, _ = memory_of(device)
    return free + reserved


def memory_of(device: int) -> tuple[int, int, int]:
    """Returns, in bytes, what this process can still get on a device, what it has reserved, and the device's size."""
    torch = _tensors.torch_in_use()
    if torch is None:
        free, total = _cushion.memory_info(device)
        reserved = _cushion.memory_stats(device)["reserved_bytes"]["all"]["current"]
    else:
        free, total = torch.cuda.mem_get_info(device)
        reserved = 0
        with contextlib.suppress(RuntimeError):
            # Another pluggable allocator has no statistics.
            reserved = torch.cuda.memory_reserved(device)
    allowed = int(_fraction(torch, device) * total)
    return max(0, min(int(free), allowed - int(reserved))), int(reserved), int(total)


def _fraction(torch: Any, device: int) -> float:
    if torch is None or _install.is_installed():
        return _cushion.memory_fraction(device)
    read = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    return 1.0 if read is None else float(read(device))
