"""Shared by `gcAllocator` and `custom_cuda_allocator`, the packages for programs written for those two allocators:
starts the engine, with PyTorch, or without it on simulated devices."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading

from . import _cushion, _install, _log

_lock = threading.Lock()
_started = False


def enter(enable_logging: bool | None = None, *, without_torch: bool = False) -> None:
    """Makes Cushion PyTorch's allocator. On simulated devices it only starts the engine.

    If Cushion is installed already, only logging is turned on or off, if `enable_logging` is given.

    :param without_torch: without PyTorch, start only the engine instead of raising
    :raises cushion.InstallError: if Cushion cannot become PyTorch's allocator
    """
    if simulated() or (without_torch and not _has_torch()):
        _start(enable_logging)
    elif not _install.is_installed():
        _install.install(enable_logging=enable_logging)
    elif enable_logging is not None:
        _log.enable(enable_logging)


def _has_torch() -> bool:
    return sys.modules.get("torch") is not None or importlib.util.find_spec("torch") is not None


def simulated() -> bool:
    """Returns whether devices are simulated. Starts the simulation if `CUSHION_SIMULATE` is set."""
    if _cushion.is_simulated():
        return True
    if _install.is_installed():
        return False
    size = _cushion.gather_settings(dict(os.environ)).simulate
    if size is not None:
        _install.simulate(size)
    return size is not None


def _start(enable_logging: bool | None) -> None:
    global _started
    settings = _cushion.gather_settings(dict(os.environ), log=enable_logging)
    with _lock:
        if _started:
            if enable_logging is not None:
                _log.enable(enable_logging)
            return
        _cushion.start(settings)
        _log.enable(settings.log)
        _started = True
    where = "simulated devices" if _cushion.is_simulated() else "GPUs without PyTorch"
    _log.logger.info("cushion %s serves %s: policy %s", _cushion.__version__, where, settings.policy)


def flag(variable: str) -> bool | None:
    """Returns the value of a variable that is on or off; None if it is not set."""
    value = os.environ.get(variable, "").strip()
    if value.lower() in ("1", "true", "yes", "on"):
        return True
    if value.lower() in ("0", "false", "no", "off"):
        return False
    if value:
        raise ValueError(f"{variable} cannot be `{value}`: it takes `1` or `0`")
    return None
