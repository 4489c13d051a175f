//! Memory that Python allocates itself, and lookups by address.

use cushion::core::{Driver as _, StreamId, parse_bytes};
use cushion::devices;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::entry::futures::{self, Pending};
use crate::entry::plugin;
use crate::history::recorder::{self, Level};
use crate::module::errors::{raised, usable};
use crate::python::exceptions::pass_on_interrupt;
use crate::shortage::refusal;

/// Allocates memory that belongs to no tensor. Returns the address of `bytes` bytes for work on
/// `stream`.
#[pyfunction]
#[pyo3(signature = (bytes, device=0, stream=0))]
pub(crate) fn allocate(py: Python<'_>, bytes: u64, device: i64, stream: u64) -> PyResult<u64> {
    let noted = recorder::note(Level::State);
    let served = py.detach(|| {
        usable(device)?;
        Ok::<_, PyErr>(plugin::alloc_for(bytes, device, StreamId(stream), &noted))
    })?;
    let served = served.map_err(|failure| raised(py, failure));
    pass_on_interrupt();
    served
}

/// Prepares memory: afterwards a request of `bytes` bytes on `stream` needs no call of the driver.
#[pyfunction]
#[pyo3(signature = (bytes, device=0, stream=0))]
pub(crate) fn prefetch(py: Python<'_>, bytes: u64, device: i64, stream: u64) -> PyResult<()> {
    let prepared = py.detach(|| {
        let engine = usable(device)?;
        let prepared = engine.prefetch(bytes, StreamId(stream));
        Ok::<_, PyErr>(prepared.map_err(|error| refusal::refused(device, &error)))
    })?;
    let prepared = prepared.map_err(|failure| raised(py, failure));
    pass_on_interrupt();
    prepared
}

/// Allocates as `allocate` does, without a waiting thread. Calls `done(address, None, False)` when
/// the request is served, and `done(None, why, is_out_of_memory)` when it is refused, on another
/// thread.
#[pyfunction]
#[pyo3(signature = (bytes, done, device=0, stream=0))]
pub(crate) fn allocate_later(
    py: Python<'_>,
    bytes: u64,
    done: Py<PyAny>,
    device: i64,
    stream: u64,
) -> PyResult<Pending> {
    let noted = recorder::note(Level::State);
    py.detach(|| {
        let request = usable(device)?.alloc_async_for(bytes, StreamId(stream), noted.tag());
        Ok::<_, PyErr>(futures::start(device, (request, noted), done))
    })?
    .map_err(|failure| raised(py, failure))
}

/// Frees memory of `allocate`, on any device.
#[pyfunction]
pub(crate) fn deallocate(py: Python<'_>, address: u64) -> PyResult<()> {
    let noted = recorder::note(Level::All);
    let freed = py.detach(|| plugin::free_for(address, &noted));
    freed.map_err(|error| PyValueError::new_err(format!("Cushion: {error}")))
}

/// Returns the device whose memory contains an address, live or cached; none if the address is not
/// Cushion's.
#[pyfunction]
pub(crate) fn device_of(py: Python<'_>, address: u64) -> Option<usize> {
    let holder = || devices().made().find(|(_, engine)| engine.holds(address));
    py.detach(|| holder().map(|(device, _)| device))
}

/// Returns the stream of a live allocation; none if the address is not Cushion's.
#[pyfunction]
pub(crate) fn stream_of(py: Python<'_>, address: u64) -> Option<u64> {
    let found = || devices().made().find_map(|(_, engine)| engine.stream_of(address));
    py.detach(|| found().map(|stream| stream.0))
}

/// Registers a stream that is never destroyed.
#[pyfunction]
pub(crate) fn add_lasting_stream(py: Python<'_>, stream: u64) {
    py.detach(|| devices().add_lasting_stream(StreamId(stream)));
}

/// Returns the bytes of a device that no process holds, and its size.
#[pyfunction]
#[pyo3(signature = (device=0))]
pub(crate) fn memory_info(py: Python<'_>, device: i64) -> PyResult<(u64, u64)> {
    let info = py.detach(|| Ok::<_, PyErr>(usable(device)?.driver().memory_info()))?;
    let info = info.map_err(|error| PyRuntimeError::new_err(format!("Cushion: {error}")))?;
    Ok((info.free, info.total))
}

/// Returns the devices that have an engine, in order.
#[pyfunction]
pub(crate) fn devices_in_use() -> Vec<usize> {
    devices().made().map(|(device, _)| device).collect()
}

/// Returns the bytes of a size such as `8GiB`.
#[pyfunction(name = "parse_bytes")]
pub(crate) fn bytes_of(size: &str) -> PyResult<u64> {
    parse_bytes(size).map_err(PyValueError::new_err)
}
