//! Python's global lock, from inside an allocator.
//!
//! PyTorch calls Cushion with or without the lock. A thread that waits for memory while it holds
//! the lock would keep other threads from freeing memory, so it releases the lock before it waits.
//! An allocation releases the lock only before a wait, and a free never releases it: the caller may
//! also hold a mutex of its own, and a thread that takes the lock meanwhile may want that mutex.
//!
//! A thread holds the lock if its own thread state is the current one. The function that returns
//! the current state is outside the stable interface, so it is looked up at run time.
//! (`PyGILState_Check` returns true for every thread once a second interpreter has existed.)
//!
//! A thread that is short of memory may hold a resource that the owner of the lock waits for: a
//! mutex of a C++ library, or the end of the thread itself. Such a thread takes the lock through
//! [`attach_within`], which gives up if the lock does not change hands.
//!
//! After the interpreter begins to shut down ([`stop`]), no function here touches it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use cushion::core::{self, is_in_callback};
use cushion::devices;
use pyo3::Python;
use pyo3::ffi::{self, PyThreadState};

use crate::process::lock;
use crate::process::symbols::Loaded;

type CurrentState = unsafe extern "C" fn() -> *mut PyThreadState;

static STOPPED: AtomicBool = AtomicBool::new(false);

/// How many threads of Cushion wait for the lock or hold it.
static OURS: Mutex<usize> = Mutex::new(0);
/// Notified when `OURS` decreases.
static FEWER: Condvar = Condvar::new();

fn ours() -> MutexGuard<'static, usize> {
    lock(&OURS)
}

/// Ends all calls into Python.
///
/// The caller has released the lock. Threads of Cushion that wait for the lock get it once more:
/// the interpreter ends a thread that asks for the lock too late, whatever that thread is doing.
pub(crate) fn stop() {
    const PATIENCE: Duration = Duration::from_secs(1);
    STOPPED.store(true, Ordering::SeqCst);
    // A child made by fork does not have these threads.
    if devices().is_abandoned() {
        return;
    }
    // After the timeout the interpreter may end the threads that are left.
    let _ = FEWER.wait_timeout_while(ours(), PATIENCE, |ours| *ours > 0);
}

/// Whether Python may be called.
pub(crate) fn is_running() -> bool {
    !STOPPED.load(Ordering::Relaxed)
}

/// Whether this thread holds the lock.
pub(crate) fn is_held() -> bool {
    static CURRENT: OnceLock<Option<CurrentState>> = OnceLock::new();
    let find = || {
        let process = Loaded::process();
        let names = [c"PyThreadState_GetUnchecked", c"_PyThreadState_UncheckedGet"];
        // SAFETY: the interpreter defines both functions with this type; the second one up to 3.12.
        names.into_iter().find_map(|name| unsafe { process.function(name) })
    };
    let Some(current) = CURRENT.get_or_init(find).filter(|_| is_running()) else { return false };
    // SAFETY: the function has no precondition. It returns null for a thread without a state.
    let own = unsafe { ffi::PyGILState_GetThisThreadState() };
    // SAFETY: the function has no precondition. The returned state is only compared.
    !own.is_null() && own == unsafe { current() }
}

