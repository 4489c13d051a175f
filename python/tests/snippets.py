"""Finds the pieces of code in pages, docstrings and messages, and has the setups that they need.

`test_snippets.py` runs them. A piece is

- a block of Python in README.md or docs/*.md. The blocks of a page are one program, from top to bottom. A hidden
  comment above a block may change that:

      <!-- setup: NAME -->        the names that `SETUPS["NAME"]()` returns replace those before
      <!-- another program -->    this block begins a new program, in its own process
      <!-- not run: WHY -->       the block is only compiled: it needs more than the stand-ins for CUDA

- an indented block in the docstring of a public name. Its setup is named after it: `cushion.retry`;
- code in a message (`pieces`).

A setup returns a dict of names. Its entry "after" may be a function, which is called with all names after the block: it
checks that the block did what the page says."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import dataclasses
import importlib
import inspect
import itertools
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import support

PAGES = [support.ROOT / "README.md", *sorted((support.ROOT / "docs").glob("*.md"))]
PACKAGES = ("cushion", "gcAllocator", "custom_cuda_allocator")
MIB, GIB = support.MIB, support.GIB


# ---- blocks ----


@dataclass(frozen=True)
class Block:
    """A block of code."""

    #: the file, or the name, that contains it
    where: str
    #: its first line there
    line: int
    #: the language after the fence, if any
    language: str
    code: str
    setup: str | None = None
    not_run: str | None = None
    begins_program: bool = False

    def __str__(self) -> str:
        return f"{self.where}:{self.line}"


_FENCE = re.compile(r"(?P<indent> *)```(?P<language>\w*)\s*$")
_COMMENT = re.compile(r" *<!-- (?P<what>setup|not run|another program)(?:: (?P<value>.+?))? -->\s*$")


def blocks(page: Path) -> list[Block]:
    """Returns the fenced blocks of a page, in any language."""
    found: list[Block] = []
    comments: dict[str, str] = {}
    lines = iter(enumerate(page.read_text().splitlines(), 1))
    for number, line in lines:
        comment, fence = _COMMENT.match(line), _FENCE.match(line)
        if comment is not None:
            comments[comment["what"]] = comment["value"] or ""
        elif fence is not None:
            indent = len(fence["indent"])
            code = []
            for _, inner in lines:
                if inner.strip() == "```":
                    break
                code.append(inner[indent:])
            found.append(
                Block(
                    str(page.relative_to(support.ROOT)),
                    number + 1,
                    fence["language"],
                    "\n".join(code),
                    comments.get("setup"),
                    comments.get("not run"),
                    "another program" in comments,
                )
            )
            comments = {}
        elif line.strip():
            # A comment applies to the block directly below it.
            comments = {}
    return found


def programs(page: Path) -> list[list[Block]]:
    """Returns the Python programs of a page, each as a list of blocks."""
    found: list[list[Block]] = []
    for block in blocks(page):
        if block.language == "python":
            if block.begins_program or not found:
                found.append([])
            found[-1].append(block)
    return found


def docstrings() -> list[list[Block]]:
    """Returns the indented blocks in the docstrings of the packages, of their public names and of their methods. They
    are read from the sources: importing the packages would change what is tested."""
    found = []
    for package in PACKAGES:
        file = support.ROOT / "python" / package / "__init__.py"
        owners = [(package, file, ast.parse(file.read_text()))]
        owners += [(f"{package}.{name}", *it) for name, it in _public(file, owners[0][2]).items()]
        for name, file, owner in owners:
            methods = [it for it in owner.body if isinstance(it, ast.FunctionDef) and not isinstance(owner, ast.Module)]
            public = [(f"{name}.{it.name}", it) for it in methods if not it.name.startswith("_")]
            own = [block for named, it in [(name, owner), *public] for block in _in_docstring(named, file, it)]
            if own:
                found.append(own)
    return found


def _public(file: Path, module: ast.Module) -> dict[str, tuple[Path, Any]]:
    """Returns where the public functions and classes of a package are defined."""
    found: dict[str, tuple[Path, Any]] = {}
    for statement in module.body:
        if isinstance(statement, ast.ImportFrom) and statement.level == 1:
            source = file.parent / f"{statement.module}.py"
            # A name from Rust has its docstring there.
            defined = ast.parse(source.read_text()).body if source.exists() else []
            names = {it.name for it in statement.names}
            # The last of several overloads has the docstring.
            found.update({it.name: (source, it) for it in defined if getattr(it, "name", None) in names})
    return found


def _in_docstring(name: str, file: Path, owner: Any) -> Iterator[Block]:
    text = ast.get_docstring(owner)
    if text is not None:
        first = owner.body[0].lineno
        where = str(file.relative_to(support.ROOT))
        for line, code in _indented(text):
            yield Block(where, first + line - 1, "python", code, name)


def _indented(text: str) -> Iterator[tuple[int, str]]:
    """Returns blocks that are indented by four after an empty line. Lines after `:param` have no empty line before."""
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        begins = lines[at].startswith("    ") and at > 0 and not lines[at - 1].strip()
        end = at + 1
        if begins:
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            yield at + 1, "\n".join(line[4:] for line in lines[at:end]).rstrip()
        at = end


def run(program: list[Block]) -> None:
    """Runs the blocks of one program, in a temporary folder."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for name in ("cushion", "torch"):
        # The blocks of a page may omit these imports.
        names[name] = importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder, _in(folder):
        for block in program:
            if block.not_run is None:
                _run(block, names)


