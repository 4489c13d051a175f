"""Tests of the runner, without torch and without a GPU."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))

import groups
import losses
import outcome
import run
import speed
from groups import Group, Job
from outcome import Outcome

ABOUT = {
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "torch": "2.11.0+cu130",
    "cuda": "13.0",
    "python": "3.12.1",
    "cushion": "0.2.0",
}


# Two rounds, the second at half the speed.
TURNS = {
    "native": [200.0, 400.0],
    "expandable": [50.0, 150.0],
    "cushion segments": [100.0, 200.0],
    "cushion expandable": [100.0, 300.0],
    "cushion paged": [50.0, 150.0],
}


def workload_line(items: float, peak: int, loss: float | None = None) -> dict:
    line = {"items_per_s": items, "step_s": [1 / items, 2 / items], "peak_reserved": peak, "oom": None}
    return line if loss is None else {**line, "loss": loss}


def gpt2(changes: dict[str, dict] | None = None) -> tuple[list[Group], dict[str, Outcome]]:
    """Returns the gpt2_train group with outcomes; `changes` replaces figures of the named modes."""
    group = next(group for group in groups.benches(3) if group.name == "gpt2_train")
    usual = {
        "native": workload_line(100.0, 1000, 5.0),
        "expandable": workload_line(80.0, 900, 5.001),
        "cushion segments": workload_line(110.0, 1000, 5.002),
        "cushion expandable": workload_line(100.0, 900, 4.999),
        "cushion paged": workload_line(88.0, 850, 5.0),
    }
    outcomes = {}
    for job in group.jobs:
        mode = outcome.mode_of(group, job)
        outcomes[job.key] = Outcome("passed", "", 10.0, {**usual[mode], **(changes or {}).get(mode, {})})
    return [group], outcomes


class Groups(unittest.TestCase):
    def test_every_program_exists(self):
        for group in [*groups.tests(), *groups.benches(1)]:
            for job in group.jobs:
                for name in (job.command[0], *job.runs):
                    self.assertTrue((run.HERE / name).exists() or not name.endswith(".py"), name)

    def test_keys_are_unique(self):
        jobs = [job for group in [*groups.tests(), *groups.benches(3)] for job in group.jobs]
        self.assertEqual(len({job.key for job in jobs}), len(jobs))

    def test_modes_alternate_and_every_second_round_is_reversed(self):
        group = groups.benches(2)[0]
        order = [outcome.mode_of(group, job) for job in group.jobs]
        self.assertEqual(order, [*groups.MODES, *reversed(groups.MODES)])

    def test_one_policy_only(self):
        group = groups.of_kind("bench", 2, "paged")[0]
        modes = {outcome.mode_of(group, job) for job in group.jobs}
        self.assertEqual((len(group.jobs), modes), (6, {"native", "expandable", "cushion paged"}))
        outcomes = {job.key: Outcome("passed", result=workload_line(1.0, 1, 2.0)) for job in group.jobs}
        self.assertEqual(outcome.verdict(group, outcomes).status, "passed")
        rows = [row[1] for row in outcome.workloads_table([group], outcomes)]
        self.assertEqual(rows, ["mode", "native", "expandable", "cushion paged"])
        every = {job.key for group in groups.of_kind("test", 1, "paged") for job in group.jobs}
        self.assertLessEqual({"race paged", "replayed generate", "contract", "capped"}, every)
        self.assertFalse({"race segments", "race expandable"} & every)

    def test_the_alive_group_runs_every_policy(self):
        group = next(group for group in groups.tests() if group.name == "alive")
        programs = ("graphs_under_shortage.py", "many_pools.py", "destroyed_stream.py")
        found = {(job.command[0], job.policy) for job in group.jobs}
        self.assertEqual(found, {(program, policy) for program in programs for policy in groups.POLICIES})
        every = groups.of_kind("test", 1, "paged")
        self.assertEqual(len(groups.chosen(every, ["alive"])[0].jobs), len(programs))

    def test_commands_of_measuring_programs(self):
        jobs = {job.key: job.command for group in groups.benches(1) for job in group.jobs}
        self.assertEqual(
            jobs["generate cushion expandable 1"],
            ("workloads.py", "generate", "cushion", "--policy", "expandable", "--steps", "12", "--wait"),
        )

    def test_chosen(self):
        every = groups.benches(1)
        self.assertEqual(groups.chosen(every, []), every)
        named = groups.chosen(every, ["speed", "generate"])
        self.assertEqual([group.name for group in named], ["generate", "speed"])
        together = groups.chosen(every, ["workloads"])
        self.assertEqual([group.name for group in together], list(groups.WORKLOADS))
        with self.assertRaisesRegex(ValueError, "no group nonsense; there are contract, api"):
            groups.chosen(groups.tests(), ["nonsense"])


class Outcomes(unittest.TestCase):
    def test_the_last_json_line_counts(self):
        self.assertEqual(outcome.last_json('{"a": 1}\ntalk\n{"a": 2}\n{broken\n'), {"a": 2})
        self.assertIsNone(outcome.last_json("talk\n"))

    def test_of_program(self):
        cases = [
            (0, '{"ok": true}', "passed", ""),
            (0, '{"items_per_s": 3, "oom": null}', "passed", ""),
            (1, '{"ok": false, "failures": ["x is 1, not 2", "y"]}', "failed", "x is 1, not 2; y"),
            (0, '{"oom": "CUDA out of memory."}', "failed", "out of memory: CUDA out of memory."),
            (0, '{"skipped": "there is no CUDA GPU"}', "skipped", "there is no CUDA GPU"),
            (-11, '{"ok": true}', "failed", "exit code -11 after its result: last words"),
            (1, "", "failed", "exit code 1, no result: last words"),
        ]
        for returncode, stdout, status, why in cases:
            with self.subTest(stdout=stdout, returncode=returncode):
                found = outcome.of_program(returncode, stdout, "last words\n", 1.0)
                self.assertEqual((found.status, found.why), (status, why))

    def test_of_contract(self):
        well = "gpu_contract: ok: pages\ngpu_contract: ok: events\ngpu_contract: PASSED\n"
        found = outcome.of_contract(0, well, "", 1.0)
        self.assertEqual((found.status, found.result["passed"]), ("passed", 2))
        ill = "gpu_contract: ok: pages\ngpu_contract: FAILED: events\ngpu_contract: FAILED\n"
        found = outcome.of_contract(1, ill, "", 1.0)
        self.assertEqual(found.status, "failed")
        self.assertIn("failed: events", found.why)
        self.assertEqual(outcome.of_contract(0, "", "", 1.0).status, "failed")
        self.assertEqual(outcome.of_contract(-6, well, "abort", 1.0).status, "failed")
        self.assertEqual(outcome.of_contract(0, "gpu_contract: SKIPPED: no GPU\n", "", 1.0).status, "skipped")


class Verdicts(unittest.TestCase):
    GROUP = Group("g", "", (Job("a", ("a.py",), 1), Job("b", ("b.py",), 1)))

    def status(self, **outcomes: Outcome) -> str:
        return outcome.verdict(self.GROUP, outcomes).status

    def test_status(self):
        passed, failed, skipped = Outcome("passed"), Outcome("failed", "x"), Outcome("skipped", "no nvcc")
        self.assertEqual(self.status(a=passed, b=passed), "passed")
        self.assertEqual(self.status(a=passed, b=failed), "failed")
        self.assertEqual(self.status(a=failed), "failed")
        self.assertEqual(self.status(a=passed), "unfinished")
        self.assertEqual(self.status(), "unfinished")
        self.assertEqual(self.status(a=skipped, b=skipped), "skipped")
        mixed = outcome.verdict(self.GROUP, {"a": passed, "b": skipped})
        self.assertEqual((mixed.status, mixed.why), ("passed", ["b skipped: no nvcc"]))

    def test_a_peak_off_by_a_byte_fails(self):
        chosen, outcomes = gpt2()
        self.assertEqual(outcome.verdict(chosen[0], outcomes).status, "passed")
        chosen, outcomes = gpt2({"cushion segments": {"peak_reserved": 1001}})
        found = outcome.verdict(chosen[0], outcomes)
        self.assertEqual(found.status, "failed")
        self.assertIn("peak reserved is [1001] under segments, and [1000] under native", found.why[0])

    def test_a_loss_out_of_bounds_fails(self):
        for mode in ("cushion expandable", "cushion paged"):
            for loss, status in ((5.004, "passed"), (5.006, "failed"), (float("nan"), "failed")):
                chosen, outcomes = gpt2({mode: {"loss": loss}})
                self.assertEqual(outcome.verdict(chosen[0], outcomes).status, status, (mode, loss))

    def test_a_wide_spread_of_native_losses_allows_more(self):
        chosen, outcomes = gpt2({"cushion segments": {"loss": 5.05}})
        self.assertEqual(outcome.verdict(chosen[0], outcomes).status, "failed")
        outcomes["gpt2_train native 2"].result["loss"] = 5.02
        self.assertEqual(outcome.verdict(chosen[0], outcomes).status, "passed")


class Losses(unittest.TestCase):
    def test_equal_where_pytorch_repeats_itself(self):
        same = dict.fromkeys(losses.RUNS, 2.5)
        self.assertEqual(losses.judge("w", same), [])
        self.assertEqual(len(losses.judge("w", {**same, "expandable": 2.500001})), 1)
        self.assertEqual(len(losses.judge("w", {**same, "paged": 2.499999})), 1)
        self.assertEqual(len(losses.judge("w", {**same, "segments": float("nan")})), 1)

    def test_near_where_pytorch_varies(self):
        near = {**dict.fromkeys(losses.RUNS, 2.5), "native 3": 2.6, "segments": 2.69, "expandable": 2.41}
        self.assertEqual(losses.judge("w", near), [])
        self.assertEqual(len(losses.judge("w", {**near, "segments": 2.71})), 1)
        self.assertEqual(len(losses.judge("w", {**near, "expandable": 2.39})), 1)

    def test_all_runs_are_of_one_kind(self):
        for job in losses.jobs_of("gpt2_train"):
            self.assertIn("--deterministic", job.command)
            self.assertTrue(job.waits)


class Player:
    """Records its turns."""

    def __init__(self, mode, log):
        self.mode = mode
        self.log = log

    def turn(self, line, cores):
        self.log.append((self.mode, line, cores))
        return float(len(self.log))


class MadeFrom(unittest.TestCase):
    def test_files_of_a_folder_count(self):
        with tempfile.TemporaryDirectory() as folder:
            job = Job("examples", ("examples.py",), 1, runs=(folder,))
            found = []
            for text in ("one", "other"):
                Path(folder, "example").write_text(text)
                run.HASHES.clear()
                found.append(run.made_from(job))
            self.assertNotEqual(*found)


class Speed(unittest.TestCase):
    def test_a_slow_round_is_slow_for_all(self):
        found = speed.figures(TURNS)
        self.assertEqual(found["native"], {"ns": 300.0})
        self.assertEqual(found["cushion segments"], {"ns": 150.0, "share": 0.5, "middle_half": [0.5, 0.5]})

    def test_turns_alternate_on_the_same_cores(self):
        log = []
        players = [Player(mode, log) for mode in "abc"]
        times = speed.play(players, "pair 4K", 4, [0, 3])
        self.assertEqual({mode: len(took) for mode, took in times.items()}, {"a": 4, "b": 4, "c": 4})
        rounds = [log[at : at + 3] for at in range(0, len(log), 3)]
        self.assertEqual([[mode for mode, *_ in turns] for turns in rounds[:3]], [[*"abc"], [*"bca"], [*"cab"]])
        self.assertEqual([turns[0][2] for turns in rounds[:3]], [[0], [3], [0]])
        self.assertTrue(all(turn[1:] == turns[0][1:] for turns in rounds for turn in turns))

    def test_four_threads_have_four_cores(self):
        self.assertEqual(speed.cores_for("4 threads", 3, list(range(8))), [4, 5, 6, 7])
        self.assertEqual(set(speed.cores_for("4 threads", 3, [0, 1])), {0, 1})


class Tables(unittest.TestCase):
    def test_workloads(self):
        chosen, outcomes = gpt2()
        # One round, then another, was disturbed.
        outcomes["gpt2_train native 1"].result.update(items_per_s=1.0, step_s=[3.0, 2 / 100])
        outcomes["gpt2_train native 2"].result["step_s"] = [1 / 100, 3.0]
        rows = {row[1]: row for row in outcome.workloads_table(chosen, outcomes)}
        self.assertEqual(rows["native"][2:7], ["100.0", "1.0 … 100.0", "", "", "1,000"])
        self.assertEqual(rows["expandable"][2:6], ["80.0", "80.0 … 80.0", "", ""])
        self.assertEqual(rows["cushion segments"][4:7], ["1.100", "1.375", "1,000 ="])
        self.assertEqual(rows["cushion expandable"][4:7], ["1.000", "1.250", "900 ="])
        self.assertEqual(rows["cushion paged"][4:7], ["0.880", "1.100", "850"])

    def test_speed(self):
        group = groups.benches(1)[-1]
        outcomes = {"speed": Outcome("passed", result={"lines": {"pair 4K": speed.figures(TURNS)}})}
        header, row = outcome.speed_table([group], outcomes)
        shares = ["0.500 (0.500 … 0.500)", "2.000 (2.000 … 2.000)", "1.000 (1.000 … 1.000)"]
        self.assertEqual(row, ["pair 4K", "300", "100", "150", "200", "100", *shares])
        self.assertEqual(len(header), len(row))
        self.assertEqual(outcome.speed_table([group], {}), [header])

    def test_figures(self):
        line = {
            "cycles": 1000,
            "refusals": 3090,
            "allocated_growth": 0,
            "reserved_growth": 0,
            "card_lost": -2097152,
            "rss_growth": 1048576,
        }
        said = outcome.figures({"checks": 9, **line})
        self.assertIn("1,000 cycles, 3,090 refusals", said)
        self.assertIn("card -2.0, process 1.0", said)
        part = {"same_address": 5, "allocs": 5}
        said = outcome.figures({"checks": 9, "beginning": part, "middle": {}})
        self.assertEqual(said, "5 of 5 from the beginning, None of None from the middle")
        self.assertEqual(outcome.figures({"checks": 9}), "9 checks")

    def test_as_text_and_markdown(self):
        rows = [["a", "long"], ["x" * 200, "b|c"]]
        self.assertEqual(max(map(len, outcome.as_text(rows).splitlines())), 100 + 2 + 4)
        self.assertEqual(outcome.as_markdown(rows[:1]), "| a | long |\n|---|---|")
        self.assertIn("b\\|c", outcome.as_markdown(rows))

    def test_everything_at_once_fits_ninety_lines(self):
        for kind in ("test", "bench"):
            every = groups.of_kind(kind, 3)
            outcomes = {}
            for group in every:
                for job in group.jobs:
                    line = {"checks": 3} if kind == "test" else workload_line(1.0, 1)
                    if group.name == "speed":
                        line = {"lines": dict.fromkeys(map(str, range(9)), speed.figures(TURNS))}
                    outcomes[job.key] = Outcome("passed", result=line)
            texts = [outcome.as_text(rows) for rows in outcome.tables(kind, every, outcomes)]
            texts.append(outcome.as_text(outcome.verdicts_table(every, outcomes)))
            self.assertLessEqual(len("\n\n".join(texts).splitlines()) + 3, 90)


class Pages(unittest.TestCase):
    def test_a_page_lists_failures_and_jobs_that_did_not_run(self):
        every = groups.tests()
        outcomes = {
            "contract": Outcome("skipped", "gpu-kit/gpu_contract is not there"),
            "race segments": Outcome("failed", "record_stream was wrong", 3.0, {"checks": 3}),
            "race expandable": Outcome("passed", "", 3.0, {"checks": 4}),
        }
        text = outcome.page("test", "2026-01-02", ABOUT, ["python tests/gpu/run.py test"], every, outcomes)
        beginning = "# Correctness on a GPU, 2026-01-02\n\nOne NVIDIA H200, driver 580.1"
        self.assertTrue(text.startswith(beginning))
        self.assertIn("```\npython tests/gpu/run.py test\n```", text)
        self.assertIn("| race segments | failed | 3 | 3 checks |", text)
        self.assertIn("## Failed\n\n- race: race segments: record_stream was wrong", text)
        self.assertIn("## Skipped\n\n- contract: gpu-kit/gpu_contract is not there", text)
        self.assertIn("- oom: 3 of 3 not run", text)
        self.assertNotIn("Every group passed", text)

    def test_a_page_where_all_passed(self):
        chosen, outcomes = gpt2()
        text = outcome.page("bench", "2026-01-02", ABOUT, ["x"], chosen, outcomes)
        self.assertIn("| gpt2_train | cushion segments | 110.0 | 110.0 … 110.0 | 1.100 | 1.375 | 1,000 = |", text)
        self.assertIn("Every group passed.", text)
        self.assertNotIn("ns per pair", text)


class Resuming(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.path = Path(self.folder.name) / "out" / "state.json"
        jobs = (Job("a", ("race.py",), 1), Job("b", ("race.py", "--policy", "native"), 1))
        self.group = Group("g", "", jobs)

    def record(self, about: dict = ABOUT) -> run.Record:
        record = run.Record(self.path, about)
        with contextlib.redirect_stdout(io.StringIO()):
            record.load()
        return record

    def ran(self, record: run.Record, fate=None) -> list[str]:
        """Returns the jobs that ran. They pass, unless `fate` returns another outcome."""
        keys = []

        def fake(jobs: list[Job]):
            for job in jobs:
                keys.append(job.key)
                yield fate(job) if fate else Outcome("passed", "", 1.0, {"checks": 1})

        with contextlib.redirect_stdout(io.StringIO()):
            run.run_groups([self.group], record, fake)
        return keys

    def test_passed_jobs_are_not_run_again(self):
        self.assertEqual(self.ran(self.record()), ["a", "b"])
        self.assertEqual(self.ran(self.record()), [])
        self.assertEqual(self.record().outcomes["a"].result, {"checks": 1})

    def test_failed_and_skipped_jobs_are_tried_again(self):
        def fate(job: Job) -> Outcome:
            return Outcome("failed", "x") if job.key == "a" else Outcome("skipped", "y")

        self.ran(self.record(), fate)
        record = self.record()
        self.assertEqual(self.ran(record), ["a", "b"])
        self.assertEqual(outcome.verdict(self.group, record.outcomes).why, ["a passed at try 2"])

    def test_a_stopped_run_continues(self):
        def fate(job: Job) -> Outcome:
            if job.key == "b":
                raise KeyboardInterrupt
            return Outcome("passed")

        with self.assertRaises(KeyboardInterrupt):
            self.ran(self.record(), fate)
        self.assertEqual(self.ran(self.record()), ["b"])

    def test_a_changed_program_is_run_again(self):
        self.ran(self.record())
        stored = json.loads(self.path.read_text())
        stored["outcomes"]["a"]["made_from"] = "another"
        self.path.write_text(json.dumps(stored))
        record = self.record()
        self.assertEqual(sorted(record.current([self.group])), ["b"])
        self.assertEqual(self.ran(record), ["a"])

    def test_other_versions_and_broken_records_start_over(self):
        self.ran(self.record())
        self.assertEqual(self.record({**ABOUT, "torch": "2.12.0"}).outcomes, {})
        self.path.write_text('{"about"')
        self.assertEqual(self.record().outcomes, {})

    def test_commands_are_recorded_once_without_folders(self):
        line = f"bench --group speed --rounds 2 --fresh --out {self.folder.name}"
        given = run.parse(line.split())
        self.assertEqual(run.told(given), "python tests/gpu/run.py bench --group speed --rounds 2")
        record = self.record()
        for _ in range(2):
            record.note_command("bench", run.told(given))
        self.assertEqual(len(record.commands["bench"]), 1)


class Running(unittest.TestCase):
    def program(self, text: str, timeout: int = 60) -> Outcome:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "program.py"
            path.write_text(text)
            with contextlib.redirect_stderr(io.StringIO()):
                return run.run_job(Job("x", (str(path), "--policy", "segments"), timeout))

    def test_a_program_gets_its_arguments(self):
        found = self.program("import json, sys; print(json.dumps({'ok': True, 'argv': sys.argv[1:]}))")
        self.assertEqual((found.status, found.result["argv"]), ("passed", ["--policy", "segments"]))

    def test_a_crash_after_the_result_is_a_failure(self):
        found = self.program("import os; print('{\"ok\": true}', flush=True); os.abort()")
        self.assertEqual(found.status, "failed")
        self.assertIn("exit code -6 after its result", found.why)

    def test_a_program_that_hangs_is_stopped_with_its_children(self):
        found = self.program("import subprocess; subprocess.run(['sleep', '60'])", timeout=1)
        self.assertEqual(found.status, "failed")
        self.assertIn("still running after 1 s", found.why)
        self.assertLess(found.seconds, 30)

    def test_waiting_jobs_are_ready_before_the_first_starts(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "program.py")
            path.write_text(
                "import json, os, sys\n"
                "open(sys.argv[1] + '.ready', 'w').close()\n"
                "print(json.dumps({'ready': True}), flush=True)\n"
                "said = sys.stdin.readline()\n"
                "found = sorted(name for name in os.listdir(os.path.dirname(sys.argv[1])) if 'ready' in name)\n"
                "print(json.dumps({'ok': said == 'go\\n', 'found': found}))\n"
            )
            jobs = [Job(name, (str(path), os.path.join(folder, name)), 20, waits=True) for name in "ab"]
            first, second = run.run_jobs(jobs)
            self.assertEqual((first.status, first.result["found"]), ("passed", ["a.ready", "b.ready"]))
            self.assertEqual(second.status, "passed")

    def test_waiting_jobs_end_when_a_run_is_stopped(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "program.py")
            path.write_text("print('{\"ready\": true}', flush=True)\ninput()\nprint('{\"ok\": true}')\n")
            jobs = [Job(name, (str(path),), 20, waits=True) for name in "ab"]
            with mock.patch.object(run, "start", wraps=run.start) as start:
                started = []
                start.side_effect = lambda job, start=start._mock_wraps: started.append(start(job)) or started[-1]
                outcomes = run.run_jobs(jobs)
                self.assertEqual(next(outcomes).status, "passed")
                outcomes.close()
            self.assertEqual([process.poll() is None for process in started], [False, False])

    def test_missing_programs_are_skipped(self):
        found = run.run_job(Job("x", ("gpu-kit/no-such-program",), 1))
        self.assertEqual((found.status, found.why), ("skipped", "gpu-kit/no-such-program is not there"))

    def test_unknown_groups_are_refused(self):
        with contextlib.redirect_stderr(io.StringIO()) as said:
            self.assertEqual(run.main(["test", "--group", "nonsense"]), 2)
        self.assertIn("no group nonsense", said.getvalue())


if __name__ == "__main__":
    unittest.main()
