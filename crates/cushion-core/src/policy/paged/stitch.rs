//! Stitches: second addresses that put scattered free memory side by side.
//!
//! A stitch has its own addresses. Behind them lie pages in a row whose homes are elsewhere in the
//! same lane: the free end of one page, whole pages, the free start of one page. A stitch hands out
//! one block at a time. Meanwhile its bytes are *lent* at home, so that no other request gets them.
//! When the block is freed, they are free at home again. The stitch keeps its mappings, so that its
//! next use costs no driver call.
//!
//! On the stream that freed the memory, stream order alone makes its second address safe. So all
//! pages of a stitch belong to one stream. Other streams borrow the block like any other.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::base::table::{Id, Table};
use crate::driver::{EventId, PageHandle, StreamId};
use crate::heap::Heap;
use crate::heap::block::BlockId;
use crate::heap::pool::{LaneId, PoolIndex};
use crate::heap::segment::SegmentId;
use crate::memory::Request;
use crate::streams::proof::Marked;

/// The index of a stitch in the table. Another stitch may have the same index later. With generations
/// (`slotmap`) all replays make the same driver calls, and the table could not shrink
/// (docs/results/2026-11-17-rooms.md).
pub(super) type StitchId = Id<Stitch>;

/// How many stitches a stream has at most, except those of private pools in use. The least recently
/// used make room.
const MOST_STITCHES: usize = 1024;

/// One stitch.
#[derive(Debug)]
pub(super) struct Stitch {
    /// The lane of its pages and its block. Whole pages may belong to the lane's small half.
    pub(super) lane: LaneId,
    /// The block that is handed out, or the block over all of it.
    pub(super) block: BlockId,
    pub(super) address: u64,
    pub(super) bytes: u64,
    pub(super) pages: Vec<StitchedPage>,
    /// The usable bytes begin at this offset,
    pub(super) start: u64,
    pub(super) end: u64,
    /// The blocks lent at home, in the order of the stitch. Empty while the stitch is not in use.
    pub(super) lent: Vec<BlockId>,
    /// When it was last handed out, by the count of uses.
    pub(super) used: u64,
    /// Whether it must not be used again.
    pub(super) retired: bool,
}

/// One page of a stitch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StitchedPage {
    pub(super) page: PageHandle,
    /// The pool and the segment of its home.
    pub(super) pool: PoolIndex,
    pub(super) segment: SegmentId,
    pub(super) home: u64,
    pub(super) bytes: u64,
    /// Its offset in the stitch.
    pub(super) offset: u64,
}

/// Bytes of a stitch that are adjacent at home, in one segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct HomeSpan {
    pool: PoolIndex,
    segment: SegmentId,
    pub(super) start: u64,
    pub(super) end: u64,
}

/// All stitches.
#[derive(Debug, Default)]
pub(super) struct Stitches {
    table: Table<Stitch>,
    /// Stitches that may be used again, by lane and usable bytes.
    usable: BTreeMap<LaneId, BTreeSet<(u64, StitchId)>>,
    /// The stitches of each page, and its offset in each.
    of_page: BTreeMap<PageHandle, Vec<(StitchId, u64)>>,
    /// Retired and not in use. They wait for the work that their stream had when it was marked.
    pub(super) waiting: VecDeque<(Marked, Vec<StitchId>)>,
    /// Retired and not in use. A later request of their stream marks its work.
    pub(super) retired: Vec<StitchId>,
    /// How many stitches a stream may have, if that is less than usual: for tests.
    most: Option<usize>,
    /// How often a stitch was handed out.
    clock: u64,
    count: usize,
    addresses: u64,
    /// A buffer for the spans of a stitch, so that none is allocated each time.
    pub(super) spans: Vec<HomeSpan>,
}

