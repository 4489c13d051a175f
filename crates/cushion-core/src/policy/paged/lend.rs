//! Making stitches, handing out blocks of them, and dissolving them.

use super::Paged;
use super::plan::Plan;
use super::stitch::{Stitch, StitchId, StitchedPage, free_around};
use crate::base::names::{PolicyIndex, PoolId, Tag};
use crate::driver::{Driver, DriverResult, PageHandle, StreamId};
use crate::heap::block::{BlockId, BlockState};
use crate::heap::pool::PoolIndex;
use crate::heap::segment::Kind;
use crate::ledger::change::Change;
use crate::memory::unmap::Calls;
use crate::memory::{Mem, Request};
use crate::options::Policy;
use crate::streams::proof::{Idle, Marked};

/// The addresses of all stitches may be at most this many times the device's memory.
const MOST_ADDRESSES: u64 = 16;

/// The driver calls that take a page out of one stitch: for the mapping, and for the addresses of a
/// stitch without pages.
const CALLS_A_STITCH: u32 = 2;

impl Paged {
    // ---- using a stitch ----

    /// Makes the first `size` bytes of a stitch, which are free at home, a free block of the
    /// stitch's lane, and marks them as lent at home.
    pub(super) fn lend<D: Driver>(
        &mut self,
        mem: &mut Mem<'_, D>,
        id: StitchId,
        size: u64,
    ) -> BlockId {
        let mut spans = std::mem::take(&mut self.stitches.spans);
        let stitch = self.stitches.get_mut(id);
        let mut lent = std::mem::take(&mut stitch.lent);
        spans.extend(stitch.home_spans(size));
        let stream = stitch.lane.stream;
        for span in spans.drain(..) {
            let home = free_around(mem.heap, span, stream).expect("free as was seen just now");
            mem.heap.lend(home, span.start, span.end);
            lent.push(home);
        }
        self.stitches.spans = spans;
        self.stitches.note_used(id);
        let stitch = self.stitches.get_mut(id);
        stitch.lent = lent;
        let start = stitch.address + stitch.start;
        let block = stitch.block;
        mem.heap.show(block, start, start + size);
        block
    }

    /// Completes the free of a stitch's block: its bytes are free at home, and the stitch can be
    /// used again.
    pub(super) fn return_home<D: Driver>(
        &mut self,
        mem: &mut Mem<'_, D>,
        id: StitchId,
        block: BlockId,
        tag: Tag,
    ) {
        mem.complete_free_of_stitch(block, tag);
        let freed = mem.heap[block].freed;
        let stitch = self.stitches.get_mut(id);
        for home in stitch.lent.drain(..) {
            // A use at the second address is a use of the same memory at home.
            mem.heap.set_freed(home, freed);
            mem.heap.merge_free(home);
        }
        if stitch.retired {
            self.stitches.retired.push(id);
        }
    }

    // ---- making a stitch ----

    /// Makes a stitch for the request, and makes its first bytes a free block of its lane. `fresh`
    /// are pages for the missing bytes, wholly free at home. Returns `None` if addresses ran out.
    pub(super) fn stitch<D: Driver>(
        &mut self,
        mem: &mut Mem<'_, D>,
        plan: Plan,
        fresh: Vec<StitchedPage>,
        request: &Request,
    ) -> DriverResult<Option<BlockId>> {
        let mut pages = plan.pages;
        pages.extend(fresh);
        let whole: u64 = pages.iter().map(|page| page.bytes).sum();
        let end = whole + plan.beginning.map_or(0, |(free, _)| free);
        pages.extend(plan.beginning.map(|(_, page)| page));
        let mut bytes = 0;
        for page in &mut pages {
            page.offset = bytes;
            bytes += page.bytes;
        }
        if !mem.is_recording() {
            mem.retry_ranges();
        }
        let Some(address) = mem.backing.reserve(mem.driver, bytes)? else { return Ok(None) };
        let handles = pages.iter().map(|page| page.page);
        if let Err(error) = mem.backing.map_again(mem.driver, address, handles) {
            mem.give_up_range(address, bytes);
            return if error.is_out_of_memory() { Ok(None) } else { Err(error) };
        }
        mem.ledger.apply(Change::StitchMapped);
        // The segment knows the stitch, and the stitch the segment's block.
        let id = self.stitches.insert(Stitch {
            lane: request.lane,
            block: BlockId::new(0),
            address,
            bytes,
            pages,
            start: plan.start,
            end,
            lent: Vec::new(),
            used: 0,
            retired: false,
        });
        let kind = Kind::Stitch(id.number());
        let policy = PolicyIndex::from(Policy::Paged);
        let block = mem.add_segment(address, bytes, request, kind, policy, BlockState::Shadow);
        self.stitches.get_mut(id).block = block;
        Ok(Some(self.lend(mem, id, request.size)))
    }

    // ---- dissolving stitches ----

