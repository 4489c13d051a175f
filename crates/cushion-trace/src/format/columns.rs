//! Events in columns: the body of Cushion's own trace files.
//!
//! Events packed one by one (see `model::pack`) are small, but gzip cannot find repeated requests
//! in them. A file therefore stores a group of events field by field: all first bytes, then all
//! addresses, and so on. A group stores each address once and refers to it by number after that, so
//! the iterations of a loop become equal bytes. `docs/trace-format.md` describes every byte.

use crate::model::event::Action;

/// The most events in a group. Gzip finds the iterations of a loop in a group of this size, and a
/// reader can hold the group in memory.
pub(crate) const GROUP: usize = 1 << 16;

// The address bits of an event's first byte: one of four values.
pub(crate) const ADDR: u8 = 0x30;
pub(crate) const ADDR_SAME: u8 = 0x00;
pub(crate) const ADDR_KNOWN: u8 = 0x10;
pub(crate) const ADDR_NEW_ALIGNED: u8 = 0x20;
pub(crate) const ADDR_NEW: u8 = 0x30;

// The columns, in the order of the file.
pub(crate) const HEADS: usize = 0;
pub(crate) const CHANGES: usize = 1;
pub(crate) const KNOWN: usize = 2;
pub(crate) const NEW: usize = 3;
pub(crate) const SIZES: usize = 4;
pub(crate) const TIMES: usize = 5;
pub(crate) const COMPLETED: usize = 6;
pub(crate) const STREAMS: usize = 7;
pub(crate) const STACKS: usize = 8;
pub(crate) const POOLS: usize = 9;
pub(crate) const COLUMNS: usize = 10;

/// Returns the column of an event's time.
///
/// Completed frees have their own column: their time is nearly always that of the request before,
/// and gzip packs the resulting zeros to almost nothing.
pub(crate) fn time_column(action: Action) -> usize {
    if action == Action::FreeCompleted { COMPLETED } else { TIMES }
}

/// The last size seen at each address of a group, by the address's number.
#[derive(Debug, Default)]
pub(crate) struct Sizes {
    last: Vec<u64>,
    /// The number of the current address.
    pub(crate) here: Option<usize>,
}

impl Sizes {
    /// Returns the size that an event has if the file does not store it: for a free, the last size
    /// at its address; otherwise the size of the event before.
    pub(crate) fn expected(&self, action: Action, before: u64) -> u64 {
        match (action, self.here) {
            (Action::FreeRequested | Action::FreeCompleted, Some(here)) => self.last[here],
            _ => before,
        }
    }

    /// Adds an address and makes it the current one.
    pub(crate) fn new_address(&mut self) {
        self.here = Some(self.last.len());
        self.last.push(0);
    }

    /// Stores the size at the current address.
    pub(crate) fn note(&mut self, size: u64) {
        if let Some(here) = self.here {
            self.last[here] = size;
        }
    }

    pub(crate) fn clear(&mut self) {
        self.last.clear();
        self.here = None;
    }

    /// Estimates the memory in use, in bytes.
    pub(crate) fn held(&self) -> usize {
        self.last.capacity() * size_of::<u64>()
    }
}
