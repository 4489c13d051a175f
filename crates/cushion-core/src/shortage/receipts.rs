//! The receipts of one engine, in a bounded ring.
//!
//! A program that wants receipts as they are filed (to write them to a file, to log them) adds a
//! listener. The thread that was short of memory calls the listeners, with no lock held.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::base::names::Tag;
use crate::outcome::receipt::Receipt;

/// Receives each receipt as it is filed. Called with no lock held.
pub(crate) type Listener = Arc<dyn Fn(&Receipt) + Send + Sync>;

/// Returns the stack of each tag, in order. Called with no lock held.
pub(crate) type Explainer = Arc<dyn Fn(&[Tag]) -> Vec<Vec<String>> + Send + Sync>;

/// The receipts of one engine.
#[derive(Default)]
pub(crate) struct Receipts {
    inner: Mutex<Inner>,
}

struct Inner {
    ring: VecDeque<Arc<Receipt>>,
    room: usize,
    last: u64,
    listeners: Vec<Listener>,
    explainer: Option<Explainer>,
}

impl Default for Inner {
    fn default() -> Self {
        Self {
            ring: VecDeque::new(),
            room: Receipts::ROOM,
            last: 0,
            listeners: Vec::new(),
            explainer: None,
        }
    }
}

impl fmt::Debug for Receipts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Receipts").field("last", &self.inner().last).finish_non_exhaustive()
    }
}

impl Receipts {
    /// How many receipts are kept by default.
    pub(crate) const ROOM: usize = 256;

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of the next receipt.
    pub(crate) fn number(&self) -> u64 {
        let mut inner = self.inner();
        inner.last += 1;
        inner.last
    }

    /// Keeps a receipt and calls the listeners. A panic of a listener is caught: it must not make
    /// the allocation panic.
    pub(crate) fn file(&self, mut receipt: Receipt) {
        self.explain(&mut receipt);
        let receipt = Arc::new(receipt);
        let listeners = {
            let mut inner = self.inner();
            if inner.ring.len() >= inner.room {
                inner.ring.pop_front();
            }
            if inner.room > 0 {
                inner.ring.push_back(Arc::clone(&receipt));
            }
            inner.listeners.clone()
        };
        for listener in listeners {
            let told = std::panic::AssertUnwindSafe(|| listener(&receipt));
            let _ = std::panic::catch_unwind(told);
        }
    }

    /// Fills in the stacks of the receipt's tags.
    fn explain(&self, receipt: &mut Receipt) {
        let Some(explainer) = self.inner().explainer.clone() else { return };
        let tags: Vec<Tag> = std::iter::once(receipt.tag)
            .chain(receipt.groups.iter().map(|group| group.tag))
            .collect();
        if tags.iter().all(|&tag| tag == Tag::NONE) {
            return;
        }
        let told = std::panic::AssertUnwindSafe(|| explainer(&tags));
        let mut stacks = std::panic::catch_unwind(told).unwrap_or_default().into_iter();
        receipt.stack = stacks.next().unwrap_or_default();
        for (group, stack) in receipt.groups.iter_mut().zip(stacks) {
            group.stack = stack;
        }
    }

    pub(crate) fn explain_by(&self, explainer: Explainer) {
        self.inner().explainer = Some(explainer);
    }

    pub(crate) fn listen(&self, listener: Listener) {
        self.inner().listeners.push(listener);
    }

    pub(crate) fn keep(&self, room: usize) {
        let mut inner = self.inner();
        inner.room = room;
        let too_many = inner.ring.len().saturating_sub(room);
        inner.ring.drain(..too_many);
    }

    /// Returns the kept receipts, oldest first.
    pub(crate) fn read(&self) -> Vec<Arc<Receipt>> {
        self.inner().ring.iter().cloned().collect()
    }
}
