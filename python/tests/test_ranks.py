"""Steps that 1, 2 or 4 ranks run together: one rank runs out of memory at every operation of a step in turn, and the
gradients of all ranks are those of a step that never failed.

Variables for longer runs: FAIL_EVERY=1 fails at each operation, FAIL_EVERY=N at each N-th; RANDOM_RUNS is the number of
steps with random failures; RANKS_OUT is a file for the results."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import ranks
import support

EVERY = int(os.environ.get("FAIL_EVERY", "17"))
RUNS = int(os.environ.get("RANDOM_RUNS", "60"))
OUT = os.environ.get("RANKS_OUT", os.devnull)
EXACT = 1e-12


class Case:
    """A model on one rank, a step of it, and its batch."""

    #: whether the step may be split; otherwise it is tried again whole
    splits = True

    def __init__(self, rank: int, world: int) -> None:
        import torch

        self.torch, self.rank, self.world = torch, rank, world
        self.inputs, self.labels = self.batch()
        self.failing: Any = None
        torch.manual_seed(0)
        self.model = self.wrap(self.make().double())
        self.step = self.retried()

    def batch(self) -> tuple[Any, Any]:
        """Returns a batch. Its length differs between ranks, and some labels are ignored."""
        generator = self.torch.Generator().manual_seed(10 + self.rank)
        rows = 5 + self.rank
        labels = self.torch.randint(0, 3, (rows,), generator=generator)
        labels[: 1 + self.rank % 3] = -100
        return self.torch.randn(rows, 4, generator=generator).double(), labels

    def make(self) -> Any:
        nn = self.torch.nn
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))

    def wrap(self, model: Any) -> Any:
        return self.torch.nn.parallel.DistributedDataParallel(model)

    def retried(self) -> Any:
        import cushion

        if not self.splits:
            return cushion.retry(grads=self.model, group="world", timeout=20)(self.forward_and_backward)
        counted = {"weight": lambda inputs, labels: (labels != -100).sum()}
        split = cushion.retry(split=cushion.split_batch, grads=self.model, group="world", timeout=20, **counted)
        return split(self.forward_and_backward)

    def forward_and_backward(self, inputs: Any, labels: Any) -> Any:
        failing, self.failing = self.failing, None
        with failing or contextlib.nullcontext():
            loss = self.torch.nn.functional.cross_entropy(self.model(inputs), labels)
            self.backward(loss)
            return loss.detach()

    def backward(self, loss: Any) -> None:
        loss.backward()

    def clear(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None

    def run(self, step: Callable[..., Any]) -> Any:
        """Runs what the program does with one batch."""
        return step(self.inputs, self.labels)

    def once(self, step: Callable[..., Any], failing: Any = None) -> tuple[Any, Any, Any]:
        """Returns gradients, loss and buffers after one step from the initial state."""
        self.clear()
        self.torch.manual_seed(7)
        buffers = [it.clone() for it in self.model.buffers()]
        self.failing = failing
        loss = self.run(step)
        after = [it.double().clone() for it in self.model.buffers()]
        with self.torch.no_grad():
            for buffer, before in zip(self.model.buffers(), buffers):
                buffer.copy_(before)
        return ranks.gradients(self.model), loss, after


class Bucketed(Case):
    """Gradients are views of DDP's buckets, and each parameter has its own bucket."""

    def wrap(self, model: Any) -> Any:
        return self.torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=1e-5)


class Unused(Case):
    """A layer that no rank uses: DDP agrees on that with a collective in C++."""

    def make(self) -> Any:
        model = super().make()
        model.register_module("unused", self.torch.nn.Linear(2, 2))
        model.forward = lambda inputs: model[4](model[3](model[2](model[1](model[0](inputs)))))
        return model

    def wrap(self, model: Any) -> Any:
        return self.torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)


class Static(Case):
    def wrap(self, model: Any) -> Any:
        return self.torch.nn.parallel.DistributedDataParallel(model, static_graph=True)


class Frozen(Case):
    """Batch norm in evaluation, a layer without gradients, and two layers that share their weights."""

    def make(self) -> Any:
        nn = self.torch.nn
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        second.weight = first.weight
        model = nn.Sequential(first, nn.Tanh(), second, nn.BatchNorm1d(4).eval(), nn.Linear(4, 4), nn.Linear(4, 3))
        model[4].requires_grad_(False)
        return model


class Normalised(Case):
    """Batch norm, whose buffers DDP broadcasts, and dropout, in training: the step is tried again whole."""

    splits = False

    def make(self) -> Any:
        nn = self.torch.nn
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 3))


