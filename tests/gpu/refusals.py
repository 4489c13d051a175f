"""Features that a plug-in allocator cannot support are refused with a message that names Cushion and an alternative.

    python tests/gpu/refusals.py [--policy P]

`torch.cuda.MemPool()`, `torch.backends.cudnn.benchmark`, sending a CUDA tensor to another process, and
`torch.compile(mode="reduce-overhead")` each raise RuntimeError, and CUDA still works afterwards. With `--policy native`
each has to work. Similar features that do work are tried too.
"""

from __future__ import annotations

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


def refused(checks: Checks, call, native: bool) -> str | None:
    """Returns the message of a refused call."""
    name = call.__name__
    text = None
    try:
        call()
    except RuntimeError as error:
        text = str(error)
    except Exception as error:
        checks.that(False, f"{name} raises {type(error).__name__}: {short(error)}")
    if native:
        checks.that(text is None, f"{name} is refused: {short(text)}")
    elif checks.that(text is not None, f"{name} is not refused"):
        lower = text.lower()
        checks.that("cushion" in lower, f"the refusal of {name} does not name Cushion: {short(text)}")
        advice = any(word in lower for word in ADVICE)
        checks.that(advice, f"the refusal of {name} names no way out: {short(text)}")
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
    for call in (mem_pool, cudnn_benchmark, ipc, reduce_overhead):
        say(call.__name__)
        texts[call.__name__] = refused(checks, call, native)
    checks.part(plain_compile, checks)
    checks.part(plain_convolution, checks)
    return {"texts": texts}


if __name__ == "__main__":
    main(body, parser(__doc__))
