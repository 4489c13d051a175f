"""Messages, through Python's logger `cushion`: none unless they are asked for."""

from __future__ import annotations

import logging
import sys
import threading

from . import _cushion
from ._receipts import from_json

logger = logging.getLogger("cushion")
logger.addHandler(logging.NullHandler())

_lock = threading.Lock()
_handler: logging.Handler | None = None


def enable(wanted: bool) -> None:
    """Messages go to standard error from now on, or no longer."""
    global _handler
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
        # Only where it is wanted: to tell of a shortage takes Python's lock, on whatever thread it happens.
        _cushion.observe_receipts(_say if wanted else None)


def _say(text: str) -> None:
    """One warning for each shortage, whatever number of tries it took."""
    receipt = from_json(text)
    logger.warning("%s", receipt)
    for answer in receipt.answers:
        if answer.switched_off:
            logger.warning("%s took %.1f s, and is not called again", answer.callback, answer.seconds)
        elif answer.failed is not None:
            logger.warning("%s failed: %s", answer.callback, answer.failed)
