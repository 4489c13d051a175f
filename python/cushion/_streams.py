"""Streams that PyTorch never destroys: free memory of one can serve another as soon as its work is done.

Those that `torch.cuda.Stream()` makes come from a pool that lasts as long as the process. One that was made elsewhere,
and only wrapped, may be destroyed at any time: nothing is said of those.
"""

from typing import Any

from . import _cushion


def apply(torch: Any) -> None:
    """Notes the streams that are made from now on."""
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
