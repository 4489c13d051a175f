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
# How the logger was before messages were asked for.
_before = (logging.NOTSET, True)


def enable(wanted: bool) -> None:
    """Messages go to standard error from now on, or no longer."""
    global _handler, _before
    with _lock:
        if wanted and _handler is None:
            _handler = logging.StreamHandler(sys.stderr)
            _handler.setFormatter(logging.Formatter("cushion: %(message)s"))
            logger.addHandler(_handler)
            _before = (logger.level, logger.propagate)
            logger.setLevel(logging.INFO)
            logger.propagate = False
        elif not wanted and _handler is not None:
            logger.removeHandler(_handler)
            logger.setLevel(_before[0])
            logger.propagate = _before[1]
            _handler = None
        # Only where it is wanted: to tell of a shortage takes Python's lock, on whatever thread it happens.
        _cushion.observe_receipts(_say if wanted else None)


def _say(text: str) -> None:
    """One warning for each shortage, whatever number of tries it took."""
    receipt = from_json(text)
    said = str(receipt)
    for answer in receipt.answers:
        if answer.failed is not None:
            said += f"; {answer.callback} failed: {answer.failed}"
        if answer.switched_off:
            said += f"; {answer.callback} took {answer.seconds:.1f} s, and is not called again"
    logger.warning("%s", said)
