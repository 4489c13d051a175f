"""What kind of tensor is wanted, and where: PyTorch's dtypes and devices in every form that programs write them, the
C++ one among them, which PyTorch's Python does not know."""

from __future__ import annotations

import operator
import re
import sys
from dataclasses import dataclass, replace
from typing import Any

from cushion import _cushion, _doors

# As PyTorch takes Python's own types.
_OF_PYTHON = {float: "float64", int: "int64", bool: "bool", complex: "complex128"}


@dataclass(frozen=True)
class TensorOptions:
    """A dtype and a device, named one after the other as in C++:

    torch.TensorOptions().dtype(torch.float32).device(torch.kCUDA, 1)

    Each call gives new options. What is not named is `float32`, on the current device.
    """

    chosen_dtype: Any = None
    chosen_device: Any = None

    def dtype(self, dtype: Any) -> TensorOptions:
        return replace(self, chosen_dtype=dtype)

    def device(self, device: Any, index: int | None = None) -> TensorOptions:
        return replace(self, chosen_device=device if index is None else f"{_type_of(device)}:{index}")


def _type_of(device: Any) -> str:
    return str(getattr(device, "type", device))


def lend_names() -> None:
    """Gives PyTorch the names `TensorOptions` and `kCUDA`, if it is loaded and has none of its own."""
    torch = sys.modules.get("torch")
    # Another thread may be importing it.
    if torch is None or not hasattr(torch, "device"):
        return
    for name, value in (("TensorOptions", TensorOptions), ("kCUDA", torch.device("cuda"))):
        if not hasattr(torch, name):
            setattr(torch, name, value)


def dtype_of(torch: Any, given: Any) -> Any:
    """PyTorch's dtype for one as PyTorch, NumPy or Python has it, or for its name."""
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
            f"{given!r} is no dtype: it takes torch.float32, 'float32', a dtype of NumPy or a type such as float"
        )
    # NumPy writes bool_.
    found = getattr(torch, name.strip().removeprefix("torch.").rstrip("_"), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"PyTorch has no dtype {given!r}: it takes torch.float32, 'float32' and the like")
    return found


def device_of(given: Any) -> int:
    """The index of a device given as a number, as "cuda" or "cuda:1", or as PyTorch's; -1, "cuda" and nothing mean the
    current one."""
    index = _index(given)
    torch = _doors.torch_in_use()
    if index is None or index == -1:
        return int(torch.cuda.current_device()) if torch is not None else 0
    # Without PyTorch the engine knows which there are.
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
            raise TypeError(f"{given!r} is no device: it takes a number, 'cuda', 'cuda:1' or a torch.device")
    if kind != "cuda":
        raise ValueError(f"{given!r} is no CUDA device: it takes a number, 'cuda', 'cuda:1' or a torch.device of CUDA")
    return None if index is None else int(index)


def _split(text: str) -> tuple[str, int | None]:
    found = re.fullmatch(r"(\w+)(?::(\d+))?", text.strip())
    if found is None:
        return "", None
    return found[1], None if found[2] is None else int(found[2])
