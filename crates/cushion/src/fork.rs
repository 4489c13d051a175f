//! Children made by `fork`, such as data-loader workers. CUDA does not survive a fork, and a thread
//! that does not exist in the child may have held an engine's lock. So if the parent has used CUDA,
//! every entry point becomes harmless in the child: frees do nothing, statistics are zero, and
//! allocations fail with a reason. If the parent has not used CUDA, the child may use it. Devices
//! with their own cache are not watched.
//!
//! The child still takes some locks: for example, every thread takes the lock of threads and tasks
//! when it ends. The forking thread holds these locks during the fork, so that no other thread
//! holds them and their data is consistent in the child. Each of these locks is held only briefly,
//! and its holder never waits for a lock that the forking thread may hold.

use std::any::Any;
use std::cell::Cell;
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

use crate::devices::devices;
use crate::{clock, trim};

/// Takes locks, and holds them until the returned value is dropped.
type Take = fn() -> Box<dyn Any>;

/// Locks of other crates to hold during a fork.
static TAKES: Mutex<Vec<Take>> = Mutex::new(Vec::new());

fn takes() -> MutexGuard<'static, Vec<Take>> {
    TAKES.lock().unwrap_or_else(PoisonError::into_inner)
}

thread_local! {
    /// The locks that this thread holds during a fork.
    static HELD: Cell<Option<Box<dyn Any>>> = const { Cell::new(None) };
}

/// Registers a function that takes locks. They are held whenever this process forks, so that the
/// child never finds one locked by a thread it does not have. A holder of such a lock may wait only
/// for locks that `take` takes later.
pub fn hold_in_forks(take: fn() -> Box<dyn Any>) {
    takes().push(take);
    watch();
}

extern "C" fn before() {
    let takes = takes();
    let others: Vec<_> = takes.iter().map(|take| take()).collect();
    let own = (trim::hold(), clock::hold_alarms());
    // Last, because a holder of the other locks may ask for the owner of a thread.
    let owners = cushion_core::hold_owners();
    let held: Box<dyn Any> = Box::new((owners, own, others, takes));
    // A thread that is exiting has no thread-local storage left; then the locks are released here.
    let _ = HELD.try_with(|place| place.set(Some(held)));
}

extern "C" fn in_the_parent() {
    let _ = HELD.try_with(|held| drop(held.take()));
}

extern "C" fn in_the_child() {
    devices().after_fork();
    in_the_parent();
}

/// Installs the fork handlers, once.
pub(crate) fn watch() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the handlers take and release locks that are held only briefly, and read and
        // store a flag. They do not panic, and code that has used CUDA is never unloaded. A failure
        // means that the handler list is out of memory; then forks work as without handlers.
        let _ =
            unsafe { libc::pthread_atfork(Some(before), Some(in_the_parent), Some(in_the_child)) };
    });
}
