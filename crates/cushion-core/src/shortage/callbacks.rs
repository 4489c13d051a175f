//! Callbacks: what the program itself can do about a shortage.
//!
//! Called in order of their priority by the thread that is short of memory, with no lock held, so that
//! they may free and even allocate. None is re-entered: not by an allocation of its own, and not by
//! another thread while it runs, on whatever device. What each said, and how long it took, is in the receipt; one
//! that took longer than it was given is not called again.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::demand::owner::{self, InCallback};
use crate::outcome::receipt::Answer;

/// What a callback is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Plea {
    /// The device.
    pub device: u32,
    /// Bytes that would help: what the request needs from the device.
    pub bytes: u64,
    /// How long the callback may take. One that takes longer is not called again.
    pub time_left: Duration,
}

/// What a callback has to say to who reads the receipt.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Reply {
    /// Nothing.
    #[default]
    Nothing,
    /// What it did.
    Said(String),
    /// Why it could do nothing.
    Failed(String),
    /// Why it was not called: that is not its own fault, however long it took.
    NotCalled(String),
}

/// More than this of what a callback says is left out: a receipt is a line in a file.
const MOST_CHARACTERS: usize = 1000;

fn shortened(mut text: String) -> String {
    if let Some((end, _)) = text.char_indices().nth(MOST_CHARACTERS) {
        text.truncate(end);
        text.push('…');
    }
    text
}

/// A callback, by its number: to take it away again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CallbackId(u64);

type Function = Box<dyn Fn(&Plea) -> Reply + Send + Sync>;

/// A callback for shortages, of one engine or of several.
pub struct Callback {
    name: String,
    priority: i32,
    /// How long it may take, if it is not up to the request.
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
    /// A callback by a name that people know it by; those of higher priority are called first.
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

    /// It may take so long, however long the request may still wait.
    #[must_use]
    pub fn with_budget(mut self, budget: Duration) -> Self {
        self.budget = Some(budget);
        self
    }

    /// It is not called any more, by any engine. Where it runs now it runs on.
    pub fn switch_off(&self) {
        self.off.store(true, Ordering::Release);
    }

    /// Whether it is not called any more.
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
    /// The highest priority first, and of those alike the oldest.
    all: Vec<(CallbackId, Arc<Callback>)>,
    last: u64,
}

impl fmt::Debug for Callbacks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Callbacks").field("count", &self.inner().all.len()).finish()
    }
}

/// What callbacks are told, and what is asked about them meanwhile.
pub(crate) trait Situation {
    /// What a callback is told that may take as long as this request may; at least as long as callbacks may.
    fn plea(&mut self, budget: Option<Duration>) -> Plea;
    fn now(&mut self) -> Duration;
    /// Bytes won so far.
    fn won(&mut self) -> u64;
    /// Whether the request could be served now.
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
        // What it captured is the caller's: it goes with no lock held.
        let removed = {
            let mut inner = self.inner();
            let index = inner.all.iter().position(|(other, _)| *other == id);
            index.map(|index| inner.all.remove(index))
        };
        removed.is_some()
    }

    /// Whether one is under way, on whatever thread.
    pub(crate) fn are_running(&self) -> bool {
        self.inner().all.iter().any(|(_, callback)| callback.running.load(Ordering::Acquire))
    }

    /// Calls them in order until it is enough. No lock may be held. Returns what each did; nothing where there was
    /// nobody to call.
    pub(crate) fn call(&self, situation: &mut impl Situation) -> Vec<Answer> {
        // Those that are off are not called again. What they captured is the caller's: it goes with no lock held.
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
