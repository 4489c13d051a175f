"""Collectives of a step that ranks run together, so that no rank waits for one that another has left.

While such a step runs, every collective that Python code begins is noted before it is begun: which one, and over which
shapes. When a rank fails, it has begun fewer of them than the others. It joins those that they have begun already, with
zeros, so that they get out; none begins a new one, because the note says that the step has failed. What the zeros were
added to is thrown away with the try.

All collectives of `torch.distributed` go through the methods of its ProcessGroup, and so do FSDP2's. DDP's reducer is
in C++; a communication hook in Python brings its reductions here, too (_wrapped.py)."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

# Methods of ProcessGroup that every rank of a group calls in the same order.
_METHODS = (
    ("_allgather_base", "_reduce_scatter_base", "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced")
    + ("allreduce", "allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "broadcast", "gather", "reduce")
    + ("reduce_scatter", "reduce_scatter_tensor_coalesced", "scatter")
)


# Ranks wait for each other at nearly every collective, so none is behind by more than a step's.
_MOST_NOTES = 10_000


class LeftStep(RuntimeError):
    """Another rank has failed: this one leaves the step before it begins another collective."""


class Board:
    """The collectives that this rank has begun in the current try, and whether the try is lost.

    Tries are counted alike on every rank: an alarm may come before this rank has begun the try that it is about."""

    def __init__(self, own_group: Any) -> None:
        self._own_group = own_group
        self._lock = threading.Lock()
        self._begun: list[dict[str, Any]] = []
        #: notes of a long try that no rank can be behind by so many
        self._dropped = 0
        #: a collective that C++ begins after the last one, and whether it has
        self._to_follow: Any = None
        self._expected: Any = None
        self._frozen = False
        self._lost = 0
        self._step_thread = 0
        self.turn = 0

    def open(self) -> None:
        """A try begins, on this thread."""
        _patch()
        with self._lock:
            self.turn += 1
            self._begun, self._dropped, self._to_follow, self._expected = [], 0, None, None
            self._frozen = self.turn <= self._lost
            self._step_thread = threading.get_ident()
        _open_boards.append(self)

    def close(self) -> None:
        """The try is over: collectives are noted no more."""
        if self in _open_boards:
            _open_boards.remove(self)

    def freeze(self, turn: int) -> tuple[int, list[dict[str, Any]]]:
        """A try is lost: no collective of it is begun any more. Returns the latest that were begun, and how many were
        before those."""
        with self._lock:
            self._lost = max(self._lost, turn)
            self._frozen = self.turn <= self._lost
            return (self._dropped, list(self._begun)) if self.turn == turn else (0, [])

    @property
    def is_frozen(self) -> bool:
        return self._frozen

    def begin(self, group: Any, method: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Notes a collective, unless the try is lost: then it must not be begun. Returns the note."""
        if group is self._own_group or not self._is_of_the_step():
            return None
        note = {"group": group.group_name, "method": method, "arguments": _describe((list(arguments), keywords))}
        with self._lock:
            if self._frozen:
                raise LeftStep("another rank has left this step")
            self._begun.append(note)
            if self._expected is not None:
                self._to_follow, self._expected = self._expected, None
                self._begun.append(self._to_follow[0])
            if len(self._begun) > 2 * _MOST_NOTES:
                self._dropped += _MOST_NOTES
                del self._begun[:_MOST_NOTES]
        return note

    def did_not_begin(self, note: Any) -> None:
        """A collective failed before it was begun: the other ranks wait for this one to join it."""
        with self._lock:
            gone = (note, self._to_follow[0] if self._follows() else note)
            self._begun = [it for it in self._begun if it is not gone[0] and it is not gone[1]]

    def will_follow(self, group: Any, method: str, arguments: tuple[Any, ...], has_begun: Callable[[], bool]) -> None:
        """The next collective is followed by this one in C++, unless this rank fails before it. Both are noted at once:
        an alarm cannot come between them."""
        note = {"group": group.group_name, "method": method, "arguments": _describe((list(arguments), {}))}
        self._expected = (note, has_begun)

    def count(self) -> int:
        """How many collectives of a try that is lost this rank has really begun."""
        with self._lock:
            missing = self._follows() and not self._to_follow[1]()
            return self._dropped + len(self._begun) - int(missing)

    def _follows(self) -> bool:
        return self._to_follow is not None and self._begun[-1:] == [self._to_follow[0]]

    def _is_of_the_step(self) -> bool:
        """Threads that Python did not start are autograd's; a thread of the program has collectives of its own."""
        ident = threading.get_ident()
        if ident == self._step_thread:
            return True
        thread = threading._active.get(ident)  # type: ignore[attr-defined]
        return thread is None or isinstance(thread, threading._DummyThread)


def join(note: dict[str, Any]) -> bool:
    """Takes part in a collective with zeros; false if this rank is no member of its group."""
    torch = sys.modules["torch"]
    groups = list(torch.distributed.distributed_c10d._world.pg_map)
    group = next((it for it in groups if it.group_name == note["group"]), None)
    if group is None:
        return False
    arguments, keywords = _rebuild(torch, note["arguments"])
    _as_this_rank(torch, group, note["method"], arguments)
    work = _originals[note["method"]](group, *arguments, **keywords)
    if work is not None:
        work.wait()
    return True


