"""Runs every piece of code in pages, docstrings and messages. `snippets.py` finds them, and has their setups."""

from __future__ import annotations

import functools
import gzip
import importlib
import os
import re
import shlex
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import snippets
import support
from simulated import Simulated
from snippets import Block
from support import MIB


def _test(program: list[Block]) -> Any:
    def test(self: support.ProcessCase) -> None:
        snippets.run(program)

    test.__doc__ = str(program[0])
    return support.process(timeout=180, STANDIN_CAPACITY=str(64 * support.GIB))(test)


def _tests(programs: dict[str, list[Block]]) -> dict[str, Any]:
    return {"test_" + re.sub(r"\W", "_", name): _test(program) for name, program in programs.items()}


def _of_pages() -> dict[str, list[Block]]:
    """Returns the programs of each page, named by the page and, if it has several, by their first lines."""
    found = {}
    for page in snippets.PAGES:
        for number, program in enumerate(snippets.programs(page)):
            found[page.stem if number == 0 else f"{page.stem} from line {program[0].line}"] = program
    return found


# Earlier versions of PyTorch have no torch.OutOfMemoryError.
needs_torch = unittest.skipIf((0, 0) < support.TORCH_VERSION < (2, 5), "what is shown is for torch 2.5 and later")
Pages = needs_torch(type("Pages", (support.TorchCase,), _tests(_of_pages())))
Docstrings = needs_torch(
    type("Docstrings", (support.TorchCase,), _tests({str(it[0].setup): it for it in snippets.docstrings()}))
)


class NotRun(unittest.TestCase):
    def test_blocks_that_are_not_run_are_python(self) -> None:
        for block in (block for page in snippets.PAGES for block in snippets.blocks(page)):
            if block.language == "python" and block.not_run is not None:
                with self.subTest(str(block)):
                    snippets.compiled(block)
                    self.skipTest(block.not_run or "it does not say why")

    def test_every_setup_has_a_block(self) -> None:
        programs = [program for page in snippets.PAGES for program in snippets.programs(page)]
        named = {block.setup for program in [*programs, *snippets.docstrings()] for block in program}
        self.assertLessEqual(set(snippets.SETUPS), named)

    def test_comments_are_for_blocks(self) -> None:
        """A comment that is misspelt, or not directly above a block, would have no effect."""
        for page in snippets.PAGES:
            blocks = snippets.blocks(page)
            meant = [it for it in blocks if it.setup is not None or it.not_run is not None or it.begins_program]
            with self.subTest(page.name):
                self.assertEqual([str(it) for it in meant if it.language != "python"], [])
                count = len(re.findall(r"<!-- *(?:setup|not run|another)", page.read_text()))
                self.assertEqual(
                    count,
                    sum((it.setup, it.not_run) != (None, None) for it in meant)
                    + sum(it.begins_program for it in meant),
                )


# ---- messages ----


