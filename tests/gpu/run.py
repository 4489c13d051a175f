"""Runs the programs of this folder on a machine with a GPU, group by group, and records the results.

    python tests/gpu/run.py test|bench [--group NAME]... [--policy P] [--rounds N] [--fresh] [--out FOLDER] [--list]

Jobs that passed are recorded, and not run again until the program or the package changes; --fresh discards the record.
A run that was stopped therefore continues where it was. The record is gpu-out/state.json and the page
docs/results/DATE-gpu-KIND.md; with --out both are in that folder.

Without a GPU every group is skipped, and no page is written. The exit code is 1 if a group failed.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import outcome
from groups import POLICIES, Group, Job, chosen, of_kind
from outcome import Outcome

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

# Run in another process: this one does not import torch.
FACTS = """
import json, platform, subprocess, sys
sys.path.insert(0, sys.argv[1])
from harness import why_not
reason = why_not()
facts = {"skipped": reason}
if reason is None:
    import torch
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True).stdout.split()[0]
    except (OSError, IndexError):
        driver = "unknown"
    facts.update(gpu=torch.cuda.get_device_name(0), driver=driver, torch=torch.__version__,
                 cuda=torch.version.cuda, python=platform.python_version())
    try:
        import cushion
        facts["cushion"] = getattr(cushion, "__version__", "of unknown version")
    except ImportError as error:
        facts["missing"] = str(error)
print(json.dumps(facts))
"""


def facts() -> dict:
    """Returns a description of this machine, or why nothing can run on it."""
    command = [sys.executable, "-c", FACTS, str(HERE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    found = outcome.last_json(done.stdout)
    if found is None:
        raise SystemExit(f"run.py: torch cannot be asked about the GPU: {outcome.last_words(done.stderr)}")
    return found


# The record


class Record:
    """The outcomes so far, in a file that is rewritten after each job."""

    def __init__(self, path: Path, about: dict[str, str]) -> None:
        self.path = path
        self.about = about
        self.outcomes: dict[str, Outcome] = {}
        self.commands: dict[str, list[str]] = {"test": [], "bench": []}

    def load(self) -> None:
        """Reads the record, if it is of this machine and these versions."""
        try:
            stored = json.loads(self.path.read_text())
        except FileNotFoundError:
            return
        except ValueError as error:
            print(f"{self.path} cannot be read ({error}): starting over")
            return
        if stored.get("about") != self.about:
            print(f"{self.path} is of another machine or of other versions: starting over")
            return
        self.outcomes = {key: Outcome(**value) for key, value in stored["outcomes"].items()}
        self.commands = stored["commands"]

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        stored = {
            "about": self.about,
            "commands": self.commands,
            "outcomes": {key: asdict(value) for key, value in self.outcomes.items()},
        }
        # Written under another name first: a run may be stopped at any time.
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(stored, indent=1) + "\n")
        part.replace(self.path)

    def note_command(self, kind: str, command: str) -> None:
        if command not in self.commands[kind]:
            self.commands[kind].append(command)

    def add(self, job: Job, found: Outcome) -> None:
        self.outcomes[job.key] = found
        self.save()

    def current(self, groups: list[Group]) -> dict[str, Outcome]:
        """Returns the outcomes that are still valid: those of the present programs and package."""
        return {
            job.key: self.outcomes[job.key]
            for group in groups
            for job in group.jobs
            if job.key in self.outcomes and self.outcomes[job.key].made_from == made_from(job)
        }

    def done(self, job: Job) -> bool:
        """Returns whether a job has passed. Jobs that failed or were skipped are tried again."""
        found = self.outcomes.get(job.key)
        return found is not None and found.status == "passed" and found.made_from == made_from(job)


def package_files() -> list[Path]:
    """Returns the files of Cushion's packages that would be imported."""
    specs = [importlib.util.find_spec(name) for name in ("cushion", "gcAllocator", "custom_cuda_allocator")]
    folders = [folder for spec in specs if spec for folder in spec.submodule_search_locations or []]
    return sorted(
        path
        for folder in folders
        for path in Path(folder).rglob("*")
        if path.is_file() and path.suffix in (".py", ".so")
    )


