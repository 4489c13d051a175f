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
    def torch_variable(self) -> tuple[str, str] | None:
        """The variable that PyTorch reads its options from, and its text without `backend`."""

def gather_settings(
    environ: Mapping[str, str], policy: str | None = None, conf: str | None = None, log: bool | None = None
) -> Settings:
    """The settings from arguments and variables; ValueError names the one that is no good."""

def start(settings: Settings) -> str:
    """Makes `settings` those of every device; returns the name of what is raised when memory runs out."""

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
    `torch.OutOfMemoryError` where PyTorch is loaded, and else MemoryError; a device that is not there is ValueError."""

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

def stats(device: int = 0) -> dict[str, int]:
    """Cushion's own figures of a device, beside those of `torch.cuda.memory_stats()`: `hits` and `misses` (allocations
    served from memory already held, and those that needed the driver), `cached_bytes`, `largest_free_block`, `blocks`
    and `free_blocks`."""

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
def observe_refusals(observer: Callable[[int, int, int, int], object]) -> None:
    """Calls `observer(device, bytes, limit, free)` whenever an allocation is refused."""

def check_invariants(device: int) -> None:
    """Checks the engine of a device against itself; raises if something is wrong."""

def command(args: Sequence[str]) -> int:
    """Runs the command line `args`, program name first; returns the exit code."""
