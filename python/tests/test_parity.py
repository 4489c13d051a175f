"""The same program under PyTorch's own allocator and under Cushion: the same figures and the same layout."""

from __future__ import annotations

import random
import unittest
from typing import Any

import support
from support import GIB, MIB, Standin

STEPS = 400
# The most bytes that a program has live, so that neither allocator runs out of memory: what happens then differs, and
# is tested elsewhere.
MOST_LIVE = 2 * GIB


# The oldest version of PyTorch whose statistics are all compared. In 2.3 expandable segments are counted differently,
# and lists of divisions begin at other sizes; Cushion does as later versions do.
FOLLOWED = (2, 11)
# Statistics that are compared after each step, so that a difference is found where it begins.
COURSE = (
    ("allocated_bytes", "current"),
    ("active_bytes", "current"),
    ("reserved_bytes", "current"),
    ("reserved_bytes", "peak"),
    ("inactive_split_bytes", "current"),
    ("segment", "current"),
)


def _size(dice: random.Random) -> int:
    """Returns a random size from one byte to hundreds of MiB, uniform in its logarithm."""
    return int(2 ** dice.uniform(0, 28.5))


def program(seed: int, cushion_settings: dict[str, Any] | None, fraction: float | None) -> dict[str, Any]:
    """Runs a random program; with settings, under Cushion. Returns PyTorch's statistics of it."""
    import torch

    if cushion_settings is not None:
        import cushion

        cushion.install(**cushion_settings)
    if fraction is not None:
        torch.cuda.set_per_process_memory_fraction(fraction)
    dice = random.Random(seed)
    standin = Standin()
    # The first call of expandable segments needs a context of the stand-in.
    torch.cuda.synchronize()
    # Cushion creates the allocator of a device at its first use; an empty_cache() before is not counted.
    torch.empty(1, device="cuda")
    streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    live: list[Any] = []
    held: list[Any] = []
    peaks = []

    def bytes_live() -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in live)

    for step in range(STEPS):
        choice = dice.random()
        if choice < 0.55:
            size = _size(dice)
            while live and bytes_live() + size > MOST_LIVE:
                live.pop(dice.randrange(len(live)))
            with torch.cuda.stream(dice.choice(streams) if dice.random() < 0.3 else streams[0]):
                live.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        elif choice < 0.85 and live:
            live.pop(dice.randrange(len(live)))
        elif choice < 0.92 and live:
            tensor, stream = dice.choice(live), dice.choice(streams[1:])
            standin.launch(stream.cuda_stream)
            tensor.record_stream(stream)
        elif choice < 0.95:
            standin.finish(dice.choice(streams[1:]).cuda_stream)
        elif choice < 0.97:
            # Before pages are unmapped Cushion waits for the device, and PyTorch for one stream. With pending work on
            # other streams, their blocks would become free at different times.
            standin.finish_all()
            torch.cuda.empty_cache()
        elif choice < 0.98:
            torch.cuda.reset_peak_memory_stats()
        elif choice < 0.985:
            torch.cuda.reset_accumulated_memory_stats()
        else:
            standin.finish_all()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                inside = [torch.empty(_size(dice), dtype=torch.uint8, device="cuda") for _ in range(3)]
                del inside[1]
            held.append((graph, inside))
            if len(held) > 2:
                held.pop(0)
        figures = torch._C._cuda_memoryStats(0)
        state = [figures[name]["all"][kind] for name, kind in COURSE]
        peaks.append(state + [figures.get("num_sync_all_streams")])
    standin.finish_all()
    return {
        "stats": torch.cuda.memory_stats(),
        "segments": _relative(torch.cuda.memory_snapshot()),
        "course": peaks,
        "given_back": standin.calls("cuMemFree_v2") + standin.calls("cuMemUnmap"),
    }


def _relative(segments: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the segments in the order of their addresses, with the offset of each block."""
    result = []
    for segment in sorted(segments, key=lambda segment: segment["address"]):
        blocks = []
        at = segment["address"]
        for block in segment["blocks"]:
            # For a free block, PyTorch reports the last request in some part of it.
            requested = None if block["state"] == "inactive" else block.get("requested_size")
            blocks.append([at - segment["address"], block["size"], requested, block["state"]])
            at += block["size"]
        keys = ("device", "total_size", "allocated_size", "active_size", "requested_size", "stream", "segment_type")
        result.append({key: segment.get(key) for key in keys} | {"blocks": blocks})
        for key in ("is_expandable", "segment_pool_id"):
            if key in segment:
                result[-1][key] = segment[key]
    return result


@support.needs_torch
class Parity(unittest.TestCase):
    """With PyTorch's classic segments."""

    conf = ""
    policy = "segments"
    changes: dict[str, str | None] = {"STANDIN_CAPACITY": str(16 * GIB), "STANDIN_LENIENT": "1"}
    # Without this, PyTorch asks NVML for the fabric between GPUs, and the stand-ins have no NVML.
    changes["TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC"] = "0"
    maxDiff = 4000

    def compare(self, seed: int, conf: str = "", fraction: float | None = None) -> dict[str, Any]:
        both = ",".join(filter(None, [self.conf, conf]))
        changes = {**self.changes, "PYTORCH_CUDA_ALLOC_CONF": both or None}
        native = support.call(program, seed, None, fraction, changes=changes)
        settings = {"policy": self.policy, "conf": both or None}
        ours = support.call(program, seed, settings, fraction, changes=self.changes)
        course = zip(native["course"], ours["course"])
        apart = next((step for step, (theirs, mine) in enumerate(course) if theirs != mine), None)
        if apart is not None:
            before = native["course"][apart - 1] if apart else None
            names = [*(".all.".join(name) for name in COURSE), "num_sync_all_streams"]
            self.fail(
                f"step {apart} leads from {before} to {ours['course'][apart]}, and with PyTorch's own allocator to "
                f"{native['course'][apart]}: {', '.join(names)}"
            )
        theirs = native["stats"]
        self.assertEqual(set(theirs) - set(ours["stats"]), set(), "figures that Cushion does not have")
        differ = {key: (value, ours["stats"][key]) for key, value in theirs.items() if ours["stats"][key] != value}
        self.assertEqual(differ, {}, "figures that differ: (PyTorch's, Cushion's)")
        self.assertEqual(native["segments"], ours["segments"])
        return native

    def test_random_programs(self) -> None:
        for seed in range(1, 5):
            with self.subTest(seed=seed):
                native = self.compare(seed)
                # The program covered these cases.
                self.assertGreater(native["given_back"], 0)
                self.assertGreater(len(native["segments"]), 2)

    def test_max_split_size(self) -> None:
        for seed in (11, 12):
            with self.subTest(seed=seed):
                self.compare(seed, "max_split_size_mb:32")

    def test_roundup_power2_divisions(self) -> None:
        for seed, value in ((21, "4"), (22, "[1:2,64:4,>:8]")):
            if value != "4" and support.TORCH_VERSION < FOLLOWED:
                continue
            with self.subTest(seed=seed):
                self.compare(seed, f"roundup_power2_divisions:{value}")

    def test_garbage_collection(self) -> None:
        for seed in (31, 32):
            with self.subTest(seed=seed):
                self.compare(seed, "garbage_collection_threshold:0.2", fraction=0.9)


@unittest.skipIf(support.TORCH_VERSION < FOLLOWED, f"torch {support.TORCH} counts expandable segments otherwise")
class ParityExpandable(Parity):
    """With its expandable segments."""

    conf = "expandable_segments:True"
    policy = "expandable"


if __name__ == "__main__":
    unittest.main()