@contextlib.contextmanager
def _in(folder: str) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def compiled(block: Block) -> Any:
    """Returns the compiled code of a block, with the line numbers of the page, and with top-level `await` allowed."""
    path = support.ROOT / block.where
    source = "\n" * (block.line - 1) + block.code
    return compile(source, str(path), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)


def _run(block: Block, names: dict[str, Any]) -> None:
    after = None
    # A docstring may have no setup. A setup that a page names has to exist.
    if block.setup in SETUPS or (block.setup is not None and block.where.endswith(".md")):
        names.update(SETUPS[block.setup]())
        after = names.pop("after", None)
    code = compiled(block)
    if code.co_flags & inspect.CO_COROUTINE:
        asyncio.run(eval(code, names))
    else:
        exec(code, names)
    if after is not None:
        after(names)


# ---- setups ----


class Check(AssertionError):
    """A block ran, but did not do what the page says."""


def check(holds: bool, what: str) -> None:
    if not holds:
        raise Check(what)


def _card() -> Any:
    """Returns a model on a device that is too small: it runs out of memory with more than `room` rows, and in the next
    `failures` backward passes, after some gradients have been computed. It is on the CPU, to compare gradients."""
    import torch

    def refuse() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")

    class Card(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 4)
            self.layer.bias.register_post_accumulate_grad_hook(self.fail)
            self.room: int | None = None
            self.failures = 0

        def forward(self, rows: Any) -> Any:
            if self.room is not None and len(rows) > self.room:
                refuse()
            return self.layer(rows)

        def fail(self, _parameter: Any) -> None:
            if self.failures > 0:
                self.failures -= 1
                refuse()

    torch.manual_seed(0)
    return Card()


def training(room: int | None = 2) -> dict[str, Any]:
    """Returns a training step for batches of 7 rows, of which 2 fit. The last rows of each batch have no label."""
    import torch

    card = _card()
    inputs, labels = torch.randn(7, 3), torch.tensor([0, 1, 2, -100, 3, -100, -100])
    targets = torch.randn(7, 4)
    card.room = room
    return {
        "card": card,
        "model": card,
        "optimizer": torch.optim.AdamW(card.parameters()),
        "loss_function": torch.nn.functional.mse_loss,
        "cross_entropy": torch.nn.functional.cross_entropy,
        "inputs": inputs,
        "targets": targets,
        "labels": labels,
        "batches": [(inputs, targets)] * 3,
    }


def _gradients(card: Any) -> list[Any]:
    found = [parameter.grad.clone() for parameter in card.parameters()]
    card.zero_grad()
    return found


def same_gradients(names: dict[str, Any], *arguments: str) -> None:
    """Checks that `step` runs out of memory, runs in parts, and has the loss and the gradients of the whole batch."""
    import torch

    card, step = names["card"], names["step"]
    card.zero_grad()
    given = [names[argument] for argument in arguments]
    room, card.room = card.room, None
    whole_loss, whole = step(*given), _gradients(card)
    card.room = room
    loss, parts = step(*given), _gradients(card)
    check(step.stats()["split"] == 1, f"it was not run in parts: {step.stats()}")
    torch.testing.assert_close(loss, whole_loss)
    for ours, theirs in zip(parts, whole):
        torch.testing.assert_close(ours, theirs)


def _step_in_parts() -> dict[str, Any]:
    return {**training(), "after": lambda names: same_gradients(names, "inputs", "targets")}


