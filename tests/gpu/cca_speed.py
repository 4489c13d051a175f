"""Measures the CPU time of a malloc and free pair through PyTorch's allocator interface.

    python tests/gpu/cca_speed.py MODE [--policy P] [--turns]

MODE is native, expandable, async, pluggable (an allocator that does nothing: the cost of PyTorch's plug-in layer
alone) or cushion (with a policy). Prints one JSON line, with nanoseconds per pair: the median of TURNS short turns.
Needs a C++ compiler, and for pluggable nvcc; the first run builds a small extension, which takes a minute.

With --turns it measures on request: it reports that it is ready, and then, for each line of JSON on standard input
({"line": NAME, "cores": [NUMBER…]}), measures one turn on those cores and answers with a line of JSON. `speed.py`
alternates between the modes in this way.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from groups import POLICIES
from harness import MIB, require_gpu

# How often each line is measured without --turns.
TURNS = 15

MODES = {
    "native": None,
    "expandable": "expandable_segments:True",
    "async": "backend:cudaMallocAsync",
    "pluggable": None,
    "cushion": None,
}

EXTENSION = r"""
#include <torch/extension.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <chrono>
#include <cmath>
#include <random>
#include <thread>
#include <vector>

using Clock = std::chrono::steady_clock;

static double per(Clock::time_point since, int64_t n) {
  return std::chrono::duration<double, std::nano>(Clock::now() - since).count() / n;
}

// Allocates and frees one block again and again.
static double pairs(int64_t size, int64_t n) {
  auto stream = c10::cuda::getCurrentCUDAStream().stream();
  auto* allocator = c10::cuda::CUDACachingAllocator::get();
  for (int i = 0; i < 1000; i++) allocator->raw_delete(allocator->raw_alloc_with_stream(size, stream));
  auto began = Clock::now();
  for (int64_t i = 0; i < n; i++) allocator->raw_delete(allocator->raw_alloc_with_stream(size, stream));
  return per(began, n);
}

// Keeps `live` blocks live, of sizes from lo to hi, uniform in their logarithms; each step replaces one.
static double churn(int64_t live, int64_t n, int64_t lo, int64_t hi) {
  auto stream = c10::cuda::getCurrentCUDAStream().stream();
  auto* allocator = c10::cuda::CUDACachingAllocator::get();
  std::mt19937_64 random(7);
  std::vector<void*> blocks(live, nullptr);
  std::vector<int64_t> sizes(1 << 16);
  for (auto& size : sizes) {
    double low = std::log(double(lo)), high = std::log(double(hi));
    size = (int64_t)std::exp(low + (high - low) * (random() % 1000003) / 1000003.0);
  }
  std::vector<uint32_t> chosen(1 << 16);
  for (auto& index : chosen) index = random() % live;
  auto step = [&](int64_t i) {
    auto& block = blocks[chosen[i & 65535]];
    if (block) allocator->raw_delete(block);
    block = allocator->raw_alloc_with_stream(sizes[(i * 7) & 65535], stream);
  };
  for (int64_t i = 0; i < n / 4; i++) step(i);
  auto began = Clock::now();
  for (int64_t i = 0; i < n; i++) step(i);
  double result = per(began, n);
  for (auto block : blocks)
    if (block) allocator->raw_delete(block);
  return result;
}

// As `pairs`, in several threads on one stream.
static double threads(int64_t count, int64_t size, int64_t n) {
  auto* allocator = c10::cuda::CUDACachingAllocator::get();
  auto stream = c10::cuda::getCurrentCUDAStream().stream();
  auto began = Clock::now();
  std::vector<std::thread> running;
  for (int64_t i = 0; i < count; i++)
    running.emplace_back([=] {
      for (int64_t j = 0; j < n; j++) allocator->raw_delete(allocator->raw_alloc_with_stream(size, stream));
    });
  for (auto& thread : running) thread.join();
  return per(began, n);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("pairs", &pairs);
  module.def("churn", &churn);
  module.def("threads", &threads);
}
"""

# Returns real memory for the first thousand calls, so that tensors work; then addresses that are never accessed.
DOES_NOTHING = r"""
#include <cuda_runtime_api.h>
#include <sys/types.h>
#include <atomic>

static std::atomic<size_t> calls{0}, offset{0};

extern "C" void* bump_malloc(ssize_t size, int device, cudaStream_t stream) {
  if (calls.fetch_add(1, std::memory_order_relaxed) < 1000) {
    void* pointer = 0;
    cudaMalloc(&pointer, size);
    return pointer;
  }
  size_t rounded = (size + 511) & ~511ull;
  return (void*)(0x100000000000ull + offset.fetch_add(rounded, std::memory_order_relaxed));
}

