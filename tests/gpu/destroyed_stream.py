"""Destroys streams before tensors that were allocated on them are freed, with little memory: nothing may crash.

    python tests/gpu/destroyed_stream.py [--policy P] [--repeats 10]

A stream that PyTorch did not create allocates while all memory is cached for another stream, which then lends it; or
while all memory is in use, and gets host memory. Then the program destroys the stream, and frees the tensor afterwards.
CUDA does not check the handle of a destroyed stream: a call with it crashes. The memory has to be available for the
next request, but not before pending work of the stream is done with it.

Each part runs in its own process, so that a crash is a failure of that part.
"""

from __future__ import annotations

import argparse
import sys

from harness import (
    GIB,
    MIB,
    Checks,
    child,
    consistent,
    destroy_stream,
    line_of,
    main,
    new_stream,
    parser,
    require_gpu,
    say,
    settle,
    short,
)

LIMIT = 1 * GIB
# Most of the memory: a second tensor of this size does not fit.
SIZE = 768 * MIB
# About 25 ms on a card of 2 GHz.
SLEEP_CYCLES = 50_000_000
SPILL_MB = 2048
# Pending work ends within this time; no other thread has memory to wait for.
WAIT_MS = 1000
# Each part, and whether PyTorch's own allocator can do it.
PARTS = {"borrowed": True, "borrowed_at_work": True, "a_piece": False, "spilled": False, "spilled_at_work": False}


def set_limit(size: int) -> None:
    import torch

    torch.cuda.set_per_process_memory_fraction(size / torch.cuda.mem_get_info()[1])