def _step_by_labels() -> dict[str, Any]:
    return {**training(), "after": lambda names: same_gradients(names, "inputs", "labels")}


def _whole_steps() -> dict[str, Any]:
    """Every batch fits, and memory runs out once: three steps take four tries, and give the weights of a run without
    the shortage."""
    import torch

    import cushion

    before = cushion.retry_stats()
    found = training(room=None)
    found["card"].failures = 1

    def after(names: dict[str, Any]) -> None:
        now = cushion.retry_stats()
        check((now["calls"] - before["calls"], now["tries"] - before["tries"]) == (3, 4), f"{before}, then {now}")
        again = training(room=None)
        for inputs, targets in again["batches"]:
            again["optimizer"].zero_grad()
            again["loss_function"](again["model"](inputs), targets).backward()
            again["optimizer"].step()
        for ours, theirs in zip(names["card"].parameters(), again["card"].parameters()):
            torch.testing.assert_close(ours, theirs)

    return {**found, "after": after}


def _inference() -> dict[str, Any]:
    found = training()

    def after(names: dict[str, Any]) -> None:
        check(tuple(names["outputs"].shape) == (7, 4), f"{names['outputs'].shape}")

    return {**found, "after": after}


def _by_sample() -> dict[str, Any]:
    """Uses the function of the block to split a step over images."""

    def after(names: dict[str, Any]) -> None:
        import cushion

        seen = []

        def step(images: list[Any], targets: list[Any]) -> float:
            check(len(images) == len(targets), "images and targets differ")
            if len(images) > 2:
                raise MemoryError("CUDA out of memory.")
            seen.extend(images)
            return 1.0

        loss = cushion.retry(step, list(range(5)), list(range(5)), split=names["by_sample"], loss="mean", grads=())
        check((seen, round(loss, 6)) == (list(range(5)), 1.0), f"{seen}, {loss}")

    return {"after": after}


def _one_rank() -> dict[str, Any]:
    """Creates a process group of one rank, on the CPU."""
    import torch.distributed as dist

    if not dist.is_initialized():
        with tempfile.NamedTemporaryFile(delete=False) as file:
            dist.init_process_group("gloo", init_method=f"file://{file.name}", rank=0, world_size=1)
    return _step_in_parts()


def _readme() -> dict[str, Any]:
    """The names in the block do nothing: it only shows the place of the call."""

    def after(names: dict[str, Any]) -> None:
        import cushion

        check(names["step"](names["inputs"], names["targets"]) is None, "the step returns nothing")
        check(isinstance(names["optimizer_state"], cushion.Offloader), "it is an offloader")

    return {**training(), "after": after}


# ---- shortages, over the stand-ins ----


def installed() -> dict[str, Any]:
    """Makes Cushion PyTorch's allocator."""
    import cushion

    cushion.install()
    return {}


def _refuse() -> None:
    """Allocates more than the device has."""
    import torch

    torch.empty(1 << 45, dtype=torch.uint8, device="cuda")


def _receipts() -> dict[str, Any]:
    installed()
    return {"train": _refuse}


def _callback() -> dict[str, Any]:
    installed()

    class Cache:
        asked: list[int] = []

        def drop(self, wanted: int) -> int:
            self.asked.append(wanted)
            return wanted

    def after(names: dict[str, Any]) -> None:
        import torch

        import cushion

        kept = torch.empty(int(torch.cuda.mem_get_info()[0] * 0.9), dtype=torch.uint8, device="cuda")
        with cushion.budget(ms=0), contextlib.suppress(torch.OutOfMemoryError):
            torch.empty(kept.numel(), dtype=torch.uint8, device="cuda")
        answers = [answer.said for answer in cushion.receipts()[-1].answers]
        check(answers == [f"dropped {Cache.asked[0]} bytes"], f"{answers}")
        cushion.remove_callback(names["drop_cache"])

    return {"cache": Cache(), "after": after}


def _on_the_card() -> dict[str, Any]:
    """Returns an optimizer with state, and layers, on the GPU."""
    import torch

    installed()
    layers = [torch.nn.Linear(8, 8).cuda() for _ in range(2)]
    optimizer = torch.optim.AdamW(layers[0].parameters())
    for parameter in layers[0].parameters():
        optimizer.state[parameter] = {"exp_avg": torch.empty_like(parameter), "exp_avg_sq": torch.empty_like(parameter)}
    return {"optimizer": optimizer, "averaged_layers": layers, "evaluate": lambda: None}


