"""A step that runs out of memory runs again in halves, and the training has the same result.

    python tests/gpu/micro_batches.py [--steps 60]

A small GPT-2 is trained four times with PyTorch's allocator and whole batches, and then with Cushion and
`cushion.retry(..., split=cushion.split_batch, loss="mean")` in less memory than the whole batch needs. Its last loss
must not be further from PyTorch's losses than those are from each other. All runs use kernels whose order of summation
varies.
"""

from __future__ import annotations

import argparse
import json

from groups import POLICIES
from harness import GIB, Checks, itself, main, parser, require_gpu, say

BATCH, LENGTH, VOCABULARY = 32, 512, 4000


def train(policy: str, steps: int, cap_gib: float) -> dict:
    import torch
    import torch.nn.functional as F
    from transformers import GPT2Config, GPT2LMHeadModel

    import cushion

    if policy != "native":
        cushion.install(policy=policy)
    torch.manual_seed(1)
    if cap_gib:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(cap_gib * GIB / total)
    config = GPT2Config(
        n_layer=4,
        n_embd=512,
        n_head=8,
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    )
    with torch.device("cuda"):
        model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    batches = [torch.randint(0, VOCABULARY, (BATCH, LENGTH), device="cuda") for _ in range(4)]

    @cushion.retry(split=cushion.split_batch, loss="mean", grads=model)
    def step(tokens):
        logits = model(tokens).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        return loss.detach()

    torch.cuda.reset_peak_memory_stats()
    for number in range(steps):
        optimizer.zero_grad()
        loss = step(batches[number % len(batches)])
        optimizer.step()
    return {
        "loss": loss.item(),
        "peak_gib": torch.cuda.max_memory_reserved() / GIB,
        "stats": step.stats(),
    }


def whole_tries(steps: int) -> int:
    """Returns how often the whole batch is tried: at first, after 16 steps, after 32 more, and so on."""
    return next(tries for tries in range(1, 64) if 16 * (2**tries - 1) >= steps)


def body(checks: Checks, given: argparse.Namespace) -> dict:
    native = [itself("--train", "native", "--steps", str(given.steps)) for _ in range(4)]
    losses = [found["loss"] for found in native]
    cap = native[0]["peak_gib"] * 0.7
    apart = max(losses) - min(losses)
    reached = []
    for policy in POLICIES:
        ours = itself("--train", policy, "--steps", str(given.steps), "--cap-gib", str(cap))
        say(f"native {losses}, {policy} {ours}")
        checks.that(
            min(losses) - apart <= ours["loss"] <= max(losses) + apart,
            f"the last loss under {policy} is {ours['loss']}, and PyTorch's are {losses}",
        )
        checks.equal(ours["stats"]["split"], given.steps, "steps in parts")
        checks.equal(ours["stats"]["retried"], whole_tries(given.steps), "steps that failed first: the rest remember")
        checks.equal(ours["stats"]["gave_up"], 0, "steps given up")
        checks.at_most(ours["peak_gib"], cap, "GiB held")
        reached.append(f"{ours['loss']:.6f} ({policy})")
    return {
        "told": f"last loss of {given.steps} steps in {cap:.2f} GiB: {', '.join(reached)}; PyTorch's with whole "
        f"batches in {native[0]['peak_gib']:.2f} GiB: {', '.join(f'{loss:.6f}' for loss in losses)}"
    }


if __name__ == "__main__":
    require_gpu()
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--cap-gib", type=float, default=0)
    options.add_argument("--train", help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.train:
        print(json.dumps(train(asked.train, asked.steps, asked.cap_gib)), flush=True)
    else:
        main(body, options, uses_gpu=False)
