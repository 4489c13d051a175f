//! Near the limit: a page that is wholly free is split in two before a block takes only a part of it.
//!
//! A page that is half used cannot go where memory is missing, and near the limit its other half is what is missing.
//! Splitting costs driver calls, and needs the work on the page to be done: where it is not, the page stays as it is.

use crate::driver::Driver;
use crate::history::{Action, Tag};
use crate::homes::Found;
use crate::locked::Locked;
use crate::pages::PageUse;
use crate::policy::Request;
use crate::pool::PoolId;
use crate::proof::Idle;
use crate::segment::Backing;
use crate::unmap::Calls;

impl<D: Driver> Locked<'_, D> {
    /// Splits the page that a request would take only a part of; whether something changed.
    #[cold]
    pub(crate) fn unpin(&mut self, found: Found, request: &Request) -> bool {
        let Found::Block(id) = found else { return false };
        let block = &self.state.blocks[id];
        let (start, end) = (block.address, block.end());
        let taken = start + request.size;
        // What a private pool handed out may be in a graph.
        if request.small
            || taken >= end
            || self.state.pools[request.pool].id != PoolId::DEFAULT
            || self.state.segments[block.segment].backing != Backing::Homes
        {
            return false;
        }
        let most = self.largest_page((request.pool, request.stream));
        let (page, bytes, _) = self.state.pages.page_around(taken).expect("a page at home");
        let keep = self.whole_units(taken - page);
        let is_pinned = page < taken && page >= start && page + bytes <= end;
        if !is_pinned || bytes <= most || keep >= bytes || self.is_recording() {
            return false;
        }
        let proof = self.poll_stream(request.stream).ok().flatten();
        let Some(idle) = proof.and_then(|proof| self.idle(id, proof)) else {
            // Not asked for again before the next miss: a stream that is at work stays so for a while.
            self.state.homes.is_tight = false;
            return false;
        };
        self.split(&idle, page, keep)
    }

    /// Splits the page that a new range for a request would take only a part of.
    #[cold]
    pub(crate) fn split_for_range(&mut self, request: &Request) {
        let most = self.largest_page((request.pool, request.stream));
        let plan = self.pieces((request.pool, request.stream)).plan(request.size, 0);
        let Some((page, keep)) = plan.taken_in_part(request.size) else { return };
        let keep = self.whole_units(keep);
        if page.bytes <= most
            || keep >= page.bytes
            || self.state.pools[request.pool].id != PoolId::DEFAULT
            || self.is_recording()
        {
            return;
        }
        let Some(proof) = self.poll_stream(request.stream).ok().flatten() else { return };
        let lane = self.state.pools[page.pool].lane(request.stream);
        let block = lane.and_then(|lane| lane.free_at(page.home));
        if let Some(idle) = block.and_then(|id| self.idle(id, proof)) {
            self.split(&idle, page.home, keep);
        }
    }

    /// Puts two pages, the first of `keep` bytes, in the place of one at `home`, which lies in a free block; whether
    /// something changed.
    fn split(&mut self, idle: &Idle<'_>, home: u64, keep: u64) -> bool {
        let id = idle.block();
        let (_, bytes, page) = self.state.pages.page_around(home).expect("a page at home");
        let block = &self.state.blocks[id];
        let (pool, stream) = (block.pool, block.stream);
        let (private, small) = (self.state.pools[pool].id, self.state.pools[pool].small);
        self.leave_ranges(page, idle, &mut Calls::unlimited());
        if self.state.pages.unmap(self.driver, home, idle).is_err() {
            return true;
        }
        self.counters.num_device_free.add(1);
        let sizes = [keep, bytes - keep];
        let mapped = self.state.pages.map_fresh(self.driver, home, &sizes, PageUse::of(small));
        if mapped.is_ok() {
            self.state.pools[pool].lane_mut(stream).changed(bytes, home..home + bytes);
            self.counters.num_device_alloc.add(1);
        } else {
            // Somebody else was faster: the memory is gone, and the addresses are free for other pages.
            self.mark_unmapped(id, home, home + bytes);
            self.counters.reserved_by_private.decrease(private, small, bytes);
            self.record(Action::SegmentUnmap, home, bytes, (stream, pool), Tag::NONE);
        }
        self.count_pages();
        true
    }
}
