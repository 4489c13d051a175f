//! A child made by `fork`, such as a worker that loads data. If this process has used CUDA, the child is left
//! alone: CUDA does not survive a fork, and a thread that does not exist in the child may have held an engine's lock. Every
//! entry point becomes harmless there: frees do nothing, figures are zero, and allocations say why they fail. A child
//! of a process that has not used CUDA yet may use it. Devices with a cache of their own are not watched.
//!
//! Locks that a child may come to all the same, such as that of threads and tasks, which every thread takes as it ends, are
//! held by the thread that forks while it does: so no other thread has them, and what they guard is whole in the child. Each
//! is held for a moment at a time, and nothing that the forking thread could hold is waited for with it.

use std::any::Any;
use std::cell::Cell;
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

use crate::devices::devices;
use crate::{clock, trim};

/// Takes locks, which are held until what is returned is dropped.
type Take = fn() -> Box<dyn Any>;

/// What else is held, beside the locks of this crate.
static TAKES: Mutex<Vec<Take>> = Mutex::new(Vec::new());

fn takes() -> MutexGuard<'static, Vec<Take>> {
    TAKES.lock().unwrap_or_else(PoisonError::into_inner)
}

thread_local! {
    /// What this thread holds while it forks.
    static HELD: Cell<Option<Box<dyn Any>>> = const { Cell::new(None) };
}

/// Has locks held whenever this process forks, so that a child never finds one that a thread held which it does not have.
/// Whoever holds one may wait for other such locks, if `take` takes those later, and for nothing else.
pub fn hold_in_forks(take: fn() -> Box<dyn Any>) {
    takes().push(take);
    watch();
}

extern "C" fn before() {
    let takes = takes();
    let others: Vec<_> = takes.iter().map(|take| take()).collect();
    let own = (trim::hold(), clock::hold_alarms());
    // Last: the others may be held by somebody who asks for whom a thread works.
    let owners = cushion_core::hold_owners();
    let held: Box<dyn Any> = Box::new((owners, own, others, takes));
    // A thread at its very end has no place for them any more: then they are not held.
    let _ = HELD.try_with(|place| place.set(Some(held)));
}

extern "C" fn in_the_parent() {
    let _ = HELD.try_with(|held| drop(held.take()));
}

extern "C" fn in_the_child() {
    devices().after_fork();
    in_the_parent();
}

/// Watches for forks from now on.
pub(crate) fn watch() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the handlers take locks that are held for a moment at a time and let them go again, look at a flag and
        // store one; none panics, and code that has been used for CUDA is never unloaded. Failure means no memory for the
        // list of handlers; then a child is as it was without them.
        let _ =
            unsafe { libc::pthread_atfork(Some(before), Some(in_the_parent), Some(in_the_child)) };
    });
}
