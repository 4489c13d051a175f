"""Checks that torch runs on the stand-in's GPU: run it as `standin.sh FOLDER python standin_check.py`.

It uses torch's own allocator, so that a failure is the stand-in's and not a plug-in's.
"""

import threading

import torch

MIB = 1 << 20

assert torch.cuda.is_available()
torch.cuda.init()
free, total = torch.cuda.mem_get_info()
assert free == total == torch.cuda.get_device_properties(0).total_memory

# Memory comes and goes by the amount, and reads as zeros.
x = torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
assert torch.cuda.mem_get_info()[0] == total - 32 * MIB
assert (x + 1).cpu().sum() == 0
assert not torch.empty(1).is_pinned() and torch.empty(1, pin_memory=True).is_pinned()
try:
    torch.empty(2 * total, dtype=torch.uint8, device="cuda")
    raise AssertionError("more than there is")
except torch.cuda.OutOfMemoryError:
    pass

# Streams and events; a thread of its own has a device too.
side = torch.cuda.Stream()
x.record_stream(side)
event = torch.cuda.Event()
event.record(side)
assert event.query() and side.cuda_stream != 0
thread = threading.Thread(target=lambda: torch.empty(1, device="cuda").record_stream(side))
thread.start()
thread.join()
del x
torch.cuda.synchronize()
torch.cuda.empty_cache()
before = torch.cuda.mem_get_info()[0]

# A capture, that another stream joins and leaves with it.
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = torch.empty(MIB, device="cuda")
    assert torch.cuda.is_current_stream_capturing()
    with torch.cuda.stream(side):
        assert not torch.cuda.is_current_stream_capturing()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        assert torch.cuda.is_current_stream_capturing()
        z = torch.empty(MIB, device="cuda")
    torch.cuda.current_stream().wait_stream(side)
with torch.cuda.stream(side):
    assert not torch.cuda.is_current_stream_capturing()
graph.replay()
graph.reset()
del y, z
torch.cuda.empty_cache()
# Some versions of torch keep the seed of captures in a small segment of its own.
assert torch.cuda.mem_get_info()[0] >= before - 2 * MIB
print(f"torch {torch.__version__} runs over the stand-in")
