"""Real PyTorch workloads, with random weights and nothing to download, for measuring allocators.

    python tests/gpu/workloads.py NAME MODE [--policy P] [--steps N] [--trace OUT.pickle.gz] [--stacks]
                                  [--cap-gib G] [--scale X] [--wait] [--deterministic]

NAME is gpt2_train, llama_varlen, stream_offload, generate, vision_multires or graphs_serving; MODE is
native, expandable, async or cushion (with a policy). Prints one JSON line: peaks in bytes, seconds per
step and items per second over the last two thirds of the steps, the seconds of each of these, the last
loss, retries, and whether memory ran out. All figures of memory are from `torch.cuda.memory_stats()`.
Takes 15 to 45 seconds.

With --wait it does the work that needs no GPU, reports that with a line of JSON, and continues at a line on standard
input: half of a short run is imports, and several processes can prepare at once.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import pickle
import random
import sys
import time
from collections.abc import Callable

from groups import POLICIES
from harness import GIB, MIB, require_gpu

MODES = {
    "native": None,
    "expandable": "expandable_segments:True",
    "async": "backend:cudaMallocAsync",
    "cushion": None,
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=WORKLOADS)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--policy", choices=POLICIES, help="for cushion")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--trace")
    parser.add_argument("--stacks", action="store_true", help="stacks in the trace")
    parser.add_argument("--cap-gib", type=float, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="of batch sizes")
    parser.add_argument("--deterministic", action="store_true", help="kernels that repeat themselves to the bit")
    parser.add_argument("--wait", action="store_true", help="prepare, and go on at a line on standard input")
    return parser.parse_args()


class Workload:
    """The base of all workloads. `build` creates the model, and returns the step."""

    def __init__(self, steps: int, scale: float) -> None:
        self.steps = steps
        self.scale = scale
        self.loss: float | None = None

    def scaled(self, number: int) -> int:
        return max(1, int(number * self.scale))

    def tokens(self, batch: int, length: int, vocabulary: int = 32000):
        return torch.randint(0, vocabulary, (batch, length), device="cuda")

    def learn(self, i: int, loss, optimizer) -> None:
        """Runs the rest of a training step, after the loss, and keeps the loss."""
        loss.backward()
        if i == self.steps - 1:
            self.loss = round(loss.item(), 6)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def prepare(self) -> None:
        """Does the work that needs no GPU."""

    def build(self) -> Callable[[int], int]:
        """Returns the step: a function of its number that returns how many items it processed."""
        raise NotImplementedError


def on_gpu(make):
    """Builds a model directly on the GPU: on the CPU, 7B weights take minutes."""
    with torch.device("cuda"):
        return make()


def adamw(model):
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def llama(kv_heads: int, checkpointing: bool):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=kv_heads,
        intermediate_size=5632,
        vocab_size=32000,
        max_position_embeddings=8192,
        attn_implementation="sdpa",
    )
    model = on_gpu(lambda: LlamaForCausalLM._from_config(config, dtype=torch.bfloat16))
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.config.use_cache = False
        model.train()
    return model


class OfTransformers(Workload):
    def prepare(self):
        from transformers import GPT2LMHeadModel, LlamaForCausalLM  # noqa: F401


class Gpt2Train(OfTransformers):
    """GPT-2 medium, batches of one size."""

    def build(self):
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(n_layer=24, n_embd=1024, n_head=16, attn_implementation="sdpa")
        model = on_gpu(lambda: GPT2LMHeadModel(config))
        optimizer = adamw(model)

        def step(i: int) -> int:
            x = self.tokens(self.scaled(16), 1024, 50257)
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(input_ids=x, labels=x).loss
            self.learn(i, loss, optimizer)
            return x.numel()

        return step


class LlamaVarlen(OfTransformers):
    """A Llama of 1.1B with batches of many lengths, and activation checkpointing."""

    def build(self):
        model = llama(kv_heads=4, checkpointing=True)
        optimizer = adamw(model)

        def step(i: int) -> int:
            x = self.tokens(self.scaled(random.choice([2, 3, 4, 6, 8])), random.randrange(200, 4096))
            loss = model(input_ids=x, labels=x).loss
            self.learn(i, loss, optimizer)
            return x.numel()

        return step


class StreamOffload(Workload):
    """Weights are in pinned host memory. A copy stream fetches each layer before its use, with record_stream, as FSDP's
    all-gather does."""

    WIDTH, LAYERS = 4096, 24

    def build(self):
        width, layers = self.WIDTH, self.LAYERS
        shapes = ((width * 4, width), (width, width * 4))
        host = [
            [(torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.02).cpu().pin_memory() for shape in shapes]
            for _ in range(layers)
        ]
        copies = torch.cuda.Stream()

        def fetch(layer: int):
            with torch.cuda.stream(copies):
                weights = [tensor.to("cuda", non_blocking=True) for tensor in host[layer]]
                here = torch.cuda.Event()
                here.record(copies)
            return weights, here

        def step(i: int) -> int:
            batch = random.randrange(1000, self.scaled(16000))
            x = torch.randn(batch, width, device="cuda", dtype=torch.bfloat16)
            coming = fetch(0)
            activations = []
            for layer in range(layers):
                weights, here = coming
                torch.cuda.current_stream().wait_event(here)
                if layer + 1 < layers:
                    coming = fetch(layer + 1)
                activations.append(x)
                x = x + F.gelu(x @ weights[0].T) @ weights[1].T
                for tensor in weights:
                    tensor.record_stream(torch.cuda.current_stream())
                del weights
            return batch

        return step


class Generate(OfTransformers):
    """Greedy decoding with a growing cache, prompts of many lengths."""

    def build(self):
        model = llama(kv_heads=8, checkpointing=False).eval()
        model.generation_config.pad_token_id = 0

        def step(i: int) -> int:
            x = self.tokens(self.scaled(random.choice([1, 4, 16, 32])), random.randrange(50, 1500))
            with torch.inference_mode():
                y = model.generate(
                    input_ids=x,
                    attention_mask=torch.ones_like(x),
                    max_new_tokens=40,
                    min_new_tokens=40,
                    do_sample=False,
                )
            return y.numel() - x.numel()

        return step


class VisionMultires(Workload):
    """ResNet-50 with pictures of many sizes."""

    def prepare(self):
        import torchvision  # noqa: F401

    def build(self):
        import torchvision

        model = torchvision.models.resnet50().to("cuda")
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

        def step(i: int) -> int:
            side = random.randrange(128, 448, 16)
            batch = self.scaled(random.choice([48, 64, 96]))
            x = torch.randn(batch, 3, side, side, device="cuda")
            with torch.autocast("cuda", torch.bfloat16):
                loss = F.cross_entropy(model(x), torch.randint(0, 1000, (x.shape[0],), device="cuda"))
            self.learn(i, loss, optimizer)
            return x.shape[0]

        return step


class GraphsServing(Workload):
    """CUDA graphs captured for several batch sizes in one private pool, replayed in random order together with eager
    work."""

    BATCHES = (256, 128, 64, 32, 16, 8, 4, 2, 1)

    def prepare(self):
        nn = torch.nn
        blocks = [nn.Sequential(nn.Linear(4096, 11008), nn.SiLU(), nn.Linear(11008, 4096)) for _ in range(16)]
        self.model = nn.Sequential(*blocks).to(torch.bfloat16)

    def build(self):
        model = self.model.to("cuda").eval()
        captured = {}
        pool = torch.cuda.graph_pool_handle()
        with torch.inference_mode():
            for batch in self.BATCHES:
                x = torch.zeros(batch * 16, 4096, device="cuda", dtype=torch.bfloat16)
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    model(x)
                torch.cuda.current_stream().wait_stream(side)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    y = model(x)
                captured[batch] = (graph, x, y)

        def step(i: int) -> int:
            served = 0
            with torch.inference_mode():
                for _ in range(8):
                    batch = random.choice(list(captured))
                    graph, x, y = captured[batch]
                    x.copy_(torch.randn_like(x))
                    graph.replay()
                    best = F.softmax(y.float(), -1).topk(50).values
                    served += batch
                    length = random.randrange(100, 20000)
                    eager = torch.randn(length, 4096, device="cuda", dtype=torch.bfloat16)
                    eager = model[0](eager)
                    del eager, best
            return served

        return step


WORKLOADS: dict[str, type[Workload]] = {
    "gpt2_train": Gpt2Train,
    "llama_varlen": LlamaVarlen,
    "stream_offload": StreamOffload,
    "generate": Generate,
    "vision_multires": VisionMultires,
    "graphs_serving": GraphsServing,
}


def wait_for_the_word() -> None:
    print(json.dumps({"ready": True}), flush=True)
    if not sys.stdin.readline():
        # The process that started this one has ended.
        sys.exit(1)


def measure(workload: Workload, result: dict) -> None:
    step = workload.build()
    torch.cuda.synchronize()
    steps = workload.steps
    warm = steps // 3
    items = 0
    times = []
    for i in range(steps):
        began = time.perf_counter()
        worked_on = step(i)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
        result["steps"] = i + 1
        if i >= warm:
            items += worked_on
    seconds = sum(times[warm:])
    if workload.loss is not None:
        result["loss"] = workload.loss
    result["items_per_s"] = round(items / seconds, 1)
    result["s_per_step"] = round(seconds / (steps - warm), 4)
    result["step_s"] = [round(took, 5) for took in times[warm:]]


def memory_figures() -> dict:
    stats = torch.cuda.memory_stats()
    requested = stats.get("requested_bytes.all.peak")
    reserved = stats["reserved_bytes.all.peak"]
    free, total = torch.cuda.mem_get_info()
    return {
        "peak_requested": requested,
        "peak_alloc": stats["allocated_bytes.all.peak"],
        "peak_active": stats["active_bytes.all.peak"],
        "peak_reserved": reserved,
        "retries": stats["num_alloc_retries"],
        "allocs": stats["allocation.all.allocated"],
        "driver": stats.get("num_device_alloc"),
        "reserved_over_live": round(reserved / requested, 4) if requested else None,
        "device_used": total - free,
    }


def used_by_others() -> int:
    """Returns the bytes in use on the device outside the allocator: the context, kernels, other programs."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def write_trace(path: str, stacks: bool) -> dict:
    snapshot = torch.cuda.memory._snapshot()
    dropped = ["compile_context", "user_metadata"] + ([] if stacks else ["frames"])
    for events in snapshot.get("device_traces", []):
        for event in events:
            for key in dropped:
                event.pop(key, None)
    with gzip.open(path, "wb", 6) as file:
        pickle.dump(snapshot, file, protocol=4)
    return {
        "trace_events": sum(len(events) for events in snapshot["device_traces"]),
        "trace_mb": round(os.path.getsize(path) / MIB, 2),
    }


