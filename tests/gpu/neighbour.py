"""Another process takes most of the GPU for a while: with PyTorch's allocator the program dies, with Cushion it waits.

    python tests/gpu/neighbour.py [--policy P] [--gib 110] [--seconds 20]

The neighbour holds `--gib` GiB for `--seconds` seconds. Meanwhile a program allocates a third of the GPU in many
tensors, with work on each. With PyTorch's allocator it has to be refused. With Cushion, with a budget of a minute for
each request, it has to finish, and its receipt has to say that it waited."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

from harness import GIB, Checks, child_environment, itself, main, parser, require_gpu, say, short

PIECE_GIB = 2


def hold(gib: int, seconds: float) -> None:
    """Runs the neighbour."""
    import torch

    held = torch.empty(gib * GIB, dtype=torch.uint8, device="cuda")
    held[::4096] = 1
    torch.cuda.synchronize()
    print("holds", flush=True)
    time.sleep(seconds)


def work(policy: str) -> dict:
    """Runs the program."""
    import torch

    if policy != "native":
        import cushion

        cushion.install(policy=policy, wait_ms=60_000)
    pieces = int(torch.cuda.get_device_properties(0).total_memory / 3 / GIB / PIECE_GIB)
    began = time.monotonic()
    found: dict = {"oom": None, "pieces": 0, "wanted": pieces}
    kept = []
    try:
        for number in range(pieces):
            piece = torch.full((PIECE_GIB * GIB // 4,), float(number), device="cuda")
            kept.append(piece)
            found["pieces"] = number + 1
        found["sum"] = sum(float(piece[-1]) for piece in kept)
    except torch.OutOfMemoryError as error:
        found["oom"] = short(error, 2000)
    found["seconds"] = round(time.monotonic() - began, 2)
    if policy != "native":
        found["receipts"] = [str(receipt) for receipt in cushion.receipts()]
        found["survived_by"] = [receipt.survived_by for receipt in cushion.receipts()]
    return found


def beside_a_neighbour(policy: str, given: argparse.Namespace) -> dict:
    command = [sys.executable, sys.argv[0], "--hold", str(given.gib), "--seconds", str(given.seconds)]
    with subprocess.Popen(command, env=child_environment(), stdout=subprocess.PIPE, text=True) as neighbour:
        try:
            assert neighbour.stdout is not None
            if neighbour.stdout.readline().strip() != "holds":
                raise RuntimeError("the neighbour got no memory")
            return itself("--work", policy)
        finally:
            neighbour.kill()


def body(checks: Checks, given: argparse.Namespace) -> dict:
    native = beside_a_neighbour("native", given)
    say(f"native: {native}")
    checks.that(native["oom"] is not None, "PyTorch's allocator was not refused: the neighbour is too small")
    ours = beside_a_neighbour(given.policy, given)
    say(f"{given.policy}: {ours}")
    checks.equal(ours["oom"], None, "refused under Cushion")
    checks.equal(ours["pieces"], ours["wanted"], "pieces")
    checks.that("wait" in ours["survived_by"], f"nothing was waited for: {ours['receipts']}")
    return {
        "told": f"beside {given.gib} GiB for {given.seconds:g} s: PyTorch dies with {native['pieces']} of "
        f"{native['wanted']} pieces, Cushion waits and has all after {ours['seconds']} s "
        f"({'; '.join(ours['receipts'])})"
    }


if __name__ == "__main__":
    require_gpu()
    options = parser(__doc__)
    options.add_argument("--gib", type=int, default=110)
    options.add_argument("--seconds", type=float, default=20)
    options.add_argument("--hold", type=int, help=argparse.SUPPRESS)
    options.add_argument("--work", help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.hold:
        hold(asked.hold, asked.seconds)
    elif asked.work:
        print(json.dumps(work(asked.work)), flush=True)
    else:
        main(body, options, uses_gpu=False)
