"""Ranks that train together: when memory runs out on one, all run the step again, with the same gradients.

    torchrun --nproc-per-node 2 examples/python/torchrun_ddp.py
    torchrun --nproc-per-node 2 examples/python/torchrun_ddp.py --short 1      # rank 1 runs out of memory
    torchrun --nproc-per-node 2 examples/python/torchrun_ddp.py --short 1 --fsdp2

The example runs on GPUs with NCCL, or on the CPU with gloo. `--short RANK` makes memory run out once on a rank, in the
backward pass of the third step. The losses are the same with and without it. Without PyTorch it prints SKIPPED.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys


def skip(why: str) -> None:
    print(f"SKIPPED: {why}")
    sys.exit(0)


if importlib.util.find_spec("torch") is None:
    skip("PyTorch is not installed")

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import cushion

STEPS = 5
ROWS = 64


class Shortage:
    """Raises out of memory once, where the gradient of a tensor is computed."""

    def __init__(self, is_short: bool) -> None:
        self.is_short = is_short

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.is_short and tensor.requires_grad:
            tensor.register_hook(self.run_out)
        return tensor

    def run_out(self, _gradient: torch.Tensor) -> None:
        if self.is_short:
            self.is_short = False
            raise torch.OutOfMemoryError("CUDA out of memory. Made up by --short")


def distributed(model: torch.nn.Sequential, fsdp2: bool) -> torch.nn.Module:
    if not fsdp2:
        return torch.nn.parallel.DistributedDataParallel(model)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description="Ranks that train together, of which one may run out of memory.")
    parser.add_argument("--short", type=int, metavar="RANK", help="the rank that runs out of memory")
    parser.add_argument("--fsdp2", action="store_true", help="shard the model, in the place of DDP")
    asked = parser.parse_args()

    device = torch.device("cpu")
    if torch.cuda.is_available():
        # Before CUDA is used.
        cushion.install()
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        # Not started by torchrun: one rank.
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank = dist.get_rank()

    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).to(device)
    shortage = Shortage(False)
    layers[1].register_forward_hook(lambda _module, _inputs, outputs: shortage(outputs))
    model = distributed(layers, asked.fsdp2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @cushion.retry(split=cushion.split_batch, loss="mean", grads=model, group="world")
    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        return loss.detach()

    # Each rank has its own batches.
    torch.manual_seed(1 + rank)
    for number in range(1, STEPS + 1):
        inputs = torch.randn(ROWS, 16, device=device)
        targets = inputs.square().mean(dim=1, keepdim=True)
        shortage.is_short = rank == asked.short and number == 3
        optimizer.zero_grad()
        loss = step(inputs, targets)
        # Outside the step, which may run several times: the update happens once.
        optimizer.step()
        dist.all_reduce(loss)
        if rank == 0:
            print(f"step {number}: loss {loss.item() / dist.get_world_size():.5f}")

    figures = step.stats()
    if rank == 0:
        print(f"steps: {figures['calls']}; tries: {figures['tries']}; in parts: {figures['split']}")
        print("ok")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
