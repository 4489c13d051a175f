//! Callbacks: code of the program that can free memory in a shortage.
//!
//! The thread that is short of memory calls them in order of priority, with no lock held, so that
//! they may free and even allocate. A callback is never re-entered: not by an allocation of its
//! own, and not by another thread while it runs, on any device. The receipt holds the reply and the
//! duration of each callback. A callback that exceeds its time is not called again.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::demand::owner::{self, InCallback};
use crate::outcome::receipt::Answer;

/// The argument of a callback.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Plea {
    /// The device.
    pub device: u32,
    /// Bytes that would help: the request needs them from the device.
    pub bytes: u64,
    /// How long the callback may take. If it takes longer, it is not called again.
    pub time_left: Duration,
}

/// The reply of a callback, for the reader of the receipt.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Reply {
    /// No message.
    #[default]
    Nothing,
    /// A message about what the callback did.
    Said(String),
    /// Why the callback failed.
    Failed(String),
    /// Why the callback was not called. It is not switched off then, however long that took.
    NotCalled(String),
}

/// Replies are cut to this many characters: a receipt is one line in a file.
const MOST_CHARACTERS: usize = 1000;

fn shortened(mut text: String) -> String {
    if let Some((end, _)) = text.char_indices().nth(MOST_CHARACTERS) {
        text.truncate(end);
        text.push('…');
    }
    text
}

/// The number of a registered callback, with which it can be removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CallbackId(u64);

type Function = Box<dyn Fn(&Plea) -> Reply + Send + Sync>;

/// A callback for shortages of one or more engines.
pub struct Callback {
    name: String,
    priority: i32,
    /// How long it may take; `None` leaves that to the request.
    budget: Option<Duration>,
    function: Function,
    running: AtomicBool,
    off: AtomicBool,
}

impl fmt::Debug for Callback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, priority, .. } = self;
        f.debug_struct("Callback")
            .field("name", name)
            .field("priority", priority)
            .finish_non_exhaustive()
    }
}

impl Callback {
    /// Returns a callback with a name for people. Callbacks with a higher priority are called
    /// first.
    pub fn new(
        name: impl Into<String>,
        priority: i32,
        function: impl Fn(&Plea) -> Reply + Send + Sync + 'static,
    ) -> Self {
        Self {
            name: shortened(name.into()),
            priority,
            budget: None,
            function: Box::new(function),
            running: AtomicBool::new(false),
            off: AtomicBool::new(false),
        }
    }

    /// Sets how long it may take, however long the request may still wait.
    #[must_use]
    pub fn with_budget(mut self, budget: Duration) -> Self {
        self.budget = Some(budget);
        self
    }

    /// Switches it off for all engines. A call that is running goes on.
    pub fn switch_off(&self) {
        self.off.store(true, Ordering::Release);
    }

    /// Returns whether it is switched off.
    #[must_use]
    pub fn is_off(&self) -> bool {
        self.off.load(Ordering::Acquire)
    }
}

/// The callbacks of one engine.
#[derive(Default)]
pub(crate) struct Callbacks {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    /// Highest priority first; among equals, oldest first.
    all: Vec<(CallbackId, Arc<Callback>)>,
    last: u64,
}

impl fmt::Debug for Callbacks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Callbacks").field("count", &self.inner().all.len()).finish()
    }
}

/// The shortage for which callbacks are called.
pub(crate) trait Situation {
    /// Returns the argument for a callback with this budget. Without a budget, the callback may
    /// take as long as the request may wait, and at least as long as the options allow callbacks.
    fn plea(&mut self, budget: Option<Duration>) -> Plea;
    fn now(&mut self) -> Duration;
    /// Returns the bytes won so far.
    fn won(&mut self) -> u64;
    /// Returns whether the request could be served now.
    fn enough(&mut self) -> bool;
}

impl Callbacks {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add(&self, callback: Arc<Callback>) -> CallbackId {
        let mut inner = self.inner();
        inner.last += 1;
        let id = CallbackId(inner.last);
        let at = inner.all.partition_point(|(_, other)| other.priority >= callback.priority);
        inner.all.insert(at, (id, callback));
        id
    }

    pub(crate) fn remove(&self, id: CallbackId) -> bool {
        // Dropped with no lock held: its captured values are the caller's.
        let removed = {
            let mut inner = self.inner();
            let index = inner.all.iter().position(|(other, _)| *other == id);
            index.map(|index| inner.all.remove(index))
        };
        removed.is_some()
    }

    /// Returns whether a callback is running on any thread.
    pub(crate) fn are_running(&self) -> bool {
        self.inner().all.iter().any(|(_, callback)| callback.running.load(Ordering::Acquire))
    }

    /// Calls the callbacks in order until the request could be served. No lock may be held. Returns
    /// what each did; nothing if there was none to call.
    pub(crate) fn call(&self, situation: &mut impl Situation) -> Vec<Answer> {
        // Callbacks that are off are removed. They are dropped with no lock held, because their
        // captured values are the caller's.
        let (all, off) = {
            let mut inner = self.inner();
            let (off, on) =
                std::mem::take(&mut inner.all).into_iter().partition(|it| it.1.is_off());
            inner.all = on;
            let off: Vec<(CallbackId, Arc<Callback>)> = off;
            (inner.all.clone(), off)
        };
        drop(off);
        let mut answers = Vec::new();
        for (_, callback) in all {
            if callback.is_off() || callback.running.swap(true, Ordering::Acquire) {
                continue;
            }
            answers.push(callback.call(situation));
            callback.running.store(false, Ordering::Release);
            if situation.enough() {
                break;
            }
        }
        answers
    }
}

impl Callback {
    fn call(&self, situation: &mut impl Situation) -> Answer {
        let plea = situation.plea(self.budget);
        let (began, before) = (situation.now(), situation.won());
        owner::take_waiting_in_callback();
        let reply = {
            let _inside = InCallback::enter();
            catch_unwind(AssertUnwindSafe(|| (self.function)(&plea)))
        };
        let took = situation.now().saturating_sub(began);
        let was_called = !matches!(reply, Ok(Reply::NotCalled(_)));
        let (said, failed) = match reply {
            Ok(Reply::Nothing) => (None, None),
            Ok(Reply::Said(text)) => (Some(shortened(text)), None),
            Ok(Reply::Failed(text) | Reply::NotCalled(text)) => (None, Some(shortened(text))),
            Err(panic) => {
                let text = panic.downcast_ref::<String>().map(String::as_str);
                let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
                (None, Some(shortened(text.unwrap_or("it panicked").to_owned())))
            }
        };
        let own = took.saturating_sub(owner::take_waiting_in_callback());
        let overran = was_called && own > plea.time_left;
        if overran {
            self.switch_off();
        }
        let won = situation.won().saturating_sub(before);
        Answer { callback: self.name.clone(), said, failed, won, took, switched_off: overran }
    }
}
