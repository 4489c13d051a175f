"""Functions of the program that Cushion calls: their names, and whether their work is done when they return."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

_LAZY_RESULTS = (types.CoroutineType, types.GeneratorType, types.AsyncGeneratorType)


def name_of(function: Callable[..., Any]) -> str:
    """Returns the name of a function, or of the class of a callable object."""
    return getattr(function, "__qualname__", None) or type(function).__name__


def is_lazy(function: Callable[..., Any]) -> bool:
    """Returns whether a function is async or a generator: its work is done after the call has returned."""
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    return any(is_kind(function) for is_kind in kinds)


def is_lazy_result(result: Any) -> bool:
    """Returns whether a call returned a coroutine or a generator. A coroutine is closed, so that Python does not warn
    that it was never awaited."""
    if isinstance(result, types.CoroutineType):
        result.close()
    return isinstance(result, _LAZY_RESULTS)
