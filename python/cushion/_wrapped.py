"""Models that PyTorch distributes over ranks, in steps of `cushion.retry`: DistributedDataParallel and FSDP2.

DDP reduces gradients while backward() runs. For a step in parts it must reduce only in the last part, and after a
failed try it must discard the unfinished reduction. FSDP2 gathers parameters and scatters gradients in each part; after
a failed try its parameters are sharded again."""

from __future__ import annotations

import sys
import weakref
from typing import Any

from . import _collectives


class Wrapped:
    """The distributed models among some modules."""

    def __init__(self, modules: list[Any], board: _collectives.Board | None) -> None:
        torch = sys.modules["torch"]
        ddp_class = torch.nn.parallel.DistributedDataParallel
        inside = [it for root in modules for it in root.modules()]
        self._ddp = [_Ddp(it, board) for it in _once(inside) if isinstance(it, ddp_class)]
        self._fsdp = _Fsdp([it for it in _once(inside) if hasattr(it, "_get_fsdp_state")])

    def begin(self) -> None:
        """Begins a try. Every rank calls this."""
        for ddp in self._ddp:
            ddp.begin()
        self._fsdp.begin()

    def part(self, is_last: bool) -> None:
        """Begins a part of the try."""
        for ddp in self._ddp:
            ddp.part(is_last)

    def end(self) -> None:
        """Ends a try that has succeeded on every rank."""
        for ddp in self._ddp:
            ddp.end()

    def back(self) -> None:
        """Resets the models after a try that failed on any rank."""
        for ddp in self._ddp:
            ddp.back()
        self._fsdp.back()


def _once(modules: list[Any]) -> list[Any]:
    return list({id(it): it for it in modules}.values())


# Models that have the communication hook in Python.
_hooked: weakref.WeakSet[Any] = weakref.WeakSet()


class _Ddp:
    def __init__(self, ddp: Any, board: _collectives.Board | None) -> None:
        self._ddp = ddp
        if board is not None and ddp not in _hooked:
            _hooked.add(ddp)
            if not ddp._comm_hooks:
                # DDP's own reduction is in C++, where a rank could not skip it. A hook of the program is in Python.
                _hook(ddp, board)

    def begin(self) -> None:
        torch = sys.modules["torch"]
        if torch.is_grad_enabled():
            # forward() would do this first, with a collective in C++. Here no rank can have failed before it.
            self._ddp.reducer._rebuild_buckets()
        self._backward_sync = self._ddp.require_backward_grad_sync
        self._forward_sync = self._ddp.require_forward_param_sync

    def part(self, is_last: bool) -> None:
        self._ddp.require_backward_grad_sync = self._backward_sync and is_last

    def end(self) -> None:
        self._ddp.require_backward_grad_sync = self._backward_sync

    def back(self) -> None:
        self._ddp.reducer._reset_state()
        self._ddp.require_backward_grad_sync = self._backward_sync
        self._ddp.require_forward_param_sync = self._forward_sync


def _hook(ddp: Any, board: _collectives.Board) -> None:
    try:
        ddp.register_comm_hook(_HookState(ddp, board), _reduce_bucket)
    except RuntimeError as error:
        raise RuntimeError(
            "cushion.retry: this DistributedDataParallel has a built-in communication hook, which is in C++, where a "
            "rank that fails cannot skip it: register the same hook of torch.distributed.algorithms.ddp_comm_hooks "
            "instead"
        ) from error
    if not getattr(ddp, "_use_python_reducer", False):
        # DDP forbids copies of a model with a hook. This hook is not the program's, so a copy works without it.
        ddp._comm_hooks.clear()


class _HookState:
    def __init__(self, ddp: Any, board: _collectives.Board) -> None:
        self.group = ddp.process_group
        self.size = ddp.process_group.size()
        self.board = board
        self.finds_unused = bool(ddp.find_unused_parameters) and not ddp.static_graph
        self.parameters = sum(1 for it in ddp.parameters() if it.requires_grad)


def _reduce_bucket(state: _HookState, bucket: Any) -> Any:
    """Reduces a bucket as DDP does: the mean over the ranks."""
    torch = sys.modules["torch"]
    buffer = bucket.buffer()
    buffer.div_(state.size)
    if state.finds_unused and bucket.is_last():
        # After the last bucket the reducer begins another all-reduce, of which parameters were used. The sequence
        # number of the group tells whether it has begun.
        number = state.group._get_sequence_number_for_group()
        used = torch.zeros(state.parameters, dtype=torch.int32, device=buffer.device)
        options = torch.distributed.AllreduceOptions()
        state.board.will_follow(
            state.group,
            "allreduce",
            ([used], options),
            lambda: bool(state.group._get_sequence_number_for_group() > number + 1),
        )
    work = torch.distributed.all_reduce(buffer, group=state.group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


# DDP checks the annotations of a hook, and does not understand those that are strings.
_reduce_bucket.__annotations__.clear()


class _Fsdp:
    """Resets FSDP2's internal state after a failed try. PyTorch has no function for that."""

    def __init__(self, modules: list[Any]) -> None:
        self._modules = modules

    def begin(self) -> None:
        self._accumulated = []
        for group in self._groups():
            for parameter in group.fsdp_params:
                grad = getattr(parameter, "unsharded_accumulated_grad", None)
                if grad is not None:
                    # Gradients accumulated without reduction, which are not scattered yet.
                    self._accumulated.append((parameter, grad, grad.detach().clone()))

    def back(self) -> None:
        for module in self._modules:
            state = module._get_fsdp_state()
            idle = type(state._training_state).IDLE
            state._training_state = idle
            state._modules_to_run_forward.clear()
            state._state_ctx.iter_forward_root = None
            state._state_ctx.post_backward_final_callback_queued = False
            _forget_communication(state._comm_ctx)
        for group in self._groups():
            _reshard(group)
        for parameter, grad, copy in self._accumulated:
            with sys.modules["torch"].no_grad():
                grad.copy_(copy)
            parameter.unsharded_accumulated_grad = grad

    def _groups(self) -> list[Any]:
        groups: list[Any] = []
        for module in self._modules:
            state = module._get_fsdp_state()
            several = getattr(state, "_fsdp_param_groups", None)
            groups += several if several is not None else [state._fsdp_param_group]
        return [it for it in _once(groups) if it is not None]


def _forget_communication(context: Any) -> None:
    context.all_gather_state = None
    context.reduce_scatter_state = None
    if hasattr(context, "post_forward_order"):
        context.post_forward_order.clear()


def _reshard(group: Any) -> None:
    gathered = group._all_gather_result
    if gathered is not None:
        if gathered.all_gather_work is not None:
            gathered.all_gather_work.wait()
        group._all_gather_result = None
    group._training_state = type(group._training_state).IDLE
    group._post_forward_indices.clear()
    group._post_reduce_event = None
    group._reshard_after_forward_event = None
    group._all_reduce_state = None
    for parameter in group.fsdp_params:
        sharded = type(parameter.sharded_state).SHARDED
        parameter.unsharded_accumulated_grad = None
        unsharded = getattr(parameter, "_unsharded_param", None)
        if unsharded is not None:
            unsharded.grad = None
        if parameter.sharded_state is not sharded:
            parameter.to_sharded()
        elif unsharded is not None:
            # Gathered, but not yet in use.
            parameter.free_unsharded_param()
    group._sharded_state = type(group._sharded_state).SHARDED
