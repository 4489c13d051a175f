"""Batch sizes that `cushion.find_batch_size` found before, in a file of JSON.

The file may be changed by anybody, and by several processes at once. What cannot be understood in it is ignored, with
a warning of the logger `cushion`. It is never written in place: a new file takes its place at once, so that nobody
reads half of it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import _batch_search, _cushion, _install, _undo
from ._log import logger

_VERSION = 1
# So many answers are kept, the latest.
MOST_ANSWERS = 256
# A file of so many answers is smaller than this.
_MOST_BYTES = 1 << 20
# Free memory that differs by less is the same.
_STEPS_OF_FREE = 256 << 20
# For another process to write its answer.
_LONGEST_LOCK = 2.0


def path_of(remember: bool | str | os.PathLike[str]) -> Path | None:
    """The file that is meant; nothing if there is no home to keep it in."""
    if not isinstance(remember, bool):
        return Path(os.fspath(remember))
    folder = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(folder):
        folder = os.path.expanduser("~/.cache")
        if not os.path.isabs(folder):
            logger.warning("batch sizes cannot be remembered: neither XDG_CACHE_HOME nor HOME names a folder")
            return None
    return Path(folder, "cushion", "batch_sizes.json")


# ---- what an answer is for ----


def about(name: str, model: Any, multiple_of: int, limit: int | None, ranks: int) -> dict[str, Any]:
    """What has to be the same for an answer to be of use again."""
    holders = _undo.Holders(model)
    shapes = [[list(it.shape), str(it.dtype), bool(it.requires_grad)] for it in holders.parameters()]
    torch = sys.modules.get("torch")
    return {
        "function": name,
        "model": "+".join(type(it).__qualname__ for it in holders.modules()) or type(model).__qualname__,
        "parameters": len(shapes),
        "shapes": hashlib.sha256(json.dumps(shapes).encode()).hexdigest(),
        "multiple_of": multiple_of,
        "limit": limit,
        "ranks": ranks,
        "torch": None if torch is None else str(torch.__version__),
        "policy": _policy(torch),
        **_device(torch),
    }


def _policy(torch: Any) -> str:
    if torch is None or _install.is_installed() or _cushion.is_simulated():
        return f"cushion {_cushion.conf()}"
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    conf = next((os.environ[name] for name in names if name in os.environ), "")
    return f"{torch.cuda.get_allocator_backend()} {conf}"


def _device(torch: Any) -> dict[str, Any]:
    """The current GPU. The step is about to use it, so CUDA may be used here."""
    name, total, free = "none", 0, 0
    if torch is None or _cushion.is_simulated():
        devices = _cushion.devices_in_use()[:1] or ([0] if _cushion.is_simulated() else [])
        for device in devices:
            name = "simulated" if _cushion.is_simulated() else "GPU"
            free, _, total = _batch_search.memory_of(device)
    elif torch.cuda.is_available():
        device = torch.cuda.current_device()
        name = str(torch.cuda.get_device_properties(device).name)
        free, _, total = _batch_search.memory_of(device)
    return {"gpu": name, "memory": total, "free": free // _STEPS_OF_FREE * _STEPS_OF_FREE}


# ---- the file ----


def look_up(path: Path, wanted: dict[str, Any]) -> int | None:
    """The batch size that was found for this before."""
    for answer in _read(path):
        if answer["about"] == wanted:
            return int(answer["batch_size"])
    return None


def store(path: Path, found_for: dict[str, Any], batch_size: int) -> None:
    """Remembers a batch size, if the file can be written."""
    # Not the link that it may be, which the new file would take the place of.
    path = Path(os.path.realpath(path))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            others = [answer for answer in _read(path) if answer["about"] != found_for]
            answers = [*others, {"about": found_for, "batch_size": batch_size}][-MOST_ANSWERS:]
            _replace(path, json.dumps({"version": _VERSION, "answers": answers}, indent=1))
    except OSError as error:
        logger.warning("the batch size %d cannot be remembered in %s: %s", batch_size, path, error)


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        raw = json.loads(_content(path))
        if not isinstance(raw, dict) or raw.get("version") != _VERSION or not isinstance(raw.get("answers"), list):
            raise ValueError(f"it is no list of answers of version {_VERSION}")
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("%s holds no batch sizes that can be understood, and is ignored: %s", path, error)
        return []
    answers = [answer for answer in raw["answers"] if _is_answer(answer)]
    if len(answers) < len(raw["answers"]):
        count = len(raw["answers"]) - len(answers)
        logger.warning("%d batch sizes in %s cannot be understood, and are ignored", count, path)
    return answers


def _content(path: Path) -> bytes:
    # A pipe would wait for somebody to write.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is no plain file")
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError(f"it is larger than {_MOST_BYTES} bytes")
    return content


def _is_answer(answer: Any) -> bool:
    if not isinstance(answer, dict) or not isinstance(answer.get("about"), dict):
        return False
    size = answer.get("batch_size")
    return isinstance(size, int) and not isinstance(size, bool) and 0 < size <= _batch_search.LARGEST


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """No other process of Cushion's writes meanwhile, so that its answer is not lost. One that never ends is not waited
    for: then an answer may be lost, and nothing else."""
    lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        deadline = time.monotonic() + _LONGEST_LOCK
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                # Some file systems have no locks.
                if error.errno != errno.EWOULDBLOCK or time.monotonic() > deadline:
                    break
            time.sleep(0.01)
        yield
    finally:
        os.close(lock)


def _replace(path: Path, text: str) -> None:
    descriptor, written = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(written, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(written)
        raise
