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
use std::sync::mpsc::{Sender, SyncSender, channel, sync_channel};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use pyo3::Python;
use pyo3::ffi::{self, PyThreadState};

use crate::symbols::Loaded;

type CurrentState = unsafe extern "C" fn() -> *mut PyThreadState;

static STOPPED: AtomicBool = AtomicBool::new(false);

/// How many threads of our own want the lock, or have it.
static OURS: Mutex<usize> = Mutex::new(0);
static FEWER: Condvar = Condvar::new();

fn ours() -> MutexGuard<'static, usize> {
    OURS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// From now on nobody calls into Python. The caller has given the lock up: our own threads that want it get it once
/// more, since the interpreter ends a thread that asks for it too late in the middle of whatever it does.
pub(crate) fn stop() {
    const PATIENCE: Duration = Duration::from_secs(1);
    STOPPED.store(true, Ordering::SeqCst);
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
/// long as `patience`.
///
/// Python can only wait for its lock for ever, so another thread asks first. That one got it says that it changes hands.
pub(crate) fn attach_within<T>(patience: Duration, f: impl FnOnce(Python<'_>) -> T) -> Option<T> {
    if !is_running() {
        return None;
    }
    (is_held() || changes_hands(patience)).then(|| attach(f))
}

/// As [`attach`], for a thread of our own: not at all if Python shuts down.
pub(crate) fn attach_ours<T>(f: impl FnOnce(Python<'_>) -> T) -> Option<T> {
    *ours() += 1;
    let result = is_running().then(|| attach(f));
    *ours() -= 1;
    FEWER.notify_all();
    result
}

/// Whether another thread gets the lock within `patience`.
fn changes_hands(patience: Duration) -> bool {
    static PROBE: Mutex<Option<Sender<SyncSender<()>>>> = Mutex::new(None);
    let (reply, got) = sync_channel(1);
    {
        let mut probe = PROBE.lock().unwrap_or_else(PoisonError::into_inner);
        if probe.is_none() {
            let (ask, asked) = channel::<SyncSender<()>>();
            let ask_for_lock = move || {
                for reply in asked {
                    if attach_ours(|_| ()).is_some() {
                        // Who asked may have given up.
                        let _ = reply.send(());
                    }
                }
            };
            let thread = std::thread::Builder::new().name("cushion-lock".to_owned());
            if thread.spawn(ask_for_lock).is_err() {
                return false;
            }
            *probe = Some(ask);
        }
        if probe.as_ref().is_none_or(|ask| ask.send(reply).is_err()) {
            return false;
        }
    }
    got.recv_timeout(patience).is_ok()
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
