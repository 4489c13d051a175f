"""One thread creates, replays and drops CUDA graphs, while another runs out of memory again and again.

    python tests/gpu/graphs_under_shortage.py [--policy P] [--seconds 180] [--gib 8] [--seed 1]

The first thread captures graphs, each in its own pool or several in one, and replays them on streams other than that of
the capture. It drops most of them while their replays are still running, and reads the results afterwards. The second
thread allocates tensors up to the limit of the process until it is refused. A shortage releases all cached memory, also
that of dropped graphs: it must not release memory that a replay still uses. The contents of every graph and every
tensor are known to the bit.

A capture releases no memory, so it may be refused while memory is full: that is counted, and the capture is tried
again. After three refusals in a row the other thread frees all its memory and waits: then the capture has to fit. At
the end nothing may be allocated."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from harness import GIB, MIB, Checks, consistent, main, parser, require_gpu, say, settle, short

require_gpu()

import torch  # noqa: E402

# How many sets of one to four graphs the thread of graphs keeps alive.
SETS_ALIVE = 3
# After this many refusals in a row the other thread frees all its memory.
PATIENCE = 3
# After a refusal the second thread keeps at most the limit divided by this.
KEPT_SHARE = 3
# Seconds of warm-up. The memory held after it is compared with that at the end.
WARM_UP = 10.0
# Threads that run this many seconds after the request to stop count as hanging.
STUCK = 60.0
# The driver changes the device's free memory a little.
CARD_TOLERANCE = 64 * MIB
# How long a request waits for memory of the other thread: short, so that refusals come quickly.
WAIT_MS = 20

WORD = 1 << 32


@dataclass
class Counts:
    """Counts of one thread."""

    graphs: int = 0
    shared: int = 0
    replays: int = 0
    dropped_at_work: int = 0
    refused: int = 0
    waited_for: int = 0
    rounds: int = 0
    emptied: int = 0
    verified: int = 0
    given_up: int = 0
    wrong: list[str] = field(default_factory=list)

    def verify(self, right: bool, wrong: str) -> None:
        self.verified += 1
        if not right and len(self.wrong) < 20:
            self.wrong.append(wrong)
            say(f"WRONG: {wrong}")


def set_limit(size: int) -> None:
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(size / total)


class Plan:
    """The computation of a graph: tensors of many sizes, one after the other, with two alive at a time."""

    def __init__(self, rng: random.Random) -> None:
        self.lengths = [int(2 ** rng.uniform(1, 7.6) * MIB) // 4 for _ in range(rng.randint(3, 6))]
        self.factors = [rng.randrange(1, 1 << 16) | 1 for _ in self.lengths]
        self.passes = rng.randint(2, 6)
        # From 0.3 to 1.5 ms each at 2 GHz.
        self.cycles = [rng.randint(600_000, 3_000_000) for _ in self.lengths]
        self.out = int(rng.uniform(2, 8) * MIB) // 4

    def compute(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the sum of each tensor, and a tensor filled with seven times the input. A wrong element changes a
        sum."""
        sums: list[torch.Tensor] = []
        before = None
        for number, length in enumerate(self.lengths):
            tensor = torch.arange(length, dtype=torch.int32, device="cuda")
            for _ in range(self.passes):
                tensor.mul_(self.factors[number]).add_(x[number])
            torch.cuda._sleep(self.cycles[number])
            if before is not None:
                sums.append(before.sum(dtype=torch.int32))
            before = tensor
        assert before is not None
        sums.append(before.sum(dtype=torch.int32))
        return torch.stack(sums), x[:1].expand(self.out).mul(7)

    def expected(self, value: int) -> list[int]:
        """Returns the expected sums for an input filled with `value`, with the overflow of integers on the GPU."""
        sums = []
        for length, factor in zip(self.lengths, self.factors):
            slope, offset = 1, 0
            for _ in range(self.passes):
                slope, offset = slope * factor, offset * factor + value
            sums.append((slope * (length * (length - 1) // 2) + offset * length) % WORD)
        return sums


@dataclass
class Result:
    """The output of a replay, copied after it on its stream, to be read later."""

    sums: torch.Tensor
    out: torch.Tensor
    plan: Plan
    value: int
    stream: torch.cuda.Stream

    def read(self, counts: Counts) -> None:
        # A copy to the host, on the stream of the replay: it needs no device memory, and waits only for that stream.
        with torch.cuda.stream(self.stream):
            sums = [number % WORD for number in self.sums.tolist()]
            least, most = (int(number) for number in torch.aminmax(self.out.cpu()))
        wanted = self.plan.expected(self.value)
        counts.verify(sums == wanted, f"the sums of a replay are {sums}, not {wanted}")
        right = least == most == 7 * self.value
        counts.verify(right, f"a replay wrote {least} to {most}, not {7 * self.value}")


class Captured:
    """A graph, its inputs and its outputs. Eager tensors are used only on the stream of its replays."""

    def __init__(self, rng: random.Random, streams: Streams, replayed_on: torch.cuda.Stream, pool) -> None:
        self.plan = Plan(rng)
        self.stream = replayed_on
        if rng.random() < 0.3:
            # A tensor of another stream needs record_stream.
            with torch.cuda.stream(streams.other):
                self.x = torch.zeros(len(self.plan.lengths), dtype=torch.int32, device="cuda")
            replayed_on.wait_stream(streams.other)
            self.x.record_stream(replayed_on)
        else:
            with torch.cuda.stream(replayed_on):
                self.x = torch.zeros(len(self.plan.lengths), dtype=torch.int32, device="cuda")
        self.graph = torch.cuda.CUDAGraph()
        if rng.random() < 0.5:
            # Waits for all work, and empties the cache.
            with torch.cuda.graph(self.graph, pool=pool, stream=streams.capture, capture_error_mode="thread_local"):
                self.sums, self.out = self.plan.compute(self.x)
        else:
            # Does not wait: dropped graphs may still be running.
            if rng.random() < 0.8:
                torch.cuda.empty_cache()
            with torch.cuda.stream(streams.capture):
                self.graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    self.sums, self.out = self.plan.compute(self.x)
                finally:
                    self.graph.capture_end()

    def replay(self, value: int) -> Result:
        with torch.cuda.stream(self.stream):
            # The allocations come first: they may be refused.
            sums, out = torch.empty_like(self.sums), torch.empty_like(self.out)
            self.x.fill_(value)
            self.graph.replay()
            sums.copy_(self.sums)
            out.copy_(self.out)
        return Result(sums, out, self.plan, value, self.stream)


class Streams:
    """The streams of the thread of graphs."""

    def __init__(self) -> None:
        self.capture = torch.cuda.Stream()
        self.other = torch.cuda.Stream()
        self.replay = [torch.cuda.Stream() for _ in range(2)]


class Storm:
    """The two threads, and their communication."""

    def __init__(self, policy: str, limit: int, seed: int) -> None:
        self.policy = policy
        self.limit = limit
        self.rng = random.Random(seed)
        self.graphs, self.hog = Counts(), Counts()
        self.stop = threading.Event()
        # The thread of graphs wants all memory; the other has freed its memory, and waits.
        self.wanted, self.has_let_go = threading.Event(), threading.Event()
        self.errors: list[str] = []

    def run(self, checks: Checks, seconds: float) -> None:
        for event in (self.stop, self.wanted, self.has_let_go):
            event.clear()
        running = [
            threading.Thread(target=self.guarded, args=(work, random.Random(self.rng.random())), daemon=True)
            for work in (self.make_graphs, self.fill_memory)
        ]
        for thread in running:
            thread.start()
        self.stop.wait(seconds)
        self.stop.set()
        for thread in running:
            thread.join(STUCK)
        stuck = [thread for thread in running if thread.is_alive()]
        if stuck:
            raise RuntimeError(f"{len(stuck)} of {len(running)} threads are stuck")
        checks.equal(self.errors, [], "what was raised in threads")
        for counts in (self.graphs, self.hog):
            checks.equal(counts.wrong, [], "what was found wrong")

    def guarded(self, work: Callable[[random.Random], None], rng: random.Random) -> None:
        try:
            work(rng)
        except Exception as error:
            self.errors.append(f"{work.__name__}: {type(error).__name__}: {short(error)}")
            say(self.errors[-1])
        finally:
            # An error in one thread ends the other.
            self.stop.set()

    # Graphs

    def make_graphs(self, rng: random.Random) -> None:
        counts, streams = self.graphs, Streams()
        alive: list[list[Captured]] = []
        unread: list[list[Result]] = []
        in_a_row = 0
        while not self.stop.is_set():
            results: list[Result] = []
            unread.append(results)
            shared = rng.random() < 0.4
            try:
                if in_a_row < PATIENCE:
                    made = self.capture(rng, streams, shared)
                else:
                    while alive:
                        self.drop(rng, alive)
                    made = self.capture_alone(rng, streams, shared)
                in_a_row = 0
                alive.append(made)
                self.replay(rng, made, results)
                if shared and made:
                    self.change_one(rng, streams, made, results)
                del made
            except torch.OutOfMemoryError:
                counts.refused += 1
                if in_a_row >= PATIENCE:
                    raise
                in_a_row += 1
                time.sleep(rng.uniform(0, 0.02))
            if alive and rng.random() < 0.5:
                self.replay_if_possible(rng, rng.choice(alive), results)
            while len(alive) > rng.randint(0, SETS_ALIVE):
                self.drop(rng, alive)
            # Results are read one to three iterations later.
            while len(unread) > rng.randint(1, 3):
                for result in unread.pop(0):
                    result.read(counts)
        while alive:
            self.drop(rng, alive)
        for results in unread:
            for result in results:
                result.read(counts)

    def capture(self, rng: random.Random, streams: Streams, shared: bool) -> list[Captured]:
        """Captures one graph in its own pool, or three in one pool. Those are replayed on one stream, so that they do
        not overlap."""
        replayed_on = rng.choice(streams.replay)
        pool = torch.cuda.graph_pool_handle() if shared else None
        made = [Captured(rng, streams, replayed_on, pool) for _ in range(3 if shared else 1)]
        self.graphs.graphs += len(made)
        self.graphs.shared += shared
        return made

    def capture_alone(self, rng: random.Random, streams: Streams, shared: bool) -> list[Captured]:
        """Captures with all memory free, except for a few results: no request may be refused."""
        self.graphs.waited_for += 1
        self.wanted.set()
        while not self.has_let_go.wait(0.1):
            if self.stop.is_set():
                return []
        try:
            torch.cuda.empty_cache()
            return self.capture(rng, streams, shared)
        finally:
            self.wanted.clear()
            # The other thread has noticed.
            while self.has_let_go.is_set() and not self.stop.is_set():
                time.sleep(0.001)

    def let_go(self, held: list) -> None:
        """Frees all memory for the other thread, and waits until it is done."""
        held.clear()
        self.has_let_go.set()
        while self.wanted.is_set() and not self.stop.is_set():
            time.sleep(0.001)
        self.has_let_go.clear()

    def replay(self, rng: random.Random, made: list[Captured], results: list[Result]) -> None:
        for _ in range(rng.randint(1, 3)):
            for captured in made:
                results.append(captured.replay(rng.randrange(1, 1000)))
                self.graphs.replays += 1

    def replay_if_possible(self, rng: random.Random, made: list[Captured], results: list[Result]) -> None:
        try:
            self.replay(rng, made, results)
        except torch.OutOfMemoryError:
            self.graphs.refused += 1

    def change_one(self, rng: random.Random, streams: Streams, made: list[Captured], results: list[Result]) -> None:
        """Drops a graph whose pool is in use, and captures another into that pool, for the same stream."""
        pool, replayed_on = made[0].graph.pool(), made[0].stream
        made.pop(rng.randrange(len(made)))
        made.append(Captured(rng, streams, replayed_on, pool))
        self.graphs.graphs += 1
        self.replay(rng, made, results)

    def drop(self, rng: random.Random, alive: list[list[Captured]]) -> None:
        """Drops graphs, mostly while replays are running."""
        made = alive.pop(rng.randrange(len(alive)))
        if not made:
            return
        if rng.random() < 0.2:
            made[0].stream.synchronize()
        self.graphs.dropped_at_work += not made[0].stream.query()
        made.clear()
        # Gives the other thread time while the replays are running.
        time.sleep(rng.choice((0.0, 0.002, 0.01)))

    # Shortages

    def fill_memory(self, rng: random.Random) -> None:
        counts = self.hog
        streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
        held: list[tuple[torch.Tensor, int, torch.cuda.Stream]] = []
        number = 0
        while not self.stop.is_set():
            refused = False
            while not refused and not self.stop.is_set():
                number = (number + 1) % (1 << 30)
                refused = not self.take(held, int(2 ** rng.uniform(2, 9)) * MIB, number, rng.choice(streams))
            # All remaining memory in one request: it fits only if all cached memory is released.
            rest = (self.limit - torch.cuda.memory_allocated()) // MIB - 8
            fits = rest > 0 and self.take(held, rest * MIB, -number, rng.choice(streams))
            if fits and self.look(held, len(held) - 1):
                held.pop()
            index = 0
            while index < len(held):
                index += self.look(held, index)
            kept = self.limit // KEPT_SHARE
            while held and (sum(tensor.nbytes for tensor, _, _ in held) > kept or rng.random() < 0.2):
                held.pop(rng.randrange(len(held)))
            if rng.random() < 0.1:
                torch.cuda.empty_cache()
                counts.emptied += 1
            counts.rounds += 1
            if counts.rounds % 20 == 0:
                self.recount()
            if self.wanted.is_set():
                self.let_go(held)
            # The other thread has room now.
            time.sleep(rng.choice((0.001, 0.005, 0.03)))

    def take(self, held: list, size: int, number: int, stream: torch.cuda.Stream) -> bool:
        try:
            with torch.cuda.stream(stream):
                tensor = torch.full((size // 4,), number, dtype=torch.int32, device="cuda")
        except torch.OutOfMemoryError:
            self.hog.refused += 1
            return False
        held.append((tensor, number, stream))
        return True

    def look(self, held: list, index: int) -> bool:
        """Checks a tensor, and returns whether that was possible: it needs a little memory. If there is none, the last
        tensor is freed."""
        tensor, number, stream = held[index]
        try:
            with torch.cuda.stream(stream):
                least, most = torch.stack(torch.aminmax(tensor)).tolist()
        except torch.OutOfMemoryError:
            self.hog.refused += 1
            self.hog.given_up += 1
            held.pop()
            return False
        self.hog.verify(least == most == number, f"a tensor of {number} has numbers from {least} to {most}")
        return True

    def recount(self) -> None:
        checks = Checks()
        consistent(checks, self.policy)
        if checks.failures:
            raise RuntimeError("; ".join(checks.failures))


def warm_kernels() -> None:
    """Loads every kernel before a capture: loading one may need calls that a capture forbids."""
    rng = random.Random(0)
    counts, streams = Counts(), Streams()
    plan = Plan(rng)
    sums, out = plan.compute(torch.full((len(plan.lengths),), 3, dtype=torch.int32, device="cuda"))
    Result(sums.clone(), out.clone(), plan, 3, torch.cuda.current_stream()).read(counts)
    torch.stack(torch.aminmax(out)).tolist()
    captured = Captured(rng, streams, streams.replay[0], None)
    captured.replay(5).read(counts)
    if counts.wrong:
        raise RuntimeError(f"wrong before anything was short: {counts.wrong}")


def look() -> dict[str, int]:
    """Returns the memory held, after all cached memory is released."""
    settle()
    segments = torch.cuda.memory_snapshot()
    return {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "private": sum(it["total_size"] for it in segments if tuple(it["segment_pool_id"]) != (0, 0)),
        "card_free": torch.cuda.mem_get_info()[0],
        "ooms": torch.cuda.memory_stats()["num_ooms"],
    }


def body(checks: Checks, given) -> dict:
    set_limit(given.gib * GIB)
    warm_kernels()
    before = look()
    storm = Storm(given.policy, given.gib * GIB, given.seed)
    storm.run(checks, min(WARM_UP, given.seconds))
    early = look()
    say(f"warm: {early}, {storm.graphs}, {storm.hog}")
    if not checks.failures:
        storm.run(checks, given.seconds)
    late = look()
    graphs, hog = storm.graphs, storm.hog
    say(f"done: {late}, {graphs}, {hog}")

    for figure in ("allocated", "reserved"):
        checks.equal(early[figure], before[figure], f"memory {figure} after the warm-up")
        checks.equal(late[figure], before[figure], f"memory {figure} at the end")
    checks.equal(late["private"], 0, "memory of graphs that are gone")
    checks.at_most(early["card_free"] - late["card_free"], CARD_TOLERANCE, "what the card lost")
    checks.equal(late["ooms"] - before["ooms"], graphs.refused + hog.refused, "num_ooms, against the errors caught,")
    # Far less than usual. A run with fewer has tested nothing.
    least = max(1, int(given.seconds / 2))
    for what, count in (
        ("graphs", graphs.graphs),
        ("graphs dropped at work", graphs.dropped_at_work),
        ("refusals", hog.refused),
        ("results looked at", graphs.verified),
        ("tensors looked at", hog.verified),
    ):
        checks.that(count >= least, f"only {count} {what} in {given.seconds} s")
    return {
        "graphs_made": graphs.graphs,
        "sets_in_one_pool": graphs.shared,
        "graph_replays": graphs.replays,
        "dropped_at_work": graphs.dropped_at_work,
        "captures_refused": graphs.refused,
        "others_kept_waiting": graphs.waited_for,
        "rounds": hog.rounds,
        "refusals": hog.refused,
        "caches_emptied": hog.emptied,
        "verified": graphs.verified + hog.verified,
        "not_verified": hog.given_up,
        "card_lost": early["card_free"] - late["card_free"],
        "told": f"{graphs.replays:,} replays of {graphs.graphs:,} graphs, {graphs.dropped_at_work:,} times dropped at "
        f"work, beside {hog.refused:,} refusals; {graphs.verified + hog.verified:,} results and tensors right",
    }


if __name__ == "__main__":
    os.environ.setdefault("CUSHION_WAIT_MS", str(WAIT_MS))
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, default=180)
    options.add_argument("--gib", type=int, default=8)
    options.add_argument("--seed", type=int, default=1)
    main(body, options)
