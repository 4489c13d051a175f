"""Receipts: one record per shortage, survived or refused, and how an exception finds its own."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import dataclass
from typing import Any

from . import _cushion

# Where the engine's message names its receipt.
_NUMBER = re.compile(r"Cushion's receipt: (\d+) on GPU (\d+) of process (\d+)\.")


class OutOfMemoryError(MemoryError):
    """Memory ran out, where PyTorch is not loaded; where it is, `torch.OutOfMemoryError` is raised."""

    @property
    def receipt(self) -> Receipt | None:
        """The receipt of this refusal, if it is still kept."""
        return receipt_of(self)


@dataclass(frozen=True)
class Tried:
    """One rung of the ladder: what it won, or why it did not."""

    rung: str
    #: "served", "too_little", "nothing", "time_is_up", "failed", "off", "illegal" or "injected"
    ended: str
    #: bytes that became free, or that the driver got back
    won: int
    seconds: float
    times: int


@dataclass(frozen=True)
class Answer:
    """What one callback did."""

    callback: str
    said: str | None
    #: the exception that it raised, in words
    failed: str | None
    won: int
    seconds: float
    #: it took longer than it was given, and is not called again
    switched_off: bool


@dataclass(frozen=True)
class Group:
    """Live allocations of one size that were made at one place."""

    each: int
    count: int
    bytes: int
    #: frames as "file:line function", innermost first; empty unless history is recorded
    stack: tuple[str, ...]


@dataclass(frozen=True)
class Receipt:
    """The record of one shortage. `str(receipt)` is a line; `as_dict()` has everything, as in the file that
    `CUSHION_RECEIPTS` names."""

    #: from 1, for each device
    number: int
    device: int
    #: "survived", "full", "never_fits", "give_way", "split", "driver" or "given_up"
    outcome: str
    #: the rung that served it, if one did
    survived_by: str | None
    #: what was asked for, and what the device had to give for it
    requested: int
    wanted: int
    #: the time lost
    seconds: float
    #: the thread or task that asked
    who: str
    #: whether it was made up, to test the program
    injected: bool
    tried: tuple[Tried, ...]
    answers: tuple[Answer, ...]
    #: the largest groups of live allocations at that moment
    groups: tuple[Group, ...]
    #: where it was asked for; empty unless history is recorded
    stack: tuple[str, ...]
    #: what would have made it fit
    remedies: tuple[str, ...]
    _text: str
    _json: str

    @property
    def survived(self) -> bool:
        return self.survived_by is not None

    def as_dict(self) -> dict[str, Any]:
        """Everything that is known of it, as JSON has it."""
        return dict(json.loads(self._json))

    def __str__(self) -> str:
        return self._text


def from_json(text: str) -> Receipt:
    """A receipt as the engine gives it."""
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
    """The latest shortages of a device, or of all devices, oldest first. 256 are kept of each device, unless
    `keep_receipts()` says otherwise."""
    return [from_json(text) for text in _cushion.receipts(device)]


def keep_receipts(count: int) -> None:
    """Keeps so many receipts of each device from now on."""
    _cushion.keep_receipts(count)


def receipt_of(error: BaseException) -> Receipt | None:
    """The receipt of the refusal that an exception tells of, if it is one of Cushion's and still kept.

    `torch.OutOfMemoryError` has it as `error.receipt`, which type checkers do not know of: the class is PyTorch's.
    """
    found = _find(str(error))
    text = None if found is None else _cushion.receipt(*found)
    return None if text is None else from_json(text)


def _find(text: str) -> tuple[int, int] | None:
    """The device and the number that a message names; an error of another process has its receipt there."""
    found = _NUMBER.search(text)
    return (int(found[2]), int(found[1])) if found is not None and int(found[3]) == os.getpid() else None


class Expecting:
    """Refusals inside are expected: somebody tries again."""

    def __enter__(self) -> None:
        _cushion.expect_refusals(True)

    def __exit__(self, *_: object) -> None:
        _cushion.expect_refusals(False)


def refuse_after_all(text: str) -> None:
    """A refusal that was expected, with this text, is the end: the program's last calls are made."""
    found = _find(text)
    if found is not None:
        _cushion.refuse_after_all(*found)


def out_of_memory_class() -> type[BaseException]:
    """What is raised when memory runs out."""
    torch = sys.modules.get("torch")
    # Up to 2.4 PyTorch has only the second of these names. Another thread may be importing it.
    for holder in (torch, getattr(torch, "cuda", None)):
        found = getattr(holder, "OutOfMemoryError", None)
        if isinstance(found, type):
            return found
    return OutOfMemoryError


def apply() -> None:
    """Gives PyTorch's exception the property `receipt`."""
    found: Any = out_of_memory_class()
    if found is not OutOfMemoryError:
        found.receipt = property(receipt_of, doc=OutOfMemoryError.receipt.__doc__)