@needs_torch
class Messages(support.TorchCase):
    """Refusals of every kind over the stand-in, with a device of 1024 units. The code in their messages is run."""

    UNIT = 16 * MIB
    changes = {"STANDIN_CAPACITY": str(1024 * UNIT)}

    def empty(self, units: int) -> Any:
        import torch

        return torch.empty(units * self.UNIT, dtype=torch.uint8, device="cuda")

    def refused(self, units: int) -> str:
        import torch

        with self.assertRaises(torch.cuda.OutOfMemoryError) as raised:
            self.empty(units)
        return str(raised.exception)

    def test_code_in_messages(self) -> None:
        torch = self.install(wait_ms=0)
        texts = [
            self.more_is_allowed(torch),
            self.memory_is_missing(),
            self.memory_is_in_pieces(),
            self.other_streams_are_at_work(torch),
            self.another_program_is_there(),
            self.refused(2048),
            self.made_up(),
            self.a_rung_is_left_out(),
            self.inside_a_capture(torch),
        ]
        for page in (it for page in snippets.PAGES for it in snippets.blocks(page)):
            if page.code.startswith("CUDA out of memory."):
                texts.append(page.code)
        found = {piece for text in texts for piece in snippets.pieces(text)}
        names: dict[str, Any] = {"cushion": importlib.import_module("cushion"), "torch": torch}
        for piece in sorted(found, key=str):
            with self.subTest(piece.code):
                piece.run(names)
        told = {piece.shape for piece in found if piece.kind not in ("name", "variable", "page")}
        self.assertEqual(told, snippets.TOLD_WITH_TORCH)

    def more_is_allowed(self, torch: Any) -> str:
        torch.cuda.set_per_process_memory_fraction(0.5)
        kept = self.empty(400)
        text = self.refused(200)
        torch.cuda.set_per_process_memory_fraction(1.0)
        del kept
        torch.cuda.empty_cache()
        return text

    def memory_is_missing(self) -> str:
        kept = self.empty(900)
        text = self.refused(500)
        del kept
        return text

    def memory_is_in_pieces(self) -> str:
        """The memory of one large tensor is divided, and every second part is free."""
        self.empty(900)
        kept = [self.empty(90) for _ in range(10)]
        del kept[::2]
        text = self.refused(300)
        del kept
        importlib.import_module("torch").cuda.empty_cache()
        return text

    def other_streams_are_at_work(self, torch: Any) -> str:
        standin, side = support.Standin(), torch.cuda.Stream()
        self.install(conf="wait_total_ms:5000")
        kept = self.empty(900)
        standin.launch(side.cuda_stream)
        kept.record_stream(side)
        del kept
        text = self.refused(500)
        # A callback does not wait, so more time would not help there.
        in_callback: list[str] = []
        cushion = importlib.import_module("cushion")
        callback = cushion.on_shortage(lambda *_: in_callback.append(self.refused(400)))
        self.refused(500)
        cushion.remove_callback(callback)
        self.assertIn("14.06 GiB wait for work on other streams.", in_callback[0])
        # Nor would it if the rungs that wait are skipped.
        with cushion.budget(skip=["events", "wait"]):
            self.assertIn("14.06 GiB wait for work on other streams.", self.refused(500))
        standin.finish_all()
        self.install(conf="wait_total_ms:unlimited")
        torch.cuda.empty_cache()
        return text

    def another_program_is_there(self) -> str:
        support.Standin().tenant(900 * self.UNIT)
        text = self.refused(500)
        support.Standin().tenant(0)
        self.assertIn("end one of them, or wait longer with CUSHION_WAIT_MS=", text)
        return text

    def made_up(self) -> str:
        with importlib.import_module("cushion").inject("nth=1"):
            return self.refused(1)

    def a_rung_is_left_out(self) -> str:
        kept = self.empty(900)
        with importlib.import_module("cushion").budget(skip="callbacks"):
            text = self.refused(500)
        self.assertIn("may be enough: callbacks.", text)
        del kept
        return text

    def inside_a_capture(self, torch: Any) -> str:
        kept = self.empty(900)
        with self.assertRaises(torch.cuda.OutOfMemoryError) as raised, torch.cuda.graph(torch.cuda.CUDAGraph()):
            self.empty(500)
        self.assertIn("Run the captured work once before", str(raised.exception))
        del kept
        return str(raised.exception)


class MessagesWithoutTorch(Simulated):
    """On simulated devices PyTorch cannot be used, and `cushion.install()` raises."""

    def test_code_in_messages(self) -> None:
        conf = "per_process_memory_fraction:0.5,paged:False"
        self.engine.start(self.engine.gather_settings({}, conf=conf))
        texts = []
        kept = self.engine.allocate(400 * MIB)
        texts.append(str(self.refused(200 * MIB)))
        self.engine.deallocate(kept)
        whole = self.engine.allocate(450 * MIB)
        self.engine.deallocate(whole)
        kept = [self.engine.allocate(45 * MIB) for _ in range(10)]
        for address in kept[::2]:
            self.engine.deallocate(address)
        texts.append(str(self.refused(150 * MIB)))
        with self.cushion.inject("nth=1"):
            texts.append(str(self.refused(MIB)))
        found = {piece for text in texts for piece in snippets.pieces(text)}
        for piece in sorted(found, key=str):
            with self.subTest(piece.code):
                piece.run({"cushion": self.cushion})
        told = {piece.shape for piece in found if piece.kind not in ("name", "variable", "page")}
        self.assertEqual(told, snippets.TOLD_WITHOUT_TORCH)


