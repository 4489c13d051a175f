"""What kind of tensor is wanted, in the form of C++, which PyTorch's Python does not know."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any


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
