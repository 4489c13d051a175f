"""Ranks for tests: processes of one gloo group, forked from the process of a test, and failures at the n-th operation
of a step."""

from __future__ import annotations

import datetime
import faulthandler
import gc
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

# Seconds after which a rank that waits for another counts as hanging.
STUCK = 60.0


class Ended(Exception):
    """Ends a rank with a result, without waiting for other ranks: its group is broken."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result


def run(world: int, function: Callable[..., Any], *arguments: Any, timeout: float = STUCK) -> list[Any]:
    """Calls `function(rank, world, *arguments)` on every rank. Returns their results, which have to be JSON. The result
    of a rank that a signal ended is the negative number of the signal."""
    port = _free_port()
    ranks = [_fork(rank, world, port, function, arguments, timeout) for rank in range(world)]
    results: dict[int, Any] = {}
    with selectors.DefaultSelector() as selector:
        for rank, (_, pipe) in enumerate(ranks):
            selector.register(pipe, selectors.EVENT_READ, rank)
        said = {rank: b"" for rank in range(world)}
        deadline = time.monotonic() + timeout
        while len(results) < world and time.monotonic() < deadline:
            for key, _ in selector.select(1):
                piece = os.read(key.fd, 1 << 16)
                said[key.data] += piece
                if not piece:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    results[key.data] = said[key.data]
    stuck = [rank for rank in range(world) if rank not in results]
    ended = []
    for rank, (pid, _) in enumerate(ranks):
        if rank in stuck:
            os.kill(pid, signal.SIGKILL)
        ended.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    if stuck:
        raise AssertionError(f"ranks {stuck} of {world} were still at work after {timeout:.0f} s")
    reports = [json.loads(results[rank]) if results[rank] else {"result": ended[rank]} for rank in range(world)]
    errors = [f"rank {rank}: {it['error']}" for rank, it in enumerate(reports) if "error" in it]
    if errors:
        raise AssertionError("\n".join(errors))
    return [it["result"] for it in reports]


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _fork(
    rank: int, world: int, port: int, function: Callable[..., Any], arguments: Any, timeout: float
) -> tuple[int, int]:
    sys.stdout.flush()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    os.close(reading)
    # Shows where the rank hangs, if it does.
    faulthandler.dump_traceback_later(timeout - 2, file=sys.stderr)
    try:
        report = {"result": _as_rank(rank, world, port, function, arguments)}
    except Ended as ended:
        report = {"result": ended.result}
    except BaseException:
        report = {"error": traceback.format_exc()}
    with os.fdopen(writing, "w") as pipe:
        json.dump(report, pipe)
    os._exit(0)


def _as_rank(rank: int, world: int, port: int, function: Callable[..., Any], arguments: Any) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # Otherwise each further try runs a full collection over all objects of torch.
    gc.collect()
    gc.freeze()
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=30),
    )
    result = function(rank, world, *arguments)
    if world > 1:
        # The first rank holds the store, and has to end last.
        dist.barrier()
    return result


def failing_at(nth: int) -> Any:
    """Makes the n-th operation of PyTorch in the block run out of memory; `operations` counts them."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Failing(TorchDispatchMode):
        operations = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.operations += 1
            if self.operations == nth:
                raise torch.OutOfMemoryError(f"CUDA out of memory. Made up, at operation {nth}")
            return function(*args, **(kwargs or {}))

    return Failing()


def gradients(module: Any) -> Any:
    """Returns all gradients of a module on this rank, as one tensor."""
    import torch

    grads = [getattr(it.grad, "_local_tensor", it.grad) for it in module.parameters() if it.grad is not None]
    return torch.cat([grad.flatten() for grad in grads]).clone()


def relative_error(got: Any, wanted: Any) -> float:
    return float((got - wanted).norm() / wanted.norm())
