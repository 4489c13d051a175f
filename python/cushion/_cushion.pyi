"""The Rust half of the package, which controls the engine. PyTorch itself calls the C functions of the library."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

__version__: str

class Settings:
    """The settings from arguments and variables."""

    @property
    def policy(self) -> str: ...
    @property
    def conf(self) -> str:
        """The options that differ from their defaults, as a conf string."""
    @property
    def log(self) -> bool: ...
    @property
    def simulate(self) -> int | None:
        """The bytes of each simulated device; none if devices are not simulated."""
    @property
    def receipts(self) -> str | None:
        """The file for receipts."""
    @property
    def inject(self) -> str | None:
        """The rules for injected failures."""
    @property
    def torch_variable(self) -> tuple[str, str] | None:
        """The variable that PyTorch reads its options from, and its value without `backend`."""

def gather_settings(
    environ: Mapping[str, str],
    policy: str | None = None,
    conf: str | None = None,
    log: bool | None = None,
    receipts: str | None = None,
    inject: str | None = None,
) -> Settings:
    """Returns the settings from arguments and variables. ValueError names an invalid one."""

def start(settings: Settings) -> str:
    """Applies `settings` to every device. Returns the name of the exception for out of memory. ValueError if the file
    for receipts cannot be opened."""

def change_settings(
    policy: str | None = None, conf: str | None = None, receipts: str | None = None, inject: str | None = None
) -> Settings:
    """Changes the settings that are given, and keeps the others. An empty text ends receipts or injected failures.
    Returns the settings in force. ValueError as for the two functions above; then nothing changes."""

def simulate(size: str) -> None:
    """Simulates all devices, each of this size: `16GiB`, `8GB` or a number of bytes. ValueError if it is not a size;
    RuntimeError if devices are in use already."""

def is_simulated() -> bool: ...
def stop() -> None:
    """Ends all calls into Python, which is shutting down."""

def hooks() -> dict[str, int]:
    """Returns the addresses of the plug-in's functions, by the names of PyTorch's setters."""

def configure(conf: str) -> list[str]:
    """Applies a conf string to every device. Returns the keys that only PyTorch uses."""

def conf() -> str:
    """Returns the options in force as a conf string."""

def without_backend(conf: str) -> str:
    """Returns a conf string without its `backend`."""

def allocate(bytes: int, device: int = 0, stream: int = 0) -> int:
    """Allocates memory that belongs to no tensor. Returns its address, for work on this stream. Out of memory is
    `torch.OutOfMemoryError` if PyTorch is loaded, and `cushion.OutOfMemoryError` otherwise; both carry their receipt.
    ValueError if the device does not exist."""

class Pending:
    """A request for which no thread waits."""

    def cancel(self) -> None:
        """Cancels the request, unless it has ended."""

def allocate_later(
    bytes: int, done: Callable[[int | None, str | None, bool], object], device: int = 0, stream: int = 0
) -> Pending:
    """Allocates as `allocate` does, without a waiting thread. Calls `done(address, None, False)` when the request is
    served, `done(None, why, is_out_of_memory)` when it is refused, and `done(None, None, False)` when it is cancelled,
    on another thread."""

def prefetch(bytes: int, device: int = 0, stream: int = 0) -> None:
    """Prepares memory: afterwards a request of this size on this stream needs no call of the driver."""

def parse_bytes(size: str) -> int:
    """Returns the bytes of a size such as `8GiB`; ValueError if it is not a size."""

def set_wishes(budget_ms: float | None, skip: Sequence[str]) -> None:
    """Sets how long each request of this thread may wait, and which rungs it skips in addition to those of the
    options."""

def wishes() -> tuple[float | None, list[str]]:
    """Returns how long each request of this thread may wait, in milliseconds, and which rungs it skips."""

def stream_of(address: int) -> int | None:
    """Returns the stream of a live allocation; none if the address is not Cushion's."""

