"""Uses of the package, for mypy with PyTorch's own types: `test_types.py` makes mypy check this file. It is never run.

`assert_type` gives the expected type. A line that has to be an error ends with `# error:` and a part of mypy's message;
every other line has to pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from typing_extensions import assert_type

import cushion

model = torch.nn.Linear(1, 1)
optimizer = torch.optim.AdamW(model.parameters())
rows = torch.zeros(4, 1)


# ---- decorated functions keep their parameters and their result ----


@cushion.retry(split=cushion.split_batch, loss="mean", grads=model)
def step(inputs: torch.Tensor, targets: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
    return inputs.sum() * scale


assert_type(step(rows, rows), torch.Tensor)
assert_type(step(rows, targets=rows, scale=0.5), torch.Tensor)
assert_type(step.stats(), dict[str, int])
step.forget()
step(rows)  # error: Missing positional argument "targets"
step(rows, "no")  # error: Argument 2 to "__call__" of "Retried" has incompatible type "str"; expected "Tensor"
step(rows, rows, scal=0.5)  # error: Unexpected keyword argument "scal"
step(rows, rows).size  # fine: a tensor has one
step(rows, rows).colour  # error: "Tensor" has no attribute "colour"


@cushion.retry(tries=2)
def whole(count: int) -> list[str]:
    return [""] * count


assert_type(whole(3), list[str])


@cushion.budget(ms=0, skip=["wait"])
def search(limit: int) -> float:
    return float(limit)


assert_type(search(3), float)
search("no")  # error: Argument 1 to "search" has incompatible type "str"; expected "int"
with cushion.budget(ms=3) as block:
    assert_type(block, cushion.budget)


# ---- methods ----


class Trainer:
    @cushion.retry(grads=optimizer)
    def step(self, inputs: torch.Tensor, count: int) -> float:
        return float(inputs.sum()) * count

    @cushion.budget(ms=0)
    def search(self, limit: int) -> int:
        return limit

    @staticmethod
    @cushion.retry()
    def alone(count: int) -> int:
        return count

    def run(self) -> float:
        return self.step(rows, 1) + self.step(rows, "no")  # error: has incompatible type "str"; expected "int"


class Module(torch.nn.Module):
    @cushion.retry(split=cushion.split_batch, combine=torch.cat)
    def predict(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs


assert_type(Trainer().step(rows, 3), float)
assert_type(Trainer().search(3), int)
assert_type(Trainer.alone(3), int)
assert_type(Trainer.step(Trainer(), rows, 3), float)
assert_type(Trainer().step.stats(), dict[str, int])
assert_type(Module().predict(rows), torch.Tensor)
Trainer().step(rows, "no")  # error: Argument 2 to "__call__" of "Retried" has incompatible type "str"; expected "int"
Trainer().step(rows)  # error: Missing positional argument "count"
Trainer().search("no")  # error: Argument 1 to "search" of "Trainer" has incompatible type "str"; expected "int"
Trainer.alone("no")  # error: has incompatible type "str"; expected "int"
Module().predict("no")  # error: has incompatible type "str"; expected "Tensor"


# ---- the result is that of the step, or that of `combine` ----


def infer(inputs: torch.Tensor) -> torch.Tensor:
    return inputs


assert_type(cushion.retry(infer, rows), torch.Tensor)
assert_type(cushion.retry(infer, inputs=rows, grads=model, reset=optimizer.zero_grad), torch.Tensor)
assert_type(cushion.retry(infer, rows, split=cushion.split_batch, combine=torch.cat), torch.Tensor)
assert_type(cushion.retry(infer, rows, split=cushion.split_batch, combine=lambda parts: len(parts)), int)
assert_type(cushion.retry(model, rows, split=cushion.split_batch, combine=torch.cat), torch.Tensor)
assert_type(cushion.retry(Trainer().step, rows, 3), float)
assert_type(cushion.retry(lambda: 3), int)


@cushion.retry(split=cushion.split_batch, combine=lambda parts: {"parts": len(parts)})
def counted(inputs: torch.Tensor) -> torch.Tensor:
    return inputs


assert_type(counted(rows), dict[str, int])
cushion.retry(split=cushion.split_batch, loss="average")  # error: No overload variant of "retry" matches
cushion.retry(infer, rows, tries="3")  # error: No overload variant of "retry" matches


# ---- the largest batch ----


def probe(batch_size: int) -> None: ...


@cushion.find_batch_size(starting_batch_size=128)
def training(batch_size: int, epochs: int) -> float:
    return float(batch_size * epochs)


assert_type(cushion.find_batch_size(probe, 8, grads=model, limit=64), int)
assert_type(training(3), float)
training(128, 3)  # error: Too many arguments
training("no")  # error: has incompatible type "str"; expected "int"


# ---- splits ----

assert_type(cushion.split_batch, cushion.SplitBatch)
split: cushion.SplitBatch = cushion.split_batch.along(1).whole("mask").rows("targets").samples


def by_sample(parts: int, images: list[Any]) -> Sequence[tuple[tuple[Any, ...], dict[str, Any]]]:
    if len(images) < parts:
        raise cushion.CannotSplit("there are fewer images")
    return [((images[at::parts],), {}) for at in range(parts)]


@cushion.retry(split=by_sample, weight=len, grads=[model, optimizer])
def detect(images: list[Any]) -> float:
    return 0.0


assert_type(detect([rows]), float)


# ---- offloaders ----


@cushion.offloader
def optimizer_state() -> torch.optim.Optimizer:
    return optimizer


@cushion.offloader
def weights() -> torch.nn.Module:
    return model


@cushion.offloader(priority=2, budget_ms=100)
def one() -> torch.Tensor:
    return rows


@cushion.offloader()
def several() -> list[torch.Tensor]:
    return [rows]


@cushion.offloader
def by_name() -> dict[str, torch.Tensor | torch.nn.Module]:
    return {"rows": rows, "model": model}


for one_of_them in (optimizer_state, weights, one, several, by_name):
    assert_type(one_of_them, cushion.Offloader)
    with one_of_them:
        pass
assert_type(weights.away(at_least=1 << 20), int)
cushion.offloader(rows)  # error: No overload variant of "offloader" matches argument type "Tensor"


# ---- callbacks ----


@cushion.on_shortage(priority=1)
def drop_cache(device: int, bytes_wanted: int, seconds_left: float) -> str:
    return f"{bytes_wanted} bytes of device {device} within {seconds_left} s"


@cushion.on_shortage
def count_shortages(device: int, bytes_wanted: int, seconds_left: float) -> None: ...


@cushion.on_refusal
def save(receipt: cushion.Receipt) -> None:
    assert_type(receipt.remedies, tuple[str, ...])


assert_type(drop_cache(0, 1, 0.5), str)
assert_type(cushion.remove_callback(drop_cache), bool)
cushion.on_shortage(whole)  # error: Value of type variable "_Shortage" of "on_shortage" cannot be
cushion.on_refusal(drop_cache)  # error: Value of type variable "_Refusal" of "on_refusal" cannot be


# ---- receipts: the types of PyTorch's exception have no `receipt`, and `receipt_of` is typed ----

try:
    step(rows, rows)
except torch.OutOfMemoryError as error:
    receipt = cushion.receipt_of(error)
    assert_type(receipt, cushion.Receipt | None)
    if receipt is not None:
        assert_type([tried.won for tried in receipt.tried], list[int])
    error.receipt  # error: "OutOfMemoryError" has no attribute "receipt"
except cushion.OutOfMemoryError as without_torch:
    assert_type(without_torch.receipt, cushion.Receipt | None)
assert_type(cushion.receipts(0), list[cushion.Receipt])


# ---- options ----

cushion.install(policy="expandable", wait_ms=0, skip_rungs=["wait", "spill"])
cushion.install(policy="segment")  # error: incompatible type "Literal['segment']"; expected "Literal['segments',
cushion.install(wait_ms="0")  # error: Argument "wait_ms" to "install" has incompatible type "str"
assert_type(cushion.is_out_of_memory(RuntimeError()), bool)
assert_type(cushion.retry_stats(), dict[str, int])
with cushion.inject("nth=5"):
    pass
callback: Callable[[int, int, float], object] = drop_cache
