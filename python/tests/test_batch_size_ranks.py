"""The largest batch size that fits on every rank: two ranks, one with less memory than the other."""

from __future__ import annotations

import os
import tempfile
import unittest
from collections.abc import Callable
from typing import Any

import ranks
import support
from batch_sizes import Card, Model
from support import MIB, TorchCase

import cushion


def _distributed_search(rank: int, world: int, kind: str, largest: list[int]) -> list[Any]:
    """Runs a search on one rank, where sizes up to `largest[rank]` fit. A failure comes before, in or after the
    collectives."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    if kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(plain)
    else:
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (world,))
        for layer in plain:
            fully_shard(layer, mesh=mesh)
        model = fully_shard(plain, mesh=mesh)
    results: list[Any] = []
    for place in ("before", "forward", "backward", "after"):
        tried = []

        def step(batch_size: int) -> None:
            tried.append(batch_size)
            short = batch_size > largest[rank]

            def out_of_memory(*_: Any) -> None:
                raise torch.OutOfMemoryError(f"CUDA out of memory. On rank {rank}")

            if short and place == "before":
                out_of_memory()
            inputs = torch.ones(batch_size, 4, requires_grad=True)
            if short and place == "backward":
                inputs.register_hook(out_of_memory)
            loss = model(inputs).sum()
            if short and place == "forward":
                out_of_memory()
            torch.distributed.all_reduce(loss.detach().clone())
            loss.backward()
            if short and place == "after":
                out_of_memory()

        found = cushion.find_batch_size(step, 4, grads=model, group="world", timeout=20)
        clean = all(it.grad is None for it in model.parameters())
        results.append([found, tried, clean])
    # The model still works, and reduces gradients to the mean of the ranks.
    model(torch.full((1, 4), float(rank))).sum().backward()
    grads = [it.grad.full_tensor() if kind == "fsdp" else it.grad for it in model.parameters()]
    results.append([round(float(grads[3][0]), 6), float(grads[0].abs().sum()) > 0])
    return results


def _simulated_search(rank: int, world: int) -> list[Any]:
    """Runs a search on ranks with devices of different sizes and steps of different memory: alone, each would try
    other sizes."""
    import torch

    from cushion import _cushion

    cushion.simulate(["1GiB", "600MiB"][rank])
    results = []
    for each in ([3 * MIB, 1 * MIB], [1 * MIB, 3 * MIB]):
        tried = []

        def step(batch_size: int) -> None:
            tried.append(batch_size)
            address = _cushion.allocate((rank * 100 * MIB) + batch_size * each[rank])
            torch.distributed.all_reduce(torch.ones(1))
            _cushion.deallocate(address)

        results.append([cushion.find_batch_size(step, 8, grads=(), group="world", timeout=20), tried])
    return results


def _odd_ends(rank: int, world: int) -> dict[str, str]:
    """Runs searches that fail, in the same order on every rank."""
    import torch

    said = {}

    def note(name: str, call: Callable[[], Any]) -> None:
        try:
            said[name] = f"returned {call()}"
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"

    def step(batch_size: int) -> None:
        torch.distributed.all_reduce(torch.ones(1))
        if batch_size > 5 + rank:
            raise torch.OutOfMemoryError(f"CUDA out of memory. {batch_size} on rank {rank}")

    def fails_on_one(batch_size: int) -> None:
        if rank == 1:
            raise ValueError("a mistake")
        torch.distributed.all_reduce(torch.ones(1))

    def never_fits_on_one(batch_size: int) -> None:
        if rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Never enough")
        torch.distributed.all_reduce(torch.ones(1))

    together: dict[str, Any] = {"grads": (), "group": "world", "timeout": 20}
    note("no group", lambda: cushion.find_batch_size(step, 2))
    note("no grads", lambda: cushion.find_batch_size(step, 2, group="world"))
    note("other start", lambda: cushion.find_batch_size(step, 2 + rank, **together))
    note("other limit", lambda: cushion.find_batch_size(step, 2, limit=9 if rank else None, **together))
    note("together", lambda: cushion.find_batch_size(step, 2, **together))
    note("a mistake", lambda: cushion.find_batch_size(fails_on_one, 2, **together))
    note("never", lambda: cushion.find_batch_size(never_fits_on_one, 2, **together))
    note("local", lambda: cushion.find_batch_size(Card(5 + rank).step, 2, local=True))
    return said


def _remembered_by_ranks(rank: int, world: int, folder: str) -> list[Any]:
    import torch

    results = []
    # One file for both ranks, and then one that a rank does not have.
    for path in (f"{folder}/both.json", f"{folder}/both.json", f"{folder}/rank{rank}.json"):
        tried = []

        def step(batch_size: int) -> None:
            tried.append(batch_size)
            torch.distributed.all_reduce(torch.ones(1))
            if batch_size > 5 + rank:
                raise torch.OutOfMemoryError("CUDA out of memory.")

        find = cushion.find_batch_size
        results.append([find(step, 2, grads=(), group="world", timeout=20, remember=path, model=Model((1,))), tried])
        if rank == 0 and "both" not in path:
            os.unlink(path)
    return results


def _training(rank: int, world: int) -> list[Any]:
    """Runs a training that creates its model, and runs out of memory on one rank in its second step."""
    import torch

    tried = []

    @cushion.find_batch_size(starting_batch_size=16, group="world", timeout=20)
    def training(batch_size: int, width: int) -> float:
        tried.append(batch_size)
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(width, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(3):
            optimizer.zero_grad()
            loss = model(torch.full((batch_size, width), 1.0 + rank)).sum()
            if number == 1 and rank == 1 and batch_size > 12:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            loss.backward()
            optimizer.step()
        return round(float(model.module.weight.sum()), 4)

    result = training(3)
    original = torch.nn.parallel.DistributedDataParallel.__init__
    return [result, tried, hasattr(original, "__wrapped__")]


class Together(TorchCase):
    """Two ranks, forked in the process of a test."""

    def test_the_rank_with_less_memory_decides(self) -> None:
        kinds = ["ddp"] if support.TORCH_VERSION < (2, 6) else ["ddp", "fsdp"]
        for kind, largest in zip(kinds, ([12, 7], [5, 9])):
            first, second = ranks.run(2, _distributed_search, kind, largest)
            self.assertEqual(first, second)
            for found, tried, clean in first[:-1]:
                self.assertEqual((found, clean), (min(largest), True))
                self.assertLessEqual({found, found + 1}, set(tried))
            self.assertEqual(first[-1], [1.0, True])

    def test_the_smallest_prediction_is_tried(self) -> None:
        first, second = ranks.run(2, _simulated_search)
        self.assertEqual(first, second)
        for (found, tried), largest in zip(first, (1024 // 3, 500 // 3)):
            self.assertEqual(found, largest)
            self.assertLessEqual(len(tried), 6, tried)

    def test_errors_are_raised_on_every_rank(self) -> None:
        first, second = ranks.run(2, _odd_ends)
        for said in (first, second):
            self.assertIn("RuntimeError: cushion.find_batch_size: this program has 2 ranks", said["no group"])
            self.assertIn("TypeError: cushion.find_batch_size: group= needs grads=", said["no grads"])
            self.assertIn("ValueError: cushion.find_batch_size: start is 2 on one rank and 3 on", said["other start"])
            self.assertIn("limit is not given on one rank and 9 on another", said["other limit"])
            self.assertEqual(said["together"], "returned 5")
        self.assertIn("RankError: cushion.find_batch_size: rank 1 failed in", first["a mistake"])
        self.assertIn("ValueError: a mistake", first["a mistake"])
        self.assertEqual(second["a mistake"], "ValueError: a mistake")
        self.assertIn("OutOfMemoryError: CUDA out of memory. Rank 1 ran out of memory in", first["never"])
        self.assertIn("with a batch size of 1. Its error: CUDA out of memory. Never enough", first["never"])
        self.assertEqual(second["never"], "OutOfMemoryError: CUDA out of memory. Never enough")
        self.assertEqual((first["local"], second["local"]), ("returned 5", "returned 6"))

    def test_a_remembered_answer_needs_all_ranks(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            first, second = ranks.run(2, _remembered_by_ranks, folder)
            self.assertEqual(first, second)
            self.assertEqual([found for found, _ in first], [5, 5, 5])
            self.assertEqual(first[1][1], [5])
            self.assertEqual(first[2][1][0], 2)
            again, other = ranks.run(2, _remembered_by_ranks, folder)
            self.assertEqual((again, again[2][1][0]), (other, 2))

    def test_training_restarts_on_every_rank(self) -> None:
        first, second = ranks.run(2, _training)
        self.assertEqual(first, second)
        self.assertEqual(first[1], [16, 14, 12])
        self.assertFalse(first[2])


if __name__ == "__main__":
    unittest.main()
