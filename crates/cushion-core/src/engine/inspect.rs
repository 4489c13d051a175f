//! Inspection: one allocation, figures, history, the invariant check.

use super::{Engine, Snapshot};
use crate::base::check::Violation;
use crate::base::looks::LookedAt;
use crate::base::names::Tag;
use crate::driver::{Driver, StreamId};
use crate::heap::block::{Block, BlockId};
use crate::heap::pool::PoolTable;
use crate::heap::segment::Kind;
use crate::ledger::history::{Action, Entry};
use crate::ledger::stats::Stats;

/// Pages and second addresses at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PageFigures {
    /// The number of physical pages.
    pub pages: usize,
    /// The number of stitches.
    pub ranges: usize,
    /// Bytes of addresses of all stitches.
    pub addresses: u64,
    /// Bytes that could be given back as blocks lie now.
    pub free: u64,
}

impl<D: Driver> Engine<D> {
    // ---- one allocation ----

    /// Applies `f` to the block of the live allocation at `address`; `None` if there is none.
    fn of_live<T>(&self, address: u64, f: impl FnOnce(&Block) -> T) -> Option<T> {
        let core = self.shared.lock();
        core.heap.live_at(address).map(|id| f(&core.heap[id]))
    }

    /// Returns the size of the block of a live allocation, and the bytes that were requested.
    #[must_use]
    pub fn size_of(&self, address: u64) -> Option<(u64, u64)> {
        self.of_live(address, |block| (block.size, block.holder.requested))
    }

    /// Returns the stream of a live allocation.
    #[must_use]
    pub fn stream_of(&self, address: u64) -> Option<StreamId> {
        self.of_live(address, |block| block.lane.stream)
    }

    /// Returns whether a live allocation is in host memory.
    #[must_use]
    pub fn is_spilled(&self, address: u64) -> bool {
        self.of_live(address, |block| block.lane.pool == PoolTable::SPILL).unwrap_or(false)
    }

    /// Returns the tag of a live allocation.
    #[must_use]
    pub fn tag_of(&self, address: u64) -> Option<Tag> {
        self.of_live(address, |block| block.holder.tag)
    }

    /// Returns the start and the size of the memory from which a live allocation was cut: a plain
    /// segment, or the mapped addresses around it.
    #[must_use]
    pub fn base_of(&self, address: u64) -> Option<(u64, u64)> {
        let core = self.shared.lock();
        let heap = &core.heap;
        let mapped = |id: &BlockId| heap[*id].is_mapped();
        let mut first = heap.live_at(address)?;
        let segment = heap.segment_of(first);
        if matches!(segment.kind, Kind::Stitch(_)) {
            // Pages other than those behind the allocation may have been taken out of the stitch.
            let around =
                |at| core.backing.page_around(at).filter(|&(at, ..)| at >= segment.address);
            let (mut start, mut end) = (address, address);
            while let Some((before, ..)) = start.checked_sub(1).and_then(around) {
                start = before;
            }
            while end < segment.end()
                && let Some((page, bytes, _)) = around(end)
            {
                end = page + bytes;
            }
            return Some((start, end - start));
        }
        while let Some(before) = heap[first].prev.filter(mapped) {
            first = before;
        }
        let run = std::iter::successors(Some(first), |&id| heap[id].next.filter(mapped));
        Some((heap[first].address, run.map(|id| heap[id].size).sum()))
    }

    /// Returns whether an address lies in a segment of this engine, live or not.
    #[must_use]
    pub fn holds(&self, address: u64) -> bool {
        let core = self.shared.lock();
        let mut segments = core.heap.segments().map(|(_, segment)| segment);
        segments.any(|segment| (segment.address..segment.end()).contains(&address))
    }

    // ---- figures ----

    /// Returns the figures. Does not take the engine's lock; the list of lanes has its own lock,
    /// held for a moment.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.shared.stats()
    }

    /// Returns the live bytes, as requested, and the reserved bytes. Takes no lock.
    #[must_use]
    pub fn live_and_reserved(&self) -> (u64, u64) {
        self.shared.counters.live_and_reserved()
    }

    /// Returns how often the driver mapped memory, mapped it a second time, or took either back.
    /// Takes no lock.
    #[must_use]
    pub fn driver_changes(&self) -> u64 {
        self.shared.counters.driver_changes()
    }

    /// Returns the figures of pages and second addresses.
    #[must_use]
    pub fn page_figures(&self) -> PageFigures {
        self.shared.locked(|core| {
            let (mut ranges, mut addresses) = (0, 0);
            for rules in core.policies.all() {
                let (count, _, bytes) = rules.stitches();
                (ranges, addresses) = (ranges + count, addresses + bytes);
            }
            let free = core.mem.reserved().saturating_sub(core.pinned());
            PageFigures { pages: core.mem.backing.page_count(), ranges, addresses, free }
        })
    }

    /// Resets peaks to the current values.
    pub fn reset_peak_stats(&self) {
        let _lock = self.shared.lock();
        self.shared.counters.reset_peak();
    }

    /// Resets totals to zero.
    pub fn reset_accumulated_stats(&self) {
        self.shared.locked(|core| {
            core.policies.all_mut().for_each(|rules| rules.totals_reset(&core.mem));
            self.shared.counters.reset_accumulated();
        });
    }

    // ---- history ----

    /// Restarts the history with room for the last `entries` events; zero turns it off. Drops the
    /// events kept so far.
    pub fn record_history(&self, entries: usize) {
        self.shared.lock().history.restart(entries);
    }

    /// Changes the history to keep the last `entries` events, including those kept so far.
    pub fn resize_history(&self, entries: usize) {
        self.shared.lock().history.resize(entries);
    }

    /// Skips these actions in the history from now on, until
    /// [`record_history`](Self::record_history) restarts it.
    pub fn skip_in_history(&self, actions: &[Action]) {
        self.shared.lock().history.skip(actions);
    }

    /// Returns the events kept, oldest first, and how many were dropped before them.
    #[must_use]
    pub fn history(&self) -> (Vec<Entry>, u64) {
        self.shared.lock().history.read()
    }

    /// Returns all segments and blocks. Each page is counted once.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        self.shared.locked(|mut core| core.snapshot())
    }

    /// Returns a snapshot and the events kept before it, as of one moment. The event of taking it
    /// is in the history after it, as with PyTorch.
    #[must_use]
    pub fn snapshot_and_history(&self) -> (Snapshot, Vec<Entry>) {
        self.shared.locked(|mut core| {
            let history = core.mem.ledger.history().read().0;
            (core.snapshot(), history)
        })
    }

    // ---- for tests ----

    /// Checks all structures against each other.
    pub fn check_invariants(&self) -> Result<(), Violation> {
        self.shared.locked(|core| core.check_invariants(&self.shared.stats()))
    }

    /// Returns how often the lock was taken so far, for tests of the work done in one hold. Takes
    /// no lock.
    #[doc(hidden)]
    pub fn times_locked(&self) -> u64 {
        self.shared.times_locked()
    }

    /// Returns how much was looked at so far with the lock held, for tests.
    #[doc(hidden)]
    #[must_use]
    pub fn looked_at(&self) -> LookedAt {
        self.shared.lock().looks().so_far()
    }

    /// Limits the stitches of a stream to fewer than usual, for tests that must reach the limit.
    #[doc(hidden)]
    pub fn set_most_ranges(&self, most: usize) {
        self.shared.locked(|core| {
            core.policies.all_mut().for_each(|rules| rules.set_most_stitches(most));
        });
    }
}
