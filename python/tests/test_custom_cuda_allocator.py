"""custom_cuda_allocator: the code of its README, with PyTorch over the stand-ins, and the functions that do not need
PyTorch on simulated devices."""

from __future__ import annotations

import contextlib
import io
import sys
import unittest

import support
from support import GIB, MIB

sys.path.insert(0, str(support.ROOT / "tests" / "gpu"))
import blocks


def run(block: str) -> tuple[dict, list[str], str]:
    """Runs a program. Returns its names, its output and its log messages."""
    names: dict = {"__name__": "__main__"}
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        exec(compile(block, "block", "exec"), names)
    return names, out.getvalue().splitlines(), err.getvalue()


class Readme(support.TorchCase):
    def setUp(self) -> None:
        self.addCleanup(self.check)

    def test_usage(self) -> None:
        names, lines, log = run(blocks.CUSTOM_USAGE.replace("1000000000", "1000000"))
        self.assertEqual(lines, ["GPU memory: 0.00 GB used / 1.00 GB total"])
        self.assertEqual(log, "")
        import torch

        tensor = names["tensor"]
        self.assertEqual((tensor.shape, tensor.dtype), ((1000000,), torch.float32))
        self.assertEqual(tensor.device, torch.device("cuda:0"))
        stats = names["custom_cuda_allocator"].get_memory_stats(0)
        self.assertEqual(stats["allocated_gb"] * GIB, torch.cuda.memory_allocated())
        self.assertEqual(stats["reserved_gb"] * GIB, torch.cuda.memory_reserved())
        self.assertEqual(stats["used_gb"], stats["total_gb"] - stats["free_gb"])
        self.assertEqual(torch.cuda.mem_get_info(), (stats["free_gb"] * GIB, stats["total_gb"] * GIB))

    def test_class(self) -> None:
        import torch

        names, _, _ = run(blocks.CUSTOM_CLASS)
        self.assertGreater(names["ptr"], 0)
        tensor = names["tensor"]
        self.assertEqual((tensor.shape, tensor.dtype, tensor.device.type), ((1000,), torch.float32, "cuda"))
        self.assertEqual(torch.cuda.memory_allocated(), 4096)

    @support.process(**blocks.CUSTOM_ENVIRONMENT)
    def test_environment(self) -> None:
        names, _, log = run(blocks.CUSTOM_USAGE.replace("1000000000", "1000000"))
        self.assertIn("installed", log)
        settings = names["custom_cuda_allocator"].settings()
        self.assertEqual(
            (settings.max_retries, settings.size_factor, settings.delay_ms, settings.verbose), (5, 0.8, 100, True)
        )

    @support.process(STANDIN_DEVICES="2")
    def test_all_forms_of_dtypes_and_devices(self) -> None:
        import torch

        import custom_cuda_allocator as door

        dtypes = {
            torch.float16: [torch.float16, "float16", "torch.float16", "half", " torch.half "],
            torch.float64: ["double", float],
            torch.int64: [int, "long"],
            torch.bool: [bool, "bool"],
            torch.float32: [None, torch.float],
        }
        with contextlib.suppress(ImportError):
            import numpy

            dtypes[torch.float16] += [numpy.float16, numpy.dtype("float16")]
            dtypes[torch.bool] += [numpy.bool_, numpy.dtype(bool)]
        allocator = door.CUDAAllocator()
        for expected, forms in dtypes.items():
            for form in forms:
                with self.subTest(form):
                    self.assertEqual(door.allocate_tensor(10, form).dtype, expected)
                    self.assertEqual(allocator.create_tensor(10, form).dtype, expected)
                    options = torch.TensorOptions().dtype(form)
                    self.assertEqual(allocator.create_tensor(10, options).dtype, expected)
        devices = {
            0: [0, "cuda", "cuda:0", None, -1, torch.device("cuda"), torch.kCUDA],
            1: [1, "cuda:1", torch.device("cuda:1"), torch.device("cuda", 1)],
        }
        for index, forms in devices.items():
            for form in forms:
                with self.subTest(form):
                    self.assertEqual(door.allocate_tensor(elements=10, device=form).device.index, index)
                    self.assertEqual(allocator.create_tensor(10, device=form).device.index, index)
                    self.assertEqual(door.get_memory_stats(form)["device"], index)
        options = torch.TensorOptions().device(torch.kCUDA, 1).dtype("int8")
        self.assertEqual(allocator.create_tensor(10, options).device.index, 1)
        self.assertEqual(allocator.create_tensor(10, options, device=0).device.index, 0)
        with torch.cuda.device(1):
            self.assertEqual(door.allocate_tensor(10, device="cuda").device.index, 1)
            self.assertEqual(door.get_memory_stats()["device"], 1)

    def test_invalid_dtypes_devices_and_numbers(self) -> None:
        import torch

        import custom_cuda_allocator as door

        for error, text, arguments in (
            (ValueError, "no dtype 'float31'", {"dtype": "float31"}),
            (ValueError, "no dtype 'zeros'", {"dtype": "zeros"}),
            (TypeError, "3 is not a dtype", {"dtype": 3}),
            (ValueError, "'cpu' is not a CUDA device", {"device": "cpu"}),
            (ValueError, "is not a CUDA device", {"device": torch.device("cpu")}),
            (ValueError, "there is no device 'cuda:1': there are 1, numbered from 0", {"device": "cuda:1"}),
            (ValueError, "there is no device -2", {"device": -2}),
            (TypeError, "1.5 is not a device", {"device": 1.5}),
            (TypeError, "True is not a device", {"device": True}),
            (TypeError, "num_elements is 10.0", {"num_elements": 10.0}),
            (ValueError, "num_elements is -1", {"num_elements": -1}),
            (TypeError, "one of them", {"elements": 10}),
            (TypeError, "one of them", {"num_elements": None}),
        ):
            with self.subTest(text), self.assertRaisesRegex(error, text):
                door.allocate_tensor(**{"num_elements": 10, **arguments})

    def test_existing_names_of_pytorch_are_not_replaced(self) -> None:
        import torch

        torch.kCUDA = "mine"
        import custom_cuda_allocator

        self.assertEqual(torch.kCUDA, "mine")
        self.assertIs(torch.TensorOptions, custom_cuda_allocator.TensorOptions)

    def test_memory_by_address_beside_tensors(self) -> None:
        import torch

        from custom_cuda_allocator import CUDAAllocator

        allocator = CUDAAllocator()
        tensor = torch.empty(MIB, dtype=torch.uint8, device="cuda")
        with torch.cuda.stream(torch.cuda.Stream()):
            side = allocator.allocate(MIB)
            stream = torch.cuda.current_stream().cuda_stream
        plain = allocator.allocate(MIB)
        self.assertEqual(torch.cuda.memory_allocated(), 3 * MIB)
        streams = {
            block["address"]: segment["stream"]
            for segment in torch.cuda.memory_snapshot()
            for block in segment["blocks"]
        }
        self.assertEqual((streams[side], streams[plain]), (stream, 0))
        allocator.deallocate(side)
        allocator.deallocate(plain)
        self.assertEqual(torch.cuda.memory_allocated(), MIB)
        with self.assertRaisesRegex(ValueError, "no live allocation .* starts at"):
            allocator.deallocate(plain)

    @support.process(OOM_MAX_RETRIES="2", OOM_DELAY_MS="1", OOM_SIZE_FACTOR="0.5")
    def test_out_of_memory(self) -> None:
        import torch

        import custom_cuda_allocator as door

        allocator = door.CUDAAllocator()
        for call in (lambda: allocator.allocate(64 * GIB), lambda: door.allocate_tensor(64 * GIB)):
            with self.assertRaisesRegex(torch.cuda.OutOfMemoryError, "Tried to allocate 64.00 GiB"):
                call()
        self.assertEqual(door.get_memory_stats()["oom_count"], 6)

    # With the default policy nothing is released: cached memory serves the second request.
    @support.process(CUSHION_POLICY="segments")
    def test_retries_are_counted(self) -> None:
        import torch

        import custom_cuda_allocator as door

        door.setup_allocator()
        self.assertEqual(door.get_retry_count(), 0)
        torch.empty(600 * MIB, dtype=torch.uint8, device="cuda")
        torch.empty(700 * MIB, dtype=torch.uint8, device="cuda")
        self.assertEqual(door.get_retry_count(), 1)
        door.clear_cache()
        self.assertEqual(torch.cuda.memory_reserved(), 0)