def _offloader(name: str) -> Callable[[], dict[str, Any]]:
    def setup() -> dict[str, Any]:
        def after(names: dict[str, Any]) -> None:
            offloader = names[name]
            freed = offloader.away()
            check(freed > 0, "nothing left the GPU")
            check(offloader.bytes_away == freed, f"{offloader.bytes_away} bytes are away, and {freed} left")
            offloader.remove()
            check(offloader.bytes_away == 0, f"{offloader.bytes_away} bytes are still away")

        return {**_on_the_card(), "after": after}

    return setup


def _last_moment() -> dict[str, Any]:
    installed()

    def after(names: dict[str, Any]) -> None:
        import torch

        import cushion

        with contextlib.suppress(torch.OutOfMemoryError):
            _refuse()
        check(torch.load("checkpoint.pt")["step"] == 3, "it is another checkpoint")
        cushion.remove_callback(names["save"])

    return {**training(), "step": 3, "after": after}


def _budget() -> dict[str, Any]:
    installed()
    return {"search": lambda: 8, "largest_that_fits": lambda: 8, "after": lambda names: names.get("evaluate", int)()}


def _training_that_is_made_to_fail() -> dict[str, Any]:
    """A step with five allocations, of which the fifth is refused."""
    installed()
    refused = []

    def train() -> None:
        import torch

        try:
            for _ in range(5):
                torch.empty(MIB, device="cuda")
        except torch.OutOfMemoryError as error:
            refused.append(error)

    def after(names: dict[str, Any]) -> None:
        import cushion

        cushion.inject(None)
        check(names["expected"] == [len(refused)], f"{len(refused)} were refused")

    return {"train_one_step": train, "train": train, "expected": [1], "after": after}


def _made_to_fail_rarely() -> dict[str, Any]:
    return {**_training_that_is_made_to_fail(), "expected": [0]}


def _docstring_of_retry() -> dict[str, Any]:
    """The first line runs a step that fails once, the second a step that is too large."""
    found = training()

    def step(inputs: Any, targets: Any) -> Any:
        loss = found["loss_function"](found["model"](inputs), targets)
        loss.backward()
        return loss.detach()

    # The first line does not split the step.
    found["card"].room, found["card"].failures = None, 1
    return {**found, "step": step}


def _search_for_a_size() -> dict[str, Any]:
    """A step of which 11 rows fit."""
    import torch

    found = training(room=11)

    def step(batch_size: int) -> None:
        found["model"](torch.randn(batch_size, 3)).sum().backward()

    def after(names: dict[str, Any]) -> None:
        check(names.get("size", 11) == 11, f"it found {names.get('size')}")

    return {**found, "step": step, "after": after}


def _averages() -> dict[str, Any]:
    """Returns an offloader under the name in the docstring."""
    import cushion

    found = _on_the_card()
    return {**found, "averages": cushion.offloader(lambda: found["averaged_layers"])}


SETUPS: dict[str, Callable[[], dict[str, Any]]] = {
    "a step in parts": _step_in_parts,
    "a step by its labels": _step_by_labels,
    "whole steps": _whole_steps,
    "inference": _inference,
    "images": _by_sample,
    "one rank": _one_rank,
    "three ways": _readme,
    "a run that dies": _receipts,
    "a cache": _callback,
    "optimizer state": _offloader("optimizer_state"),
    "averages": _offloader("averages"),
    "a model to save": _last_moment,
    "a search": _budget,
    "failures": _training_that_is_made_to_fail,
    # setups of docstrings
    "cushion.budget": _budget,
    "cushion.find_batch_size": _search_for_a_size,
    "cushion.inject": _made_to_fail_rarely,
    "cushion.offloader": _averages,
    "cushion.retry": _docstring_of_retry,
}
try:
    frameworks: Any = importlib.import_module("snippets_frameworks")
except ImportError:
    # The page does not exist, or needs no setup.
    pass
else:
    SETUPS.update(frameworks.SETUPS)


# ---- code in messages ----


