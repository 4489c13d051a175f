"""Agreement between ranks: whether a step that they run together has succeeded on all ranks, and how to go on.

A step that succeeds costs one exchange of two numbers over the CPU, at its end; the GPU works on meanwhile. The slower
steps happen only when a rank fails. That rank sets an alarm in the store of the process group. A thread of every rank
waits for the alarm, marks the try as failed (_collectives.py) and reports how many collectives its rank has begun.
Ranks that have begun fewer join the missing ones with zeros. Then all ranks leave the step, and vote."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import json
import os
import sys
import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

from . import _collectives
from ._log import logger

# How a try ended on a rank. The largest value of all ranks decides.
DONE, OUT_OF_MEMORY, GAVE_UP, FAILED = range(4)
# How long the thread waits for an alarm. Alarms are rare.
_LONG = datetime.timedelta(days=30)
# How many seconds a process waits at its end for that thread.
_LONGEST_END = 10.0


class RankError(RuntimeError):
    """Another rank failed, died or did not answer: the message says which, and why."""


class Verdict(NamedTuple):
    """What the ranks have agreed on."""

    #: DONE, OUT_OF_MEMORY, GAVE_UP or FAILED
    ended: int
    #: a rank on which the try ended so, as a global rank
    rank: int
    #: the number of parts of the next try
    parts: int


class OthersFailed(Exception):
    """The try succeeded on this rank, and failed on another."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__("another rank failed")
        self.verdict = verdict


