"""A training loop whose batches are too large for its memory limit: the steps run again, in parts.

    python examples/python/retry_steps.py

The gradients are those of the whole batch. Without PyTorch or a GPU it prints SKIPPED and the reason.
"""

from __future__ import annotations

import importlib.util
import sys


def skip(why: str) -> None:
    print(f"SKIPPED: {why}")
    sys.exit(0)


if importlib.util.find_spec("torch") is None:
    skip("PyTorch is not installed")

import torch

if not torch.cuda.is_available():
    skip("there is no CUDA GPU")

import cushion

cushion.install()

ALLOWED = 1 << 30
WIDTH = 1024
LAYERS = 4


class Model(torch.nn.Module):
    """Few parameters, and large activations for the backward pass: 8 KiB per row and layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = torch.nn.ParameterList(torch.ones(WIDTH) for _ in range(LAYERS))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            rows = torch.tanh(rows * scale)
        return rows.mean(dim=1)


def main() -> None:
    torch.manual_seed(0)
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(ALLOWED / total)
    model = Model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    @cushion.retry(split=cushion.split_batch, loss="mean", grads=model)
    def step(inputs: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(model(inputs), wanted)
        loss.backward()
        return loss.detach()

    for number, rows in enumerate((1 << 14, 1 << 16, 1 << 16, 50_000, 1 << 14), start=1):
        inputs = torch.randn(rows, WIDTH, device="cuda")
        wanted = torch.tanh(inputs).mean(dim=1)
        optimizer.zero_grad()
        before = step.stats()["tries"]
        loss = step(inputs, wanted)
        # Outside the step, which may run several times: the update happens once.
        optimizer.step()
        print(f"step {number}: {rows} rows, loss {loss.item():.5f}, tries: {step.stats()['tries'] - before}")
        # Frees these rows before the next are created.
        del inputs, wanted

    figures = step.stats()
    print(f"steps: {figures['calls']}; in parts: {figures['split']}; tries: {figures['tries']}")
    print(f"peak: {torch.cuda.max_memory_allocated() / (1 << 20):.0f} of {ALLOWED >> 20} MiB")
    print("ok")


if __name__ == "__main__":
    main()
