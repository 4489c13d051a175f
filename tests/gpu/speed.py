"""Measures the CPU time of a malloc and a free with each allocator, side by side.

    python tests/gpu/speed.py [--casts N] [--rounds N]

There is one process per mode, all alive at once. In each round every mode measures the same line of `cca_speed.py` for
a few hundredths of a second, on the same cores, one mode after the other: a processor that is slow for a second is slow
for all modes. One process may be slower than another only because of its memory layout, so this is repeated with
several sets (casts) of processes. Cushion's share is the median over all rounds of its time divided by PyTorch's in the
same round; the quartiles show the spread. Prints one JSON line."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from groups import MODES, TWINS
from harness import require_gpu, say

PROGRAM = Path(__file__).resolve().parent / "cca_speed.py"
CASTS = 5
ROUNDS = 10
# The first turns of a line allocate the memory that later turns reuse.
UNCOUNTED = 2

Turns = dict[str, list[float]]


class Player:
    """A process that measures on request."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        command = [sys.executable, str(PROGRAM), *MODES[mode], "--turns"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def lines(self) -> list[str]:
        """Waits until the process is ready. Returns its lines."""
        return self.answer()["lines"]

    def answer(self) -> dict:
        # Messages of libraries may come before the answer.
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(f"{self.mode} ended with {self.process.wait()}")

    def turn(self, line: str, cores: list[int]) -> float:
        print(json.dumps({"line": line, "cores": cores}), file=self.process.stdin, flush=True)
        return self.answer()["ns"]

    def end(self) -> None:
        self.process.stdin.close()
        if self.process.wait(60) != 0:
            raise SystemExit(f"{self.mode} ended with {self.process.returncode}")


def cores_for(line: str, number: int, allowed: list[int]) -> list[int]:
    """Returns the cores of a round, the same for every mode. They differ between rounds, because some may be busy."""
    count = 4 if line == "4 threads" else 1
    return [allowed[(number * count + i) % len(allowed)] for i in range(count)]


def play(players: list[Player], line: str, rounds: int, allowed: list[int]) -> Turns:
    """Returns the nanoseconds of each mode, by round."""
    times: Turns = {player.mode: [] for player in players}
    for number in range(rounds + UNCOUNTED):
        # The order of the modes rotates.
        shift = number % len(players)
        for player in players[shift:] + players[:shift]:
            took = player.turn(line, cores_for(line, number, allowed))
            if number >= UNCOUNTED:
                times[player.mode].append(took)
    return times


def figures(times: Turns) -> dict[str, dict]:
    """Returns the median of each mode for one line, and the share of Cushion's modes with its quartiles."""
    result: dict[str, dict] = {mode: {"ns": round(statistics.median(took), 1)} for mode, took in times.items()}
    for mode, twin in TWINS.items():
        shares = [ours / theirs for ours, theirs in zip(times[mode], times[twin], strict=True)]
        low, middle, high = statistics.quantiles(shares, n=4, method="inclusive")
        result[mode] |= {"share": round(middle, 3), "middle_half": [round(low, 3), round(high, 3)]}
    return result


def cast(whole: dict[str, Turns], rounds: int, allowed: list[int]) -> None:
    """Starts a process for each mode, and adds its measurements of every line."""
    players = [Player(mode) for mode in MODES]
    lines = [player.lines() for player in players][0]
    for line in lines:
        times = whole.setdefault(line, {mode: [] for mode in MODES})
        for mode, took in play(players, line, rounds, allowed).items():
            times[mode] += took
    for player in players:
        player.end()


def build() -> None:
    """Runs one process alone, which builds the extension that all use."""
    first = Player("native")
    first.lines()
    first.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--casts", type=int, default=CASTS)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of each cast")
    given = parser.parse_args()
    began = time.monotonic()
    allowed = sorted(os.sched_getaffinity(0))
    build()
    whole: dict[str, Turns] = {}
    for number in range(1, given.casts + 1):
        say(f"cast {number} of {given.casts}")
        cast(whole, given.rounds, allowed)
    lines = {line: figures(times) for line, times in whole.items()}
    result = {"program": "speed.py", "casts": given.casts, "rounds": given.rounds, "lines": lines}
    print(json.dumps({**result, "seconds": round(time.monotonic() - began, 1)}), flush=True)


if __name__ == "__main__":
    require_gpu()
    main()
