//! The callbacks of a Python program, which free memory during a shortage.
//!
//! A callback runs on the thread that is short of memory. That thread has released Python's lock
//! and holds no lock of Cushion. For a thread that Python does not know, a thread of Cushion runs
//! the callback (`gil.rs`).

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use cushion::core::{Callback, CallbackId, Driver as _, Plea, Reply, note_waiting_in_callback};
use cushion::{DeviceEngine, devices};
use pyo3::prelude::*;

use crate::process::lock;
use crate::python::{exceptions, gil};

/// The longest and the shortest wait of a callback for Python's lock.
const PATIENCE: Duration = Duration::from_secs(2);
const LEAST_PATIENCE: Duration = Duration::from_millis(100);

/// A Python callback, and its id on the engine of each device.
struct Registered {
    callback: Arc<Callback>,
    on: BTreeMap<u32, CallbackId>,
}

static CALLBACKS: Mutex<BTreeMap<u64, Registered>> = Mutex::new(BTreeMap::new());
static NUMBERS: AtomicU64 = AtomicU64::new(0);

/// Locks the callbacks while this process forks.
pub(crate) fn hold() -> impl Sized + 'static {
    lock(&CALLBACKS)
}

/// Returns a number that no callback and no last call has.
pub(crate) fn next_number() -> u64 {
    NUMBERS.fetch_add(1, Ordering::Relaxed) + 1
}

/// Registers every callback with an engine that does not have it yet.
pub(crate) fn add_to(engine: &DeviceEngine) {
    let device = engine.driver().properties().device;
    for registered in lock(&CALLBACKS).values_mut() {
        let callback = &registered.callback;
        registered.on.entry(device).or_insert_with(|| engine.add_callback(Arc::clone(callback)));
    }
}

/// Calls `function(device, bytes, seconds_left)` when memory runs out, on every device. Returns the
/// number of the callback. It may take `budget_ms`, or as long as the request may still wait.
#[pyfunction]
#[pyo3(signature = (function, name, priority=0, budget_ms=None))]
pub(crate) fn add_callback(
    py: Python<'_>,
    function: Py<PyAny>,
    name: String,
    priority: i32,
    budget_ms: Option<u64>,
) -> u64 {
    let function = Arc::new(function);
    let callback = Callback::new(name, priority, move |plea| ask(&function, plea));
    let callback = Arc::new(match budget_ms {
        Some(ms) => callback.with_budget(Duration::from_millis(ms)),
        None => callback,
    });
    let number = next_number();
    py.detach(|| {
        lock(&CALLBACKS).insert(number, Registered { callback, on: BTreeMap::new() });
        devices().made().for_each(|(_, engine)| add_to(engine));
    });
    number
}

/// Removes a callback; returns false if it was removed before. A call that is under way continues.
#[pyfunction]
pub(crate) fn remove_callback(py: Python<'_>, number: u64) -> bool {
    let removed = py.detach(|| {
        let removed = lock(&CALLBACKS).remove(&number)?;
        // An engine that is being made may have the callback already. It drops a callback that is
        // switched off when it would call it.
        removed.callback.switch_off();
        for (device, id) in &removed.on {
            if let Some(engine) = devices().get(i64::from(*device)) {
                engine.remove_callback(*id);
            }
        }
        Some(removed)
    });
    // The Python function is dropped here, with Python's lock held.
    removed.is_some()
}

/// Whether a callback is registered and was not switched off because it took too long.
#[pyfunction]
pub(crate) fn is_callback_on(py: Python<'_>, number: u64) -> bool {
    py.detach(|| lock(&CALLBACKS).get(&number).is_some_and(|it| !it.callback.is_off()))
}

/// Calls a Python function. The receipt shows its return value or its exception.
#[expect(clippy::disallowed_methods, reason = "a Python program runs on real time")]
fn ask(function: &Arc<Py<PyAny>>, plea: &Plea) -> Reply {
    let (plea, function, asked) = (*plea, Arc::clone(function), Instant::now());
    let patience = plea.time_left.clamp(LEAST_PATIENCE, PATIENCE);
    let called = Arc::new(OnceLock::new());
    let begins = Arc::clone(&called);
    let reply = gil::attach_within(patience, plea.time_left, move |py| {
        let _ = begins.set(asked.elapsed());
        call(py, &function, (plea.device, plea.bytes, plea.time_left.as_secs_f64()))
    });
    if let Some(waited) = called.get() {
        // The wait for Python's lock does not count as time of the callback.
        note_waiting_in_callback(*waited);
    }
    match reply {
        Some(reply) => reply,
        None if called.get().is_some() => {
            Reply::Failed("it took too long, and still runs on another thread".to_owned())
        }
        None => Reply::NotCalled(format!(
            "it was not called: Python's lock was not free within {:.1} s",
            patience.as_secs_f64()
        )),
    }
}

fn call(py: Python<'_>, function: &Py<PyAny>, told: (u32, u64, f64)) -> Reply {
    let said = function.call1(py, told).and_then(|said| {
        if said.is_none(py) {
            return Ok(None);
        }
        Ok(Some(said.bind(py).str()?.to_string_lossy().into_owned()))
    });
    match said {
        Ok(None) => Reply::Nothing,
        Ok(Some(text)) => Reply::Said(text),
        Err(error) => {
            exceptions::note_interrupt(py, &error);
            Reply::Failed(exceptions::explain(py, &error))
        }
    }
}
