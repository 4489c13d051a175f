"""The command `cushion`, as Python starts it."""

from __future__ import annotations

import json
import tempfile
import unittest
from pathlib import Path

import support

from cushion import _cushion

TRACE = str(support.TRACES / "stream_offload.pickle.gz")


class Command(unittest.TestCase):
    def cushion(self, *arguments: str, code: int = 0) -> str:
        done = support.python("-m", "cushion", *arguments, changes={"LD_PRELOAD": None}, timeout=120)
        self.assertEqual(done.returncode, code, done.stderr)
        return done.stdout if code == 0 else done.stderr

    def test_replay_verifies_a_trace(self) -> None:
        lines = self.cushion("replay", TRACE, "--verify", "--json", "--policy", "all").splitlines()
        found = [json.loads(line) for line in lines]
        self.assertEqual([one["policy"] for one in found], ["segments", "expandable", "paged"])
        segments, paged = found[0], found[2]
        self.assertGreater(segments["allocs"], 1000)
        self.assertEqual(segments["same_address"], segments["allocs"])
        self.assertIsNone(segments["oom"])
        self.assertIsNone(paged["same_address"])
        self.assertIsNone(paged["oom"])

    def test_replay_prints_text(self) -> None:
        self.assertIn("segments", self.cushion("replay", TRACE))

    def test_replay_on_a_device_that_is_too_small(self) -> None:
        self.cushion("replay", TRACE, "--capacity", "4GiB", code=1)

    def test_help_and_version(self) -> None:
        self.assertIn("replay", self.cushion("--help"))
        self.assertIn(_cushion.__version__, self.cushion("--version"))

    def test_options_is_the_documentation(self) -> None:
        self.assertEqual(self.cushion("options"), (support.ROOT / "docs" / "options.md").read_text())

    def test_bad_usage_and_missing_files(self) -> None:
        self.assertIn("no_such_command", self.cushion("no_such_command", code=2))
        self.assertIn("no_such_file", self.cushion("replay", "no_such_file", code=2))

    def test_from_the_module(self) -> None:
        done = support.python(
            "-c", "import sys; from cushion import _cushion; sys.exit(_cushion.command(['cushion', '--version']))"
        )
        self.assertEqual((done.returncode, done.stdout), (0, f"cushion {_cushion.__version__}\n"))
        done = support.python(
            "-c", "import sys; from cushion import _cushion; sys.exit(_cushion.command(['cushion', 'nope']))"
        )
        self.assertEqual(done.returncode, 2)

    def test_arguments_that_are_not_utf8(self) -> None:
        with self.assertRaises(TypeError):
            _cushion.command(["cushion", 1])  # type: ignore[list-item]

    def test_a_broken_pipe_prints_no_traceback(self) -> None:
        import subprocess
        import sys

        with subprocess.Popen(
            [sys.executable, "-m", "cushion", "options"],
            env=support.environment({"LD_PRELOAD": None}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            process.stdout.close()  # type: ignore[union-attr]
            errors = process.stderr.read().decode()  # type: ignore[union-attr]
        self.assertNotIn("panicked", errors)
        self.assertNotIn("Traceback", errors)

    def test_pickle_reads_what_convert_writes(self) -> None:
        import pickle

        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder, "out.pickle")
            self.cushion("convert", TRACE, str(target))
            with target.open("rb") as file:
                found = pickle.load(file)
        self.assertEqual({"segments", "device_traces"} - set(found), set())


if __name__ == "__main__":
    unittest.main()
