"""Batch sizes that are remembered in a file, whose content may be invalid."""

from __future__ import annotations

import json
import os
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import support  # puts the package under test on the path
from batch_sizes import Card, Model
from simulated import Simulated
from support import GIB, MIB

import cushion
from cushion import _remembered


class Remembering(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.path = self.folder / "deep" / "sizes.json"
        self.model = Model((3, 4), (4,))

    def find(self, largest: int, **options: Any) -> tuple[int, list[int]]:
        card = Card(largest)
        options = {"model": self.model, "remember": self.path, **options}
        return cushion.find_batch_size(card.step, 8, **options), card.tried

    def test_an_answer_is_tried_once(self) -> None:
        self.assertEqual(self.find(100)[0], 100)
        self.assertEqual(self.find(100), (100, [100]))
        # The answer is kept although there is more room now.
        self.assertEqual(self.find(200), (100, [100]))

    def test_an_answer_that_does_not_fit_starts_a_new_search(self) -> None:
        self.find(100)
        found, tried = self.find(50)
        self.assertEqual((found, tried[0]), (50, 100))
        self.assertLess(max(tried[1:]), 100)
        self.assertEqual(self.find(50), (50, [50]))

    def test_an_answer_applies_only_under_the_same_conditions(self) -> None:
        self.find(100)
        others: tuple[dict[str, Any], ...] = (
            {"model": Model((3, 4), (5,))},
            {"model": Model((3, 4), (4,), (1,))},
            {"model": type("Other", (Model,), {})((3, 4), (4,))},
            {"multiple_of": 2},
            {"limit": 300},
        )
        for options in others:
            with self.subTest(options):
                self.assertEqual(self.find(200, **options)[0], 200)
        with mock.patch.object(_remembered, "_device", lambda _: {"gpu": "another"}):
            self.assertEqual(self.find(200)[0], 200)
        # The file keeps all answers.
        self.assertEqual(self.find(200), (100, [100]))
        self.assertEqual(self.find(200, limit=300), (200, [200]))

    def test_in_the_users_cache(self) -> None:
        with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(self.folder)}):
            self.find(100, remember=True)
        self.assertTrue((self.folder / "cushion" / "batch_sizes.json").exists())
        with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": "relative", "HOME": str(self.folder / "home")}):
            self.find(100, remember=True)
        self.assertTrue((self.folder / "home" / ".cache" / "cushion" / "batch_sizes.json").exists())

    def test_garbage_is_ignored_with_a_warning(self) -> None:
        self.find(100)
        good = json.loads(self.path.read_text())

        def with_size(size: Any) -> bytes:
            return json.dumps({**good, "answers": [{**good["answers"][0], "batch_size": size}]}).encode()

        for garbage in (
            b"",
            b"no json",
            b"\xff\xfe\x00",
            b"[" * 200_000,
            b"[]",
            b"null",
            b'{"version": 99, "answers": []}',
            b'{"version": 1, "answers": {}}',
            b'{"version": 1, "answers": [1, null, {}, {"about": {}}]}',
            b" " * (1 << 21),
            *map(with_size, (0, -5, True, 2.5, "100", None, [], 1 << 80)),
            b'{"version": 1, "answers": [{"about": {}, "batch_size": ' + b"9" * 5000 + b"}]}",
        ):
            with self.subTest(garbage[:60]):
                self.path.write_bytes(garbage)
                with self.assertLogs("cushion", "WARNING") as logs:
                    found, tried = self.find(100)
                self.assertEqual((found, tried[0]), (100, 8))
                self.assertIn("ignored", logs.output[0])
                # The file is valid again.
                self.assertEqual(self.find(100), (100, [100]))

    def test_answers_outside_the_options_are_not_tried(self) -> None:
        self.find(100, multiple_of=10, limit=200)
        text = self.path.read_text()
        for wrong in (105, 210):
            self.path.write_text(text.replace('"batch_size": 100', f'"batch_size": {wrong}'))
            found, tried = self.find(100, multiple_of=10, limit=200)
            self.assertEqual(found, 100)
            self.assertNotIn(wrong, tried)

    def test_a_file_that_cannot_be_used_raises_nothing(self) -> None:
        pipe = self.folder / "pipe"
        os.mkfifo(pipe)
        (self.folder / "file").write_text("")
        for path in (self.folder, pipe, self.folder / "file" / "below", "/dev/full/sizes.json"):
            with self.subTest(path), self.assertLogs("cushion", "WARNING"):
                self.assertEqual(self.find(100, remember=path)[0], 100)

    def test_a_symbolic_link_is_followed(self) -> None:
        link = self.folder / "link.json"
        link.symlink_to(self.folder / "real.json")
        self.find(100, remember=link)
        self.assertTrue(link.is_symlink())
        self.assertEqual(self.find(100, remember=link), (100, [100]))

    def test_the_number_of_answers_is_bounded(self) -> None:
        with mock.patch.object(_remembered, "MOST_ANSWERS", 4):
            for number in range(7):
                _remembered.store(self.path, {"number": number}, number + 1)
        answers = json.loads(self.path.read_text())["answers"]
        self.assertEqual([it["batch_size"] for it in answers], [4, 5, 6, 7])
        self.assertEqual(sorted(it.name for it in self.path.parent.iterdir()), ["sizes.json", "sizes.json.lock"])

    def test_processes_that_write_at_once_lose_nothing(self) -> None:
        children = []
        for child in range(6):
            pid = os.fork()
            if pid == 0:
                try:
                    for number in range(5):
                        _remembered.store(self.path, {"child": child, "number": number}, 1 + number)
                finally:
                    os._exit(0)
            children.append(pid)
        for pid in children:
            os.waitpid(pid, 0)
        for child in range(6):
            for number in range(5):
                self.assertEqual(_remembered.look_up(self.path, {"child": child, "number": number}), 1 + number)


class RememberingOnDevices(Simulated):
    def test_free_memory_counts(self) -> None:
        model = Model((3,))

        def find() -> list[int]:
            tried: list[int] = []

            def step(batch_size: int) -> None:
                tried.append(batch_size)
                self.engine.deallocate(self.engine.allocate(batch_size * MIB))

            self.cushion.find_batch_size(step, 8, remember="sizes.json", model=model)
            return tried

        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            self.assertEqual(find()[-2:], [1024, 1025])
            self.assertEqual(find(), [1024])
            kept = self.engine.allocate(300 * MIB)
            self.assertEqual(find()[0], 8)
            self.assertEqual(find(), [724])
            (about, _) = (it["about"] for it in json.loads(Path("sizes.json").read_text())["answers"])
            self.assertEqual((about["gpu"], about["memory"], about["free"]), ("simulated", GIB, GIB))
            self.assertEqual((about["function"].rpartition(".")[2], about["model"]), ("step", "Model"))
            os.chdir("/")
        self.engine.deallocate(kept)


if __name__ == "__main__":
    unittest.main()