@needs_torch
class Refusals(support.TorchCase):
    """Errors of `cushion.retry` name options that fix them: each of these options is accepted."""

    def setUp(self) -> None:
        import torch

        import cushion

        self.names = {**snippets.training(), "torch": torch, "cushion": cushion}
        self.torch, self.retry = torch, cushion.retry
        self.split = {"split": cushion.split_batch}

    def step(self, inputs: Any, targets: Any) -> Any:
        loss = self.names["loss_function"](self.names["model"](inputs), targets)
        loss.backward()
        return loss.detach()

    def named(self, call: Callable[..., Any], **given: Any) -> set[str]:
        """Returns the options that the error of a call names. Checks that the call succeeds with each of them."""
        with self.assertRaises((TypeError, ValueError)) as raised:
            call(**given)
        named = snippets.options(str(raised.exception))
        for option in named:
            with self.subTest(option):
                call(**{**given, **eval(f"dict({option})", self.names)})
        return set(named)

    def test_how_parts_add_up(self) -> None:
        named = self.named(lambda **given: self.retry(**given)(self.step), **self.split)
        weight = "weight=lambda inputs, targets: (targets != -100).sum()"
        self.assertEqual(named, {'loss="mean"', 'loss="sum"', weight, "combine=torch.cat"})

    def test_whose_gradients(self) -> None:
        inputs, targets = self.names["inputs"], self.names["targets"]
        named = self.named(lambda **given: self.retry(self.step, inputs, targets, **given), **self.split, loss="mean")
        self.assertEqual(named, {"grads=model", "grads=optimizer", "grads=()"})

    def test_layers_that_see_the_whole_batch(self) -> None:
        model = self.torch.nn.Sequential(self.torch.nn.BatchNorm1d(3), self.names["model"].layer)
        self.names.update(model=model, loss_function=lambda outputs, targets: (outputs - targets).square().mean())
        inputs, targets = self.names["inputs"], self.names["targets"]
        given = {**self.split, "loss": "mean", "grads": model}
        named = self.named(lambda **given: self.retry(self.step, inputs, targets, **given), **given)
        self.assertEqual(named, {"inexact=True"})

    def test_a_square_that_may_be_a_mask(self) -> None:
        def step(inputs: Any, mask: Any) -> Any:
            return inputs

        def call(**given: Any) -> Any:
            return self.retry(step, self.names["inputs"], self.torch.ones(7, 7), **given)

        named = self.named(call, **self.split, combine=self.torch.cat)
        self.assertEqual(named, {f'split=cushion.split_batch.{how}("mask")' for how in ("rows", "whole")})

    def test_a_list_that_may_be_samples(self) -> None:
        images = [self.torch.zeros(3, size, size) for size in (4, 5)]
        call = functools.partial(self.retry, lambda images: images, images)
        named = self.named(call, **self.split, combine=lambda lists: sum(lists, []))
        self.assertIn("split=cushion.split_batch.samples", named)


def starts(script: Path) -> bool:
    """Returns whether a script exists, and the Python that it was installed for."""
    if not script.exists():
        return False
    first = script.read_text().partition("\n")[0]
    return Path(first.removeprefix("#!").strip()).exists()


