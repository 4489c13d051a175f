//! The process: simulated devices, the end of Python, the addresses for PyTorch, and the command
//! line.

use std::collections::HashMap;
use std::ffi::OsString;

use cushion::core::parse_bytes;
use cushion::devices;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::entry::abi;
use crate::python::gil;

/// Simulates all devices, each of `size`, such as `16GiB`.
#[pyfunction]
pub(crate) fn simulate(py: Python<'_>, size: &str) -> PyResult<()> {
    let capacity = parse_bytes(size).map_err(PyValueError::new_err)?;
    let simulated = py.detach(|| devices().simulate(capacity));
    simulated.map_err(|error| PyRuntimeError::new_err(format!("Cushion: {error}")))
}

/// Whether devices are simulated.
#[pyfunction]
pub(crate) fn is_simulated(py: Python<'_>) -> bool {
    py.detach(|| devices().are_simulated())
}

/// Ends all calls into Python, which is shutting down.
#[pyfunction]
pub(crate) fn stop(py: Python<'_>) {
    py.detach(gil::stop);
}

/// Returns the addresses of the plug-in's functions, by the names of PyTorch's setters.
#[pyfunction]
pub(crate) fn hooks() -> HashMap<&'static str, usize> {
    abi::hooks().into_iter().map(|(name, hook)| (name, hook.expose_provenance())).collect()
}

/// Runs the command line `args`, program name first. Returns the exit code.
#[pyfunction]
pub(crate) fn command(py: Python<'_>, args: Vec<Bound<'_, PyString>>) -> PyResult<u8> {
    let args: Vec<OsString> = args.iter().map(|arg| arg.extract()).collect::<PyResult<_>>()?;
    Ok(py.detach(|| cushion_cli::run(args)))
}
