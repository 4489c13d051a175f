//! Python's global lock, from inside an allocator.
//!
//! PyTorch calls with the lock held or without it. A thread that has to wait for memory with the lock held
//! would keep others from freeing some, so it gives the lock up first. An allocation does so for nothing less, and
//! a free never: a caller may hold a mutex of its own besides, and whoever takes the lock meanwhile may want that
//! mutex.
//!
//! Whether a thread holds the lock is asked by comparing its own state with the current one, for which the
//! function is outside the stable interface and so is looked up at run time. (`PyGILState_Check` says yes to every
//! thread once there was a second interpreter.)
//!
//! A thread that is short of memory may hold what the lock's owner waits for: a mutex of a C++ library, or its own
//! end. It asks for the lock by [`attach_within`], which gives up where the lock does not change hands.
//!
//! Once the interpreter begins to shut down ([`stop`]) nothing here touches it any more.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use cushion::core::{self, is_in_callback};
use cushion::devices;
use pyo3::Python;
use pyo3::ffi::{self, PyThreadState};

use crate::lock;
use crate::symbols::Loaded;

type CurrentState = unsafe extern "C" fn() -> *mut PyThreadState;

static STOPPED: AtomicBool = AtomicBool::new(false);

/// How many threads of our own want the lock, or have it.
static OURS: Mutex<usize> = Mutex::new(0);
static FEWER: Condvar = Condvar::new();

fn ours() -> MutexGuard<'static, usize> {
    lock(&OURS)
}

/// From now on nobody calls into Python. The caller has given the lock up: our own threads that want it get it once
/// more, since the interpreter ends a thread that asks for it too late in the middle of whatever it does.
pub(crate) fn stop() {
    const PATIENCE: Duration = Duration::from_secs(1);
    STOPPED.store(true, Ordering::SeqCst);
    // In a child made by fork they are gone.
    if devices().is_abandoned() {
        return;
    }
    // One that takes longer is left to its fate.
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
        // SAFETY: the interpreter defines both with this type, the second up to 3.12.
        names.into_iter().find_map(|name| unsafe { process.function(name) })
    };
    let Some(current) = CURRENT.get_or_init(find).filter(|_| is_running()) else { return false };
    // SAFETY: it has no precondition; without a state of its own, a thread gets null.
    let own = unsafe { ffi::PyGILState_GetThisThreadState() };
    // SAFETY: it has no precondition; the state is only compared.
    !own.is_null() && own == unsafe { current() }
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

/// Runs `f` with the lock; not at all if Python shuts down, or if the lock is not given up by whoever has it for as
/// long as `patience`. Then the caller goes on without it, and so it does if `f` takes longer than `at_most`.
///
/// Python can only wait for its lock for ever, so another thread asks first: that it got it says that it changes hands. A
/// thread that Python knows then runs `f` itself: it had the lock before, and will need it again. One that Python does not
/// know has `f` run by such another thread.
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
    // SAFETY: it has no precondition.
    !unsafe { ffi::PyGILState_GetThisThreadState() }.is_null()
}

/// As [`attach`], for a thread of our own: not at all if Python shuts down.
pub(crate) fn attach_ours<T>(f: impl FnOnce(Python<'_>) -> T) -> Option<T> {
    let _counted = Counted::new();
    is_running().then(|| attach(f))
}

/// One of our own threads that wants the lock, or has it, until this is dropped.
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

/// So many threads of our own that want the lock, or have it, are stuck: no more are made.
const MOST_OURS: usize = 64;

/// Has a thread of its own run `f` with the lock; waits `patience` for it to begin, and then `at_most` for it to end.
/// Shortages are rare: a thread that is kept would be one that can be stuck, with everybody's work behind it.
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
    // Who asked may have given up: then it is not begun, or its result is nobody's.
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
        // SAFETY: the state is of this thread's latest use that is still open.
        unsafe { ffi::PyGILState_Release(self.0) };
    }
}

/// The lock, given up until this is dropped.
#[derive(Debug)]
pub(crate) struct Released(*mut PyThreadState);

/// Gives the lock up if this thread holds it.
pub(crate) fn release() -> Option<Released> {
    // SAFETY: this thread holds the lock, with its own state, which is saved.
    is_held().then(|| Released(unsafe { ffi::PyEval_SaveThread() }))
}

impl Drop for Released {
    fn drop(&mut self) {
        // SAFETY: the state is this thread's own, saved above.
        unsafe { ffi::PyEval_RestoreThread(self.0) };
    }
}
