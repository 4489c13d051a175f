//! What happened to memory: statistics that anybody may read without the engine's lock, and the history.
//!
//! The rooms below the policies do not count. They return what they changed, and whoever holds the lock hands that to
//! [`Ledger::apply`]: the only place that writes counters and history.

pub(crate) mod change;
pub(crate) mod history;
pub(crate) mod lanes;
pub(crate) mod stats;

use crate::base::clock::Clock;

use self::history::History;
use self::stats::Counters;

/// The books, open for writing: for the holder of the engine's lock.
#[derive(Debug)]
pub(crate) struct Ledger<'a> {
    counters: &'a Counters,
    history: &'a mut History,
    clock: &'a dyn Clock,
}

impl<'a> Ledger<'a> {
    pub(crate) fn new(
        counters: &'a Counters,
        history: &'a mut History,
        clock: &'a dyn Clock,
    ) -> Self {
        Self { counters, history, clock }
    }

    /// Bytes of physical memory held from the driver.
    pub(crate) fn reserved(&self) -> u64 {
        self.counters.reserved_bytes.current()
    }

    /// Bytes of blocks that are live or pending.
    pub(crate) fn active(&self) -> u64 {
        self.counters.active_bytes.current()
    }

    /// Bytes held that are neither live nor pending.
    pub(crate) fn cached(&self) -> u64 {
        self.reserved().saturating_sub(self.active())
    }

    /// Bytes freed by their owners that wait for other streams.
    pub(crate) fn pending(&self) -> u64 {
        self.active().saturating_sub(self.counters.allocated_bytes.current())
    }

    /// Bytes of blocks freed since the totals were last reset.
    pub(crate) fn freed_since_reset(&self) -> u64 {
        self.counters.active_bytes.freed()
    }

    /// The most bytes that were live or pending since [`restart_watermark`](Self::restart_watermark).
    pub(crate) fn watermark(&self) -> u64 {
        self.counters.watermark.read()
    }

    /// Begins a new watermark at what is live or pending now; returns the one that ends.
    pub(crate) fn restart_watermark(&mut self) -> u64 {
        let before = self.watermark();
        self.counters.watermark.set(self.active());
        before
    }

    /// Whether a size is at or over the largest that may be split.
    fn is_oversize(&self, size: u64) -> bool {
        size >= self.counters.max_split_size.read()
    }

    /// The history, to read it.
    pub(crate) fn history(&self) -> &History {
        self.history
    }
}