@support.needs_standin
class WithoutTorch(support.ProcessCase):
    """Over the stand-in for the driver, without PyTorch."""

    changes = {"LD_PRELOAD": None}

    def setUp(self) -> None:
        sys.modules["torch"] = None  # type: ignore[assignment]

    def test_memory_by_address(self) -> None:
        import custom_cuda_allocator as door

        allocator = door.CUDAAllocator()
        address = allocator.allocate(3 * MIB, device="cuda:0")
        self.assertEqual(support.Standin().held(), 4 * MIB, "whole pages")
        self.assertEqual(door.get_memory_stats()["used_gb"] * GIB, 4 * MIB)
        allocator.deallocate(address)
        door.clear_cache()
        self.assertEqual(support.Standin().held(), 0)
        with self.assertRaisesRegex(MemoryError, "CUDA out of memory. Tried to allocate"):
            allocator.allocate(1 << 50)
        with self.assertRaisesRegex(ValueError, "there is no CUDA device 5: this process sees"):
            allocator.allocate(1, device=5)

    def test_tensors_need_pytorch(self) -> None:
        import cushion
        import custom_cuda_allocator as door

        with self.assertRaisesRegex(cushion.InstallError, "needs PyTorch"):
            door.setup_allocator()
        with self.assertRaisesRegex(RuntimeError, "which cannot be imported"):
            door.CUDAAllocator().create_tensor(10)


