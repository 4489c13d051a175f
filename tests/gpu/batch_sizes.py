"""The largest batch that fits, found by `cushion.find_batch_size`, for three models.

    python tests/gpu/batch_sizes.py [--policy paged] [--cap-gib 24]

Each search runs in its own process, with a fixed memory limit. Then sizes are tried without the search, each in a fresh
process: the answer has to fit there, and two per cent more must not.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from typing import Any

from harness import GIB, Checks, install, itself, main, parser, require_gpu, say, settle

MODELS = ("gpt2", "llama", "vision")
START = 4


def gpt2(torch: Any) -> tuple[Any, Callable[[int], Any]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=6, vocab_size=8000, n_positions=512))

    def loss(size: int) -> Any:
        tokens = torch.randint(0, 8000, (size, 512), device="cuda")
        return model(tokens, labels=tokens).loss

    return model, loss


def llama(torch: Any) -> tuple[Any, Callable[[int], Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8000, hidden_size=768, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=12,
        num_key_value_heads=4, max_position_embeddings=1024,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.gradient_checkpointing_enable()

    def loss(size: int) -> Any:
        tokens = torch.randint(0, 8000, (size, 1024), device="cuda")
        return model(tokens, labels=tokens).loss

    return model, loss


def vision(torch: Any) -> tuple[Any, Callable[[int], Any]]:
    from torchvision.models import resnet50

    model = resnet50(num_classes=100)

    def loss(size: int) -> Any:
        pictures = torch.randn(size, 3, 224, 224, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            return model(pictures).float().logsumexp(1).mean()

    return model, loss


def prepare(given: argparse.Namespace) -> tuple[Any, Callable[[int], float]]:
    """Returns a model, and one training step of it without the update."""
    import torch

    install(given.policy)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(given.cap_gib * GIB / total)
    torch.manual_seed(1)
    with torch.device("cuda"):
        model, loss = {"gpt2": gpt2, "llama": llama, "vision": vision}[given.model](torch)

    def step(size: int) -> float:
        model.zero_grad()
        value = loss(size)
        value.backward()
        return value.item()

    return model, step


def search(given: argparse.Namespace) -> dict[str, Any]:
    import torch

    import cushion

    model, step = prepare(given)
    # The first call of cuBLAS allocates memory that it keeps.
    step(START)
    model.zero_grad()
    settle()
    before = torch.cuda.memory_allocated()
    probed: list[int] = []

    def probe(size: int) -> float:
        probed.append(size)
        return step(size)

    found = cushion.find_batch_size(probe, START, grads=model)
    settle()
    return {"found": found, "probed": probed, "left": torch.cuda.memory_allocated() - before}


def fits(given: argparse.Namespace) -> dict[str, Any]:
    """Returns whether a size fits in a fresh process."""
    import torch

    _, step = prepare(given)
    try:
        step(given.size)
    except torch.OutOfMemoryError:
        return {"fits": False}
    return {"fits": True, "peak_gib": torch.cuda.max_memory_allocated() / GIB}


def body(checks: Checks, given: argparse.Namespace) -> dict[str, Any]:
    told = []
    for model in MODELS:
        common = ("--model", model, "--policy", given.policy, "--cap-gib", str(given.cap_gib))
        answer = itself("--search", *common)
        found = answer["found"]
        more = math.ceil(found * 1.02) if math.ceil(found * 1.02) > found else found + 1
        same, larger = itself("--size", str(found), *common), itself("--size", str(more), *common)
        say(f"{model}: {answer}; {found}: {same}, {more}: {larger}")
        checks.that(same["fits"], f"{model}: a batch of {found} was found, and does not fit in a fresh process")
        checks.that(not larger["fits"], f"{model}: a batch of {found} was found, and {more} fit")
        checks.equal(answer["left"], 0, f"{model}: bytes left allocated by the search")
        told.append(f"{model} {found} in {len(answer['probed'])} steps ({more} does not fit)")
    return {"told": f"in {given.cap_gib:g} GiB: {', '.join(told)}"}


if __name__ == "__main__":
    require_gpu()
    options = parser(__doc__)
    options.add_argument("--cap-gib", type=float, default=24)
    options.add_argument("--model", choices=MODELS, help=argparse.SUPPRESS)
    options.add_argument("--search", action="store_true", help=argparse.SUPPRESS)
    options.add_argument("--size", type=int, help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.search:
        print(json.dumps(search(asked)), flush=True)
    elif asked.size:
        print(json.dumps(fits(asked)), flush=True)
    else:
        main(body, options, uses_gpu=False)
