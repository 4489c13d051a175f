"""Reads the environment variables of custom_cuda_allocator: what its functions do when memory runs out."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import TypeVar

from cushion import _doors

_T = TypeVar("_T")

# The delay doubles each time: with more retries the delays would add up to years.
MOST_RETRIES = 30


@dataclass(frozen=True)
class RetrySettings:
    """What is tried when memory runs out, and whether that is logged."""

    #: `OOM_MAX_RETRIES`: how often an allocation is tried again
    max_retries: int = 3
    #: `OOM_SIZE_FACTOR`: each try requests this fraction of the size before
    size_factor: float = 0.7
    #: `OOM_DELAY_MS`: how long to wait before the first retry
    delay_ms: float = 200.0
    #: `OOM_VERBOSE`: whether retries are logged on standard error
    verbose: bool = False

    def delay_of(self, attempt: int) -> float:
        """Returns how many milliseconds to wait before a retry; the first is attempt 0."""
        return self.delay_ms * float(2**attempt)


def settings() -> RetrySettings:
    """Returns the present values of the variables. Raises ValueError for a value that is not valid."""
    usual = RetrySettings()
    return RetrySettings(
        max_retries=_read(
            "OOM_MAX_RETRIES",
            usual.max_retries,
            int,
            lambda value: 0 <= value <= MOST_RETRIES,
            f"a whole number from 0 to {MOST_RETRIES}",
        ),
        size_factor=_read(
            "OOM_SIZE_FACTOR",
            usual.size_factor,
            float,
            lambda value: 0 < value <= 1,
            "a number above 0 and at most 1",
        ),
        delay_ms=_read(
            "OOM_DELAY_MS",
            usual.delay_ms,
            float,
            lambda value: value >= 0 and isfinite(value),
            "a number of milliseconds, 0 or more",
        ),
        verbose=_doors.flag("OOM_VERBOSE") or False,
    )


def _read(variable: str, usual: _T, parse: Callable[[str], _T], fits: Callable[[_T], bool], accepts: str) -> _T:
    text = os.environ.get(variable, "").strip()
    if not text:
        return usual
    try:
        value = parse(text)
    except ValueError:
        value = None
    if value is None or not fits(value):
        raise ValueError(f"{variable} cannot be `{text}`: it takes {accepts}")
    return value
