"""Converts arguments of programs: dtypes and devices as PyTorch, NumPy or Python write them, and whole numbers."""

from __future__ import annotations

import operator
import re
import sys
from typing import Any

from . import _cushion

# Python's types, as PyTorch converts them.
_OF_PYTHON = {float: "float64", int: "int64", bool: "bool", complex: "complex128"}


def torch_in_use() -> Any | None:
    """Returns PyTorch if it uses the GPUs of this process; otherwise None."""
    torch = sys.modules.get("torch")
    usable = torch is not None and not _cushion.is_simulated() and torch.cuda.is_initialized()
    return torch if usable else None


def torch_with_gpu(call: str, instead: str = "") -> Any:
    """Returns PyTorch, for a call that makes tensors. Raises RuntimeError if it cannot be used.

    :param instead: added to the message: what to do instead with simulated devices
    """
    if _cushion.is_simulated():
        raise RuntimeError(f"{call} makes tensors of PyTorch, which cannot use simulated memory{instead}")
    try:
        import torch
    except ImportError as error:
        raise RuntimeError(f"{call} makes tensors of PyTorch, which cannot be imported: install it first") from error
    return torch


def current_stream(device: int) -> int:
    """Returns the handle of PyTorch's current stream on a device; the default stream if PyTorch does not use it."""
    torch = torch_in_use()
    return 0 if torch is None else int(torch.cuda.current_stream(device).cuda_stream)


def whole(name: str, value: Any) -> int:
    """Returns a size, a count or an address as an int.

    :param name: of the argument, for messages
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}, and has to be a whole number") from None
    if number < 0:
        raise ValueError(f"{name} is {number}, and cannot be negative")
    if number >= 1 << 64:
        raise ValueError(f"{name} is {number}, and has to be less than 2 ** 64")
    return number


def dtype_of(torch: Any, given: Any) -> Any:
    """Returns PyTorch's dtype for a dtype of PyTorch or NumPy, a type of Python, or a name; float32 for None."""
    if given is None:
        return torch.float32
    if isinstance(given, torch.dtype):
        return given
    name: Any = given
    if isinstance(given, type):
        name = _OF_PYTHON.get(given, given.__name__)
    elif not isinstance(given, str):
        name = getattr(given, "name", None)
    if not isinstance(name, str):
        raise TypeError(
            f"{given!r} is not a dtype: use torch.float32, 'float32', a dtype of NumPy or a type such as float"
        )
    # NumPy's name is bool_.
    found = getattr(torch, name.strip().removeprefix("torch.").rstrip("_"), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"PyTorch has no dtype {given!r}: use torch.float32, 'float32' and the like")
    return found


def device_of(given: Any) -> int:
    """Returns the index of a device given as a number, as "cuda" or "cuda:1", or as a torch.device; -1, "cuda" and None
    mean the current device."""
    index = _index(given)
    torch = torch_in_use()
    if index is None or index == -1:
        return int(torch.cuda.current_device()) if torch is not None else 0
    # Without PyTorch, the engine checks the index.
    count = _device_count()
    if index < 0 or (count is not None and index >= count):
        there = f"there are {count}, numbered from 0" if count is not None else "they are numbered from 0"
        raise ValueError(f"there is no device {given!r}: {there}")
    return index


def _device_count() -> int | None:
    torch = sys.modules.get("torch")
    return None if torch is None or _cushion.is_simulated() else int(torch.cuda.device_count())


def _index(given: Any) -> int | None:
    if given is None:
        return None
    if isinstance(given, str):
        kind, index = _split(given)
    elif hasattr(given, "type") and hasattr(given, "index"):
        kind, index = given.type, given.index
    else:
        try:
            kind, index = "cuda", None if isinstance(given, bool) else operator.index(given)
        except TypeError:
            index = None
        if index is None:
            raise TypeError(f"{given!r} is not a device: use a number, 'cuda', 'cuda:1' or a torch.device")
    if kind != "cuda":
        raise ValueError(f"{given!r} is not a CUDA device: use a number, 'cuda', 'cuda:1' or a torch.device of CUDA")
    return None if index is None else int(index)


def _split(text: str) -> tuple[str, int | None]:
    found = re.fullmatch(r"(\w+)(?::(\d+))?", text.strip())
    if found is None:
        return "", None
    return found[1], None if found[2] is None else int(found[2])
