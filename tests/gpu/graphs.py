"""Replays nine CUDA graphs in one pool, together with eager work on two streams, and compares every result.

    python tests/gpu/graphs.py [--policy P] [--replays 1000]

The output of each replay is compared with the eager result of the same input. At the same time, tensors of random sizes
live for a while on the default stream and on a side stream. Each is filled with its own number, which is checked before
it is freed. At the end the graphs are dropped, and their memory has to be free again.
"""

from __future__ import annotations

import collections
import random

from harness import MIB, Checks, main, parser, require_gpu, say, settle

require_gpu()

import torch  # noqa: E402

BATCHES = (256, 128, 64, 32, 16, 8, 4, 2, 1)
WIDTH = 1024
CANARIES = 8
CAPTURES_DROPPED = 20
# Graphs and eager code run the same kernels on the same input: a larger difference is not rounding.
TOLERANCE = 1e-4


class Block(torch.nn.Module):
    """A residual block, so that the output depends on the whole input, also in a deep model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.SiLU(), torch.nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


class Captured:
    """A graph, and the tensors it reads and writes."""

    def __init__(self, model: torch.nn.Module, batch: int, pool) -> None:
        self.x = torch.zeros(batch * 16, WIDTH, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model(self.x)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.y = model(self.x)


class Canaries:
    """Tensors that are each filled with their own number: memory that is handed out twice would change them."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.side = torch.cuda.Stream()
        self.alive: collections.deque = collections.deque()
        self.changed = torch.zeros((), dtype=torch.int64, device="cuda")

    def add(self, number: int) -> None:
        length = int(2 ** self.rng.uniform(8, 23))
        on_side = self.rng.random() < 0.5
        stream = self.side if on_side else torch.cuda.current_stream()
        with torch.cuda.stream(stream):
            tensor = torch.full((length,), number, dtype=torch.int32, device="cuda")
        self.alive.append((tensor, number, on_side))
        while len(self.alive) > CANARIES:
            self.drop()

    def drop(self) -> None:
        """Drops the oldest tensor. Returns how many of its elements have changed. A tensor of the side stream is read
        on the default stream."""
        tensor, number, on_side = self.alive.popleft()
        if on_side:
            torch.cuda.current_stream().wait_stream(self.side)
        self.changed += (tensor != number).sum()
        if on_side:
            tensor.record_stream(torch.cuda.current_stream())


def private_bytes() -> int:
    """Returns the bytes that the pools of graphs have reserved."""
    return sum(
        segment["total_size"] for segment in torch.cuda.memory_snapshot() if tuple(segment["segment_pool_id"]) != (0, 0)
    )


def drop_workspaces() -> None:
    """Frees the workspaces that cuBLAS keeps for each stream, also for the stream of captures."""
    torch._C._cuda_clearCublasWorkspaces()
    settle()


def replay(checks: Checks, model: torch.nn.Module, captured: list[Captured], replays: int) -> dict:
    rng = random.Random(2)
    canaries = Canaries(rng)
    exact = torch.zeros((), dtype=torch.int64, device="cuda")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(replays):
        chosen = rng.choice(captured)
        chosen.x.copy_(torch.randn_like(chosen.x))
        canaries.add(2 * i)
        chosen.graph.replay()
        canaries.add(2 * i + 1)
        eager = model(chosen.x)
        exact += (chosen.y == eager).all()
        wrong += ~torch.isclose(chosen.y, eager, rtol=TOLERANCE, atol=TOLERANCE).all()
    while canaries.alive:
        canaries.drop()
    checks.equal(wrong.item(), 0, "the number of replays with a wrong output")
    checks.equal(canaries.changed.item(), 0, "the number of values changed in eager tensors")
    return {"replays": replays, "wrong": wrong.item(), "exact": exact.item()}


@torch.inference_mode()
def body(checks: Checks, arguments) -> dict:
    torch.manual_seed(1)
    model = torch.nn.Sequential(*[Block() for _ in range(8)]).cuda()
    # PyTorch keeps a few small tensors after the first capture.
    Captured(model, 1, None)
    drop_workspaces()
    allocated = torch.cuda.memory_allocated()
    checks.equal(private_bytes(), 0, "memory of private pools before any capture")

    pool = torch.cuda.graph_pool_handle()
    captured = [Captured(model, batch, pool) for batch in BATCHES]
    in_pool = private_bytes()
    say(f"{len(captured)} graphs, {in_pool / MIB:.0f} MiB in their pool")
    checks.that(in_pool > 0, "the graphs have no memory of their own")
    figures = replay(checks, model, captured, arguments.replays)

    drop_workspaces()
    reserved = torch.cuda.memory_reserved()
    captured.clear()
    drop_workspaces()
    fell = reserved - torch.cuda.memory_reserved()
    checks.equal(private_bytes(), 0, "memory of private pools once the graphs are dropped")
    checks.that(fell > 0, "dropping the graphs gave nothing back")
    checks.equal(torch.cuda.memory_allocated(), allocated, "memory allocated once the graphs are dropped")

    reserved = torch.cuda.memory_reserved()
    for _ in range(CAPTURES_DROPPED):
        Captured(model, 32, None)
    drop_workspaces()
    now = torch.cuda.memory_reserved()
    checks.equal(now, reserved, f"memory reserved after {CAPTURES_DROPPED} captures dropped")
    return {**figures, "graphs": len(BATCHES), "pool_bytes": in_pool, "given_back": fell}


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--replays", type=int, default=1000)
    main(body, options)
