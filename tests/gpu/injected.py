"""A training run with one injected failure in a thousand allocations ends with the same loss, and leaks nothing.

    python tests/gpu/injected.py [--policy P] [--steps 2000] [--one-in 1000]

A small model with dropout is trained with deterministic kernels, each step in `cushion.retry`: once without and once
with failures. All results have to be the same, and the memory held at the end has to be that after the first steps.
"""

from __future__ import annotations

import argparse
import json
import os

from harness import Checks, itself, main, parser, require_gpu, say


def train(policy: str, steps: int, one_in: int) -> dict:
    import torch

    import cushion

    if policy != "native":
        cushion.install(policy=policy)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(1)
    layers = [torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(512, 256)]
    model = torch.nn.Sequential(*layers, torch.nn.LayerNorm(256), torch.nn.Linear(256, 1)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    inputs = torch.randn(64, 512, 256, device="cuda")
    wanted = inputs.square().mean(dim=-1, keepdim=True)

    @cushion.retry(grads=model, tries=10)
    def step(number: int):
        rows = torch.randint(0, len(inputs), (16,), device="cuda")
        loss = torch.nn.functional.mse_loss(model(inputs[rows]), wanted[rows])
        loss.backward()
        return loss.detach()

    losses = []
    held = None
    for number in range(steps):
        if number == 20:
            # The state of the optimizer, and all that PyTorch allocates once, exists by now.
            torch.cuda.synchronize()
            held = torch.cuda.memory_allocated()
            if one_in:
                cushion.inject(f"fraction={1 / one_in},seed=7")
        optimizer.zero_grad()
        loss = step(number)
        # An update in place with fused kernels allocates nothing once the state exists.
        optimizer.step()
        losses.append(loss)
    if one_in:
        cushion.inject(None)
    del loss
    final = [loss.item() for loss in losses[-3:]]
    losses.clear()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    found = {
        "losses": final,
        "grown": torch.cuda.memory_allocated() - (held or 0),
        "tries": step.stats(),
        "parameters": sum(float(parameter.double().sum()) for parameter in model.parameters()),
    }
    if policy != "native":
        found["refused"] = cushion.stats()["shortages_refused"]
        cushion._cushion.check_invariants(0)
    return found


def body(checks: Checks, given: argparse.Namespace) -> dict:
    deterministic = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    steps = ("--steps", str(given.steps))
    plain = itself("--train", "native", *steps, "--one-in", "0", **deterministic)
    ours = itself("--train", given.policy, *steps, "--one-in", str(given.one_in), **deterministic)
    say(f"native: {plain}, {given.policy}: {ours}")
    checks.that(ours["refused"] > 0, "nothing was refused")
    checks.equal(ours["tries"]["retried"] > 0, True, "steps that were tried again")
    checks.equal(ours["tries"]["gave_up"], 0, "steps given up")
    for what in ("losses", "parameters"):
        checks.equal(ours[what], plain[what], f"the {what}")
    checks.equal(ours["grown"], plain["grown"], "bytes more than after the first steps")
    return {
        "told": f"{given.steps:,} steps, {ours['refused']:,} allocations refused, {ours['tries']['retried']:,} steps "
        f"run again; last loss {ours['losses'][-1]} and every weight as without; as many bytes held at the end"
    }


if __name__ == "__main__":
    require_gpu()
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=2000)
    options.add_argument("--one-in", type=int, default=1000)
    options.add_argument("--train", help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.train:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        print(json.dumps(train(asked.train, asked.steps, asked.one_in)), flush=True)
    else:
        main(body, options, uses_gpu=False)
