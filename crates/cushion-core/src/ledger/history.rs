//! History: a bounded ring of events, for snapshots and traces.
//!
//! It is off by default and then costs one branch. When full, it drops the oldest entry and counts
//! it. It never blocks and never grows beyond its capacity.

use std::collections::VecDeque;
use std::time::Duration;

use crate::base::names::{PoolId, Tag};
use crate::driver::StreamId;

/// The kind of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Action {
    /// A block was handed out.
    Alloc,
    /// The owner of a block freed it.
    FreeRequested,
    /// A freed block became available for reuse.
    FreeCompleted,
    /// The driver provided a plain segment.
    SegmentAlloc,
    /// A plain segment was given back to the driver.
    SegmentFree,
    /// Pages were mapped.
    SegmentMap,
    /// Pages were unmapped.
    SegmentUnmap,
    /// A request was refused.
    OutOfMemory,
    /// A snapshot was taken.
    Snapshot,
}

impl Action {
    /// Every action.
    pub const ALL: [Self; 9] = [
        Self::Alloc,
        Self::FreeRequested,
        Self::FreeCompleted,
        Self::SegmentAlloc,
        Self::SegmentFree,
        Self::SegmentMap,
        Self::SegmentUnmap,
        Self::OutOfMemory,
        Self::Snapshot,
    ];

    /// Returns PyTorch's name of the action.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Alloc => "alloc",
            Self::FreeRequested => "free_requested",
            Self::FreeCompleted => "free_completed",
            Self::SegmentAlloc => "segment_alloc",
            Self::SegmentFree => "segment_free",
            Self::SegmentMap => "segment_map",
            Self::SegmentUnmap => "segment_unmap",
            Self::OutOfMemory => "oom",
            Self::Snapshot => "snapshot",
        }
    }
}

/// One entry of the history.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// The kind of the event.
    pub action: Action,
    /// The address; for [`Action::OutOfMemory`] the free bytes of the device.
    pub address: u64,
    /// The bytes; of an allocation, as requested.
    pub size: u64,
    /// The stream.
    pub stream: StreamId,
    /// The pool.
    pub pool: PoolId,
    /// The time on the engine's clock.
    pub time: Duration,
    /// The caller's tag.
    pub tag: Tag,
}

/// The ring.
#[derive(Debug, Default)]
pub(crate) struct History {
    entries: VecDeque<Entry>,
    capacity: usize,
    /// Actions that are not recorded.
    skipped: Vec<Action>,
    dropped: u64,
}

impl History {
    pub(crate) fn is_on(&self) -> bool {
        self.capacity > 0
    }

    /// Starts over with room for `capacity` entries; zero turns the history off.
    pub(crate) fn restart(&mut self, capacity: usize) {
        *self = Self { capacity, ..Self::default() };
    }

    /// Changes the capacity, and keeps the latest entries.
    pub(crate) fn resize(&mut self, capacity: usize) {
        self.capacity = capacity;
        let too_many = self.entries.len().saturating_sub(capacity);
        self.entries.drain(..too_many);
        self.dropped += too_many as u64;
    }

    /// Skips these actions from now on.
    pub(crate) fn skip(&mut self, actions: &[Action]) {
        self.skipped = actions.to_vec();
    }

    pub(crate) fn push(&mut self, entry: Entry) {
        if self.skipped.contains(&entry.action) {
            return;
        }
        if self.entries.len() == self.capacity {
            self.entries.pop_front();
            self.dropped += 1;
        }
        self.entries.push_back(entry);
    }

    /// Returns the entries, oldest first.
    pub(crate) fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.entries.iter()
    }

    /// Returns the entries, oldest first, and how many were dropped before them.
    pub(crate) fn read(&self) -> (Vec<Entry>, u64) {
        (self.entries.iter().copied().collect(), self.dropped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(size: u64) -> Entry {
        Entry {
            action: Action::Alloc,
            address: 0,
            size,
            stream: StreamId(0),
            pool: PoolId::DEFAULT,
            time: Duration::ZERO,
            tag: Tag::NONE,
        }
    }

    #[test]
    fn a_full_ring_drops_the_oldest_and_counts_it() {
        let mut history = History::default();
        assert!(!history.is_on());
        history.restart(3);
        for size in 0..5 {
            history.push(entry(size));
        }
        let (entries, dropped) = history.read();
        assert_eq!(entries.iter().map(|e| e.size).collect::<Vec<_>>(), [2, 3, 4]);
        assert_eq!(dropped, 2);
        history.restart(0);
        assert!(!history.is_on());
        assert_eq!(history.read(), (vec![], 0));
    }

    #[test]
    fn a_resized_ring_keeps_the_latest() {
        let mut history = History::default();
        history.restart(4);
        (0..4).for_each(|size| history.push(entry(size)));
        history.resize(2);
        history.push(entry(4));
        history.resize(5);
        history.push(entry(5));
        let (entries, dropped) = history.read();
        assert_eq!(entries.iter().map(|e| e.size).collect::<Vec<_>>(), [3, 4, 5]);
        assert_eq!(dropped, 3);
    }

    #[test]
    fn skipped_actions_take_no_room() {
        let mut history = History::default();
        history.restart(2);
        history.skip(&[Action::Snapshot]);
        history.push(entry(0));
        history.push(Entry { action: Action::Snapshot, ..entry(1) });
        history.push(entry(2));
        assert_eq!(history.read().0.iter().map(|e| e.size).collect::<Vec<_>>(), [0, 2]);
    }
}
