"""The results of the jobs: the outcome of each job, the verdict of each group, the tables, and the page."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import dataclass, field
from typing import Any

from groups import MODES, SINGLE_STREAM, TWINS, WORKLOADS, Group, Job

# The last losses of PyTorch's own runs differ a little. Cushion's may differ from their median by this factor times
# their spread, or by this share of the median: another run of PyTorch itself would be outside their spread half the
# time.
LOSS_SPREADS = 3
LOSS_SHARE = 0.001


@dataclass
class Outcome:
    """The outcome of one job."""

    status: str  # passed, failed or skipped
    why: str = ""
    seconds: float = 0.0
    result: dict[str, Any] = field(default_factory=dict)
    made_from: str = ""  # a hash of the program and the package: after a change the outcome does not count
    tries: int = 1  # a failed job is tried again; the page shows that

    def __post_init__(self) -> None:
        assert self.status in ("passed", "failed", "skipped"), self.status


@dataclass
class Verdict:
    """The verdict of one group."""

    status: str  # passed, failed, skipped, or unfinished
    why: list[str]
    seconds: float


def last_json(stdout: str) -> dict[str, Any] | None:
    for line in reversed(stdout.splitlines()):
        if line.startswith("{"):
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                return found
    return None


def last_words(stderr: str, lines: int = 3) -> str:
    said = [line.strip() for line in stderr.splitlines() if line.strip()]
    return " / ".join(said[-lines:])[:500]


def of_program(returncode: int, stdout: str, stderr: str, seconds: float) -> Outcome:
    """Returns the outcome of a Python program, from its line of JSON and its exit code."""
    line = last_json(stdout)
    if line is None:
        return Outcome("failed", f"exit code {returncode}, no result: {last_words(stderr)}", seconds)
    if "skipped" in line:
        return Outcome("skipped", str(line["skipped"]), seconds)
    why = "; ".join(line.get("failures", []))
    if line.get("oom"):
        why = f"out of memory: {line['oom']}"
    if line.get("ok", True) and not why and returncode == 0:
        return Outcome("passed", "", seconds, line)
    why = why or f"exit code {returncode} after its result: {last_words(stderr)}"
    return Outcome("failed", why, seconds, line)


def of_contract(returncode: int, stdout: str, stderr: str, seconds: float) -> Outcome:
    """Returns the outcome of the checks of the CUDA layer, which print a line for each."""
    skipped = re.search(r"^gpu_contract: SKIPPED: (.*)$", stdout, re.MULTILINE)
    if skipped is not None:
        return Outcome("skipped", skipped[1], seconds)
    passed = re.findall(r"^gpu_contract: ok: (.*)$", stdout, re.MULTILINE)
    failed = re.findall(r"^gpu_contract: FAILED: (.*)$", stdout, re.MULTILINE)
    result = {"passed": len(passed), "failed": len(failed)}
    if returncode == 0 and not failed and passed and "gpu_contract: PASSED" in stdout:
        return Outcome("passed", "", seconds, result)
    why = f"failed: {', '.join(failed)}" if failed else f"exit code {returncode} after {len(passed)} checks"
    return Outcome("failed", f"{why}: {last_words(stderr)}", seconds, result)


# Verdicts


def verdict(group: Group, outcomes: dict[str, Outcome]) -> Verdict:
    mine = [outcomes[job.key] for job in group.jobs if job.key in outcomes]
    seconds = sum(outcome.seconds for outcome in mine)
    failures = [
        f"{job.key}: {outcomes[job.key].why}"
        for job in group.jobs
        if job.key in outcomes and outcomes[job.key].status == "failed"
    ]
    if failures:
        return Verdict("failed", failures, seconds)
    if len(mine) < len(group.jobs):
        return Verdict("unfinished", [f"{len(group.jobs) - len(mine)} of {len(group.jobs)} not run"], seconds)
    if all(outcome.status == "skipped" for outcome in mine):
        return Verdict("skipped", sorted({outcome.why for outcome in mine}), seconds)
    if group.name in WORKLOADS:
        wrong = wrong_figures(group.name, by_mode(group, outcomes, MODES))
        if wrong:
            return Verdict("failed", wrong, seconds)
    notes = [note for job in group.jobs for note in noteworthy(job, outcomes[job.key])]
    return Verdict("passed", notes, seconds)


def noteworthy(job: Job, found: Outcome) -> list[str]:
    """Returns the remarks on a job in a group that passed."""
    if found.status == "skipped":
        return [f"{job.key} skipped: {found.why}"]
    return [f"{job.key} passed at try {found.tries}"] if found.tries > 1 else []


def by_mode(group: Group, outcomes: dict[str, Outcome], modes: dict) -> dict[str, list[dict]]:
    """Returns the results of each mode, by round."""
    return {
        mode: [
            outcomes[job.key].result
            for job in group.jobs
            if mode_of(group, job) == mode and job.key in outcomes and outcomes[job.key].result
        ]
        for mode in modes
    }


def mode_of(group: Group, job: Job) -> str:
    """Returns the mode in a key of `alternating`, which is the name of the group, the mode and the round."""
    return job.key.removeprefix(group.name + " ").rsplit(" ", 1)[0]


def wrong_figures(workload: str, results: dict[str, list[dict]]) -> list[str]:
    """Returns what is wrong with Cushion's figures on a workload, compared with PyTorch's."""
    wrong = []
    native = losses(results["native"])
    if native:
        middle = statistics.median(native)
        allowed = max(LOSS_SPREADS * (max(native) - min(native)), LOSS_SHARE * abs(middle))
        for mode in MODES:
            for loss in losses(results[mode]):
                if not abs(loss - middle) <= allowed:
                    wrong.append(
                        f"{workload}, {mode}: the last loss is {loss}, "
                        f"and PyTorch's {middle} give or take {allowed:.6f}"
                    )
    if workload in SINGLE_STREAM and results["cushion segments"]:
        ours, theirs = (peaks(results[mode]) for mode in ("cushion segments", "native"))
        if ours != theirs:
            wrong.append(f"{workload}: peak reserved is {ours} under segments, and {theirs} under native")
    return wrong


def losses(results: list[dict]) -> list[float]:
    return [result["loss"] for result in results if "loss" in result]


def peaks(results: list[dict]) -> list[int]:
    """Returns the distinct values of peak reserved."""
    return sorted({result["peak_reserved"] for result in results})


# Tables


def ratio(value: float | None, by: float | None) -> str:
    return "" if value is None or not by else f"{value / by:.3f}"


def number(value: float | None, digits: int = 0) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def tests_table(groups: list[Group], outcomes: dict[str, Outcome]) -> list[list[str]]:
    rows = [["check", "result", "seconds", "figures"]]
    for group in groups:
        for job in group.jobs:
            outcome = outcomes.get(job.key)
            if outcome is None:
                rows.append([job.key, "not run", "", ""])
            else:
                said = outcome.why if outcome.status == "skipped" else figures(outcome.result)
                rows.append([job.key, outcome.status, number(outcome.seconds), said])
    return rows


def figures(result: dict[str, Any]) -> str:
    """Returns the figures of one program's result for the table."""
    if "cycles" in result:
        growth = ", ".join(
            f"{name} {result[key] / (1 << 20):.1f}"
            for name, key in (
                ("allocated", "allocated_growth"),
                ("reserved", "reserved_growth"),
                ("card", "card_lost"),
                ("process", "rss_growth"),
            )
        )
        return f"{result['cycles']:,} cycles, {result['refusals']:,} refusals; growth in MiB: {growth}"
    if "replays" in result:
        return (
            f"{result['replays']:,} replays of {result['graphs']} graphs, {result['wrong']} wrong, "
            f"{result['exact']:,} to the bit"
        )
    if "repeats" in result:
        ways = ("unprotected", "record_stream", "wait_stream", "both")
        return f"wrong of {result['repeats']}: " + ", ".join(f"{way} {result[way]['wrong']}" for way in ways)
    if "beginning" in result:
        return ", ".join(
            f"{result[part].get('same_address')} of {result[part].get('allocs')} from the {part}"
            for part in ("beginning", "middle")
        )
    if "losses" in result:
        return "; ".join(
            f"{workload}: {', '.join(str(loss) for loss in losses.values())}"
            for workload, losses in result["losses"].items()
        )
    if "told" in result:
        return str(result["told"])
    if "passed" in result:
        return f"{result['passed']} checks"
    return f"{result['checks']} checks" if "checks" in result else ""


