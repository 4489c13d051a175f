"""Features that a plug-in allocator cannot support are refused, or turned off with a warning. The text names Cushion
and an alternative.

    python tests/gpu/refusals.py [--policy P]

`torch.cuda.MemPool()` and sending a CUDA tensor to another process raise RuntimeError. `torch.backends.cudnn.benchmark`
and `torch.compile(mode="reduce-overhead")` warn, and the program runs without them. CUDA still works afterwards. With
`--policy native` each has to work. Similar features that do work are tried too.
"""

from __future__ import annotations

import warnings

from harness import Checks, main, parser, require_gpu, say, short

require_gpu()

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.multiprocessing.reductions import reduce_tensor  # noqa: E402

# Words of advice, one of which a message has to contain.
ADVICE = ("instead", "use ", "set ", "without", "leave", "turn ", "remove", "pass ")


def mem_pool() -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        torch.ones(1000, device="cuda")


def convolution() -> torch.Tensor:
    x = torch.randn(4, 8, 32, 32, device="cuda")
    weight = torch.randn(16, 8, 3, 3, device="cuda")
    return F.conv2d(x, weight).sum()


def cudnn_benchmark() -> None:
    torch.backends.cudnn.benchmark = True
    try:
        convolution()
    finally:
        torch.backends.cudnn.benchmark = False


def ipc() -> None:
    reduce_tensor(torch.ones(1000, device="cuda"))


def three_times_plus_one(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * 3 + 1


def reduce_overhead() -> None:
    compiled = torch.compile(three_times_plus_one, mode="reduce-overhead")
    x = torch.ones(1000, device="cuda")
    # A graph is captured only after the first runs.
    for _ in range(4):
        compiled(x)


def alive(checks: Checks, after: str) -> None:
    got = torch.arange(1000, device="cuda").sum().item()
    checks.equal(got, 499_500, f"a sum after {after}")


def refused(checks: Checks, call, native: bool, warns: bool) -> str | None:
    """Returns the message of a call that is refused, or the warning of one whose feature is turned off."""
    name = call.__name__
    text = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call()
        except RuntimeError as error:
            checks.that(native or not warns, f"{name} is refused: {short(error)}")
            text = str(error)
        except Exception as error:
            checks.that(False, f"{name} raises {type(error).__name__}: {short(error)}")
    if warns and text is None:
        text = next((str(it.message) for it in caught if "Cushion" in str(it.message)), None)
    if native:
        checks.that(text is None, f"{name} is refused: {short(text)}")
    elif checks.that(text is not None, f"{name} is neither refused nor turned off with a warning"):
        lower = text.lower()
        checks.that("cushion" in lower, f"the text about {name} does not name Cushion: {short(text)}")
        advice = any(word in lower for word in ADVICE)
        checks.that(advice, f"the text about {name} names no way out: {short(text)}")
    alive(checks, name)
    return None if text is None else short(text, 400)


def plain_compile(checks: Checks) -> None:
    torch._dynamo.reset()
    x = torch.linspace(0, 1, 1000, device="cuda")
    got = torch.compile(three_times_plus_one)(x)
    checks.that(torch.allclose(got, three_times_plus_one(x)), "plain torch.compile gives a wrong result")


def plain_convolution(checks: Checks) -> None:
    checks.that(bool(torch.isfinite(convolution())), "a convolution without benchmark gives no number")


def body(checks: Checks, arguments) -> dict:
    alive(checks, "nothing")
    native = arguments.policy == "native"
    texts = {}
    for call, warns in ((mem_pool, False), (cudnn_benchmark, True), (ipc, False), (reduce_overhead, True)):
        say(call.__name__)
        texts[call.__name__] = refused(checks, call, native, warns)
    checks.part(plain_compile, checks)
    checks.part(plain_convolution, checks)
    return {"texts": texts}


if __name__ == "__main__":
    main(body, parser(__doc__))
