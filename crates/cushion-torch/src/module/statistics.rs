//! Figures of a device, the release of its cache, and its limit.

use std::time::Duration;

use cushion::{DeviceEngine, devices};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::entry::plugin;
use crate::history::recorder;
use crate::module::errors::engine;

/// Returns the figures of a device, nested as PyTorch's are.
#[pyfunction]
#[pyo3(signature = (device, by_private_pools=false))]
pub(crate) fn memory_stats(
    py: Python<'_>,
    device: i64,
    by_private_pools: bool,
) -> PyResult<Bound<'_, PyDict>> {
    let stats = engine(device)?.map(DeviceEngine::stats).unwrap_or_default();
    let nested = nest(py, stats.flat())?;
    if by_private_pools {
        let pools = PyDict::new(py);
        for (pool, reserved) in &stats.reserved_bytes_by_private_pools {
            pools.set_item((pool.0, pool.1), nest(py, reserved.flat())?)?;
        }
        nested.set_item("reserved_bytes_by_private_pools", pools)?;
    }
    Ok(nested)
}

/// Turns keys with dots into nested dicts.
fn nest(py: Python<'_>, flat: Vec<(String, i64)>) -> PyResult<Bound<'_, PyDict>> {
    let nested = PyDict::new(py);
    for (key, value) in flat {
        let mut dict = nested.clone();
        let mut parts = key.split('.').peekable();
        while let Some(part) = parts.next() {
            if parts.peek().is_none() {
                dict.set_item(part, value)?;
                break;
            }
            dict = match dict.get_item(part)? {
                Some(inner) => inner.cast_into::<PyDict>()?,
                None => {
                    let inner = PyDict::new(py);
                    dict.set_item(part, &inner)?;
                    inner
                }
            };
        }
    }
    Ok(nested)
}

/// Returns Cushion's own figures of a device, which `torch.cuda.memory_stats()` does not have.
#[pyfunction]
#[pyo3(signature = (device=0))]
pub(crate) fn stats(py: Python<'_>, device: i64) -> PyResult<Bound<'_, PyDict>> {
    let stats = engine(device)?.map(DeviceEngine::stats).unwrap_or_default();
    let result = PyDict::new(py);
    result.set_item("hits", stats.hits)?;
    result.set_item("misses", stats.misses)?;
    result.set_item("cached_bytes", stats.cached_bytes())?;
    result.set_item("largest_free_block", stats.largest_free_block())?;
    result.set_item("blocks", stats.blocks())?;
    result.set_item("free_blocks", stats.free_blocks())?;
    result.set_item("shortages", stats.shortages)?;
    result.set_item("shortages_survived", stats.shortages_survived)?;
    result.set_item("shortages_refused", stats.shortages_refused)?;
    let lost = Duration::from_nanos(stats.shortage_nanos);
    result.set_item("shortage_seconds", lost.as_secs_f64())?;
    result.set_item("spilled_bytes", stats.spilled_bytes.current)?;
    result.set_item("spilled_bytes_peak", stats.spilled_bytes.peak)?;
    let engine = devices().get(device);
    result.set_item("waiting", engine.map_or(0, DeviceEngine::waiting))?;
    result.set_item("receipts_lost", engine.map_or(0, |it| cushion::lost_receipts(it).count))?;
    Ok(result)
}

/// Sets the peaks of a device to the current values.
#[pyfunction]
pub(crate) fn reset_peak_memory_stats(py: Python<'_>, device: i64) -> PyResult<()> {
    let engine = engine(device)?;
    py.detach(|| engine.map(DeviceEngine::reset_peak_stats));
    Ok(())
}

/// Sets the totals of a device to zero.
#[pyfunction]
pub(crate) fn reset_accumulated_memory_stats(py: Python<'_>, device: i64) -> PyResult<()> {
    let engine = engine(device)?;
    py.detach(|| engine.map(DeviceEngine::reset_accumulated_stats));
    Ok(())
}

/// Returns the fraction of a device that this process may reserve.
#[pyfunction]
pub(crate) fn memory_fraction(py: Python<'_>, device: i64) -> PyResult<f64> {
    let engine = engine(device)?;
    Ok(py.detach(|| match engine {
        Some(engine) => engine.memory_fraction(),
        None => devices().options().per_process_memory_fraction,
    }))
}

/// Releases cached memory on every device, and the history notes that nothing refers to.
#[pyfunction]
pub(crate) fn empty_cache(py: Python<'_>) -> PyResult<()> {
    let emptied = py.detach(plugin::empty_cache);
    recorder::sweep(py);
    emptied.map_err(|failure| PyRuntimeError::new_err(failure.message().to_owned()))
}

/// Checks the invariants of the engine of a device. A violation is a RuntimeError.
#[pyfunction]
pub(crate) fn check_invariants(py: Python<'_>, device: i64) -> PyResult<()> {
    let engine = engine(device)?;
    let checked = py.detach(|| engine.map_or(Ok(()), DeviceEngine::check_invariants));
    checked.map_err(|violation| PyRuntimeError::new_err(format!("Cushion: {violation}")))
}
