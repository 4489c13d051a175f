"""Frees memory while another stream still reads it: with protection, every run reads the right data.

    python tests/gpu/race.py [--policy P] [--repeats 50]

A tensor is written on one stream and read on another, after a long kernel. It is freed before that read, and its memory
is allocated again and overwritten on the first stream. With `record_stream`, with one stream waiting for the other, or
with both, the read has to see the old values each time. Without protection the program has a race: at least one run has
to read wrong data, otherwise nothing was tested.
"""

from __future__ import annotations

from harness import Checks, main, parser, require_gpu, say, settle

require_gpu()

import torch  # noqa: E402

# About 5 ms at 2 GHz: the freed memory is overwritten well before the read.
SLEEP_CYCLES = 10_000_000

# name: (record_stream, wait_stream)
WAYS = {
    "unprotected": (False, False),
    "record_stream": (True, False),
    "wait_stream": (False, True),
    "both": (True, True),
}

# A block of the small pool, and one of the large pool.
LENGTHS = (1024, 4 << 20)


def attempt(length: int, record: bool, wait: bool, s1, s2) -> tuple[bool, bool]:
    """Runs the program once. Returns whether the read was right, and whether the memory was reused."""
    with torch.cuda.stream(s1):
        x = torch.full((length,), 1.0, device="cuda")
        x *= 2
        written = s1.record_event()
    with torch.cuda.stream(s2):
        torch.cuda._sleep(SLEEP_CYCLES)
        s2.wait_event(written)
        y = x * 3
    if record:
        x.record_stream(s2)
    if wait:
        s1.wait_stream(s2)
    address = x.data_ptr()
    del x
    with torch.cuda.stream(s1):
        other = torch.full((length,), 31.0, device="cuda")
    reused = other.data_ptr() == address
    torch.cuda.synchronize()
    return bool((y == 6).all()), reused


def body(checks: Checks, arguments) -> dict:
    s1, s2 = torch.cuda.Stream(), torch.cuda.Stream()
    for length in LENGTHS:
        # Loads kernels and allocates y's memory before the measured runs: both could wait for the device.
        attempt(length, True, True, s1, s2)
    figures: dict[str, dict[str, int]] = {}
    for name, (record, wait) in WAYS.items():
        wrong = reused = 0
        for i in range(arguments.repeats):
            right, same = attempt(LENGTHS[i % len(LENGTHS)], record, wait, s1, s2)
            wrong += not right
            reused += same
        figures[name] = {"wrong": wrong, "reused": reused}
        say(f"{name}: wrong {wrong} times of {arguments.repeats}, memory reused at once {reused} times")
    checks.that(figures["unprotected"]["wrong"] > 0, "the unprotected program never went wrong")
    for name in ("record_stream", "wait_stream", "both"):
        checks.equal(figures[name]["wrong"], 0, f"how often {name} was wrong")
    checks.equal(figures["record_stream"]["reused"], 0, "how often recorded memory was reused while read")
    settle()
    active = torch.cuda.memory_stats()["active_bytes.all.current"]
    checks.equal(active, torch.cuda.memory_allocated(), "memory still held back once all work is done")
    return {"repeats": arguments.repeats, **figures}


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=50)
    main(body, options)
