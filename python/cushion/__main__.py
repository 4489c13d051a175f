"""The `cushion` command. `run` is Python's; the rest is in Rust."""

from __future__ import annotations

import signal
import sys

from . import _cushion, _run


def main() -> int:
    arguments = sys.argv[1:]
    if arguments[:1] == ["run"]:
        return _run.main(arguments[1:])
    # Python would note the signal and wait for the end of a long replay.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return _cushion.command(["cushion", *arguments])


if __name__ == "__main__":
    sys.exit(main())
