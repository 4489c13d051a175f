"""Hugging Face Accelerate with Cushion: the search for a batch size that fits, and steps that do not need it.

    pip install accelerate
    python examples/python/accelerate_habits.py
    accelerate launch examples/python/accelerate_habits.py      # on all GPUs

`find_executable_batch_size` restarts with a smaller size whenever memory runs out. `cushion.retry` keeps the batch
size, and runs a step that does not fit in parts, on all ranks together. Without Accelerate, PyTorch or a GPU the
example prints SKIPPED and the reason."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any


def skip(why: str) -> None:
    print(f"SKIPPED: {why}")
    sys.exit(0)


for package, name in (("torch", "PyTorch"), ("accelerate", "Accelerate")):
    if importlib.util.find_spec(package) is None:
        skip(f"{name} is not installed")

import torch

if not torch.cuda.is_available():
    skip("there is no CUDA GPU")

import cushion

# Before an Accelerator is created, which uses CUDA.
cushion.install()

from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size

ALLOWED = 1 << 30
WIDTH = 1024
LAYERS = 4
ROWS = 1 << 16


class Model(torch.nn.Module):
    """Few parameters, and large activations for the backward pass: 8 KiB per row and layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = torch.nn.ParameterList(torch.ones(WIDTH) for _ in range(LAYERS))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            rows = torch.tanh(rows * scale)
        return rows.mean(dim=1)


def prepared(accelerator: Accelerator) -> tuple[Any, Any]:
    model = Model()
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def search(accelerator: Accelerator) -> int:
    """Returns the largest batch size that fits, of those that Accelerate tries."""

    @find_executable_batch_size(starting_batch_size=ROWS)
    def fits(batch_size: int) -> int:
        model, _ = prepared(accelerator)
        inputs = torch.randn(batch_size, WIDTH, device=accelerator.device)
        accelerator.backward(model(inputs).square().mean())
        accelerator.free_memory()
        return batch_size

    # The search expects refusals. Waiting for memory that other threads may free would only slow it down.
    with cushion.budget(ms=0):
        return fits()


def train(accelerator: Accelerator) -> None:
    """Trains with whole batches, which do not fit."""
    model, optimizer = prepared(accelerator)

    @cushion.retry(split=cushion.split_batch, loss="mean", grads=model, group="world")
    def step(inputs: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(model(inputs), wanted)
        accelerator.backward(loss)
        return loss.detach()

    for number in range(1, 4):
        inputs = torch.randn(ROWS, WIDTH, device=accelerator.device)
        wanted = torch.tanh(inputs).mean(dim=1)
        optimizer.zero_grad()
        loss = step(inputs, wanted)
        optimizer.step()
        print(f"step {number}: {ROWS} rows, loss {loss.item():.5f}")
        del inputs, wanted
    figures = step.stats()
    print(f"steps: {figures['calls']}; in parts: {figures['split']}; tries: {figures['tries']}")


def main() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(ALLOWED / total)
    print(f"{search(accelerator)} of {ROWS} rows fit into {ALLOWED >> 20} MiB")
    train(accelerator)
    print("ok")


if __name__ == "__main__":
    main()
