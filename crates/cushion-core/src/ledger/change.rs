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

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::base::clock::VirtualClock;
    use crate::ledger::history::History;
    use crate::ledger::lanes::Lanes;
    use crate::ledger::stats::{Counters, StatArray, Stats};

    const PRIVATE: PoolId = PoolId(0, 9);
    const NOW: Duration = Duration::from_millis(12);
    /// Sizes from here on are oversize.
    const MOST: u64 = 1000;

    const LARGE: Place =
        Place { pool: PoolId::DEFAULT, small: false, stream: StreamId(4), host: false };
    const SMALL: Place = Place { small: true, ..LARGE };
    const HOST: Place = Place { host: true, ..LARGE };
    const OF_GRAPH: Place = Place { pool: PRIVATE, ..LARGE };

    fn span(bytes: u64, place: Place) -> Span {
        Span { address: 4096, bytes, place }
    }

    fn held(bytes: u64, place: Place) -> Held {
        Held { span: span(bytes, place), requested: bytes - 30, tag: Tag(5) }
    }

    /// Splits whose bytes rise and whose count falls, as after two neighbours merged.
    const SPLITS: Splits = Splits { blocks: -1, bytes: 100 };

    struct Books {
        counters: Counters,
        history: History,
        clock: VirtualClock,
    }

    impl Books {
        fn new() -> Self {
            let mut history = History::default();
            history.restart(100);
            let clock = VirtualClock::new();
            clock.advance(NOW);
            Self { counters: Counters::new(Some(MOST)), history, clock }
        }

        fn ledger(&mut self) -> Ledger<'_> {
            Ledger::new(&self.counters, &mut self.history, &self.clock)
        }

        fn apply(&mut self, change: Change) {
            self.ledger().apply(change);
        }

        fn stats(&self) -> Stats {
            self.counters.read(&Lanes::default())
        }

        /// Every figure as it is now, by name.
        fn figures(&self) -> BTreeMap<String, i64> {
            let stats = self.stats();
            let mut figures = BTreeMap::new();
            for (key, value) in stats.flat() {
                if let Some(name) = key.strip_suffix(".current") {
                    figures.insert(name.to_owned(), value);
                } else if !key.contains('.') {
                    figures.insert(key, value);
                }
            }
            let none = StatArray::default();
            let private = stats.reserved_bytes_by_private_pools.get(&PRIVATE).unwrap_or(&none);
            for (name, value) in [
                ("private.small_pool", private.small_pool.current),
                ("private.large_pool", private.large_pool.current),
                ("spilled_bytes", stats.spilled_bytes.current),
                ("spilled_allocation", stats.spilled_allocation.current),
                ("shortages", stats.shortages),
                ("shortages_survived", stats.shortages_survived),
                ("shortages_refused", stats.shortages_refused),
                ("shortages_broken", stats.shortages_broken),
                ("shortage_nanos", stats.shortage_nanos),
                ("hits", stats.hits),
                ("misses", stats.misses),
            ] {
                figures.insert(name.to_owned(), i64::try_from(value).unwrap());
            }
            figures
        }
    }

    /// A change, what must have come before it, the figures that it changes, and its entry in the
    /// history: the action, the address, the size and the tag.
    struct Row {
        before: Vec<Change>,
        change: Change,
        figures: Vec<(&'static str, i64)>,
        entry: Option<(Action, u64, u64, Tag)>,
    }

    /// A row of one change that nothing must come before.
    fn row(
        change: Change,
        figures: Vec<(&'static str, i64)>,
        entry: Option<(Action, u64, u64, Tag)>,
    ) -> Row {
        Row { before: Vec::new(), change, figures, entry }
    }

    fn rows_of_blocks() -> Vec<Row> {
        let oversize = held(MOST, LARGE);
        let handed_out = Change::HandedOut(oversize, Splits { blocks: 2, bytes: 300 });
        let small = held(500, SMALL);
        vec![
            row(
                handed_out,
                vec![
                    ("allocation.large_pool", 1),
                    ("active.large_pool", 1),
                    ("allocated_bytes.large_pool", 1000),
                    ("active_bytes.large_pool", 1000),
                    ("requested_bytes.large_pool", 970),
                    ("inactive_split.large_pool", 2),
                    ("inactive_split_bytes.large_pool", 300),
                    ("oversize_allocations", 1),
                ],
                Some((Action::Alloc, 4096, 970, Tag(5))),
            ),
            row(
                Change::HandedOut(small, Splits::default()),
                vec![
                    ("allocation.small_pool", 1),
                    ("active.small_pool", 1),
                    ("allocated_bytes.small_pool", 500),
                    ("active_bytes.small_pool", 500),
                    ("requested_bytes.small_pool", 470),
                ],
                Some((Action::Alloc, 4096, 470, Tag(5))),
            ),
            row(
                Change::HandedOut(held(MOST, HOST), Splits::default()),
                vec![("spilled_allocation", 1)],
                Some((Action::Alloc, 4096, 970, Tag(5))),
            ),
            Row {
                before: vec![handed_out],
                change: Change::FreeRequested(oversize),
                figures: vec![
                    ("allocation.large_pool", -1),
                    ("allocated_bytes.large_pool", -1000),
                    ("oversize_allocations", -1),
                ],
                entry: Some((Action::FreeRequested, 4096, 970, Tag(5))),
            },
            Row {
                before: vec![Change::HandedOut(held(MOST, HOST), Splits::default())],
                change: Change::FreeRequested(held(MOST, HOST)),
                figures: vec![("spilled_allocation", -1)],
                entry: Some((Action::FreeRequested, 4096, 970, Tag(5))),
            },
            Row {
                before: vec![handed_out, Change::FreeRequested(oversize)],
                change: Change::FreeCompleted(oversize, SPLITS),
                figures: vec![
                    ("active.large_pool", -1),
                    ("active_bytes.large_pool", -1000),
                    ("requested_bytes.large_pool", -970),
                    ("inactive_split.large_pool", -1),
                    ("inactive_split_bytes.large_pool", 100),
                ],
                entry: Some((Action::FreeCompleted, 4096, 970, Tag(5))),
            },
            row(
                Change::FreeCompleted(held(MOST, HOST), Splits::default()),
                vec![],
                Some((Action::FreeCompleted, 4096, 970, Tag(5))),
            ),
        ]
    }

    fn rows_of_segments() -> Vec<Row> {
        let (large, graph) = (span(MOST, LARGE), span(700, OF_GRAPH));
        let allocated = Change::SegmentAllocated(large, Tag(6));
        let of_graph = |bytes| vec![("private.large_pool", bytes)];
        vec![
            row(
                allocated,
                vec![
                    ("segment.large_pool", 1),
                    ("reserved_bytes.large_pool", 1000),
                    ("oversize_segments", 1),
                    ("num_device_alloc", 1),
                ],
                Some((Action::SegmentAlloc, 4096, 1000, Tag(6))),
            ),
            row(
                Change::SegmentAllocated(span(700, Place { small: true, ..OF_GRAPH }), Tag(6)),
                vec![
                    ("segment.small_pool", 1),
                    ("reserved_bytes.small_pool", 700),
                    ("private.small_pool", 700),
                    ("num_device_alloc", 1),
                ],
                Some((Action::SegmentAlloc, 4096, 700, Tag(6))),
            ),
            Row {
                before: vec![allocated],
                change: Change::SegmentDetached(large),
                figures: vec![
                    ("segment.large_pool", -1),
                    ("reserved_bytes.large_pool", -1000),
                    ("oversize_segments", -1),
                ],
                entry: None,
            },
            Row {
                before: vec![allocated, Change::SegmentDetached(large)],
                change: Change::SegmentAttached(large),
                figures: vec![
                    ("segment.large_pool", 1),
                    ("reserved_bytes.large_pool", 1000),
                    ("oversize_segments", 1),
                ],
                entry: None,
            },
            Row {
                before: vec![allocated, Change::SegmentDetached(large)],
                change: Change::SegmentFreed(large, Tag(8)),
                figures: vec![("num_device_free", 1)],
                entry: Some((Action::SegmentFree, 4096, 1000, Tag(8))),
            },
            row(
                Change::PagesMapped(graph, Tag(6)),
                vec![("num_device_alloc", 1), ("private.large_pool", 700)],
                Some((Action::SegmentMap, 4096, 700, Tag(6))),
            ),
            Row {
                before: vec![Change::PagesMapped(graph, Tag(6))],
                change: Change::PagesUnmapped(graph),
                figures: of_graph(-700),
                entry: None,
            },
            row(
                Change::UnmapEnded(graph, Tag(6)),
                vec![("num_device_free", 1)],
                Some((Action::SegmentUnmap, 4096, 700, Tag(6))),
            ),
            row(Change::PageSplit, vec![("num_device_alloc", 1), ("num_device_free", 1)], None),
            Row {
                before: vec![Change::PagesMapped(graph, Tag(6))],
                change: Change::PageLost(graph),
                figures: vec![("num_device_free", 1), ("private.large_pool", -700)],
                entry: Some((Action::SegmentUnmap, 4096, 700, Tag::NONE)),
            },
            row(Change::StitchMapped, vec![("num_device_alloc", 1)], None),
            row(Change::StitchUnmapped, vec![("num_device_free", 1)], None),
            row(
                Change::PagesHeld { before: [0; 3], now: [40, 50, 60] },
                vec![
                    ("reserved_bytes.large_pool", 40),
                    ("reserved_bytes.small_pool", 50),
                    ("spilled_bytes", 60),
                ],
                None,
            ),
            Row {
                before: vec![Change::PagesHeld { before: [0; 3], now: [40, 50, 60] }],
                change: Change::PagesHeld { before: [40, 50, 60], now: [70, 50, 20] },
                figures: vec![("reserved_bytes.large_pool", 30), ("spilled_bytes", -40)],
                entry: None,
            },
        ]
    }

    fn rows_of_requests() -> Vec<Row> {
        let took = Duration::from_nanos(77);
        let refused = Ending::Refused { free: 33, bytes: 900, place: OF_GRAPH, tag: Tag(6) };
        let shortage = |ending: &[&'static str]| {
            let counted = ["shortages"].iter().chain(ending).map(|&name| (name, 1));
            counted.chain([("shortage_nanos", 77)]).collect()
        };
        vec![
            row(Change::Hit, vec![("hits", 1)], None),
            row(Change::Miss, vec![("misses", 1)], None),
            row(Change::Retried, vec![("num_alloc_retries", 1)], None),
            row(Change::EventsAwaited, vec![("num_sync_all_streams", 1)], None),
            row(
                Change::ShortageEnded(Ending::Survived, took),
                shortage(&["shortages_survived"]),
                None,
            ),
            row(Change::ShortageEnded(Ending::Broken, took), shortage(&["shortages_broken"]), None),
            row(
                Change::ShortageEnded(refused, took),
                shortage(&["shortages_refused", "num_ooms"]),
                Some((Action::OutOfMemory, 33, 900, Tag(6))),
            ),
            row(
                Change::SnapshotTaken { active: 123 },
                vec![],
                Some((Action::Snapshot, 0, 123, Tag::NONE)),
            ),
            Row {
                before: vec![Change::SegmentAllocated(span(MOST, LARGE), Tag::NONE)],
                change: Change::OversizeChanged { most: 400, allocations: 3, segments: 0 },
                figures: vec![
                    ("max_split_size", -600),
                    ("oversize_allocations", 3),
                    ("oversize_segments", -1),
                ],
                entry: None,
            },
        ]
    }

    /// The variants of [`Change`], so that a new one is missed here.
    fn variant(change: &Change) -> usize {
        match change {
            Change::HandedOut(..) => 0,
            Change::FreeRequested(_) => 1,
            Change::FreeCompleted(..) => 2,
            Change::SegmentAllocated(..) => 3,
            Change::SegmentDetached(_) => 4,
            Change::SegmentAttached(_) => 5,
            Change::SegmentFreed(..) => 6,
            Change::PagesMapped(..) => 7,
            Change::PagesUnmapped(_) => 8,
            Change::UnmapEnded(..) => 9,
            Change::PageSplit => 10,
            Change::PageLost(_) => 11,
            Change::StitchMapped => 12,
            Change::StitchUnmapped => 13,
            Change::PagesHeld { .. } => 14,
            Change::Hit => 15,
            Change::Miss => 16,
            Change::Retried => 17,
            Change::EventsAwaited => 18,
            Change::ShortageEnded(..) => 19,
            Change::SnapshotTaken { .. } => 20,
            Change::OversizeChanged { .. } => 21,
        }
    }

    #[test]
    fn each_change_counts_and_is_recorded_as_the_table_says() {
        let mut seen = [false; 22];
        let rows = rows_of_blocks().into_iter().chain(rows_of_segments()).chain(rows_of_requests());
        for Row { before, change, figures, entry } in rows {
            seen[variant(&change)] = true;
            let mut books = Books::new();
            before.into_iter().for_each(|change| books.apply(change));
            let start = books.figures();
            books.history.restart(100);
            books.apply(change);

            let mut expected = start;
            for (name, by) in figures {
                *expected.get_mut(name).unwrap() += by;
                if let Some((array, "small_pool" | "large_pool")) = name.split_once('.')
                    && array != "private"
                {
                    *expected.get_mut(&format!("{array}.all")).unwrap() += by;
                }
            }
            assert_eq!(books.figures(), expected, "{change:?}");

            let entries = books.history.read().0;
            let found: Vec<_> =
                entries.iter().map(|it| (it.action, it.address, it.size, it.tag)).collect();
            assert_eq!(found, Vec::from_iter(entry), "{change:?}");
            assert!(entries.iter().all(|it| it.time == NOW), "{entries:?}");
        }
        assert!(seen.iter().all(|&seen| seen), "a change is not in the tables: {seen:?}");
    }

    #[test]
    fn entries_say_the_stream_and_the_pool() {
        let mut books = Books::new();
        books.apply(Change::HandedOut(held(500, OF_GRAPH), Splits::default()));
        books.apply(Change::SegmentAllocated(span(500, SMALL), Tag::NONE));
        let places: Vec<_> =
            books.history.entries().map(|entry| (entry.stream, entry.pool)).collect();
        assert_eq!(places, [(StreamId(4), PRIVATE), (StreamId(4), PoolId::DEFAULT)]);
    }

    #[test]
    fn history_that_is_off_records_nothing() {
        let mut books = Books::new();
        books.history.restart(0);
        let rows = rows_of_blocks().into_iter().chain(rows_of_segments()).chain(rows_of_requests());
        for row in rows {
            row.before.into_iter().chain([row.change]).for_each(|change| books.apply(change));
        }
        assert_eq!(books.history.read(), (vec![], 0));
    }

    #[test]
    fn splits_count_net() {
        let mut books = Books::new();
        let block = held(500, SMALL);
        books.apply(Change::HandedOut(block, Splits { blocks: 3, bytes: 900 }));
        books.apply(Change::FreeCompleted(block, SPLITS));
        let stats = books.stats();
        let (blocks, bytes) =
            (stats.inactive_split.small_pool, stats.inactive_split_bytes.small_pool);
        assert_eq!((blocks.current, blocks.allocated, blocks.freed), (2, 3, 1));
        assert_eq!((bytes.current, bytes.allocated, bytes.freed), (1000, 1000, 0));
        assert_eq!(bytes.peak, 1000);
    }

    #[test]
    fn the_watermark_is_the_most_since_its_restart() {
        let mut books = Books::new();
        let hand_out = |bytes, place| Change::HandedOut(held(bytes, place), Splits::default());
        let free = |bytes, place| Change::FreeCompleted(held(bytes, place), Splits::default());
        books.apply(hand_out(700, LARGE));
        books.apply(hand_out(200, SMALL));
        books.apply(hand_out(5000, HOST));
        books.apply(Change::FreeRequested(held(700, LARGE)));
        assert_eq!((books.ledger().active(), books.ledger().watermark()), (900, 900));
        assert_eq!(books.ledger().pending(), 700);
        books.apply(free(700, LARGE));
        assert_eq!((books.ledger().active(), books.ledger().watermark()), (200, 900));
        assert_eq!(books.ledger().restart_watermark(), 900);
        assert_eq!(books.ledger().watermark(), 200);
        books.apply(hand_out(40, LARGE));
        books.apply(free(40, LARGE));
        assert_eq!(books.ledger().restart_watermark(), 240);
    }

    #[test]
    fn a_ledger_reads_what_was_counted() {
        let mut books = Books::new();
        books.apply(Change::PagesHeld { before: [0; 3], now: [1000, 500, 9000] });
        books.apply(Change::SegmentAllocated(span(300, LARGE), Tag::NONE));
        books.apply(Change::HandedOut(held(600, LARGE), Splits::default()));
        let ledger = books.ledger();
        assert_eq!((ledger.reserved(), ledger.active(), ledger.cached()), (1800, 600, 1200));
        assert_eq!((ledger.pending(), ledger.freed_since_reset()), (0, 0));
        books.apply(Change::FreeRequested(held(600, LARGE)));
        books.apply(Change::FreeCompleted(held(600, LARGE), Splits::default()));
        let ledger = books.ledger();
        assert_eq!((ledger.active(), ledger.freed_since_reset()), (0, 600));
    }
}
