"""The Rust half of the package: the engine's controls. PyTorch itself calls the library's C functions."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

__version__: str

class Settings:
    """What was asked for, and what follows from it."""

    @property
    def policy(self) -> str: ...
    @property
    def conf(self) -> str:
        """The options that differ from their default, as a conf string."""
    @property
    def log(self) -> bool: ...
    @property
    def simulate(self) -> int | None:
        """Devices are simulated, of so many bytes each."""
    @property
    def receipts(self) -> str | None:
        """The file that receipts are written to."""
    @property
    def inject(self) -> str | None:
        """Rules for failures that are made up."""
    @property
    def torch_variable(self) -> tuple[str, str] | None:
        """The variable that PyTorch reads its options from, and its text without `backend`."""

def gather_settings(
    environ: Mapping[str, str],
    policy: str | None = None,
    conf: str | None = None,
    log: bool | None = None,
    receipts: str | None = None,
    inject: str | None = None,
) -> Settings:
    """The settings from arguments and variables; ValueError names the one that is no good."""

def start(settings: Settings) -> str:
    """Makes `settings` those of every device; returns the name of what is raised when memory runs out. ValueError if
    the file for receipts cannot be opened."""

def change_settings(
    policy: str | None = None, conf: str | None = None, receipts: str | None = None, inject: str | None = None
) -> Settings:
    """Changes what is given of the settings in force, and leaves the rest; an empty text takes receipts or injected
    failures away. Returns the settings in force; ValueError as for the two above, and then nothing changes."""

def simulate(size: str) -> None:
    """Devices are simulated from now on, each of this size: `16GiB`, `8GB` or a number of bytes. ValueError if it is no
    size; RuntimeError if devices are in use already."""

def is_simulated() -> bool: ...
def stop() -> None:
    """Python is shutting down: nothing calls into it from now on."""

def hooks() -> dict[str, int]:
    """The addresses of the plug-in's functions, by the names of PyTorch's setters."""

def configure(conf: str) -> list[str]:
    """Applies a conf string to every device; returns the keys that are PyTorch's alone."""

def conf() -> str:
    """The options in force as a conf string."""

def without_backend(conf: str) -> str:
    """A conf string without its `backend`."""

def allocate(bytes: int, device: int = 0, stream: int = 0) -> int:
    """Memory that is no tensor's: the address of so many bytes, for work on this stream. Out of memory is
    `torch.OutOfMemoryError` where PyTorch is loaded, and else `cushion.OutOfMemoryError`; a device that is not there is
    ValueError."""

class Pending:
    """A request that no thread waits for."""

    def cancel(self) -> None:
        """Gives it up, unless it is over."""

def allocate_later(
    bytes: int, done: Callable[[int | None, str | None, bool], object], device: int = 0, stream: int = 0
) -> Pending:
    """As `allocate`, and no thread waits: calls `done(address, None, False)` when it is served,
    `done(None, why, is_out_of_memory)` when it is refused, and `done(None, None, False)` when it was given up, on
    another thread."""

def prefetch(bytes: int, device: int = 0, stream: int = 0) -> None:
    """Prepares memory: afterwards a request of so many bytes on this stream needs nothing from the driver."""

def parse_bytes(size: str) -> int:
    """Bytes of a size such as `8GiB`; ValueError if it is none."""

def set_wishes(budget_ms: float | None, skip: Sequence[str]) -> None:
    """Sets how long each request of this thread may wait, and which rungs it leaves out beside those of the options."""

def wishes() -> tuple[float | None, list[str]]:
    """How long each request of this thread may wait, in milliseconds, and which rungs it leaves out."""

def stream_of(address: int) -> int | None:
    """The stream that a live allocation is for; none if it is not Cushion's."""

def inject(rules: str | None = None) -> str | None:
    """Allocations are made to fail by these rules from now on, on every device; none end it. Returns those before."""

def add_callback(
    function: Callable[[int, int, float], object], name: str, priority: int = 0, budget_ms: int | None = None
) -> int:
    """Calls `function(device, bytes, seconds_left)` when memory runs out, on every device; returns its number."""

def add_lasting_stream(stream: int) -> None: ...
def remove_callback(number: int) -> bool: ...
def is_callback_on(number: int) -> bool:
    """Whether a callback is there and was not switched off for taking too long."""

def add_last_call(function: Callable[[str], object]) -> int:
    """Calls `function(receipt)` before an allocation is refused that nobody expects to be; the receipt is JSON."""

def remove_last_call(number: int) -> bool: ...
def expect_refusals(expect: bool) -> None:
    """From now on, or no longer, this thread expects allocations to be refused, and tries again: that is no end."""

def refuse_after_all(device: int, number: int) -> None:
    """Who expected the refusal of this receipt has given up."""

def receipts(device: int | None = None) -> list[str]:
    """The receipts kept, as JSON, oldest first."""

def receipt(device: int, number: int) -> str | None:
    """One receipt as JSON, if it is still kept."""

def keep_receipts(count: int) -> None: ...
def observe_receipts(observer: Callable[[str], object] | None = None) -> None:
    """Calls `observer(receipt)` with every receipt, as JSON, on the thread that was short of memory; none ends it."""

def deallocate(address: int) -> None:
    """Gives back what `allocate` gave, on whichever device; ValueError if nothing live starts there."""

def device_of(address: int) -> int | None:
    """The device whose memory an address lies in, live or cached; none if it is not Cushion's."""

def memory_info(device: int = 0) -> tuple[int, int]:
    """What nobody holds of a device, other processes included, and its size."""

def devices_in_use() -> list[int]:
    """The devices that have an engine, in order."""

def memory_stats(device: int, by_private_pools: bool = False) -> dict[str, Any]:
    """The figures of a device, nested as PyTorch's are."""

def stats(device: int = 0) -> dict[str, float]:
    """Cushion's own figures of a device, beside those of `torch.cuda.memory_stats()`: `hits` and `misses` (allocations
    served from memory already held, and those that needed the driver), `cached_bytes`, `largest_free_block`, `blocks`,
    `free_blocks`; `shortages`, of which `shortages_survived` and `shortages_refused`, and `shortage_seconds`, the time
    lost; `waiting`, the requests that wait now; `spilled_bytes` in host memory now, and `spilled_bytes_peak`;
    `receipts_lost`, those that could not be written to their file."""

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
    """How many stacks and texts are kept, because something refers to them or nobody has looked yet."""

def observe_refusals(observer: Callable[[int, int, int, int], object]) -> None:
    """Calls `observer(device, bytes, limit, free)` whenever an allocation is refused."""

def check_invariants(device: int) -> None:
    """Checks the engine of a device against itself; raises if something is wrong."""

def command(args: Sequence[str]) -> int:
    """Runs the command line `args`, program name first; returns the exit code."""
