//! A refused allocation: it tells the observers, makes the last calls of the program, and returns
//! the error with its message and its receipt.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use cushion::core::driver::Fault;
use cushion::core::{AllocError, Receipt, Shortage};
use cushion::{DeviceError, devices};
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::process::lock;
use crate::python::{exceptions, gil};
use crate::pytorch::profiler::{self, Totals};
use crate::pytorch::throw::Failure;
use crate::shortage::refusals::Refusals;
use crate::shortage::{last_calls, message, receipts};

/// How long a refusal waits for Python's lock before it skips the observers.
const PATIENCE: Duration = Duration::from_secs(2);

static OBSERVERS: Mutex<Vec<Py<PyAny>>> = Mutex::new(Vec::new());
static REFUSALS: Mutex<Refusals<Receipt>> = Mutex::new(Refusals::new());

/// Locks the observers and the latest refusals while this process forks.
pub(crate) fn hold() -> impl Sized + 'static {
    (lock(&OBSERVERS), lock(&REFUSALS))
}

/// Calls `observer(device, bytes, limit, free)` at every later refusal, before the error is raised.
pub(crate) fn observe(observer: Py<PyAny>) {
    lock(&OBSERVERS).push(observer);
}

/// Returns the receipt of the refusal that the text of an exception belongs to, if it is one of the
/// latest refusals of this process.
pub(crate) fn receipt_of(text: &Bound<'_, PyString>) -> Option<Arc<Receipt>> {
    // A child made by fork has no engines: the exceptions of its parent are not its own.
    if devices().is_abandoned() {
        return None;
    }
    // A text that is not UTF-8 is not from here.
    let text = text.to_cow().ok()?;
    lock(&REFUSALS).find(&text)
}

/// Returns the error for a request of a device that cannot be used.
#[cold]
pub(crate) fn no_device(device: i64, error: &DeviceError) -> Failure {
    Failure::Other(format!("Cushion cannot use GPU {device}: {error}"))
}

/// Returns the error for a refused request. The caller holds no lock of Cushion.
#[cold]
pub(crate) fn refused(device: i64, error: &AllocError) -> Failure {
    let Some(shortage) = error.shortage() else {
        return Failure::Other(format!("Cushion on GPU {device}: {}", explain(error)));
    };
    let engine = devices().get(device);
    // Before the observers run: a refusal inside of one is the latest of this thread then.
    let receipt = engine.and_then(|engine| receipts::find(engine, shortage.receipt));
    if let Some(profiler) = profiler::recording() {
        let &Shortage { allocated, reserved, .. } = shortage;
        profiler.out_of_memory(shortage.wanted, device, Totals { allocated, reserved });
    }
    let free = shortage.device_free.unwrap_or(0);
    let limit = shortage.allowed.unwrap_or(shortage.device_total);
    tell(device, shortage.wanted, limit, free);
    if let Some(receipt) = &receipt {
        last_calls::call_last(receipt);
    }
    // Listing the processes takes milliseconds, so it is done only if others hold much memory.
    let asked = engine.filter(|_| shortage.others >= message::WORTH_TELLING);
    let processes = asked.map(|engine| engine.driver().processes()).unwrap_or_default();
    let message = message::message(device, error, shortage, receipt.as_deref(), &processes);
    // A C++ exception cannot carry a nul, and its text has to stay the one that is noted here.
    let message = message.replace('\0', " ");
    if let Some(receipt) = &receipt {
        let (text, receipt, most) = (message.clone(), Arc::clone(receipt), receipts::most());
        lock(&REFUSALS).add(receipt.device, text, receipt, most);
    }
    Failure::OutOfMemory { message, receipt }
}

/// Calls the observers. Python shows an exception of an observer, and the refusal continues.
fn tell(device: i64, bytes: u64, limit: u64, free: u64) {
    // Without observers, Python's lock is not taken: the caller may hold a resource that the owner
    // of the lock waits for.
    if lock(&OBSERVERS).is_empty() {
        return;
    }
    gil::attach_within(PATIENCE, PATIENCE, move |py| {
        // Copied, because Python runs below, and no lock of Cushion may be held then.
        let told: Vec<_> = lock(&OBSERVERS).iter().map(|observer| observer.clone_ref(py)).collect();
        for observer in told {
            if let Err(error) = observer.call1(py, (device, bytes, limit, free)) {
                exceptions::show(py, error, observer.bind(py));
            }
        }
    });
}

/// Describes an error; an error of the CUDA driver by the driver's own name for it.
fn explain(error: &AllocError) -> String {
    if let AllocError::Driver(failed) = error
        && let Fault::Failed(code) = failed.fault
        && let Some(name) = cushion::error_name(code)
    {
        return format!("the CUDA driver's call {} failed with {name}", failed.call);
    }
    error.to_string()
}
