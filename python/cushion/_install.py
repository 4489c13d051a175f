"""Makes Cushion PyTorch's allocator, once per process and before CUDA is used."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import warnings
from collections.abc import Iterable
from typing import Any, Literal

from . import _cushion, _limits, _log, _patches, _receipts, _streams

OLDEST_TORCH = (2, 3)

CUDA_IN_USE = (
    "CUDA is in use already, and PyTorch changes its allocator only before that. Call cushion.install() right after "
    "`import torch`, before the first tensor or query of the GPU, or start the program as `cushion run PROGRAM`."
)
RAY = (
    " Ray Train sets the GPU of a worker before it calls the training function, so that is too late: install Cushion "
    'as each worker starts, with ray.init(runtime_env={"worker_process_setup_hook": "cushion.install"}).'
)

# Keeps the engine from calling into Python while Python shuts down.
atexit.register(_cushion.stop)

_lock = threading.Lock()
_plugin: Any = None


class InstallError(RuntimeError):
    """Cushion could not become PyTorch's allocator; the message says why, and what to do."""


def install(
    policy: Literal["segments", "expandable", "paged"] | None = None,
    enable_logging: bool | None = None,
    conf: str | None = None,
    *,
    wait_ms: int | None = None,
    skip_rungs: Iterable[str] | None = None,
    receipts: str | os.PathLike[str] | None = None,
    inject: str | None = None,
) -> None:
    """Makes Cushion the allocator of PyTorch's CUDA tensors, for the rest of this process.

    Call it before CUDA is used. An argument that is not given comes from the environment (`CUSHION_POLICY`,
    `CUSHION_LOG`, `CUSHION_CONF`, `CUSHION_RECEIPTS`, `CUSHION_INJECT`, a variable for each option, and
    `PYTORCH_CUDA_ALLOC_CONF`), and otherwise has its default.

    A second call is allowed at any time. It changes only the options that are given; without arguments it changes
    nothing. It does not read the environment again. An empty string for `receipts` or `inject` turns it off. Another
    policy applies to new memory; memory in use keeps its layout until it is freed.

    :param policy: how memory is laid out: "paged", the default, with the least waste; "segments", as in PyTorch's
        classic allocator; or "expandable", as with its expandable segments
    :param enable_logging: whether the installation and every shortage, served or refused, are reported on standard
        error. Without it, shortages are still warnings of Python's logger `cushion`, for the handlers of the program's
        own logging
    :param conf: options as `key:value,key:value`, in the syntax of `PYTORCH_CUDA_ALLOC_CONF`
    :param wait_ms: how long one request may wait for memory that other threads may free; 0 to not wait.
        `cushion.budget()` sets it for a block
    :param skip_rungs: rungs of the ladder that are skipped, such as ["wait"]
    :param receipts: a file that every shortage is written to, as a line of JSON
    :param inject: rules for injected failures, to test how the program handles them
    :raises InstallError: if CUDA was used already, PyTorch is missing, too old or without CUDA, or devices are
        simulated
    :raises ValueError: if an option is not valid
    """
    conf = _with_options(conf, wait_ms, skip_rungs)
    receipts = None if receipts is None else os.fspath(receipts)
    with _lock:
        if _plugin is None:
            settings = _cushion.gather_settings(dict(os.environ), policy, conf, enable_logging, receipts, inject)
            _take_over(settings)
            _log.enable(settings.log)
        else:
            settings = _cushion.change_settings(policy, conf, receipts, inject)
            if enable_logging is not None:
                _log.enable(enable_logging)
    options = settings.conf or "no other options"
    _log.logger.info("cushion %s installed: policy %s, %s", _cushion.__version__, settings.policy, options)


def _with_options(conf: str | None, wait_ms: int | None, skip_rungs: Iterable[str] | None) -> str | None:
    pairs = [*filter(None, [conf])]
    if wait_ms is not None:
        pairs.append(f"wait_ms:{wait_ms}")
    if skip_rungs is not None:
        names = [skip_rungs] if isinstance(skip_rungs, str) else list(skip_rungs)
        pairs.append(f"skip_rungs:{'+'.join(names) or 'none'}")
    return ",".join(pairs) or None


def is_installed() -> bool:
    """Returns whether Cushion is PyTorch's allocator."""
    return _plugin is not None


def simulate(size: str | int) -> None:
    """Simulates devices from now on: the engine works as on a GPU, with addresses that have no memory behind them.

    For tests, and for machines without a GPU. Every device index is valid. PyTorch cannot use simulated memory, so
    `install()` raises afterwards. The variable `CUSHION_SIMULATE` does the same.

    :param size: the memory of each device: "16GiB", "8GB" or a number of bytes
    :raises ValueError: if `size` is not a size
    :raises RuntimeError: if a device is in use already
    """
    with _lock:
        if _plugin is not None:
            raise InstallError(
                "PyTorch uses Cushion on its GPUs already, and devices can be simulated only in a process where it "
                "does not: call cushion.simulate() in another process"
            )
        _cushion.simulate(str(size))


def _take_over(settings: _cushion.Settings) -> None:
    global _plugin
    if settings.simulate is not None or _cushion.is_simulated():
        raise InstallError(
            "PyTorch cannot use simulated memory, and devices are simulated in this process: remove "
            "cushion.simulate() and CUSHION_SIMULATE to use a GPU"
        )
    torch = _usable_torch()
    plugin = torch.cuda.memory.CUDAPluggableAllocator(_cushion.__file__, "cushion_alloc", "cushion_free")
    inner = plugin.allocator()
    for setter, address in _cushion.hooks().items():
        getattr(inner, setter)(address)
    raised = _cushion.start(settings)
    _keep_backend_from_torch(settings)
    try:
        torch.cuda.memory.change_current_allocator(plugin)
    except RuntimeError as error:
        raise InstallError(
            f"PyTorch does not accept Cushion as its allocator: {error}. Another allocator was installed in this "
            "process before; PyTorch takes only one, and keeps the first."
        ) from error
    # PyTorch cannot change its allocator back from here on.
    _plugin = plugin
    _patches.apply(torch)
    _streams.apply(torch)
    _receipts.apply()
    # Warnings come last: a program may have turned them into errors.
    _limits.apply(torch)
    if raised != "torch.OutOfMemoryError":
        warnings.warn(f"PyTorch {torch.__version__} gets a {raised} when memory runs out", stacklevel=3)


def _usable_torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise InstallError("cushion.install() needs PyTorch, which cannot be imported: install it first") from error
    if _patches.version(torch) < OLDEST_TORCH:
        raise InstallError(f"PyTorch {torch.__version__} is too old for Cushion, which needs 2.3 or later")
    if getattr(torch.version, "hip", None):
        raise InstallError(f"PyTorch {torch.__version__} is built for ROCm, and Cushion is for CUDA")
    if torch.version.cuda is None:
        raise InstallError(
            f"PyTorch {torch.__version__} is built without CUDA, so there is no GPU memory to allocate: "
            "install a CUDA build of it"
        )
    if torch.cuda.is_initialized():
        raise InstallError(CUDA_IN_USE + (RAY if "ray" in sys.modules else ""))
    return torch


def _keep_backend_from_torch(settings: _cushion.Settings) -> None:
    """Removes `backend` from PyTorch's variable: PyTorch raises if it differs from the allocator in use."""
    if settings.torch_variable is not None:
        name, conf = settings.torch_variable
        if os.environ.get(name) != conf:
            os.environ[name] = conf
