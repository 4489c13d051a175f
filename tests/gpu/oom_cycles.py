"""Runs out of memory a thousand times, and runs a training step after each: nothing may leak.

    python tests/gpu/oom_cycles.py [--policy P] [--cycles 1000]

A cycle fills memory with blocks of decreasing sizes, each until `torch.OutOfMemoryError`, drops them, and runs a
training step. In every tenth cycle a step that is too large is tried while memory is full, and has to raise. The limit
is 8 GiB; every fiftieth cycle fills the whole device.

After all cached memory is released, memory in use and reserved have to be the same after the last cycle as after the
hundredth. The device's free memory and the memory of the process have to be within the tolerances below.
"""

from __future__ import annotations

import math
import os
import random

from harness import GIB, MIB, Checks, main, parser, require_gpu, say, settle, short

require_gpu()

import torch  # noqa: E402

LIMIT = 8 * GIB
WHOLE_CARD_EVERY = 50
TRAIN_WHILE_FULL_EVERY = 10
FIRST_LOOK = 100
LOOK_EVERY = 250

# The driver and other processes change the device's free memory a little, Python's heap that of the process.
CARD_TOLERANCE = 32 * MIB
PROCESS_TOLERANCE = 8 * MIB

BEGINNING = "CUDA out of memory. Tried to allocate "
CAPACITY = " GPU 0 has a total capacity of "


class Trainer:
    """A small model. A wide step allocates 64 MiB at once, a narrow one very little."""

    NARROW, WIDE = 64, 16384

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256)).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def step(self, batch: int) -> float:
        try:
            x = torch.randn(batch, 256, device="cuda")
            loss = (self.model(x) - x).square().mean()
            loss.backward()
            self.optimizer.step()
            return loss.item()
        finally:
            self.optimizer.zero_grad(set_to_none=True)


class Refusals:
    """Counts out-of-memory errors, and checks that their messages have PyTorch's form."""

    def __init__(self, checks: Checks) -> None:
        self.checks = checks
        self.count = 0
        self.last = ""

    def add(self, error: Exception) -> None:
        self.count += 1
        self.last = str(error)
        as_pytorch = self.last.startswith(BEGINNING) and CAPACITY in self.last
        self.checks.that(as_pytorch, f"the message is {short(self.last)!r}")


def set_limit(size: int | None) -> None:
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(1.0 if size is None else size / total)


def fill(sizes: list[int], refusals: Refusals) -> list[torch.Tensor]:
    """Allocates blocks of each size until memory runs out."""
    held = []
    for size in sizes:
        while True:
            try:
                held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError as error:
                refusals.add(error)
                break
    return held


def train_while_full(trainer: Trainer, refusals: Refusals) -> None:
    try:
        trainer.step(Trainer.WIDE)
    except torch.OutOfMemoryError as error:
        refusals.add(error)
    else:
        refusals.checks.that(False, "a wide training step fitted where memory was full")


def look() -> dict[str, int]:
    """Returns the memory held, after all cached memory is released."""
    settle()
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "card_free": torch.cuda.mem_get_info()[0],
        "rss": pages * os.sysconf("SC_PAGE_SIZE"),
    }


def body(checks: Checks, arguments) -> dict:
    torch.manual_seed(1)
    rng = random.Random(1)
    trainer = Trainer()
    # Loads all kernels while there is room: the driver needs memory for that.
    trainer.step(Trainer.WIDE)
    trainer.step(Trainer.NARROW)
    refusals = Refusals(checks)
    ooms_before = torch.cuda.memory_stats()["num_ooms"]
    first = min(FIRST_LOOK, arguments.cycles)
    looks: dict[int, dict[str, int]] = {}
    for cycle in range(1, arguments.cycles + 1):
        whole_card = cycle % WHOLE_CARD_EVERY == 0
        set_limit(None if whole_card else LIMIT)
        big = rng.randrange(1024, 4096) if whole_card else rng.randrange(256, 1024)
        held = fill([big * MIB, 64 * MIB, 2 * MIB], refusals)
        if not whole_card and cycle % TRAIN_WHILE_FULL_EVERY == 1:
            train_while_full(trainer, refusals)
        del held
        loss = trainer.step(Trainer.NARROW)
        checks.that(math.isfinite(loss), f"the loss of cycle {cycle} is {loss}")
        if whole_card:
            # The limit applies to new memory from the driver, not to cached memory.
            torch.cuda.empty_cache()
        if cycle in (first, arguments.cycles) or cycle % LOOK_EVERY == 0:
            looks[cycle] = look()
            say(f"cycle {cycle}: {refusals.count} refusals, {looks[cycle]}")
        if len(checks.failures) > 20:
            raise RuntimeError(f"too much is wrong by cycle {cycle}: stopped")
    counted = torch.cuda.memory_stats()["num_ooms"] - ooms_before
    checks.equal(counted, refusals.count, "num_ooms, against the errors caught,")
    early, late = looks[first], looks[arguments.cycles]
    lost = early["card_free"] - late["card_free"]
    grown = late["rss"] - early["rss"]
    checks.equal(late["allocated"], early["allocated"], "memory allocated at the end")
    checks.equal(late["reserved"], early["reserved"], "memory reserved at the end")
    checks.at_most(lost, CARD_TOLERANCE, "what the card lost")
    checks.at_most(grown, PROCESS_TOLERANCE, "what the process grew by")
    return {
        "cycles": arguments.cycles,
        "refusals": refusals.count,
        "allocated_growth": late["allocated"] - early["allocated"],
        "reserved_growth": late["reserved"] - early["reserved"],
        "card_lost": lost,
        "rss_growth": grown,
        "rss_mib": {cycle: round(seen["rss"] / MIB, 1) for cycle, seen in looks.items()},
        "message": short(refusals.last, 600),
    }


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--cycles", type=int, default=1000)
    main(body, options)
