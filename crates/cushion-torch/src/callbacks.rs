//! What a Python program does about a shortage: its callbacks, and its last call before a refusal.
//!
//! A callback runs on the thread that is short of memory, which has given Python's lock up and holds none of Cushion's; for
//! a thread that Python does not know, on one of ours (`gil.rs`).

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use cushion::core::{
    Callback, CallbackId, Driver as _, Owner, Plea, Receipt, Reply, current_owner, is_in_callback,
    note_waiting_in_callback,
};
use cushion::{DeviceEngine, devices};
use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;

use crate::{gil, lock, receipts};

/// How long a callback waits for Python's lock.
const PATIENCE: Duration = Duration::from_secs(2);
const LEAST_PATIENCE: Duration = Duration::from_millis(100);

// ---- on a shortage ----

/// A callback of Python's, and its number on each engine.
struct Registered {
    callback: Arc<Callback>,
    on: BTreeMap<u32, CallbackId>,
}

static CALLBACKS: Mutex<BTreeMap<u64, Registered>> = Mutex::new(BTreeMap::new());
static NUMBERS: AtomicU64 = AtomicU64::new(0);

/// Holds what is registered here, while this process forks.
pub(crate) fn hold() -> impl Sized + 'static {
    (lock(&CALLBACKS), lock(&LAST_CALLS), lock(&EXPECTING))
}

fn next_number() -> u64 {
    NUMBERS.fetch_add(1, Ordering::Relaxed) + 1
}

/// Lets an engine ask every callback that it does not ask yet.
pub(crate) fn add_to(engine: &DeviceEngine) {
    let device = engine.driver().properties().device;
    for registered in lock(&CALLBACKS).values_mut() {
        let callback = &registered.callback;
        registered.on.entry(device).or_insert_with(|| engine.add_callback(Arc::clone(callback)));
    }
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

/// Takes a callback away; false if it is gone already. One that runs now runs on.
#[pyfunction]
pub(crate) fn remove_callback(py: Python<'_>, number: u64) -> bool {
    let removed = py.detach(|| {
        let removed = lock(&CALLBACKS).remove(&number)?;
        // An engine that is being made may have it already: it is dropped there when it would be called.
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
    py.detach(|| lock(&CALLBACKS).get(&number).is_some_and(|it| !it.callback.is_off()))
}

/// Asks a function of Python's. What it returns, and what it raises, is for the receipt.
#[expect(clippy::disallowed_methods, reason = "a Python program lives on real time")]
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
        // That Python's lock was not to be had at once is not its fault.
        note_waiting_in_callback(*waited);
    }
    match reply {
        Some(reply) => reply,
        None if called.get().is_some() => {
            Reply::Failed("it was not waited for any longer, and goes on by itself".to_owned())
        }
        None => Reply::NotCalled(format!(
            "it was not called: Python's lock was not to be had in {:.1} s",
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
            note_interrupt(py, &error);
            Reply::Failed(receipts::explain(py, &error))
        }
    }
}

// ---- Ctrl-C ----

/// Whether Ctrl-C was pressed while a function of Python's ran here: it was meant for the program.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// An exception that goes no further: if it is Ctrl-C, the program gets it later.
pub(crate) fn note_interrupt(py: Python<'_>, error: &PyErr) {
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

/// Tells Python of an exception that nobody can catch.
pub(crate) fn show(py: Python<'_>, error: PyErr, raised_by: &Bound<'_, PyAny>) {
    note_interrupt(py, &error);
    error.write_unraisable(py, Some(raised_by));
}

// ---- before a refusal ----

static LAST_CALLS: Mutex<Vec<(u64, Py<PyAny>)>> = Mutex::new(Vec::new());

/// How long a last call waits for Python's lock, and how long it may take where the thread cannot make it itself.
const LAST_PATIENCE: Duration = Duration::from_secs(10);
const LAST_BUDGET: Duration = Duration::from_secs(600);

/// Who expects refusals, and how often over.
static EXPECTING: Mutex<BTreeMap<Owner, u32>> = Mutex::new(BTreeMap::new());

thread_local! {
    /// As whom this thread expects refusals, the latest last: it may work for somebody else by now.
    static EXPECTED: RefCell<Vec<Owner>> = const { RefCell::new(Vec::new()) };
    static IN_LAST_CALL: Cell<bool> = const { Cell::new(false) };
}

/// Calls `function(receipt)` before an allocation is refused that nobody expects to be; the receipt is JSON. Returns its
/// number.
#[pyfunction]
pub(crate) fn add_last_call(function: Py<PyAny>) -> u64 {
    let number = next_number();
    lock(&LAST_CALLS).push((number, function));
    number
}

/// Takes a last call away; false if it is gone already.
#[pyfunction]
pub(crate) fn remove_last_call(number: u64) -> bool {
    let mut calls = lock(&LAST_CALLS);
    let index = calls.iter().position(|(other, _)| *other == number);
    let removed = index.map(|index| calls.remove(index));
    drop(calls);
    removed.is_some()
}

/// From now on, or no longer, this thread expects allocations to be refused, and tries again: that is no end. Holds for
/// PyTorch's threads that compute its gradients, too.
#[pyfunction]
pub(crate) fn expect_refusals(expect: bool) {
    let mut expecting = lock(&EXPECTING);
    if expect {
        let owner = current_owner();
        EXPECTED.with_borrow_mut(|expected| expected.push(owner));
        *expecting.entry(owner).or_default() += 1;
    } else if let Some(owner) = EXPECTED.with_borrow_mut(Vec::pop)
        && let Some(count) = expecting.get_mut(&owner)
    {
        *count -= 1;
        if *count == 0 {
            expecting.remove(&owner);
        }
    }
}

/// Who expected the refusal of this receipt has given up.
#[pyfunction]
pub(crate) fn refuse_after_all(device: i64, number: u64) {
    let receipt = devices().get(device).and_then(|engine| receipts::find(engine, number));
    if let Some(receipt) = receipt {
        call_last(&receipt);
    }
    pass_on_interrupt();
}

/// Whether somebody tries again after the refusal of this receipt: who asked, or the thread that asked for them.
fn is_expected(receipt: &Receipt) -> bool {
    EXPECTED.with_borrow(|expected| !expected.is_empty())
        || lock(&EXPECTING).contains_key(&receipt.owner)
}

/// The program's last calls, before the refusal of this receipt is raised.
pub(crate) fn call_last(receipt: &Receipt) {
    // With nobody to tell, Python's lock is not taken. What a callback is refused is no end either.
    if lock(&LAST_CALLS).is_empty()
        || is_in_callback()
        || is_expected(receipt)
        || IN_LAST_CALL.replace(true)
    {
        return;
    }
    let text = receipts::json(receipt);
    gil::attach_within(LAST_PATIENCE, LAST_BUDGET, move |py| {
        // Of this thread, which may not be the one that was refused.
        let before = IN_LAST_CALL.replace(true);
        // Copied: Python runs below, and no lock of ours may be held while it does.
        let called: Vec<_> = lock(&LAST_CALLS).iter().map(|(_, call)| call.clone_ref(py)).collect();
        for call in called {
            if let Err(error) = call.call1(py, (&text,)) {
                show(py, error, call.bind(py));
            }
        }
        IN_LAST_CALL.set(before);
    });
    IN_LAST_CALL.set(false);
}