def main(given: argparse.Namespace) -> None:
    if given.mode == "cushion":
        import cushion

        cushion.install(policy=given.policy)
    if given.deterministic:
        # PyTorch only warns if a kernel has no deterministic form.
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.deterministic = True
    random.seed(1)
    torch.manual_seed(1)
    workload = WORKLOADS[given.name](given.steps, given.scale)
    workload.prepare()
    if given.wait:
        wait_for_the_word()
    if given.cap_gib:
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, given.cap_gib * GIB / total))
    if given.trace:
        context = "all" if given.stacks else None
        torch.cuda.memory._record_memory_history(enabled="all", context=context, stacks="python", max_entries=3_000_000)
    result = {"name": given.name, "mode": given.mode, "steps": 0, "oom": None}
    if given.mode == "cushion":
        result["policy"] = given.policy
    try:
        measure(workload, result)
    except torch.OutOfMemoryError as error:
        result["oom"] = str(error)[:160]
    result.update(memory_figures())
    if given.trace:
        result.update(write_trace(given.trace, given.stacks))
    result["not_ours"] = used_by_others()
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    GIVEN = arguments()
    if MODES[GIVEN.mode]:
        # Both names, for older versions; torch reads them at import.
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ["PYTORCH_ALLOC_CONF"] = MODES[GIVEN.mode]
    if GIVEN.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    require_gpu()
    import torch
    import torch.nn.functional as F

    main(GIVEN)
