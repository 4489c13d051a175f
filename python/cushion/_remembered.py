"""Batch sizes that `cushion.find_batch_size` found before, in a JSON file.

Other programs, and several processes at once, may change the file. Content that cannot be read is ignored, with a
warning of the logger `cushion`. The file is never written in place: a new file replaces it, so that no process reads a
part of it."""

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
# How many answers are kept, the latest ones.
MOST_ANSWERS = 256
# A larger file is ignored. That many answers take less.
_MOST_BYTES = 1 << 20
# Free memory is rounded down to a multiple of this before it is compared.
_STEPS_OF_FREE = 256 << 20
# How many seconds to wait for another process that writes its answer.
_LONGEST_LOCK = 2.0


def path_of(remember: bool | str | os.PathLike[str]) -> Path | None:
    """Returns the path of the file; None if there is no cache folder for it."""
    if not isinstance(remember, bool):
        return Path(os.fspath(remember))
    folder = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(folder):
        folder = os.path.expanduser("~/.cache")
        if not os.path.isabs(folder):
            logger.warning("batch sizes cannot be remembered: neither XDG_CACHE_HOME nor HOME names a folder")
            return None
    return Path(folder, "cushion", "batch_sizes.json")


# ---- the conditions of an answer ----


def about(name: str, model: Any, multiple_of: int, limit: int | None, ranks: int) -> dict[str, Any]:
    """Returns the conditions of an answer. It applies again only if all of them are the same."""
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
    """Describes the current GPU. This may initialize CUDA: the step is about to use it."""
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
    """Returns the batch size that was found under these conditions; None if there is none."""
    for answer in _read(path):
        if answer["about"] == wanted:
            return int(answer["batch_size"])
    return None


def store(path: Path, found_for: dict[str, Any], batch_size: int) -> None:
    """Writes a batch size to the file. Warns if the file cannot be written."""
    # Follows a link, which the new file would otherwise replace.
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
            raise ValueError(f"it is not a list of answers of version {_VERSION}")
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("the batch sizes in %s cannot be read, and are ignored: %s", path, error)
        return []
    answers = [answer for answer in raw["answers"] if _is_answer(answer)]
    if len(answers) < len(raw["answers"]):
        count = len(raw["answers"]) - len(answers)
        logger.warning("%d batch sizes in %s are not valid, and are ignored", count, path)
    return answers


def _content(path: Path) -> bytes:
    # Without O_NONBLOCK, opening a pipe would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is not a regular file")
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
    """Keeps other processes from writing the file meanwhile, so that no answer is lost. If a process holds the lock for
    too long, the file is written without it: at worst one answer is lost."""
    lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        deadline = time.monotonic() + _LONGEST_LOCK
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                # Some file systems do not support locks.
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