@dataclass(frozen=True)
class Piece:
    """Code that a message suggests, or a name in it."""

    kind: str
    code: str

    @property
    def shape(self) -> str:
        """The code without its numbers, by which it is recognised."""
        return re.sub(r"\d+(\.\d+)?", "N", self.code)

    def run(self, names: dict[str, Any]) -> None:
        getattr(self, f"_{self.kind}")(names)

    def _decorator(self, names: dict[str, Any]) -> None:
        """Decorates a plain step with it. Parts have to give the gradients of the whole."""
        names.update(training())
        exec(f"{self.code}\n{_A_STEP}", names)
        same_gradients(names, "inputs", "targets")

    def _block(self, names: dict[str, Any]) -> None:
        exec(f"{self.code}\n    pass", names)

    def _call(self, names: dict[str, Any]) -> None:
        exec(self.code, names)

    def _setting(self, names: dict[str, Any]) -> None:
        from cushion import _cushion

        variable, value = self.code.split("=")
        self._variable({"variable": variable})
        # An invalid value raises.
        _cushion.gather_settings({variable: value})

    def _variable(self, names: dict[str, Any]) -> None:
        variable = names.get("variable", self.code)
        options = (support.ROOT / "docs" / "options.md").read_text()
        check(f"| `{variable}` |" in options, f"docs/options.md does not have {variable}")

    def _page(self, names: dict[str, Any]) -> None:
        check((support.ROOT / self.code).exists(), f"there is no {self.code}")

    def _name(self, names: dict[str, Any]) -> None:
        resolve(self.code)


_A_STEP = """
def step(inputs, targets):
    loss = loss_function(model(inputs), targets)
    loss.backward()
    return loss.detach()
"""

# The first kind that matches a piece of text is used.
_KINDS = (
    ("decorator", r"@cushion\.retry\(.*?\)(?=,)"),
    ("block", r"(?<=`)with cushion\.\w+\(.*?\):(?=`)"),
    ("call", r"\b(?:cushion|torch)\.[\w.]+\([^()]*\)"),
    ("setting", r"\bCUSHION_[A-Z_]+=\w+(?:\.\d+)?"),
    ("page", r"\bdocs/[\w-]+\.md"),
    ("name", r"\b(?:cushion|torch)(?:\.\w+)+"),
    ("variable", r"\bCUSHION_[A-Z_]+"),
)
# Text that looks like code. It has to match one of the kinds above.
_CODE = re.compile(r"\w+\(|\w=\S|[@{}\[\]]")


def pieces(text: str) -> list[Piece]:
    """Returns all code in a text, in the order of the kinds. Raises for text that looks like code and has no kind: it
    would not be run."""
    found = []
    for kind, pattern in _KINDS:
        found += [Piece(kind, it) for it in re.findall(pattern, text)]
        text = re.sub(pattern, " ", text)
    left = _CODE.search(text)
    check(left is None, f"this has code of no kind: {text[left.start() - 40 : left.end() + 40]!r}" if left else "")
    return found


def resolve(name: str) -> Any:
    """Returns the object of a dotted name; raises AttributeError if it does not exist."""
    module, *rest = name.split(".")
    found: Any = importlib.import_module(module)
    for part in rest:
        inner = None
        if inspect.ismodule(found) and not hasattr(found, part):
            # A module that its package has not imported, or whose name it has deleted.
            with contextlib.suppress(ModuleNotFoundError):
                inner = importlib.import_module(f"{found.__name__}.{part}")
        found = getattr(found, part) if inner is None else inner
    return found


# The code in the messages of refusals, by shape: calls with PyTorch, and variables without it.
TOLD_WITH_TORCH = {
    '@cushion.retry(split=cushion.split_batch, loss="mean", grads=model)',
    "with cushion.budget(ms=N):",
    'cushion.install(policy="expandable")',
    "cushion.inject(None)",
    "torch.cuda.set_per_process_memory_fraction(N, N)",
    "torch.cuda.memory._record_memory_history()",
    "CUSHION_POLICY=expandable",
    "CUSHION_SPILL_LIMIT_MB=N",
    "CUSHION_WAIT_MS=N",
    "CUSHION_WAIT_TOTAL_MS=unlimited",
}
TOLD_WITHOUT_TORCH = {
    "cushion.inject(None)",
    "CUSHION_PER_PROCESS_MEMORY_FRACTION=N",
    "CUSHION_POLICY=expandable",
    "CUSHION_SPILL_LIMIT_MB=N",
}


_OPTION = re.compile(r"(?<![\w.])(?:split|loss|weight|combine|grads|inexact|group|local)=(?=[^\s,:])")
_ENDS = re.compile(r"[,;:.]? |[,;.]?\n|[,;.]?$")


