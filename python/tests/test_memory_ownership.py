"""One owner for each address: `cushion.Memory` cannot be copied, and custom_cuda_allocator frees only its own
memory."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import unittest
from collections.abc import Callable
from typing import Any

import support
from simulated import Simulated
from support import MIB, in_threads


class OneOwner(Simulated):
    def allocated(self) -> int:
        return int(self.engine.memory_stats(0)["allocated_bytes"]["all"]["current"])

    def ways_to_double(self) -> list[tuple[str, Callable[[Any], Any]]]:
        protocols = range(pickle.HIGHEST_PROTOCOL + 1)
        return [
            ("copied", copy.copy),
            ("copied", copy.deepcopy),
            ("copied", lambda memory: copy.deepcopy({"of a list": [memory]})),
            *[("pickled", lambda memory, protocol=protocol: pickle.dumps(memory, protocol)) for protocol in protocols],
        ]

    def test_memory_cannot_be_copied_or_pickled(self) -> None:
        memory = self.cushion.alloc_future(3 * MIB).result(60)
        for what, double in self.ways_to_double():
            with self.assertRaises(TypeError) as raised:
                double(memory)
            text = str(raised.exception)
            self.assertRegex(text, rf"cushion.Memory cannot be {what}: the {3 * MIB} bytes at 0x")
            self.assertIn(f"{memory.address:#x}", text)
            self.assertIn("memory.tensor().clone()", text)
        gc.collect()
        self.assertEqual(self.allocated(), 3 * MIB)
        del memory
        gc.collect()
        self.assertEqual(self.allocated(), 0)

    def test_a_subclass_cannot_be_copied_or_pickled(self) -> None:
        class Named(self.cushion.Memory):  # type: ignore[misc, name-defined]
            def __init__(self, address: int, nbytes: int, device: int, name: str) -> None:
                super().__init__(address, nbytes, device)
                self.name = name

            def clone(self) -> Any:
                return type(self)(self.address, self.nbytes, self.device, self.name)

            # Methods that a class with its own attributes may have.
            def __getstate__(self) -> dict[str, Any]:
                return {"name": self.name}

            def __reduce__(self) -> Any:
                return type(self), (self.address, self.nbytes, self.device, self.name)

        memory = Named._own(self.engine.allocate(MIB), MIB, 0)
        memory.name = "mine"
        for _, double in (*self.ways_to_double(), ("made again", Named.clone)):
            with self.assertRaises(TypeError):
                double(memory)
        gc.collect()
        self.assertEqual(self.allocated(), MIB)
        del memory
        gc.collect()
        self.assertEqual(self.allocated(), 0)

    def test_memory_cannot_be_created_from_an_address(self) -> None:
        address = self.engine.allocate(MIB)
        with self.assertRaisesRegex(TypeError, r"created only by cushion\.alloc_future\(\)"):
            self.cushion.Memory(address, MIB, 0)
        gc.collect()
        self.assertEqual(self.allocated(), MIB)
        self.engine.deallocate(address)

    # ---- custom_cuda_allocator ----

    def test_deallocate_frees_only_its_own_memory_and_once(self) -> None:
        import custom_cuda_allocator as door

        allocator, other = door.CUDAAllocator(), door.CUDAAllocator()
        ours, memory = allocator.allocate(MIB), self.cushion.alloc_future(MIB).result(60)
        raw = self.engine.allocate(MIB)
        for address, why in (
            (memory.address, "did not return the address"),
            (raw, "did not return the address"),
            (ours + 512, "no live allocation .* starts at"),
            (1, "no live allocation .* starts at"),
            (1 << 63, "no live allocation .* starts at"),
        ):
            with self.assertRaisesRegex(ValueError, f"{why} {address:#x}\\b.*nothing is freed"):
                allocator.deallocate(address)
        self.assertEqual(self.allocated(), 3 * MIB)
        # All objects share one allocator.
        other.deallocate(ours)
        self.assertEqual(self.allocated(), 2 * MIB)
        with self.assertRaisesRegex(ValueError, f"{ours:#x}.*freed before"):
            allocator.deallocate(ours)
        # The address has another owner by now.
        again = self.engine.allocate(MIB)
        self.assertEqual(again, ours)
        with self.assertRaisesRegex(ValueError, f"did not return the address {ours:#x}"):
            allocator.deallocate(ours)
        self.assertEqual(self.allocated(), 3 * MIB)
        for address in (raw, again):
            self.engine.deallocate(address)

    def test_of_several_threads_that_free_an_address_one_succeeds(self) -> None:
        import custom_cuda_allocator as door

        allocator = door.CUDAAllocator()
        for _ in range(20):
            address = allocator.allocate(MIB)
            start, outcomes = threading.Barrier(4), []

            def give_back() -> None:
                start.wait()
                try:
                    allocator.deallocate(address)
                    outcomes.append("freed")
                except ValueError:
                    outcomes.append("refused")

            in_threads([give_back] * 4)
            self.assertEqual(sorted(outcomes), ["freed", *["refused"] * 3])
        self.assertEqual(self.allocated(), 0)

    def test_freeing_null(self) -> None:
        import custom_cuda_allocator as door

        allocator = door.CUDAAllocator()
        self.assertEqual(allocator.allocate(0), 0)
        for _ in range(2):
            allocator.deallocate(0)
        for bad, error in ((None, TypeError), (1.5, TypeError), (-1, ValueError), (1 << 64, ValueError)):
            with self.assertRaises(error):
                allocator.deallocate(bad)  # type: ignore[arg-type]

    def test_a_failed_free_can_be_repeated(self) -> None:
        from unittest import mock

        import custom_cuda_allocator as door

        allocator = door.CUDAAllocator()
        address = allocator.allocate(MIB)
        with mock.patch.object(self.engine, "deallocate", side_effect=RuntimeError("not now")):
            with self.assertRaisesRegex(RuntimeError, "not now"):
                allocator.deallocate(address)
        allocator.deallocate(address)
        self.assertEqual(self.allocated(), 0)


class BesideTensors(support.TorchCase):
    def test_memory_of_a_tensor_cannot_be_deallocated(self) -> None:
        torch = self.install()
        import custom_cuda_allocator as door

        allocator = door.CUDAAllocator()
        tensor = torch.empty(MIB, dtype=torch.uint8, device="cuda")
        with self.assertRaisesRegex(ValueError, f"did not return the address {tensor.data_ptr():#x}.*a tensor"):
            allocator.deallocate(tensor.data_ptr())
        other = torch.empty(MIB, dtype=torch.uint8, device="cuda")
        self.assertNotEqual(tensor.data_ptr(), other.data_ptr())
        self.assertEqual(torch.cuda.memory_allocated(), 2 * MIB)

    def test_memory_cannot_be_copied_but_its_tensor_can(self) -> None:
        torch = self.install()
        import cushion

        memory = cushion.alloc_future(MIB).result(60)
        with self.assertRaisesRegex(TypeError, "cannot be pickled"):
            torch.save({"memory": memory}, support.os.devnull)
        # The alternative that the message gives.
        clone = memory.tensor().clone()
        self.assertNotEqual(clone.data_ptr(), memory.address)
        del memory
        gc.collect()
        self.assertEqual(torch.cuda.memory_allocated(), MIB)


if __name__ == "__main__":
    unittest.main()