def full(size: int, number: int, stream):
    import torch

    with torch.cuda.stream(stream):
        return torch.full((size // 4,), number, dtype=torch.int32, device="cuda")


def is_full_of(tensor, number: int, stream) -> bool:
    import torch

    with torch.cuda.stream(stream):
        return torch.stack(torch.aminmax(tensor)).tolist() == [number, number]


def work_on_a_stream(size: int, number: int, at_work: bool, total):
    """Allocates, fills and sums a tensor on a stream, and destroys the stream, with its work pending or done. Returns
    the tensor and the handle of the stream."""
    import torch

    handle = new_stream()
    outside = torch.cuda.ExternalStream(handle)
    with torch.cuda.stream(outside):
        tensor = torch.empty(size // 4, dtype=torch.int32, device="cuda")
        if at_work:
            torch.cuda._sleep(SLEEP_CYCLES)
        tensor.fill_(number)
        torch.sum(tensor, dim=0, dtype=torch.int32, out=total)
    if not at_work:
        outside.synchronize()
    destroy_stream(handle)
    return tensor, handle


def summed(size: int, number: int) -> int:
    """Returns the sum as an int32, with overflow."""
    wrapped = size // 4 * number % (1 << 32)
    return wrapped - (1 << 32) if wrapped >= 1 << 31 else wrapped


def lent(checks: Checks, given: argparse.Namespace, at_work: bool, piece: bool = False) -> dict:
    """Uses memory that is cached for another stream; a part of it, if another tensor lies next to it."""
    import torch

    lender = torch.cuda.Stream()
    total = torch.zeros((), dtype=torch.int32, device="cuda")
    size = SIZE * 2 // 3 if piece else SIZE
    borrowed, handles = 0, set()
    for number in range(1, given.repeats + 1):
        cached = full(SIZE, -1, lender)
        first = cached.data_ptr()
        lender.synchronize()
        del cached
        beside = full(64 * MIB, -2, lender) if piece else None
        lender.synchronize()
        # Only the memory cached for that stream is left.
        tensor, handle = work_on_a_stream(size, number, at_work, total)
        handles.add(handle)
        borrowed += first <= tensor.data_ptr() < first + SIZE
        del tensor
        again = full(size, 1000 + number, lender)
        # Pending work of the destroyed stream has written before this, or to other memory.
        torch.cuda.synchronize()
        checks.equal(total.item(), summed(size, number), f"the sum over stream {number}, since destroyed")
        checks.that(is_full_of(again, 1000 + number, lender), f"the memory of stream {number} was used twice")
        if beside is not None:
            checks.that(is_full_of(beside, -2, lender), f"what lies beside the memory of stream {number} changed")
        del again, beside
        settle()
        consistent(checks, given.policy)
    return {"borrowed": borrowed, "handles": len(handles)}


def spilled(checks: Checks, given: argparse.Namespace, at_work: bool) -> dict:
    """Uses host memory, while all device memory is in use."""
    import torch

    import cushion

    owner = torch.cuda.Stream()
    total = torch.zeros((), dtype=torch.int32, device="cuda")
    live = full(SIZE, -1, owner)
    owner.synchronize()
    size, handles = SIZE * 2 // 3, set()
    for number in range(1, given.repeats + 1):
        tensor, handle = work_on_a_stream(size, number, at_work, total)
        handles.add(handle)
        checks.that(cushion.stats()["spilled_bytes"] >= size, f"tensor {number} is not in host memory")
        del tensor
        # The memory may be in use until its work is done; the next tensor gets other memory.
        again = full(size, 1000 + number, owner)
        torch.cuda.synchronize()
        checks.equal(total.item(), summed(size, number), f"the sum over stream {number}, since destroyed")
        checks.that(is_full_of(again, 1000 + number, owner), f"the memory of stream {number} was used twice")
        del again
        settle()
        checks.equal(cushion.stats()["spilled_bytes"], 0, f"host memory held after stream {number}")
        consistent(checks, given.policy)
    checks.that(is_full_of(live, -1, owner), "the tensor on the device changed")
    return {"peak": cushion.stats()["spilled_bytes_peak"], "handles": len(handles)}


def part_body(checks: Checks, given: argparse.Namespace) -> dict:
    """Runs one part, in its own process."""
    import torch

    before = warm()
    set_limit(LIMIT)
    at_work = given.part.endswith("at_work")
    if given.part.startswith("spilled"):
        found = spilled(checks, given, at_work)
    else:
        found = lent(checks, given, at_work, piece=given.part == "a_piece")
    settle()
    checks.equal(torch.cuda.memory_allocated(), before, "memory allocated at the end")
    active = torch.cuda.memory_stats()["active_bytes.all.current"]
    checks.equal(active, before, "memory still waiting for streams that are gone")
    if given.policy != "native":
        import cushion

        found["rungs"] = sorted({str(receipt.survived_by) for receipt in cushion.receipts()})
    return found


def warm() -> int:
    """Loads all kernels while there is room. Returns the allocated bytes."""
    import torch

    stream = torch.cuda.Stream()
    total = torch.zeros((), dtype=torch.int32, device="cuda")
    tensor = full(4 * MIB, 3, stream)
    is_full_of(tensor, 3, stream)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1000)
        tensor.fill_(4)
        torch.sum(tensor, dim=0, dtype=torch.int32, out=total)
    stream.synchronize()
    del tensor, total
    settle()
    return torch.cuda.memory_allocated()


def run_part(checks: Checks, name: str, given: argparse.Namespace) -> dict:
    command = [sys.executable, sys.argv[0], "--policy", given.policy, "--part", name, "--repeats", str(given.repeats)]
    more = {"CUSHION_SPILL_LIMIT_MB": str(SPILL_MB)} if name.startswith("spilled") else {}
    done = child(command, CUSHION_WAIT_MS=str(WAIT_MS), **more)
    found = line_of(done)
    say(f"{name}: {found}")
    checks.passed += found["checks"]
    checks.failures += [f"{name}: {wrong}" for wrong in found.get("failures", [])]
    wanted = 1 if found.get("failures") else 0
    checks.equal(done.returncode, wanted, f"{name}: the exit code ({short(done.stderr[-300:])})")
    return found


def body(checks: Checks, given: argparse.Namespace) -> dict:
    told = {}
    for name, is_native in PARTS.items():
        if given.policy != "native" or is_native:
            found = checks.part(run_part, checks, name, given)
            rungs = (found or {}).get("rungs", [])
            told[name] = "failed" if found is None or not found["ok"] else "+".join(rungs) or "right"
    return {"told": f"{given.repeats} streams each: " + ", ".join(f"{name} {how}" for name, how in told.items())}


if __name__ == "__main__":
    require_gpu()
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=10)
    options.add_argument("--part", choices=tuple(PARTS), help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.part:
        main(part_body, options)
    else:
        main(body, options, uses_gpu=False)
