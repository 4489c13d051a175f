"""Runs the code in the READMEs of gcAllocator and custom_cuda_allocator unchanged (blocks.py), and
custom_cuda_allocator's memory by address without PyTorch.

    python tests/gpu/doors.py [--policy P]

Each block runs in its own process, because an allocator can be installed once per process; a few lines after the block
check its results. With `--policy native` there is nothing to run: both packages use Cushion.
"""

from __future__ import annotations

import json
import re
import sys

import blocks
from harness import GIB, MIB, Checks, child, main, parser, require_gpu, short

require_gpu()

# After every block with PyTorch: checks that the memory is Cushion's, and that it works.
COMMON = """
import json
import torch
facts = {
    "backend": torch.cuda.memory.get_allocator_backend(),
    "sum": torch.ones(1000, device="cuda").sum().item(),
    "pages": any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot()),
}
"""

AFTER_TRACKING = """
import gcAllocator
stats = gcAllocator.get_stats()
facts["tracked"] = stats.tracked.total_allocations
facts["current"], facts["peak"] = stats.current_bytes_allocated, stats.peak_bytes_allocated
facts["freed"], facts["ooms"] = stats.total_bytes_freed, stats.oom_count
print(json.dumps(facts))
"""

AFTER_CONTEXT = """
facts["frozen"] = allocator.get_stats().total_allocations == stats.total_allocations
facts["devices"] = list(stats.device_stats)
print(json.dumps(facts))
"""

AFTER_USAGE = """
facts["total"] = tensor.sum(dtype=torch.float64).item()
facts["stats"] = custom_cuda_allocator.get_memory_stats()
facts["allocated"], facts["reserved"] = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
facts["card"] = torch.cuda.mem_get_info()
facts["retries"] = custom_cuda_allocator.get_retry_count()
print(json.dumps(facts))
"""

# Uses memory by address as a tensor.
AFTER_CLASS = """
class Raw:
    def __init__(self, ptr, size):
        self.__cuda_array_interface__ = {"data": (ptr, False), "shape": (size,), "typestr": "|u1", "version": 2}

before = torch.cuda.memory_allocated()
ptr = allocator.allocate(size_in_bytes)
view = torch.as_tensor(Raw(ptr, size_in_bytes), device="cuda")
view.fill_(7)
facts["view"] = view.sum(dtype=torch.int64).item()
facts["same"] = view.data_ptr() == ptr
facts["grown"] = torch.cuda.memory_allocated() - before
facts["created"] = [list(tensor.shape), str(tensor.dtype), str(tensor.device)]
del view
allocator.deallocate(ptr)
try:
    allocator.deallocate(ptr)
except ValueError as error:
    facts["twice"] = str(error)
try:
    allocator.allocate(1 << 50)
except torch.OutOfMemoryError as error:
    facts["refused"] = str(error)
print(json.dumps(facts))
"""

WITHOUT_TORCH = """
import json, sys
sys.modules["torch"] = None
import custom_cuda_allocator as door
allocator = door.CUDAAllocator()
before = door.get_memory_stats()
ptr = allocator.allocate(1 << 30)
after = door.get_memory_stats()
allocator.deallocate(ptr)
door.clear_cache()
facts = {"ptr": ptr, "before": before, "after": after, "cleared": door.get_memory_stats()}
try:
    allocator.allocate(1 << 50)
except MemoryError as error:
    facts["refused"] = str(error)
print(json.dumps(facts))
"""


def run(checks: Checks, policy: str, program: str, **more: str) -> tuple[list[str], dict, str]:
    """Runs a program. Returns its output, the facts on its last line, and its log messages and warnings."""
    done = child([sys.executable, "-c", program], CUSHION_POLICY=policy, **more)
    checks.equal(done.returncode, 0, f"the exit code ({short(done.stderr[-600:])})")
    lines = done.stdout.splitlines() or ["{}"]
    facts = json.loads(lines[-1])
    if "backend" in facts:
        checks.equal(facts["backend"], "pluggable", "the allocator")
        checks.equal(facts["sum"], 1000.0, "a sum after the block")
        checks.equal(facts["pages"], policy != "segments", "whether pages are behind segments")
    return lines[:-1], facts, done.stderr


def gc_tracking(checks: Checks, policy: str) -> None:
    """Tracks a tensor of 37 GiB."""
    size = 100000 * 100000 * 4
    lines, facts, log = run(checks, policy, blocks.GC_TRACKING + COMMON + AFTER_TRACKING)
    checks.equal(len(lines), 4, f"the number of lines in {lines}")
    created, tracked, gone = lines[1:4]
    checks.that(f"size={size}, device=0" in created, f"the block said {created!r}")
    checks.that("37.25 GiB in use" in tracked, f"with a tensor of 37.25 GiB the block said {tracked!r}")
    checks.that("GiB in use" not in gone and "peak 37.25 GiB" in gone, f"once it was gone the block said {gone!r}")
    checks.that("installed" in log, f"nothing was logged: {short(log)}")
    checks.equal(log.count("cannot change its allocator back"), 1, "how often uninstall() said what it cannot do")
    checks.equal(facts.get("tracked"), 0, "Cushion's own memory, counted as others'")
    checks.equal(facts.get("ooms"), 0, "the times out of memory")
    checks.that(size <= facts.get("peak", 0) <= size + 64 * MIB, f"the peak is {facts.get('peak')}, of a {size} tensor")
    checks.that(size <= facts.get("freed", 0), f"{facts.get('freed')} bytes are freed of {size}")
    checks.at_most(facts.get("current", size), 64 * MIB, "what is in use once the tensor is gone")


