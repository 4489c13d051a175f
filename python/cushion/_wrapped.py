"""Models that PyTorch distributes over ranks, as `cushion.retry` meets them: DistributedDataParallel and FSDP2.

DDP reduces gradients while backward() runs. In parts it must do so once, in the last one; and after a failed try it
must forget the reduction that it has not finished. FSDP2 gathers parameters and scatters gradients in each part; after
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
        """A try begins, on every rank."""
        for ddp in self._ddp:
            ddp.begin()
        self._fsdp.begin()

    def part(self, is_last: bool) -> None:
        """A part of the try begins."""
        for ddp in self._ddp:
            ddp.part(is_last)

    def end(self) -> None:
        """The try has succeeded on every rank."""
        for ddp in self._ddp:
            ddp.end()

    def back(self) -> None:
        """The try has failed on some rank: every rank forgets it."""
        for ddp in self._ddp:
            ddp.back()
        self._fsdp.back()


def _once(modules: list[Any]) -> list[Any]:
    return list({id(it): it for it in modules}.values())


# Models whose reductions come through Python.
_hooked: weakref.WeakSet[Any] = weakref.WeakSet()


class _Ddp:
    def __init__(self, ddp: Any, board: _collectives.Board | None) -> None:
        self._ddp = ddp
        if board is not None and ddp not in _hooked:
            _hooked.add(ddp)
            if not ddp._comm_hooks:
                # Its own reduction is in C++, where nobody could leave it out. One of the program's is in Python.
                _hook(ddp, board)

    def begin(self) -> None:
        torch = sys.modules["torch"]
        if torch.is_grad_enabled():
            # The first thing that forward() does, with a collective in C++: here no rank can have failed before it.
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
            "rank cannot leave it: register the same hook of torch.distributed.algorithms.ddp_comm_hooks instead"
        ) from error
    if not getattr(ddp, "_use_python_reducer", False):
        # The hook is not the program's: a copy of the model has none.
        ddp._comm_hooks.clear()


class _HookState:
    def __init__(self, ddp: Any, board: _collectives.Board) -> None:
        self.group = ddp.process_group
        self.size = ddp.process_group.size()
        self.board = board
        self.finds_unused = bool(ddp.find_unused_parameters) and not ddp.static_graph
        self.parameters = sum(1 for it in ddp.parameters() if it.requires_grad)


def _reduce_bucket(state: _HookState, bucket: Any) -> Any:
    """As DDP does it: the mean over the ranks."""
    torch = sys.modules["torch"]
    buffer = bucket.buffer()
    buffer.div_(state.size)
    if state.finds_unused and bucket.is_last():
        # The reducer goes on to agree on which parameters were used. The group counts its collectives.
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


# DDP looks at them, and knows no annotation that is text.
_reduce_bucket.__annotations__.clear()


class _Fsdp:
    """FSDP2 keeps its state in objects of its own, which PyTorch has no call to reset."""

    def __init__(self, modules: list[Any]) -> None:
        self._modules = modules

    def begin(self) -> None:
        self._accumulated = []
        for group in self._groups():
            for parameter in group.fsdp_params:
                grad = getattr(parameter, "unsharded_accumulated_grad", None)
                if grad is not None:
                    # Gradients that are added up before they are scattered.
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
            # Gathered, and not yet in use.
            parameter.free_unsharded_param()
    group._sharded_state = type(group._sharded_state).SHARDED
