"""Recorded history: its stacks, what it skips, and that the tools of Cushion and PyTorch read it."""

from __future__ import annotations

import inspect
import json
import os
import tempfile
import unittest
from typing import Any

import support
from support import GIB, MIB, TorchCase, process


def line() -> int:
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


class History(TorchCase):
    changes = {"STANDIN_CAPACITY": str(4 * GIB)}

    def entries(self, torch: Any, *actions: str) -> list[dict[str, Any]]:
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
        return [entry for entry in trace if not actions or entry["action"] in actions]

    def test_frames_name_file_line_and_function(self) -> None:
        torch = self.install()
        torch.cuda.memory._record_memory_history(stacks="python")

        def inner() -> tuple[Any, int]:
            return torch.empty(MIB, dtype=torch.uint8, device="cuda"), line()

        kept, at = inner()
        outer = line() - 1
        (entry,) = self.entries(torch, "alloc")
        self.assertEqual((entry["addr"], entry["size"]), (kept.data_ptr(), MIB))
        first, second = entry["frames"][:2]
        self.assertEqual(first, {"filename": __file__, "line": at, "name": "inner"})
        self.assertEqual(second["line"], outer)
        self.assertEqual(second["name"], inspect.currentframe().f_code.co_name)  # type: ignore[union-attr]
        segment = next(s for s in torch.cuda.memory._snapshot()["segments"] if s["address"] <= kept.data_ptr())
        self.assertEqual(segment["blocks"][0]["frames"][0], first)
        traceback = (
            torch.cuda.memory._allocation_traceback(kept.data_ptr())
            if hasattr(torch.cuda.memory, "_allocation_traceback")
            else torch._C._cuda_allocationTraceback(kept.data_ptr())
            if hasattr(torch._C, "_cuda_allocationTraceback")
            else entry["frames"]
        )
        self.assertEqual(traceback, entry["frames"])

    def test_a_free_has_the_stack_of_the_free(self) -> None:
        torch = self.install()
        torch.cuda.memory._record_memory_history(stacks="python")
        kept = torch.empty(MIB, dtype=torch.uint8, device="cuda")

        def drop(held: list[Any]) -> None:
            held.clear()

        held = [kept]
        del kept
        drop(held)
        for entry in self.entries(torch, "free_requested", "free_completed"):
            self.assertEqual(entry["frames"][0]["name"], "drop")

    def test_context_levels(self) -> None:
        torch = self.install()
        expected = {
            # context: whether (live blocks, alloc events, free events) have stacks. With "alloc" the event of a free
            # has the stack of the allocation.
            None: (False, False, False),
            "state": (True, False, False),
            "alloc": (True, True, True),
            "all": (True, True, True),
        }
        for context, (live, alloc, free) in expected.items():
            with self.subTest(context):
                torch.cuda.memory._record_memory_history(None)
                torch.cuda.memory._record_memory_history("all", context=context, stacks="python")
                kept = torch.empty(MIB, dtype=torch.uint8, device="cuda")
                torch.empty(MIB, dtype=torch.uint8, device="cuda")
                snapshot = torch.cuda.memory._snapshot()
                trace = snapshot["device_traces"][0]
                self.assertEqual({bool(e.get("frames")) for e in trace if e["action"] == "alloc"}, {alloc})
                self.assertEqual({bool(e.get("frames")) for e in trace if e["action"].startswith("free")}, {free})
                blocks = [b for s in snapshot["segments"] for b in s["blocks"] if b["address"] == kept.data_ptr()]
                self.assertEqual([bool(block["frames"]) for block in blocks], [live])
                del kept

    def test_actions(self) -> None:
        torch = self.install()
        torch.cuda.memory._record_memory_history(stacks="python")
        kept = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
        address = kept.data_ptr()
        del kept
        torch.cuda.empty_cache()
        got, gone = (
            ("segment_map", "segment_unmap")
            if self.policy in ("expandable", "paged")
            else ("segment_alloc", "segment_free")
        )
        found = [(entry["action"], entry["addr"], entry["size"]) for entry in self.entries(torch)]
        found = [entry for entry in found if entry[0] != "snapshot"]
        size = 40 * MIB if self.policy == "expandable" else 30 * MIB
        self.assertEqual(
            found,
            [
                (got, address, size),
                ("alloc", address, 30 * MIB),
                ("free_requested", address, 30 * MIB),
                ("free_completed", address, 30 * MIB),
                (gone, address, size),
            ],
        )
        for entry in self.entries(torch):
            self.assertEqual(entry["stream"], 0)
        times = [entry["time_us"] for entry in self.entries(torch)]
        self.assertEqual(times, sorted(times))
        import time

        self.assertLess(abs(times[0] / 1e6 - time.time()), 600)

    def test_skip_actions(self) -> None:
        torch = self.install()
        if "skip_actions" not in inspect.signature(torch.cuda.memory._record_memory_history_impl).parameters:
            self.skipTest(f"torch {torch.__version__} has no skip_actions")
        torch.cuda.memory._record_memory_history(stacks="python", skip_actions=["free_requested", "free_completed"])
        torch.empty(MIB, dtype=torch.uint8, device="cuda")
        actions = {entry["action"] for entry in self.entries(torch)}
        self.assertIn("alloc", actions)
        self.assertEqual({action for action in actions if action.startswith("free")}, set())

    def test_max_entries_keeps_the_last(self) -> None:
        torch = self.install()
        torch.cuda.memory._record_memory_history(max_entries=3, stacks="python")
        for _ in range(10):
            torch.empty(MIB, dtype=torch.uint8, device="cuda")
        actions = [entry["action"] for entry in self.entries(torch) if entry["action"] != "snapshot"]
        self.assertEqual(actions, ["alloc", "free_requested", "free_completed"])

    def test_clear_history(self) -> None:
        torch = self.install()
        record = torch.cuda.memory._record_memory_history
        if "clear_history" not in inspect.signature(torch.cuda.memory._record_memory_history_impl).parameters:
            self.skipTest(f"torch {torch.__version__} has no clear_history")
        record(stacks="python")
        torch.empty(MIB, dtype=torch.uint8, device="cuda")
        record(stacks="python")
        self.assertEqual(len(self.entries(torch, "alloc")), 1)
        record(clear_history=True, stacks="python")
        self.assertEqual(len(self.entries(torch, "alloc")), 0)
        torch.empty(MIB, dtype=torch.uint8, device="cuda")
        self.assertEqual(len(self.entries(torch, "alloc")), 1)

    def test_off(self) -> None:
        torch = self.install()
        torch.cuda.memory._record_memory_history(stacks="python")
        torch.empty(MIB, dtype=torch.uint8, device="cuda")
        torch.cuda.memory._record_memory_history(None)
        if hasattr(torch._C, "_cuda_isHistoryEnabled"):
            self.assertFalse(torch._C._cuda_isHistoryEnabled())
        torch.empty(MIB, dtype=torch.uint8, device="cuda")
        self.assertEqual(self.entries(torch, "alloc"), [])

    def test_state(self) -> None:
        torch = self.install()
        torch.cuda.memory._record_memory_history("state", stacks="python")
        kept = torch.empty(MIB, dtype=torch.uint8, device="cuda")
        torch.empty(2 * MIB, dtype=torch.uint8, device="cuda")
        snapshot = torch.cuda.memory._snapshot()
        self.assertLessEqual(len(snapshot["device_traces"][0]), 1)
        blocks = [b for s in snapshot["segments"] for b in s["blocks"] if b["address"] == kept.data_ptr()]
        self.assertTrue(blocks[0]["frames"])

    def test_the_legacy_signature(self) -> None:
        torch = self.install()
        torch.cuda.memory._record_memory_history(True, trace_alloc_max_entries=100, trace_alloc_record_context=True)
        torch.empty(MIB, dtype=torch.uint8, device="cuda")
        (entry,) = self.entries(torch, "alloc")
        self.assertTrue(entry["frames"])
        torch.cuda.memory._record_memory_history(False)
        torch.empty(MIB, dtype=torch.uint8, device="cuda")
        self.assertEqual(self.entries(torch), [])

    def test_bad_arguments(self) -> None:
        torch = self.install()
        record = torch.cuda.memory._record_memory_history
        for arguments in ({"enabled": "some"}, {"context": "some"}, {"stacks": "some"}):
            with self.subTest(arguments), self.assertRaises((ValueError, RuntimeError)):
                record(**arguments)

    def test_from_threads_without_python(self) -> None:
        torch = self.install()
        torch.cuda.memory._record_memory_history(stacks="python")
        # The backward pass allocates on a thread of autograd.
        leaf = torch.ones(1024, device="cuda", requires_grad=True)
        (leaf * 2).sum().backward()
        self.assertGreater(len(self.entries(torch, "alloc")), 2)

    def test_frames_of_deleted_code_keep_their_names(self) -> None:
        import gc

        torch = self.install()
        torch.cuda.memory._record_memory_history(stacks="python")
        names = [f"made_{n}" for n in range(50)]
        kept = []
        for name in names:
            scope: dict[str, Any] = {"torch": torch}
            exec(compile(f"def {name}():\n    return torch.empty(512, device='cuda')\n", f"<{name}>", "exec"), scope)
            kept.append(scope.pop(name)())
            del scope
            gc.collect()
        found = [(e["frames"][0]["name"], e["frames"][0]["filename"]) for e in self.entries(torch, "alloc")]
        self.assertEqual(found, [(name, f"<{name}>") for name in names])


