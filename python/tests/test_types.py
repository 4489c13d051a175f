"""Types, as a program with PyTorch sees them: mypy checks the examples and `typed_uses.py` in strict mode, with
PyTorch's own types. A decorated function keeps its signature, and wrong uses are errors."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import support

EXAMPLES = sorted((support.ROOT / "examples" / "python").glob("*.py"))
TYPED_USES = support.HERE / "typed_uses.py"
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", support.ROOT / "target"))

FRAMEWORKS = ("accelerate", "lightning", "pytorch_lightning", "ray", "transformers")


def config() -> str:
    """Returns a strict configuration, except for libraries without types. Some functions of PyTorch, such as
    `Tensor.backward`, have none. Frameworks may not be installed, so their types are unknown, also those of base
    classes and decorators in the examples. The package itself is checked separately, without PyTorch."""
    uses = re.compile(rf"^\s*(?:import|from) (?:{'|'.join(FRAMEWORKS)})\b", re.MULTILINE)
    examples = ",".join(path.stem for path in EXAMPLES if uses.search(path.read_text()))
    return f"""
[mypy]
strict = true
untyped_calls_exclude = torch
[mypy-cushion.*,gcAllocator.*,custom_cuda_allocator.*]
follow_imports = silent
[mypy-{",".join(f"{name}.*" for name in FRAMEWORKS)}]
ignore_missing_imports = true
follow_imports = skip
[mypy-{examples}]
disallow_subclassing_any = false
disallow_untyped_decorators = false
warn_return_any = false
"""


LINE = re.compile(r"(?P<file>[^:]+):(?P<line>\d+): error: (?P<text>.*)")
EXPECTED = re.compile(r"# error: (.*)$")


def mypy() -> list[str] | None:
    """Returns the mypy command of this Python, or of the environment of `scripts/python.sh`."""
    if importlib.util.find_spec("mypy") is not None:
        return [sys.executable, "-m", "mypy"]
    tool = TARGET / "venv" / "bin" / "mypy"
    return [str(tool), "--python-executable", sys.executable] if tool.exists() else None


def why_no_mypy() -> str | None:
    if support.TORCH is None:
        return f"{sys.executable} has no torch, whose types are needed"
    if support.TORCH_VERSION < (2, 5):
        return f"torch {support.TORCH} has no torch.OutOfMemoryError"
    return None if mypy() else f"{sys.executable} has no mypy, and neither has {TARGET / 'venv'}"


@unittest.skipIf(why_no_mypy(), why_no_mypy() or "")
class Types(unittest.TestCase):
    found: dict[str, dict[int, str]]

    @classmethod
    def setUpClass(cls) -> None:
        """Checks all files at once: reading PyTorch takes most of the time. The cache is kept for the next run."""
        with tempfile.TemporaryDirectory() as folder:
            settings = Path(folder, "mypy.ini")
            settings.write_text(config())
            cache = TARGET / "mypy-with-torch" if TARGET.is_dir() else Path(folder, "cache")
            command = [*(mypy() or ()), "--config-file", str(settings), "--cache-dir", str(cache), "--no-color-output"]
            done = subprocess.run(
                [*command, *map(str, EXAMPLES), str(TYPED_USES)],
                env=support.environment({"MYPYPATH": support.PACKAGE}),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=folder,
            )
        # Status 1 means errors in the files.
        if done.returncode not in (0, 1):
            raise AssertionError(f"mypy ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        cls.found = {}
        for line in done.stdout.splitlines():
            error = LINE.match(line)
            if error is not None:
                lines = cls.found.setdefault(Path(error["file"]).name, {})
                number = int(error["line"])
                lines[number] = f"{lines[number]}; {error['text']}" if number in lines else error["text"]

    def test_every_example_passes(self) -> None:
        self.assertGreater(len(EXAMPLES), 5)
        for path in EXAMPLES:
            with self.subTest(path.name):
                self.assertEqual(self.found.get(path.name, {}), {})

    def test_wrong_uses_are_errors_and_all_others_pass(self) -> None:
        expected = {}
        for number, line in enumerate(TYPED_USES.read_text().splitlines(), 1):
            wrong = EXPECTED.search(line)
            if wrong is not None:
                expected[number] = wrong[1]
        self.assertGreater(len(expected), 10)
        found = self.found.get(TYPED_USES.name, {})
        for number, text in expected.items():
            with self.subTest(f"line {number}"):
                self.assertIn(text, found.get(number, "nothing is wrong"))
        self.assertEqual({number: text for number, text in found.items() if number not in expected}, {})

    def test_no_other_file_has_errors(self) -> None:
        self.assertLessEqual(set(self.found), {TYPED_USES.name, *(path.name for path in EXAMPLES)})


if __name__ == "__main__":
    unittest.main()