/// Runs `f` with the lock. The interpreter must be running.
///
/// `Python::attach` alone is not enough: PyO3 counts its own uses of the lock on this thread, and
/// takes an open use for the lock itself. PyTorch may release the lock by itself below an observer
/// that PyO3 has called.
pub(crate) fn attach<T>(f: impl FnOnce(Python<'_>) -> T) -> T {
    // SAFETY: the interpreter must be running, which every caller checks. `Ensured` releases the
    // state on this thread, after every use that begins inside.
    let _ensured = Ensured(unsafe { ffi::PyGILState_Ensure() });
    Python::attach(f)
}

/// Runs `f` with the lock, and returns its result.
///
/// Returns none if Python shuts down, if the lock does not change hands within `patience`, or if
/// `f` runs on another thread for longer than `at_most`.
///
/// Python can only wait for its lock without a timeout. Therefore another thread takes the lock
/// first, which shows that the lock changes hands. A thread that Python knows then runs `f` itself:
/// it held the lock before and will need it again. For a thread that Python does not know, a new
/// thread runs `f`.
pub(crate) fn attach_within<T: Send + 'static>(
    patience: Duration,
    at_most: Duration,
    f: impl FnOnce(Python<'_>) -> T + Send + 'static,
) -> Option<T> {
    if !is_running() {
        return None;
    }
    if is_held() {
        return Some(attach(f));
    }
    if is_known() {
        let changes_hands = run_elsewhere(patience, patience, |_| ()).is_some();
        return (changes_hands && is_running()).then(|| attach(f));
    }
    let in_callback = is_in_callback();
    run_elsewhere(
        patience,
        at_most,
        move |py| {
            if in_callback { core::in_callback(|| f(py)) } else { f(py) }
        },
    )
}

/// Whether Python knows this thread.
fn is_known() -> bool {
    // SAFETY: the function has no precondition.
    !unsafe { ffi::PyGILState_GetThisThreadState() }.is_null()
}

/// Runs `f` with the lock on a thread of Cushion. Returns none if Python shuts down.
pub(crate) fn attach_ours<T>(f: impl FnOnce(Python<'_>) -> T) -> Option<T> {
    let _counted = Counted::new();
    is_running().then(|| attach(f))
}

/// Counts one thread of Cushion that waits for the lock or holds it, until this is dropped.
struct Counted(());

impl Counted {
    fn new() -> Self {
        *ours() += 1;
        Self(())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        *ours() -= 1;
        FEWER.notify_all();
    }
}

/// No more threads are started while this many wait for the lock or hold it.
const MOST_OURS: usize = 64;

/// Runs `f` with the lock on a new thread. Waits `patience` for `f` to begin, then `at_most` for it
/// to end.
///
/// A thread for each call is affordable, because shortages are rare. One permanent thread could
/// block, and then all later calls would wait behind it.
fn run_elsewhere<T: Send + 'static>(
    patience: Duration,
    at_most: Duration,
    f: impl FnOnce(Python<'_>) -> T + Send + 'static,
) -> Option<T> {
    if *ours() >= MOST_OURS {
        return None;
    }
    let (begin, begun) = sync_channel(1);
    let (reply, result) = sync_channel(1);
    // The caller clears this when it gives up before `f` begins; then `f` does not run.
    let wanted = Arc::new(AtomicBool::new(true));
    let still_wanted = Arc::clone(&wanted);
    let work = move || {
        attach_ours(|py| {
            if still_wanted.swap(false, Ordering::AcqRel) {
                let _ = begin.send(());
                let _ = reply.send(f(py));
            }
        });
    };
    std::thread::Builder::new().name("cushion-lock".to_owned()).spawn(work).ok()?;
    if begun.recv_timeout(patience).is_err() && wanted.swap(false, Ordering::AcqRel) {
        return None;
    }
    result.recv_timeout(at_most).ok()
}

/// A use of the lock, until this is dropped.
struct Ensured(ffi::PyGILState_STATE);

impl Drop for Ensured {
    fn drop(&mut self) {
        // SAFETY: the state comes from `PyGILState_Ensure` on this thread, and all uses that began
        // after it are closed: `attach` drops this last.
        unsafe { ffi::PyGILState_Release(self.0) };
    }
}

/// The lock, released until this is dropped.
#[derive(Debug)]
pub(crate) struct Released(*mut PyThreadState);

/// Releases the lock if this thread holds it.
pub(crate) fn release() -> Option<Released> {
    // SAFETY: the thread must hold the lock, which `is_held` checks. `Released` restores the state.
    is_held().then(|| Released(unsafe { ffi::PyEval_SaveThread() }))
}

impl Drop for Released {
    fn drop(&mut self) {
        // SAFETY: the state belongs to this thread, because a raw pointer keeps `Released` on it;
        // `PyEval_SaveThread` returned it, and the thread does not hold the lock.
        unsafe { ffi::PyEval_RestoreThread(self.0) };
    }
}
