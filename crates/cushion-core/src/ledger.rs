//! The ledger: statistics that any thread can read without the engine's lock, and the history.
//!
//! The rooms below the policies do not count. They return their changes, and the holder of the lock
//! passes these to [`Ledger::apply`], the only function that writes counters and history.

pub(crate) mod change;
pub(crate) mod history;
pub(crate) mod lanes;
pub(crate) mod stats;

use crate::base::clock::Clock;

use self::history::History;
use self::stats::Counters;

/// Counters and history, writable by the holder of the engine's lock.
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

    /// Returns the bytes of physical memory held from the driver.
    pub(crate) fn reserved(&self) -> u64 {
        self.counters.reserved_bytes.current()
    }

    /// Returns the bytes of blocks that are live or pending.
    pub(crate) fn active(&self) -> u64 {
        self.counters.active_bytes.current()
    }

    /// Returns the reserved bytes that are neither live nor pending.
    pub(crate) fn cached(&self) -> u64 {
        self.reserved().saturating_sub(self.active())
    }

    /// Returns the bytes that were freed by their owners and wait for other streams.
    pub(crate) fn pending(&self) -> u64 {
        self.active().saturating_sub(self.counters.allocated_bytes.current())
    }

    /// Returns the bytes of blocks freed since the totals were last reset.
    pub(crate) fn freed_since_reset(&self) -> u64 {
        self.counters.active_bytes.freed()
    }

    /// Returns the peak of live and pending bytes since
    /// [`restart_watermark`](Self::restart_watermark).
    pub(crate) fn watermark(&self) -> u64 {
        self.counters.watermark.read()
    }

    /// Starts a new watermark at the live and pending bytes of now. Returns the old one.
    pub(crate) fn restart_watermark(&mut self) -> u64 {
        let before = self.watermark();
        self.counters.watermark.set(self.active());
        before
    }

    /// Returns whether blocks of this size are too large to be split.
    fn is_oversize(&self, size: u64) -> bool {
        size >= self.counters.max_split_size.read()
    }

    /// Returns the history, to read it.
    pub(crate) fn history(&self) -> &History {
        self.history
    }
}
