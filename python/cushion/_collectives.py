"""Keeps ranks from waiting in a collective for a rank that has failed and left the step.

While ranks run a step together, each rank records every collective that Python code begins, with its shapes, before it
begins. A rank that fails has begun fewer collectives than the others. It joins the missing ones with zeros, so that the
other ranks return from them. No rank begins a new collective after that: the board says that the try has failed. The
results that the zeros went into are discarded with the try.

All collectives of `torch.distributed`, and those of FSDP2, go through the methods of its ProcessGroup. DDP's reducer is
in C++; a communication hook in Python (_wrapped.py) makes its reductions go through these methods too."""

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


# Ranks wait for each other at nearly every collective, so no rank is behind by this many.
_MOST_NOTES = 10_000


class LeftStep(RuntimeError):
    """Another rank has failed: this rank ends the step before it begins another collective."""


class Board:
    """The collectives that this rank has begun in the current try, and whether the try has failed on some rank.

    Every rank counts tries in the same way: an alarm may arrive before this rank has begun the try that it names."""

    def __init__(self, own_group: Any) -> None:
        self._own_group = own_group
        self._lock = threading.Lock()
        self._begun: list[dict[str, Any]] = []
        #: how many of the oldest notes were dropped: no rank can be that far behind
        self._dropped = 0
        #: the note of a collective that C++ code begins after the last one, and a function that tells whether it has
        self._to_follow: Any = None
        self._expected: Any = None
        self._frozen = False
        self._lost = 0
        self._step_thread = 0
        self.turn = 0

    def open(self) -> None:
        """Begins a try, on the calling thread."""
        _patch()
        with self._lock:
            self.turn += 1
            self._begun, self._dropped, self._to_follow, self._expected = [], 0, None, None
            self._frozen = self.turn <= self._lost
            self._step_thread = threading.get_ident()
        _open_boards.append(self)

    def close(self) -> None:
        """Ends the try: collectives are no longer recorded."""
        if self in _open_boards:
            _open_boards.remove(self)

    def freeze(self, turn: int) -> tuple[int, list[dict[str, Any]]]:
        """Marks a try as failed: it begins no further collective. Returns the number of dropped notes, and the rest."""
        with self._lock:
            self._lost = max(self._lost, turn)
            self._frozen = self.turn <= self._lost
            return (self._dropped, list(self._begun)) if self.turn == turn else (0, [])

    @property
    def is_frozen(self) -> bool:
        return self._frozen

    def begin(self, group: Any, method: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Records a collective that is about to begin, and returns the note. Raises LeftStep if the try has failed."""
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
        """Removes the note of a collective that failed before it began: the other ranks still wait in it."""
        with self._lock:
            gone = (note, self._to_follow[0] if self._follows() else note)
            self._begun = [it for it in self._begun if it is not gone[0] and it is not gone[1]]

    def will_follow(self, group: Any, method: str, arguments: tuple[Any, ...], has_begun: Callable[[], bool]) -> None:
        """Announces a collective that C++ code begins right after the next one, unless this rank fails before. Both are
        recorded together, so that an alarm cannot arrive between them."""
        note = {"group": group.group_name, "method": method, "arguments": _describe((list(arguments), {}))}
        self._expected = (note, has_begun)

    def count(self) -> int:
        """Returns how many collectives of a failed try this rank has really begun."""
        with self._lock:
            missing = self._follows() and not self._to_follow[1]()
            return self._dropped + len(self._begun) - int(missing)

    def _follows(self) -> bool:
        return self._to_follow is not None and self._begun[-1:] == [self._to_follow[0]]

    def _is_of_the_step(self) -> bool:
        """Returns whether the calling thread works for the step. Other threads of the program have their own
        collectives."""
        return threading.get_ident() == self._step_thread or is_autograd_thread()


def is_autograd_thread() -> bool:
    """Returns whether the calling thread was not started by Python. Autograd starts such threads."""
    thread = threading._active.get(threading.get_ident())  # type: ignore[attr-defined]
    return thread is None or isinstance(thread, threading._DummyThread)


def join(note: dict[str, Any]) -> bool:
    """Joins a collective with zeros. Returns False if this rank is not a member of its group."""
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
    """Converts the arguments of the rank that made the note into those of this rank, if the collective needs that."""
    rank = group.rank()
    if method == "allgather":
        arguments[1] = [torch.zeros_like(outputs[rank]) for outputs in arguments[0]]
    elif method == "reduce_scatter":
        arguments[0] = [torch.zeros_like(inputs[rank]) for inputs in arguments[1]]
    elif method in ("gather", "scatter"):
        # The root passes one tensor for each rank in addition to its own.
        all_at, own_at = (0, 1) if method == "gather" else (1, 0)
        is_root = arguments[2].rootRank == rank
        every = [[torch.zeros_like(own) for _ in range(group.size())] for own in arguments[own_at]]
        arguments[all_at] = every if is_root else []
    elif method == "alltoall_base" and any(len(sizes) > 0 for sizes in arguments[2:4]):
        raise LeftStep("a rank that has left the step cannot join an all-to-all with unequal sizes")


# ---- descriptions of arguments ----


def _describe(value: Any) -> Any:
    """Describes the arguments of a collective so that another rank can rebuild them: tensors by shape and dtype."""
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


# The options of collectives that have to be the same on all ranks.
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
    """Wraps `_broadcast_coalesced`, by which DDP broadcasts the buffers of its module: in C++, with several collectives
    in one call, and a rank may fail between them. While a step runs, the wrapper begins them in Python, one for each
    dtype and device."""

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
