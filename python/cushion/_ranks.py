"""Agreement between ranks: whether a step that they run together has succeeded on all of them, and what comes next.

A step that goes well costs one exchange of two numbers over the CPU, at its end; the GPU works on meanwhile. What is
slower happens only when a rank fails. That rank raises an alarm in the store that the ranks met by. A thread of every
rank waits for it, marks the step as lost (_collectives.py) and says how many collectives its rank has begun. Ranks that
have begun fewer join the rest with zeros. So all of them come out of the step, and vote."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import json
import sys
import threading
from typing import Any, NamedTuple

from . import _collectives
from ._log import logger

# How an attempt ended on a rank; the worst of all ranks decides.
DONE, OUT_OF_MEMORY, GAVE_UP, FAILED = range(4)
# Alarms are rare: a thread that waits for one can wait for long.
_LONG = datetime.timedelta(days=30)


class RankError(RuntimeError):
    """Another rank failed, died or did not answer: the text says which, and why."""


class Verdict(NamedTuple):
    """What the ranks have agreed on."""

    #: DONE, OUT_OF_MEMORY, GAVE_UP or FAILED
    ended: int
    #: a rank on which it ended so, as the program counts ranks
    rank: int
    #: in how many parts the next try is made
    parts: int


class Ranks:
    """The ranks of one process group, which run the same steps."""

    def __init__(self, group: Any, timeout: float | None) -> None:
        import torch.distributed as dist

        self._members = dist.get_process_group_ranks(group)
        self._rank = dist.get_rank(group)
        wait = _timeout_of(group) if timeout is None else datetime.timedelta(seconds=timeout)
        self._seconds = wait.total_seconds()
        only_members = {} if len(self._members) == dist.get_world_size() else {"use_local_synchronization": True}
        #: over the CPU, and for nothing else: the program's own collectives cannot get between
        self._group = dist.new_group(self._members, timeout=wait, backend="gloo", **only_members)
        self.board = _collectives.Board(self._group)
        #: somebody ran out of memory not long ago: ranks agree on the number of parts before they begin
        self._somebody_remembers = False
        self._epoch = 0
        # The first rank may hold the server of the store, which has to outlive the groups.
        self._served = store = _store_of(self._group)
        self._store = _connect(store, self._group.group_name)
        self._watch = _Watch(_connect(store, self._group.group_name), self._rank, self.board)
        self._watch.start()
        if self._rank == 0:
            atexit.register(self._end)

    def __len__(self) -> int:
        return len(self._members)

    @property
    def rank(self) -> int:
        return int(self._rank)

    def agree(self, *numbers: int) -> list[int]:
        """The largest of each number over the ranks.

        :raises RankError: if a rank has died or does not answer
        """
        torch = sys.modules["torch"]
        said = torch.tensor(numbers, dtype=torch.int64)
        try:
            torch.distributed.all_reduce(said, op=torch.distributed.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:
            raise RankError(
                f"cushion.retry: the {len(self)} ranks could not agree. {self._first_to_fail()}A rank has ended, or "
                f"has not left the step within {self._seconds:.0f} s: it waits in a collective that cannot be joined. "
                f"{error}"
            ) from error
        return [int(number) for number in said]

    def begin(self, parts: int, remembers: bool) -> int:
        """In how many parts all ranks begin: asked only while one of them remembers a shortage."""
        if not self._somebody_remembers:
            return 1
        parts, somebody = self.agree(parts, int(remembers))
        self._somebody_remembers = bool(somebody)
        return parts

    def vote(self, ended: int, parts: int, why: str = "") -> Verdict:
        """Ends a try on every rank: when this returns, no rank is inside of it.

        :param parts: in how many parts this rank would try again
        :param why: what failed here
        """
        if ended != DONE and not self.board.is_frozen:
            self._store.set(f"why/{self._epoch}/{self._rank}", why)
            self._store.set(f"alarm/{self._epoch}", f"{self.board.turn} {self._rank}")
        if ended != DONE:
            # Nobody is left waiting for this rank.
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
        """What a rank said that failed at the last vote. All ranks ask: none ends, and takes the store with it, before
        the others have read it."""
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
        # Any rank with a note of a collective in a group of this rank's will do; the one that is furthest has all.
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
        """How many collectives each rank has begun in this try."""
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
            for what in ("count", "notes"):
                self._store.delete_key(f"{what}/{epoch}/{self._rank}")

    def _end(self) -> None:
        """The store may live in this process: those who wait for an alarm are told that there will be none."""
        with contextlib.suppress(Exception):
            self._store.set(f"alarm/{self._epoch}", _Watch.END)


class _Watch(threading.Thread):
    """Waits for alarms while the other threads of a rank work, or wait in a collective."""

    END = "end"

    def __init__(self, store: Any, rank: int, board: _collectives.Board) -> None:
        super().__init__(name="cushion-ranks", daemon=True)
        self._store, self._rank, self._board = store, rank, board
        #: the rank that raised the last alarm
        self.failed_rank: int | None = None
        self._heard = threading.Event()
        self._next = threading.Event()

    def has_heard(self, seconds: float) -> bool:
        """Whether the alarm of the try that was lost has come here, too."""
        return self._heard.wait(seconds)

    def go_on(self) -> None:
        """The alarm is dealt with."""
        self.failed_rank = None
        self._heard.clear()
        self._next.set()

    def run(self) -> None:
        epoch = 0
        while True:
            try:
                self._store.wait([f"alarm/{epoch}"], _LONG)
                alarm = self._store.get(f"alarm/{epoch}").decode()
                if alarm == self.END:
                    return
                turn, self.failed_rank = map(int, alarm.split())
                dropped, notes = self._board.freeze(turn)
                self._store.set(f"notes/{epoch}/{self._rank}", json.dumps([dropped, notes]))
                self._store.set(f"count/{epoch}/{self._rank}", str(dropped + len(notes)))
            except Exception as error:  # noqa: BLE001
                # The store has gone: the program ends, or its first rank has died, which its collectives will say.
                logger.debug("nobody listens for other ranks any more: %s", error)
                return
            self._heard.set()
            self._next.wait()
            self._next.clear()
            epoch += 1


# ---- the ranks of a group, found once ----

_lock = threading.Lock()
_known: dict[int, tuple[Any, float | None, Ranks]] = {}


def of(group: Any, timeout: float | None) -> Ranks | None:
    """The ranks of a group; nothing if it is one rank alone."""
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
    """Whether the program has met other ranks, or itself, by `torch.distributed`."""
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and bool(dist.is_initialized())


def several() -> int:
    """How many ranks the program has; 1 where `torch.distributed` is not in use."""
    return int(sys.modules["torch.distributed"].get_world_size()) if in_use() else 1


def _timeout_of(group: Any) -> datetime.timedelta:
    """How long the program has said that a rank may wait for others."""
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
    """A connection of its own: one that waits keeps no other from its turn."""
    import torch.distributed as dist

    if hasattr(store, "clone"):
        store = store.clone()
    elif isinstance(store, dist.TCPStore):
        store = dist.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)
    return dist.PrefixStore(f"cushion/{name}", store)
