"""Takes the place of PyTorch's allocator, once per process and before CUDA is used."""

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
    " Ray Train sets the GPU of a worker before it calls the training function, so that is too late: let every worker "
    'install Cushion as it starts, by ray.init(runtime_env={"worker_process_setup_hook": "cushion.install"}).'
)

# Once Python shuts down, nothing calls into it any more.
atexit.register(_cushion.stop)

_lock = threading.Lock()
_plugin: Any = None


class InstallError(RuntimeError):
    """Cushion could not take PyTorch's place; the text says why, and what to do."""


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

    Call it before CUDA is used. What is not given comes from the environment (`CUSHION_POLICY`,
    `CUSHION_LOG`, `CUSHION_CONF`, `CUSHION_RECEIPTS`, `CUSHION_INJECT`, a variable for each option, and
    `PYTORCH_CUDA_ALLOC_CONF`), and else is the default.

    A second call may come at any time. It changes what is given, option by option, and leaves everything else as it is;
    without arguments it changes nothing. The environment is not read again. An empty text for `receipts` or `inject`
    ends it. Another policy serves new memory; memory in use stays as it is laid out until it is given back.

    :param policy: how memory is laid out: "paged", with the least waste, which is the default; "segments", as PyTorch's
        classic allocator does it; or "expandable", as its expandable segments
    :param enable_logging: whether what was installed, and every shortage, survived or refused, is said on standard
        error. Without it, shortages are still warnings of Python's logger `cushion`, for the handlers of the program's
        own logging
    :param conf: options as `key:value,key:value`, in the syntax of `PYTORCH_CUDA_ALLOC_CONF`
    :param wait_ms: how long one request may wait for memory that can still come; 0 for nobody. `cushion.budget()` sets
        it for a block
    :param skip_rungs: rungs of the ladder that are left out, such as ["wait"]
    :param receipts: a file that every shortage is written to, as a line of JSON
    :param inject: rules for failures that are made up, to test how the program takes them
    :raises InstallError: if CUDA was used already, PyTorch is missing, too old or without CUDA, or devices are
        simulated
    :raises ValueError: if a setting is no good
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
    """Whether PyTorch's allocations go through Cushion."""
    return _plugin is not None


def simulate(size: str | int) -> None:
    """Devices are simulated from now on: the engine works as on a GPU, on addresses that nobody can follow.

    For tests, and for trying things out where there is no GPU. As many devices as are asked for are there. PyTorch
    cannot use such memory, so `install()` refuses afterwards. The variable `CUSHION_SIMULATE` does the same.

    :param size: the memory of each device: "16GiB", "8GB" or a number of bytes
    :raises ValueError: if that is no size
    :raises RuntimeError: if a device is in use already
    """
    with _lock:
        if _plugin is not None:
            raise InstallError(
                "PyTorch uses Cushion on its GPUs already, and devices can be simulated only before: call "
                "cushion.simulate() first, in a process of its own"
            )
        _cushion.simulate(str(size))


def _take_over(settings: _cushion.Settings) -> None:
    global _plugin
    if settings.simulate is not None or _cushion.is_simulated():
        raise InstallError(
            "PyTorch cannot use simulated memory, and devices are simulated in this process: leave "
            "cushion.simulate() and CUSHION_SIMULATE away to use a GPU"
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
            f"PyTorch does not let Cushion in: {error}. Another allocator was installed in this process "
            "before; only one can be, and the first stays."
        ) from error
    # From here on there is no way back.
    _plugin = plugin
    _patches.apply(torch)
    _streams.apply(torch)
    _receipts.apply()
    # Warnings last: a program may have made errors of them.
    _limits.apply(torch)
    if raised != "torch.OutOfMemoryError":
        warnings.warn(f"PyTorch {torch.__version__} gets a {raised} when memory runs out", stacklevel=3)


def _usable_torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise InstallError("cushion.install() needs PyTorch, which cannot be imported: install it first") from error
    if _patches.version(torch) < OLDEST_TORCH:
        raise InstallError(f"PyTorch {torch.__version__} is too old for Cushion: it takes 2.3 or later")
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
    """PyTorch compares `backend` of its variable with the allocator in force, and stops where they differ."""
    if settings.torch_variable is not None:
        name, conf = settings.torch_variable
        if os.environ.get(name) != conf:
            os.environ[name] = conf