def files_of(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


HASHES: dict[tuple[Path, ...], str] = {}


def hash_of(files: tuple[Path, ...]) -> str:
    if files not in HASHES:
        digest = hashlib.sha256()
        for path in files:
            digest.update(path.read_bytes() if path.exists() else b"not there")
        HASHES[files] = digest.hexdigest()[:16]
    return HASHES[files]


def made_from(job: Job) -> str:
    """Returns a hash of the program, its arguments and the package: an outcome is valid only for the same hash."""
    program = job.command[0]
    if program.endswith(".py"):
        named = (HERE / name for name in (program, *job.runs, "harness.py"))
        files = (*(file for path in named for file in files_of(path)), *package_files())
    else:
        files = (ROOT / program,)
    return hashlib.sha256(" ".join((hash_of(files), *job.command)).encode()).hexdigest()[:16]


# Running


def path_of(job: Job) -> Path:
    program = job.command[0]
    return HERE / program if program.endswith(".py") else ROOT / program


def start(job: Job) -> subprocess.Popen:
    path = path_of(job)
    command = [sys.executable, str(path)] if path.suffix == ".py" else [str(path)]
    return subprocess.Popen(
        [*command, *job.command[1:]],
        stdin=subprocess.PIPE if job.waits else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        cwd=ROOT,
        start_new_session=True,
    )


def prepared(jobs: list[Job]) -> dict[str, subprocess.Popen]:
    """Starts the jobs that can wait, and returns when all are ready. Half of a short run is imports, which do not use
    the GPU and so do not disturb other jobs."""
    waiting = {job.key: start(job) for job in jobs if job.waits and path_of(job).exists()}
    for process in waiting.values():
        # The job reports that it is ready, or ends.
        process.stdout.readline()
    return waiting


def kill(process: subprocess.Popen) -> None:
    """Kills a process with all its children. An interrupt from the keyboard does not reach its session."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def run_job(job: Job, process: subprocess.Popen | None = None) -> Outcome:
    if not path_of(job).exists():
        return Outcome("skipped", f"{job.command[0]} is not there")
    began = time.monotonic()
    process = process or prepared([job]).get(job.key) or start(job)
    try:
        stdout, stderr = process.communicate("go\n" if job.waits else None, timeout=job.timeout)
    except BaseException as stopped:
        kill(process)
        stdout, stderr = process.communicate()
        if not isinstance(stopped, subprocess.TimeoutExpired):
            raise
        why = f"still running after {job.timeout} s: {outcome.last_words(stderr)}"
        return Outcome("failed", why, time.monotonic() - began)
    read = outcome.of_program if path_of(job).suffix == ".py" else outcome.of_contract
    found = read(process.returncode, stdout, stderr, round(time.monotonic() - began, 1))
    if found.status == "failed":
        print(stderr[-3000:], file=sys.stderr)
    return found


def run_jobs(jobs: list[Job]) -> Iterator[Outcome]:
    """Runs jobs one after the other. Yields the outcome of each."""
    waiting = prepared(jobs)
    try:
        for job in jobs:
            yield run_job(job, waiting.pop(job.key, None))
    finally:
        for process in waiting.values():
            kill(process)
            process.communicate()


Run = Callable[[list[Job]], Iterator[Outcome]]


def run_groups(groups: list[Group], record: Record, run: Run = run_jobs) -> None:
    """Runs the jobs that are not done, and records each outcome."""
    for group in groups:
        left = [job for job in group.jobs if not record.done(job)]
        if len(left) < len(group.jobs):
            print(f"{group.name}: {len(group.jobs) - len(left)} of {len(group.jobs)} done before")
        outcomes = run(left)
        for count, job in enumerate(left, 1):
            print(f"{group.name} [{count}/{len(left)}] {job.key}", end=": ", flush=True)
            found = next(outcomes)
            found.made_from = made_from(job)
            before = record.outcomes.get(job.key)
            if before is not None and before.status == "failed" and before.made_from == found.made_from:
                found.tries = before.tries + 1
            record.add(job, found)
            why = f": {found.why[:300]}" if found.why else ""
            print(f"{found.status}, {found.seconds:.0f} s{why}", flush=True)


# The command


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("test", "bench"))
    parser.add_argument(
        "--group", action="append", default=[], metavar="NAME", help="run only this group; may be repeated"
    )
    parser.add_argument("--list", action="store_true", help="list the groups")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each workload of bench; 3 by default")
    parser.add_argument("--policy", choices=POLICIES, help="run only the jobs of this policy of Cushion")
    again = parser.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help="continue from the record; the default")
    again.add_argument("--fresh", action="store_true", help="discard the record of the chosen groups")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder for the record and the page")
    return parser.parse_args(arguments)


def told(given: argparse.Namespace) -> str:
    """Returns the command, without folders of this machine."""
    words = ["python tests/gpu/run.py", given.kind]
    words += [f"--group {name}" for name in given.group]
    words += [f"--rounds {given.rounds}"] if given.kind == "bench" and given.rounds != 3 else []
    words += [f"--policy {given.policy}"] if given.policy else []
    return " ".join(words)


def main(arguments: list[str]) -> int:
    given = parse(arguments)
    groups = of_kind(given.kind, given.rounds, given.policy)
    try:
        selected = chosen(groups, given.group)
    except ValueError as error:
        print(f"run.py: {error}", file=sys.stderr)
        return 2
    if given.list:
        rows = [["group", "jobs", "what"], *([g.name, str(len(g.jobs)), g.about] for g in selected)]
        print(outcome.as_text(rows))
        return 0
    about = facts()
    reason = about.pop("skipped")
    if reason:
        for group in selected:
            print(f"{group.name}: SKIPPED: {reason}")
        return 0
    if "missing" in about:
        print(f"run.py: {about['missing']}: make gpu-kit, and PYTHONPATH=gpu-kit/site", file=sys.stderr)
        return 1

    record = Record((given.out or ROOT / "gpu-out") / "state.json", about)
    record.load()
    if given.fresh:
        for group in selected:
            for job in group.jobs:
                record.outcomes.pop(job.key, None)
    record.note_command(given.kind, told(given))
    run_groups(selected, record)

    outcomes = record.current(groups)
    date = datetime.date.today().isoformat()
    page = (given.out or ROOT / "docs" / "results") / f"{date}-gpu-{given.kind}.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(outcome.page(given.kind, date, about, record.commands[given.kind], groups, outcomes))
    print()
    for rows in outcome.tables(given.kind, selected, outcomes):
        print(outcome.as_text(rows) + "\n")
    print(outcome.as_text(outcome.verdicts_table(selected, outcomes)))
    print(f"\nwritten to {page}")
    failed = any(outcome.verdict(group, outcomes).status == "failed" for group in selected)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
