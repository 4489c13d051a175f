"""Tests how a program handles out of memory, with injected failures.

    python examples/python/test_your_recovery.py
    CUSHION_INJECT='every=7' python examples/python/test_your_recovery.py      # other failures, without a change

The program under test is a small cache that drops its oldest entries when memory runs out. With PyTorch and a GPU it
holds memory of the GPU; otherwise it says so, and holds memory of a simulated device.
"""

from __future__ import annotations

import os

import cushion


class Cache:
    """Keeps the most recently used entries."""

    def __init__(self) -> None:
        self.kept: dict[int, cushion.Memory] = {}
        self.dropped = 0

    def get(self, key: int) -> cushion.Memory:
        if key not in self.kept:
            self.kept[key] = self.make()
        return self.kept[key]

    def make(self) -> cushion.Memory:
        """The function under test: drops entries until the allocation succeeds, and raises if none are left."""
        while True:
            try:
                memory: cushion.Memory = cushion.alloc_future("64MiB").result()
                return memory
            except Exception as error:
                if not cushion.is_out_of_memory(error) or not self.kept:
                    raise
            self.kept.pop(next(iter(self.kept)))
            self.dropped += 1


def there_is_a_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def main() -> None:
    if there_is_a_gpu():
        cushion.install()
    else:
        print("There is no GPU with PyTorch here: on a simulated device of 4 GiB.")
        cushion.simulate("4GiB")
    if "CUSHION_INJECT" not in os.environ:
        # The fifth allocation fails: one entry is dropped, and the cache goes on.
        with cushion.inject("nth=5"):
            cache = Cache()
            for key in range(10):
                cache.get(key)
        assert (cache.dropped, len(cache.kept)) == (1, 9), (cache.dropped, len(cache.kept))
        # The cache is empty, so the error reaches the caller.
        with cushion.inject("nth=1"):
            try:
                Cache().get(0)
            except Exception as error:
                assert cushion.is_out_of_memory(error)
                receipt = cushion.receipt_of(error)
                assert receipt is not None and receipt.injected
            else:
                raise AssertionError("it was not refused")
        # The third allocation fails up to the rung `wait`, and is served there: the program does not notice.
        with cushion.inject("nth=3,at=wait"):
            cache = Cache()
            for key in range(10):
                cache.get(key)
        assert cache.dropped == 0, cache.dropped
        assert cushion.receipts()[-1].survived_by == "wait"
        # Random failures, the same for the same seed; or those of the variable.
        cushion.inject("fraction=0.1,seed=3")
    cache = Cache()
    for key in range(20):
        cache.get(key)
    print(f"of 20 entries {len(cache.kept)} are kept, after {cache.dropped} failures")
    cushion.inject(None)
    print("ok")


if __name__ == "__main__":
    main()
