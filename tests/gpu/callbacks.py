"""Callbacks of a program in a shortage: the process goes on, and the receipt records what they did.

    python tests/gpu/callbacks.py [--policy P]

The callbacks raise, take too long, allocate, free, and call Cushion from another thread; run on autograd's thread; and
move tensors to the host and back, without a change of their contents.
"""

from __future__ import annotations

import argparse
import threading
import time

from harness import GIB, MIB, Checks, main, parser, require_gpu, settle

require_gpu()

import torch  # noqa: E402

CAP = 4 * GIB


def empty(size: int):
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def refused(checks: Checks, size: int):
    """Makes an allocation that is refused, and returns the receipt."""
    try:
        empty(size)
    except torch.OutOfMemoryError as error:
        return error.receipt
    raise RuntimeError("it was not refused")


def raises(checks: Checks, cushion) -> None:
    kept = empty(3 * GIB)
    function = cushion.on_shortage(lambda *_: {}["nothing"])
    receipt = refused(checks, 2 * GIB)
    checks.that("KeyError" in receipt.answers[0].failed, f"the receipt does not tell: {receipt.answers}")
    cushion.remove_callback(function)
    del kept


def overruns(checks: Checks, cushion) -> None:
    kept = empty(3 * GIB)
    calls: list[float] = []

    def slow(_device: int, _wanted: int, seconds_left: float) -> None:
        calls.append(seconds_left)
        time.sleep(seconds_left + 0.1)

    cushion.on_shortage(slow, budget_ms=200)
    checks.that(refused(checks, 2 * GIB).answers[0].switched_off, "one that overran is not switched off")
    checks.equal(refused(checks, 2 * GIB).answers, (), "answers once it is off")
    checks.equal(len(calls), 1, "calls")
    cushion.remove_callback(slow)
    del kept


def allocates_and_frees(checks: Checks, cushion) -> None:
    kept = [empty(GIB) for _ in range(3)]
    small: list = []

    def busy(*_: object) -> str:
        kept.clear()
        torch.cuda.empty_cache()
        small.append(torch.ones(1000, device="cuda"))
        return "made room"

    cushion.on_shortage(busy)
    got = torch.full((3 * GIB // 4,), 2.0, device="cuda")
    checks.equal(cushion.receipts()[-1].survived_by, "callbacks", "what it was survived by")
    checks.equal(cushion.receipts()[-1].answers[0].said, "made room", "what the receipt says")
    checks.equal((float(got[-1]), float(small[0].sum())), (2.0, 1000.0), "what was written")
    cushion.remove_callback(busy)


def from_another_thread(checks: Checks, cushion) -> None:
    kept = [empty(3 * GIB)]
    seen: list = []

    def asks_another(*_: object) -> None:
        def there() -> None:
            seen.append(torch.ones(1000, device="cuda").sum().item())
            seen.append(refused(checks, 2 * GIB).answers)
            seen.append(cushion.stats()["shortages"] > 0)
            kept.clear()

        thread = threading.Thread(target=there)
        thread.start()
        thread.join()

    cushion.on_shortage(asks_another)
    with cushion.budget(ms=0):
        got = empty(2 * GIB)
    checks.equal(seen[:1], [1000.0], "work of the other thread")
    checks.equal(seen[1:], [(), True], "what the other thread saw")
    cushion.remove_callback(asks_another)
    del got


def while_gradients_are_computed(checks: Checks, cushion) -> None:
    """Runs out of memory in the backward pass, on autograd's thread."""
    threads: list[str] = []
    x = torch.ones(150 * MIB // 4, device="cuda", requires_grad=True)
    y = x
    for _ in range(8):
        y = (y * 1.0001).sin()
    total = y.sum()
    # Allocates all free memory.
    torch.cuda.empty_cache()
    kept = [empty(CAP - torch.cuda.memory_reserved() - 100 * MIB)]

    def give_up(*_: object) -> None:
        threads.append(threading.current_thread().name)
        kept.clear()

    cushion.on_shortage(give_up)
    total.backward()
    checks.that(bool(torch.isfinite(x.grad).all()), "gradients that are no numbers")
    if checks.that(bool(threads), "memory did not run out"):
        checks.that(threads[0] != "MainThread", f"it ran out on {threads[0]}, before the backward pass")
    cushion.remove_callback(give_up)


def offloads(checks: Checks, cushion) -> None:
    state = {number: torch.full((400 * MIB // 4,), float(number), device="cuda") for number in range(8)}
    view = state[3][17:]
    optimizer = {"state": state}

    @cushion.offloader(priority=1, budget_ms=60_000)
    def held():
        return optimizer

    work = torch.full((2 * GIB // 4,), 5.0, device="cuda")
    checks.that(held.bytes_away >= GIB, f"only {held.bytes_away} bytes went to the host")
    checks.that("to the host" in (cushion.receipts()[-1].answers[0].said or ""), "the receipt does not tell")
    checks.equal(float(work[::4096].sum()), 5.0 * len(range(0, work.numel(), 4096)), "what was computed meanwhile")
    del work
    with held:
        for number, tensor in state.items():
            checks.equal(float((tensor - number).abs().max()), 0.0, f"the distance of tensor {number}")
        checks.equal(view.data_ptr(), state[3].data_ptr() + 17 * 4, "where the view is")
    checks.equal(held.bytes_away, 0, "bytes away at the end")
    held.remove()


def body(checks: Checks, given: argparse.Namespace) -> dict:
    if given.policy == "native":
        return {}
    import cushion

    torch.cuda.set_per_process_memory_fraction(CAP / torch.cuda.get_device_properties(0).total_memory)
    parts = (raises, overruns, allocates_and_frees, from_another_thread, while_gradients_are_computed, offloads)
    for part in parts:
        settle()
        checks.part(part, checks, cushion)
    settle()
    checks.equal(torch.cuda.memory_allocated(), 0, "bytes left behind")
    return {}


if __name__ == "__main__":
    main(body, parser(__doc__))