class Ranks:
    """The ranks of one process group, which run the same steps."""

    def __init__(self, group: Any, timeout: float | None) -> None:
        import torch.distributed as dist

        self._members = dist.get_process_group_ranks(group)
        self._rank = dist.get_rank(group)
        wait = _timeout_of(group) if timeout is None else datetime.timedelta(seconds=timeout)
        self._seconds = wait.total_seconds()
        only_members = {} if len(self._members) == dist.get_world_size() else {"use_local_synchronization": True}
        #: a group over the CPU for these agreements only, so that they do not mix with the program's collectives
        self._group = dist.new_group(self._members, timeout=wait, backend="gloo", **only_members)
        self.board = _collectives.Board(self._group)
        #: whether a rank remembers a shortage: then the ranks agree on the number of parts before a step
        self._somebody_remembers = False
        self._epoch = 0
        # Kept alive: the first rank may hold the server of the store, which has to outlive the groups.
        self._served = store = _store_of(self._group)
        self._store = _connect(store, self._group.group_name)
        self._watch = _Watch(_connect(store, self._group.group_name), self._rank, self.board)
        self._watch.start()
        self._process = os.getpid()
        atexit.register(self._end)

    def __len__(self) -> int:
        return len(self._members)

    @property
    def rank(self) -> int:
        return int(self._rank)

    def agree(self, *numbers: int) -> list[int]:
        """Returns the largest value of each number over the ranks.

        :raises RankError: if a rank has died or does not answer
        """
        torch = sys.modules["torch"]
        said = torch.tensor(numbers, dtype=torch.int64)
        try:
            torch.distributed.all_reduce(said, op=torch.distributed.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:
            raise RankError(
                f"cushion.retry: the {len(self)} ranks could not agree. {self._first_to_fail()}A rank has ended, or "
                f"has not left the step within {self._seconds:.0f} s because it waits in a collective that cannot be "
                f"joined. {error}"
            ) from error
        return [int(number) for number in said]

    def begin(self, parts: int, remembers: bool) -> int:
        """Returns the number of parts that all ranks begin with. Ranks agree on it only after a recent shortage."""
        if not self._somebody_remembers:
            return 1
        parts, somebody = self.agree(parts, int(remembers))
        self._somebody_remembers = bool(somebody)
        return parts

    def vote(self, ended: int, parts: int, why: str = "") -> Verdict:
        """Ends a try on every rank: when this returns, no rank is inside the step.

        :param parts: the number of parts that this rank needs for the next try
        :param why: the error of this rank
        """
        if ended != DONE and not self.board.is_frozen:
            self._store.set(f"why/{self._epoch}/{self._rank}", why)
            self._raise_alarm(f"{self.board.turn} {self._rank}", range(len(self)))
        if ended != DONE:
            # Lets the ranks go on that wait for this rank in a collective.
            self._join_the_others()
        worst, parts = self.agree(ended * len(self) + self._rank, parts)
        verdict = Verdict(worst // len(self), self._members[worst % len(self)], parts)
        if verdict.ended != DONE:
            self._somebody_remembers = True
            if not self._watch.has_heard(self._seconds):
                raise RankError("cushion.retry: the store of the process group does not answer any more")
            self._forget(self._epoch - 1)
            self._epoch += 1
            self._watch.go_on()
        return verdict

    def why(self, rank: int) -> str:
        """Returns the error of a rank that failed at the last vote. All ranks must call this: it ends with an
        agreement, so that no rank ends, and the store with it, before the others have read the error."""
        key = f"why/{self._epoch - 1}/{self._members.index(rank)}"
        said = "out of memory"
        with contextlib.suppress(RuntimeError):
            if self._store.check([key]):
                said = str(self._store.get(key).decode(errors="replace"))
            self.agree(0)
        return said

    def _join_the_others(self) -> None:
        counts = self._counts()
        most = max(counts)
        own = self.board.count()
        if own == most:
            return
        # The note may come from any rank that is in the same group. The rank with the most collectives is asked first.
        by_progress = sorted(range(len(counts)), key=counts.__getitem__, reverse=True)
        notes: dict[int, tuple[int, list[dict[str, Any]]]] = {}
        for index in range(own, most):
            for rank in by_progress:
                if counts[rank] <= index:
                    break
                if rank not in notes:
                    notes[rank] = json.loads(self._store.get(f"notes/{self._epoch}/{rank}"))
                dropped, latest = notes[rank]
                if _collectives.join(latest[index - dropped]):
                    break

    def _counts(self) -> list[int]:
        """Returns how many collectives each rank has begun in this try."""
        keys = [f"count/{self._epoch}/{rank}" for rank in range(len(self))]
        try:
            self._store.wait(keys, datetime.timedelta(seconds=self._seconds))
        except RuntimeError as error:
            silent = [str(self._members[at]) for at, key in enumerate(keys) if not self._answers(key)]
            raise RankError(
                f"cushion.retry: {self._first_to_fail()}Rank {', '.join(silent) or '?'} has not answered for "
                f"{self._seconds:.0f} s since: it has ended, or cannot reach the store of the process group"
            ) from error
        return [int(self._store.get(key)) for key in keys]

    def _first_to_fail(self) -> str:
        failed = self._watch.failed_rank
        return "" if failed is None else f"Rank {self._members[failed]} failed first. "

    def _answers(self, key: str) -> bool:
        try:
            return bool(self._store.check([key]))
        except RuntimeError:
            return False

    def _forget(self, epoch: int) -> None:
        with contextlib.suppress(RuntimeError):
            for what in ("alarm", "count", "notes"):
                self._store.delete_key(f"{what}/{epoch}/{self._rank}")

    def _raise_alarm(self, alarm: str, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._store.set(f"alarm/{self._epoch}/{rank}", alarm)

    def _end(self) -> None:
        """Ends the thread that waits for an alarm, before Python shuts down: a thread that returns from C++ code during
        the shutdown aborts the process. The first rank ends the threads of all ranks, because the store may be in its
        process."""
        if os.getpid() != self._process:
            # A forked child has the connection, but not the thread.
            return
        with contextlib.suppress(Exception):
            self._raise_alarm(_Watch.END, range(len(self)) if self._rank == 0 else [self._rank])
        self._watch.join(_LONGEST_END)


class _Watch(threading.Thread):
    """A thread that waits for alarms while the other threads of its rank work, or wait in a collective."""

    END = "end"

    def __init__(self, store: Any, rank: int, board: _collectives.Board) -> None:
        super().__init__(name="cushion-ranks", daemon=True)
        self._store, self._rank, self._board = store, rank, board
        #: the rank that raised the last alarm
        self.failed_rank: int | None = None
        self._heard = threading.Event()
        self._next = threading.Event()

    def has_heard(self, seconds: float) -> bool:
        """Waits for the alarm of the failed try. Returns False if it has not come within `seconds`."""
        return self._heard.wait(seconds)

    def go_on(self) -> None:
        """Waits for the next alarm: the ranks have handled the last one."""
        self.failed_rank = None
        self._heard.clear()
        self._next.set()

    def run(self) -> None:
        epoch = 0
        while True:
            try:
                self._store.wait([f"alarm/{epoch}/{self._rank}"], _LONG)
                alarm = self._store.get(f"alarm/{epoch}/{self._rank}").decode()
                if alarm == self.END:
                    return
                turn, self.failed_rank = map(int, alarm.split())
                dropped, notes = self._board.freeze(turn)
                self._store.set(f"notes/{epoch}/{self._rank}", json.dumps([dropped, notes]))
                self._store.set(f"count/{epoch}/{self._rank}", str(dropped + len(notes)))
            except Exception as error:  # noqa: BLE001
                # The store is gone: the program ends, or its first rank has died, which the next collective reports.
                logger.debug("alarms of other ranks are not received any more: %s", error)
                return
            self._heard.set()
            self._next.wait()
            self._next.clear()
            epoch += 1


# ---- the ranks of each group ----

_lock = threading.Lock()
_known: dict[int, tuple[Any, float | None, Ranks]] = {}


def of(group: Any, timeout: float | None) -> Ranks | None:
    """Returns the ranks of a group; None if the group has one rank."""
    import torch.distributed as dist

    if group == "world":
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f'cushion.retry: group is {group!r}, and has to be a process group, or "world"')
    if dist.get_world_size(group) == 1:
        return None
    with _lock:
        found = _known.get(id(group))
        if found is None or found[0] is not group or found[1] != timeout:
            found = _known[id(group)] = (group, timeout, Ranks(group, timeout))
        return found[2]


def in_use() -> bool:
    """Returns whether the program has initialized `torch.distributed`."""
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and bool(dist.is_initialized())


def several() -> int:
    """Returns how many ranks the program has; 1 without `torch.distributed`."""
    return int(sys.modules["torch.distributed"].get_world_size()) if in_use() else 1


def _timeout_of(group: Any) -> datetime.timedelta:
    """Returns the timeout of a group, which the program has set."""
    import torch.distributed as dist

    for device in ("cuda", "cpu"):
        with contextlib.suppress(Exception):
            found = group._get_backend(dist.distributed_c10d.torch.device(device)).options._timeout
            if isinstance(found, datetime.timedelta):
                return found
    return datetime.timedelta(minutes=30)


def _store_of(group: Any) -> Any:
    import torch.distributed as dist

    store = dist.distributed_c10d._world.pg_map[group][1]
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def _connect(store: Any, name: str) -> Any:
    """Returns a separate connection to the store: a connection serves one waiting call at a time."""
    import torch.distributed as dist

    if hasattr(store, "clone"):
        store = store.clone()
    elif isinstance(store, dist.TCPStore):
        store = dist.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)
    return dist.PrefixStore(f"cushion/{name}", store)
