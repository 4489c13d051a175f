"""Records how PyTorch's own allocator behaves in special cases, to verify the engine against.

usage: record.py OUTDIR [SCENARIO...]      (needs a CUDA GPU and PyTorch; about two minutes)

SEED=n in the environment records other programs of the same kinds.

Each scenario is a seeded random program that runs in its own process with one set of options. It writes
OUTDIR/NAME.pickle.gz, the snapshot with its trace, and one line in OUTDIR/stats.jsonl: the scenario, the memory limit,
and the final torch.cuda.memory_stats().
"""

import gzip
import json
import os
import pickle
import random
import subprocess
import sys

MIB = 1 << 20

# name: (options, limit in MiB or None, program)
SCENARIOS = {
    "churn": ("", None, "churn"),
    "churn_expandable": ("expandable_segments:True", None, "churn"),
    "capped": ("", 1024, "churn"),
    "capped_expandable": ("expandable_segments:True", 1024, "churn"),
    "max_split": ("max_split_size_mb:64", 1536, "churn"),
    "max_split_rounding": ("max_split_size_mb:40,max_non_split_rounding_mb:80", 1024, "churn"),
    "max_split_expandable": ("expandable_segments:True,max_split_size_mb:64", 1024, "churn"),
    "garbage": ("garbage_collection_threshold:0.6", 1536, "churn"),
    "garbage_expandable": ("garbage_collection_threshold:0.5,expandable_segments:True", 1024, "churn"),
    "garbage_max_split": ("garbage_collection_threshold:0.7,max_split_size_mb:64", 1536, "churn"),
    "roundup": ("roundup_power2_divisions:8", None, "churn"),
    "roundup_list": ("roundup_power2_divisions:[1:2,4:4,64:8,>:16]", None, "churn"),
    "roundup_capped": ("roundup_power2_divisions:4,garbage_collection_threshold:0.8", 1536, "churn"),
    "large_segment": ("large_segment_size_mb:32", None, "churn"),
    "large_segment_expandable": ("large_segment_size_mb:64,expandable_segments:True", 2048, "churn"),
    "toggle": ("", None, "toggle"),
    "toggle_capped": ("", 1024, "toggle"),
    "graphs": ("", None, "graphs"),
    "graphs_expandable": ("expandable_segments:True", None, "graphs"),
    "graphs_capped": ("", 512, "graphs"),
    "graphs_reuse": ("graph_capture_record_stream_reuse:True", None, "graphs"),
    "pools": ("", None, "pools"),
    "pools_capped": ("", 512, "pools"),
    "pools_expandable": ("expandable_segments:True", 768, "pools"),
    "threads": ("", None, "threads"),
}


def sizes(rng):
    """Returns a random size: mostly small, sometimes around a boundary between size classes."""
    kind = rng.random()
    if kind < 0.1:
        return rng.choice(
            [
                1,
                511,
                512,
                513,
                MIB - 1,
                MIB,
                MIB + 1,
                10 * MIB - 1,
                10 * MIB,
                10 * MIB + 1,
                20 * MIB,
                20 * MIB + 1,
                64 * MIB,
                64 * MIB + 1,
            ]
        )
    return int(2 ** rng.uniform(4, 27 if kind < 0.95 else 28.5))


def main(name):
    conf, limit, program = SCENARIOS[name]
    import torch

    torch.cuda.init()
    total = torch.cuda.get_device_properties(0).total_memory
    if limit:
        torch.cuda.set_per_process_memory_fraction(limit * MIB / total)
    torch.cuda.memory._record_memory_history(enabled="all", context=None, stacks="python", max_entries=10**6)
    rng = random.Random(name + os.environ.get("SEED", ""))
    refused = globals()[program](torch, rng, 1500)
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    snapshot = torch.cuda.memory._snapshot()
    for trace in snapshot["device_traces"]:
        for event in trace:
            for key in ("frames", "compile_context", "user_metadata"):
                event.pop(key, None)
    out = os.path.join(sys.argv[1], name + ".pickle.gz")
    with gzip.GzipFile(out, "wb", 9, mtime=0) as file:
        pickle.dump(snapshot, file, protocol=4)
    line = {
        "name": name,
        "conf": conf,
        "limit": limit and int((limit * MIB / total) * total),
        "torch": torch.__version__,
        "events": sum(map(len, snapshot["device_traces"])),
        "refused": refused,
        "stats": dict(stats),
    }
    print(json.dumps(line), flush=True)
    os._exit(0)


