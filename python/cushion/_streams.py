"""Reports the streams that PyTorch never destroys: free memory of such a stream can serve another stream as soon as its
work is done.

`torch.cuda.Stream()` takes its streams from a pool that lasts as long as the process. A stream that was created
elsewhere, and only wrapped, may be destroyed at any time and is not reported.
"""

from typing import Any

from . import _cushion


def apply(torch: Any) -> None:
    """Reports the streams that are created from now on."""
    made_by_torch = getattr(torch.cuda, "Stream", None)
    if made_by_torch is None:
        return
    make = made_by_torch.__new__

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        stream = make(cls, *args, **kwargs)
        if cls is made_by_torch and not kwargs.keys() & {"stream_id", "stream_ptr"}:
            _cushion.add_lasting_stream(stream.cuda_stream)
        return stream

    made_by_torch.__new__ = staticmethod(new)
