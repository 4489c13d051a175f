"""A real training run in less memory than PyTorch's allocator needs.

    python tests/gpu/capped.py [--cap-gib 24] [--steps 30] [--receipts FILE]

Runs `llama_varlen` of `workloads.py` (a 1.1B Llama, batches of many lengths) with a memory fraction of `--cap-gib` GiB.
With PyTorch's allocator it has to run out of memory. With Cushion it has to finish, with a receipt for every shortage;
with `paged` there may be none. The receipts of the run with `expandable` are written to FILE.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

from harness import Checks, main, parser, require_gpu, say, workload

# The arguments and the environment of each run.
RUNS = {
    "PyTorch": (("native",), {}),
    "PyTorch, expandable": (("expandable",), {}),
    "Cushion, expandable": (("cushion", "--policy", "expandable"), {}),
    "Cushion, paged": (("cushion", "--policy", "paged"), {}),
    "Cushion, segments with host memory": (("cushion", "--policy", "segments"), {"CUSHION_SPILL_LIMIT_MB": "16384"}),
}


def run(name: str, given: argparse.Namespace, receipts: Path) -> dict:
    mode, more = RUNS[name]
    arguments = ("--steps", str(given.steps), "--cap-gib", str(given.cap_gib))
    found = workload("llama_varlen", *mode, *arguments, CUSHION_RECEIPTS=str(receipts), **more)
    say(f"{name}: {found['steps']} steps, out of memory: {found['oom'] is not None}")
    return found


def read(receipts: Path) -> list[dict]:
    return [json.loads(line) for line in receipts.read_text().splitlines()] if receipts.exists() else []


def body(checks: Checks, given: argparse.Namespace) -> dict:
    told = []
    with tempfile.TemporaryDirectory() as folder:
        for name in RUNS:
            path = Path(folder, f"{len(told)}.jsonl")
            found = run(name, given, path)
            shortages = read(path)
            survived = [it for it in shortages if isinstance(it["outcome"], dict)]
            if name == "PyTorch":
                checks.that(found["oom"] is not None, f"{name} did not run out of memory: the cap is too large")
            if name.startswith("Cushion"):
                checks.equal(found["oom"], None, f"out of memory under {name}")
                checks.equal(found["steps"], given.steps, f"steps under {name}")
                if name != "Cushion, paged":
                    checks.that(bool(survived), f"{name} has no receipt: the cap is too large")
                checks.equal(len(shortages) - len(survived), 0, f"refusals under {name}")
            if name == "Cushion, expandable" and given.receipts:
                Path(given.receipts).write_text(path.read_text())
            end = f"finishes {found['steps']} steps" if found["oom"] is None else f"dies at step {found['steps'] + 1}"
            lost = sum(it["took"] for it in shortages)
            cost = f", {len(survived)} shortage{'s' * (len(survived) > 1)} survived in {lost:.2f} s" if survived else ""
            told.append(f"{name}: {end}{cost}")
    return {"told": f"{given.cap_gib:g} GiB. " + "; ".join(told)}


if __name__ == "__main__":
    require_gpu()
    options = parser(__doc__)
    options.add_argument("--cap-gib", type=float, default=24)
    options.add_argument("--steps", type=int, default=30)
    options.add_argument("--receipts", default=os.environ.get("CAPPED_RECEIPTS"))
    main(body, options, uses_gpu=False)