def churn(torch, rng, steps, streams=3, empty=0.004, each=lambda step: None):
    """Allocates and frees randomly on several streams, and uses tensors on other streams."""
    refused = 0
    lanes = [torch.cuda.current_stream()] + [torch.cuda.Stream() for _ in range(streams - 1)]
    live = []
    for step in range(steps):
        each(step)
        dice = rng.random()
        if dice < 0.52 or not live:
            try:
                with torch.cuda.stream(rng.choice(lanes)):
                    live.append(torch.empty(sizes(rng), dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                refused += 1
                rng.shuffle(live)
                del live[len(live) // 2 :]
        elif dice < 0.94:
            live.pop(rng.randrange(len(live)))
        elif dice < 0.98:
            tensor, lane = rng.choice(live), rng.choice(lanes)
            with torch.cuda.stream(lane):
                torch.cuda._sleep(rng.randrange(2_000_000))
            tensor.record_stream(lane)
        elif dice < 1 - empty:
            torch.cuda.synchronize()
        else:
            torch.cuda.empty_cache()
        if step % 400 == 399:
            rng.shuffle(live)
            del live[len(live) // 4 :]
    return refused


def toggle(torch, rng, steps):
    """Switches expandable segments on and off."""

    def each(step):
        if step % 150 == 149:
            value = "True" if step // 150 % 2 == 0 else "False"
            torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{value}")

    return churn(torch, rng, steps, each=each)


def graphs(torch, rng, steps):
    """Captures graphs into private and shared pools during eager work, and destroys them randomly."""
    refused = 0
    held, shared = [], torch.cuda.graph_pool_handle()
    side = torch.cuda.Stream()
    # A shared pool must not be used again after its last graph is gone: one is kept.
    anchor = torch.cuda.CUDAGraph()
    with torch.cuda.graph(anchor, pool=shared):
        kept = torch.zeros(1000, device="cuda") + 1
    for _ in range(steps // 60):
        refused += churn(torch, rng, 30, streams=2)
        inputs = torch.zeros(rng.randrange(1, 3_000_000), device="cuda")
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=shared if rng.random() < 0.4 else None):
                parts = []
                for _ in range(rng.randrange(1, 6)):
                    parts.append(inputs + len(parts))
                    if rng.random() < 0.4:
                        side.wait_stream(torch.cuda.current_stream())
                        with torch.cuda.stream(side):
                            part = parts[-1] * 2
                        torch.cuda.current_stream().wait_stream(side)
                        part.record_stream(torch.cuda.current_stream())
                        parts[-1].record_stream(side)
                        parts.append(part)
                    if rng.random() < 0.4:
                        parts.pop(0)
                result = sum(part.sum() for part in parts)
                del parts
            held.append((graph, result, inputs))
        except torch.OutOfMemoryError:
            refused += 1
        if len(held) > 4 or (held and rng.random() < 0.3):
            held.pop(rng.randrange(len(held)))
        if rng.random() < 0.2:
            torch.cuda.empty_cache()
    return refused


def pools(torch, rng, steps):
    """Uses MemPools, some of which may serve the default pool when memory is short."""
    refused, held = 0, []
    for index in range(steps // 60):
        refused += churn(torch, rng, 30, streams=2)
        try:
            pool = torch.cuda.MemPool(use_on_oom=index % 3 == 0)
        except TypeError:
            pool = torch.cuda.MemPool()
        tensors = []
        with torch.cuda.use_mem_pool(pool):
            for _ in range(rng.randrange(1, 12)):
                try:
                    tensors.append(torch.empty(sizes(rng) // 2 + 1, dtype=torch.uint8, device="cuda"))
                except torch.OutOfMemoryError:
                    refused += 1
                if rng.random() < 0.3 and tensors:
                    tensors.pop(0)
        held.append((pool, tensors))
        if len(held) > 3:
            old = held.pop(rng.randrange(len(held)))
            del old
        if rng.random() < 0.3:
            torch.cuda.empty_cache()
    return refused


def threads(torch, rng, steps):
    """Runs several threads, each on its own stream."""
    import threading

    rngs = [random.Random(rng.random()) for _ in range(3)]

    def work(rng):
        with torch.cuda.stream(torch.cuda.Stream()):
            churn(torch, rng, steps // 3)

    workers = [threading.Thread(target=work, args=(rng,)) for rng in rngs]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return 0


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[2] == "--one":
        main(sys.argv[3])
    os.makedirs(sys.argv[1], exist_ok=True)
    with open(os.path.join(sys.argv[1], "stats.jsonl"), "w") as file:
        for name in sys.argv[2:] or SCENARIOS:
            env = dict(os.environ)
            env.pop("PYTORCH_ALLOC_CONF", None)
            env["PYTORCH_CUDA_ALLOC_CONF"] = SCENARIOS[name][0]
            command = [sys.executable, __file__, sys.argv[1], "--one", name]
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
            if done.returncode == 0 and done.stdout.startswith("{"):
                file.write(done.stdout)
                line = json.loads(done.stdout)
                print(
                    f"{name}: {line['events']} events, {line['refused']} refused,"
                    f" {line['stats']['num_alloc_retries']} retries",
                    file=sys.stderr,
                )
            else:
                print(f"{name}: failed: {done.stderr.strip().splitlines()[-3:]}", file=sys.stderr)
