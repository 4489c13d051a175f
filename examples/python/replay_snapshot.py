"""Replays a recorded run on a device that is too small for it, with each policy. No GPU is needed.

    python examples/python/replay_snapshot.py [SNAPSHOT [CAPACITY]]

Without arguments it replays a server with CUDA graphs, recorded in this repository, on 4.5 GiB. To record your own run,
use `torch.cuda.memory._record_memory_history()` and `_dump_snapshot("run.pickle")`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).resolve().parents[2] / "tests" / "traces" / "graphs_serving.pickle.gz"
GIB = 1 << 30


def replay(snapshot: str, capacity: str) -> list[dict[str, Any]]:
    """Returns the result of `cushion replay` for each policy."""
    command = [sys.executable, "-m", "cushion", "replay", snapshot, "--capacity", capacity, "--min-capacity", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    # Status 1 means that the run did not fit with some policy.
    if done.returncode not in (0, 1):
        sys.exit(done.returncode)
    return [json.loads(line) for line in done.stdout.splitlines()]


def main() -> None:
    snapshot = sys.argv[1] if len(sys.argv) > 1 else str(RECORDED)
    capacity = sys.argv[2] if len(sys.argv) > 2 else "4.5GiB"
    print(f"{Path(snapshot).name} on {capacity}:")
    for found in replay(snapshot, capacity):
        smallest = f"the smallest card is {found['min_capacity_bytes'] / GIB:.2f} GiB"
        if found["oom"] is None:
            print(f"  {found['policy']}: fits, with {found['reserved_peak_bytes'] / GIB:.2f} GiB reserved; {smallest}")
        else:
            refused = found["oom"]["requested"] / GIB
            print(f"  {found['policy']}: out of memory at a request of {refused:.2f} GiB; {smallest}")
    print("ok")


if __name__ == "__main__":
    main()
