"""Checks every function of torch.cuda.memory, and those of torch.accelerator, against known values.

    python tests/gpu/memory_api.py [--policy P]

Known tensors are created and dropped, and each function has to report that, to the byte. Snapshots with stacks are
tested in snapshot.py, and refused features in refusals.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings

from harness import GIB, KIB, MIB, Checks, main, parser, require_gpu, say, settle, short

require_gpu()

import torch  # noqa: E402
import torch.accelerator as accelerator  # noqa: E402
import torch.cuda.memory as memory  # noqa: E402

# About 25 ms on a card of 2 GHz.
SLEEP_CYCLES = 50_000_000
# The driver itself changes the device's free memory a little.
CARD_TOLERANCE = 32 * MIB

NATIVE_KEYS = """
import json, torch
torch.zeros(1, device="cuda")
print(json.dumps([sorted(torch.cuda.memory_stats()), sorted(torch.accelerator.memory_stats())]))
"""

# The names of torch.cuda.memory that no part below calls, and why.
NOT_CALLED = {
    "CUDAPluggableAllocator": "how Cushion itself is installed",
    "change_current_allocator": "how Cushion itself is installed",
    "MemPool": "refusals.py",
    "use_mem_pool": "refusals.py",
}


def take(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def stat(name: str) -> int:
    return memory.memory_stats()[name]


def stat_keys(checks: Checks) -> None:
    """Checks that all keys of PyTorch's own allocator exist."""
    command = [sys.executable, "-c", NATIVE_KEYS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    cuda, generic = json.loads(done.stdout.splitlines()[-1])
    missing = sorted(set(cuda) - set(memory.memory_stats()))
    checks.equal(missing, [], f"missing of memory_stats's {len(cuda)} keys")
    missing = sorted(set(generic) - set(accelerator.memory_stats()))
    checks.equal(missing, [], f"missing of torch.accelerator.memory_stats's {len(generic)} keys")
    nested = memory.memory_stats_as_nested_dict()
    checks.equal(
        nested["allocated_bytes"]["all"]["current"],
        stat("allocated_bytes.all.current"),
        "allocated bytes in the nested statistics",
    )


def allocated(checks: Checks) -> None:
    """Checks the bytes in use."""
    settle()
    base = memory.memory_allocated()
    count = stat("allocation.all.current")
    asked = stat("requested_bytes.all.current")
    small = take(1000)
    checks.equal(memory.memory_allocated() - base, 1024, "a tensor of 1000 bytes")
    checks.equal(stat("requested_bytes.all.current") - asked, 1000, "the bytes asked for")
    large = take(64 * MIB)
    checks.equal(memory.memory_allocated() - base, 1024 + 64 * MIB, "1000 bytes and 64 MiB")
    checks.equal(stat("allocation.all.current") - count, 2, "the number of allocations")
    checks.that(stat("allocation.small_pool.current") >= 1, "1000 bytes are no small allocation")
    empty = take(0)
    checks.equal(stat("allocation.all.current") - count, 2, "the number of allocations with an empty one")
    del small, large, empty
    checks.equal(memory.memory_allocated(), base, "memory allocated once all is freed")
    checks.equal(stat("requested_bytes.all.current"), asked, "the bytes asked for once all is freed")


def peaks(checks: Checks) -> None:
    """Checks peaks, and their resets."""
    settle()
    base = memory.memory_allocated()
    memory.reset_peak_memory_stats()
    checks.equal(memory.max_memory_allocated(), base, "the peak after its reset")
    take(96 * MIB)
    checks.equal(memory.max_memory_allocated(), base + 96 * MIB, "the peak after a tensor of 96 MiB")
    above = memory.max_memory_reserved() - memory.max_memory_allocated()
    checks.that(above >= 0, f"the peak of reserved is {-above} below that of allocated")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        memory.reset_max_memory_allocated()
        checks.equal(memory.max_memory_allocated(), base, "the peak after the old reset")
        take(64 * MIB)
        memory.reset_max_memory_cached()
        cached = memory.memory_cached()
        checks.equal(memory.max_memory_cached(), cached, "reserved's peak after the old reset")
        checks.equal(memory.max_memory_allocated(), base, "the peak after the other old reset")
    memory.reset_accumulated_memory_stats()
    checks.equal(stat("allocation.all.allocated"), 0, "allocations since the reset")
    checks.equal(stat("allocated_bytes.all.freed"), 0, "bytes freed since the reset")
    take(1000)
    checks.equal(stat("allocation.all.allocated"), 1, "allocations after one")
    checks.equal(stat("allocated_bytes.all.freed"), 1024, "bytes freed after one")


def reserved(checks: Checks) -> None:
    """Checks reserved memory: cached and released."""
    settle()
    base = memory.memory_reserved()
    tensor = take(GIB)
    held = memory.memory_reserved()
    checks.that(held - base >= GIB, f"1 GiB was got, and {held - base} reserved")
    del tensor
    checks.equal(memory.memory_reserved(), held, "memory reserved once the tensor is cached")
    memory.empty_cache()
    checks.equal(memory.memory_reserved(), base, "memory reserved after empty_cache")


def card(checks: Checks) -> None:
    """Checks that mem_get_info follows reserved memory."""
    settle()
    free, total = memory.mem_get_info()
    base = memory.memory_reserved()
    checks.that(0 < free <= total, f"mem_get_info is {free} of {total}")
    tensor = take(2 * GIB)
    taken = free - memory.mem_get_info()[0]
    grown = memory.memory_reserved() - base
    checks.at_most(abs(taken - grown), CARD_TOLERANCE, "what the card gave, against what is reserved,")
    checks.equal(accelerator.get_memory_info()[1], total, "torch.accelerator's total")
    del tensor
    settle()
    lost = free - memory.mem_get_info()[0]
    checks.at_most(abs(lost), CARD_TOLERANCE, "what the card did not get back")


def block_of(address: int) -> dict | None:
    for segment in memory.memory_snapshot():
        for block in segment["blocks"]:
            if block["address"] == address:
                return block
    return None


def snapshot(checks: Checks) -> None:
    """Checks that the blocks of memory_snapshot are the existing tensors."""
    settle()
    tensor = take(5 * MIB + 3)
    address = tensor.data_ptr()
    block = block_of(address)
    if checks.that(block is not None, "a live tensor is not in the snapshot"):
        checks.equal(block["state"], "active_allocated", "a live tensor's state")
        checks.equal(block["requested_size"], 5 * MIB + 3, "a live tensor's size")
    segments = memory.memory_snapshot(include_traces=False)
    for segment in segments:
        sizes = sum(block["size"] for block in segment["blocks"])
        checks.equal(sizes, segment["total_size"], "the sizes of a segment's blocks")
        ends = segment["address"]
        for one in segment["blocks"]:
            checks.equal(one["address"], ends, "a block's address, after the one before")
            ends += one["size"]
    totals = {
        "total_size": memory.memory_reserved(),
        "allocated_size": memory.memory_allocated(),
        "active_size": stat("active_bytes.all.current"),
        "requested_size": stat("requested_bytes.all.current"),
    }
    for key, truth in totals.items():
        checks.equal(sum(segment[key] for segment in segments), truth, f"the sum of {key} over segments")
    # PyTorch does not count segments that grow.
    counted = sum(not segment["is_expandable"] for segment in segments)
    checks.equal(stat("segment.all.current"), counted, "the number of segments")

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP_CYCLES)
    tensor.record_stream(side)
    in_use = memory.memory_allocated()
    del tensor
    block = block_of(address)
    if checks.that(block is not None, "a block that waits for a stream is not in the snapshot"):
        checks.equal(block["state"], "active_pending_free", "the state of a block that waits for a stream")
    checks.that(memory.memory_allocated() < in_use, "a freed block that waits still counts as allocated")
    waiting = stat("active_bytes.all.current") - memory.memory_allocated()
    checks.that(waiting >= 5 * MIB, f"active is {waiting} bytes above allocated, with 5 MiB waiting")
    torch.cuda.synchronize()
    take(5 * MIB + 3)
    block = block_of(address)
    gone = block is None or block["state"] == "inactive"
    checks.that(gone, "a block is not free although the stream it waited for is done")


