"""Receipts, budgets, injected failures and futures, on simulated devices: no PyTorch, no GPU."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import json
import os
import pickle
import tempfile
import threading
import unittest
from pathlib import Path
from typing import Any

import support
from simulated import Simulated
from support import GIB, MIB


class Receipts(Simulated):
    def test_of_an_exception(self) -> None:
        self.fill()
        error = self.refused()
        receipt = error.receipt
        self.assertEqual((receipt.number, receipt.device, receipt.survived), (1, 0, False))
        self.assertEqual((receipt.requested, receipt.wanted), (100 * MIB, 100 * MIB))
        self.assertIn("grow", [it.rung for it in receipt.tried])
        self.assertEqual([(it.bytes, it.count) for it in receipt.groups], [(GIB, 1)])
        self.assertIn("needs 100.00 MiB more", receipt.remedies)
        self.assertIn("refused", str(receipt))
        self.assertEqual(receipt.as_dict()["shortage"]["device_total"], GIB)
        self.assertEqual(self.cushion.receipt_of(error), receipt)
        # The number alone does not find it.
        here = os.getpid()
        for other in (
            "1",
            f"1 on GPU 0 of process {here}.",
            f"9 on GPU 0 of process {here}.",
            f"1 on GPU 77 of process {here}.",
            "1 on GPU 0 of process 1.",
        ):
            self.assertIsNone(self.cushion.receipt_of(ValueError(f"Cushion's receipt: {other}")))
        self.assertIsNone(self.cushion.receipt_of(ValueError("not \udc80 UTF-8")))
        self.assertIsNone(self.cushion.receipt_of(ValueError()))

    def test_of_refusals_that_differ_in_the_number_alone(self) -> None:
        self.fill()
        errors = [self.refused() for _ in range(12)]
        texts = [str(error) for error in errors]
        self.assertEqual(len({text.replace(f"receipt: {n} on", "receipt: on") for n, text in enumerate(texts, 1)}), 1)
        self.assertEqual([it.receipt.number for it in errors], list(range(1, 13)))
        # Others find it by the text, as PyTorch's exceptions do, whatever stands around it.
        for shape in ("{}", "{}\nException raised from here (most recent call first):", "Caught it in a thread.\n{}\n"):
            others = [RuntimeError(shape.format(text)) for text in texts]
            self.assertEqual([self.cushion.receipt_of(it) for it in others], [it.receipt for it in errors])

    def test_of_an_exception_that_was_found_by_its_text(self) -> None:
        self.fill()
        other = RuntimeError(str(self.refused()))
        receipt = self.cushion.receipt_of(other)
        # Found once, it stays with the exception.
        for _ in range(300):
            self.refused()
        self.assertEqual(self.cushion.receipt_of(other), receipt)
        self.assertIsNone(self.cushion.receipt_of(RuntimeError(str(other))))
        self.assertEqual(self.cushion.receipt_of(pickle.loads(pickle.dumps(other))), receipt)

    def test_of_an_exception_in_a_child_made_by_fork(self) -> None:
        self.fill()
        error = self.refused()
        child = os.fork()
        if child == 0:
            ours = error.receipt is not None
            theirs = self.cushion.receipt_of(RuntimeError(str(error))) is not None
            os._exit(0 if (ours, theirs) == (True, False) else 3)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)

    def test_how_many_are_kept(self) -> None:
        self.fill()
        self.cushion.keep_receipts(3)
        errors = [self.refused() for _ in range(20)]
        self.assertEqual([it.number for it in self.cushion.receipts()], [18, 19, 20])
        # Exceptions of the engine itself carry theirs; 16 more are found by their text.
        self.assertEqual([it.receipt.number for it in errors], list(range(1, 21)))
        found = [self.cushion.receipt_of(RuntimeError(str(it))) for it in errors]
        self.assertEqual([it and it.number for it in found], [None] * 4 + list(range(5, 21)))
        with self.assertRaises(ValueError):
            self.cushion.keep_receipts(1 << 40)

    def test_stacks_of_the_largest_allocations(self) -> None:
        self.engine.record_memory_history("all", "all", 100, True, [])

        def makes_the_large_one() -> int:
            return self.engine.allocate(900 * MIB)

        makes_the_large_one()
        error = self.refused(200 * MIB)
        (group,) = error.receipt.groups
        self.assertRegex(group.stack[0], r"test_shortage\.py:\d+ makes_the_large_one$")
        self.assertRegex(error.receipt.stack[0], r"simulated\.py:\d+ refused$")
        self.assertRegex(str(error), r"900\.00 MiB in 1 allocation of 900\.00 MiB, made at .*makes_the_large_one from ")
        self.assertNotIn("which lines made them", str(error))

    def test_the_log_has_one_warning_for_each_shortage(self) -> None:
        self.cushion.on_shortage(lambda *_: 1 // 0)
        self.fill()
        with self.assertLogs("cushion", "WARNING") as logs:
            self.refused()
        (line,) = logs.output
        self.assertIn("100.00 MiB for thread 1", line)
        self.assertIn("ZeroDivisionError", line)

    def test_figures(self) -> None:
        held = [self.fill()]
        self.refused()
        self.cushion.on_shortage(lambda *_: held and self.engine.deallocate(held.pop()))
        self.engine.allocate(600 * MIB)
        stats = self.cushion.stats()
        self.assertEqual((stats["shortages"], stats["shortages_survived"], stats["shortages_refused"]), (2, 1, 1))
        self.assertGreater(stats["shortage_seconds"], 0)
        self.assertEqual((stats["waiting"], stats["spilled_bytes"], stats["receipts_lost"]), (0, 0, 0))


def write_receipts(path: str) -> None:
    import cushion
    from cushion import _cushion

    cushion.simulate("1GiB")
    for device in (0, 1):
        with contextlib.suppress(MemoryError):
            _cushion.allocate(2 * GIB, device)


class ReceiptFile(unittest.TestCase):
    changes = {"LD_PRELOAD": None, "LD_LIBRARY_PATH": None}

    def test_the_variable_names_a_file(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "receipts.jsonl")
            for _ in range(2):
                support.call(write_receipts, path, changes={**self.changes, "CUSHION_RECEIPTS": path}, warm=False)
            lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
            self.assertEqual([(it["device"], it["number"]) for it in lines], [(0, 1), (1, 1)] * 2)
            self.assertEqual({it["outcome"] for it in lines}, {"never_fits"})

    def test_a_file_that_cannot_be_opened(self) -> None:
        changes = {**self.changes, "CUSHION_RECEIPTS": "/nowhere/at/all"}
        with self.assertRaisesRegex(AssertionError, "receipts cannot be written to /nowhere/at/all: No such file"):
            support.call(write_receipts, "", changes=changes, warm=False)


class Budgets(Simulated):
    def test_a_block_without_waiting(self) -> None:
        with self.another_holds(900 * MIB) as let_go:
            with self.cushion.budget(ms=0):
                receipt = self.refused(500 * MIB).receipt
                self.assertEqual([it.ended for it in receipt.tried if it.rung == "wait"], ["time_is_up"])
                self.assertNotIn("waited", str(receipt))
            let_go_soon = threading.Timer(0.1, let_go.set)
            let_go_soon.start()
            self.engine.allocate(500 * MIB)
            self.assertEqual(self.cushion.receipts()[-1].survived_by, "wait")

    def test_skipped_rungs(self) -> None:
        called: list[object] = []
        self.cushion.on_shortage(lambda *_: called.append(1))
        self.fill()
        with self.cushion.budget(skip=["callbacks"]), self.cushion.budget(skip="wait"):
            error = self.refused()
        off = [it.rung for it in error.receipt.tried if it.ended == "off"]
        self.assertEqual((off, called), (["callbacks", "wait"], []))
        self.assertIn("may be enough: callbacks, wait", str(error))
        # A request that can never fit does not name them.
        with self.cushion.budget(skip=["callbacks"]):
            self.assertNotIn("may be enough", str(self.refused(2 * GIB)))
        self.refused()
        self.assertEqual(called, [1])

    def test_nested_blocks_and_decorators(self) -> None:
        read = self.engine.wishes
        once = self.cushion.budget(ms=7)

        @self.cushion.budget(ms=250, skip=["spill"])
        def work(depth: int) -> tuple[float | None, list[str]]:
            return work(depth - 1) if depth else read()

        with self.cushion.budget(ms=10), once, once:
            with self.cushion.budget(skip=["poll"]):
                self.assertEqual(work(2), (250, ["poll", "spill"]))
            with self.assertRaises(ZeroDivisionError), self.cushion.budget(ms=3):
                1 // 0  # noqa: B018
            self.assertEqual(read()[0], 7)
        self.assertEqual(read(), (None, []))
        with self.assertRaisesRegex(ValueError, "there is no rung `roof`"), self.cushion.budget(skip=["roof"]):
            pass
        with self.assertRaisesRegex(TypeError, "whose work is done after it has returned"):

            @self.cushion.budget(ms=0)
            async def later() -> None: ...

        for bad in (-1, float("nan")):
            with self.assertRaisesRegex(ValueError, "milliseconds"), self.cushion.budget(ms=bad):
                pass
        self.assertEqual(read(), (None, []))

    def test_alternating_tasks(self) -> None:
        async def main() -> None:
            first_is_in, second_is_in, first_is_out = asyncio.Event(), asyncio.Event(), asyncio.Event()

            async def first() -> None:
                with self.cushion.budget(ms=0):
                    first_is_in.set()
                    await second_is_in.wait()
                first_is_out.set()

            async def second() -> None:
                await first_is_in.wait()
                with self.cushion.budget(ms=5000):
                    second_is_in.set()
                    await first_is_out.wait()
                    self.assertEqual(self.engine.wishes()[0], 5000)

            await asyncio.gather(first(), second())

        asyncio.run(main())
        self.assertEqual(self.engine.wishes(), (None, []))


class Injected(Simulated):
    def test_from_now_on_and_for_a_block(self) -> None:
        self.cushion.inject("nth=2")
        self.engine.allocate(MIB)
        error = self.refused(MIB)
        self.assertTrue(error.receipt.injected)
        self.assertIn("was injected", str(error))
        self.engine.allocate(MIB)
        with self.cushion.inject("over=10MiB"):
            self.engine.allocate(MIB)
            self.refused(10 * MIB)
        # The rules from before the block are in force again, and count from the beginning.
        self.engine.allocate(10 * MIB)
        self.refused(10 * MIB)
        # Settings without injection leave the rules as they are.
        self.cushion.inject("nth=1")
        self.engine.start(self.engine.gather_settings({}))
        self.refused(MIB)
        self.cushion.inject(None)
        self.engine.allocate(10 * MIB)
        with self.assertRaisesRegex(ValueError, "`soon` is not a rule for injected failures"):
            self.cushion.inject("soon")

    @support.process(CUSHION_INJECT="nth=1")
    def test_by_the_variable_on_every_device(self) -> None:
        for device in (0, 1):
            with self.assertRaises(self.cushion.OutOfMemoryError):
                self.engine.allocate(MIB, device)
            self.engine.allocate(MIB, device)

    @support.process(CUSHION_INJECT="nth=1")
    def test_the_variable_can_be_undone_before_the_first_allocation(self) -> None:
        self.cushion.inject(None)
        self.engine.allocate(MIB)

    @support.process(CUSHION_INJECT="sometimes")
    def test_an_invalid_variable(self) -> None:
        with self.assertRaisesRegex(RuntimeError, "CUSHION_INJECT: `sometimes` is not a rule"):
            self.engine.allocate(MIB)
        with self.assertRaisesRegex(ValueError, "CUSHION_INJECT"):
            self.cushion.install()


class Futures(Simulated):
    def test_served_when_there_is_memory(self) -> None:
        with self.another_holds(900 * MIB) as let_go:
            future = self.cushion.alloc_future("500MiB")
            while self.cushion.stats()["waiting"] != 1:
                pass
            self.assertFalse(future.done())
            let_go.set()
            memory = future.result(60)
        self.assertEqual((memory.nbytes, memory.device), (500 * MIB, 0))
        self.assertEqual(self.engine.device_of(memory.address), 0)
        self.assertEqual(self.engine.memory_stats(0)["allocated_bytes"]["all"]["current"], 500 * MIB)
        del memory, future
        gc.collect()
        self.assertEqual(self.engine.memory_stats(0)["allocated_bytes"]["all"]["current"], 0)

    def test_refused(self) -> None:
        self.fill()
        error = self.cushion.alloc_future(MIB).exception(60)
        self.assertIs(type(error), self.cushion.OutOfMemoryError)
        self.assertEqual(error.receipt.requested, MIB)
        with self.assertRaises(ValueError):
            self.cushion.alloc_future("a lot")

    def test_inside_a_callback(self) -> None:
        held, got = [self.fill()], []

        def makes_room(*_: object) -> None:
            got.append(self.cushion.alloc_future(MIB).exception(60))
            self.engine.deallocate(held.pop())
            got.append(self.cushion.alloc_future(MIB).result(60))

        self.cushion.on_shortage(makes_room)
        # The callback runs on the polling thread of the futures, which must not wait for itself.
        self.cushion.alloc_future("500MiB").result(60)
        self.assertIs(type(got[0]), self.cushion.OutOfMemoryError)
        self.assertEqual(got[1].nbytes, MIB)

    def test_cancelled(self) -> None:
        with self.another_holds(900 * MIB):
            future = self.cushion.alloc_future(500 * MIB)
            while self.cushion.stats()["waiting"] != 1:
                pass
            self.assertTrue(future.cancel())
            done, _ = concurrent.futures.wait([future], 60)
            self.assertEqual(done, {future})
            while self.cushion.stats()["waiting"] != 0:
                pass
            self.assertTrue(future.cancelled())
        (receipt,) = self.cushion.receipts()
        self.assertEqual(receipt.outcome, "given_up")
        done = self.cushion.alloc_future(MIB)
        done.result(60)
        self.assertFalse(done.cancel())

    def test_in_the_order_of_requests(self) -> None:
        order: list[int] = []
        with self.another_holds(900 * MIB) as let_go:
            futures = []
            for number in range(4):
                futures.append(self.cushion.alloc_future("800MiB"))
                while self.cushion.stats()["waiting"] != number + 1:
                    pass

                def note(future: Any, number: int = number) -> None:
                    order.append(number)
                    # Freed at once, so that the next request can be served.
                    address = future.result()._address
                    future.result()._address = 0
                    self.engine.deallocate(address)

                futures[-1].add_done_callback(note)
            let_go.set()
            for future in futures:
                future.result(60)
        self.assertEqual(order, [0, 1, 2, 3])

    def test_await(self) -> None:
        async def main() -> None:
            kept = await self.cushion.alloc_async("600MiB")
            with self.another_holds(300 * MIB) as let_go:
                waits = asyncio.create_task(self.cushion.alloc_async("200MiB"))
                gives_up = asyncio.create_task(self.cushion.alloc_async("200MiB"))
                while self.cushion.stats()["waiting"] != 2:
                    await asyncio.sleep(0)
                gives_up.cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await gives_up
                let_go.set()
                self.assertEqual((await waits).nbytes, 200 * MIB)
            del kept

        asyncio.run(main())
        while self.cushion.stats()["waiting"] != 0:
            pass

    def test_a_thousand_cancelled_or_served_futures_leave_nothing_allocated(self) -> None:
        for number in range(1000):
            future = self.cushion.alloc_future(64 * MIB)
            if number % 2:
                future.cancel()
            else:
                future.result(60)
        del future
        # A request that was served before its cancellation frees its memory when its future is dropped.
        while self.engine.memory_stats(0)["allocated_bytes"]["all"]["current"]:
            gc.collect()
        self.assertEqual(self.cushion.stats()["waiting"], 0)

    def test_at_the_shutdown_of_python(self) -> None:
        program = (
            "import cushion\ncushion.simulate('1GiB')\nkept = cushion.alloc_future('900MiB').result()\n"
            "waits = [cushion.alloc_future('500MiB') for _ in range(5)]\nprint('end')"
        )
        done = support.python("-c", program, changes=self.changes)
        self.assertEqual((done.returncode, done.stdout), (0, "end\n"), done.stderr)

    @support.process(CUSHION_POLICY="segments")
    def test_prefetch_of_a_segment(self) -> None:
        self.cushion.prefetch("500MiB")
        self.assertEqual(self.cushion.stats()["cached_bytes"], 500 * MIB)

    def test_prefetch(self) -> None:
        self.cushion.prefetch("500MiB")
        misses = self.cushion.stats()["misses"]
        # Whole pages.
        self.assertIn(self.cushion.stats()["cached_bytes"], range(500 * MIB, 600 * MIB))
        self.engine.allocate(500 * MIB)
        self.assertEqual(self.cushion.stats()["misses"], misses)
        with self.assertRaises(self.cushion.OutOfMemoryError):
            self.cushion.prefetch("2GiB")
        with self.assertRaises(ValueError):
            self.cushion.prefetch("many")


if __name__ == "__main__":
    unittest.main()
