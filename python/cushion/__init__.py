"""Cushion: a caching CUDA memory allocator that keeps GPU programs alive when memory runs out.

    import cushion
    cushion.install()   # before CUDA is used; every allocation of PyTorch's goes through Cushion

`cushion run train.py ARGS...` does the same with no change to the program. Where there is no GPU,
`cushion.simulate("16GiB")` lets the engine, and what is built on it without PyTorch, be tried out.
"""

from ._cushion import __version__, stats
from ._install import InstallError, install, is_installed, simulate
from ._retry import CannotSplit, is_out_of_memory, retry, retry_stats, split_batch

__all__ = [
    "CannotSplit",
    "InstallError",
    "__version__",
    "install",
    "is_installed",
    "is_out_of_memory",
    "retry",
    "retry_stats",
    "simulate",
    "split_batch",
    "stats",
]
