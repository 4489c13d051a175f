"""How steps that ranks run together end: in the same way on all ranks, with an error that names the failed rank, and
without a hang."""

from __future__ import annotations

import datetime
import os
import signal
import time
from typing import Any

import ranks
import support

SHORT = 4.0


def _model() -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1).double())


def _batch(rank: int, rows: int = 8) -> tuple[Any, Any]:
    import torch

    generator = torch.Generator().manual_seed(rank)
    return torch.randn(rows, 4, generator=generator).double(), torch.randn(rows, 1, generator=generator).double()


def _caught(call: Any, *arguments: Any) -> list[str]:
    """Returns the name and the message of the error of a call."""
    try:
        call(*arguments)
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["", ""]


def no_group(rank: int, world: int) -> list[Any]:
    import cushion

    ran: list[int] = []
    plain = _caught(cushion.retry, ran.append, 1)
    without_grads = _caught(lambda: cushion.retry(ran.append, 1, group="world"))
    both = _caught(lambda: cushion.retry(ran.append, 1, group="world", local=True))
    unknown = _caught(lambda: cushion.retry(ran.append, 1, group="all", grads=()))
    assert ran == []
    # Each rank by itself.
    left = [rank]

    def step() -> str:
        if left[0] > 0:
            left[0] -= 1
            raise MemoryError
        return "done"

    return [plain, without_grads, both, unknown, cushion.retry(step, local=True)]


def giving_up(rank: int, world: int) -> list[Any]:
    """Rank 1 never has enough memory: all ranks give up, and keep their gradients. The next step succeeds."""
    import torch

    import cushion

    model, (inputs, targets) = _model(), _batch(rank)
    short = [rank == 1]

    @cushion.retry(split=cushion.split_batch, loss="mean", grads=model, group="world", timeout=20)
    def step(inputs: Any, targets: Any) -> Any:
        if short[0]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate a row.")
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        return loss.detach()

    ended = _caught(step, inputs, targets)
    none = all(it.grad is None for it in model.parameters())
    stats = step.stats()
    short[0] = False
    step(inputs, targets)
    got = ranks.gradients(model)
    model.zero_grad()
    torch.nn.functional.mse_loss(model(inputs), targets).backward()
    return [ended, none, stats, ranks.relative_error(got, ranks.gradients(model))]


def other_errors(rank: int, world: int) -> list[Any]:
    """An error that is not out of memory, on one rank, before and between its collectives."""
    import torch
    import torch.distributed as dist

    import cushion

    ended = []
    for at in range(3):

        @cushion.retry(grads=(), group="world", timeout=20)
        def step() -> None:
            for number in range(2):
                if rank == 0 and number == at:
                    raise ValueError(f"no such file, at {at}")
                dist.all_reduce(torch.ones(3))
            if rank == 0 and at == 2:
                raise KeyError("after all")

        ended.append(_caught(step))
    return ended


def killed(rank: int, world: int) -> Any:
    """A rank dies in its step, while others wait in a collective, or have ended their step."""
    import torch
    import torch.distributed as dist

    import cushion

    @cushion.retry(grads=(), group="world", timeout=SHORT)
    def step() -> None:
        dist.all_reduce(torch.ones(3))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    began = time.monotonic()
    ended = _caught(step)
    raise ranks.Ended([*ended, time.monotonic() - began])


def cannot_be_joined(rank: int, world: int) -> Any:
    """Rank 1 waits in a collective that does not go through Python's process group, and rank 0 runs out of memory."""
    import torch
    import torch.distributed._functional_collectives as functional

    import cushion

    @cushion.retry(grads=(), group="world", timeout=SHORT)
    def step() -> None:
        if rank == 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate a lot.")
        functional.wait_tensor(functional.all_reduce(torch.ones(3), "sum", torch.distributed.group.WORLD))

    began = time.monotonic()
    ended = _caught(step)
    raise ranks.Ended([*ended, time.monotonic() - began])


def one_is_late(rank: int, world: int) -> list[Any]:
    """Rank 0 runs out of memory before rank 1 has begun the step: the alarm names a step that rank 1 has yet to
    begin."""
    import torch
    import torch.distributed as dist

    import cushion

    ran: list[int] = []
    store = dist.distributed_c10d._get_default_store()

    @cushion.retry(grads=(), group="world", timeout=20)
    def step(number: int) -> float:
        first = number not in ran
        ran.append(number)
        if rank == 0 and first and number >= 0:
            store.set(f"short {number}", "yes")
            raise torch.OutOfMemoryError("CUDA out of memory. Once.")
        ones = torch.ones(1)
        dist.all_reduce(ones)
        return float(ones)

    # The ranks connect at the first step.
    results = [step(-1)]
    for number in range(5):
        if rank == 1:
            store.wait([f"short {number}"], datetime.timedelta(seconds=20))
            # The alarm is set soon after. It may come before or after this rank begins.
            time.sleep(0.01 * number)
        results.append(step(number))
    return results