def workloads_table(groups: list[Group], outcomes: dict[str, Outcome]) -> list[list[str]]:
    """Returns items per second: the median, minimum and maximum of all rounds; and Cushion's speed divided by
    PyTorch's."""
    rows = [["workload", "mode", "items/s", "least … most", "/ native", "/ expandable", "peak reserved", "last loss"]]
    for group in groups:
        if group.name not in WORKLOADS:
            continue
        results = by_mode(group, outcomes, MODES)
        for mode in MODES:
            if not results[mode]:
                continue
            speeds = [result["items_per_s"] for result in results[mode]]
            spread = f"{number(min(speeds), 1)} … {number(max(speeds), 1)}"
            shares = ["", ""]
            if mode in TWINS:
                ours = undisturbed(results[mode])
                shares = [ratio(undisturbed(results[theirs]), ours) for theirs in ("native", "expandable")]
            peak = " ".join(f"{value:,}" for value in peaks(results[mode]))
            if mode in TWINS and peaks(results[mode]) == peaks(results[TWINS[mode]]):
                peak += " ="
            seen = losses(results[mode])
            span = " … ".join(str(loss) for loss in sorted({min(seen), max(seen)})) if seen else ""
            rows.append([group.name, mode, number(statistics.median(speeds), 1), spread, *shares, peak, span])
    return rows


