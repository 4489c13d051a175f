//! Stitched ranges: second addresses that put free pieces of memory side by side.
//!
//! A range has its own addresses. Behind them lie pages in a row that have their homes elsewhere in the same lane: the
//! free end of one, whole ones, the free beginning of one. One block at a time is handed out
//! of a range. Meanwhile its bytes are *lent* at home, so that nobody else gets them; when it is free they are free at
//! home again, and the range keeps its mappings for the next time: then it costs no driver call.
//!
//! On the stream that freed a piece, stream order alone makes its second address safe. So all pieces of a range
//! belong to one stream and one pool; other streams borrow the block, as they would any other.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::block::{BlockId, BlockState};
use crate::driver::{Driver, DriverResult, EventId, PageHandle, StreamId};
use crate::engine::Engine;
use crate::growth::unless_full;
use crate::history::Tag;
use crate::locked::{Locked, State};
use crate::pieces::Plan;
use crate::policy::{Policy, Request};
use crate::pool::{PoolId, PoolIndex};
use crate::proof::{Idle, Marked};
use crate::segment::{Backing, SegmentId};
use crate::table::{Id, Table};
use crate::unmap::Calls;

/// A range, by its place in the table.
pub(crate) type StitchId = Id<Stitch>;

/// Whose memory it is: a range joins pages of one lane.
pub(crate) type Family = (PoolIndex, StreamId);

/// How many ranges a stream has at most, those of private pools in use apart: the least recently used make room.
const MOST_RANGES: usize = 1024;

/// How many times the device's memory the addresses of all ranges may be.
const MOST_ADDRESSES: u64 = 16;

/// What taking a page out of one range takes: the mapping, and the addresses of a range that has no page left.
const CALLS_A_RANGE: u32 = 2;

/// One stitched range.
#[derive(Debug)]
pub(crate) struct Stitch {
    pub(crate) family: Family,
    /// The block in it that is handed out, or all of it.
    pub(crate) block: BlockId,
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) parts: Vec<Part>,
    /// What may be handed out, as offsets.
    pub(crate) start: u64,
    pub(crate) end: u64,
    /// What is lent at home, in the order of the range; empty while the range is not in use.
    pub(crate) lent: Vec<BlockId>,
    /// When it was last handed out.
    used: u64,
    /// Whether it is not to be used again.
    pub(crate) retired: bool,
}

/// One page in a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) page: PageHandle,
    /// The pool and the segment that its home is in.
    pub(crate) pool: PoolIndex,
    pub(crate) segment: SegmentId,
    /// Its home.
    pub(crate) home: u64,
    pub(crate) bytes: u64,
    /// Where it is in the range.
    pub(crate) offset: u64,
}

/// All ranges.
#[derive(Debug, Default)]
pub(crate) struct Stitches {
    table: Table<Stitch>,
    /// Those that may be used again, by the bytes they can hand out.
    families: BTreeMap<Family, BTreeSet<(u64, StitchId)>>,
    /// The ranges that a page is in, and where it is in each.
    of_page: BTreeMap<PageHandle, Vec<(StitchId, u64)>>,
    /// Retired and not in use, waiting for the work that their stream had when the mark was made.
    retiring: VecDeque<(Marked, Vec<StitchId>)>,
    /// Retired and not in use, until a later request of their stream marks its work.
    retired: Vec<StitchId>,
    /// How many a stream may have, if that is less than usual: for tests.
    most: Option<usize>,
    /// How often a range was handed out.
    clock: u64,
    count: usize,
    addresses: u64,
    /// Room for the runs of a range, so that none is taken from the heap each time.
    runs: Vec<Run>,
}

/// Bytes that lie together at home, in one segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Run {
    pool: PoolIndex,
    segment: SegmentId,
    start: u64,
    end: u64,
}

