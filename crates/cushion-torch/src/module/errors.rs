//! Failures as Python exceptions.

use cushion::{CudaError, DeviceEngine, DeviceError, devices};
use pyo3::exceptions::{PyMemoryError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::entry::plugin;
use crate::pytorch::throw::Failure;
use crate::shortage::receipts;

/// The attribute of an exception that holds its receipt as JSON. `_receipts.py` reads it.
const RECEIPT: &str = "_cushion_receipt";

/// Returns the Python exception for a failure. An exception for a refusal carries its receipt.
pub(super) fn raised(py: Python<'_>, failure: Failure) -> PyErr {
    match failure {
        Failure::OutOfMemory { message, receipt } => {
            let error = out_of_memory(py, message);
            if let Some(receipt) = receipt {
                // The receipt is also found by the text, so a failure here loses nothing.
                let _ = error.value(py).setattr(RECEIPT, receipts::json(&receipt));
            }
            error
        }
        Failure::Other(message) => PyRuntimeError::new_err(message),
    }
}

/// Returns PyTorch's exception for out of memory if PyTorch is loaded, and Cushion's otherwise.
fn out_of_memory(py: Python<'_>, message: String) -> PyErr {
    // The class is looked up in Rust. A Python function could be interrupted, and its exception
    // would replace this one.
    let class = || {
        let modules = py.import("sys")?.getattr("modules")?;
        let torch = modules.get_item("torch");
        // Up to 2.4 PyTorch has only the second name. Another thread may be importing PyTorch, so
        // that it has neither yet.
        let of_torch = torch.and_then(|torch| {
            let name = "OutOfMemoryError";
            torch.getattr(name).or_else(|_| torch.getattr("cuda")?.getattr(name))
        });
        of_torch.or_else(|_| modules.get_item("cushion._receipts")?.getattr("OutOfMemoryError"))
    };
    match class().and_then(|class| class.call1((&message,))) {
        Ok(error) => PyErr::from_value(error),
        Err(_) => PyMemoryError::new_err(message),
    }
}

/// Returns the engine of a device, and makes it if there is none. A device that does not exist is a
/// ValueError; one that cannot be used is a RuntimeError.
pub(super) fn usable(device: i64) -> PyResult<&'static DeviceEngine> {
    devices().get_or_make(device).map_err(|error| {
        let text = format!("Cushion cannot use GPU {device}: {error}");
        match error {
            DeviceError::OutOfRange(_) | DeviceError::Cuda(CudaError::NoSuchDevice { .. }) => {
                PyValueError::new_err(text)
            }
            _ => PyRuntimeError::new_err(text),
        }
    })
}

/// Returns the engine of a device, if it has one. A device that does not exist is a RuntimeError.
pub(super) fn engine(device: i64) -> PyResult<Option<&'static DeviceEngine>> {
    // Until PyTorch has counted its devices, every number is accepted.
    let known = Some(plugin::device_count()).filter(|&count| count > 0);
    let count = known.unwrap_or(cushion::MAX_DEVICES);
    if usize::try_from(device).is_ok_and(|device| device < count) {
        return Ok(devices().get(device));
    }
    Err(PyRuntimeError::new_err(format!("no device {device}: the number of devices is {count}")))
}
