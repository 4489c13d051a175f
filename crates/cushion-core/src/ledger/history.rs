//! History: a bounded ring of what happened, for snapshots and traces.
//!
//! Off by default; then it costs one branch. When full it forgets the oldest entry and counts it:
//! it never blocks and never grows.

use std::collections::VecDeque;
use std::time::Duration;

use crate::base::names::{PoolId, Tag};
use crate::driver::StreamId;

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Action {
    /// A block was handed out.
    Alloc,
    /// Its owner gave it back.
    FreeRequested,
    /// It is free for reuse.
    FreeCompleted,
    /// A plain segment was got from the driver.
    SegmentAlloc,
    /// A plain segment was given back.
    SegmentFree,
    /// Pages were put behind a range.
    SegmentMap,
    /// Pages were taken away from a range.
    SegmentUnmap,
    /// A request was refused.
    OutOfMemory,
    /// A snapshot was taken.
    Snapshot,
}

impl Action {
    /// Every action there is.
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

    /// The name PyTorch gives it.
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
    /// What happened.
    pub action: Action,
    /// Where; for [`Action::OutOfMemory`] the bytes the device had free.
    pub address: u64,
    /// How many bytes (of an allocation: as asked for).
    pub size: u64,
    /// On which stream.
    pub stream: StreamId,
    /// In which pool.
    pub pool: PoolId,
    /// When, on the engine's clock.
    pub time: Duration,
    /// The caller's tag.
    pub tag: Tag,
}

/// The ring.
#[derive(Debug, Default)]
pub(crate) struct History {
    entries: VecDeque<Entry>,
    capacity: usize,
    /// Actions that are not noted.
    skipped: Vec<Action>,
    dropped: u64,
}

impl History {
    pub(crate) fn is_on(&self) -> bool {
        self.capacity > 0
    }

    /// Starts over with room for `capacity` entries; zero turns history off.
    pub(crate) fn restart(&mut self, capacity: usize) {
        *self = Self { capacity, ..Self::default() };
    }

    /// Goes on with room for `capacity` entries, the latest of those kept.
    pub(crate) fn resize(&mut self, capacity: usize) {
        self.capacity = capacity;
        let too_many = self.entries.len().saturating_sub(capacity);
        self.entries.drain(..too_many);
        self.dropped += too_many as u64;
    }

    /// Leaves these actions out from now on.
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

    /// The entries, oldest first.
    pub(crate) fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.entries.iter()
    }

    /// The entries, oldest first, and how many were forgotten before them.
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
    fn a_full_ring_forgets_the_oldest_and_counts_it() {
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
