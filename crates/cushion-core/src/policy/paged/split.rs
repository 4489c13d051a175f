//! Near the limit, a wholly free page is split in two before a block takes only a part of it.
//!
//! A half-used page cannot be remapped, and near the limit its other half is missing elsewhere.
//! Splitting costs driver calls, and requires that the work on the page is done; otherwise the page
//! stays as it is.

use super::Paged;
use super::plan::free_memory;
use crate::backing::PageUse;
use crate::base::names::PoolId;
use crate::driver::Driver;
use crate::heap::pool::LaneId;
use crate::heap::segment::Kind;
use crate::ledger::change::{Change, Span};
use crate::memory::unmap::Calls;
use crate::memory::{Found, Mem, Request};
use crate::streams::proof::Idle;

impl Paged {
    /// Splits the page of which a request would take only a part. Returns whether memory changed.
    #[cold]
    pub(super) fn split_for_block<D: Driver>(
        &mut self,
        mem: &mut Mem<'_, D>,
        found: Found,
        request: &Request,
    ) -> bool {
        let Found::Block(id) = found else { return false };
        let block = &mem.heap[id];
        let (start, end) = (block.address, block.end());
        let taken = start + request.size;
        // Memory that a private pool handed out may be in a graph.
        if request.small
            || taken >= end
            || mem.heap[request.lane.pool].id != PoolId::DEFAULT
            || mem.kind_of(id) != Kind::Homes
        {
            return false;
        }
        let most = self.largest_page(mem, request.lane);
        let (page, bytes, _) = mem.backing.page_around(taken).expect("a page at home");
        let keep = mem.whole_units(taken - page);
        let is_cut = page < taken && page >= start && page + bytes <= end;
        if !is_cut || bytes <= most || keep >= bytes || mem.is_recording() {
            return false;
        }
        let proof = mem.poll_stream(request.lane.stream).ok().flatten();
        let Some(idle) = proof.and_then(|proof| mem.idle(id, proof)) else {
            // Not tried again before the next miss: a stream at work is likely to stay at work for
            // a while.
            self.is_tight = false;
            return false;
        };
        self.split(mem, &idle, page, keep)
    }

    /// Splits the page of which a new stitch for a request would take only a part.
    #[cold]
    pub(super) fn split_for_stitch<D: Driver>(&mut self, mem: &mut Mem<'_, D>, request: &Request) {
        let most = self.largest_page(mem, request.lane);
        let plan = free_memory(mem, request.lane).plan(request.size, 0);
        let Some((page, keep)) = plan.taken_in_part(request.size) else { return };
        let keep = mem.whole_units(keep);
        if page.bytes <= most
            || keep >= page.bytes
            || mem.heap[request.lane.pool].id != PoolId::DEFAULT
            || mem.is_recording()
        {
            return;
        }
        let stream = request.lane.stream;
        let Some(proof) = mem.poll_stream(stream).ok().flatten() else { return };
        let lane = mem.heap.lane(LaneId { pool: page.pool, stream });
        let block = lane.and_then(|lane| lane.free_at(page.home));
        if let Some(idle) = block.and_then(|id| mem.idle(id, proof)) {
            self.split(mem, &idle, page.home, keep);
        }
    }

    /// Replaces the page at `home`, which lies in a free block, by two pages, the first of `keep`
    /// bytes. Returns whether memory changed.
    fn split<D: Driver>(
        &mut self,
        mem: &mut Mem<'_, D>,
        idle: &Idle<'_>,
        home: u64,
        keep: u64,
    ) -> bool {
        let id = idle.block();
        let (_, bytes, page) = mem.backing.page_around(home).expect("a page at home");
        let lane = mem.heap[id].lane;
        let place = mem.heap.place(lane);
        self.take_out_of_stitches(mem, page, idle, &mut Calls::unlimited());
        if mem.backing.unmap(mem.driver, home, idle).is_err() {
            return true;
        }
        let sizes = [keep, bytes - keep];
        let use_ = PageUse::of(place.small);
        let mapped = mem.backing.map_fresh(mem.driver, home, &sizes, use_);
        if matches!(mapped, Ok(Some(()))) {
            mem.heap.mark(lane, bytes, home..home + bytes);
            mem.ledger.apply(Change::PageSplit);
        } else {
            // Another process took the memory: it is lost, and the addresses are free for other
            // pages.
            mem.heap.mark_unmapped(id, home, home + bytes);
            mem.ledger.apply(Change::PageLost(Span { address: home, bytes, place }));
        }
        mem.count_pages();
        true
    }
}
