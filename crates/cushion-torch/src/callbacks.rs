//! What a Python program does about a shortage: its callbacks, and its last call before a refusal.
//!
//! A callback runs on the thread that is short of memory, which has given Python's lock up and holds none of
//! Cushion's. One that belongs to no engine yet is asked by each as it is made.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cushion::core::{Callback, CallbackId, Plea, Receipt, Reply};
use cushion::{DeviceEngine, devices};
use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;

use crate::{gil, receipts, threads};

/// How long a callback waits for Python's lock.
const PATIENCE: Duration = Duration::from_secs(2);

// ---- on a shortage ----

/// A callback of Python's, and its number on each engine.
struct Registered {
    callback: Arc<Callback>,
    on: BTreeMap<u32, CallbackId>,
}

static CALLBACKS: Mutex<BTreeMap<u64, Registered>> = Mutex::new(BTreeMap::new());
static NUMBERS: AtomicU64 = AtomicU64::new(0);

fn callbacks() -> std::sync::MutexGuard<'static, BTreeMap<u64, Registered>> {
    CALLBACKS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Calls `function(device, bytes, seconds_left)` when memory runs out, on every device; returns its number. It may
/// take `budget_ms`, or as long as the request may still wait.
#[pyfunction]
#[pyo3(signature = (function, name, priority=0, budget_ms=None))]
pub(crate) fn add_callback(
    py: Python<'_>,
    function: Py<PyAny>,
    name: String,
    priority: i32,
    budget_ms: Option<u64>,
) -> u64 {
    let callback = Callback::new(name, priority, move |plea| ask(&function, plea));
    let callback = Arc::new(match budget_ms {
        Some(ms) => callback.with_budget(Duration::from_millis(ms)),
        None => callback,
    });
    let number = NUMBERS.fetch_add(1, Ordering::Relaxed) + 1;
    py.detach(|| {
        callbacks().insert(number, Registered { callback, on: BTreeMap::new() });
        devices().for_each(move |engine| add_to(engine, number));
    });
    number
}

/// Lets an engine ask a callback, unless it was taken away.
fn add_to(engine: &DeviceEngine, number: u64) {
    use cushion::core::Driver as _;

    if let Some(registered) = callbacks().get_mut(&number) {
        let id = engine.add_callback(Arc::clone(&registered.callback));
        registered.on.insert(engine.driver().properties().device, id);
    }
}

/// Takes a callback away; false if it is gone already. One that runs now runs on.
#[pyfunction]
pub(crate) fn remove_callback(py: Python<'_>, number: u64) -> bool {
    let removed = py.detach(|| {
        let removed = callbacks().remove(&number)?;
        removed.callback.switch_off();
        for (device, id) in &removed.on {
            if let Some(engine) = devices().get(i64::from(*device)) {
                engine.remove_callback(*id);
            }
        }
        Some(removed)
    });
    // What it holds of Python's goes with Python's lock held.
    removed.is_some()
}

/// Whether a callback is there and was not switched off for taking too long.
#[pyfunction]
pub(crate) fn is_callback_on(py: Python<'_>, number: u64) -> bool {
    py.detach(|| callbacks().get(&number).is_some_and(|it| !it.callback.is_off()))
}

/// Asks a function of Python's. What it returns, and what it raises, is for the receipt.
fn ask(function: &Py<PyAny>, plea: &Plea) -> Reply {
    let asked = gil::attach_within(PATIENCE.min(plea.time_left), |py| {
        let told = (plea.device, plea.bytes, plea.time_left.as_secs_f64());
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
                note_interrupt(py, &error);
                Reply::Failed(receipts::explain(py, &error))
            }
        }
    });
    let waited = PATIENCE.min(plea.time_left).as_secs_f64();
    asked.unwrap_or_else(|| {
        Reply::Failed(format!(
            "it was not called: Python's lock was not to be had in {waited:.1} s"
        ))
    })
}

/// Whether Ctrl-C was pressed while a function of Python's ran here: it was meant for the program.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

