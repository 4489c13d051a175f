"""Out of memory: the exception, its message, the observers, and that the program continues."""

from __future__ import annotations

import re
import threading
import unittest

from support import GIB, MIB, Standin, TorchCase, in_threads, process

# PyTorch's own message, up to the first sentence of Cushion.
FORM = re.compile(
    r"CUDA out of memory\. Tried to allocate (?P<wanted>[\d.]+ \w+)\. "
    r"GPU (?P<gpu>\d+) has a total capacity of (?P<total>[\d.]+ \w+) of which (?P<free>[\d.]+ \w+) is free\. "
    r"(?:(?P<allowed>[\d.]+ \w+) allowed; )?"
    r"Of the allocated memory (?P<allocated>[\d.]+ \w+) is allocated by PyTorch, "
    r"(?:with (?P<private>[\d.]+ \w+) allocated in private pools \(e\.g\., CUDA Graphs\), )?"
    r"and (?P<cached>[\d.]+ \w+) is reserved by PyTorch but unallocated\. "
    r"(?P<ours>Cushion .*)",
    re.DOTALL,
)


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


class OutOfMemory(TorchCase):
    changes = {"STANDIN_CAPACITY": str(512 * MIB)}

    def refused(self, torch: object, size: int) -> re.Match[str]:
        with self.assertRaises(torch.cuda.OutOfMemoryError) as raised:  # type: ignore[attr-defined]
            torch.empty(size, dtype=torch.uint8, device="cuda")  # type: ignore[attr-defined]
        match = FORM.fullmatch(str(raised.exception))
        self.assertIsNotNone(match, str(raised.exception))
        assert match is not None
        return match

    def test_the_message(self) -> None:
        torch = self.install()
        kept = torch.empty(300 * MIB, dtype=torch.uint8, device="cuda")
        cached = torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
        del cached
        said = self.refused(torch, 400 * MIB)
        self.assertEqual(said["wanted"], "400.00 MiB")
        self.assertEqual((said["gpu"], said["total"]), ("0", "512.00 MiB"))
        # The cached memory would not be enough, so it is not released.
        self.assertEqual(said["free"], "112.00 MiB")
        self.assertEqual((said["allocated"], said["cached"]), ("300.00 MiB", "100.00 MiB"))
        self.assertIsNone(said["allowed"])
        del kept

    def test_it_is_the_error_of_pytorch(self) -> None:
        torch = self.install()
        with self.assertRaises(RuntimeError) as raised:
            torch.empty(GIB, dtype=torch.uint8, device="cuda")
        self.assertIs(type(raised.exception), torch.cuda.OutOfMemoryError)
        if hasattr(torch, "OutOfMemoryError"):
            self.assertIs(type(raised.exception), torch.OutOfMemoryError)

    def test_sizes_are_written_as_pytorch_writes_them(self) -> None:
        torch = self.install()
        for wanted, text in ((GIB, "1024.00 MiB"), (GIB + 2 * MIB, "1.00 GiB"), (3 * GIB // 2, "1.50 GiB")):
            self.assertEqual(self.refused(torch, wanted)["wanted"], text)

    def test_a_request_of_an_exbibyte(self) -> None:
        torch = self.install()
        for size in (1 << 60, (1 << 63) - 1):
            with self.subTest(size), self.assertRaises(torch.cuda.OutOfMemoryError) as raised:
                torch.empty(size, dtype=torch.uint8, device="cuda")
            self.assertIn("Tried to allocate more than 1EB memory.", str(raised.exception))

    def test_counted(self) -> None:
        torch = self.install()
        for count in (1, 2):
            self.refused(torch, GIB)
            self.assertEqual(torch.cuda.memory_stats()["num_ooms"], count)
        self.assertEqual(torch.cuda.memory_allocated(), 0)

    def test_the_program_continues(self) -> None:
        torch = self.install()
        kept = torch.empty(200 * MIB, dtype=torch.uint8, device="cuda")
        for _ in range(3):
            self.refused(torch, 400 * MIB)
            torch.empty(200 * MIB, dtype=torch.uint8, device="cuda")
        del kept
        kept = torch.empty(500 * MIB, dtype=torch.uint8, device="cuda")
        self.assertEqual(torch.cuda.memory_allocated(), 500 * MIB)
        del kept

    def test_memory_of_another_program(self) -> None:
        torch = self.install()
        standin = Standin()
        standin.tenant(400 * MIB)
        self.refused(torch, 200 * MIB)
        standin.tenant(0)
        torch.empty(200 * MIB, dtype=torch.uint8, device="cuda")

    def test_pending_memory_is_waited_for(self) -> None:
        torch = self.install()
        standin, side = Standin(), torch.cuda.Stream()
        kept = torch.empty(400 * MIB, dtype=torch.uint8, device="cuda")
        standin.launch(side.cuda_stream)
        kept.record_stream(side)
        del kept
        # The work ends while the allocation waits. The allocation has released Python's lock.
        done = threading.Timer(0.05, standin.finish_all)
        done.start()
        torch.empty(400 * MIB, dtype=torch.uint8, device="cuda")
        self.assertEqual(torch.cuda.memory_stats()["num_ooms"], 0)
        done.join()

    def test_observers(self) -> None:
        torch = self.install()
        seen: list[tuple[int, ...]] = []
        unraisable: list[object] = []
        import sys

        def broken(*_: int) -> None:
            raise ZeroDivisionError("an observer's own mistake")

        sys.unraisablehook = lambda caught: unraisable.append(caught.exc_value)
        torch._C._cuda_attach_out_of_memory_observer(broken)
        torch._C._cuda_attach_out_of_memory_observer(lambda *told: seen.append(told))
        self.refused(torch, 600 * MIB)
        self.assertEqual(seen, [(0, 600 * MIB, 512 * MIB, 512 * MIB)])
        self.assertEqual([type(error) for error in unraisable], [ZeroDivisionError])
        torch.cuda.set_per_process_memory_fraction(0.5)
        self.refused(torch, 300 * MIB)
        self.assertEqual(seen[1:], [(0, 300 * MIB, 256 * MIB, 512 * MIB)])

    def test_observers_may_allocate_and_fail_again(self) -> None:
        torch = self.install()
        depth: list[int] = []

        def observe(*_: int) -> None:
            if len(depth) < 3:
                depth.append(1)
                try:
                    torch.empty(600 * MIB, dtype=torch.uint8, device="cuda")
                except torch.cuda.OutOfMemoryError:
                    torch.empty(MIB, dtype=torch.uint8, device="cuda")

        torch._C._cuda_attach_out_of_memory_observer(observe)
        self.refused(torch, 600 * MIB)
        self.assertEqual(len(depth), 3)

    def test_the_logger_gets_it(self) -> None:
        torch = self.install()
        with self.assertLogs("cushion", "WARNING") as logs:
            self.refused(torch, 600 * MIB)
        (line,) = logs.output
        self.assertIn("600.00 MiB", line)

    def test_a_snapshot_has_it(self) -> None:
        torch = self.install()
        torch.cuda.memory._record_memory_history()
        self.refused(torch, 600 * MIB)
        (entry,) = [e for e in torch.cuda.memory._snapshot()["device_traces"][0] if e["action"] == "oom"]
        self.assertEqual((entry["size"], entry["device_free"]), (600 * MIB, 512 * MIB))

    def test_three_hundred_refusals_do_not_leak(self) -> None:
        torch = self.install()
        import gc
        import logging

        logging.getLogger("cushion").disabled = True
        kept = torch.empty(200 * MIB, dtype=torch.uint8, device="cuda")

        def cycle() -> None:
            try:
                torch.empty(400 * MIB, dtype=torch.uint8, device="cuda")
            except torch.cuda.OutOfMemoryError:
                pass
            torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")

        for _ in range(100):
            cycle()
        gc.collect()
        before = resident()
        for _ in range(300):
            cycle()
        gc.collect()
        self.assertLess(resident() - before, 2 * MIB)
        self.assertEqual(torch.cuda.memory_stats()["num_ooms"], 400)
        del kept

    def test_inside_a_capture(self) -> None:
        torch = self.install()
        graph = torch.cuda.CUDAGraph()
        kept = torch.empty(300 * MIB, dtype=torch.uint8, device="cuda")
        with self.assertRaises(torch.cuda.OutOfMemoryError) as raised, torch.cuda.graph(graph):
            torch.empty(400 * MIB, dtype=torch.uint8, device="cuda")
        match = FORM.fullmatch(str(raised.exception))
        assert match is not None, str(raised.exception)
        self.assertIn("capture", match["ours"])
        del kept
        torch.empty(400 * MIB, dtype=torch.uint8, device="cuda")

    def test_another_failure_of_the_driver_is_not_out_of_memory(self) -> None:
        torch = self.install()
        torch.empty(MIB, device="cuda")
        Standin().fail(1, Standin.UNKNOWN)
        with self.assertRaises(RuntimeError) as raised:
            torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        self.assertNotIsInstance(raised.exception, torch.cuda.OutOfMemoryError)
        self.assertIn("CUDA_ERROR_UNKNOWN", str(raised.exception))
        self.assertIn("Cushion", str(raised.exception))
        torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")

    def test_from_many_threads(self) -> None:
        import logging
        import threading

        torch = self.install()
        logging.getLogger("cushion").disabled = True
        errors: list[BaseException] = []

        def work() -> None:
            try:
                for _ in range(40):
                    try:
                        torch.empty(300 * MIB, dtype=torch.uint8, device="cuda")
                    except torch.cuda.OutOfMemoryError:
                        pass
            except BaseException as error:  # noqa: BLE001
                errors.append(error)

        in_threads([work] * 4)
        self.assertEqual(errors, [])
        self.assertEqual(torch.cuda.memory_allocated(), 0)


class OutOfMemoryExpandable(OutOfMemory):
    policy = "expandable"


class OutOfMemoryPaged(OutOfMemory):
    policy = "paged"


if __name__ == "__main__":
    unittest.main()
