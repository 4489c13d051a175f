"""Moves the state of the optimizer to the host while the forward and backward pass need its memory, and back.

    python examples/python/offload_state.py

AdamW's state is twice as large as the weights, and unused until `optimizer.step()`. The example trains a model in less
memory than all its tensors need together. Without PyTorch or a GPU it prints SKIPPED and the reason.
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

MIB = 1 << 20
# Weights and gradients are 256 MiB each, the state 512 MiB; the pass below needs 400 MiB in addition to weights and
# state.
ALLOWED = 1120 * MIB


def main() -> None:
    torch.cuda.set_per_process_memory_fraction(ALLOWED / torch.cuda.mem_get_info()[1])
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.full((16 * MIB // 4,), 0.5, device="cuda")) for _ in range(16)]
    optimizer = torch.optim.AdamW(weights, lr=1e-3, fused=True)

    @cushion.offloader(budget_ms=30_000)
    def state() -> object:
        return optimizer

    for step in range(1, 6):
        work = torch.zeros(400 * MIB // 4, device="cuda")
        loss = sum((weight * weight).mean() for weight in weights) + work[0]
        del work
        loss.backward()
        away = state.bytes_away
        # The state comes back before the update begins.
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: {away / MIB:.0f} MiB of the state were on the host")
    for receipt in cushion.receipts():
        print(receipt, *[f"({answer.said})" for answer in receipt.answers])
    assert any(answer.said for receipt in cushion.receipts() for answer in receipt.answers), "memory was enough"
    print("ok")


if __name__ == "__main__":
    main()
