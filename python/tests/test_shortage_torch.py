"""Shortages in a PyTorch program, over the stand-ins for CUDA."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import subprocess
import threading
import time
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import support
from support import GIB, MIB, Standin


class Shortage(support.TorchCase):
    def empty(self, size: int) -> Any:
        import torch

        return torch.empty(size, dtype=torch.uint8, device="cuda")

    def refused(self, size: int) -> Any:
        import torch

        with self.assertRaises(torch.cuda.OutOfMemoryError) as raised:
            self.empty(size)
        return raised.exception

    def loss_whose_gradient(self, work: Callable[[], object]) -> Any:
        """Returns a loss whose backward pass calls a function on autograd's thread."""
        import torch

        class Works(torch.autograd.Function):  # type: ignore[misc]
            @staticmethod
            def forward(_ctx: Any, x: Any) -> Any:
                return x.clone()

            @staticmethod
            def backward(_ctx: Any, gradient: Any) -> Any:
                work()
                return gradient

        return Works.apply(torch.zeros(4, device="cuda", requires_grad=True)).sum()

    # ---- receipts and messages ----

    def test_the_exception_has_its_receipt(self) -> None:
        self.install()
        kept = self.empty(900 * MIB)
        error = self.refused(200 * MIB)
        self.assertEqual((error.receipt.number, error.receipt.requested), (1, 200 * MIB))
        import cushion

        self.assertEqual([str(it) for it in cushion.receipts()], [str(error.receipt)])
        import torch

        self.assertIsNone(torch.cuda.OutOfMemoryError("somebody else's").receipt)
        del kept

    def test_exceptions_that_differ_in_the_number_alone_have_their_own_receipts(self) -> None:
        self.install()
        kept = self.empty(900 * MIB)
        errors = [self.refused(200 * MIB) for _ in range(12)]
        self.assertEqual([it.receipt.number for it in errors], list(range(1, 13)))
        self.assertEqual([it.receipt.number for it in errors], list(range(1, 13)))
        del kept

    @support.process(warm=False, TORCH_SHOW_CPP_STACKTRACES="1")
    def test_a_backtrace_behind_the_message_does_not_hide_the_receipt(self) -> None:
        self.install()
        kept = self.empty(900 * MIB)
        error = self.refused(200 * MIB)
        self.assertIn("Exception raised from cushion_alloc", str(error))
        self.assertEqual(error.receipt.number, 1)
        del kept

    def test_an_exception_that_pytorch_raises_again_has_its_receipt(self) -> None:
        torch = self.install()
        from torch._utils import ExceptionWrapper

        kept = self.empty(900 * MIB)
        try:
            self.empty(200 * MIB)
        except torch.cuda.OutOfMemoryError:
            caught = ExceptionWrapper(where="in replica 0 on device 0")
        with self.assertRaises(torch.cuda.OutOfMemoryError) as raised:
            caught.reraise()
        self.assertRegex(str(raised.exception), "^Caught OutOfMemoryError in replica 0")
        self.assertEqual(raised.exception.receipt.number, 1)
        del kept

    def test_who_holds_the_memory(self) -> None:
        torch = self.install()
        torch.cuda.memory._record_memory_history()

        def a_large_layer() -> Any:
            return self.empty(700 * MIB)

        kept = [a_large_layer(), self.empty(100 * MIB)]
        text = str(self.refused(300 * MIB))
        self.assertRegex(
            text,
            r"\n  700\.00 MiB in 1 allocation of 700\.00 MiB, made at \S+torch\.py:\d+ empty from \S+ a_large",
        )
        self.assertIn("100.00 MiB in 1 allocation", text)
        del kept

    def remedies(self, error: Any) -> list[str]:
        return re.findall(r"\n  \d\. (.*)", str(error))

    def test_a_larger_fraction_is_suggested_and_works(self) -> None:
        torch = self.install()
        torch.cuda.set_per_process_memory_fraction(0.5)
        kept = self.empty(400 * MIB)
        for size in (200 * MIB, 600 * MIB):
            named = re.search(r"(torch\.cuda\.\w+\([\d.]+, 0\)) would", self.remedies(self.refused(size))[0])
            assert named is not None
            exec(named[1])
            self.empty(size)
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(0.5)
        del kept

    def test_host_memory_is_suggested_and_works(self) -> None:
        self.install()
        kept = self.empty(900 * MIB)
        *_, last = self.remedies(self.refused(500 * MIB))
        named = re.search(r"CUSHION_SPILL_LIMIT_MB=(\d+)", last)
        assert named is not None
        self.install(conf=f"spill_limit_mb:{named[1]}")
        spilled = self.empty(500 * MIB)
        import cushion

        self.assertEqual(cushion.stats()["spilled_bytes"], 500 * MIB)
        self.assertEqual(cushion.receipts()[-1].survived_by, "spill")
        del kept, spilled

    def test_the_wait_of_a_budget_is_in_the_message(self) -> None:
        torch = self.install()
        import cushion

        standin, side = Standin(), torch.cuda.Stream()
        kept = self.empty(900 * MIB)
        standin.launch(side.cuda_stream)
        kept.record_stream(side)
        del kept
        with cushion.budget(ms=0):
            error = self.refused(500 * MIB)
        self.assertRegex(self.remedies(error)[0], r"900\.00 MiB wait for work .* this request had 0 ms\.")
        standin.finish_all()

    def test_the_missing_bytes_are_enough(self) -> None:
        self.install()
        kept = [self.empty(500 * MIB), self.empty(400 * MIB)]
        text = self.remedies(self.refused(200 * MIB))[0]
        self.assertRegex(text, r"^76\.00 MiB more would be enough: .*cushion\.retry")
        kept.pop()
        self.empty(200 * MIB)

    @support.process(CUSHION_WAIT_MS="0", STANDIN_CAPACITY=str(16 * GIB))
    def test_other_processes_by_name_and_size(self) -> None:
        self.install()
        standin = Standin()
        self.empty(MIB)
        with subprocess.Popen(["sleep", "60"]) as other:
            try:
                # Right after the fork it still has the name of this process.
                while not Path(f"/proc/{other.pid}/cmdline").read_bytes().startswith(b"sleep"):
                    pass
                standin.library.standin_set_process(0, other.pid, support.ctypes.c_uint64(12 * GIB))
                standin.tenant(12 * GIB)
                error = self.refused(8 * GIB)
            finally:
                other.kill()
        self.assertIn(f"Other processes on this GPU: sleep (pid {other.pid}) with 12.00 GiB.", str(error))
        self.assertRegex(self.remedies(error)[0], r"1\d\.\d\d GiB are held by other processes.*CUSHION_WAIT_MS=60000")
        standin.tenant(0)
        self.empty(8 * GIB)

    def test_the_log_has_one_warning_for_each_shortage(self) -> None:
        self.install(enable_logging=True)
        kept = [self.empty(900 * MIB)]
        import cushion

        cushion.on_shortage(lambda *_: kept.clear())
        with self.assertLogs("cushion", "WARNING") as logs:
            self.empty(300 * MIB)
        (line,) = logs.output
        self.assertRegex(line, r"shortage 1 on device 0: 300\.00 MiB for thread \d+.*survived by callbacks after")

    # ---- callbacks ----

    def test_a_callback_that_drops_tensors(self) -> None:
        torch = self.install()
        cache = {number: self.empty(100 * MIB) for number in range(10)}
        import cushion

        @cushion.on_shortage(priority=1)
        def evict(_device: int, wanted: int, _seconds: float) -> str:
            before = len(cache)
            while cache and wanted > 0:
                wanted -= cache.pop(min(cache)).nbytes
            torch.cuda.empty_cache()
            return f"evicted {before - len(cache)}"

        kept = self.empty(350 * MIB)
        self.assertEqual(cushion.receipts()[-1].answers[0].said, "evicted 4")
        self.assertEqual(sorted(cache), [4, 5, 6, 7, 8, 9])
        del kept

    def test_a_callback_on_a_thread_of_autograd(self) -> None:
        torch = self.install()
        kept = [self.empty(900 * MIB)]
        import cushion

        threads: list[str] = []

        def give_up(*_: object) -> None:
            threads.append(threading.current_thread().name)
            kept.clear()

        cushion.on_shortage(give_up)

        loss = self.loss_whose_gradient(lambda: self.empty(400 * MIB))
        loss.backward()
        self.assertEqual(len(threads), 1)
        self.assertNotEqual(threads[0], "MainThread")

    def test_a_budget_applies_to_threads_of_autograd(self) -> None:
        torch = self.install()
        import cushion

        taken, let_go = threading.Event(), threading.Event()

        def hold() -> None:
            kept = self.empty(900 * MIB)
            taken.set()
            let_go.wait()
            del kept

        thread = threading.Thread(target=hold)
        thread.start()
        taken.wait()

        loss = self.loss_whose_gradient(lambda: self.empty(400 * MIB))
        with cushion.budget(ms=0), self.assertRaises(torch.cuda.OutOfMemoryError) as raised:
            loss.backward()
        ended = [it.ended for it in raised.exception.receipt.tried if it.rung == "wait"]
        self.assertEqual(ended, ["time_is_up"])
        let_go.set()
        thread.join()

    # ---- tensors ----

    def test_as_much_as_fits(self) -> None:
        torch = self.install()
        import cushion

        last_calls: list[Any] = []
        cushion.on_refusal(last_calls.append)
        kept = self.empty(500 * MIB)
        with self.assertLogs("cushion", "WARNING") as logs:
            tensor = cushion.allocate_tensor(250 * MIB, min_elements=MIB, dtype=torch.float32)
        self.assertEqual(tensor.numel(), int(int(250 * MIB * 0.7) * 0.7))
        # The warning comes after those of the shortages.
        self.assertIn(f"asked for {250 * MIB} elements, got {tensor.numel()}", logs.output[-1])
        self.assertEqual(last_calls, [])
        del tensor
        whole = cushion.allocate_tensor(100 * MIB, dtype="float16")
        self.assertEqual((whole.numel(), whole.dtype), (100 * MIB, torch.float16))
        with self.assertRaises(torch.cuda.OutOfMemoryError) as raised:
            cushion.allocate_tensor(4 * GIB, min_elements=GIB, factor=0.5, dtype="uint8")
        self.assertEqual(raised.exception.receipt.requested, GIB)
        self.assertEqual([it.requested for it in last_calls], [GIB], "only the end is one")
        for bad in (0, 1, -1):
            with self.assertRaises(ValueError):
                cushion.allocate_tensor(1, factor=bad)
        del kept, whole

    def test_a_tensor_as_a_future(self) -> None:
        torch = self.install()
        import cushion

        tensor = cushion.alloc_future(1000, dtype=torch.bfloat16).result(60)
        self.assertEqual((tensor.shape, tensor.dtype), ((1000,), torch.bfloat16))
        self.assertEqual(torch.cuda.memory_allocated(), 2048)
        view = tensor[10:]
        del tensor
        gc.collect()
        self.assertEqual(torch.cuda.memory_allocated(), 2048)
        del view
        gc.collect()
        self.assertEqual(torch.cuda.memory_allocated(), 0)

        async def both() -> list[Any]:
            return await asyncio.gather(*(cushion.alloc_async(number, dtype="int64") for number in (3, 0, 5)))

        self.assertEqual([tensor.numel() for tensor in asyncio.run(both())], [3, 0, 5])
        memory = cushion.alloc_future("1MiB").result(60)
        self.assertEqual(memory.tensor().shape, (MIB // 4,))
        self.assertEqual(memory.tensor(torch.uint8).data_ptr(), memory.address)

    def test_the_tensor_of_a_future_may_be_recorded_on_other_streams(self) -> None:
        torch = self.install()
        import cushion

        standin, side = Standin(), torch.cuda.Stream()
        tensor = cushion.alloc_future(MIB, dtype=torch.uint8).result(60)
        standin.launch(side.cuda_stream)
        tensor.record_stream(side)
        del tensor
        gc.collect()
        stats = torch.cuda.memory_stats()
        self.assertEqual((stats["allocated_bytes.all.current"], stats["active_bytes.all.current"]), (0, MIB))
        standin.finish_all()
        self.empty(MIB)

    def test_futures_need_cushion_as_the_allocator(self) -> None:
        import torch

        import cushion

        torch.empty(1, device="cuda")
        for call in (cushion.prefetch, cushion.alloc_future):
            with self.assertRaisesRegex(RuntimeError, r"call cushion\.install\(\) first"):
                call("1MiB")

    def test_prefetch(self) -> None:
        torch = self.install()
        import cushion

        self.empty(512)
        torch.cuda.empty_cache()
        cushion.prefetch("500MiB")
        misses = cushion.stats()["misses"]
        self.assertEqual(torch.cuda.memory_reserved(), 500 * MIB)
        kept = self.empty(500 * MIB)
        self.assertEqual(cushion.stats()["misses"], misses)
        del kept

    # ---- retry and offloading ----

    def test_retry_releases_memory_and_calls_last_calls_when_it_gives_up(self) -> None:
        torch = self.install()
        import cushion

        told: list[Any] = []
        cushion.on_refusal(told.append)

        def step(rows: Any) -> int:
            kept = self.empty(len(rows) * 100 * MIB)
            return len(kept)

        rows = torch.zeros(16)
        done = cushion.retry(step, rows, split=cushion.split_batch, combine=sum)
        self.assertEqual((done, told), (16 * 100 * MIB, []))
        with self.assertRaises(torch.cuda.OutOfMemoryError) as raised:
            cushion.retry(lambda: self.empty(2 * GIB))
        self.assertEqual(told, [raised.exception.receipt])

    def test_an_injected_failure_is_retried(self) -> None:
        torch = self.install(inject="nth=3")
        import cushion

        tries: list[int] = []

        def step() -> Any:
            tries.append(1)
            return [self.empty(MIB) for _ in range(5)]

        self.assertEqual(len(cushion.retry(step)), 5)
        self.assertEqual(len(tries), 2)
        cushion.inject(None)
        self.assertEqual(torch.cuda.memory_stats()["num_ooms"], 1)

    def test_offloading_makes_room_and_comes_back(self) -> None:
        torch = self.install()
        import cushion

        state = {number: {"average": self.empty(200 * MIB)} for number in range(4)}
        view = state[0]["average"][5:]
        place = {number: it["average"] for number, it in state.items()}

        @cushion.offloader(budget_ms=60_000)
        def averages() -> Any:
            return state

        kept = self.empty(500 * MIB)
        self.assertEqual(averages.bytes_away, 600 * MIB)
        self.assertEqual(cushion.receipts()[-1].answers[0].said, "moved 3 tensors, 600.00 MiB, to the host")
        self.assertEqual(torch.cuda.memory_allocated(), 700 * MIB)
        # Without room to return, it raises and loses nothing.
        with self.assertRaises(torch.cuda.OutOfMemoryError), averages:
            pass
        self.assertGreater(averages.bytes_away, 0)
        del kept
        with averages:
            self.assertEqual(averages.bytes_away, 0)
            self.assertEqual(torch.cuda.memory_allocated(), 800 * MIB)
            # Tensors in use stay.
            self.refused(500 * MIB)
            self.assertEqual(averages.bytes_away, 0)
        self.assertEqual({number: it["average"] for number, it in state.items()}, place)
        self.assertEqual(view.untyped_storage().data_ptr(), state[0]["average"].data_ptr())
        averages.remove()
        self.refused(500 * MIB)

    def test_arguments_of_an_offloader(self) -> None:
        torch = self.install()
        import cushion

        model = torch.nn.Linear(1000, 1000, device="cuda")
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        weights = 4 * 1001000
        for named, size in (
            (model, weights),
            (optimizer, weights),
            ([model.weight, model.weight[3:], None], 4 * 10**6),
        ):
            mover = cushion.offloader(lambda named=named: named)
            self.assertGreaterEqual(mover.away(), size)
            mover.remove()
        with self.assertRaisesRegex(TypeError, "names no tensors"):
            cushion.offloader(lambda: object())
        with self.assertRaisesRegex(TypeError, "is not callable"):
            cushion.offloader(5)  # type: ignore[call-overload]

    def test_an_optimizer_brings_its_state_back(self) -> None:
        torch = self.install()
        import cushion

        weight = torch.nn.Parameter(torch.zeros(50 * MIB // 4, device="cuda"))
        weight.grad = torch.zeros_like(weight)
        optimizer = torch.optim.SGD([weight], momentum=0.9)
        optimizer.step()

        @cushion.offloader(budget_ms=60_000)
        def state() -> Any:
            return optimizer

        for use in (optimizer.step, optimizer.state_dict):
            self.assertEqual(state.away(), 50 * MIB)
            use()
            self.assertEqual(state.bytes_away, 0)
        # Afterwards the state may be moved again.
        self.assertEqual(state.away(), 50 * MIB)
        # A step that fails keeps the state usable, and the next step works.
        with cushion.inject("over=50MiB"), self.assertRaises(torch.cuda.OutOfMemoryError):
            optimizer.step()
        optimizer.step()
        self.assertEqual((state.bytes_away, state.away()), (0, 50 * MIB))
        # The tensors are back before last calls, so that a checkpoint contains them.
        seen: list[int] = []
        cushion.on_refusal(lambda _: seen.append(state.bytes_away))
        self.refused(2 * GIB)
        self.assertEqual(seen, [0])
        # Without room to return, a warning says so, and the last call still runs.
        state.away()
        kept = self.empty(800 * MIB)
        with self.assertLogs("cushion", "WARNING") as logs, cushion.inject("over=50MiB"):
            self.refused(2 * GIB)
        self.assertEqual(seen, [0, 50 * MIB])
        self.assertIn("cannot bring its tensors back", "\n".join(logs.output))
        del kept

    def test_no_last_call_for_a_refusal_in_backward_that_is_retried(self) -> None:
        torch = self.install()
        import cushion

        told: list[Any] = []
        cushion.on_refusal(told.append)

        loss = self.loss_whose_gradient(lambda: cushion.allocate_tensor(2 * GIB, factor=0.5, dtype="uint8"))
        loss.backward()
        self.assertEqual(told, [])

    def test_an_offloader_skips_foreign_memory_and_forgets_dropped_tensors(self) -> None:
        self.install()
        import cushion

        tensors = [
            self.empty(100 * MIB),
            cushion.alloc_future(100 * MIB, dtype="uint8").result(60),
            self.empty(50 * MIB),
        ]
        mover = cushion.offloader(lambda: tensors)
        self.assertEqual(mover.away(), 150 * MIB)
        del tensors[0]
        gc.collect()
        mover.back()
        self.assertEqual(mover.bytes_away, 0)
        self.assertEqual([tensor.untyped_storage().nbytes() for tensor in tensors], [100 * MIB, 50 * MIB])
        mover.remove()

    def test_tensors_return_on_their_stream(self) -> None:
        torch = self.install()
        import cushion
        from cushion import _cushion

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            tensor = self.empty(100 * MIB)
        mover = cushion.offloader(lambda: tensor)
        mover.away()
        mover.back()
        self.assertEqual(_cushion.stream_of(tensor.data_ptr()), side.cuda_stream)

    # ---- custom_cuda_allocator ----

    # With `expandable`, 1 GiB is 52 pages of 20 MiB.
    @support.process(
        STANDIN_CAPACITY=str(1040 * MIB), OOM_MAX_RETRIES="3", OOM_DELAY_MS="20", OOM_SIZE_FACTOR="0.5", OOM_VERBOSE="1"
    )
    def test_custom_cuda_allocator_retries_with_less(self) -> None:
        import custom_cuda_allocator as door

        os.environ["CUSHION_POLICY"] = self.policy
        door.setup_allocator()
        self.addCleanup(self.check)
        began = time.monotonic()
        with self.assertLogs("cushion", "INFO") as logs:
            tensor = door.allocate_tensor(4 * GIB, dtype="uint8")
        self.assertEqual(tensor.numel(), GIB)
        self.assertGreaterEqual(time.monotonic() - began, 0.06)
        retries = [line for line in logs.output if "retry" in line]
        self.assertEqual(len(retries), 2, logs.output)
        self.assertRegex(retries[1], f"retry 2 of 3: {GIB} after 40 ms")
        self.assertEqual(door.get_retry_count(), 2)
        del tensor
        with self.assertRaises(RuntimeError):
            door.allocate_tensor(32 * GIB, dtype="uint8")
        self.assertEqual(door.get_retry_count(), 5)
        # Memory by address is retried with the same size.
        allocator = door.CUDAAllocator()
        with self.assertRaises(RuntimeError):
            allocator.allocate(2 * GIB)
        self.assertEqual(door.get_retry_count(), 8)


class ShortageExpandable(Shortage):
    policy = "expandable"


class ShortagePaged(Shortage):
    policy = "paged"


if __name__ == "__main__":
    unittest.main()