class Scaled(Case):
    """With a GradScaler."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(rank, world)
        self.scaler = self.torch.amp.GradScaler("cpu", init_scale=1024.0)

    def backward(self, loss: Any) -> None:
        self.scaler.scale(loss).backward()


class Accumulated(Case):
    """Two micro-batches without a reduction and one with it."""

    def run(self, step: Callable[..., Any]) -> Any:
        no_sync = getattr(self.model, "no_sync", contextlib.nullcontext)
        with no_sync():
            self.without_failure(step, self.inputs * 2)
            self.without_failure(step, self.inputs - 1)
        return step(self.inputs, self.labels)

    def without_failure(self, step: Callable[..., Any], inputs: Any) -> None:
        failing, self.failing = self.failing, None
        step(inputs, self.labels)
        self.failing = failing


class Sharded(Case):
    """FSDP2."""

    def wrap(self, model: Any) -> Any:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (self.world,))
        for layer in model:
            if isinstance(layer, self.torch.nn.Linear):
                fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)


class ShardedAccumulated(Sharded, Accumulated):
    pass


class Plain(Case):
    """Without a wrapper: the step itself gathers tensors and reduces gradients."""

    def wrap(self, model: Any) -> Any:
        return model

    def forward_and_backward(self, inputs: Any, labels: Any) -> Any:
        failing, self.failing = self.failing, None
        dist = self.torch.distributed
        with failing or contextlib.nullcontext():
            count = self.torch.tensor([1.0])
            dist.all_reduce(count)
            every = [self.torch.zeros(1) for _ in range(self.world)]
            dist.all_gather(every, count)
            loss = self.torch.nn.functional.cross_entropy(self.model(inputs), labels)
            before = [None if it.grad is None else it.grad.clone() for it in self.model.parameters()]
            self.clear()
            loss.backward()
            for parameter, grad in zip(self.model.parameters(), before):
                dist.all_reduce(parameter.grad)
                parameter.grad /= every[0]
                if grad is not None:
                    parameter.grad += grad
            return loss.detach()


CASES = {it.__name__: it for it in (Case, Bucketed, Unused, Static, Frozen, Normalised, Scaled, Accumulated)}
CASES |= {it.__name__: it for it in (Sharded, ShardedAccumulated, Plain)}


def table(rank: int, world: int, names: list[str], every: int) -> dict[str, Any]:
    """Runs each case with failures on each rank in turn. Returns the largest errors and the number of runs."""
    return {name: _fail_everywhere(CASES[name](rank, world), every) for name in names}


def _fail_everywhere(case: Case, every: int) -> list[float]:
    case.once(case.step)
    case.step.forget()
    grads, loss, buffers = case.once(case.forward_and_backward)
    worst, runs = 0.0, 0
    for short in range(case.world):
        for nth in _until_it_is_past(case, every):
            before = case.step.stats()["retried"]
            failing = ranks.failing_at(nth) if short == case.rank else None
            got, lost, after = case.once(case.step, failing)
            case.step.forget()
            errors = [ranks.relative_error(got, grads), abs(float(lost) - float(loss)) / abs(float(loss))]
            errors += [ranks.relative_error(one, other) for one, other in zip(after, buffers) if other.norm()]
            worst, runs = max(worst, *errors), runs + 1
            if case.step.stats()["retried"] == before:
                # The step has fewer operations, on this rank or, as the ranks agreed, on another.
                break
    return [worst, runs]


def _until_it_is_past(case: Case, every: int) -> Iterator[int]:
    nth = 1
    while True:
        yield nth
        nth += every


def at_random(rank: int, world: int, name: str, runs: int, seed: int) -> list[float]:
    """Runs steps one after the other, as a program does, with random failures: on several ranks at once, again in a
    part, twice in a row. Sizes that were too large are remembered. A part of one row that fails cannot be made smaller:
    then all ranks give up, and that step adds no gradients."""
    case = CASES[name](rank, world)
    case.once(case.step)
    grads, loss, _ = case.once(case.forward_and_backward)
    common, worst = random.Random(seed), 0.0
    for _ in range(runs):
        failures = [common.choice([None, common.randrange(1, 120)]) for _ in range(world)]
        if common.random() < 0.3:
            failures = [None] * world
        failing = None if failures[rank] is None else ranks.failing_at(failures[rank])
        try:
            got, said, _ = case.once(case.step, failing)
        except case.torch.OutOfMemoryError:
            worst = max(worst, sum(it.grad is not None for it in case.model.parameters()))
            continue
        worst = max(worst, ranks.relative_error(got, grads), abs(float(said - loss)) / abs(float(loss)))
    stats = case.step.stats()
    return [worst, stats["calls"] - 1, stats["retried"], stats["split"], stats["gave_up"]]


def say(text: str) -> None:
    with open(OUT, "a") as out:
        print(text, file=out)


@support.needs_torch
class Table(support.ProcessCase):
    changes = {"LD_PRELOAD": None, "LD_LIBRARY_PATH": None}
    warm = True

    def check(self, world: int, names: list[str], every: int = EVERY) -> None:
        for name in names:
            with self.subTest(name, ranks=world):
                results = ranks.run(world, table, [name], every, timeout=600)
                worst, runs = max(it[name][0] for it in results), results[0][name][1]
                say(f"{name} on {world} ranks: {runs:.0f} runs, worst relative error {worst:.1e}")
                self.assertLessEqual(worst, EXACT)
                self.assertGreater(runs, world)

    @support.process(timeout=3600)
    def test_one_rank(self) -> None:
        self.check(1, ["Case", "Scaled", "Accumulated", "Sharded", "ShardedAccumulated", "Normalised"])

    @support.process(timeout=3600)
    def test_two_ranks(self) -> None:
        self.check(2, list(CASES))

    @support.process(timeout=3600)
    def test_four_ranks(self) -> None:
        self.check(4, ["Case", "Accumulated", "Sharded", "Plain"], EVERY if EVERY == 1 else 3 * EVERY)


@support.needs_torch
class AtRandom(support.ProcessCase):
    changes = {"LD_PRELOAD": None, "LD_LIBRARY_PATH": None}
    warm = True

    @support.process(timeout=3600)
    def test_no_hang_and_the_same_gradients(self) -> None:
        for world, name in ((2, "Case"), (2, "Sharded"), (4, "Case"), (3, "Plain")):
            everywhere = ranks.run(world, at_random, name, RUNS // 4, 5, timeout=900)
            for worst, runs, retried, split, gave_up in everywhere:
                again = f"{retried:.0f} tried again, {split:.0f} in parts, {gave_up:.0f} given up"
                say(f"{name} on {world} ranks at random: {runs:.0f} steps, {again}, worst error {worst:.1e}")
                self.assertEqual([split, gave_up], everywhere[0][3:], "ranks do the same")
                self.assertLessEqual(worst, EXACT)
                self.assertEqual(runs, RUNS // 4)
                self.assertGreater(retried, 0)
