"""A training run that saves a checkpoint right before an allocation is refused, is killed, and resumes.

    python examples/python/checkpoint_before_refusal.py

The example starts three processes. The first trains to the end. The second runs out of memory in the middle (an
injected failure), saves its state in `cushion.on_refusal` and is killed. The third resumes from there, and ends with
the loss of the first, to the last digit. Without PyTorch or a GPU the example prints SKIPPED and the reason."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

STEPS, RUNS_OUT_AT = 60, 37


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


def random_state() -> dict[str, Any]:
    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state()}


def train(checkpoint: Path, runs_out: bool) -> None:
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    layers = [torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(256, 1)]
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    begun: dict[str, Any] = {"step": 0, "random": random_state()}
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        begun = saved["begun"]
        torch.set_rng_state(begun["random"]["cpu"])
        torch.cuda.set_rng_state(begun["random"]["cuda"])
        print(f"resumes at step {begun['step']}")

    @cushion.on_refusal
    def save(receipt: cushion.Receipt) -> None:
        # Weights change only at the end of a step, so these are the weights at its beginning. The file is written under
        # another name first: if the process is killed meanwhile, the old file stays.
        aside = checkpoint.with_suffix(".part")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "begun": begun}, aside)
        os.replace(aside, checkpoint)
        print(f"saved at step {begun['step']}, as {receipt}", flush=True)

    loss = torch.zeros(())
    for step in range(begun["step"], STEPS):
        begun = {"step": step, "random": random_state()}
        if runs_out and step == RUNS_OUT_AT:
            cushion.inject("nth=5")
        inputs = torch.randn(512, 64, device="cuda")
        wanted = inputs.square().mean(dim=1, keepdim=True)
        loss = torch.nn.functional.mse_loss(model(inputs), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item()!r}")


def run(checkpoint: Path, *more: str) -> tuple[int, list[str]]:
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    command = [sys.executable, __file__, str(checkpoint), *more]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    for line in done.stdout.splitlines():
        print(f"  {line}")
    return done.returncode, done.stdout.splitlines()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        print("a process that trains to the end:")
        _, whole = run(Path(folder, "none.pt"))
        print("a process that runs out of memory:")
        checkpoint = Path(folder, "checkpoint.pt")
        ended, _ = run(checkpoint, "runs out")
        assert ended == -signal.SIGKILL, f"it ended with {ended}"
        print("a process that resumes from the checkpoint:")
        _, resumed = run(checkpoint)
    assert whole[-1].startswith("loss") and resumed[-1] == whole[-1], (whole, resumed)
    print("ok")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        try:
            train(Path(sys.argv[1]), runs_out=len(sys.argv) > 2)
        except RuntimeError as error:
            if not cushion.is_out_of_memory(error):
                raise
            # As a scheduler ends a failed job: nothing else is saved.
            os.kill(os.getpid(), signal.SIGKILL)
