"""Messages, through Python's logger `cushion`.

Every shortage is a warning of that logger, for the handlers of the program's own logging; without handlers nothing is
written. `enable_logging` adds a handler for standard error, and lets messages of level INFO through too.

Handlers can change at any time without notice, so they are looked up at each shortage. That takes Python's lock on the
thread that was short of memory. The thread holds no lock of Cushion at that point, and drops the message if it cannot
get Python's lock within a second (`attach_within` in the Rust code)."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator

from . import _cushion
from ._receipts import from_json

logger = logging.getLogger("cushion")
logger.addHandler(logging.NullHandler())

_lock = threading.Lock()
_handler: logging.Handler | None = None
# The logger's level before `enable(True)`.
_level_before = logging.NOTSET


class _ToStandardError(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to the present `sys.stderr`, unless another handler writes the message there."""

    def emit(self, record: logging.LogRecord) -> None:
        others = (handler for handler in _handlers() if handler is not self and handler.level <= record.levelno)
        if sys.stderr is not None and not any(map(_is_on_standard_error, others)):
            self.stream = sys.stderr
            super().emit(record)


def _handlers() -> Iterator[logging.Handler]:
    """Returns the handlers that get the logger's messages."""
    current: logging.Logger | None = logger
    while current is not None:
        yield from current.handlers
        current = current.parent if current.propagate else None


def _is_on_standard_error(handler: logging.Handler) -> bool:
    # The program may have replaced sys.stderr since the handler was created.
    stream = getattr(handler, "stream", None)
    return stream is not None and (stream is sys.stderr or stream is sys.__stderr__)


def enable(wanted: bool) -> None:
    """Starts or stops writing messages to standard error."""
    global _handler, _level_before
    with _lock:
        if wanted and _handler is None:
            _handler = _ToStandardError()
            _handler.setFormatter(logging.Formatter("cushion: %(message)s"))
            logger.addHandler(_handler)
            _level_before = logger.level
            logger.setLevel(logging.INFO)
        elif not wanted and _handler is not None:
            logger.removeHandler(_handler)
            logger.setLevel(_level_before)
            _handler = None


def _is_heard() -> bool:
    """Returns whether a handler would get a warning."""
    wanted = (it for it in _handlers() if it.level <= logging.WARNING and not isinstance(it, logging.NullHandler))
    return logger.isEnabledFor(logging.WARNING) and any(True for _ in wanted)


def _say(text: str) -> None:
    """Logs one warning for a shortage, given its receipt as JSON."""
    if not _is_heard():
        return
    receipt = from_json(text)
    said = str(receipt)
    for answer in receipt.answers:
        if answer.failed is not None:
            said += f"; {answer.callback} failed: {answer.failed}"
        if answer.switched_off:
            said += f"; {answer.callback} took {answer.seconds:.1f} s, and is not called again"
    logger.warning("%s", said)


_cushion.observe_receipts(_say)
