"""Receipts: one record for each shortage, survived or refused, and the receipt of an exception."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

from . import _cushion

# The attribute of an exception that holds its receipt as JSON: plain text, so that the exception can be pickled for a
# process without Cushion. The engine sets it on the exceptions that it raises itself.
_ATTRIBUTE = "_cushion_receipt"


class OutOfMemoryError(MemoryError):
    """Raised when memory runs out and PyTorch is not loaded; otherwise `torch.OutOfMemoryError` is raised."""

    @property
    def receipt(self) -> Receipt | None:
        """The receipt of this refusal; none if it is not one of Cushion's latest refusals."""
        return receipt_of(self)


@dataclass(frozen=True)
class Tried:
    """One rung of the ladder: the bytes that it won, or why it won none."""

    rung: str
    #: "served", "too_little", "nothing", "time_is_up", "failed", "off", "illegal" or "injected"
    ended: str
    #: bytes that became free, or that were released to the driver
    won: int
    seconds: float
    times: int


@dataclass(frozen=True)
class Answer:
    """The result of one callback."""

    callback: str
    said: str | None
    #: the exception that it raised, in one line
    failed: str | None
    won: int
    seconds: float
    #: the callback took longer than its budget and is not called again
    switched_off: bool


@dataclass(frozen=True)
class Group:
    """Live allocations of one size that one place made."""

    each: int
    count: int
    bytes: int
    #: frames as "file:line function", innermost first; empty unless history is recorded
    stack: tuple[str, ...]


@dataclass(frozen=True)
class Receipt:
    """The record of one shortage. `str(receipt)` is one line; `as_dict()` has all fields, as in the file that
    `CUSHION_RECEIPTS` names."""

    #: counts from 1 on each device
    number: int
    device: int
    #: "survived", "full", "never_fits", "give_way", "split", "driver" or "given_up"
    outcome: str
    #: the rung that served the request, if one did
    survived_by: str | None
    #: the bytes of the request, and the bytes that the device had to provide for it
    requested: int
    wanted: int
    #: the time that the shortage took
    seconds: float
    #: the thread or task that made the request
    who: str
    #: whether the failure was injected, to test the program
    injected: bool
    tried: tuple[Tried, ...]
    answers: tuple[Answer, ...]
    #: the largest groups of live allocations at the time of the shortage
    groups: tuple[Group, ...]
    #: the Python stack of the request; empty unless history is recorded
    stack: tuple[str, ...]
    #: the changes that would make the request fit
    remedies: tuple[str, ...]
    _text: str
    _json: str

    @property
    def survived(self) -> bool:
        return self.survived_by is not None

    def as_dict(self) -> dict[str, Any]:
        """Returns all fields, as in JSON."""
        return dict(json.loads(self._json))

    def __str__(self) -> str:
        return self._text


def from_json(text: str) -> Receipt:
    """Returns the receipt that the engine wrote as JSON."""
    raw = json.loads(text)
    outcome, shortage = raw["outcome"], raw["shortage"]
    survived_by = outcome["survived"] if isinstance(outcome, dict) else None
    return Receipt(
        number=raw["number"],
        device=raw["device"],
        outcome="survived" if survived_by else outcome,
        survived_by=survived_by,
        requested=shortage["requested"],
        wanted=shortage["wanted"],
        seconds=raw["took"],
        who=raw["who"],
        injected=shortage["injected"],
        tried=tuple(Tried(it["rung"], it["ended"], it["won"], it["seconds"], it["times"]) for it in shortage["tried"]),
        answers=tuple(
            Answer(it["callback"], it.get("said"), it.get("failed"), it["won"], it["seconds"], it["switched_off"])
            for it in raw["answers"]
        ),
        groups=tuple(Group(it["each"], it["count"], it["bytes"], tuple(it.get("stack", ()))) for it in raw["groups"]),
        stack=tuple(raw.get("stack", ())),
        remedies=tuple(raw["remedies"]),
        _text=raw["text"],
        _json=text,
    )


def receipts(device: int | None = None) -> list[Receipt]:
    """Returns the latest shortages of a device, or of all devices, oldest first. 256 are kept for each device;
    `keep_receipts()` changes that."""
    return [from_json(text) for text in _cushion.receipts(device)]


def keep_receipts(count: int) -> None:
    """Keeps this many receipts for each device from now on."""
    _cushion.keep_receipts(count)


def receipt_of(error: BaseException) -> Receipt | None:
    """Returns the receipt of the refusal that raised an exception; none if it is not one of Cushion's latest refusals.

    `torch.OutOfMemoryError` has it as `error.receipt`, which type checkers do not know: the class is PyTorch's.
    """
    text = error.__dict__.get(_ATTRIBUTE)
    if text is None:
        # PyTorch builds its exception from a C++ exception, which carries only a text. The engine knows the exact
        # texts of its latest refusals.
        text = _cushion.receipt_for(str(error))
        if text is None:
            return None
        error.__dict__[_ATTRIBUTE] = text
    return from_json(text)


class Expecting:
    """Refusals inside of the block are expected: the program tries again, and no last calls are made."""

    def __enter__(self) -> None:
        _cushion.expect_refusals(True)

    def __exit__(self, *_: object) -> None:
        _cushion.expect_refusals(False)


def refuse_after_all(text: str) -> None:
    """Makes the program's last calls for an expected refusal, after which the program gives up.

    :param text: the text of its exception; another text makes no calls
    """
    _cushion.refuse_after_all(text)


def out_of_memory_class() -> type[BaseException]:
    """Returns the class of the exception that is raised when memory runs out."""
    torch = sys.modules.get("torch")
    # Up to 2.4 PyTorch has only the second name. Another thread may be importing PyTorch, so that it has neither yet.
    for holder in (torch, getattr(torch, "cuda", None)):
        found = getattr(holder, "OutOfMemoryError", None)
        if isinstance(found, type):
            return found
    return OutOfMemoryError


def apply() -> None:
    """Adds the property `receipt` to PyTorch's exception."""
    found: Any = out_of_memory_class()
    if found is not OutOfMemoryError:
        found.receipt = property(receipt_of, doc=OutOfMemoryError.receipt.__doc__)
