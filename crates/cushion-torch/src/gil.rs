//! Python's global lock, from inside an allocator.
//!
//! PyTorch calls with the lock held or without it. A thread that waits in here with the lock held keeps
//! others from freeing memory, so it gives the lock up first. Whether it holds the lock is asked of
//! `PyGILState_Check`, which is outside the stable interface and so is looked up at run time.
//!
//! Once the interpreter begins to shut down ([`stop`]) nothing here touches it any more.

use std::ffi::c_int;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::Python;
use pyo3::ffi::{self, PyThreadState};

use crate::symbols::Loaded;

type Check = unsafe extern "C" fn() -> c_int;

static STOPPED: AtomicBool = AtomicBool::new(false);

/// From now on nobody calls into Python.
pub(crate) fn stop() {
    STOPPED.store(true, Ordering::SeqCst);
}

/// Whether Python may be called.
pub(crate) fn is_running() -> bool {
    !STOPPED.load(Ordering::Relaxed)
}

/// Whether this thread holds the lock.
pub(crate) fn is_held() -> bool {
    static CHECK: OnceLock<Option<Check>> = OnceLock::new();
    // SAFETY: the interpreter defines it with this type.
    let find = || unsafe { Loaded::process().function(c"PyGILState_Check") };
    match CHECK.get_or_init(find) {
        // SAFETY: it has no precondition, and the interpreter is not shutting down.
        Some(check) if is_running() => unsafe { check() != 0 },
        _ => false,
    }
}

/// Runs `f` with the lock, whoever gave it up before.
///
/// PyO3 alone would not do: it counts its own uses of the lock on this thread, and takes one that is open
/// for the lock itself. Below an observer, which PyO3 calls, PyTorch gives the lock up on its own.
pub(crate) fn attach<T>(f: impl FnOnce(Python<'_>) -> T) -> T {
    // SAFETY: the interpreter runs, which every caller asks first; `Ensured` undoes it.
    let _ensured = Ensured(unsafe { ffi::PyGILState_Ensure() });
    Python::attach(f)
}

/// A use of the lock, until this is dropped.
struct Ensured(ffi::PyGILState_STATE);

impl Drop for Ensured {
    fn drop(&mut self) {
        // SAFETY: the state is of this thread's latest use that is still open.
        unsafe { ffi::PyGILState_Release(self.0) };
    }
}

/// The lock, given up until this is dropped.
#[derive(Debug)]
pub(crate) struct Released(*mut PyThreadState);

/// Gives the lock up if this thread holds it.
pub(crate) fn release() -> Option<Released> {
    // SAFETY: this thread holds the lock, so it has a thread state to save.
    is_held().then(|| Released(unsafe { ffi::PyEval_SaveThread() }))
}

impl Drop for Released {
    fn drop(&mut self) {
        // SAFETY: the state is this thread's own, saved above.
        unsafe { ffi::PyEval_RestoreThread(self.0) };
    }
}