def undisturbed(results: list[dict]) -> float | None:
    """Returns the seconds of a run in which every step took its median over the rounds. A step is the same work in all
    rounds, and disturbances seldom hit the same step twice."""
    steps = list(zip(*(result["step_s"] for result in results)))
    return sum(statistics.median(took) for took in steps) if steps else None


def speed_table(groups: list[Group], outcomes: dict[str, Outcome]) -> list[list[str]]:
    """Returns nanoseconds, and Cushion's time divided by PyTorch's, with the quartiles over the rounds."""
    rows = [["ns per pair", *MODES, *(f"{mode} / {twin}" for mode, twin in TWINS.items())]]
    for group in groups:
        for job in group.jobs if group.name == "speed" else ():
            lines = outcomes[job.key].result.get("lines", {}) if job.key in outcomes else {}
            for line, modes in lines.items():
                shares = (modes[mode] for mode in TWINS)
                rows.append(
                    [
                        line,
                        *(number(modes[mode]["ns"]) for mode in MODES),
                        *("{share:.3f} ({0:.3f} … {1:.3f})".format(*of["middle_half"], **of) for of in shares),
                    ]
                )
    return rows


def verdicts_table(groups: list[Group], outcomes: dict[str, Outcome]) -> list[list[str]]:
    rows = [["group", "result", "seconds", "why"]]
    for group in groups:
        found = verdict(group, outcomes)
        rows.append([group.name, found.status, number(found.seconds), "; ".join(found.why)])
    return rows


def as_text(rows: list[list[str]], widest: int = 100) -> str:
    """Formats a table for a terminal."""
    cut = [[cell if len(cell) <= widest else cell[: widest - 1] + "…" for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in cut) for column in range(len(cut[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in cut)


def as_markdown(rows: list[list[str]]) -> str:
    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return "\n".join([line(rows[0]), "|" + "---|" * len(rows[0]), *(line(row) for row in rows[1:])])


def tables(kind: str, groups: list[Group], outcomes: dict[str, Outcome]) -> list[list[list[str]]]:
    """Returns the tables of a kind of run, without empty ones."""
    if kind == "test":
        made = [tests_table(groups, outcomes)]
    else:
        made = [workloads_table(groups, outcomes), speed_table(groups, outcomes)]
    return [rows for rows in made if len(rows) > 1]


# The page

TITLES = {"test": "Correctness on a GPU", "bench": "Speed and memory on a GPU"}

NOTES = {
    "test": "Each row is one program of `tests/gpu`, run in its own process. Its first lines describe it.",
    "bench": (
        "Modes alternate; every second round is reversed. *native* and *expandable* are PyTorch's allocator\n"
        "without and with `expandable_segments:True`. Items per second are medians over the rounds, with minimum and\n"
        "maximum. Cushion's speed relative to PyTorch's is computed from the steps, each of which is the same work in\n"
        "every run: from the sum of their medians over the rounds, so that a disturbance in one round does not count.\n"
        "Peak reserved is in bytes; `=` means that it is equal, to the byte, to native's under `segments`, and to\n"
        "expandable's under the other policies.\n\n"
        "Nanoseconds are medians of turns of a few hundredths of a second, in which the modes alternate;\n"
        "Cushion's share is the median of the shares of the rounds, with the quartiles in brackets."
    ),
}


def page(
    kind: str,
    date: str,
    about: dict[str, str],
    commands: list[str],
    groups: list[Group],
    outcomes: dict[str, Outcome],
) -> str:
    verdicts = {group.name: verdict(group, outcomes) for group in groups}
    facts = (
        f"One {about['gpu']}, driver {about['driver']}, torch {about['torch']}, CUDA {about['cuda']}, "
        f"Python {about['python']}, Cushion {about['cushion']}."
    )
    made_by = "```\n" + "\n".join(commands) + "\n```"
    parts = [f"# {TITLES[kind]}, {date}", facts, "Made by", made_by, NOTES[kind]]
    parts += [as_markdown(rows) for rows in tables(kind, groups, outcomes)]
    for status, heading in (
        ("failed", "Failed"),
        ("skipped", "Skipped"),
        ("unfinished", "Not run, or not finished"),
    ):
        found = [name for name in verdicts if verdicts[name].status == status]
        if found:
            lines = [f"- {name}: {why}" for name in found for why in verdicts[name].why]
            parts.append(f"## {heading}\n\n" + "\n".join(lines))
    notes = [why for found in verdicts.values() if found.status == "passed" for why in found.why]
    if notes:
        parts.append("## Remarks on groups that passed\n\n" + "\n".join(f"- {note}" for note in notes))
    if all(found.status == "passed" for found in verdicts.values()):
        parts.append("Every group passed.")
    return "\n\n".join(parts) + "\n"