    /// Makes room for one more stitch of this stream: unmaps retired stitches whose work is done,
    /// and retires the least recently used of the stream. Returns false if there are still too
    /// many, or the driver fails. Unmaps nothing during a capture.
    pub(super) fn make_room_for_stitch<D: Driver>(
        &mut self,
        mem: &mut Mem<'_, D>,
        stream: StreamId,
    ) -> bool {
        let most_addresses = mem.device.total.saturating_mul(MOST_ADDRESSES);
        if !mem.is_recording() && self.dissolve_retired(mem).is_ok() {
            // A graph may use memory of a private pool on any stream: an event of one stream proves
            // nothing.
            let stitches = &mut self.stitches;
            let is_kept = |pool: PoolIndex| mem.heap[pool].id != PoolId::DEFAULT;
            let mut count = stitches.count_of(stream, is_kept);
            let mut addresses = stitches.size().2 - stitches.retired_addresses();
            let most = stitches.most();
            while count >= most || addresses > most_addresses {
                let Some(oldest) = stitches.oldest(stream, is_kept) else { break };
                count -= 1;
                addresses -= stitches.get(oldest).bytes;
                stitches.retire(oldest);
            }
            if self.wait_for_retired(mem, stream).is_err() {
                return false;
            }
        }
        let stitches = &self.stitches;
        stitches.count_of(stream, |_| false) < 2 * stitches.most()
            && stitches.size().2 / 2 < most_addresses
    }

    /// Unmaps retired stitches whose work is done: one, and more as far as the calls of one hold of
    /// the lock allow. A miss makes at most one stitch, so their number does not grow without
    /// bound.
    fn dissolve_retired<D: Driver>(&mut self, mem: &mut Mem<'_, D>) -> DriverResult<()> {
        let mut calls = Calls::of_one_hold();
        let mut failed = Ok(());
        for (marked, mut ids) in std::mem::take(&mut self.stitches.waiting) {
            let (marked, polled) = match marked {
                Marked::UnderWay(mark) => mem.poll(mark),
                done @ Marked::Done(_) => (done, Ok(())),
            };
            failed = failed.and(polled);
            if let Marked::Done(proof) = marked {
                while calls.are_left()
                    && let Some(id) = ids.pop()
                {
                    let stitch = self.stitches.get(id);
                    let taken = stitch.pages.len() + 1;
                    let Some(idle) = mem.idle(stitch.block, proof) else {
                        self.stitches.retired.push(id);
                        continue;
                    };
                    calls.spend(u32::try_from(taken).unwrap_or(u32::MAX));
                    self.dissolve(mem, id, &idle);
                }
            }
            if ids.is_empty() {
                mem.streams.keep_events(marked.into_event());
            } else {
                self.stitches.waiting.push_back((marked, ids));
            }
        }
        failed
    }

    /// Marks the work after which the retired stitches of a stream may be dissolved.
    fn wait_for_retired<D: Driver>(
        &mut self,
        mem: &mut Mem<'_, D>,
        stream: StreamId,
    ) -> DriverResult<()> {
        // Stitches of a private pool are dissolved only when their last page is unmapped.
        let mut retired = std::mem::take(&mut self.stitches.retired);
        let is_its_own = |id: &mut StitchId| {
            let lane = self.stitches.get(*id).lane;
            lane.stream == stream && mem.heap[lane.pool].id == PoolId::DEFAULT
        };
        let its_own: Vec<StitchId> = retired.extract_if(.., is_its_own).collect();
        self.stitches.retired = retired;
        if its_own.is_empty() {
            return Ok(());
        }
        match mem.mark(stream) {
            Ok(Some(mark)) => {
                self.stitches.waiting.push_back((Marked::UnderWay(mark), its_own));
                Ok(())
            }
            other => {
                self.stitches.retired.extend(its_own);
                other.map(drop)
            }
        }
    }

    /// Takes a page, which is free at home and about to be released, out of all its stitches.
    /// Returns false if `calls` were not enough. Work that used it through a stitch was done before
    /// it was free at home.
    pub(super) fn take_out_of_stitches<D: Driver>(
        &mut self,
        mem: &mut Mem<'_, D>,
        page: PageHandle,
        idle: &Idle<'_>,
        calls: &mut Calls,
    ) -> bool {
        while let Some((id, offset)) = self.stitches.stitch_of(page) {
            if !calls.spend(CALLS_A_STITCH) {
                return false;
            }
            self.stitches.retire(id);
            let (address, is_last) = self.stitches.remove_page(id, page, offset);
            mem.backing.unmap_again(mem.driver, address, idle);
            mem.ledger.apply(Change::StitchUnmapped);
            if is_last {
                self.dissolve(mem, id, idle);
            }
        }
        true
    }

    /// Unmaps the rest of a retired stitch that no work uses, and gives its addresses back.
    fn dissolve<D: Driver>(&mut self, mem: &mut Mem<'_, D>, id: StitchId, idle: &Idle<'_>) {
        let stitch = self.stitches.remove(id);
        if !stitch.pages.is_empty() {
            mem.ledger.apply(Change::StitchUnmapped);
        }
        for page in &stitch.pages {
            mem.backing.unmap_again(mem.driver, stitch.address + page.offset, idle);
        }
        mem.heap.remove_segment(stitch.block);
        mem.give_up_range(stitch.address, stitch.bytes);
    }
}
