"""The variables of custom_cuda_allocator, read in one place: what its calls do when memory runs out."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import TypeVar

from cushion import _doors

_T = TypeVar("_T")

# Waits double: more than this would be a year of them.
MOST_RETRIES = 30


@dataclass(frozen=True)
class RetrySettings:
    """What is tried when memory runs out, and how it is told."""

    #: `OOM_MAX_RETRIES`: how often an allocation is tried again
    max_retries: int = 3
    #: `OOM_SIZE_FACTOR`: each try asks for this share of what the one before asked for
    size_factor: float = 0.7
    #: `OOM_DELAY_MS`: how long to wait before the first of them
    delay_ms: float = 200.0
    #: `OOM_VERBOSE`: whether it is said on standard error
    verbose: bool = False

    def delay_of(self, attempt: int) -> float:
        """How many milliseconds to wait before a try; the first is attempt 0."""
        return self.delay_ms * float(2**attempt)


def settings() -> RetrySettings:
    """What the variables say now; ValueError names the one that is no good."""
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
