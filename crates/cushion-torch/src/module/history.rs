//! Snapshots and the recorded history.

use cushion::core::{Action, PoolId};
use cushion::{HistoryPlan, devices};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::entry::plugin;
use crate::history::recorder::{self, Level, Reading};
use crate::history::{snapshot, stacks};

/// Returns all segments and blocks, and the recorded events, in the form of PyTorch's
/// `_cuda_memorySnapshot`.
#[pyfunction]
#[pyo3(signature = (pool=None, include_traces=true))]
pub(crate) fn memory_snapshot(
    py: Python<'_>,
    pool: Option<(u64, u64)>,
    include_traces: bool,
) -> PyResult<Bound<'_, PyDict>> {
    let pool = pool.map(|(first, second)| PoolId(first, second));
    let only = pool.filter(|pool| *pool != PoolId::DEFAULT);
    snapshot::snapshot(py, plugin::device_count(), only, include_traces)
}

/// Records the last `max_entries` events, with Python stacks as `context` says.
#[pyfunction]
#[pyo3(signature = (enabled, context, max_entries, clear_history, skip_actions))]
pub(crate) fn record_memory_history(
    py: Python<'_>,
    enabled: Option<&str>,
    context: Option<&str>,
    max_entries: usize,
    clear_history: bool,
    skip_actions: Vec<String>,
) -> PyResult<()> {
    let entries = match enabled {
        None => 0,
        // Live memory needs no events. PyTorch keeps one event in this mode.
        Some("state") => 1,
        Some("all") => max_entries.max(1),
        Some(other) => {
            let text = format!("enabled is '{other}', expected None, 'state' or 'all'");
            return Err(PyRuntimeError::new_err(text));
        }
    };
    let level = Level::named(context).ok_or_else(|| {
        let context = context.unwrap_or_default();
        let text = format!("context is '{context}', expected None, 'state', 'alloc' or 'all'");
        PyRuntimeError::new_err(text)
    })?;
    let is_skipped = |action: &Action| skip_actions.iter().any(|name| name == action.name());
    let skip = Action::ALL.into_iter().filter(is_skipped).collect();
    py.detach(|| devices().record_history(&HistoryPlan { entries, skip }, clear_history));
    recorder::set_level(if entries > 0 { level } else { Level::Never });
    // Earlier stacks may be unused now. If less is recorded from here on, no later sweep may come.
    recorder::sweep(py);
    Ok(())
}

/// Returns the Python stack of a live allocation.
#[pyfunction]
pub(crate) fn allocation_traceback(
    py: Python<'_>,
    address: u64,
) -> PyResult<Option<Bound<'_, PyList>>> {
    let _reading = Reading::begin();
    let tag = py.detach(|| devices().made().find_map(|(_, engine)| engine.tag_of(address)));
    let stack = tag.and_then(recorder::stack_of);
    stack.map(|stack| stacks::show(py, stack)).transpose()
}

/// Notes `metadata` beside every later allocation.
#[pyfunction]
pub(crate) fn set_metadata(py: Python<'_>, metadata: &str) {
    recorder::set_metadata(py, metadata);
}

/// Returns the metadata that is noted beside every allocation now.
#[pyfunction]
pub(crate) fn metadata() -> String {
    recorder::metadata()
}

/// Returns the number of stacks and of metadata texts that are kept. Some may be unused until the
/// next sweep.
#[pyfunction]
pub(crate) fn kept_notes() -> (usize, usize) {
    recorder::kept()
}
