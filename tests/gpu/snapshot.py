"""Records a training loop with `_record_memory_history`, and replays the dump: every address has to agree.

    python tests/gpu/snapshot.py [--policy P] [--keep FOLDER]

The loop has batches of many sizes, a side stream with `record_stream`, and CUDA graphs with private pools. It is
recorded twice: from before the first allocation, and then again from the middle. `cushion replay FILE --verify` has to
put every allocation of both at its recorded address. A trace of `paged` is only replayed, because it does not record
which addresses are stitches. The stacks have to name this file, and PyTorch's own tools have to read the snapshot."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile

from harness import MIB, Checks, main, parser, require_gpu, say, settle, short

require_gpu()

import torch  # noqa: E402
import torch.cuda._memory_viz as viz  # noqa: E402

STEPS = 12
EVENTS = 1_000_000
# A size that occurs only once, to identify its event.
MARKED_BYTES = 3 * MIB + 12_345


class Loop:
    """A small training run that uses most functions of the allocator."""

    def __init__(self) -> None:
        self.rng = random.Random(3)
        self.model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512)).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.copies = torch.cuda.Stream()
        self.graphs: list = []
        self.kept: list[torch.Tensor] = []

    def fetch(self, batch: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Copies a batch to the GPU on the side stream."""
        host = torch.randn(batch, 512).pin_memory()
        with torch.cuda.stream(self.copies):
            x = host.to("cuda", non_blocking=True)
            return x, self.copies.record_event()

    def step(self) -> None:
        x, here = self.fetch(self.rng.randrange(16, 8192))
        torch.cuda.current_stream().wait_event(here)
        loss = (self.model(x) - x).square().mean()
        loss.backward()
        x.record_stream(torch.cuda.current_stream())
        del x
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.kept.append(torch.empty(int(2 ** self.rng.uniform(6, 25)), dtype=torch.uint8, device="cuda"))
        if len(self.kept) > 4:
            self.kept.pop(self.rng.randrange(len(self.kept)))

    def capture(self) -> None:
        """Captures a graph with a private pool."""
        with torch.no_grad():
            x = torch.zeros(256, 512, device="cuda")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = self.model(x)
        graph.replay()
        self.graphs.append((graph, x, y))

    def run(self) -> None:
        for i in range(STEPS):
            self.step()
            if i == STEPS // 2:
                self.capture()
        torch.cuda.synchronize()


def marked() -> torch.Tensor:
    return torch.empty(MARKED_BYTES, dtype=torch.uint8, device="cuda")


def start_recording() -> None:
    torch.cuda.memory._record_memory_history(max_entries=EVENTS, stacks="python", clear_history=True)


def stop_recording() -> None:
    torch.cuda.memory._record_memory_history(enabled=None)


def check_stacks(checks: Checks, snapshot: dict) -> None:
    """Checks that the marked allocation occurs once as an event and once as a block, with its Python stack."""
    events = [
        event for event in snapshot["device_traces"][0] if event["action"] == "alloc" and event["size"] == MARKED_BYTES
    ]
    blocks = [
        block
        for segment in snapshot["segments"]
        for block in segment["blocks"]
        if block["requested_size"] == MARKED_BYTES and block["state"] == "active_allocated"
    ]
    for what, found in (("events", events), ("blocks", blocks)):
        if checks.equal(len(found), 1, f"the number of marked {what}"):
            frames = found[0].get("frames", [])
            named = [(os.path.basename(frame["filename"]), frame["name"]) for frame in frames]
            here = (os.path.basename(__file__), marked.__name__)
            checks.that(here in named, f"the stack of the marked {what} is {named[:8]}")


def check_tools(checks: Checks, snapshot: dict) -> None:
    """Checks that PyTorch's own tools read the snapshot."""
    plain = str  # instead of the plot, for which PyTorch would download a script
    tools = {
        "trace_plot": lambda: viz.trace_plot(snapshot),
        "trace_plot, segments": lambda: viz.trace_plot(snapshot, plot_segments=True),
        "segment_plot": lambda: viz.segment_plot(snapshot),
        "memory": lambda: viz.memory(snapshot, format_flamegraph=plain),
        "segments": lambda: viz.segments(snapshot, format_flamegraph=plain),
        "segsum": lambda: viz.segsum(snapshot),
        "trace": lambda: viz.trace(snapshot),
    }
    for name, tool in tools.items():
        try:
            checks.that(len(tool()) > 100, f"_memory_viz's {name} says next to nothing")
        except Exception as error:
            checks.that(False, f"_memory_viz's {name} raises {type(error).__name__}: {short(error)}")


def replay(checks: Checks, path: str, *more: str) -> list[dict]:
    """Returns the result of `cushion replay` for a file, a row for each policy."""
    command = [sys.executable, "-m", "cushion", "replay", path, "--json", *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    say(done.stderr.strip())
    checks.equal(done.returncode, 0, f"the exit code of replaying {os.path.basename(path)} ({short(done.stderr)})")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def verify(checks: Checks, path: str) -> dict:
    """Returns the result of `cushion replay --verify` for a file."""
    name = os.path.basename(path)
    rows = replay(checks, path, "--verify")
    compared = [row for row in rows if row["same_address"] is not None]
    if not checks.equal(len(compared), 1, f"the number of policies compared for {name}"):
        return {}
    row = compared[0]
    checks.that(row["allocs"] > 0, f"{name} has no allocation")
    checks.equal(row["same_address"], row["allocs"], f"allocations at the recorded address, {name},")
    return {key: row[key] for key in ("policy", "events", "allocs", "same_address", "reserved_peak_bytes")}


def dump(checks: Checks, folder: str, part: str, policy: str) -> dict:
    path = os.path.join(folder, f"{part}.{policy}.pickle")
    torch.cuda.memory._dump_snapshot(path)
    if policy != "paged":
        return verify(checks, path)
    rows = replay(checks, path, "--policy", "paged")
    if checks.equal(len(rows), 1, f"the number of policies replayed for {part}"):
        checks.that(rows[0]["allocs"] > 0, f"{part} has no allocation")
        checks.equal(rows[0]["oom"], None, f"what was refused from the {part}")
    return {}


def body(checks: Checks, arguments) -> dict:
    torch.manual_seed(1)
    start_recording()
    loop = Loop()
    loop.run()
    # A pool that is created and dropped while recording.
    loop.graphs.clear()
    settle()
    loop.run()
    kept = marked()
    snapshot = torch.cuda.memory._snapshot()
    check_stacks(checks, snapshot)
    check_tools(checks, snapshot)
    figures = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or temporary
        os.makedirs(folder, exist_ok=True)
        figures["beginning"] = dump(checks, folder, "beginning", arguments.policy)
        peak = torch.cuda.memory_stats()["reserved_bytes.all.peak"]
        if arguments.policy != "paged":
            replayed = figures["beginning"].get("reserved_peak_bytes")
            checks.equal(replayed, peak, "peak reserved of the replay, against memory_stats,")
        stop_recording()
        loop.run()
        start_recording()
        loop.run()
        del kept
        figures["middle"] = dump(checks, folder, "middle", arguments.policy)
        stop_recording()
    if arguments.policy == "paged":
        return {}
    if arguments.policy != "native":
        for name, found in figures.items():
            checks.equal(found.get("policy"), arguments.policy, f"the policy recorded, {name},")
    return figures


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--keep", metavar="FOLDER", help="where to leave the two snapshots")
    main(body, options)