impl Stitch {
    /// Returns where the first `size` usable bytes are at home.
    pub(super) fn home_spans(&self, size: u64) -> impl Iterator<Item = HomeSpan> {
        let (from, to) = (self.start, self.start + size);
        let mut spans = self.pages.iter().filter_map(move |page| {
            let (start, end) = (from.max(page.offset), to.min(page.offset + page.bytes));
            let home = |offset: u64| page.home + (offset - page.offset);
            let &StitchedPage { pool, segment, .. } = page;
            (start < end).then(|| HomeSpan { pool, segment, start: home(start), end: home(end) })
        });
        let mut next = spans.next();
        std::iter::from_fn(move || {
            let mut span = next.take()?;
            next = spans.next();
            while let Some(more) =
                next.filter(|it| (it.segment, it.start) == (span.segment, span.end))
            {
                span.end = more.end;
                next = spans.next();
            }
            Some(span)
        })
    }

    pub(super) fn is_in_use(&self) -> bool {
        !self.lent.is_empty()
    }

    fn usable(&self) -> u64 {
        self.end - self.start
    }
}

/// Returns the free block at home that contains all of a span.
pub(super) fn free_around(heap: &Heap, span: HomeSpan, stream: StreamId) -> Option<BlockId> {
    let id = heap.lane(LaneId { pool: span.pool, stream })?.free_at(span.start)?;
    (span.end <= heap[id].end()).then_some(id)
}

impl Stitches {
    // ---- looking ----

    pub(super) fn iter(&self) -> impl Iterator<Item = (StitchId, &Stitch)> {
        self.table.iter()
    }

    pub(super) fn get(&self, id: StitchId) -> &Stitch {
        &self.table[id]
    }

    pub(super) fn get_mut(&mut self, id: StitchId) -> &mut Stitch {
        &mut self.table[id]
    }

    /// Returns the number of stitches, the capacity of the table, and the bytes of all addresses.
    pub(super) fn size(&self) -> (usize, usize, u64) {
        (self.count, self.table.size().1, self.addresses)
    }

    /// Returns an existing stitch whose first `request.size` usable bytes are free now.
    pub(super) fn made_before(&self, heap: &Heap, request: &Request) -> Option<StitchId> {
        let usable = self.usable.get(&request.lane)?.range((request.size, Id::new(0))..);
        usable.map(|&(_, id)| id).find(|&id| self.can_lend(heap, id, request))
    }

    /// Returns whether the first `request.size` usable bytes of a stitch, if it still exists, can
    /// be handed out.
    pub(super) fn can_lend(&self, heap: &Heap, id: StitchId, request: &Request) -> bool {
        let Some(stitch) = self.table.get(id) else { return false };
        let is_free = |span| free_around(heap, span, request.lane.stream).is_some();
        stitch.lane == request.lane
            && stitch.usable() >= request.size
            && !stitch.retired
            && !stitch.is_in_use()
            && stitch.home_spans(request.size).all(is_free)
    }

    /// Returns the free blocks at home that contain the first `size` usable bytes of a stitch, if
    /// they are free.
    pub(super) fn homes_of(
        &self,
        heap: &Heap,
        id: StitchId,
        size: u64,
    ) -> impl Iterator<Item = BlockId> {
        let stitch = self.get(id);
        let stream = stitch.lane.stream;
        stitch.home_spans(size).filter_map(move |span| free_around(heap, span, stream))
    }

    /// Returns a stitch that contains a page, and the page's offset there.
    pub(super) fn stitch_of(&self, page: PageHandle) -> Option<(StitchId, u64)> {
        self.of_page.get(&page).and_then(|stitches| stitches.last().copied())
    }

    /// Returns the bytes of addresses of retired stitches that are not in use.
    pub(super) fn retired_addresses(&self) -> u64 {
        let waiting = self.waiting.iter().flat_map(|(_, ids)| ids);
        waiting.chain(&self.retired).map(|&id| self.table[id].bytes).sum()
    }

    /// Returns how many stitches a stream has at most.
    pub(super) fn most(&self) -> usize {
        self.most.unwrap_or(MOST_STITCHES)
    }

    /// Limits the stitches of a stream to fewer than usual, for tests.
    pub(super) fn set_most(&mut self, most: usize) {
        self.most = Some(most);
    }

    /// Returns how many stitches of a stream may be used again, except in pools that are kept.
    pub(super) fn count_of(&self, stream: StreamId, is_kept: impl Fn(PoolIndex) -> bool) -> usize {
        self.of_stream(stream, is_kept).map(BTreeSet::len).sum()
    }

