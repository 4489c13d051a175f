"""What an allocator that PyTorch loads as a plug-in cannot do. PyTorch's own errors there name a C++ class and
stop; these say what does not work and the way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

MEM_POOL = (
    "torch.cuda.MemPool() does not work with Cushion: PyTorch offers its own memory pools to its own allocator "
    "only. Leave the pool out, or run this program without Cushion. CUDA graphs and their pools "
    "(torch.cuda.graph_pool_handle()) do work."
)
CUDNN_BENCHMARK = (
    "torch.backends.cudnn.benchmark = True does not work with Cushion: PyTorch's search for the fastest "
    "convolution asks its own allocator a question that no plug-in can answer. Set it to False (cuDNN then "
    "chooses by its own rules), or run this program without Cushion."
)
IPC = (
    "CUDA tensors cannot be sent to another process with Cushion: PyTorch shares memory of its own allocator "
    "only. Send tensor.cpu(), or run this program without Cushion."
)
GRAPH_TREES = (
    'torch.compile with CUDA graphs (mode="reduce-overhead" or "max-autotune") does not work with Cushion: '
    'PyTorch keeps its graph trees in its own allocator. Use mode="default" or "max-autotune-no-cudagraphs", or '
    "run this program without Cushion. torch.cuda.graph() and make_graphed_callables() do work."
)


def check(torch: Any, error: type[Exception]) -> None:
    """Refuses what is switched on already and would fail later, far from its cause."""
    if torch.backends.cudnn.benchmark:
        raise error(CUDNN_BENCHMARK)


def apply(torch: Any) -> None:
    if hasattr(torch.cuda.memory, "MemPool"):
        torch.cuda.memory.MemPool.__init__ = _refusing(MEM_POOL)
    _refuse_cudnn_benchmark(torch)
    torch.UntypedStorage._share_cuda_ = _refusing(IPC)
    torch.UntypedStorage._new_shared_cuda = _refusing(IPC)
    for name in ("_cuda_checkPoolLiveAllocations", "_cuda_getCheckpointState", "_cuda_setCheckpointPoolState"):
        if hasattr(torch._C, name):
            setattr(torch._C, name, _refusing(GRAPH_TREES))


def _refusing(text: str) -> Callable[..., NoReturn]:
    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise RuntimeError(text)

    return refuse


def _refuse_cudnn_benchmark(torch: Any) -> None:
    original = torch._C._set_cudnn_benchmark

    def set_benchmark(value: bool) -> None:
        if value:
            raise RuntimeError(CUDNN_BENCHMARK)
        original(value)

    torch._C._set_cudnn_benchmark = set_benchmark
    # The module's property holds the function it was made with.
    type(torch.backends.cudnn).__dict__["benchmark"].setter = set_benchmark
