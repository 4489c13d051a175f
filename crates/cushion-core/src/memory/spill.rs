//! Host spill: pages in host memory at a device address, as the last resort.
//!
//! Each spilled request has its own segment and page, in a pool that is never searched: freed spill
//! never serves a request. If its stream certainly exists, the free records an event on it, and the
//! page is released as soon as that is done. Otherwise the page is released after the next wait for
//! the device.

use super::{Mem, Request};
use crate::backing::PageUse;
use crate::base::names::{PolicyIndex, Tag};
use crate::base::size::round_up;
use crate::driver::{Driver, DriverResult};
use crate::heap::block::{BlockId, BlockState};
use crate::heap::pool::{LaneId, PoolTable};
use crate::heap::segment::Kind;
use crate::ledger::change::{Change, Held};

impl<D: Driver> Mem<'_, D> {
    /// Returns whether a block is in host memory.
    pub(crate) fn is_spilled(&self, id: BlockId) -> bool {
        self.heap[id].lane.pool == PoolTable::SPILL
    }

    /// Serves a request from host memory. Returns `None` if the options forbid it or host memory is
    /// exhausted. `policy` is recorded in the segment and never asked about it.
    pub(crate) fn spill(
        &mut self,
        request: &Request,
        policy: PolicyIndex,
    ) -> DriverResult<Option<u64>> {
        if !self.device.has_pages {
            return Ok(None);
        }
        let Some(bytes) = round_up(request.size, self.device.granularity) else { return Ok(None) };
        let held = self.backing.held(PageUse::Host).checked_add(bytes);
        let is_allowed = held.is_some_and(|held| held <= self.options.spill_limit);
        if request.requested < self.options.spill_over || !is_allowed {
            return Ok(None);
        }
        self.retry_ranges();
        let Some(address) = self.backing.reserve(self.driver, bytes)? else { return Ok(None) };
        let mapped = self.backing.map_fresh(self.driver, address, &[bytes], PageUse::Host);
        self.count_pages();
        if !matches!(mapped, Ok(Some(()))) {
            self.give_up_range(address, bytes);
            return mapped.map(|_| None);
        }
        let lane = LaneId { pool: PoolTable::SPILL, ..request.lane };
        let request = Request { lane, ..*request };
        let id = self.add_segment(address, bytes, &request, Kind::Host, policy, BlockState::Free);
        Ok(Some(self.take(id, false, &request)))
    }

    /// Frees a pending spilled block once its own stream, too, is done with it.
    pub(crate) fn free_spilled(&mut self, id: BlockId) -> DriverResult<()> {
        self.streams.note_own_stream(self.heap, id);
        self.free_when_done(id)
    }

    /// Completes the free of a spilled block whose work is done, and releases its host memory.
    pub(crate) fn complete_free_of_spill(&mut self, id: BlockId, tag: Tag) {
        let idle = self.streams.idle_on_host(self.heap, id);
        let freed = self.heap.complete_free_on_host(id);
        let held = Held { tag: tag.or(freed.held.tag), ..freed.held };
        self.ledger.apply(Change::FreeCompleted(held, freed.splits));
        let segment = self.heap.remove_segment(id);
        self.backing.unmap_for_good(self.driver, segment.address, &idle);
        self.count_pages();
        self.give_up_range(segment.address, segment.size);
    }
}
