"""`TensorOptions` as in C++, which PyTorch does not have in Python."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class TensorOptions:
    """A dtype and a device, set one after the other as in C++:

    torch.TensorOptions().dtype(torch.float32).device(torch.kCUDA, 1)

    Each call returns new options. The defaults are `float32` and the current device.
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
    """Adds the names `TensorOptions` and `kCUDA` to PyTorch, if it is imported and does not have them."""
    torch = sys.modules.get("torch")
    # PyTorch may be imported only in part, by another thread.
    if torch is None or not hasattr(torch, "device"):
        return
    for name, value in (("TensorOptions", TensorOptions), ("kCUDA", torch.device("cuda"))):
        if not hasattr(torch, name):
            setattr(torch, name, value)
