//! Changes: the input of the ledger, and the one function that applies them.

use std::time::Duration;

use super::Ledger;
use super::history::{Action, Entry};
use crate::base::names::{PoolId, Tag};
use crate::driver::StreamId;

/// The figures that memory counts in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) pool: PoolId,
    pub(crate) small: bool,
    pub(crate) stream: StreamId,
    /// Whether it is host memory, which the figures of the device do not count.
    pub(crate) host: bool,
}

/// Addresses of one place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) place: Place,
}

/// A live or pending block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) span: Span,
    /// The bytes that its owner requested.
    pub(crate) requested: u64,
    pub(crate) tag: Tag,
}

/// The change in the number and bytes of free blocks that share their plain segment with others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Splits {
    pub(crate) blocks: i64,
    pub(crate) bytes: i64,
}

/// How a shortage is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    Survived,
    /// The driver failed, or the caller abandoned the request.
    Broken,
    /// The request was for `bytes` bytes, on a device that reported `free` free bytes.
    Refused {
        free: u64,
        bytes: u64,
        place: Place,
        tag: Tag,
    },
}

/// One change of memory or of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    /// A free block was handed out.
    HandedOut(Held, Splits),
    /// The owner of a block freed it.
    FreeRequested(Held),
    /// No stream uses a freed block any more: it is free for reuse.
    FreeCompleted(Held, Splits),

    /// The driver provided a plain segment.
    SegmentAllocated(Span, Tag),
    /// A plain segment was detached from its lane, to be freed.
    SegmentDetached(Span),
    /// The driver refused to free a detached segment: it is back in its lane.
    SegmentAttached(Span),
    /// The driver freed a detached segment.
    SegmentFreed(Span, Tag),

    /// Pages were mapped behind addresses.
    PagesMapped(Span, Tag),
    /// Pages were unmapped and released. One [`UnmapEnded`](Self::UnmapEnded) follows for several
    /// of these.
    PagesUnmapped(Span),
    /// All addresses unmapped together, for the history.
    UnmapEnded(Span, Tag),
    /// Two pages replaced one.
    PageSplit,
    /// A page was lost while it was split: the driver gave the memory to another process meanwhile.
    PageLost(Span),
    /// Pages were mapped at second addresses.
    StitchMapped,
    /// Second addresses were unmapped.
    StitchUnmapped,
    /// Bytes of all pages, each page counted once: for large requests, for small ones, and in host
    /// memory.
    PagesHeld { before: [u64; 3], now: [u64; 3] },

    /// A request was served from memory already reserved.
    Hit,
    /// A request was served with memory from the driver.
    Miss,
    /// The driver is asked again after memory was given back to it.
    Retried,
    /// The engine waits for all pending events.
    EventsAwaited,
    /// A shortage ended.
    ShortageEnded(Ending, Duration),
    /// A snapshot was taken while this many bytes were live or pending.
    SnapshotTaken { active: u64 },
    /// The largest size that may be split changed to `most`, and with it the number of larger
    /// blocks and segments.
    OversizeChanged { most: u64, allocations: u64, segments: u64 },
}