class HistoryOfPyTorch(History):
    policy = None


class HistoryExpandable(History):
    policy = "expandable"


class HistoryPaged(History):
    policy = "paged"
    # It expects PyTorch's sizes, to the byte.
    test_actions = None  # type: ignore[assignment]


def _work(torch: Any, seed: int, before: bool) -> None:
    import random

    dice = random.Random(seed)
    side = torch.cuda.Stream()
    live: list[Any] = []

    def some(count: int) -> None:
        for _ in range(count):
            if live and dice.random() < 0.45:
                live.pop(dice.randrange(len(live)))
            else:
                with torch.cuda.stream(side if dice.random() < 0.2 else torch.cuda.default_stream()):
                    live.append(torch.empty(int(2 ** dice.uniform(5, 26)), dtype=torch.uint8, device="cuda"))
            if dice.random() < 0.01:
                torch.cuda.empty_cache()

    if before:
        some(150)
    torch.cuda.memory._record_memory_history(stacks="python")
    some(400)


class Replay(TorchCase):
    """`cushion replay` of a file of `_dump_snapshot` gives the same addresses."""

    changes = {"STANDIN_CAPACITY": str(16 * GIB)}

    def dump(self, before: bool) -> str:
        torch = self.install()
        _work(torch, 7, before)
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        path = os.path.join(folder.name, "dump.pickle")
        torch.cuda.memory._dump_snapshot(path)
        return path

    def assert_replays(self, path: str) -> None:
        done = support.python("-m", "cushion", "replay", path, "--verify", "--json", "--policy", self.policy)
        self.assertEqual(done.returncode, 0, done.stderr)
        found = json.loads(done.stdout)
        self.assertGreater(found["allocs"], 150)
        self.assertEqual(found["same_address"], found["allocs"], found)

    def test_from_the_beginning(self) -> None:
        self.assert_replays(self.dump(before=False))

    def test_from_the_middle(self) -> None:
        self.assert_replays(self.dump(before=True))

    def test_tools_of_pytorch(self) -> None:
        import pickle

        from torch.cuda import _memory_viz as viz

        with open(self.dump(before=True), "rb") as file:
            snapshot = pickle.load(file)
        for page in (viz.trace_plot(snapshot), viz.segment_plot(snapshot)):
            self.assertIn("<html>", page.lower().replace("<!doctype html>", "<html>"))
        self.assertIn(" = MEM[", viz.trace(snapshot))
        self.assertTrue(viz.segsum(snapshot))
        if hasattr(viz, "calc_active"):
            active = sum(segment["active_size"] for segment in snapshot["segments"])
            blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
            pending = sum(block["size"] for block in blocks if block["state"] == "active_pending_free")
            self.assertEqual(sum(map(viz.calc_active, snapshot["segments"])) + pending, active)
        flame = [getattr(viz, name) for name in ("segments", "memory")]
        for draw in flame:
            # The plot uses a script from the network. Only the download is replaced.
            fetched: list[str] = []
            draw(snapshot, lambda lines: fetched.append(lines) or "svg")
            self.assertTrue(fetched[0].strip())
        viz.compare(snapshot["segments"], snapshot["segments"], lambda lines: "svg")


class ReplayExpandable(Replay):
    policy = "expandable"


class ReplayPaged(Replay):
    """A trace does not record which addresses are stitches: it is replayed, and addresses are not compared."""

    policy = "paged"

    def assert_replays(self, path: str) -> None:
        done = support.python("-m", "cushion", "replay", path, "--json", "--policy", self.policy)
        self.assertEqual(done.returncode, 0, done.stderr)
        found = json.loads(done.stdout)
        self.assertGreater(found["allocs"], 150)
        self.assertIsNone(found["oom"])


if __name__ == "__main__":
    unittest.main()