def fraction(checks: Checks) -> None:
    """Checks that a memory fraction is enforced, reported and removed."""
    settle()
    total = memory.mem_get_info()[1]
    share = (memory.memory_reserved() + GIB) / total
    memory.set_per_process_memory_fraction(share)
    off = abs(memory.get_per_process_memory_fraction() - share)
    checks.at_most(off, 1e-9, "the limit told, against the one set,")
    ooms = stat("num_ooms")
    try:
        take(2 * GIB)
        checks.that(False, "2 GiB were had under a limit of 1 GiB")
    except torch.OutOfMemoryError as error:
        checks.that("Tried to allocate 2.00 GiB" in str(error), f"the message is {short(error)}")
        checks.that(" allowed; " in str(error), f"the message does not tell the limit: {short(error)}")
    checks.equal(stat("num_ooms") - ooms, 1, "num_ooms after one error")
    tensor = take(GIB // 2)
    checks.that(memory.memory_reserved() <= share * total, "more is reserved than the limit")
    del tensor
    memory.set_per_process_memory_fraction(1.0)
    checks.equal(memory.get_per_process_memory_fraction(), 1.0, "the limit once it is taken away")
    take(2 * GIB)
    for wrong in (-0.1, 1.5):
        try:
            memory.set_per_process_memory_fraction(wrong)
            checks.that(False, f"a fraction of {wrong} is accepted")
        except ValueError:
            pass


def shortage(checks: Checks) -> None:
    """Checks the messages of requests that no device could serve, the observer, and that allocations work
    afterwards."""
    seen: list[tuple] = []
    torch._C._cuda_attach_out_of_memory_observer(lambda *told: seen.append(told))
    ooms = stat("num_ooms")
    for size, text in (
        (800_000_000 * GIB, "Tried to allocate 800000000.00 GiB. GPU 0 has a total capacity of"),
        (8_000_000_000 * GIB, "Tried to allocate more than 1EB memory."),
    ):
        try:
            take(size)
            checks.that(False, f"{size} bytes were had")
        except torch.OutOfMemoryError as error:
            as_pytorch = str(error).startswith("CUDA out of memory. " + text)
            checks.that(as_pytorch, f"the message is {short(error)}")
    checks.that(issubclass(torch.OutOfMemoryError, RuntimeError), "OutOfMemoryError is no RuntimeError")
    checks.equal(stat("num_ooms") - ooms, len(seen), "num_ooms, against calls of the observer,")
    if checks.that(len(seen) >= 1, "the out-of-memory observer was not called"):
        device, size, limit, free = seen[0]
        checks.equal(device, 0, "the observer's device")
        checks.equal(size, 800_000_000 * GIB, "the observer's size")
        checks.that(0 < free <= limit, f"the observer was told {free} free of {limit}")
    checks.equal(torch.ones(1000, device="cuda").sum().item(), 1000.0, "a sum after a shortage")


def raw_calls(checks: Checks) -> None:
    """Checks caching_allocator_alloc and the like."""
    settle()
    base = memory.memory_allocated()
    side = torch.cuda.Stream()
    pointers = [
        memory.caching_allocator_alloc(MIB),
        memory.caching_allocator_alloc(3000, device=0),
        memory.caching_allocator_alloc(MIB, stream=side),
    ]
    checks.equal(memory.memory_allocated() - base, 2 * MIB + 3 * KIB, "memory allocated by raw calls")
    checks.equal(len(set(pointers)), 3, "the number of addresses")
    for pointer in pointers:
        memory.caching_allocator_delete(pointer)
    checks.equal(memory.memory_allocated(), base, "memory allocated once the raw calls are undone")
    try:
        memory.caching_allocator_alloc(-1)
        checks.that(False, "a negative size is accepted")
    except (ValueError, RuntimeError):
        pass
    memory.caching_allocator_enable(False)
    checks.equal(torch.ones(1000, device="cuda").sum().item(), 1000.0, "a sum without caching")
    memory.caching_allocator_enable(True)
    settle()
    checks.equal(memory.memory_allocated(), base, "memory allocated once caching is on again")


def texts(checks: Checks, policy: str) -> None:
    """Checks functions that return text, and those of host memory."""
    for brief in (False, True):
        summary = memory.memory_summary(abbreviated=brief)
        for words in ("PyTorch CUDA memory summary", "Allocated memory", "GPU reserved memory"):
            checks.that(words in summary, f"memory_summary does not say {words!r}")
    checks.that(isinstance(memory.list_gpu_processes(), str), "list_gpu_processes says nothing")
    native = memory.get_allocator_backend() == "native"
    checks.equal(native, policy == "native", "whether the backend is called native")
    torch.zeros(1000).pin_memory()
    checks.that(memory.host_memory_stats()["num_host_alloc"] >= 1, "host memory is not counted")
    checks.that("allocated_bytes" in memory.host_memory_stats_as_nested_dict(), "no nested host statistics")
    memory.reset_peak_host_memory_stats()
    memory.reset_accumulated_host_memory_stats()


def metadata(checks: Checks) -> None:
    """Checks that metadata of allocations is returned, and is in their events."""
    memory._set_memory_metadata("epoch 1")
    checks.equal(memory._get_memory_metadata(), "epoch 1", "the metadata set")
    memory._record_memory_history(max_entries=1000, stacks="python")
    take(7 * MIB + 7)
    events = memory._snapshot()["device_traces"][0]
    memory._record_memory_history(enabled=None)
    memory._set_memory_metadata("")
    checks.equal(memory._get_memory_metadata(), "", "the metadata cleared")
    noted = [event["user_metadata"] for event in events if event["action"] == "alloc"]
    checks.equal(noted, ["epoch 1"], "the metadata in events")


def accelerators(checks: Checks) -> None:
    """Checks that torch.accelerator returns the same values."""
    settle()
    base = memory.memory_allocated()
    accelerator.reset_peak_memory_stats()
    tensor = take(64 * MIB)
    pairs = {
        "memory_allocated": (accelerator.memory_allocated(), memory.memory_allocated()),
        "max_memory_allocated": (accelerator.max_memory_allocated(), base + 64 * MIB),
        "memory_reserved": (accelerator.memory_reserved(), memory.memory_reserved()),
        "max_memory_reserved": (accelerator.max_memory_reserved(), memory.max_memory_reserved()),
        "memory_stats": (accelerator.memory_stats()["allocated_bytes.all.current"], base + 64 * MIB),
    }
    for name, (got, truth) in pairs.items():
        checks.equal(got, truth, f"torch.accelerator.{name}")
    del tensor
    held = memory.memory_reserved()
    accelerator.empty_cache()
    checks.that(memory.memory_reserved() < held, "torch.accelerator.empty_cache gave nothing back")
    accelerator.reset_accumulated_memory_stats()
    checks.equal(stat("allocation.all.allocated"), 0, "allocations since torch.accelerator's reset")


def profiler(checks: Checks) -> None:
    """Checks that torch.profiler sees CUDA memory, as events and as sums."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, profile_memory=True) as watched:
        tensor = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        del tensor
        kept = torch.zeros(32 * MIB, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
    of_memory = [
        event.nbytes()
        for event in watched.profiler.kineto_results.events()
        if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CUDA
    ]
    for size in (64 * MIB, -64 * MIB, 32 * MIB):
        checks.that(size in of_memory, f"the profiler has no memory event of {size} bytes: {of_memory[:20]}")
    usage = max(average.self_device_memory_usage for average in watched.key_averages())
    checks.that(usage > 0, "no operator has device memory in the profile")
    del kept


def body(checks: Checks, arguments) -> dict:
    torch.zeros(1, device="cuda")
    parts = (
        stat_keys, allocated, peaks, reserved, card, snapshot, fraction, shortage, raw_calls, metadata,
        accelerators, profiler,
    )  # fmt: skip
    for part in parts:
        checks.part(part, checks)
    checks.part(texts, checks, arguments.policy)
    with open(os.path.abspath(__file__)) as file:
        source = file.read()
    not_called = [name for name in memory.__all__ if f"memory.{name}(" not in source]
    left = sorted(set(not_called) - set(NOT_CALLED))
    say(f"not called: {left}")
    return {"parts": len(parts) + 1, "stat_keys": len(memory.memory_stats()), "not_called": left}


if __name__ == "__main__":
    main(body, parser(__doc__))