impl Ledger<'_> {
    /// Counts and records a change.
    // Each caller names the variant, so that after inlining only its arm is left of the match.
    #[expect(clippy::inline_always, reason = "on the path of a hit")]
    #[inline(always)]
    pub(crate) fn apply(&mut self, change: Change) {
        match change {
            Change::HandedOut(held, splits) => self.handed_out(&held, splits),
            Change::FreeRequested(held) => self.free_requested(&held),
            Change::FreeCompleted(held, splits) => self.free_completed(&held, splits),
            Change::Hit => self.counters.hits.add(1),
            other => self.apply_rare(other),
        }
    }

    /// Applies a change that is not on the path of a hit.
    fn apply_rare(&mut self, change: Change) {
        let counters = self.counters;
        match change {
            Change::HandedOut(..)
            | Change::FreeRequested(_)
            | Change::FreeCompleted(..)
            | Change::Hit => unreachable!("applied before"),
            Change::SegmentAllocated(span, tag) => {
                self.segment_held(&span, true);
                counters.num_device_alloc.add(1);
                self.record(Action::SegmentAlloc, &span, tag);
            }
            Change::SegmentDetached(span) => self.segment_held(&span, false),
            Change::SegmentAttached(span) => self.segment_held(&span, true),
            Change::SegmentFreed(span, tag) => {
                counters.num_device_free.add(1);
                self.record(Action::SegmentFree, &span, tag);
            }
            Change::PagesMapped(span, tag) => {
                let Place { pool, small, .. } = span.place;
                counters.reserved_by_private.increase(pool, small, span.bytes);
                counters.num_device_alloc.add(1);
                self.record(Action::SegmentMap, &span, tag);
            }
            Change::PagesUnmapped(Span { bytes, place: Place { pool, small, .. }, .. }) => {
                counters.reserved_by_private.decrease(pool, small, bytes);
            }
            Change::UnmapEnded(span, tag) => {
                counters.num_device_free.add(1);
                self.record(Action::SegmentUnmap, &span, tag);
            }
            Change::PageSplit => {
                counters.num_device_free.add(1);
                counters.num_device_alloc.add(1);
            }
            Change::PageLost(span) => {
                let Place { pool, small, .. } = span.place;
                counters.num_device_free.add(1);
                counters.reserved_by_private.decrease(pool, small, span.bytes);
                self.record(Action::SegmentUnmap, &span, Tag::NONE);
            }
            Change::StitchMapped => counters.num_device_alloc.add(1),
            Change::StitchUnmapped => counters.num_device_free.add(1),
            Change::PagesHeld { before, now } => self.pages_held(before, now),
            Change::Miss => counters.misses.add(1),
            Change::Retried => counters.num_alloc_retries.add(1),
            Change::EventsAwaited => counters.num_sync_all_streams.add(1),
            Change::ShortageEnded(ending, took) => self.shortage_ended(ending, took),
            Change::SnapshotTaken { active } => {
                let place =
                    Place { pool: PoolId::DEFAULT, small: false, stream: StreamId(0), host: false };
                self.record(
                    Action::Snapshot,
                    &Span { address: 0, bytes: active, place },
                    Tag::NONE,
                );
            }
            Change::OversizeChanged { most, allocations, segments } => {
                counters.max_split_size.set(most);
                counters.oversize_allocations.set_current(allocations);
                counters.oversize_segments.set_current(segments);
            }
        }
    }

    #[expect(clippy::inline_always, reason = "the parts of a change stay in registers")]
    #[inline(always)]
    fn handed_out(&mut self, held: &Held, splits: Splits) {
        let &Held { span: Span { bytes, place, .. }, requested, tag } = held;
        let (counters, small) = (self.counters, place.small);
        if place.host {
            counters.spilled_allocation.increase(1);
        } else {
            if splits != Splits::default() {
                self.free_splits(small, splits);
            }
            counters.allocation.increase(small, 1);
            counters.allocated_bytes.increase(small, bytes);
            counters.active.increase(small, 1);
            let active = counters.active_bytes.increase(small, bytes);
            if active > counters.watermark.read() {
                counters.watermark.set(active);
            }
            counters.requested_bytes.increase(small, requested);
            if self.is_oversize(bytes) {
                counters.oversize_allocations.increase(1);
            }
        }
        self.record_held(Action::Alloc, held, tag);
    }

    #[expect(clippy::inline_always, reason = "the parts of a change stay in registers")]
    #[inline(always)]
    fn free_requested(&mut self, held: &Held) {
        let &Held { span: Span { bytes, place, .. }, tag, .. } = held;
        let (counters, small) = (self.counters, place.small);
        if place.host {
            counters.spilled_allocation.decrease(1);
        } else {
            counters.allocation.decrease(small, 1);
            counters.allocated_bytes.decrease(small, bytes);
            if self.is_oversize(bytes) {
                counters.oversize_allocations.decrease(1);
            }
        }
        self.record_held(Action::FreeRequested, held, tag);
    }

    #[expect(clippy::inline_always, reason = "the parts of a change stay in registers")]
    #[inline(always)]
    fn free_completed(&mut self, held: &Held, splits: Splits) {
        let &Held { span: Span { bytes, place, .. }, requested, tag } = held;
        let (counters, small) = (self.counters, place.small);
        if !place.host {
            if splits != Splits::default() {
                self.free_splits(small, splits);
            }
            counters.active.decrease(small, 1);
            counters.active_bytes.decrease(small, bytes);
            counters.requested_bytes.decrease(small, requested);
        }
        self.record_held(Action::FreeCompleted, held, tag);
    }

    /// Counts the net change of free split blocks, as PyTorch does: its totals must agree with
    /// ours.
    fn free_splits(&mut self, small: bool, splits: Splits) {
        let counters = self.counters;
        for (stat, change) in [
            (&counters.inactive_split, splits.blocks),
            (&counters.inactive_split_bytes, splits.bytes),
        ] {
            if change > 0 {
                stat.increase(small, change.unsigned_abs());
            } else if change < 0 {
                stat.decrease(small, change.unsigned_abs());
            }
        }
    }

    /// Counts a plain segment that is held from now on, or no longer.
    fn segment_held(&mut self, span: &Span, is_held: bool) {
        let counters = self.counters;
        let &Span { bytes, place: Place { pool, small, .. }, .. } = span;
        if is_held {
            counters.segment.increase(small, 1);
            counters.reserved_bytes.increase(small, bytes);
            counters.reserved_by_private.increase(pool, small, bytes);
        } else {
            counters.segment.decrease(small, 1);
            counters.reserved_bytes.decrease(small, bytes);
            counters.reserved_by_private.decrease(pool, small, bytes);
        }
        if self.is_oversize(bytes) {
            if is_held {
                counters.oversize_segments.increase(1);
            } else {
                counters.oversize_segments.decrease(1);
            }
        }
    }

    fn pages_held(&mut self, before: [u64; 3], now: [u64; 3]) {
        let counters = self.counters;
        let change =
            |at: usize| (now[at].saturating_sub(before[at]), before[at].saturating_sub(now[at]));
        for (at, small) in [(0, false), (1, true)] {
            match change(at) {
                (0, 0) => {}
                (0, less) => counters.reserved_bytes.decrease(small, less),
                (more, _) => {
                    counters.reserved_bytes.increase(small, more);
                }
            }
        }
        match change(2) {
            (0, 0) => {}
            (0, less) => counters.spilled_bytes.decrease(less),
            (more, _) => counters.spilled_bytes.increase(more),
        }
    }

    fn shortage_ended(&mut self, ending: Ending, took: Duration) {
        let counters = self.counters;
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        counters.shortages.add(1);
        counters.shortage_nanos.add(nanos);
        match ending {
            Ending::Survived => counters.shortages_survived.add(1),
            Ending::Broken => counters.shortages_broken.add(1),
            Ending::Refused { free, bytes, place, tag } => {
                counters.shortages_refused.add(1);
                counters.num_ooms.add(1);
                self.record(Action::OutOfMemory, &Span { address: free, bytes, place }, tag);
            }
        }
    }

    // ---- history ----

    #[inline]
    fn record_held(&mut self, action: Action, held: &Held, tag: Tag) {
        if self.history.is_on() {
            self.record(action, &Span { bytes: held.requested, ..held.span }, tag);
        }
    }

    fn record(&mut self, action: Action, span: &Span, tag: Tag) {
        if self.history.is_on() {
            let &Span { address, bytes, place: Place { pool, stream, .. } } = span;
            let time = self.clock.now();
            self.history.push(Entry { action, address, size: bytes, stream, pool, time, tag });
        }
    }
}
