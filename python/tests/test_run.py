"""`cushion run`: the program it starts, its environment, that torch gets Cushion once, and what happens if torch cannot
use Cushion."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import textwrap
import unittest
from pathlib import Path

import support

# `cushion.install` is replaced by a line of output: it is not tested here.
FAKE_TORCH = "import cushion\ncushion.install = lambda *_: print('install')\nprint('torch')\n"


class Case(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def write(self, name: str, text: str, mode: int = 0o644) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        path.chmod(mode)
        return path

    def cushion_run(self, *arguments: str, **changes: str | None) -> subprocess.CompletedProcess[str]:
        return support.python(
            "-m", "cushion", "run", *arguments, changes={"LD_PRELOAD": None, **changes}, cwd=self.folder
        )

    def assert_prints(self, lines: list[str], *arguments: str, **changes: str | None) -> None:
        done = self.cushion_run(*arguments, **changes)
        self.assertEqual((done.stdout.splitlines(), done.returncode), (lines, 0), done.stderr)


class Run(Case):
    # ---- which program ----

    def test_arguments_are_passed_unchanged_to_a_file(self) -> None:
        program = self.write("program.py", "import sys; print(sys.argv, __name__)")
        given = ["a b", "--policy", "best", "-m", "--help", "--", ""]
        self.assert_prints([f"{[str(program), *given]} __main__"], str(program), *given)

    def test_a_module(self) -> None:
        self.write("some/mod.py", "import sys; print(sys.argv[1:], __spec__.name)")
        self.assert_prints(["['-m', 'x'] some.mod"], "-m", "some.mod", "-m", "x")

    def test_a_command_on_the_path(self) -> None:
        self.write("bin/tool", f"#!/bin/sh\nexec {sys.executable} -c 'import sys; print(sys.argv[1:])' \"$@\"\n", 0o755)
        self.assert_prints(["['1', '2 3']"], "tool", "1", "2 3", PATH=f"{self.folder}/bin:{os.environ['PATH']}")

    def test_an_executable_file_is_executed(self) -> None:
        tool = self.write("tool", '#!/bin/sh\necho "shell $1"\n', 0o755)
        self.assert_prints(["shell x"], str(tool), "x")

    def test_an_executable_python_file_runs_under_this_python(self) -> None:
        program = self.write("program.py", "import sys; print(sys.executable)", 0o755)
        self.assert_prints([sys.executable], str(program))

    def test_exit_codes_and_signals_pass_through(self) -> None:
        program = self.write("program.py", "import sys; sys.exit(int(sys.argv[1]))")
        for code in (0, 1, 7, 255):
            self.assertEqual(self.cushion_run(str(program), str(code)).returncode, code)
        dies = self.write("dies.py", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)")
        self.assertEqual(self.cushion_run(str(dies)).returncode, -15)

    def test_missing_programs(self) -> None:
        done = self.cushion_run("no_such_program", "x")
        self.assertEqual(done.returncode, 2)
        self.assertIn("no_such_program", done.stderr)
        self.assertNotIn("Traceback", done.stderr)
        done = self.cushion_run()
        self.assertEqual(done.returncode, 2)
        self.assertIn("PROGRAM is missing", done.stderr)

    def test_help(self) -> None:
        done = self.cushion_run("--help")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        for word in ("--policy", "--conf", "--log", "--require", "-m", "PROGRAM", "torchrun"):
            self.assertIn(word, done.stdout)

    def test_a_bad_policy(self) -> None:
        done = self.cushion_run("--policy", "best", "x.py")
        self.assertEqual(done.returncode, 2)
        self.assertIn("best", done.stderr)

    # ---- settings ----

    def test_flags_become_variables(self) -> None:
        program = self.write(
            "p.py", "import os; print(*(os.environ.get('CUSHION_' + n) for n in ('POLICY', 'CONF', 'LOG')))"
        )
        self.assert_prints(["None None None"], str(program))
        self.assert_prints(
            ["expandable max_split_size_mb:64 1"],
            "--policy", "expandable", "--conf", "max_split_size_mb:64", "--log", str(program),
        )  # fmt: skip
        self.assert_prints(["segments None 0"], str(program), CUSHION_POLICY="segments", CUSHION_LOG="0")
        for policy in ("segments", "expandable", "paged"):
            self.assert_prints([f"{policy} None None"], f"--policy={policy}", str(program), CUSHION_POLICY="segments")
        other = self.write(
            "o.py", "import os; print(*(os.environ.get('CUSHION_' + n) for n in ('RECEIPTS', 'INJECT')))"
        )
        receipts = os.path.join(os.path.realpath(self.folder), "a.jsonl")
        self.assert_prints([f"{receipts} nth=5"], "--receipts", "a.jsonl", "--inject", "nth=5", str(other))
        done = self.cushion_run("--inject", "soon", str(other))
        self.assertEqual(done.returncode, 2)
        self.assertIn("`soon` is not a rule for injected failures", done.stderr)

    # ---- inside the program ----

    def test_torch_gets_cushion_once_after_its_import(self) -> None:
        self.write("lib/torch/__init__.py", FAKE_TORCH)
        self.write("lib/torch/nn.py", "")
        program = self.write(
            "p.py", "print('start')\nimport torch\nimport torch.nn\nimport torch\nprint(torch.nn.__name__)"
        )
        path = f"{self.folder}/lib:{support.environment()['PYTHONPATH']}"
        self.assert_prints(["start", "torch", "install", "torch.nn"], str(program), PYTHONPATH=path)

    def test_a_submodule_first(self) -> None:
        self.write("lib/torch/__init__.py", FAKE_TORCH)
        self.write("lib/torch/nn.py", "print('nn')")
        program = self.write("p.py", "import torch.nn")
        path = f"{self.folder}/lib:{support.environment()['PYTHONPATH']}"
        self.assert_prints(["torch", "install", "nn"], str(program), PYTHONPATH=path)

    def test_a_program_without_torch_does_not_load_cushion(self) -> None:
        program = self.write("p.py", "import sys; print('cushion' in sys.modules, 'torch' in sys.modules)")
        self.assert_prints(["False False"], str(program))

    def test_without_torch_the_program_gets_the_error_of_python(self) -> None:
        code = """
            import importlib.util, sys
            sys.path[:] = [entry for entry in sys.path if "site-packages" not in entry]
            print(importlib.util.find_spec("torch"))
            try:
                import torch
            except ModuleNotFoundError as error:
                print(error)
            """
        self.assert_prints(["None", "No module named 'torch'"], str(self.write("p.py", code)))

    def test_find_spec_of_torch_does_not_install(self) -> None:
        self.write("lib/torch/__init__.py", FAKE_TORCH)
        code = "import importlib.util\nprint(importlib.util.find_spec('torch') is not None)\nimport torch\n"
        path = f"{self.folder}/lib:{support.environment()['PYTHONPATH']}"
        self.assert_prints(["True", "torch", "install"], str(self.write("p.py", code)), PYTHONPATH=path)

    def test_an_error_in_the_import_of_torch_reaches_the_program(self) -> None:
        self.write("lib/torch/__init__.py", "raise OSError('a library is missing')")
        code = "try:\n    import torch\nexcept OSError as error:\n    print(error)\n"
        path = f"{self.folder}/lib:{support.environment()['PYTHONPATH']}"
        self.assert_prints(["a library is missing"], str(self.write("p.py", code)), PYTHONPATH=path)

    def test_after_a_failed_import_the_next_installs(self) -> None:
        self.write(
            "lib/torch/__init__.py", "import os\nif os.environ.pop('FAIL', None):\n    raise OSError\n" + FAKE_TORCH
        )
        code = "try:\n    import torch\nexcept OSError:\n    print('failed')\nimport torch\n"
        path = f"{self.folder}/lib:{support.environment()['PYTHONPATH']}"
        program = str(self.write("p.py", code))
        self.assert_prints(["failed", "torch", "install"], program, PYTHONPATH=path, FAIL="1")

    def test_processes_it_starts(self) -> None:
        self.write("lib/torch/__init__.py", FAKE_TORCH)
        code = """
            import subprocess, sys
            print("parent", flush=True)
            subprocess.run([sys.executable, "-c", "import torch"], check=True)
            """
        path = f"{self.folder}/lib:{support.environment()['PYTHONPATH']}"
        self.assert_prints(["parent", "torch", "install"], str(self.write("p.py", code)), PYTHONPATH=path)

    def test_spawned_workers(self) -> None:
        self.write("lib/torch/__init__.py", FAKE_TORCH)
        code = """
            import multiprocessing
            def work():
                import torch
            if __name__ == "__main__":
                worker = multiprocessing.get_context("spawn").Process(target=work)
                worker.start()
                worker.join()
                print(worker.exitcode)
            """
        path = f"{self.folder}/lib:{support.environment()['PYTHONPATH']}"
        self.assert_prints(["torch", "install", "0"], str(self.write("p.py", code)), PYTHONPATH=path)

    def test_a_hidden_sitecustomize_runs_too(self) -> None:
        self.write("lib/sitecustomize.py", "print('theirs', __name__)\nFLAG = 1\n")
        program = self.write("p.py", "import sitecustomize; print(hasattr(sitecustomize, '_AfterTorch'))")
        path = f"{self.folder}/lib:{support.environment()['PYTHONPATH']}"
        done = self.cushion_run(str(program), PYTHONPATH=path)
        # Once in the process that starts the program, and once in the program.
        self.assertEqual(done.stdout.splitlines()[-2:], ["theirs sitecustomize", "True"], done.stderr)
        self.assertEqual(done.stdout.count("theirs"), 1 + 1, done.stdout)

    def test_an_error_in_a_hidden_sitecustomize_is_shown(self) -> None:
        self.write("lib/sitecustomize.py", "import no_such_module_of_theirs")
        path = f"{self.folder}/lib:{support.environment()['PYTHONPATH']}"
        done = self.cushion_run(str(self.write("p.py", "print('on')")), PYTHONPATH=path)
        self.assertIn("no_such_module_of_theirs", done.stderr)
        self.assertEqual(done.stdout, "on\n")

    def test_the_path_of_the_program_is_kept(self) -> None:
        self.write("lib/thing.py", "print('thing')")
        path = f"{self.folder}/lib:{support.environment()['PYTHONPATH']}"
        self.assert_prints(["thing"], str(self.write("p.py", "import thing")), PYTHONPATH=path)


# The attributes that `cushion.install()` checks first.
TORCHES = {
    "without CUDA": {"version": "2.11.0+cpu", "cuda": None},
    "too old": {"version": "2.2.2+cu121", "cuda": "12.1"},
    "ROCm": {"version": "2.11.0+rocm6", "hip": "6.0"},
    "in use already": {"version": "2.11.0+cu130", "cuda": "13.0", "initialised": True},
}


def torch_that_refuses(version: str, cuda: str | None = None, hip: str | None = None, initialised: bool = False) -> str:
    """Returns a fake torch. Like PyTorch, it cannot be imported again after a failed import."""
    return f"""
        import sys, types
        if hasattr(sys, "torch_was_here"):
            raise RuntimeError("a second torch")
        sys.torch_was_here = True
        __version__ = {version!r}
        version = types.SimpleNamespace(cuda={cuda!r}, hip={hip!r})
        cuda = types.SimpleNamespace(is_initialized=lambda: {initialised!r})
        """


class WhereItCannot(Case):
    """Programs whose torch cannot use Cushion run with PyTorch's own allocator, with one message."""

    PROGRAM = """
        import torch
        print("first", torch.__version__)
        import torch
        import cushion
        print("second", cushion.is_installed())
        """

    def path(self) -> str:
        return f"{self.folder}/lib:{support.environment()['PYTHONPATH']}"

    def run_with(self, torch: str, *arguments: str, **changes: str | None) -> subprocess.CompletedProcess[str]:
        self.write("lib/torch/__init__.py", torch)
        program = str(self.write("p.py", self.PROGRAM))
        return self.cushion_run(*arguments, program, **{"PYTHONPATH": self.path(), **changes})

    def test_the_program_goes_on(self) -> None:
        for why, torch in TORCHES.items():
            with self.subTest(why):
                done = self.run_with(torch_that_refuses(**torch))
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertEqual(done.stdout.splitlines(), [f"first {torch['version']}", "second False"])
                (line,) = done.stderr.splitlines()
                self.assertRegex(
                    line, rf"^cushion: process \d+ \({re.escape(sys.executable)}\) runs with PyTorch's own"
                )
                self.assertIn(why, line)

    def test_an_invalid_option(self) -> None:
        """The program has changed the variable after the check of `cushion run`."""
        self.write("lib/torch/__init__.py", torch_that_refuses(**TORCHES["without CUDA"]))
        program = self.write("p.py", "import os\nos.environ['CUSHION_POLICY'] = 'best'\nimport torch\nprint('on')")
        done = self.cushion_run(str(program), PYTHONPATH=self.path())
        self.assertEqual((done.stdout, done.returncode), ("on\n", 0), done.stderr)
        self.assertIn("runs with PyTorch's own allocator: ValueError: CUSHION_POLICY cannot be `best`", done.stderr)

    def test_a_package_that_does_not_load(self) -> None:
        self.write("lib/torch/__init__.py", "")
        self.write("lib/cushion/__init__.py", "raise ImportError('built for another machine')")
        child = self.write("child.py", "import torch\nprint('on')")
        program = self.write("p.py", self.START.format(path=f"{self.folder}/lib", program=str(child)))
        done = self.cushion_run(str(program))
        self.assertEqual((done.stdout, done.returncode), ("on\n", 0), done.stderr)
        self.assertIn("own allocator: ImportError: built for another machine", done.stderr)

    def test_without_standard_error(self) -> None:
        self.write("lib/torch/__init__.py", torch_that_refuses(**TORCHES["ROCm"]))
        program = self.write("p.py", "import sys\nsys.stderr = None\nimport torch\nprint('on')")
        done = self.cushion_run(str(program), PYTHONPATH=self.path())
        self.assertEqual((done.stdout, done.returncode), ("on\n", 0))

    def test_warnings_that_are_errors(self) -> None:
        """Cushion is installed, and its warning becomes a message."""
        self.write(
            "lib/torch/__init__.py",
            "import cushion\ndef no():\n    raise UserWarning('it is slow')\ncushion.install = no\n",
        )
        done = self.cushion_run(str(self.write("p.py", "import torch\nprint('on')")), PYTHONPATH=self.path())
        self.assertEqual((done.stdout, done.stderr), ("on\n", "cushion: it is slow\n"))

    def test_required(self) -> None:
        torch = torch_that_refuses(**TORCHES["without CUDA"])
        for arguments, changes in ((["--require"], {}), ([], {"CUSHION_REQUIRED": "1"})):
            with self.subTest(arguments=arguments, changes=changes):
                done = self.run_with(torch, *arguments, **changes)
                self.assertEqual((done.returncode, done.stdout), (1, ""))
                (line,) = done.stderr.splitlines()
                self.assertRegex(line, r"^cushion: process \d+ .* ends, because Cushion is required: .* without CUDA")
        done = self.run_with(torch, CUSHION_REQUIRED="0")
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_required_reaches_processes_that_it_starts(self) -> None:
        self.write("lib/torch/__init__.py", torch_that_refuses(**TORCHES["too old"]))
        program = self.write(
            "p.py",
            "import subprocess, sys\nprint(subprocess.run([sys.executable, '-c', 'import torch']).returncode)",
        )
        done = self.cushion_run("--require", str(program), PYTHONPATH=self.path())
        self.assertEqual((done.stdout, done.returncode), ("1\n", 0), done.stderr)

    # ---- other environments ----

    # Starts a child whose path has the folder of `cushion run`, and this one.
    START = """
        import os, subprocess, sys
        ours = os.environ["PYTHONPATH"].split(os.pathsep)[0]
        env = {{**os.environ, "PYTHONPATH": os.pathsep.join([ours, {path!r}])}}
        sys.exit(subprocess.run([sys.executable, {program!r}], env=env).returncode)
        """

    def test_an_environment_without_cushion_gets_only_cushion(self) -> None:
        import importlib.util

        # The folder that `cushion run` finds the package in, with another package in it.
        found = importlib.util.find_spec("cushion")
        assert found is not None and found.submodule_search_locations is not None
        beside = self.folder / "packages"
        beside.mkdir()
        (beside / "cushion").symlink_to(found.submodule_search_locations[0])
        (beside / "gcAllocator").symlink_to(Path(found.submodule_search_locations[0]).parent / "gcAllocator")
        self.write("packages/neighbour.py", "")
        self.write("lib/torch/__init__.py", FAKE_TORCH)
        child = self.write(
            "child.py",
            """
            import importlib.util, sys
            before = sys.path[:]
            import torch
            import cushion._cushion, gcAllocator
            print(cushion.__file__.startswith(sys.argv[0].replace("child.py", "packages")))
            print(importlib.util.find_spec("neighbour"), sys.path == before)
            """,
        )
        program = self.write("p.py", self.START.format(path=f"{self.folder}/lib", program=str(child)))
        path = f"{beside}:{support.environment()['PYTHONPATH']}"
        self.assert_prints(["torch", "install", "True", "None True"], str(program), PYTHONPATH=path)

    def test_an_environment_with_its_own_cushion_uses_that(self) -> None:
        self.write("lib/torch/__init__.py", "print('torch')")
        self.write("lib/cushion/__init__.py", "def install():\n    print('its own')\n")
        child = self.write("child.py", "import torch")
        program = self.write("p.py", self.START.format(path=f"{self.folder}/lib", program=str(child)))
        self.assert_prints(["torch", "its own"], str(program))


@support.needs_torch
class WithTorch(unittest.TestCase):
    """With PyTorch itself."""

    def test_a_program_that_goes_on_without_cushion(self) -> None:
        code = """
            import torch
            print(torch.cuda.get_allocator_backend())
            import torch
            print(torch.empty(16, device="cuda").numel(), torch.cuda.get_allocator_backend())
            """
        for changes, backend in (({}, "pluggable"), ({"CUSHION_SIMULATE": "1GiB"}, "native")):
            with tempfile.TemporaryDirectory() as folder:
                program = Path(folder, "p.py")
                program.write_text(textwrap.dedent(code))
                done = support.python("-m", "cushion", "run", str(program), changes=changes)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(done.stdout.splitlines(), [backend, f"16 {backend}"])
            self.assertEqual("own allocator: PyTorch cannot use simulated memory" in done.stderr, bool(changes))


if __name__ == "__main__":
    unittest.main()