def _as_this_rank(torch: Any, group: Any, method: str, arguments: list[Any]) -> None:
    """Some collectives take other arguments on each rank: turns those of the rank that noted it into this one's."""
    rank = group.rank()
    if method == "allgather":
        arguments[1] = [torch.zeros_like(outputs[rank]) for outputs in arguments[0]]
    elif method == "reduce_scatter":
        arguments[0] = [torch.zeros_like(inputs[rank]) for inputs in arguments[1]]
    elif method in ("gather", "scatter"):
        # The root has one tensor for each rank beside its own.
        all_at, own_at = (0, 1) if method == "gather" else (1, 0)
        is_root = arguments[2].rootRank == rank
        every = [[torch.zeros_like(own) for _ in range(group.size())] for own in arguments[own_at]]
        arguments[all_at] = every if is_root else []
    elif method == "alltoall_base" and any(len(sizes) > 0 for sizes in arguments[2:4]):
        raise LeftStep("an all-to-all with parts of unequal sizes cannot be joined by a rank that has left it")


# ---- descriptions of arguments ----


def _describe(value: Any) -> Any:
    """Arguments of a collective as another rank can make them: tensors by their shape."""
    torch = sys.modules["torch"]
    if isinstance(value, torch.Tensor):
        return ("tensor", tuple(value.shape), str(value.dtype).removeprefix("torch."), value.device.type)
    if isinstance(value, (list, tuple)):
        return ("list", [_describe(inner) for inner in value])
    if isinstance(value, dict):
        return ("dict", {key: _describe(inner) for key, inner in value.items()})
    if value is None or isinstance(value, (bool, int, float, str)):
        return ("plain", value)
    if isinstance(value, torch.distributed.ReduceOp):
        return ("reduce", str(getattr(value, "op", value)).rpartition(".")[2])
    options = {name: getattr(value, name) for name in _OPTIONS if hasattr(value, name)}
    return ("options", type(value).__name__, {name: _describe(it) for name, it in options.items()})


# What options of collectives say that matters to the other ranks.
_OPTIONS = ("reduceOp", "rootRank", "rootTensor")


def _rebuild(torch: Any, said: Any) -> Any:
    kind = said[0]
    if kind == "tensor":
        device = said[3] if said[3] != "cuda" else torch.device("cuda", torch.cuda.current_device())
        return torch.zeros(said[1], dtype=getattr(torch, said[2]), device=device)
    if kind == "list":
        return [_rebuild(torch, inner) for inner in said[1]]
    if kind == "dict":
        return {key: _rebuild(torch, inner) for key, inner in said[1].items()}
    if kind == "plain":
        return said[1]
    if kind == "reduce":
        if said[1] == "PREMUL_SUM":
            return torch._C._distributed_c10d._make_nccl_premul_sum(1.0)
        return getattr(torch.distributed.ReduceOp, said[1])
    options = getattr(torch.distributed.distributed_c10d, said[1], None) or getattr(torch._C._distributed_c10d, said[1])
    made = options()
    for name, value in said[2].items():
        setattr(made, name, _rebuild(torch, value))
    return made


# ---- where collectives begin ----

_originals: dict[str, Callable[..., Any]] = {}
_open_boards: list[Board] = []
_patch_lock = threading.Lock()


def _patch() -> None:
    if _originals:
        return
    with _patch_lock:
        if _originals:
            return
        import torch.distributed as dist

        found: dict[str, Callable[..., Any]] = {}
        for name in _METHODS:
            if hasattr(dist.ProcessGroup, name):
                found[name] = getattr(dist.ProcessGroup, name)
                setattr(dist.ProcessGroup, name, _noting(name, found[name]))
        dist._broadcast_coalesced = _one_by_one(dist._broadcast_coalesced)
        _originals.update(found)


def _noting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def noting(group: Any, *arguments: Any, **keywords: Any) -> Any:
        if not _open_boards:
            return original(group, *arguments, **keywords)
        notes = [(board, board.begin(group, name, arguments, keywords)) for board in list(_open_boards)]
        try:
            return original(group, *arguments, **keywords)
        except BaseException:
            for board, note in notes:
                board.did_not_begin(note)
            raise

    noting.__name__, noting.__doc__ = name, original.__doc__
    return noting


def _one_by_one(original: Callable[..., Any]) -> Callable[..., Any]:
    """DDP broadcasts the buffers of its module in C++, by several collectives in one call, and a rank may fail between
    them. While a step runs they are begun here, one for each type of tensor."""

    def broadcast_coalesced(group: Any, tensors: Any, buffer_size: int, src: int = 0) -> Any:
        if not _open_boards:
            return original(group, tensors, buffer_size, src)
        torch = sys.modules["torch"]
        alike: dict[Any, list[Any]] = {}
        for tensor in tensors:
            alike.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        options = torch.distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        for same in alike.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in same])
            group.broadcast([flat], options).wait()
            if group.rank() != src:
                pieces = flat.split([tensor.numel() for tensor in same])
                for tensor, piece in zip(same, pieces):
                    tensor.copy_(piece.view_as(tensor))
        return None

    return broadcast_coalesced
