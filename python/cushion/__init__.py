"""Cushion: a caching CUDA memory allocator that keeps GPU programs alive when memory runs out.

    import cushion
    cushion.install()   # before CUDA is used; every allocation of PyTorch's goes through Cushion

`cushion run train.py ARGS...` does the same with no change to the program.
"""

from ._cushion import __version__, stats
from ._install import InstallError, install, is_installed

__all__ = ["InstallError", "__version__", "install", "is_installed", "stats"]