def gc_context(checks: Checks, policy: str) -> None:
    """Uses the context manager, with logging from the environment too."""
    for more in ({}, {"GC_ALLOCATOR_LOG": "1"}):
        block = blocks.GC_CONTEXT.replace("enable_logging=True", "") if more else blocks.GC_CONTEXT
        lines, facts, log = run(checks, policy, block + COMMON + AFTER_CONTEXT, **more)
        checks.equal(lines, ["Peak memory: 0.09 GB"], "what the block said")
        checks.that("installed" in log, f"nothing was logged: {short(log)}")
        checks.equal(facts.get("frozen"), True, "whether the counting ended with the block")
        checks.equal(facts.get("devices"), [0], "the devices counted")


def custom_usage(checks: Checks, policy: str) -> None:
    """Allocates a billion elements, and reads the memory of the device."""
    size = 4 * 1000000000
    for more in ({}, blocks.CUSTOM_ENVIRONMENT):
        lines, facts, log = run(checks, policy, blocks.CUSTOM_USAGE + COMMON + AFTER_USAGE, **more)
        free, total = facts.get("card", (0, 0))
        found = re.fullmatch(r"GPU memory: (\d+\.\d\d) GB used / (\d+\.\d\d) GB total", "\n".join(lines))
        if checks.that(found is not None, f"the block said {lines}"):
            checks.at_most(abs(float(found[2]) - total / GIB), 0.01, "how far the total printed is off")
            checks.at_most(float(found[1]), float(found[2]), "what is used, of the total,")
        checks.equal(facts.get("total"), 1e9, "the sum of a billion ones")
        stats = facts.get("stats", {})
        checks.equal(stats.get("allocated_gb"), facts.get("allocated", 0) / GIB, "allocated_gb")
        checks.equal(stats.get("reserved_gb"), facts.get("reserved", 0) / GIB, "reserved_gb")
        checks.at_most(abs(stats.get("free_gb", 0) - free / GIB), 0.1, "how far free_gb is off")
        used = stats.get("used_gb", 0) * GIB
        checks.that(used >= size, f"used_gb tells {used} bytes, with {size} in use")
        checks.equal(facts.get("retries"), 0, "the number of retries")
        checks.equal("installed" in log, bool(more), "whether OOM_VERBOSE was heeded")


def custom_class(checks: Checks, policy: str) -> None:
    """Allocates by address, and a tensor with `TensorOptions`."""
    _, facts, _ = run(checks, policy, blocks.CUSTOM_CLASS + COMMON + AFTER_CLASS)
    checks.equal(facts.get("view"), 7 * MIB, "the sum of a MiB of sevens")
    checks.equal(facts.get("same"), True, "whether the view is of the memory by address")
    checks.equal(facts.get("grown"), MIB, "what PyTorch counts of a MiB by address")
    checks.equal(facts.get("created"), [[1000], "torch.float32", "cuda:0"], "the tensor created")
    checks.that("no live allocation" in facts.get("twice", ""), f"freed twice, it says {facts.get('twice')!r}")
    refused = facts.get("refused", "")
    checks.that(refused.startswith("CUDA out of memory. Tried to allocate 1048576.00 GiB"), f"it says {refused!r}")


def without_torch(checks: Checks, policy: str) -> None:
    """Allocates by address on a GPU without PyTorch."""
    _, facts, _ = run(checks, policy, WITHOUT_TORCH)
    checks.that(facts.get("ptr", 0) > 0, f"the address is {facts.get('ptr')}")
    before, after, cleared = (facts.get(name, {}) for name in ("before", "after", "cleared"))
    checks.equal(after.get("allocated_gb"), 1.0, "what is allocated")
    taken = after.get("used_gb", 0) - before.get("used_gb", 0)
    checks.that(0.9 <= taken <= 1.2, f"the card gave {taken} GiB for one")
    checks.equal(cleared.get("reserved_gb"), 0.0, "what is reserved once it is cleared")
    checks.that("CUDA out of memory" in facts.get("refused", ""), f"refused, it says {facts.get('refused')!r}")


def body(checks: Checks, arguments) -> dict:
    if arguments.policy == "native":
        return {"parts": 0}
    parts = (gc_tracking, gc_context, custom_usage, custom_class, without_torch)
    for part in parts:
        checks.part(part, checks, arguments.policy)
    return {"parts": len(parts)}


if __name__ == "__main__":
    main(body, parser(__doc__))
