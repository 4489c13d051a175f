"""Stacks and texts recorded with allocations: they are kept while something refers to them, and then dropped."""

from __future__ import annotations

import gc
import threading
import types
import unittest
import weakref
from typing import Any

from simulated import Simulated
from support import GIB, MIB

# Above this number, unreferenced notes are dropped. The next sweep comes at twice the number that is left.
MOST = 15_000


class Notes(Simulated):
    def record(self, context: str, entries: int) -> None:
        self.engine.record_memory_history("all", context, entries, True, [])

    def allocate_by(self, name: str, size: int = 512) -> int:
        """Allocates in a new function of that name."""
        return self.function(name)(self.engine.allocate, size)

    def function(self, name: str) -> Any:
        scope: dict[str, Any] = {}
        exec(compile(f"def {name}(call, *arguments):\n    return call(*arguments)\n", f"<{name}>", "exec"), scope)
        return scope.pop(name)

    def name_of(self, address: int) -> str:
        return self.engine.allocation_traceback(address)[0]["name"]

    def trace(self) -> list[dict[str, Any]]:
        return self.engine.memory_snapshot()["device_traces"][0]

    def churn(self, count: int, prefix: str = "made") -> int:
        """Records `count` stacks that are soon unreferenced. Returns the largest number that was kept."""
        most = 0
        for n in range(count):
            self.engine.deallocate(self.allocate_by(f"{prefix}_{n}"))
            most = max(most, self.engine.kept_notes()[0])
        return most

    def test_unreferenced_stacks_are_dropped(self) -> None:
        self.record("alloc", 20)
        kept = {f"kept_{n}": self.allocate_by(f"kept_{n}") for n in range(50)}
        gone: list[weakref.ref[types.CodeType]] = []
        for n in range(100):
            function = self.function(f"gone_{n}")
            gone.append(weakref.ref(function.__code__))
            self.engine.deallocate(function(self.engine.allocate, 512))
        del function
        self.assertLess(self.churn(40_000), MOST)
        gc.collect()
        self.assertEqual([code for code in gone if code() is not None], [], "code lives on with its stack")
        self.assertEqual({name: self.name_of(address) for name, address in kept.items()}, {name: name for name in kept})
        events = [entry for entry in self.trace() if entry["action"] == "alloc"]
        self.assertEqual(
            [entry["frames"][0]["name"] for entry in events],
            [f"made_{n}" for n in range(40_000 - len(events), 40_000)],
        )
        blocks = [block for segment in self.engine.memory_snapshot()["segments"] for block in segment["blocks"]]
        live = {block["address"]: block["frames"][0]["name"] for block in blocks if block["frames"]}
        self.assertEqual(live, {address: name for name, address in kept.items()})

    def test_notes_are_dropped_when_recording_ends(self) -> None:
        self.record("all", 1 << 20)
        address = self.allocate_by("last")
        # All of them are in the history, so none is dropped.
        self.churn(10_000)
        self.assertGreater(self.engine.kept_notes()[0], 10_000)
        self.assertEqual(len({e["frames"][0]["name"] for e in self.trace() if e["action"] == "alloc"}), 10_001)
        self.engine.record_memory_history(None, None, 0, True, [])
        # The stack of the live block, and that of the request that created its segment.
        self.assertLessEqual(self.engine.kept_notes()[0], 2)
        self.assertEqual(self.name_of(address), "last")
        self.engine.deallocate(address)
        self.engine.empty_cache()
        self.assertEqual(self.engine.kept_notes(), (0, 0))

    def test_unreferenced_texts_are_dropped(self) -> None:
        self.record("alloc", 10)
        self.engine.set_metadata("of the one that lives")
        lives = self.engine.allocate(512)
        most = 0
        for n in range(5000):
            self.engine.set_metadata(f"step {n} " + "x" * 2000)
            self.engine.deallocate(self.engine.allocate(512))
            most = max(most, self.engine.kept_notes()[1])
        self.assertLess(most, 1000, "they are counted by their bytes")
        texts = [entry["user_metadata"].rstrip("x") for entry in self.trace()]
        self.assertEqual(texts, [f"step {n} " for n in (4996, *[4997] * 3, *[4998] * 3, *[4999] * 3)])
        self.assertEqual(self.engine.metadata().rstrip("x"), "step 4999 ")
        self.engine.set_metadata("")
        self.engine.record_memory_history("all", None, 10, True, [])
        self.engine.deallocate(lives)
        self.assertEqual({entry["user_metadata"] for entry in self.trace()}, {"of the one that lives"})
        self.engine.record_memory_history(None, None, 0, True, [])
        self.engine.empty_cache()
        self.assertEqual(self.engine.kept_notes(), (0, 0))

    def test_a_waiting_request_keeps_its_notes(self) -> None:
        self.record("state", 1)
        self.engine.set_metadata("of the one that waits")
        with self.another_holds(GIB - 2 * MIB) as let_go:
            done, served = threading.Event(), []

            def tell(address: int | None, why: str | None, _: bool) -> None:
                served.append((address, why))
                done.set()

            self.engine.set_wishes(60_000, [])
            self.function("asked")(self.engine.allocate_later, 100 * MIB, tell)
            for n in range(300):
                self.engine.set_metadata(f"{n}" * 1000)
            self.assertLess(self.churn(20_000), MOST)
            self.assertEqual(served, [])
            self.engine.set_metadata("")
            let_go.set()
            self.assertTrue(done.wait(60))
        ((address, why),) = served
        self.assertIsNone(why)
        self.assertEqual(self.name_of(address), "asked")
        self.engine.record_memory_history("all", None, 10, True, [])
        self.engine.deallocate(address)
        self.assertEqual({entry["user_metadata"] for entry in self.trace()}, {"of the one that waits"})

    def test_a_reader_finds_every_stack_while_others_sweep(self) -> None:
        self.record("alloc", 10)
        stop, failures = threading.Event(), []

        def work(worker: int) -> None:
            try:
                n = 0
                while not stop.is_set():
                    n += 1
                    self.engine.set_metadata(f"of {worker} " + "x" * 500)
                    name = f"of_{worker}_{n}"
                    address = self.allocate_by(name)
                    if self.name_of(address) != name:
                        failures.append(name)
                    self.engine.deallocate(address)
                    # Sweeps after the history has dropped the entries that the reader has just read.
                    if n % 20 == 0:
                        self.engine.empty_cache()
            except BaseException as error:  # noqa: BLE001
                failures.append(error)

        workers = [threading.Thread(target=work, args=(n,)) for n in range(3)]
        for worker in workers:
            worker.start()
        try:
            for _ in range(300):
                for entry in self.trace():
                    if entry["action"] == "alloc":
                        self.assertTrue(entry["frames"][0]["name"].startswith("of_"))
                        self.assertTrue(entry["user_metadata"].startswith("of "))
        finally:
            stop.set()
            for worker in workers:
                worker.join()
        self.assertEqual(failures, [])


if __name__ == "__main__":
    unittest.main()
