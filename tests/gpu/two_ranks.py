"""Two ranks train one GPT-2 on one GPU (gloo, DistributedDataParallel), and one of them runs out of memory.

    python tests/gpu/two_ranks.py [--steps 200] [--policy paged]

Rank 0 runs out of memory through injected failures, and through a real limit below the need of its whole batch. After
all steps the weights of both ranks have to be equal to the bit. The loss must not be further from those of PyTorch's
own runs than these are from each other: runs with whole batches, and runs that accumulate halves, whose shapes differ,
so that kernels sum in another order. The cost of the agreement for a step that succeeds is measured too."""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import socket
import subprocess
import sys
import time

from harness import GIB, Checks, child_environment, line_of, main, parser, require_gpu, say

BATCH, LENGTH, VOCABULARY = 16, 512, 4000
# The first steps warm up, and are not counted.
WARM = 20


def train(given: argparse.Namespace) -> dict:
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from transformers import GPT2Config, GPT2LMHeadModel

    import cushion

    rank, mode = given.rank, given.mode
    if mode not in ("native", "halves", "hooked", "whole"):
        cushion.install(policy=given.policy)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{given.port}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=120),
    )
    torch.manual_seed(1)
    if mode == "limit" and rank == 0:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(given.cap_gib * GIB / total)
    config = GPT2Config(
        n_layer=4, n_embd=512, n_head=8, vocab_size=VOCABULARY, n_positions=LENGTH, resid_pdrop=0, embd_pdrop=0,
        attn_pdrop=0,
    )  # fmt: skip
    with torch.device("cuda"):
        model = torch.nn.parallel.DistributedDataParallel(GPT2LMHeadModel(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    generator = torch.Generator(device="cuda").manual_seed(rank)
    batches = [torch.randint(0, VOCABULARY, (BATCH, LENGTH), device="cuda", generator=generator) for _ in range(4)]

    def step(tokens: torch.Tensor) -> torch.Tensor:
        logits = model(tokens).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        return loss.detach()

    plain = step
    if mode == "halves":
        # Accumulates halves, as programs do. Other shapes make kernels sum in another order.
        def step(tokens: torch.Tensor) -> torch.Tensor:
            with model.no_sync():
                first = half(tokens[: BATCH // 2])
            return first + half(tokens[BATCH // 2 :])

        def half(tokens: torch.Tensor) -> torch.Tensor:
            logits = model(tokens).logits[:, :-1]
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / 2
            loss.backward()
            return loss.detach()

    elif mode == "hooked":
        # Measures the cost of a communication hook in Python alone.
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        model.register_comm_hook(None, default_hooks.allreduce_hook)
    elif mode != "native":
        step = cushion.retry(split=cushion.split_batch, loss="mean", grads=model, group="world", timeout=60)(plain)
    # The gradients and the optimizer's state exist before memory runs out.
    torch.cuda.reset_peak_memory_stats()
    times, losses = [], []
    for number in range(given.steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        if mode == "injected" and rank == 0 and number % 3 == 0:
            # Another allocation fails each time, in the forward and in the backward pass.
            with cushion.inject(f"nth={1 + 37 * number % 400}"):
                loss = step(batches[number % len(batches)])
            # The failure was injected, so parts need not become smaller.
            step.forget()
        else:
            loss = step(batches[number % len(batches)])
        optimizer.step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
        losses.append(loss)
    weights = torch.cat([it.detach().flatten() for it in model.parameters()]).cpu()
    every = torch.stack(losses).double().cpu()
    dist.all_reduce(every)
    vote = None
    if mode not in ("native", "halves", "hooked"):
        vote = vote_seconds()
    dist.barrier()
    return {
        "loss": float(every[-1] / 2),
        "weights": hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
        "finite": bool(weights.isfinite().all()),
        "peak_gib": torch.cuda.max_memory_allocated() / GIB,
        "ms": 1000 * sorted(times[WARM:])[len(times[WARM:]) // 2],
        "stats": getattr(step, "stats", dict)(),
        "vote_us": vote,
    }


def vote_seconds() -> float:
    """Returns the microseconds that the vote at the end of a step takes on the CPU."""
    from cushion import _ranks

    ranks = _ranks.of("world", 60)
    assert ranks is not None
    took = []
    for _ in range(300):
        began = time.perf_counter()
        ranks.vote(_ranks.DONE, 0)
        took.append(time.perf_counter() - began)
    return 1e6 * sorted(took)[len(took) // 2]


def pair(given: argparse.Namespace, mode: str, cap: float = 0) -> list[dict]:
    """Runs both ranks, each in its own process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = ["--mode", mode, "--port", str(port), "--steps", str(given.steps), "--cap-gib", str(cap)]
    arguments += ["--policy", given.policy]
    ranks = [
        subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), *arguments, "--rank", str(rank)],
            env=child_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    done = []
    for rank in ranks:
        out, err = rank.communicate(timeout=400)
        done.append(line_of(subprocess.CompletedProcess(rank.args, rank.returncode, out, err)))
    say(f"{mode}: {done}")
    return done


def body(checks: Checks, given: argparse.Namespace) -> dict:
    native = [pair(given, mode) for mode in ("native", "halves", "native", "halves")]
    losses = [run[0]["loss"] for run in native]
    apart = max(losses) - min(losses)
    whole = pair(given, "whole")
    # Below the need of the whole batch, above that of half of it.
    cap = 0.75 * native[0][0]["peak_gib"]
    told = []
    for mode, ours in (("injected", pair(given, "injected")), ("limit", pair(given, "limit", cap))):
        first, second = ours
        checks.equal(first["weights"], second["weights"], f"the weights of rank 0 after {mode}, and of rank 1,")
        checks.that(first["finite"], f"weights are not finite after {mode}")
        checks.that(
            min(losses) - apart <= first["loss"] <= max(losses) + apart,
            f"the last loss after {mode} is {first['loss']}, and PyTorch's are {losses}",
        )
        for rank in ours:
            checks.equal(rank["stats"]["gave_up"], 0, f"steps given up after {mode}")
            checks.that(rank["stats"]["retried"] > 0, f"no step was tried again after {mode}: {rank['stats']}")
            checks.equal(rank["stats"]["split"], first["stats"]["split"], f"steps in parts on both ranks after {mode}")
        if mode == "limit":
            checks.that(first["stats"]["split"] >= 0.9 * given.steps, f"few steps were in parts: {first['stats']}")
            checks.at_most(first["peak_gib"], cap, "GiB held by rank 0 under its limit")
        told.append(
            f"{mode}: loss {first['loss']:.6f}, {first['stats']['retried']} steps tried again, "
            f"{first['stats']['split']} in parts, {first['ms']:.1f} ms a step"
        )
    checks.equal(whole[0]["weights"], whole[1]["weights"], "the weights of both ranks with no shortage")
    return {
        "told": f"{given.steps} steps, weights equal to the bit on both ranks; {'; '.join(told)}; PyTorch: losses "
        f"{', '.join(f'{loss:.6f}' for loss in losses)} (whole, in halves, and again), {native[0][0]['ms']:.1f} ms a "
        f"step; with the agreement and no shortage {whole[0]['ms']:.1f} ms (one exchange {whole[0]['vote_us']:.0f} us)"
    }


if __name__ == "__main__":
    require_gpu()
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=200)
    for name, kind in (("--mode", str), ("--rank", int), ("--port", int)):
        options.add_argument(name, type=kind, help=argparse.SUPPRESS)
    options.add_argument("--cap-gib", type=float, default=0, help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.mode:
        print(json.dumps(train(asked)), flush=True)
    else:
        main(body, options, uses_gpu=False)