    fn of_stream(
        &self,
        stream: StreamId,
        is_kept: impl Fn(PoolIndex) -> bool,
    ) -> impl Iterator<Item = &BTreeSet<(u64, StitchId)>> {
        let is_its_own = move |lane: &LaneId| lane.stream == stream && !is_kept(lane.pool);
        self.usable.iter().filter(move |(lane, _)| is_its_own(lane)).map(|(_, stitches)| stitches)
    }

    /// Returns the least recently used idle stitch of a stream, except in pools that are kept.
    pub(super) fn oldest(
        &self,
        stream: StreamId,
        is_kept: impl Fn(PoolIndex) -> bool,
    ) -> Option<StitchId> {
        let stitches = self.of_stream(stream, is_kept).flat_map(|it| it.iter().map(|&(_, id)| id));
        let idle = stitches.filter(|&id| !self.table[id].is_in_use());
        idle.min_by_key(|&id| self.table[id].used)
    }

    // ---- changing ----

    /// Adds a stitch.
    pub(super) fn insert(&mut self, stitch: Stitch) -> StitchId {
        let pages: Vec<_> = stitch.pages.iter().map(|page| (page.page, page.offset)).collect();
        let (usable, lane, bytes) = (stitch.usable(), stitch.lane, stitch.bytes);
        let id = self.table.insert(stitch);
        self.usable.entry(lane).or_default().insert((usable, id));
        for (page, offset) in pages {
            self.of_page.entry(page).or_default().push((id, offset));
        }
        self.count += 1;
        self.addresses += bytes;
        id
    }

    /// Removes a retired stitch that is not in use.
    pub(super) fn remove(&mut self, id: StitchId) -> Stitch {
        self.retired.retain(|&it| it != id);
        for (_, waiting) in &mut self.waiting {
            waiting.retain(|&it| it != id);
        }
        let stitch = self.table.remove(id);
        debug_assert!(stitch.retired && !stitch.is_in_use());
        self.count -= 1;
        self.addresses -= stitch.bytes;
        for page in &stitch.pages {
            self.forget_page(page.page, id);
        }
        stitch
    }

    /// Notes that the stitch is handed out now.
    pub(super) fn note_used(&mut self, id: StitchId) {
        self.clock += 1;
        self.table[id].used = self.clock;
    }

    /// Marks the stitch as not to be used again.
    pub(super) fn retire(&mut self, id: StitchId) {
        let stitch = &mut self.table[id];
        if std::mem::replace(&mut stitch.retired, true) {
            return;
        }
        if let Some(usable) = self.usable.get_mut(&stitch.lane) {
            usable.remove(&(stitch.usable(), id));
            if usable.is_empty() {
                self.usable.remove(&stitch.lane);
            }
        }
        if !stitch.is_in_use() {
            self.retired.push(id);
        }
    }

    /// Takes a page out of a stitch. Returns its address there, and whether it was the last page.
    pub(super) fn remove_page(
        &mut self,
        id: StitchId,
        page: PageHandle,
        offset: u64,
    ) -> (u64, bool) {
        let stitch = &mut self.table[id];
        let index = stitch.pages.partition_point(|page| page.offset < offset);
        let removed = stitch.pages.remove(index);
        debug_assert_eq!(removed.page, page);
        let (address, is_last) = (stitch.address + offset, stitch.pages.is_empty());
        self.forget_page(page, id);
        (address, is_last)
    }

    fn forget_page(&mut self, page: PageHandle, id: StitchId) {
        if let Some(stitches) = self.of_page.get_mut(&page) {
            if let Some(index) = stitches.iter().rposition(|&(it, _)| it == id) {
                stitches.swap_remove(index);
            }
            if stitches.is_empty() {
                self.of_page.remove(&page);
            }
        }
    }

    /// Returns the events that retired stitches wait for, for the engine to destroy at its end.
    pub(super) fn take_events(&mut self) -> Vec<EventId> {
        let waiting = std::mem::take(&mut self.waiting).into_iter();
        waiting.filter_map(|(marked, _)| marked.into_event()).collect()
    }

    /// Shrinks the table to its contents.
    pub(super) fn shrink(&mut self) {
        self.table.shrink();
    }
}
