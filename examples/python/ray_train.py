"""Ray Train with Cushion: when memory runs out on one worker, all workers run the step again together.

    pip install 'ray[train]'
    python examples/python/ray_train.py
    python examples/python/ray_train.py --short 1      # worker 1 runs out of memory

The example starts a small cluster on this machine. With `--gpu` each worker has a GPU, and installs Cushion as it
starts. `--short RANK` makes memory run out once on a worker, in the third step. The loss is the same with and without
it, and Ray sees no failure. Without Ray or PyTorch it prints SKIPPED.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
from typing import Any


def skip(why: str) -> None:
    print(f"SKIPPED: {why}")
    sys.exit(0)


for package, name in (("torch", "PyTorch"), ("ray", "Ray")):
    if importlib.util.find_spec(package) is None:
        skip(f"{name} is not installed")

import ray.train.torch
import torch

import cushion

STEPS = 5
ROWS = 64


def train(config: dict[str, Any]) -> None:
    """The training function of each worker."""
    rank = ray.train.get_context().get_world_rank()
    device = ray.train.torch.get_device()
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    model = ray.train.torch.prepare_model(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # The worker that runs out of memory once.
    short = {config["short"]}

    @cushion.retry(split=cushion.split_batch, loss="mean", grads=model, group="world")
    def step(inputs: torch.Tensor, targets: torch.Tensor, number: int) -> torch.Tensor:
        outputs = model(inputs)
        if number == 3 and rank in short:
            short.clear()
            raise torch.OutOfMemoryError("CUDA out of memory. Made up by --short")
        loss = torch.nn.functional.mse_loss(outputs, targets)
        loss.backward()
        return loss.detach()

    # Each worker has its own batches.
    torch.manual_seed(1 + rank)
    for number in range(1, STEPS + 1):
        inputs = torch.randn(ROWS, 16, device=device)
        targets = inputs.square().mean(dim=1, keepdim=True)
        optimizer.zero_grad()
        loss = step(inputs, targets, number)
        # Outside the step, which may run several times: the update happens once.
        optimizer.step()
        torch.distributed.all_reduce(loss)
        loss /= ray.train.get_context().get_world_size()
        report({"step": number, "loss": float(loss), **step.stats()}, model if number == STEPS else None)


def report(metrics: dict[str, Any], model: torch.nn.Module | None) -> None:
    """Reports metrics to Ray. Ray keeps metrics only with a checkpoint, which one worker makes."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if model is not None and ray.train.get_context().get_world_rank() == 0:
            torch.save(model.state_dict(), os.path.join(folder, "model.pt"))
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report(metrics, checkpoint=checkpoint)


def main() -> None:
    parser = argparse.ArgumentParser(description="Workers that train together, of which one may run out of memory.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="a GPU for each worker")
    parser.add_argument("--short", type=int, metavar="RANK", help="the worker that runs out of memory")
    asked = parser.parse_args()

    # Ray sets the GPU of a worker before it calls `train`, so that it is too late to install Cushion there.
    starting = {"runtime_env": {"worker_process_setup_hook": "cushion.install"}} if asked.gpu else {}
    ray.init(num_cpus=asked.workers + 1, include_dashboard=False, log_to_driver=False, **starting)
    with tempfile.TemporaryDirectory() as folder:
        trainer = ray.train.torch.TorchTrainer(
            train,
            train_loop_config={"short": asked.short},
            scaling_config=ray.train.ScalingConfig(num_workers=asked.workers, use_gpu=asked.gpu),
            run_config=ray.train.RunConfig(storage_path=folder, failure_config=ray.train.FailureConfig(max_failures=0)),
        )
        last = trainer.fit().metrics
    ray.shutdown()
    print(f"step {last['step']}: loss {last['loss']:.5f}")
    print(f"steps: {last['calls']}; tries: {last['tries']}; in parts: {last['split']}")
    print("ok")


if __name__ == "__main__":
    main()