def options(text: str) -> list[str]:
    """Returns the options of `cushion.retry` that an error suggests, such as `grads=model`. One that begins with a dot
    continues `split=cushion.split_batch`."""
    text = re.sub(r"(?<= )(\.\w+\(\"\w+\"\))", r"split=cushion.split_batch\1", text)
    found = []
    for option in _OPTION.finditer(text):
        # These words belong to the sentence, not to the code.
        line = re.split(r"\n|  | or | and | if ", text[option.start() :])[0]
        whole = [line[: end.start()] for end in _ENDS.finditer(line) if _is_option(line[: end.start()])]
        check(bool(whole), f"this is no option: {line!r}")
        found.append(whole[-1])
    return found


def _is_option(text: str) -> bool:
    try:
        found = ast.parse(f"retry({text})", mode="eval").body
    except SyntaxError:
        return False
    return isinstance(found, ast.Call) and len(found.keywords) == 1 and not found.args


# ---- commands ----


def commands() -> list[Block]:
    """Returns the lines, in blocks without a language, that start `cushion`, or Python with a variable of Cushion: one
    block each. Indented lines after such a line belong to it."""
    found = []
    for block in (block for page in PAGES for block in blocks(page) if block.language in ("", "sh", "bash")):
        lines = block.code.splitlines()
        for number, line in enumerate(lines):
            if re.match(r"(?:\$ )?(?:CUSHION_\w+=\S+ )*(?:cushion|python) \w", line) is None:
                continue
            more = itertools.takewhile(lambda it: it.startswith("  "), lines[number + 1 :])
            code = " ".join(re.sub(r"\s+# .*", "", it).strip() for it in (line, *more))
            found.append(dataclasses.replace(block, line=block.line + number, code=code.removeprefix("$ ")))
    return found


def is_synopsis(command: str) -> bool:
    """Returns whether a block is a synopsis, which cannot be run."""
    return re.search(r"\[-|\bTRACE\b", command) is not None


# ---- names in texts ----

_NAMED = re.compile(
    r"(?<![\w./\\-])(?:cushion|gcAllocator|custom_cuda_allocator|torch)(?:\.[A-Za-z_]\w*)+(?P<call>\()?"
)


def texts_of_packages() -> Iterator[tuple[str, str]]:
    """Returns the strings in the sources of the packages, each with its place. `_` replaces values in braces."""
    for package in PACKAGES:
        for file in sorted((support.ROOT / "python" / package).glob("*.py")):
            where = str(file.relative_to(support.ROOT))
            tree = ast.parse(file.read_text())
            inner = {id(it) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for it in ast.walk(node)}
            for node in ast.walk(tree):
                if isinstance(node, ast.JoinedStr):
                    values = [str(it.value) if isinstance(it, ast.Constant) else "_" for it in node.values]
                    yield f"{where}:{node.lineno}", "".join(values)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
                    yield f"{where}:{node.lineno}", node.value


def texts_of_pages() -> Iterator[tuple[str, str]]:
    """Returns the inline code in the sentences of the pages about Python."""
    for page in PAGES:
        text = re.sub(r"^( *)```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        if page.stem not in ("rust", "c-api"):
            yield from ((page.name, span) for span in re.findall(r"`([^`\n]+)`", text))


def check_names(text: str) -> None:
    """Checks that every name of the packages and of PyTorch in a text exists, and that calls have valid arguments."""
    for found in _NAMED.finditer(text):
        name = found[0].rstrip("(")
        target = resolve(name)
        call = _call_at(text, found.start()) if found["call"] else None
        if call is not None and not name.startswith("torch."):
            parameters = inspect.signature(target).parameters.values()
            named = {it.name for it in parameters if it.kind in (it.POSITIONAL_OR_KEYWORD, it.KEYWORD_ONLY)}
            given = {it.arg for it in call.keywords if it.arg is not None}
            takes_any = any(it.kind is it.VAR_KEYWORD for it in parameters)
            check(takes_any or given <= named, f"{name} has no parameter {', '.join(sorted(given - named))}")


def _call_at(text: str, start: int) -> ast.Call | None:
    """Returns the call that begins there, up to the first `)` that completes it; None if there is none, as for the name
    of a function, or with omitted arguments."""
    for end in (it.end() for it in re.finditer(r"\)", text[start:])):
        with contextlib.suppress(SyntaxError):
            found = ast.parse(text[start : start + end], mode="eval").body
            return found if isinstance(found, ast.Call) else None
    return None
