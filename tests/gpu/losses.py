"""The same results with Cushion as with PyTorch's allocator: models trained with deterministic kernels.

    python tests/gpu/losses.py

Each training workload runs four times with PyTorch's own allocator and once with each policy of Cushion, in separate
processes. If PyTorch's runs end with the same loss, to the last digit shown, Cushion's have to end with that loss too.
Otherwise Cushion's must not be further from PyTorch's than those are from each other. Prints one JSON line.
"""

from __future__ import annotations

import json
import sys
import time

from groups import MODES, POLICIES, Job
from harness import require_gpu, say
from run import run_jobs

TRAINED = ("gpt2_train", "llama_varlen", "vision_multires")
NATIVE = [f"native {number}" for number in range(1, 5)]
CUSHION = {policy: f"cushion {policy}" for policy in POLICIES}
RUNS = {**dict.fromkeys(NATIVE, "native"), **CUSHION}
STEPS = 12


def jobs_of(workload: str) -> list[Job]:
    more = ("--steps", str(STEPS), "--deterministic", "--wait")
    return [Job(run, ("workloads.py", workload, *MODES[mode], *more), 240, waits=True) for run, mode in RUNS.items()]


def judge(workload: str, losses: dict[str, float]) -> list[str]:
    """Returns what is wrong with Cushion's losses."""
    native = [losses[run] for run in NATIVE]
    apart = max(native) - min(native)
    return [
        f"{workload}, {run}: the last loss is {losses[run]}, and PyTorch's are {', '.join(map(str, native))}"
        for run in CUSHION
        if not min(native) - apart <= losses[run] <= max(native) + apart
    ]


def main() -> int:
    began = time.monotonic()
    failures: list[str] = []
    found: dict[str, dict[str, float]] = {}
    for workload in TRAINED:
        losses: dict[str, float] = {}
        for run, outcome in zip(RUNS, run_jobs(jobs_of(workload)), strict=True):
            if outcome.status != "passed" or "loss" not in outcome.result:
                failures.append(f"{workload}, {run}: {outcome.why or 'no loss'}")
            else:
                losses[run] = outcome.result["loss"]
        say(f"{workload}: {losses}")
        if len(losses) == len(RUNS):
            failures += judge(workload, losses)
        found[workload] = losses
    line = {
        "program": "losses.py",
        "ok": not failures,
        "losses": found,
        "seconds": round(time.monotonic() - began, 1),
    }
    if failures:
        line["failures"] = failures
    print(json.dumps(line), flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    require_gpu()
    sys.exit(main())