impl Stitch {
    /// Where the first `size` bytes that it can hand out are at home.
    fn runs(&self, size: u64) -> impl Iterator<Item = Run> {
        let (from, to) = (self.start, self.start + size);
        let mut parts = self.parts.iter().filter_map(move |part| {
            let (start, end) = (from.max(part.offset), to.min(part.offset + part.bytes));
            let home = |offset: u64| part.home + (offset - part.offset);
            let &Part { pool, segment, .. } = part;
            (start < end).then(|| Run { pool, segment, start: home(start), end: home(end) })
        });
        let mut next = parts.next();
        std::iter::from_fn(move || {
            let mut run = next.take()?;
            next = parts.next();
            while let Some(more) =
                next.filter(|it| (it.segment, it.start) == (run.segment, run.end))
            {
                run.end = more.end;
                next = parts.next();
            }
            Some(run)
        })
    }

    pub(crate) fn is_in_use(&self) -> bool {
        !self.lent.is_empty()
    }

    fn usable(&self) -> u64 {
        self.end - self.start
    }
}

impl Stitches {
    pub(crate) fn iter(&self) -> impl Iterator<Item = (StitchId, &Stitch)> {
        self.table.iter()
    }

    pub(crate) fn get(&self, id: StitchId) -> &Stitch {
        &self.table[id]
    }

    /// Gives back what the table does not need.
    pub(crate) fn shrink(&mut self) {
        self.table.shrink();
    }

    /// How many ranges there is room for.
    pub(crate) fn room(&self) -> usize {
        self.table.size().1
    }

    /// How many ranges there are, and how many addresses they take.
    pub(crate) fn size(&self) -> (usize, u64) {
        (self.count, self.addresses)
    }

    /// A range that a page is in, and where it is there.
    fn range_of(&self, page: PageHandle) -> Option<(StitchId, u64)> {
        self.of_page.get(&page).and_then(|ranges| ranges.last().copied())
    }

    /// How many addresses ranges on their way take.
    fn going(&self) -> u64 {
        let waiting = self.retiring.iter().flat_map(|(_, ids)| ids);
        waiting.chain(&self.retired).map(|&id| self.table[id].bytes).sum()
    }

    /// How many ranges a stream has at most.
    fn most_ranges(&self) -> usize {
        self.most.unwrap_or(MOST_RANGES)
    }

    /// How many ranges of a stream may be used again, but for those that are kept.
    fn count_of(&self, stream: StreamId, is_kept: impl Fn(PoolIndex) -> bool) -> usize {
        let families = self.families.iter();
        let its_own = families.filter(|((pool, of), _)| *of == stream && !is_kept(*pool));
        its_own.map(|(_, ranges)| ranges.len()).sum()
    }

    /// The range is not to be used again.
    fn retire(&mut self, id: StitchId) {
        let stitch = &mut self.table[id];
        if std::mem::replace(&mut stitch.retired, true) {
            return;
        }
        if let Some(family) = self.families.get_mut(&stitch.family) {
            family.remove(&(stitch.usable(), id));
            if family.is_empty() {
                self.families.remove(&stitch.family);
            }
        }
        if !stitch.is_in_use() {
            self.retired.push(id);
        }
    }

    /// The events that retired ranges wait for, for the engine to destroy at its end.
    pub(crate) fn take_events(&mut self) -> Vec<EventId> {
        let retiring = std::mem::take(&mut self.retiring).into_iter();
        retiring.filter_map(|(marked, _)| marked.into_event()).collect()
    }

    fn forget_part(&mut self, page: PageHandle, id: StitchId) {
        if let Some(ranges) = self.of_page.get_mut(&page) {
            if let Some(index) = ranges.iter().rposition(|&(it, _)| it == id) {
                ranges.swap_remove(index);
            }
            if ranges.is_empty() {
                self.of_page.remove(&page);
            }
        }
    }

    /// The one that was not used for longest, of those that a stream may retire.
    fn oldest(&self, stream: StreamId, is_kept: impl Fn(PoolIndex) -> bool) -> Option<StitchId> {
        let families = self.families.iter();
        let its_own = families.filter(|((pool, of), _)| *of == stream && !is_kept(*pool));
        let ranges = its_own.flat_map(|(_, ranges)| ranges.iter().map(|&(_, id)| id));
        let idle = ranges.filter(|&id| !self.table[id].is_in_use());
        idle.min_by_key(|&id| self.table[id].used)
    }
}

