"""Makes PyTorch's memory functions work with Cushion. `torch.cuda.memory` and `torch.accelerator` call functions of
`torch._C`, most of which raise with a plug-in. They are replaced by functions of Cushion. Names that a version of
PyTorch does not have are skipped."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from . import _cushion

_history_is_on = False


def version(torch: Any) -> tuple[int, int]:
    """Returns PyTorch's version as (major, minor). A version that cannot be parsed counts as the newest."""
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    return (int(found[1]), int(found[2])) if found else (sys.maxsize, 0)


def apply(torch: Any) -> None:
    replacements: dict[str, Callable[..., Any]] = {
        "_cuda_memoryStats": _stats_by_private_pools if version(torch) >= (2, 13) else _cushion.memory_stats,
        "_cuda_resetAccumulatedMemoryStats": _cushion.reset_accumulated_memory_stats,
        "_cuda_resetPeakMemoryStats": _cushion.reset_peak_memory_stats,
        "_cuda_memorySnapshot": _memory_snapshot,
        "_cuda_record_memory_history": _record_memory_history,
        "_cuda_record_memory_history_legacy": _record_memory_history_legacy,
        "_cuda_isHistoryEnabled": _is_history_enabled,
        "_cuda_allocationTraceback": _cushion.allocation_traceback,
        "_cuda_getMemoryFraction": _cushion.memory_fraction,
        "_cuda_attach_out_of_memory_observer": _cushion.observe_refusals,
        "_cuda_memoryMetadataSupported": _yes,
        "_cuda_setMemoryMetadata": _set_metadata,
        "_cuda_getMemoryMetadata": _cushion.metadata,
        "_accelerator_getDeviceStats": _cushion.memory_stats,
        "_accelerator_resetAccumulatedStats": _cushion.reset_accumulated_memory_stats,
        "_accelerator_resetPeakStats": _cushion.reset_peak_memory_stats,
        "_accelerator_emptyCache": _cushion.empty_cache,
        "_accelerator_isAllocatorInitialized": torch.cuda.is_initialized,
    }
    for name, replacement in replacements.items():
        if hasattr(torch._C, name):
            setattr(torch._C, name, replacement)
    for name in ("_accelerator_setAllocatorSettings", "_cuda_cudaCachingAllocator_set_allocator_settings"):
        if hasattr(torch._C, name):
            setattr(torch._C, name, _settings_setter(getattr(torch._C, name)))


def _stats_by_private_pools(device: int) -> dict[str, Any]:
    """Statistics as PyTorch has them from 2.13 on. In earlier versions `memory_stats()` fails on a key that is not a
    string."""
    return _cushion.memory_stats(device, by_private_pools=True)


def _yes() -> bool:
    return True


def _memory_snapshot(what: Sequence[Any] | None = None) -> dict[str, Any]:
    """Returns a snapshot. `what` is None, the id of a pool, or that id followed by whether to include events."""
    if what is None:
        return _cushion.memory_snapshot()
    pool = (int(what[0]), int(what[1]))
    return _cushion.memory_snapshot(pool, bool(what[2]) if len(what) > 2 else True)


def _record_memory_history(
    enabled: str | None,
    context: str | None,
    stacks: str,
    max_entries: int,
    clear_history: bool = False,
    compile_context: bool = False,
    global_record_annotations: bool = False,
    skip_actions: Sequence[str] = (),
    record_pinned_host_memory: bool = False,
    record_cuda: bool = True,
) -> None:
    global _history_is_on
    if stacks not in ("python", "all"):
        raise RuntimeError(f"stacks is '{stacks}', expected 'python' or 'all'")
    if not record_cuda:
        enabled = None
    _cushion.record_memory_history(enabled, context, max_entries, clear_history, list(skip_actions))
    _history_is_on = enabled is not None


def _record_memory_history_legacy(
    enabled: bool,
    record_context: bool = True,
    trace_alloc_max_entries: int = 1,
    trace_alloc_record_context: bool = False,
    record_context_cpp: bool = False,
    clear_history: bool = False,
    compile_context: bool = False,
    global_record_annotations: bool = False,
    skip_actions: Sequence[str] = (),
    *others: Any,
) -> None:
    context = "alloc" if trace_alloc_record_context else "state" if record_context else None
    _record_memory_history(
        "all" if enabled else None,
        context,
        "python",
        trace_alloc_max_entries,
        clear_history,
        skip_actions=skip_actions,
    )


def _is_history_enabled(*_device: Any) -> bool:
    return _history_is_on


def _set_metadata(metadata: str | dict[str, str]) -> None:
    if isinstance(metadata, dict):
        metadata = ",".join(f"{key}:{value}" for key, value in metadata.items())
    _cushion.set_metadata(metadata)


def _settings_setter(original: Callable[[str], None]) -> Callable[[str], None]:
    """Returns a function that applies the settings that Cushion knows, and passes others, such as those of pinned host
    memory, to PyTorch."""

    def set_settings(conf: str) -> None:
        if _cushion.configure(conf):
            original(_cushion.without_backend(conf))

    return set_settings
