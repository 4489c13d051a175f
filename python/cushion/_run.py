"""`cushion run`: starts a program with Cushion as PyTorch's allocator, without a change to the program.

The program, and every Python process that it starts, finds `_site/sitecustomize.py` first on its path. It installs
Cushion right after the program has imported torch. If that fails, it writes the reason to standard error, and the
program goes on with PyTorch's own allocator, unless `--require` is given."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

from . import _cushion

SITE = str(Path(__file__).parent / "_site")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="cushion run",
        description="Run a program with Cushion as the allocator of its PyTorch, with no change to it.",
        usage="cushion run [--policy POLICY] [--conf CONF] [--log] [--receipts FILE] [--inject RULES] [--require] "
        "PROGRAM [ARGUMENT ...]",
        epilog="PROGRAM is a Python file, -m and a module, or a command such as torchrun; processes that it "
        "starts use Cushion too.",
    )
    parser.add_argument("--policy", help="how memory is laid out: paged (the default), segments or expandable")
    parser.add_argument("--conf", help="options as key:value,key:value")
    parser.add_argument("--log", action="store_true", help="messages to standard error")
    parser.add_argument("--receipts", metavar="FILE", help="write every shortage there, as a line of JSON")
    parser.add_argument(
        "--inject", metavar="RULES", help="make allocations fail, to test the program: nth=5, every=1000"
    )
    parser.add_argument(
        "--require",
        action="store_true",
        help="end every process whose torch cannot use Cushion; without this it goes on with a message",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="PROGRAM is a module")
    parser.add_argument("program", metavar="PROGRAM", nargs=argparse.REMAINDER)
    asked = parser.parse_args(arguments)
    if not asked.program:
        parser.error("PROGRAM is missing: give a Python file, -m and a module, or a command")
    try:
        # Reports a wrong option now, before the program starts.
        _cushion.gather_settings(dict(os.environ), asked.policy, asked.conf, None, asked.receipts, asked.inject)
    except ValueError as error:
        parser.error(str(error))
    environment = dict(os.environ)
    for name, value in (
        ("CUSHION_POLICY", asked.policy),
        ("CUSHION_CONF", asked.conf),
        ("CUSHION_LOG", asked.log and "1"),
        # Absolute: the program may change its working directory.
        ("CUSHION_RECEIPTS", asked.receipts and os.path.abspath(asked.receipts)),
        ("CUSHION_INJECT", asked.inject),
        ("CUSHION_REQUIRED", asked.require and "1"),
    ):
        if value:
            environment[name] = value
    path = [SITE, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(path)
    _start(_command(asked.module, asked.program, parser), environment)


def _command(module: bool, program: list[str], parser: argparse.ArgumentParser) -> list[str]:
    first, rest = program[0], program[1:]
    if module:
        return [sys.executable, "-m", first, *rest]
    if os.path.isfile(first) and not (os.access(first, os.X_OK) and not first.endswith(".py")):
        return [sys.executable, first, *rest]
    found = shutil.which(first)
    if found is None:
        parser.error(f"there is no file and no command {first!r}")
    return [found, *rest]


def _start(command: list[str], environment: dict[str, str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, environment)
