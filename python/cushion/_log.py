"""Messages, through Python's logger `cushion`: none unless they are asked for."""

from __future__ import annotations

import logging
import sys
import threading

from . import _cushion

logger = logging.getLogger("cushion")
logger.addHandler(logging.NullHandler())

_lock = threading.Lock()
_handler: logging.Handler | None = None
_observes = False


def enable(wanted: bool) -> None:
    """Messages go to standard error from now on, or no longer."""
    global _handler, _observes
    with _lock:
        if wanted and _handler is None:
            _handler = logging.StreamHandler(sys.stderr)
            _handler.setFormatter(logging.Formatter("cushion: %(message)s"))
            logger.addHandler(_handler)
            logger.setLevel(logging.INFO)
            logger.propagate = False
        elif not wanted and _handler is not None:
            logger.removeHandler(_handler)
            _handler = None
        if wanted and not _observes:
            # Only now: to be told of a refusal takes Python's lock, on whatever thread it happens.
            _cushion.observe_refusals(_say_refusal)
            _observes = True


def _say_refusal(device: int, wanted: int, limit: int, free: int) -> None:
    mib = 1 << 20
    logger.warning(
        "GPU %d: refused an allocation of %.2f MiB (free on the GPU: %.2f MiB; this process may hold %.2f MiB)",
        device,
        wanted / mib,
        free / mib,
        limit / mib,
    )