class Commands(unittest.TestCase):
    """Runs the commands of the pages, in a folder with the files that they name."""

    # A program of the user. If PyTorch is installed, it uses Cushion.
    PROGRAM = """
import importlib.util, sys
if importlib.util.find_spec("torch"):
    import torch, cushion
    cushion.install()
    torch.empty(1 << 20, device="cuda")
print("ran", *sys.argv[1:])
"""

    @classmethod
    def setUpClass(cls) -> None:
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = Path(folder.name)
        for name in ("train.py", "serve.py", "package/__init__.py", "package/train.py"):
            path = cls.folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(cls.PROGRAM if path.stem != "__init__" else "")
        recorded = support.TRACES / "stream_offload.pickle.gz"
        (cls.folder / "run.pickle").write_bytes(gzip.decompress(recorded.read_bytes()))

    def sh(self, command: str) -> subprocess.CompletedProcess[str]:
        python = shlex.quote(sys.executable)
        own = f'cushion() {{ {python} -m cushion "$@"; }}; python() {{ {python} "$@"; }}\n'
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        return subprocess.run(
            ["bash", "-c", own + command],
            env=support.environment({"PATH": path}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
            timeout=300,
        )

    def test_commands_run(self) -> None:
        commands = {it.code: it for it in snippets.commands() if not snippets.is_synopsis(it.code)}
        self.assertGreater(len(commands), 10)
        for command, block in commands.items():
            with self.subTest(f"{block}: {command}"):
                starter = re.search(r"\bcushion run (torchrun|accelerate)\b", command)
                if starter is not None and not starts(Path(sys.executable).with_name(starter[1])):
                    self.skipTest(f"there is no {starter[1]} beside {sys.executable} that starts")
                # The same command with less work.
                done = self.sh(re.sub(r"(--seeds|--nproc-per-node) \d+", r"\1 1", command))
                # Status 1 means that a trace does not fit.
                allowed = (0, 1) if command.startswith("cushion replay") else (0,)
                self.assertIn(done.returncode, allowed, done.stdout)
                if ".py" in command or "-m" in command.split():
                    self.assertIn("ran", done.stdout)

    def test_options_in_synopses_exist(self) -> None:
        synopses = [it for it in snippets.commands() if snippets.is_synopsis(it.code)]
        self.assertGreater(len(synopses), 2)
        for block in synopses:
            kind = block.code.split()[1]
            there = self.sh(f"cushion {kind} --help").stdout
            for option in re.findall(r"--[a-z-]+|(?<=\[)-\w\b", block.code):
                with self.subTest(f"{block}: {option}"):
                    self.assertRegex(there, rf"(?<![\w-]){option}(?![\w-])")


@needs_torch
class Names(support.TorchCase):
    def test_names_in_texts_exist(self) -> None:
        """In errors, warnings, docstrings and sentences of pages, which cannot be run."""
        count = 0
        for where, text in (*snippets.texts_of_packages(), *snippets.texts_of_pages()):
            with self.subTest(where):
                snippets.check_names(text)
            count += 1
        self.assertGreater(count, 500)

    def test_variables_in_texts_exist(self) -> None:
        options = (support.ROOT / "docs" / "options.md").read_text()
        # The last one is only for `cushion run`.
        known = {*re.findall(r"\| `(CUSHION_[A-Z_0-9]+)` \|", options), "CUSHION_REQUIRED"}
        for where, text in (*snippets.texts_of_packages(), *snippets.texts_of_pages()):
            named = set(re.findall(r"\bCUSHION_[A-Z_0-9]+\b", text))
            with self.subTest(where):
                self.assertEqual(named - known, set())


class Sources(unittest.TestCase):
    def test_every_piece_of_code_in_the_source_of_messages_is_tested(self) -> None:
        """Every piece of code in the source of the messages occurs in a message that the tests above have seen."""
        sources = (support.ROOT / "crates" / "cushion-torch" / "src" / "shortage").glob("*.rs")
        # Only what precedes the unit tests of a file is part of a message.
        source = "\n".join(file.read_text().partition("#[cfg(test)]")[0] for file in sources)
        texts = re.findall(r'"((?:[^"\\]|\\[\s\S])*)"', re.sub(r"^\s*//.*$", "", source, flags=re.MULTILINE))
        shown = re.compile(r"(?:\bcushion|\btorch)(?:\.\w+)+\(|\bCUSHION_[A-Z_]+=")
        in_source = {it for text in texts for it in shown.findall(text)}
        told = {it for text in snippets.TOLD_WITH_TORCH | snippets.TOLD_WITHOUT_TORCH for it in shown.findall(text)}
        self.assertEqual(in_source, told)


if __name__ == "__main__":
    unittest.main()
