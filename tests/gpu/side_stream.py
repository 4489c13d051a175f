"""All memory is pending on a side stream: an allocation waits for just enough of it.

    python tests/gpu/side_stream.py [--policy P] [--tensors 100] [--mib 160] [--repeats 5]

All memory of the process is in tensors that a side stream uses one after the other, each after a few milliseconds of
other work, and that are freed meanwhile. Then two more tensors are allocated. PyTorch's allocator waits for the whole
side stream. Cushion has to wait only for the first tensors, and must not hand out memory before its work is done."""

from __future__ import annotations

import argparse
import json
import statistics
import time

from harness import MIB, Checks, itself, main, parser, require_gpu, say

# About 5 ms at 2 GHz.
CYCLES = 10_000_000


def measure(policy: str, tensors: int, mib: int, repeats: int) -> dict:
    import torch

    if policy != "native":
        import cushion

        cushion.install(policy=policy)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((tensors + 1) * mib * MIB / total)
    side, milliseconds, wrong = torch.cuda.Stream(), [], 0
    length = mib * MIB // 4
    for _ in range(repeats + 1):
        torch.cuda.empty_cache()
        kept = [torch.full((length,), 1.0, device="cuda") for _ in range(tensors)]
        sums = torch.zeros(tensors, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for number in range(tensors):
                tensor = kept.pop(0)
                torch.cuda._sleep(CYCLES)
                sums[number] = tensor[::4096].sum()
                tensor.record_stream(side)
                # Freed while it is in use. Later work on the stream is not waited for.
                del tensor
        began = time.perf_counter()
        wanted = [torch.empty(length, device="cuda") for _ in range(2)]
        milliseconds.append((time.perf_counter() - began) * 1e3)
        for tensor in wanted:
            tensor.fill_(-1.0)
        torch.cuda.synchronize()
        wrong += int((sums != float(len(range(0, length, 4096)))).sum())
        del wanted, tensor
        torch.cuda.synchronize()
    # The first repeat loads kernels.
    found = {"ms": [round(ms, 2) for ms in milliseconds[1:]], "wrong": wrong}
    if policy != "native":
        found["rungs"] = sorted({str(receipt.survived_by) for receipt in cushion.receipts()})
        found["refused"] = cushion.stats()["shortages_refused"]
    return found


def body(checks: Checks, given: argparse.Namespace) -> dict:
    found = {}
    for policy in ("native", given.policy):
        arguments = ("--tensors", given.tensors, "--mib", given.mib, "--repeats", given.repeats)
        found[policy] = itself("--measure", policy, *map(str, arguments))
        say(f"{policy}: {found[policy]}")
        checks.equal(found[policy]["wrong"], 0, f"sums that are wrong under {policy}")
    ours, native = (statistics.median(found[policy]["ms"]) for policy in (given.policy, "native"))
    checks.equal(found[given.policy]["refused"], 0, "refusals")
    checks.equal(found[given.policy]["rungs"], ["events"], "the rungs that served")
    # Two tensors of a hundred take a fiftieth of the time; a tenth leaves room for overhead.
    checks.at_most(ours, native / 10, "milliseconds until two tensors are there")
    return {
        "told": f"two of {given.tensors} tensors of {given.mib} MiB after {ours:.1f} ms; PyTorch {native:.1f} ms "
        f"(medians of {given.repeats})"
    }


if __name__ == "__main__":
    require_gpu()
    options = parser(__doc__)
    options.add_argument("--tensors", type=int, default=100)
    options.add_argument("--mib", type=int, default=160)
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--measure", help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.measure:
        print(json.dumps(measure(asked.measure, asked.tensors, asked.mib, asked.repeats)), flush=True)
    else:
        main(body, options, uses_gpu=False)
