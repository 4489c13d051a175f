//! What a refused allocation does: it tells the observers, lets the program make its last calls, and says why.
//!
//! The message is `message.rs`'s.

use std::sync::Mutex;
use std::time::Duration;

use cushion::core::{AllocError, Shortage};
use cushion::{DeviceError, devices};
use pyo3::prelude::*;

use crate::profiler::{self, Totals};
use crate::throw::Failure;
use crate::{callbacks, gil, lock, message, plugin, receipts};

/// How long a refusal waits for Python's lock, to tell of it.
const PATIENCE: Duration = Duration::from_secs(2);

static OBSERVERS: Mutex<Vec<Py<PyAny>>> = Mutex::new(Vec::new());

/// Holds the observers, while this process forks.
pub(crate) fn hold() -> impl Sized + 'static {
    lock(&OBSERVERS)
}

/// Calls `observer(device, bytes, limit, free)` at every refusal from now on, before the error is raised.
pub(crate) fn observe(observer: Py<PyAny>) {
    lock(&OBSERVERS).push(observer);
}

/// A request of a device that cannot be used.
#[cold]
pub(crate) fn no_device(device: i64, error: &DeviceError) -> Failure {
    Failure::Other(format!("Cushion cannot use GPU {device}: {error}"))
}

/// A request was refused. No lock of Cushion's is held.
#[cold]
pub(crate) fn refused(device: i64, error: &AllocError) -> Failure {
    let Some(shortage) = error.shortage() else {
        return Failure::Other(format!("Cushion on GPU {device}: {}", plugin::explain(error)));
    };
    if let Some(profiler) = profiler::recording() {
        let &Shortage { allocated, reserved, .. } = shortage;
        profiler.out_of_memory(shortage.wanted, device, Totals { allocated, reserved });
    }
    let free = shortage.device_free.unwrap_or(0);
    let limit = shortage.allowed.unwrap_or(shortage.device_total);
    tell(device, shortage.wanted, limit, free);
    let engine = devices().get(device);
    let receipt = engine.and_then(|engine| receipts::find(engine, shortage.receipt));
    if let Some(receipt) = &receipt {
        callbacks::call_last(receipt);
    }
    // It takes milliseconds: only where others are in the way.
    let asked = engine.filter(|_| shortage.others >= message::WORTH_TELLING);
    let processes = asked.map(|engine| engine.driver().processes()).unwrap_or_default();
    Failure::OutOfMemory(message::message(device, error, shortage, receipt.as_deref(), &processes))
}

/// Tells the observers. What they raise is shown by Python as errors that nobody can catch are, and the
/// refusal goes on: the program is to see that memory ran out.
fn tell(device: i64, bytes: u64, limit: u64, free: u64) {
    // With nobody to tell, Python's lock is not taken: the caller may hold what its owner waits for.
    if lock(&OBSERVERS).is_empty() {
        return;
    }
    gil::attach_within(PATIENCE, PATIENCE, move |py| {
        // Copied: Python runs below, and no lock of ours may be held while it does.
        let told: Vec<_> = lock(&OBSERVERS).iter().map(|observer| observer.clone_ref(py)).collect();
        for observer in told {
            if let Err(error) = observer.call1(py, (device, bytes, limit, free)) {
                callbacks::show(py, error, observer.bind(py));
            }
        }
    });
}