class Simulated(support.ProcessCase):
    changes = {"CUSHION_SIMULATE": "8GB", "LD_PRELOAD": None, "LD_LIBRARY_PATH": None}

    def test_every_call_but_tensors(self) -> None:
        import custom_cuda_allocator as door

        self.assertEqual(door.get_memory_stats()["total_gb"], 8e9 / GIB)
        door.setup_allocator()
        allocator = door.CUDAAllocator()
        address = allocator.allocate(3 * MIB)
        other = allocator.allocate(4 * MIB, device=1)
        stats = door.get_memory_stats(0)
        self.assertEqual(
            {name: value * GIB / MIB for name, value in stats.items() if name.endswith("_gb")},
            {
                "used_gb": 4,
                "free_gb": 8e9 / MIB - 4,
                "total_gb": 8e9 / MIB,
                "allocated_gb": 3,
                "peak_allocated_gb": 3,
                "reserved_gb": 4,
                "cached_gb": 1,
            },
        )
        self.assertEqual(door.get_memory_stats("cuda:1")["allocated_gb"] * GIB, 4 * MIB)
        allocator.deallocate(address)
        allocator.deallocate(other)
        self.assertEqual(allocator.allocate(0), 0)
        allocator.deallocate(0)
        door.clear_cache()
        self.assertEqual(door.get_memory_stats()["used_gb"], 0)
        self.assertEqual(door.get_retry_count(), 0)
        with self.assertRaisesRegex(RuntimeError, "cannot use simulated memory"):
            door.allocate_tensor(10)
        with self.assertRaisesRegex(ValueError, "no device 128"):
            allocator.allocate(1, device=128)
        self.assertNotIn("torch", sys.modules)

    @support.process(CUSHION_POLICY="segments")
    def test_out_of_memory_and_retries(self) -> None:
        import custom_cuda_allocator as door

        allocator = door.CUDAAllocator()
        allocator.deallocate(allocator.allocate(5 * GIB, device=3))
        held = allocator.allocate(6 * GIB, device=3)
        self.assertEqual(door.get_retry_count(), 1)
        with self.assertRaisesRegex(MemoryError, "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has"):
            allocator.allocate(2 * GIB, device=3)
        allocator.deallocate(held)
        for bad in (12345, held):
            with self.assertRaisesRegex(ValueError, "no live allocation .* starts at 0x"):
                allocator.deallocate(bad)

    def test_defaults(self) -> None:
        import custom_cuda_allocator as door

        settings = door.CUDAAllocator().settings
        self.assertEqual(settings, door.RetrySettings(3, 0.7, 200.0, False))
        self.assertEqual([settings.delay_of(attempt) for attempt in range(3)], [200, 400, 800])

    def test_bad_variables(self) -> None:
        import os

        import custom_cuda_allocator as door

        for variable, value, accepts in (
            ("OOM_MAX_RETRIES", "many", "a whole number from 0 to 30"),
            ("OOM_MAX_RETRIES", "-1", "a whole number from 0 to 30"),
            ("OOM_MAX_RETRIES", "2.5", "a whole number from 0 to 30"),
            ("OOM_SIZE_FACTOR", "0", "a number above 0 and at most 1"),
            ("OOM_SIZE_FACTOR", "1.1", "a number above 0 and at most 1"),
            ("OOM_SIZE_FACTOR", "nan", "a number above 0 and at most 1"),
            ("OOM_DELAY_MS", "-5", "a number of milliseconds, 0 or more"),
            ("OOM_DELAY_MS", "inf", "a number of milliseconds, 0 or more"),
            ("OOM_VERBOSE", "2", "`1` or `0`"),
        ):
            os.environ[variable] = value
            for call in (door.setup_allocator, door.CUDAAllocator):
                with self.subTest(variable, value=value):
                    with self.assertRaises(ValueError) as caught:
                        call()
                    self.assertEqual(str(caught.exception), f"{variable} cannot be `{value}`: it takes {accepts}")
            del os.environ[variable]
        os.environ["OOM_DELAY_MS"] = " "
        door.setup_allocator()

    def test_options_without_pytorch(self) -> None:
        from custom_cuda_allocator import TensorOptions

        options = TensorOptions().dtype("float32").device("cuda", 1)
        self.assertEqual((options.chosen_dtype, options.chosen_device), ("float32", "cuda:1"))


if __name__ == "__main__":
    unittest.main()
