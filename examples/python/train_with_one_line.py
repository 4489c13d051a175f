"""A small model, trained with Cushion as PyTorch's allocator, with one added line.

    python examples/python/train_with_one_line.py

Without PyTorch or a GPU it prints SKIPPED and the reason.
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


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = torch.randn(4096, 64, device="cuda")
    wanted = inputs.square().mean(dim=1, keepdim=True)
    for step in range(1, 101):
        loss = torch.nn.functional.mse_loss(model(inputs), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.5f}")
    figures = cushion.stats()
    print(f"allocator: {torch.cuda.memory.get_allocator_backend()}")
    print(f"peak: {torch.cuda.max_memory_allocated() / (1 << 20):.2f} MiB")
    print(f"served from memory already held: {figures['hits']}; asked of the driver: {figures['misses']}")
    print("ok")


if __name__ == "__main__":
    main()