extern "C" void bump_free(void* pointer, ssize_t size, int device, cudaStream_t stream) {}
"""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--policy", choices=POLICIES, help="for cushion")
    parser.add_argument("--turns", action="store_true", help="measure as told on standard input")
    return parser.parse_args()


def write(folder: str, name: str, text: str) -> str:
    """Writes a source file, unless it is unchanged: the extension is then not built again."""
    path = os.path.join(folder, name)
    if not os.path.exists(path) or open(path).read() != text:
        with open(path, "w") as file:
            file.write(text)
    return path


def build_extension(folder: str):
    from torch.utils.cpp_extension import load

    return load(
        "cushion_speed",
        [write(folder, "speed.cpp", EXTENSION)],
        extra_cflags=["-O3"],
        extra_ldflags=["-L" + os.path.join(os.path.dirname(torch.__file__), "lib"), "-lc10_cuda"],
        extra_include_paths=["/usr/local/cuda/include"],
        build_directory=folder,
        verbose=False,
    )


def install_nothing(folder: str) -> None:
    library = os.path.join(folder, "libbump.so")
    source = write(folder, "bump.cpp", DOES_NOTHING)
    subprocess.check_call(["nvcc", "-O3", "-Xcompiler", "-fPIC", "-shared", "-o", library, source], stdout=sys.stderr)
    memory = torch.cuda.memory
    memory.change_current_allocator(memory.CUDAPluggableAllocator(library, "bump_malloc", "bump_free"))


def time_empty(shape: tuple[int, ...]) -> float:
    """Returns the nanoseconds of one torch.empty from Python."""
    calls = 8_000

    def make():
        return torch.empty(shape, device="cuda")

    for _ in range(200):
        make()
    began = time.perf_counter()
    for _ in range(calls):
        make()
    return (time.perf_counter() - began) / calls * 1e9


def turns_of(extension) -> dict[str, Callable[[], float]]:
    """Returns the functions to measure. Each turn takes a few hundredths of a second."""
    return {
        "pair 4K": lambda: extension.pairs(4096, 60_000),
        "pair 4M": lambda: extension.pairs(4 * MIB, 60_000),
        "pair 64M": lambda: extension.pairs(64 * MIB, 60_000),
        "churn 64 live": lambda: extension.churn(64, 40_000, 512, 64 * MIB),
        "churn 4k live small": lambda: extension.churn(4096, 40_000, 512, MIB),
        "churn 4k live": lambda: extension.churn(4096, 40_000, 512, 16 * MIB),
        "4 threads": lambda: extension.threads(4, 4096, 8_000),
        "torch.empty(1024,)": lambda: time_empty((1024,)),
        "torch.empty(4194304,)": lambda: time_empty((1 << 22,)),
    }


def take_turns(turns: dict[str, Callable[[], float]]) -> None:
    print(json.dumps({"ready": True, "lines": list(turns)}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        # Applies to this thread, and to those it starts.
        os.sched_setaffinity(0, asked["cores"])
        print(json.dumps({"ns": turns[asked["line"]]()}), flush=True)


def main(given: argparse.Namespace) -> None:
    folder = os.path.join(tempfile.gettempdir(), "cushion-speed")
    os.makedirs(folder, exist_ok=True)
    extension = build_extension(folder)
    if given.mode == "cushion":
        import cushion

        cushion.install(policy=given.policy)
    if given.mode == "pluggable":
        install_nothing(folder)
    kept = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    lines = turns_of(extension)
    if given.turns:
        take_turns(lines)
    else:
        nanoseconds = {name: statistics.median(turn() for _ in range(TURNS)) for name, turn in lines.items()}
        result = {"mode": given.mode, "ns": {name: round(value, 1) for name, value in nanoseconds.items()}}
        if given.mode == "cushion":
            result["policy"] = given.policy
        print(json.dumps(result), flush=True)
    del kept
    if given.mode == "pluggable":
        # Its addresses have no memory: nothing may be freed after this.
        os._exit(0)


if __name__ == "__main__":
    GIVEN = arguments()
    if MODES[GIVEN.mode]:
        # Both names, for older versions; torch reads them at import.
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ["PYTORCH_ALLOC_CONF"] = MODES[GIVEN.mode]
    require_gpu()
    import torch

    main(GIVEN)
