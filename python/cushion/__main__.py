"""The `cushion` command. The subcommand `run` is implemented in Python, all others in Rust."""

from __future__ import annotations

import signal
import sys

from . import _cushion, _run


def main() -> int:
    arguments = sys.argv[1:]
    if arguments[:1] == ["run"]:
        return _run.main(arguments[1:])
    # Python's own handler would act only after a long replay has ended.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return _cushion.command(["cushion", *arguments])


if __name__ == "__main__":
    sys.exit(main())
