"""More live memory than the limit: with host memory the program finishes, slower.

    python tests/gpu/spilled.py [--policy P] [--over 1.05] [--steps 12]

`gpt2_train` of `workloads.py` runs without a limit, to find its peak of live memory. Then it runs with a limit of that
peak divided by `--over`: with PyTorch's allocator it has to run out of memory; with Cushion and host memory it has to
finish with the same loss, within the variation between runs. The slowdown is reported.
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
    # Many times the difference between runs of one program in `losses.py`.
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
