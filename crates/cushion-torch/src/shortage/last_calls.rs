//! The last calls of a Python program: they run before a refusal is raised, so that the program can
//! save its state.
//!
//! A refusal that the program expects, because it tries again, makes no last calls. If the program
//! gives up in the end, [`refuse_after_all`] makes them.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

use cushion::core::{Owner, Receipt, current_owner, is_in_callback};
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::process::lock;
use crate::python::{exceptions, gil};
use crate::shortage::callbacks::next_number;
use crate::shortage::{receipts, refusal};

static LAST_CALLS: Mutex<Vec<(u64, Py<PyAny>)>> = Mutex::new(Vec::new());

/// How long a last call waits for Python's lock, and how long it may take on another thread.
const LAST_PATIENCE: Duration = Duration::from_secs(10);
const LAST_BUDGET: Duration = Duration::from_secs(600);

/// The owners that expect refusals, with the number of open expectations of each.
static EXPECTING: Mutex<BTreeMap<Owner, u32>> = Mutex::new(BTreeMap::new());

thread_local! {
    /// The owners in whose name this thread expects refusals, latest last. The thread may work for
    /// another owner by now.
    static EXPECTED: RefCell<Vec<Owner>> = const { RefCell::new(Vec::new()) };
    /// Whether this thread makes last calls: a refusal inside of one makes none.
    static IN_LAST_CALL: Cell<bool> = const { Cell::new(false) };
}

/// Locks the last calls and the expectations while this process forks.
pub(crate) fn hold() -> impl Sized + 'static {
    (lock(&LAST_CALLS), lock(&EXPECTING))
}

/// Calls `function(receipt)` before each refusal that is not expected; the receipt is JSON. Returns
/// the number of the last call.
#[pyfunction]
pub(crate) fn add_last_call(function: Py<PyAny>) -> u64 {
    let number = next_number();
    lock(&LAST_CALLS).push((number, function));
    number
}

/// Removes a last call; returns false if it was removed before.
#[pyfunction]
pub(crate) fn remove_last_call(number: u64) -> bool {
    let mut calls = lock(&LAST_CALLS);
    let index = calls.iter().position(|(other, _)| *other == number);
    let removed = index.map(|index| calls.remove(index));
    drop(calls);
    removed.is_some()
}

/// Begins or ends a section in which this thread expects refusals and tries again. It also covers
/// the PyTorch threads that compute gradients for this thread.
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

/// Makes the last calls for an expected refusal after which the program gives up. `text` is the
/// text of its exception.
#[pyfunction]
pub(crate) fn refuse_after_all(text: &Bound<'_, PyString>) {
    if let Some(receipt) = refusal::receipt_of(text) {
        call_last(&receipt);
    }
    exceptions::pass_on_interrupt();
}

/// Whether the owner of the refused request, or this thread, expects the refusal.
fn is_expected(receipt: &Receipt) -> bool {
    EXPECTED.with_borrow(|expected| !expected.is_empty())
        || lock(&EXPECTING).contains_key(&receipt.owner)
}

/// Makes the last calls of the program for a refusal, unless the refusal is expected.
pub(crate) fn call_last(receipt: &Receipt) {
    // Without last calls, Python's lock is not taken. A refusal inside a callback is not final.
    if lock(&LAST_CALLS).is_empty()
        || is_in_callback()
        || is_expected(receipt)
        || IN_LAST_CALL.replace(true)
    {
        return;
    }
    let text = receipts::json(receipt);
    gil::attach_within(LAST_PATIENCE, LAST_BUDGET, move |py| {
        // Sets the flag of the thread that runs this, which may not be the refused one.
        let before = IN_LAST_CALL.replace(true);
        // Copied, because Python runs below, and no lock of Cushion may be held then.
        let called: Vec<_> = lock(&LAST_CALLS).iter().map(|(_, call)| call.clone_ref(py)).collect();
        for call in called {
            if let Err(error) = call.call1(py, (&text,)) {
                exceptions::show(py, error, call.bind(py));
            }
        }
        IN_LAST_CALL.set(before);
    });
    IN_LAST_CALL.set(false);
}
