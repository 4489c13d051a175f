"""What `gcAllocator` and `custom_cuda_allocator` share, the packages for programs written for those two: how they get
at the engine, with PyTorch or, on simulated devices, without."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading

from . import _cushion, _install, _log

_lock = threading.Lock()
_started = False


def enter(enable_logging: bool | None = None, *, without_torch: bool = False) -> None:
    """Makes Cushion PyTorch's allocator; on simulated devices, only makes the engine ready.

    What somebody installed before stays as it is, except that logging is turned on or off where that is asked for.

    :param without_torch: that the engine is ready will do where there is no PyTorch
    :raises cushion.InstallError: if PyTorch does not let Cushion in
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
    """Whether devices are simulated; from now on they are, if `CUSHION_SIMULATE` says so."""
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
    """What a variable that is on or off says; nothing if it is not set."""
    value = os.environ.get(variable, "").strip()
    if value.lower() in ("1", "true", "yes", "on"):
        return True
    if value.lower() in ("0", "false", "no", "off"):
        return False
    if value:
        raise ValueError(f"{variable} cannot be `{value}`: it takes `1` or `0`")
    return None