def inject(rules: str | None = None) -> str | None:
    """Makes allocations fail by these rules, on every device; `None` ends that. Returns the rules before."""

def add_callback(
    function: Callable[[int, int, float], object], name: str, priority: int = 0, budget_ms: int | None = None
) -> int:
    """Calls `function(device, bytes, seconds_left)` when memory runs out, on every device. Returns the number of the
    callback."""

def add_lasting_stream(stream: int) -> None: ...
def remove_callback(number: int) -> bool: ...
def is_callback_on(number: int) -> bool:
    """Whether a callback is registered and was not switched off because it took too long."""

def add_last_call(function: Callable[[str], object]) -> int:
    """Calls `function(receipt)` before each refusal that is not expected; the receipt is JSON."""

def remove_last_call(number: int) -> bool: ...
def expect_refusals(expect: bool) -> None:
    """Begins or ends a section in which this thread expects refusals and tries again."""

def refuse_after_all(text: str) -> None:
    """Makes the last calls for an expected refusal after which the program gives up; `text` is the text of its
    exception."""

def receipts(device: int | None = None) -> list[str]:
    """Returns the kept receipts as JSON, oldest first."""

def receipt_for(text: str) -> str | None:
    """Returns the receipt, as JSON, of the refusal that the text of an exception belongs to; none if it is not one of
    the latest refusals of this process."""

def keep_receipts(count: int) -> None: ...
def observe_receipts(observer: Callable[[str], object] | None = None) -> None:
    """Calls `observer(receipt)` with every later receipt, as JSON, on the thread that was short of memory. `None` ends
    that."""

def deallocate(address: int) -> None:
    """Frees memory of `allocate`, on any device; ValueError if no live allocation starts there."""

def device_of(address: int) -> int | None:
    """Returns the device whose memory contains an address, live or cached; none if the address is not Cushion's."""

def memory_info(device: int = 0) -> tuple[int, int]:
    """Returns the bytes of a device that no process holds, and its size."""

def devices_in_use() -> list[int]:
    """Returns the devices that have an engine, in order."""

def memory_stats(device: int, by_private_pools: bool = False) -> dict[str, Any]:
    """Returns the figures of a device, nested as PyTorch's are."""

def stats(device: int = 0) -> dict[str, float]:
    """Returns Cushion's own figures of a device, which `torch.cuda.memory_stats()` does not have: `hits` and `misses`
    (allocations served from reserved memory, and those that needed the driver), `cached_bytes`, `largest_free_block`,
    `blocks`, `free_blocks`; `shortages`, of which `shortages_survived` and `shortages_refused`, and
    `shortage_seconds`, the time that they took; `waiting`, the requests that wait now; `spilled_bytes` in host memory
    now, and `spilled_bytes_peak`; `receipts_lost`, those that could not be written to their file."""

def reset_peak_memory_stats(device: int) -> None: ...
def reset_accumulated_memory_stats(device: int) -> None: ...
def memory_fraction(device: int) -> float: ...
def empty_cache() -> None: ...
def memory_snapshot(pool: tuple[int, int] | None = None, include_traces: bool = True) -> dict[str, Any]: ...
def record_memory_history(
    enabled: str | None, context: str | None, max_entries: int, clear_history: bool, skip_actions: Sequence[str]
) -> None: ...
def allocation_traceback(address: int) -> list[dict[str, Any]] | None: ...
def set_metadata(metadata: str) -> None: ...
def metadata() -> str: ...
def kept_notes() -> tuple[int, int]:
    """Returns the number of stacks and of metadata texts that are kept. Some may be unused until the next sweep."""

def observe_refusals(observer: Callable[[int, int, int, int], object]) -> None:
    """Calls `observer(device, bytes, limit, free)` whenever an allocation is refused."""

def check_invariants(device: int) -> None:
    """Checks the invariants of the engine of a device; RuntimeError names a violation."""

def command(args: Sequence[str]) -> int:
    """Runs the command line `args`, program name first. Returns the exit code."""
