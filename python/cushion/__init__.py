"""Cushion: a caching CUDA memory allocator that keeps GPU programs alive when memory runs out.

    import cushion
    cushion.install()   # before CUDA is used; PyTorch then allocates all its CUDA memory through Cushion

`cushion run train.py ARGS...` does the same with no change to the program. On a machine without a GPU,
`cushion.simulate("16GiB")` runs the engine, and everything that does not need PyTorch, on simulated devices.
"""

from ._batch_size import find_batch_size
from ._cushion import __version__, stats
from ._failures import is_out_of_memory
from ._install import InstallError, install, is_installed, simulate
from ._known import retry_stats
from ._memory import Memory, alloc_async, alloc_future, allocate_tensor, prefetch
from ._offload import Offloader, offloader
from ._parts import CannotSplit, SplitBatch, split_batch
from ._ranks import RankError
from ._receipts import OutOfMemoryError, Receipt, keep_receipts, receipt_of, receipts
from ._retry import retry
from ._shortage import budget, inject, on_refusal, on_shortage, remove_callback

__all__ = [
    "CannotSplit",
    "InstallError",
    "Memory",
    "Offloader",
    "OutOfMemoryError",
    "RankError",
    "Receipt",
    "SplitBatch",
    "__version__",
    "alloc_async",
    "alloc_future",
    "allocate_tensor",
    "budget",
    "find_batch_size",
    "inject",
    "install",
    "is_installed",
    "is_out_of_memory",
    "keep_receipts",
    "offloader",
    "on_refusal",
    "on_shortage",
    "prefetch",
    "receipt_of",
    "receipts",
    "remove_callback",
    "retry",
    "retry_stats",
    "simulate",
    "split_batch",
    "stats",
]
