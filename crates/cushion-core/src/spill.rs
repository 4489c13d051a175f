//! Host spill: pages in host memory at a device address, when nothing else is left.
//!
//! Each spilled request has a segment and a page of its own, in a pool that no search looks into: freed
//! spill never serves a request. If its stream is certainly there, the free records an event on it, and the page goes back
//! as soon as that is done, before any memory of the device does. Otherwise it goes back after the next wait for the device.

use crate::block::BlockId;
use crate::driver::{Driver, DriverResult};
use crate::error::AddressError;
use crate::growth::unless_full;
use crate::history::{Action, Tag};
use crate::locked::Locked;
use crate::pages::PageUse;
use crate::policy::{Policy, Request};
use crate::pool::{PoolIndex, PoolTable};
use crate::segment::Backing;
use crate::size::round_up;

impl<D: Driver> Locked<'_, D> {
    /// Whether blocks of a pool are in host memory.
    pub(crate) fn is_spill(pool: PoolIndex) -> bool {
        pool == PoolTable::SPILL
    }

    /// Serves a request from host memory; `None` if it may not be, or there is none.
    pub(crate) fn spill(&mut self, request: &Request, tag: Tag) -> DriverResult<Option<u64>> {
        let options = &self.state.options;
        let (limit, over) = (options.spill_limit, options.spill_over);
        if !self.device.has_pages {
            return Ok(None);
        }
        let Some(bytes) = round_up(request.size, self.device.granularity) else { return Ok(None) };
        let held = self.state.pages.held(PageUse::Host).checked_add(bytes);
        if request.requested < over || held.is_none_or(|held| held > limit) {
            return Ok(None);
        }
        self.retry_ranges();
        let Some(address) = unless_full(self.driver.reserve(bytes))? else { return Ok(None) };
        let mapped = self.state.pages.map_fresh(self.driver, address, &[bytes], PageUse::Host);
        self.count_pages();
        let mapped = unless_full(mapped);
        if !matches!(mapped, Ok(Some(()))) {
            self.leave_range(address, bytes);
            return mapped.map(|_| None);
        }
        let request = Request { pool: PoolTable::SPILL, ..*request };
        let backing = Backing::Pages { page_size: bytes };
        let id = self.add_segment(address, bytes, &request, backing, Policy::Expandable, tag);
        self.insert_free(id);
        Ok(Some(self.take(id, false, &request, tag)))
    }

    /// Takes a spilled block back from its owner: it goes once its own stream is done with it, too.
    pub(crate) fn free_spilled(&mut self, id: BlockId, tag: Tag) -> Result<(), AddressError> {
        let block = &mut self.state.blocks[id];
        let (address, stream) = (block.address, block.stream);
        let uses = block.uses.get_or_insert_default();
        if !uses.streams.contains(&stream) {
            uses.streams.push(stream);
            uses.ours.push(stream);
        }
        self.counters.spilled_allocation.decrease(1);
        self.record_block(Action::FreeRequested, id, tag);
        self.free_when_done(id).map_err(|source| AddressError::Driver { address, source })
    }

    /// The work on a spilled block is done: its memory goes back to the host.
    pub(crate) fn give_back_spill(&mut self, id: BlockId) {
        let idle = self.idle_spill(id);
        let block = self.state.blocks.remove(id);
        self.state.segments.remove(block.segment);
        let pool = &mut self.state.pools[block.pool];
        pool.lane_mut(block.stream).deactivated(block.address, block.size);
        pool.segment_went(block.stream, self.lanes);
        if self.state.pages.unmap(self.driver, block.address, &idle).is_err() {
            self.state.pages.stick(block.address, &idle);
        }
        self.count_pages();
        self.leave_range(block.address, block.size);
    }

    /// Gives back a range of addresses that no block is in; what the driver refuses is tried again.
    pub(crate) fn leave_range(&mut self, address: u64, bytes: u64) {
        let unstuck = self.state.pages.unstick(self.driver, address..address + bytes);
        self.count_pages();
        if unstuck.and_then(|()| self.driver.unreserve(address, bytes)).is_err() {
            self.state.left_ranges.push((address, bytes));
        }
    }

    /// Tries again to give back ranges that the driver would not have.
    pub(crate) fn retry_ranges(&mut self) {
        for (address, bytes) in std::mem::take(&mut self.state.left_ranges) {
            self.leave_range(address, bytes);
        }
    }
}
