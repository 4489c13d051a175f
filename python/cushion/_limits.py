"""What an allocator that PyTorch loads as a plug-in cannot do. PyTorch's own errors there name a C++ class and
stop. Here the program goes on without, and one warning says what that means for it; where it cannot go on without,
an error says what does not work and the way out."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

MEM_POOL = (
    "torch.cuda.MemPool() does not work with Cushion: PyTorch offers its own memory pools to its own allocator "
    "only. Leave the pool out, or run this program without Cushion. CUDA graphs and their pools "
    "(torch.cuda.graph_pool_handle()) do work."
)
CUDNN_BENCHMARK = (
    "torch.backends.cudnn.benchmark stays False with Cushion: PyTorch's search for the fastest convolution asks its "
    "own allocator a question that no plug-in can answer. cuDNN chooses by its own rules: results are as good, and "
    "convolutions may be slower. Leave the setting out to be rid of this warning, or run this program without Cushion."
)
IPC = (
    "CUDA tensors cannot be sent to another process with Cushion: PyTorch shares memory of its own allocator "
    "only. Send tensor.cpu(), or run this program without Cushion."
)
COMPILED_GRAPHS = (
    'torch.compile uses no CUDA graphs with Cushion (mode="reduce-overhead" and "max-autotune" ask for them): PyTorch '
    "keeps its graph trees in its own allocator. The code is compiled as without them: results are the same, and small "
    'models may be slower. Use mode="default" or "max-autotune-no-cudagraphs" to be rid of this warning, or run this '
    "program without Cushion. torch.cuda.graph() and make_graphed_callables() do work."
)
GRAPH_TREES = (
    "torch.compile with CUDA graphs does not work with Cushion by this way: PyTorch keeps its graph trees in its own "
    'allocator. Use torch.compile with backend="inductor", which leaves the graphs out, or run this program without '
    "Cushion. torch.cuda.graph() and make_graphed_callables() do work."
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
    """Once in a process, in the name of the first caller that is neither PyTorch nor Cushion."""
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
        # PyTorch's own refuses what is no bool.
        original(False if value is True else value)
        if value:
            _warn(CUDNN_BENCHMARK)

    torch._C._set_cudnn_benchmark = set_benchmark
    # The module's property holds the function it was made with.
    type(torch.backends.cudnn).__dict__["benchmark"].setter = set_benchmark


def _compile_without_graphs(wrapper: Any) -> None:
    """`torch.compile` makes one of these with what its mode and options ask for, and calls it to compile."""
    make, call = wrapper.__init__, wrapper.__call__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        _leave_out_graphs(self.config, False)

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        # The setting of the whole process may have changed since.
        config = importlib.import_module("torch._inductor.config")
        _leave_out_graphs(self.config, config.triton.cudagraphs)
        return call(self, *args, **kwargs)

    wrapper.__init__, wrapper.__call__ = __init__, __call__


def _leave_out_graphs(asked: dict[str, Any], otherwise: bool) -> None:
    if asked.get(CUDAGRAPHS, otherwise):
        asked[CUDAGRAPHS] = False
        _warn(COMPILED_GRAPHS)
