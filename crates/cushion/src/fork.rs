//! A child made by `fork`, such as a worker that loads data. If this process has used CUDA, the child is left
//! alone: CUDA does not survive a fork, and a thread that does not exist in the child may have held a lock. Every
//! entry point becomes harmless there: frees do nothing, figures are zero, and allocations say why they fail. A child
//! of a process that has not used CUDA yet may use it. Devices with a cache of their own are not watched.

use std::sync::Once;

use crate::devices::devices;

extern "C" fn in_the_child() {
    devices().after_fork();
}

/// Watches for forks from now on.
pub(crate) fn watch() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the handler does nothing but look at a flag and a lock and store a flag, and code that has been used
        // for CUDA is never unloaded. Failure means no memory for the list of handlers; then a child is as it was
        // without one.
        let _ = unsafe { libc::pthread_atfork(None, None, Some(in_the_child)) };
    });
}
