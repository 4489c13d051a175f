"""A second `cushion.install()` changes the options it is given, and nothing else."""

from __future__ import annotations

import os
import tempfile
import unittest
from pathlib import Path
from typing import Any

from simulated import Simulated
from support import MIB, TorchCase, fork_while, process


class SecondInstall(TorchCase):
    policy = "segments"

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def short(self, torch: Any, size: int = 2048 * MIB) -> None:
        """Allocates more than the device has."""
        with self.assertRaises(torch.cuda.OutOfMemoryError):
            torch.empty(size, dtype=torch.uint8, device="cuda")

    def fails(self, torch: Any) -> bool:
        """Returns whether an injected failure hits a small allocation."""
        try:
            torch.empty(MIB, dtype=torch.uint8, device="cuda")
        except torch.cuda.OutOfMemoryError:
            return True
        return False

    def lines(self, name: str) -> int:
        return len((self.folder / name).read_text().splitlines())

    def conf(self) -> set[str]:
        from cushion import _cushion

        return set(filter(None, _cushion.conf().split(",")))

    def test_without_arguments_it_changes_nothing(self) -> None:
        import cushion
        from cushion import _cushion

        file = self.folder / "a.jsonl"
        torch = self.install(
            wait_ms=100, skip_rungs=["borrow"], conf="max_split_size_mb:64", receipts=file, enable_logging=True
        )
        before = _cushion.conf()
        self.assertEqual(
            self.conf(), {"paged:False", "wait_ms:100", "skip_rungs:borrow", "max_split_size_mb:64"}, before
        )
        self.short(torch)
        cushion.install()
        self.assertEqual(_cushion.conf(), before)
        with self.assertLogs("cushion", "WARNING"):
            self.short(torch)
        self.assertEqual(self.lines("a.jsonl"), 2)

    def test_one_option(self) -> None:
        import cushion

        file = self.folder / "a.jsonl"
        torch = self.install(conf="max_split_size_mb:64,garbage_collection_threshold:0.5", receipts=file)
        cushion.install(wait_ms=0)
        given = {"paged:False", "max_split_size_mb:64", "garbage_collection_threshold:0.5"}
        self.assertEqual(self.conf(), {*given, "wait_ms:0"})
        # Back to its default.
        cushion.install(wait_ms=3000)
        self.assertEqual(self.conf(), given)
        cushion.install(conf="max_split_size_mb:80", skip_rungs=["wait"])
        self.assertEqual(self.conf(), {*given, "max_split_size_mb:80", "skip_rungs:wait"} - {"max_split_size_mb:64"})
        self.short(torch)
        self.assertEqual(torch.cuda.memory_stats()["max_split_size"], 80 * MIB)
        self.assertEqual(self.lines("a.jsonl"), 1)

    def test_policy(self) -> None:
        import cushion

        self.install(wait_ms=0)
        for policy, named in (("expandable", "expandable_segments:True"), ("paged", ""), ("segments", "paged:False")):
            cushion.install(policy=policy)
            self.assertEqual(self.conf() - {"paged:False"} | {named}, {"wait_ms:0", named})
            cushion.install(wait_ms=0)
            self.assertIn(named, {"", *self.conf()})
        # As in the environment, a conf string may select a policy too.
        cushion.install(conf="expandable_segments:True")
        self.assertIn("expandable_segments:True", self.conf())
        cushion.install(conf="paged:False")
        self.assertEqual(self.conf(), {"wait_ms:0", "paged:False"})

    def test_settings_made_through_pytorch_stay(self) -> None:
        import cushion

        torch = self.install(wait_ms=0)
        torch.cuda.memory._set_allocator_settings("max_split_size_mb:64")
        torch.cuda.set_per_process_memory_fraction(0.25)
        cushion.install(conf="page_mb:32")
        self.assertEqual(self.conf(), {"paged:False", "wait_ms:0", "max_split_size_mb:64", "page_mb:32"})
        self.short(torch, 300 * MIB)

    def test_without_arguments_it_opens_no_file(self) -> None:
        import cushion

        self.install(receipts=self.folder / "a.jsonl")
        os.remove(self.folder / "a.jsonl")
        cushion.install()
        self.assertEqual(os.listdir(self.folder), [])

    def test_receipts(self) -> None:
        import cushion

        torch = self.install(receipts=self.folder / "a.jsonl")
        self.short(torch)
        cushion.install(receipts=self.folder / "b.jsonl")
        self.short(torch)
        cushion.install(wait_ms=0)
        self.short(torch)
        cushion.install(receipts="")
        self.short(torch)
        cushion.install()
        self.short(torch)
        self.assertEqual((self.lines("a.jsonl"), self.lines("b.jsonl")), (1, 2))

    def test_receipts_after_a_change_of_the_working_directory(self) -> None:
        import cushion

        (self.folder / "other").mkdir()
        os.chdir(self.folder)
        torch = self.install(receipts="a.jsonl")
        os.chdir("other")
        cushion.install(wait_ms=0)
        self.short(torch)
        self.assertEqual(os.listdir("."), [])
        self.assertEqual(self.lines("a.jsonl"), 1)

    def test_a_file_that_cannot_be_opened_changes_nothing(self) -> None:
        import cushion

        torch = self.install(receipts=self.folder / "a.jsonl")
        with self.assertRaisesRegex(ValueError, "receipts cannot be written"):
            cushion.install(receipts=self.folder / "none" / "b.jsonl", wait_ms=0)
        self.assertNotIn("wait_ms:0", self.conf())
        self.short(torch)
        self.assertEqual(self.lines("a.jsonl"), 1)

    def test_injection(self) -> None:
        import cushion

        torch = self.install(inject="nth=3")
        self.assertFalse(self.fails(torch))
        cushion.install()
        cushion.install(wait_ms=0)
        cushion.install(inject="nth=3")
        # The rule keeps its count.
        self.assertEqual([self.fails(torch) for _ in range(3)], [False, True, False])
        cushion.install(inject="every=1")
        self.assertTrue(self.fails(torch))
        cushion.install(inject="")
        self.assertFalse(self.fails(torch))

    def test_injection_by_the_program_stays(self) -> None:
        import cushion

        torch = self.install(inject="nth=1000")
        with cushion.inject("every=1"):
            cushion.install(wait_ms=0)
            self.assertTrue(self.fails(torch))
        cushion.install(wait_ms=10)
        self.assertFalse(self.fails(torch))
        cushion.install(inject="every=1")
        self.assertTrue(self.fails(torch))

    def test_an_invalid_option_changes_nothing(self) -> None:
        import cushion

        self.install(wait_ms=0)
        for name, settings in (
            ("policy", {"policy": "best", "wait_ms": 7}),
            ("conf", {"conf": "max_split_size_mb:64,no_such:1"}),
            ("inject", {"inject": "soon", "policy": "paged"}),
        ):
            with self.subTest(name), self.assertRaisesRegex(ValueError, f"^{name}"):
                cushion.install(**settings)  # type: ignore[arg-type]
        self.assertEqual(self.conf(), {"paged:False", "wait_ms:0"})

    @process(CUSHION_WAIT_MS="70", CUSHION_INJECT="nth=1000")
    def test_the_environment_is_read_once(self) -> None:
        import cushion

        torch = self.install()
        os.environ.update(CUSHION_POLICY="expandable", CUSHION_WAIT_MS="80", CUSHION_INJECT="every=1")
        os.environ.update(CUSHION_RECEIPTS=str(self.folder / "a.jsonl"), CUSHION_LOG="1")
        cushion.install()
        cushion.install(conf="max_split_size_mb:64")
        self.assertEqual(self.conf(), {"paged:False", "wait_ms:70", "max_split_size_mb:64"})
        self.assertFalse(self.fails(torch))
        self.assertEqual(os.listdir(self.folder), [])

    def test_only_logging(self) -> None:
        import cushion

        torch = self.install(wait_ms=0, inject="nth=2", receipts=self.folder / "a.jsonl")
        before = self.conf()
        self.assertFalse(self.fails(torch))
        cushion.install(enable_logging=True)
        self.assertEqual(self.conf(), before)
        with self.assertLogs("cushion", "WARNING"):
            self.assertTrue(self.fails(torch))
        self.assertEqual(self.lines("a.jsonl"), 1)


class Forks(Simulated):
    def test_forks_while_settings_change(self) -> None:
        """A child must not wait for a lock of a thread that exists only in the parent."""
        self.engine.deallocate(self.engine.allocate(MIB))

        def work(_number: int) -> None:
            self.engine.change_settings(conf="wait_ms:5", inject="nth=1000")
            self.engine.inject(None)
            self.engine.configure("page_mb:32")

        def act() -> None:
            self.engine.change_settings()
            self.engine.configure("page_mb:32")

        fork_while(work, act, children=100)


if __name__ == "__main__":
    unittest.main()
