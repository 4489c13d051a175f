"""Little waste: `paged` on a real workload, and its own trace replayed without a GPU.

    python tests/gpu/replayed.py [--policy P] NAME [--steps N]

A workload of `workloads.py` runs with its history recorded. Its excess (peak reserved / peak live) has to be within the
bar for that workload, both by `torch.cuda.memory_stats()` and by `torch.cuda.mem_get_info()` without the memory that is
in use outside the allocator. Then the trace of this run is replayed on the simulated device: peak reserved and the
number of driver allocations have to agree."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from harness import GIB, MIB, Checks, child, main, parser, require_gpu, say, workload

# Peak reserved over peak live, at most.
BARS = {
    "gpt2_train": 1.008,
    "llama_varlen": 1.02,
    "vision_multires": 1.008,
    "stream_offload": 1.005,
    "generate": 1.025,
    "graphs_serving": 1.06,
}


def body(checks: Checks, given: argparse.Namespace) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        trace = str(Path(folder) / f"{given.name}.pickle.gz")
        # The peaks of its two streams coincide only in a longer run.
        steps = ("--steps", str(given.steps or (30 if given.name == "stream_offload" else 12)))
        real = workload(given.name, "cushion", "--policy", given.policy, *steps, "--trace", trace)
        say(f"{given.name}: {real}")
        command = [sys.executable, "-m", "cushion", "replay", "--policy", given.policy, "--json", trace]
        done = child(command)
        checks.equal(done.returncode, 0, f"replay: {done.stderr[-300:]}")
        replayed = json.loads(done.stdout.splitlines()[-1])
    excess = real["peak_reserved"] / real["peak_requested"]
    by_driver = (real["device_used"] - real["not_ours"]) / real["peak_requested"]
    if given.policy == "paged":
        checks.at_most(excess, BARS[given.name], "peak reserved over peak live")
        checks.at_most(by_driver, BARS[given.name], "what the driver says is in use, over peak live")
    apart = replayed["reserved_peak_bytes"] - real["peak_reserved"]
    # The replay does not know when each stream was done.
    allowed = 0 if given.name in ("gpt2_train", "llama_varlen", "vision_multires", "generate") else 64 * MIB
    checks.at_most(abs(apart), allowed, "bytes between the peak and its replay")
    if allowed == 0:
        checks.equal(replayed["driver"]["allocations"], real["driver"], "times the driver was asked")
    return {
        "told": f"excess {excess:.4f} ({real['peak_reserved'] / GIB:.2f} GiB reserved), {real['driver']} times asked "
        f"of the driver, {by_driver:.4f} by the driver's own count; "
        f"replayed {replayed['excess']:.4f} and {replayed['driver']['allocations']}"
    }


if __name__ == "__main__":
    require_gpu()
    options = parser(__doc__)
    options.add_argument("name", choices=BARS)
    options.add_argument("--steps", type=int)
    main(body, options, uses_gpu=False)
