"""Cushion and processes: forks, threads, destroyed streams, exits, and `cushion run`.

python tests/gpu/life.py [--policy P]
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading

from harness import Checks, child, destroy_stream, main, new_stream, parser, require_gpu, settle, short

require_gpu()

import torch  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

# About 25 ms on a card of 2 GHz.
SLEEP_CYCLES = 50_000_000

# Tensors that are freed after the main thread has ended: in a thread that goes on, in an exit handler, in a cycle, with
# the module; and one that is never freed, in a daemon thread.
LATE_FREES = """
import atexit, sys, threading, time
from harness import install
install(sys.argv[1])
import torch

def late():
    mine = [torch.ones(1000 * i, device="cuda") for i in range(1, 50)]
    time.sleep(0.5)
    del mine
    torch.ones(1 << 20, device="cuda").sum().item()

def never():
    mine = torch.ones(1 << 20, device="cuda")
    threading.Event().wait()

class Cycle:
    def __init__(self):
        self.me = self
        self.tensor = torch.ones(1 << 22, device="cuda")

at_exit = [torch.ones(1 << 22, device="cuda")]
atexit.register(at_exit.clear)
of_module = torch.ones(1 << 22, device="cuda")
side = torch.cuda.Stream()
of_module.record_stream(side)
cycle = Cycle()
threading.Thread(target=never, daemon=True).start()
threading.Thread(target=late).start()
time.sleep(0.1)
print("main thread done", flush=True)
"""

# Run by `cushion run`, which has installed Cushion before it.
RUN_BY_CUSHION = """
import json, sys, torch
x = torch.ones(1000, device="cuda")
print(json.dumps({
    "name": __name__,
    "argv": sys.argv[1:],
    "script": sys.argv[0],
    "backend": torch.cuda.get_allocator_backend(),
    "installed": "cushion" in sys.modules,
    "allocated": torch.cuda.memory_allocated(),
    "pages": any(s["is_expandable"] for s in torch.cuda.memory_snapshot()),
}), flush=True)
sys.exit(7)
"""


class Numbers(Dataset):
    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1000,), float(index))


def data_loader(checks: Checks) -> None:
    """Forks workers of a data loader during CUDA work, for three epochs."""
    torch.ones(1000, device="cuda")
    loader = DataLoader(Numbers(), batch_size=16, num_workers=2, pin_memory=True, multiprocessing_context="fork")
    for epoch in range(3):
        total = torch.zeros((), device="cuda", dtype=torch.float64)
        for batch in loader:
            total += batch.to("cuda", non_blocking=True).double().sum()
        checks.equal(total.item(), 1000.0 * sum(range(256)), f"the sum of epoch {epoch}")


def threads(checks: Checks) -> None:
    """Allocates and frees in eight threads at once, each on its own stream, and checks the contents."""
    settle()
    before = torch.cuda.memory_allocated()
    wrong: list[str] = []

    def work(number: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for i in range(300):
                    tensor = torch.full((1 + (i * 7919 + number) % 200_000,), number, device="cuda")
                    if i % 20 == 0 and not bool((tensor == number).all()):
                        wrong.append(f"thread {number} found other numbers in its memory")
        except Exception as error:
            wrong.append(f"thread {number}: {short(error)}")

    running = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    checks.equal(wrong, [], "what went wrong in threads")
    settle()
    checks.equal(torch.cuda.memory_allocated(), before, "memory allocated after the threads")


def late_frees(checks: Checks, policy: str) -> None:
    """Frees memory while the process shuts down, and after."""
    for _ in range(3):
        done = child([sys.executable, "-c", LATE_FREES, policy])
        came = "main thread done" in done.stdout
        checks.that(came, f"the child did not come to its end: {short(done.stderr)}")
        checks.equal(done.returncode, 0, f"the exit code after late frees ({short(done.stderr)})")


def destroyed_streams(checks: Checks) -> None:
    """Destroys streams while blocks are pending on them, and while memory is cached for them."""
    settle()
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        handle = new_stream()
        outside = torch.cuda.ExternalStream(handle)
        used_there = torch.ones(1 << 20, device="cuda")
        with torch.cuda.stream(outside):
            torch.cuda._sleep(SLEEP_CYCLES)
            of_there = torch.ones(1 << 20, device="cuda")
            result = used_there + of_there
        torch.cuda.current_stream().wait_stream(outside)
        total = result.sum()
        for tensor in (of_there, result):
            tensor.record_stream(torch.cuda.current_stream())
        used_there.record_stream(outside)
        del used_there, of_there, result, tensor
        destroy_stream(handle)
        del outside
        # The freed blocks are pending or free by now.
        more = [torch.ones(1 << 20, device="cuda") for _ in range(4)]
        checks.equal(total.item(), 2.0 * (1 << 20), "the sum over a stream since destroyed")
        del more, total
    settle()
    checks.equal(torch.cuda.memory_allocated(), before, "memory allocated once all streams are gone")
    active = torch.cuda.memory_stats()["active_bytes.all.current"]
    checks.equal(active, before, "memory still waiting for streams that are gone")


def cushion_run(checks: Checks, policy: str) -> None:
    """Checks that `python -m cushion run` passes arguments and the exit code, and installs Cushion."""
    with tempfile.TemporaryDirectory() as folder:
        script = os.path.join(folder, "script.py")
        with open(script, "w") as file:
            file.write(RUN_BY_CUSHION)
        run = [sys.executable, "-m", "cushion", "run"]
        for how, done in (
            ("--policy", child([*run, "--policy", policy, script, "a", "--b"])),
            ("CUSHION_POLICY", child([*run, script, "a", "--b"], CUSHION_POLICY=policy)),
        ):
            checks.equal(done.returncode, 7, f"{how}: the exit code ({short(done.stderr)})")
            said = json.loads((done.stdout.strip().splitlines() or ["{}"])[-1])
            checks.equal(said.get("name"), "__main__", "the script's __name__")
            checks.equal(said.get("argv"), ["a", "--b"], "the script's arguments")
            checks.equal(os.path.basename(said.get("script", "")), "script.py", "the script's own name")
            checks.that(said.get("installed") is True, f"{how}: Cushion is not installed")
            checks.that(said.get("backend") != "native", f"{how}: the allocator is PyTorch's")
            checks.equal(said.get("allocated"), 4096, f"{how}: memory allocated")
            checks.equal(said.get("pages"), policy != "segments", f"{how}: pages behind segments")


def body(checks: Checks, arguments) -> dict:
    checks.part(data_loader, checks)
    checks.part(threads, checks)
    checks.part(destroyed_streams, checks)
    checks.part(late_frees, checks, arguments.policy)
    if arguments.policy != "native":
        checks.part(cushion_run, checks, arguments.policy)
    return {}


if __name__ == "__main__":
    main(body, parser(__doc__))
