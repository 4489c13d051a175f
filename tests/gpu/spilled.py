"""More live memory than a program may hold: with host memory it finishes, slower.

    python tests/gpu/spilled.py [--policy P] [--over 1.05] [--steps 12]

`gpt2_train` of `workloads.py` is run without a limit, to see what it has live at most; then with a limit so many times
smaller, under PyTorch's allocator, which has to run out of memory, and under Cushion with host memory, which has to
finish with the same loss, give or take what runs differ. How much slower it is, is told.
"""

from __future__ import annotations

import argparse

from harness import GIB, Checks, main, parser, require_gpu, say, workload


def run(given: argparse.Namespace, *mode: str, cap_gib: float = 0, **more: str) -> dict:
    found = workload("gpt2_train", *mode, "--steps", str(given.steps), "--cap-gib", str(cap_gib), **more)
    say(f"{mode} with {cap_gib:.2f} GiB: {found}")
    return found


def body(checks: Checks, given: argparse.Namespace) -> dict:
    ours = ("cushion", "--policy", given.policy)
    free = run(given, *ours)
    live = free["peak_requested"]
    cap_gib = live / GIB / given.over
    native = run(given, "native", cap_gib=cap_gib)
    checks.that(native["oom"] is not None, "PyTorch's allocator did not run out of memory")
    spilled = run(given, *ours, cap_gib=cap_gib, CUSHION_SPILL_LIMIT_MB="32768")
    checks.equal(spilled["oom"], None, "out of memory with host memory")
    checks.equal(spilled["steps"], given.steps, "steps")
    checks.at_most(spilled["peak_reserved"], cap_gib * GIB, "device memory held")
    if spilled["oom"] is not None:
        return {}
    # As far as runs of one program lie apart in `losses.py`, many times over.
    checks.at_most(abs(spilled["loss"] - free["loss"]), 0.01, "the distance of the losses")
    slower = spilled["s_per_step"] / free["s_per_step"]
    return {
        "told": f"{live / GIB:.2f} GiB live in {cap_gib:.2f} GiB: PyTorch dies at step {native['steps'] + 1}, Cushion "
        f"finishes {spilled['steps']}, {slower:.2f} times slower ({free['s_per_step']} and {spilled['s_per_step']} s a "
        f"step), loss {spilled['loss']} ({free['loss']} without the limit)"
    }


if __name__ == "__main__":
    require_gpu()
    options = parser(__doc__)
    options.add_argument("--over", type=float, default=1.05)
    options.add_argument("--steps", type=int, default=12)
    main(body, options, uses_gpu=False)
