"""Shared by the programs of this folder: arguments, the installation of Cushion, and the result as one JSON line.

A program calls `require_gpu()` before it imports torch, and passes its body and its argument parser to `main`. Messages
go to stderr; stdout gets one JSON line at the end, with `"ok"`, or with `"skipped"` and the reason if torch or a GPU is
missing. The exit code is 1 if a check failed.

`--policy native` keeps PyTorch's own allocator. The checks of a program hold there too, unless it says otherwise: this
tests the program itself.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.util
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from groups import POLICIES
from outcome import last_json

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def short(text: object, most: int = 300) -> str:
    """Shortens a text to one line of at most `most` characters."""
    line = " ".join(str(text).split())
    return line if len(line) <= most else line[: most - 1] + "…"


def why_not() -> str | None:
    """Returns why nothing can run here, or None. CUDA stays uninitialized, so that an allocator can be installed."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    return None if torch.cuda.is_available() else "there is no CUDA GPU"


def require_gpu() -> None:
    """Ends the program with the reason if it cannot run here."""
    reason = why_not()
    if reason is not None:
        print(json.dumps({"skipped": reason}), flush=True)
        sys.exit(0)


class Checks:
    """Counts checks and collects failures. The program goes on after a failed check."""

    def __init__(self) -> None:
        self.passed = 0
        self.failures: list[str] = []

    def that(self, condition: bool, wrong: str) -> bool:
        """Records the failure `wrong` unless the condition holds."""
        if condition:
            self.passed += 1
        else:
            self.failures.append(wrong)
            say(f"WRONG: {wrong}")
        return bool(condition)

    def equal(self, got: Any, wanted: Any, what: str) -> bool:
        return self.that(got == wanted, f"{what} is {got!r}, not {wanted!r}")

    def at_most(self, got: float, most: float, what: str) -> bool:
        return self.that(got <= most, f"{what} is {got}, more than {most}")

    def part(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Runs one part of a program. An exception is a failure of that part only."""
        say(function.__name__)
        try:
            return function(*arguments)
        except Exception as error:
            traceback.print_exc()
            self.failures.append(f"{function.__name__}: {type(error).__name__}: {short(error)}")
            return None


def install(policy: str) -> None:
    """Makes Cushion PyTorch's allocator; keeps PyTorch's own for the policy `native`."""
    if policy != "native":
        import cushion

        cushion.install(policy=policy)


def settle() -> None:
    """Waits for all work and releases all cached memory: the rest is in use."""
    import torch

    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def new_stream() -> int:
    """Creates a stream without PyTorch."""
    import torch

    stream = ctypes.c_ulonglong(0)
    status = torch.cuda.cudart().cudaStreamCreate(ctypes.addressof(stream))
    if int(status) != 0:
        raise RuntimeError(f"cudaStreamCreate: {status}")
    return stream.value


def destroy_stream(stream: int) -> None:
    import torch

    status = torch.cuda.cudart().cudaStreamDestroy(stream)
    if int(status) != 0:
        raise RuntimeError(f"cudaStreamDestroy: {status}")


def child_environment(**more: str) -> dict[str, str]:
    """Returns the environment for a process with the same import path, and with harness.py on it."""
    path = os.pathsep.join([os.path.dirname(os.path.abspath(__file__)), *filter(None, sys.path)])
    return {**os.environ, "PYTHONPATH": path, **more}


def child(command: list[str], **more: str) -> subprocess.CompletedProcess:
    """Runs a process with the same import path, and with harness.py on it."""
    return subprocess.run(command, env=child_environment(**more), capture_output=True, text=True, timeout=120)


def itself(*arguments: str, **more: str) -> dict[str, Any]:
    """Runs this program again in another process, with these arguments. Returns its line of JSON."""
    return line_of(child([sys.executable, sys.argv[0], *arguments], **more))


def workload(*arguments: str, **more: str) -> dict[str, Any]:
    """Runs `workloads.py` with these arguments. Returns its line of JSON."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "workloads.py")
    return line_of(child([sys.executable, path, *arguments], **more))


def line_of(done: subprocess.CompletedProcess) -> dict[str, Any]:
    """Returns the last line of JSON of a program."""
    found = last_json(done.stdout)
    if found is None:
        said = f"{' '.join(done.args[1:])} ended with {done.returncode} and no line: {short(done.stderr[-600:])}"
        raise RuntimeError(said)
    return found


def consistent(checks: Checks, policy: str) -> None:
    """Checks the engine's invariants."""
    if policy == "native":
        return
    import cushion._cushion

    try:
        cushion._cushion.check_invariants(0)
    except Exception as error:
        checks.that(False, f"the engine is not consistent: {short(error)}")


def parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the arguments that every program takes."""
    new = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    new.add_argument("--policy", choices=(*POLICIES, "native"), default="paged")
    return new


def main(
    body: Callable[[Checks, argparse.Namespace], dict[str, Any]],
    arguments: argparse.ArgumentParser,
    uses_gpu: bool = True,
) -> None:
    """Runs a program's body, and ends the process normally, so that a crash at exit is noticed. With `uses_gpu=False`
    it does not use the GPU itself."""
    given = arguments.parse_args()
    checks = Checks()
    figures: dict[str, Any] = {}
    began = time.monotonic()
    try:
        if uses_gpu:
            install(given.policy)
        figures = body(checks, given)
        if uses_gpu:
            settle()
            consistent(checks, given.policy)
    except Exception as error:
        traceback.print_exc()
        checks.failures.append(f"{type(error).__name__}: {short(error)}")
    ok = not checks.failures
    line = {
        "program": os.path.basename(sys.argv[0]),
        "policy": given.policy,
        "ok": ok,
        "checks": checks.passed,
        "seconds": round(time.monotonic() - began, 1),
        **figures,
    }
    if not ok:
        line["failures"] = checks.failures
    print(json.dumps(line), flush=True)
    sys.exit(0 if ok else 1)