def subgroups(rank: int, world: int) -> list[Any]:
    """Two groups of two ranks: one group runs out of memory, and the other is not affected."""
    import torch
    import torch.distributed as dist

    import cushion

    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    own = groups[rank // 2]
    short = [rank == 1]

    @cushion.retry(grads=(), group=own, timeout=20)
    def step() -> float:
        ones = torch.ones(1)
        dist.all_reduce(ones, group=own)
        if short.pop() if short else False:
            raise torch.OutOfMemoryError("CUDA out of memory. Once.")
        dist.all_reduce(ones, group=own)
        return float(ones)

    return [step(), step.stats()["tries"]]


def every_collective(rank: int, world: int) -> list[int]:
    """Rank 0 fails before each kind of collective; the other ranks are in it, and return."""
    import torch
    import torch.distributed as dist

    import cushion

    ones = torch.ones(2)

    def lists(count: int = world) -> list[Any]:
        return [torch.zeros(2) for _ in range(count)]

    kinds = [
        lambda: dist.all_reduce(ones.clone(), op=dist.ReduceOp.MAX),
        lambda: dist.broadcast(ones.clone(), 1),
        lambda: dist.broadcast(ones.clone(), 0),
        lambda: dist.reduce(ones.clone(), 0),
        lambda: dist.reduce(ones.clone(), 1),
        lambda: dist.all_gather(lists(), ones),
        lambda: dist.all_gather_into_tensor(torch.zeros(2 * world), ones),
        lambda: dist.gather(ones, lists() if rank == 1 else None, dst=1),
        lambda: dist.gather(ones, lists() if rank == 0 else None, dst=0),
        lambda: dist.scatter(torch.zeros(2), lists() if rank == 1 else None, src=1),
        lambda: dist.scatter(torch.zeros(2), lists() if rank == 0 else None, src=0),
        lambda: dist.reduce_scatter_tensor(torch.zeros(2), torch.ones(2 * world)),
        lambda: dist.all_to_all_single(torch.zeros(2 * world), torch.ones(2 * world)),
        lambda: dist.all_gather_object([None] * world, {"rank": rank}),
        lambda: dist.broadcast_object_list([f"from {rank}"], 1),
        lambda: dist.barrier(),
    ]
    tries = []
    for collective in kinds:
        short = [rank == 0]

        @cushion.retry(grads=(), group="world", timeout=20)
        def step() -> None:
            if short.pop() if short else False:
                raise torch.OutOfMemoryError("CUDA out of memory. Once.")
            collective()

        step()
        tries.append(step.stats()["tries"])
    return tries


@support.needs_torch
class Ends(support.ProcessCase):
    changes = {"LD_PRELOAD": None, "LD_LIBRARY_PATH": None}
    warm = True

    def test_group_or_local_is_required(self) -> None:
        for plain, without_grads, both, unknown, alone in ranks.run(2, no_group):
            self.assertEqual(plain[0], "RuntimeError")
            self.assertIn("this program has 2 ranks", plain[1])
            self.assertIn('Give group="world"', plain[1])
            self.assertEqual(without_grads[0], "TypeError")
            self.assertIn("group= needs grads=", without_grads[1])
            self.assertEqual(both[0], "TypeError")
            self.assertEqual(unknown[0], "TypeError")
            self.assertIn("has to be a process group", unknown[1])
            self.assertEqual(alone, "done")

    def test_all_give_up_together_and_go_on(self) -> None:
        found = ranks.run(2, giving_up)
        for rank, (ended, none, stats, error) in enumerate(found):
            self.assertEqual(ended[0], "OutOfMemoryError")
            self.assertTrue(ended[1].startswith("CUDA out of memory."))
            self.assertTrue(none)
            self.assertEqual(stats["gave_up"], 1)
            self.assertLessEqual(error, 1e-12)
        self.assertIn("Rank 1 ran out of memory", found[0][0][1])
        self.assertIn("Tried to allocate a row", found[0][0][1])
        self.assertEqual(found[1][0][1], "CUDA out of memory. Tried to allocate a row.")

    def test_other_errors_are_raised_on_all_ranks(self) -> None:
        first, second = ranks.run(2, other_errors)
        self.assertEqual([kind for kind, _ in first], ["ValueError", "ValueError", "KeyError"])
        for at, (kind, text) in enumerate(second):
            self.assertEqual(kind, "RankError")
            self.assertIn("rank 0 failed in other_errors", text)
            self.assertIn("KeyError: 'after all'" if at == 2 else f"ValueError: no such file, at {at}", text)

    def test_a_rank_that_dies_is_an_error_on_the_others(self) -> None:
        first, second = ranks.run(2, killed)
        self.assertEqual(second, -signal.SIGKILL)
        self.assertEqual(first[0], "RankError")
        self.assertIn("A rank has ended", first[1])

    def test_a_collective_that_cannot_be_joined_ends_at_the_timeout(self) -> None:
        first, second = ranks.run(2, cannot_be_joined)
        for kind, text, _ in (first, second):
            self.assertEqual(kind, "RankError", text)
            self.assertIn("Rank 0 failed first", text)

    def test_a_late_rank(self) -> None:
        self.assertEqual(ranks.run(2, one_is_late), [[2.0] * 6] * 2)

    def test_groups_do_not_disturb_each_other(self) -> None:
        found = ranks.run(4, subgroups)
        self.assertEqual([tries for _, tries in found], [2, 2, 1, 1])
        self.assertEqual({value for value, _ in found}, {4.0})

    def test_ranks_return_from_every_collective(self) -> None:
        for tries in ranks.run(3, every_collective):
            self.assertEqual(set(tries), {2})
