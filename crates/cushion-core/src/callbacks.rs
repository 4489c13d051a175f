//! Callbacks: what the program itself can do about a shortage.
//!
//! Called in order of their priority by the thread that is short of memory, with no lock held, so that
//! they may free and even allocate. None is re-entered: not by an allocation of its own, and not by
//! another thread while it runs.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::owner::InCallback;

/// What a callback is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Plea {
    /// The device.
    pub device: u32,
    /// Bytes that would help: what the request needs from the device.
    pub bytes: u64,
    /// How long the request may still take.
    pub time_left: Duration,
}

/// A callback, by its number: to take it away again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CallbackId(u64);

type Function = Box<dyn Fn(&Plea) + Send + Sync>;

struct Callback {
    id: CallbackId,
    priority: i32,
    function: Function,
    running: AtomicBool,
}

/// The callbacks of one engine.
#[derive(Default)]
pub(crate) struct Callbacks {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    /// The highest priority first, and of those alike the oldest.
    all: Vec<Arc<Callback>>,
    last: u64,
}

impl fmt::Debug for Callbacks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Callbacks").field("count", &self.inner().all.len()).finish()
    }
}

/// How calling went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Called {
    /// There was nobody to call.
    Nobody,
    /// Some were called, until it was enough.
    Some,
    /// One of them panicked; the others were called all the same.
    Panicked,
}

impl Callbacks {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add(&self, priority: i32, function: Function) -> CallbackId {
        let mut inner = self.inner();
        inner.last += 1;
        let id = CallbackId(inner.last);
        let at = inner.all.partition_point(|other| other.priority >= priority);
        let running = AtomicBool::new(false);
        inner.all.insert(at, Arc::new(Callback { id, priority, function, running }));
        id
    }

    pub(crate) fn remove(&self, id: CallbackId) -> bool {
        // What it captured is the caller's: it goes with no lock held.
        let removed = {
            let mut inner = self.inner();
            let index = inner.all.iter().position(|callback| callback.id == id);
            index.map(|index| inner.all.remove(index))
        };
        removed.is_some()
    }

    /// Whether one is under way, on whatever thread.
    pub(crate) fn are_running(&self) -> bool {
        self.inner().all.iter().any(|callback| callback.running.load(Ordering::Acquire))
    }

    /// Calls them in order until `enough` says so. No lock may be held.
    pub(crate) fn call(
        &self,
        mut plea: impl FnMut() -> Plea,
        mut enough: impl FnMut() -> bool,
    ) -> Called {
        let all = self.inner().all.clone();
        let mut called = Called::Nobody;
        for callback in all {
            if callback.running.swap(true, Ordering::Acquire) {
                continue;
            }
            let plea = plea();
            let result = {
                let _inside = InCallback::enter();
                catch_unwind(AssertUnwindSafe(|| (callback.function)(&plea)))
            };
            callback.running.store(false, Ordering::Release);
            match result {
                Err(_) => called = Called::Panicked,
                Ok(()) if called == Called::Nobody => called = Called::Some,
                Ok(()) => {}
            }
            if enough() {
                break;
            }
        }
        called
    }
}