fn note_interrupt(py: Python<'_>, error: &PyErr) {
    if error.is_instance_of::<PyKeyboardInterrupt>(py) {
        INTERRUPTED.store(true, Ordering::Relaxed);
    }
}

/// The program gets its Ctrl-C, if a function that was called here got it: the main thread raises
/// `KeyboardInterrupt` when it runs Python next. Called last of all, so that no other function here gets it again.
pub(crate) fn pass_on_interrupt() {
    if INTERRUPTED.load(Ordering::Relaxed)
        && INTERRUPTED.swap(false, Ordering::Relaxed)
        && gil::is_running()
    {
        // SAFETY: it has no precondition while the interpreter runs.
        unsafe { pyo3::ffi::PyErr_SetInterrupt() };
    }
}

// ---- before a refusal ----

static LAST_CALLS: Mutex<Vec<(u64, Py<PyAny>)>> = Mutex::new(Vec::new());

/// How long a last call waits for Python's lock.
const LAST_PATIENCE: Duration = Duration::from_secs(10);

thread_local! {
    static EXPECTED: Cell<u32> = const { Cell::new(0) };
    static IN_LAST_CALL: Cell<bool> = const { Cell::new(false) };
}

/// How many threads expect refusals.
static EXPECTING: AtomicUsize = AtomicUsize::new(0);

fn last_calls() -> std::sync::MutexGuard<'static, Vec<(u64, Py<PyAny>)>> {
    LAST_CALLS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Calls `function(receipt)` before an allocation is refused that nobody expects to be; the receipt is JSON. Returns its
/// number.
#[pyfunction]
pub(crate) fn add_last_call(function: Py<PyAny>) -> u64 {
    let number = NUMBERS.fetch_add(1, Ordering::Relaxed) + 1;
    last_calls().push((number, function));
    number
}

/// Takes a last call away; false if it is gone already.
#[pyfunction]
pub(crate) fn remove_last_call(number: u64) -> bool {
    let mut calls = last_calls();
    let index = calls.iter().position(|(other, _)| *other == number);
    let removed = index.map(|index| calls.remove(index));
    drop(calls);
    removed.is_some()
}

/// From now on, or no longer, this thread expects allocations to be refused, and tries again: that is no end.
#[pyfunction]
pub(crate) fn expect_refusals(expect: bool) {
    if expect {
        EXPECTED.set(EXPECTED.get() + 1);
        EXPECTING.fetch_add(1, Ordering::Relaxed);
    } else if EXPECTED.get() > 0 {
        EXPECTED.set(EXPECTED.get() - 1);
        EXPECTING.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Whether somebody tries again if this thread is refused. PyTorch's threads for gradients work for whoever does.
fn is_expected() -> bool {
    EXPECTED.get() > 0 || EXPECTING.load(Ordering::Relaxed) > 0 && threads::computes_gradients()
}

/// Who expected the refusal of this receipt has given up.
#[pyfunction]
pub(crate) fn refuse_after_all(device: i64, number: u64) {
    let receipt = devices().get(device).and_then(|engine| engine.receipt(number));
    if let Some(receipt) = receipt {
        call_last(&receipt);
    }
}

/// The program's last calls, before the refusal of this receipt is raised.
pub(crate) fn call_last(receipt: &Receipt) {
    // With nobody to tell, Python's lock is not taken.
    if last_calls().is_empty() || is_expected() || IN_LAST_CALL.replace(true) {
        return;
    }
    let text = receipts::json(receipt);
    gil::attach_within(LAST_PATIENCE, |py| {
        // Copied: Python runs below, and no lock of ours may be held while it does.
        let called: Vec<_> = last_calls().iter().map(|(_, call)| call.clone_ref(py)).collect();
        for call in called {
            if let Err(error) = call.call1(py, (&text,)) {
                note_interrupt(py, &error);
                error.write_unraisable(py, Some(call.bind(py)));
            }
        }
    });
    IN_LAST_CALL.set(false);
}
