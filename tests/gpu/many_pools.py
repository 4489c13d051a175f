"""Two thousand CUDA graphs at once, each with its own pool: every replay is right, and addresses do not run out.

    python tests/gpu/many_pools.py [--policy P] [--pools 2000]

Each graph has two tensors, of 2 MiB and of 4 KiB. All graphs are replayed in a random order before any result is read,
so that no two may share memory. Then all are dropped, their memory has to be free again, and the same is done once
more.

A process has 128 TiB of addresses. Pools that each reserve as many addresses as the device has memory would use them
up. The process may grow by at most four times the memory of the device plus a constant, and by almost nothing the
second time."""

from __future__ import annotations

import random
import time

from harness import GIB, KIB, MIB, Checks, main, parser, require_gpu, say, settle

require_gpu()

import torch  # noqa: E402

LARGE, SMALL = 2 * MIB // 4, 4 * KIB // 4
DEVICES = 4
# With `expandable`, this much more is reserved before ranges become smaller than PyTorch's.
CONSTANT = {"expandable": 1088 * GIB}
CONSTANT_OTHERWISE = 64 * GIB
ONCE_MORE = 16 * GIB
ROUNDS = 2
REPLAYS = 2


class Captured:
    """A graph with its own pool, and its outputs."""

    def __init__(self, number: int, x: torch.Tensor, stream: torch.cuda.Stream) -> None:
        self.number = number
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            # `torch.cuda.graph` would wait for the device, and empty the cache, each time.
            self.graph.capture_begin(pool=None, capture_error_mode="thread_local")
            try:
                self.small, self.large = compute(number, x)
            finally:
                self.graph.capture_end()

    def found(self) -> torch.Tensor:
        """Returns the minimum and the maximum of both tensors."""
        return torch.stack([*torch.aminmax(self.small), *torch.aminmax(self.large)])

    def wanted(self, value: int) -> list[int]:
        small = 3 * value + self.number
        return [small, small, small + self.number, small + self.number]


def compute(number: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    small = x * 3 + number
    return small, small[:1].expand(LARGE) + number


def address_space() -> int:
    """Returns the bytes of addresses that the process has reserved, with or without memory."""
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith("VmSize:"):
                return int(line.split()[1]) * KIB
    raise RuntimeError("/proc/self/status says nothing of VmSize")


def private_pools() -> tuple[int, int]:
    """Returns the number of pools of graphs, and the bytes they have reserved."""
    segments = [it for it in torch.cuda.memory_snapshot() if tuple(it["segment_pool_id"]) != (0, 0)]
    return len({tuple(it["segment_pool_id"]) for it in segments}), sum(it["total_size"] for it in segments)


def replay(checks: Checks, captured: list[Captured], x: torch.Tensor, rng: random.Random) -> None:
    for _ in range(REPLAYS):
        value = rng.randrange(1, 1_000_000)
        x.fill_(value)
        for it in rng.sample(captured, len(captured)):
            it.graph.replay()
        found = torch.stack([it.found() for it in captured]).tolist()
        wrong = [
            f"graph {it.number} wrote {got}, not {it.wanted(value)}"
            for it, got in zip(captured, found)
            if got != it.wanted(value)
        ]
        checks.equal(wrong[:3], [], f"what {len(wrong)} replays have wrong, the first of it,")


def once(checks: Checks, pools: int, x: torch.Tensor, stream: torch.cuda.Stream, rng: random.Random) -> dict:
    """Creates, replays and drops the graphs. Returns what that took."""
    before = {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
    began = time.monotonic()
    captured = [Captured(number, x, stream) for number in range(pools)]
    made = time.monotonic()
    replay(checks, captured, x, rng)
    replayed = time.monotonic()
    peak = address_space()
    count, held = private_pools()
    checks.equal(count, pools, "pools of graphs with memory")
    checks.that(held >= pools * (2 * MIB + 4 * KIB), f"the graphs hold {held} bytes, less than they write")
    counting = time.monotonic()
    captured.clear()
    settle()
    dropped = time.monotonic()
    checks.equal(private_pools(), (0, 0), "pools of graphs, and their memory, once all are dropped")
    for figure, now in (("allocated", torch.cuda.memory_allocated()), ("reserved", torch.cuda.memory_reserved())):
        checks.equal(now, before[figure], f"memory {figure} once all graphs are dropped")
    return {
        "address_space": peak,
        "address_space_dropped": address_space(),
        "pool_bytes": held,
        "capture_s": round(made - began, 1),
        "replay_s": round(replayed - made, 1),
        "drop_s": round(dropped - counting, 1),
    }


def body(checks: Checks, given) -> dict:
    rng = random.Random(1)
    stream = torch.cuda.Stream()
    x = torch.zeros(SMALL, dtype=torch.int32, device="cuda")
    # Loads kernels before a capture, and makes PyTorch allocate what it keeps after the first capture.
    compute(1, x)
    replay(checks, [Captured(0, x, stream)], x, rng)
    settle()
    began = address_space()
    rounds = []
    for _ in range(ROUNDS):
        rounds.append(once(checks, given.pools, x, stream, rng))
        say(f"{rounds[-1]}")
    device = torch.cuda.mem_get_info()[1]
    grown = [it["address_space"] - began for it in rounds]
    most = DEVICES * device + CONSTANT.get(given.policy, CONSTANT_OTHERWISE)
    checks.at_most(grown[0], most, f"bytes of addresses for {given.pools} pools")
    checks.at_most(grown[1] - grown[0], ONCE_MORE, "bytes of addresses that the second time took more")
    first = rounds[0]
    return {
        "pools": given.pools,
        "address_growth": grown,
        "rounds": rounds,
        "told": f"{given.pools:,} pools: {first['pool_bytes'] / GIB:.1f} GiB held, addresses {grown[0] / GIB:+.0f} and "
        f"{grown[1] / GIB:+.0f} GiB; {first['capture_s']} s to capture, {first['replay_s']} s for {REPLAYS} replays of "
        f"each, {first['drop_s']} s to drop",
    }


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--pools", type=int, default=2000)
    main(body, options)
