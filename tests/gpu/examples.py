"""Every example, and the programs that test the C interface, on the GPU.

    python tests/gpu/examples.py [--policy P]

The built examples in Rust, C and C++ are in gpu-kit/examples, those in Python in examples/python. Each has to exit with
0 and print `ok` in its last line, and must not be skipped or run on a simulated device; examples for packages that are
not installed may be skipped. The policy is passed as CUSHION_POLICY.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from harness import Checks, main, parser, require_gpu, say, short

require_gpu()

ROOT = Path(__file__).resolve().parents[2]
BUILT = ROOT / "gpu-kit" / "examples"
# These have to exist: a kit that lacks one fails.
EXPECTED = {"buffers", "kernel", "capi_c", "capi_cpp", "c_alloc", "cpp_buffers"}
# Examples for packages that may not be installed.
OPTIONAL = {"accelerate_habits.py": "Accelerate", "lightning_habits.py": "Lightning"}


def commands() -> dict[str, list[str]]:
    """Returns the commands to run, by name."""
    built = {path.name: [str(path)] for path in sorted(BUILT.glob("*")) if os.access(path, os.X_OK)}
    python = {path.name: [sys.executable, str(path)] for path in sorted((ROOT / "examples" / "python").glob("*.py"))}
    return built | python


def run(checks: Checks, name: str, command: list[str], environment: dict[str, str]) -> None:
    say(name)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, cwd=ROOT)
    said = done.stdout + done.stderr
    if not checks.equal(done.returncode, 0, f"exit code of {name}"):
        say(said[-3000:])
        return
    lines = done.stdout.strip().splitlines()
    if name in OPTIONAL and lines == [f"SKIPPED: {OPTIONAL[name]} is not installed"]:
        say(lines[0])
        return
    checks.equal(lines[-1] if lines else "", "ok", f"last line of {name}")
    for word in ("SKIPPED", "imulated"):
        checks.that(word not in said, f"{name} did not run on the GPU: {short(said)}")


def body(checks: Checks, given: argparse.Namespace) -> dict:
    environment = {**os.environ, "CUSHION_POLICY": given.policy}
    found = commands()
    missing = EXPECTED - found.keys()
    checks.that(not missing, f"not in gpu-kit/examples: {', '.join(sorted(missing))}")
    for name, command in found.items():
        checks.part(run, checks, name, command, environment)
    return {"examples": len(found)}


if __name__ == "__main__":
    main(body, parser(__doc__))