impl<D: Driver> Engine<D> {
    /// Limits the ranges of a stream to fewer than usual: for tests that are to reach the limit.
    #[doc(hidden)]
    pub fn set_most_ranges(&self, most: usize) {
        self.lock().stitches.most = Some(most);
    }
}

impl<D: Driver> Locked<'_, D> {
    // ---- using a range ----

    /// A range made before whose first `request.size` bytes are free now.
    pub(crate) fn stitched_before(&self, request: &Request) -> Option<StitchId> {
        let stitches = &self.state.stitches;
        let family = (request.pool, request.stream);
        let ranges = stitches.families.get(&family)?.range((request.size, Id::new(0))..);
        ranges.map(|&(_, id)| id).find(|&id| self.can_lend(id, request))
    }

    /// Whether the first `request.size` bytes of a range, if it is still there, can be handed out.
    pub(crate) fn can_lend(&self, id: StitchId, request: &Request) -> bool {
        let Some(stitch) = self.state.stitches.table.get(id) else { return false };
        let is_free = |run| self.free_around(run, request.stream).is_some();
        stitch.family == (request.pool, request.stream)
            && stitch.usable() >= request.size
            && !stitch.retired
            && !stitch.is_in_use()
            && stitch.runs(request.size).all(is_free)
    }

    /// The free blocks at home that the first `size` bytes of a range lie in, if they are free.
    pub(crate) fn homes_of(&self, id: StitchId, size: u64) -> impl Iterator<Item = BlockId> {
        let stitch = self.state.stitches.get(id);
        stitch.runs(size).filter_map(move |run| self.free_around(run, stitch.family.1))
    }

    /// The free block that all of a run lies in.
    fn free_around(&self, run: Run, stream: StreamId) -> Option<BlockId> {
        let State { blocks, pools, .. } = &*self.state;
        let id = pools[run.pool].lane(stream)?.free_at(run.start)?;
        (run.end <= blocks[id].end()).then_some(id)
    }

    /// Makes the first `size` bytes of a range, which are free at home, a free block of its lane, and lends them there.
    pub(crate) fn lend(&mut self, id: StitchId, size: u64) -> BlockId {
        let mut runs = std::mem::take(&mut self.state.stitches.runs);
        let mut lent = std::mem::take(&mut self.state.stitches.table[id].lent);
        runs.extend(self.state.stitches.get(id).runs(size));
        let stream = self.state.stitches.get(id).family.1;
        for run in runs.drain(..) {
            let home = self.free_around(run, stream).expect("free as was seen just now");
            self.cut_free(home, run.start, run.end);
            self.state.blocks[home].state = BlockState::Lent;
            lent.push(home);
        }
        let State { stitches, blocks, .. } = &mut *self.state;
        stitches.runs = runs;
        stitches.clock += 1;
        let stitch = &mut stitches.table[id];
        stitch.lent = lent;
        stitch.used = stitches.clock;
        let start = stitch.address + stitch.start;
        blocks.cut(stitch.block, start, start + size);
        let block = stitch.block;
        self.insert_free(block);
        block
    }

    /// The block of a range is free: so are its bytes at home, and the range can be used again.
    pub(crate) fn return_home(&mut self, id: StitchId) {
        let mut lent = std::mem::take(&mut self.state.stitches.table[id].lent);
        let freed = self.state.blocks[self.state.stitches.table[id].block].freed;
        for home in lent.drain(..) {
            // What was used at the second address was used at home, too.
            self.state.blocks[home].freed = freed;
            self.merge_free(home);
        }
        let State { stitches, blocks, .. } = &mut *self.state;
        let stitch = &mut stitches.table[id];
        stitch.lent = lent;
        let block = stitch.block;
        while let Some(beside) = blocks[block].prev.or(blocks[block].next) {
            blocks.absorb(block, beside);
        }
        blocks[block].state = BlockState::Shadow;
        if stitch.retired {
            stitches.retired.push(id);
        }
    }

    // ---- making one ----

    /// Makes a range for the request, and its first bytes a free block of their lane. `fresh` are pages for what is
    /// missing, wholly free at home.
    pub(crate) fn stitch(
        &mut self,
        plan: Plan,
        fresh: Vec<Part>,
        request: &Request,
        tag: Tag,
    ) -> DriverResult<Option<BlockId>> {
        let mut parts = plan.parts;
        parts.extend(fresh);
        let whole: u64 = parts.iter().map(|part| part.bytes).sum();
        let end = whole + plan.beginning.map_or(0, |(free, _)| free);
        parts.extend(plan.beginning.map(|(_, part)| part));
        let mut bytes = 0;
        for part in &mut parts {
            part.offset = bytes;
            bytes += part.bytes;
        }
        if !self.is_recording() {
            self.retry_ranges();
        }
        let Some(address) = unless_full(self.driver.reserve(bytes))? else { return Ok(None) };
        let pages = parts.iter().map(|part| part.page);
        if let Err(error) = self.state.pages.map_again(self.driver, address, pages) {
            self.leave_range(address, bytes);
            return if error.is_out_of_memory() { Ok(None) } else { Err(error) };
        }
        self.counters.num_device_alloc.add(1);
        let family = (request.pool, request.stream);
        // Its place in the table is in its segment, and the other way round.
        let State { stitches, .. } = &mut *self.state;
        let block = BlockId::new(0);
        let stitch = Stitch {
            family,
            block,
            address,
            bytes,
            parts,
            start: plan.start,
            end,
            lent: Vec::new(),
            used: 0,
            retired: false,
        };
        let (pages, usable): (Vec<_>, _) =
            (stitch.parts.iter().map(|part| (part.page, part.offset)).collect(), stitch.usable());
        let id = stitches.table.insert(stitch);
        stitches.families.entry(family).or_default().insert((usable, id));
        for (page, offset) in pages {
            stitches.of_page.entry(page).or_default().push((id, offset));
        }
        stitches.count += 1;
        stitches.addresses += bytes;
        let backing = Backing::Stitched(id);
        let block = self.add_segment(address, bytes, request, backing, Policy::Paged, tag);
        self.state.blocks[block].state = BlockState::Shadow;
        self.state.stitches.table[id].block = block;
        Ok(Some(self.lend(id, request.size)))
    }

    // ---- parting with ranges ----

    /// Sees to it that one more range of this stream does not make them too many: unmaps those that were retired and
    /// whose work is done, and retires the least recently used of the stream. False if there are too many all the same,
    /// or the driver fails. Nothing of the kind may be done during a capture.
    pub(crate) fn make_room_for_range(&mut self, stream: StreamId) -> bool {
        let most_addresses = self.device.total.saturating_mul(MOST_ADDRESSES);
        if !self.is_recording() && self.dissolve_retired().is_ok() {
            // A graph may use what a private pool handed out, on any stream: an event of one stream proves nothing.
            let State { pools, stitches, .. } = &mut *self.state;
            let is_kept = |pool: PoolIndex| pools[pool].id != PoolId::DEFAULT;
            let (mut count, going) = (stitches.count_of(stream, is_kept), stitches.going());
            let mut addresses = stitches.addresses - going;
            let most = stitches.most_ranges();
            while count >= most || addresses > most_addresses {
                let Some(oldest) = stitches.oldest(stream, is_kept) else { break };
                count -= 1;
                addresses -= stitches.get(oldest).bytes;
                stitches.retire(oldest);
            }
            if self.wait_for_retired(stream).is_err() {
                return false;
            }
        }
        let stitches = &self.state.stitches;
        stitches.count_of(stream, |_| false) < 2 * stitches.most_ranges()
            && stitches.addresses / 2 < most_addresses
    }

    /// Unmaps ranges that were retired and whose work is done: one, and more as far as the calls of one hold of the
    /// lock go. A miss makes one range at most, so they do not become ever more.
    fn dissolve_retired(&mut self) -> DriverResult<()> {
        let mut calls = Calls::of_one_hold();
        let mut failed = Ok(());
        for (marked, mut ids) in std::mem::take(&mut self.state.stitches.retiring) {
            let (marked, polled) = match marked {
                Marked::UnderWay(mark) => self.poll(mark),
                done @ Marked::Done(_) => (done, Ok(())),
            };
            failed = failed.and(polled);
            if let Marked::Done(proof) = marked {
                while calls.are_left()
                    && let Some(id) = ids.pop()
                {
                    let stitch = self.state.stitches.get(id);
                    let taken = stitch.parts.len() + 1;
                    let Some(idle) = self.idle(stitch.block, proof) else {
                        self.state.stitches.retired.push(id);
                        continue;
                    };
                    calls.spend(u32::try_from(taken).unwrap_or(u32::MAX));
                    self.dissolve(id, &idle);
                }
            }
            if ids.is_empty() {
                self.state.pending.keep_events(marked.into_event());
            } else {
                self.state.stitches.retiring.push_back((marked, ids));
            }
        }
        failed
    }

    /// Marks the work after which the retired ranges of a stream may go.
    fn wait_for_retired(&mut self, stream: StreamId) -> DriverResult<()> {
        let State { stitches: Stitches { table, retired, .. }, pools, .. } = &mut *self.state;
        // Ranges of a private pool are dissolved only when their last page is unmapped.
        let is_its_own = |id: &mut StitchId| {
            let (pool, of) = table[*id].family;
            of == stream && pools[pool].id == PoolId::DEFAULT
        };
        let its_own: Vec<StitchId> = retired.extract_if(.., is_its_own).collect();
        if its_own.is_empty() {
            return Ok(());
        }
        let mark = self.mark(stream);
        match mark {
            Ok(Some(mark)) => {
                self.state.stitches.retiring.push_back((Marked::UnderWay(mark), its_own));
                Ok(())
            }
            other => {
                self.state.stitches.retired.extend(its_own);
                other.map(drop)
            }
        }
    }

    /// Takes a page, which is free at home and about to go, out of all ranges it is in; false if `calls` were not enough.
    /// Whoever used it in a range was done with it before it was free at home.
    pub(crate) fn leave_ranges(
        &mut self,
        page: PageHandle,
        idle: &Idle<'_>,
        calls: &mut Calls,
    ) -> bool {
        while let Some((id, offset)) = self.state.stitches.range_of(page) {
            if !calls.spend(CALLS_A_RANGE) {
                return false;
            }
            let State { stitches, pages, .. } = &mut *self.state;
            stitches.retire(id);
            let stitch = &mut stitches.table[id];
            let index = stitch.parts.partition_point(|part| part.offset < offset);
            let part = stitch.parts.remove(index);
            debug_assert_eq!(part.page, page);
            pages.unmap_or_stick(self.driver, stitch.address + offset, idle);
            let is_over = stitch.parts.is_empty();
            stitches.forget_part(page, id);
            self.counters.num_device_free.add(1);
            if is_over {
                self.dissolve(id, idle);
            }
        }
        true
    }

    /// Unmaps what is left of a retired range that nobody is at work on, and gives its addresses back.
    fn dissolve(&mut self, id: StitchId, idle: &Idle<'_>) {
        let State { stitches, pages, .. } = &mut *self.state;
        stitches.retired.retain(|&it| it != id);
        for (_, waiting) in &mut stitches.retiring {
            waiting.retain(|&it| it != id);
        }
        let stitch = stitches.table.remove(id);
        debug_assert!(stitch.retired && !stitch.is_in_use());
        self.counters.num_device_free.add(u64::from(!stitch.parts.is_empty()));
        stitches.count -= 1;
        stitches.addresses -= stitch.bytes;
        for part in &stitch.parts {
            stitches.forget_part(part.page, id);
            pages.unmap_or_stick(self.driver, stitch.address + part.offset, idle);
        }
        let block = self.state.blocks.remove(stitch.block);
        self.state.segments.remove(block.segment);
        self.state.pools[block.pool].segment_went(block.stream, self.lanes);
        self.leave_range(stitch.address, stitch.bytes);
    }
}
