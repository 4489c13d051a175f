//! Makes calls wait until a test releases them, like a busy driver. No lock is held meanwhile:
//! other threads can call.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

struct Gate {
    /// The function whose calls wait.
    closed: Option<String>,
    /// The number of waiting calls.
    waiting: u64,
}

static GATE: Mutex<Gate> = Mutex::new(Gate { closed: None, waiting: 0 });
static CHANGED: Condvar = Condvar::new();

fn gate() -> MutexGuard<'static, Gate> {
    GATE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn wait_while(test: impl FnMut(&mut Gate) -> bool) -> MutexGuard<'static, Gate> {
    CHANGED.wait_while(gate(), test).unwrap_or_else(PoisonError::into_inner)
}

/// Waits while calls of `name` are blocked.
pub(crate) fn pass(name: &str) {
    let is_closed = |gate: &mut Gate| gate.closed.as_deref() == Some(name);
    let mut now = gate();
    if !is_closed(&mut now) {
        return;
    }
    now.waiting += 1;
    drop(now);
    CHANGED.notify_all();
    wait_while(is_closed).waiting -= 1;
}

/// Blocks calls of `name` from now on; `None` releases all.
pub(crate) fn close(name: Option<String>) {
    gate().closed = name;
    CHANGED.notify_all();
}

/// Returns once a call waits.
pub(crate) fn await_waiting() {
    drop(wait_while(|gate| gate.waiting == 0));
}
