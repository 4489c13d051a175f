"""Features of PyTorch that do not work with an allocator loaded as a plug-in. PyTorch's own errors there name only a
C++ class. Here the feature is turned off with one warning; if the program cannot go on without it, an error says what
does not work and what to do instead."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

MEM_POOL = (
    "torch.cuda.MemPool() does not work with Cushion: PyTorch supports memory pools with its own allocator "
    "only. Remove the pool, or run this program without Cushion. CUDA graphs and their pools "
    "(torch.cuda.graph_pool_handle()) do work."
)
CUDNN_BENCHMARK = (
    "torch.backends.cudnn.benchmark stays False with Cushion: PyTorch's search for the fastest convolution calls a "
    "function of its own allocator that plug-ins do not have. cuDNN chooses by its own rules: results are as good, and "
    "convolutions may be slower. Remove the setting to avoid this warning, or run this program without Cushion."
)
IPC = (
    "CUDA tensors cannot be sent to another process with Cushion: PyTorch shares memory of its own allocator "
    "only. Send tensor.cpu() instead, or run this program without Cushion."
)
COMPILED_GRAPHS = (
    'torch.compile uses no CUDA graphs with Cushion (mode="reduce-overhead" and "max-autotune" enable them): PyTorch '
    "keeps its graph trees in its own allocator. The code is compiled without graphs: results are the same, and small "
    'models may be slower. Use mode="default" or "max-autotune-no-cudagraphs" to avoid this warning, or run this '
    "program without Cushion. torch.cuda.graph() and make_graphed_callables() do work."
)
GRAPH_TREES = (
    "torch.compile with CUDA graphs does not work with Cushion through this backend: PyTorch keeps its graph trees in "
    'its own allocator. Use torch.compile with backend="inductor", which then compiles without graphs, or run this '
    "program without Cushion. torch.cuda.graph() and make_graphed_callables() do work."
)
CUDAGRAPHS = "triton.cudagraphs"

_warned: set[str] = set()


def apply(torch: Any) -> None:
    if hasattr(torch.cuda.memory, "MemPool"):
        torch.cuda.memory.MemPool.__init__ = _refusing(MEM_POOL)
    torch.UntypedStorage._share_cuda_ = _refusing(IPC)
    torch.UntypedStorage._new_shared_cuda = _refusing(IPC)
    for name in ("_cuda_checkPoolLiveAllocations", "_cuda_getCheckpointState", "_cuda_setCheckpointPoolState"):
        if hasattr(torch._C, name):
            setattr(torch._C, name, _refusing(GRAPH_TREES))
    if hasattr(torch, "_TorchCompileInductorWrapper"):
        _compile_without_graphs(torch._TorchCompileInductorWrapper)
    was_on = torch.backends.cudnn.benchmark
    _keep_cudnn_benchmark_off(torch)
    if was_on:
        torch._C._set_cudnn_benchmark(True)


def _refusing(text: str) -> Callable[..., NoReturn]:
    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise RuntimeError(text)

    return refuse


def _warn(text: str) -> None:
    """Warns once per process, at the line of the first caller that is neither PyTorch nor Cushion."""
    if text in _warned:
        return
    _warned.add(text)
    level = 1
    frame: FrameType | None = sys._getframe()
    while frame is not None and _package(frame.f_globals) in ("cushion", "torch", "contextlib"):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


def _package(names: dict[str, Any]) -> str:
    return str(names.get("__name__", "")).partition(".")[0]


def _keep_cudnn_benchmark_off(torch: Any) -> None:
    original = torch._C._set_cudnn_benchmark

    def set_benchmark(value: bool) -> None:
        # PyTorch's own function raises if the value is not a bool.
        original(False if value is True else value)
        if value:
            _warn(CUDNN_BENCHMARK)

    torch._C._set_cudnn_benchmark = set_benchmark
    # The module's property keeps a reference to the original function.
    type(torch.backends.cudnn).__dict__["benchmark"].setter = set_benchmark


def _compile_without_graphs(wrapper: Any) -> None:
    """Turns CUDA graphs off in `wrapper`, the class that `torch.compile` creates from its mode and options, and calls
    to compile."""
    make, call = wrapper.__init__, wrapper.__call__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        _leave_out_graphs(self.config, False)

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        # The setting of the whole process may have changed since __init__.
        config = importlib.import_module("torch._inductor.config")
        _leave_out_graphs(self.config, config.triton.cudagraphs)
        return call(self, *args, **kwargs)

    wrapper.__init__, wrapper.__call__ = __init__, __call__


def _leave_out_graphs(asked: dict[str, Any], otherwise: bool) -> None:
    if asked.get(CUDAGRAPHS, otherwise):
        asked[CUDAGRAPHS] = False
        _warn(COMPILED_GRAPHS)
