//! Segments and pages from the driver, for a request that no free block serves.

use super::{Mem, Request};
use crate::backing::{Backing, PageUse};
use crate::base::names::{PolicyIndex, Tag};
use crate::driver::{Driver, DriverResult};
use crate::heap::block::{BlockId, BlockState};
use crate::heap::segment::{Kind, Segment};
use crate::ledger::change::{Change, Span};

impl<D: Driver> Mem<'_, D> {
    /// Allocates a plain segment as one free block. Returns `None` if memory ran out.
    pub(crate) fn plain_segment(
        &mut self,
        bytes: u64,
        request: &Request,
        policy: PolicyIndex,
    ) -> DriverResult<Option<BlockId>> {
        let Some(address) = Backing::allocate(self.driver, bytes)? else { return Ok(None) };
        let id = self.add_segment(address, bytes, request, Kind::Plain, policy, BlockState::Free);
        self.ledger.apply(Change::SegmentAllocated(self.heap.span(id), request.tag));
        Ok(Some(id))
    }

    /// Reserves a segment for pages, without any page. Returns `None` if addresses ran out.
    pub(crate) fn reserve_segment(
        &mut self,
        bytes: u64,
        kind: Kind,
        request: &Request,
        policy: PolicyIndex,
    ) -> DriverResult<Option<BlockId>> {
        let reserved = self.backing.reserve_for_lane(self.driver, bytes)?;
        let Some(address) = reserved else { return Ok(None) };
        Ok(Some(self.add_segment(address, bytes, request, kind, policy, BlockState::Unmapped)))
    }

    /// Adds a segment of the request's lane, with one block over all of it.
    pub(crate) fn add_segment(
        &mut self,
        address: u64,
        size: u64,
        request: &Request,
        kind: Kind,
        policy: PolicyIndex,
        state: BlockState,
    ) -> BlockId {
        let &Request { lane, tag, .. } = request;
        self.heap.add_segment(Segment { address, size, lane, kind, policy, tag }, state)
    }

    /// Calls `map` on the unmapped blocks from `start` on until there is a free block of `size`
    /// bytes. If memory runs out half-way, the pages mapped so far stay as free memory.
    pub(crate) fn extend(
        &mut self,
        start: BlockId,
        size: u64,
        mut map: impl FnMut(&mut Self, BlockId, u64) -> DriverResult<bool>,
    ) -> DriverResult<Option<BlockId>> {
        let mut at = start;
        loop {
            let block = &self.heap[at];
            if block.is_free() && block.size >= size {
                return Ok(Some(at));
            }
            let (target, missing) = if block.is_free() {
                (block.next.expect("room after the block"), size - block.size)
            } else {
                (at, size)
            };
            let bytes = missing.min(self.heap[target].size);
            if !map(self, target, bytes)? {
                return Ok(None);
            }
            at = target;
        }
    }

    /// Maps pages of one size behind at least the first `bytes` bytes of an unmapped block. Returns
    /// false if memory ran out.
    pub(crate) fn map_equal_pages(
        &mut self,
        id: BlockId,
        bytes: u64,
        page_size: u64,
        tag: Tag,
    ) -> DriverResult<bool> {
        let pages = usize::try_from(bytes.div_ceil(page_size)).expect("a segment of few pages");
        self.map_pages(id, &vec![page_size; pages], tag)
    }

    /// Maps pages of these sizes behind an unmapped block, from its start on. Returns false if
    /// memory ran out.
    pub(crate) fn map_pages(&mut self, id: BlockId, sizes: &[u64], tag: Tag) -> DriverResult<bool> {
        let block = &self.heap[id];
        let (address, place) = (block.address, self.heap.place(block.lane));
        let use_ = PageUse::of(place.small);
        let mapped = self.backing.map_fresh(self.driver, address, sizes, use_);
        self.count_pages();
        if mapped?.is_none() {
            return Ok(false);
        }
        let bytes: u64 = sizes.iter().sum();
        self.heap.mark_mapped(id, bytes);
        self.ledger.apply(Change::PagesMapped(Span { address, bytes, place }, tag));
        Ok(true)
    }

    /// Gives back the addresses of a segment without pages. On failure they stay reserved.
    pub(crate) fn unreserve(&mut self, id: BlockId) -> DriverResult<()> {
        let block = &self.heap[id];
        let given_back = self.backing.unreserve_of_lane(self.driver, block.address, block.size);
        self.count_pages();
        given_back?;
        self.heap.remove_segment(id);
        Ok(())
    }

    /// Gives back new addresses, if no page was mapped there. If the driver refuses, they stay
    /// reserved and are tried again.
    pub(crate) fn unreserve_if_unused(&mut self, id: BlockId) {
        let block = &self.heap[id];
        if !block.is_mapped() && !block.is_split() {
            let _ = self.unreserve(id);
        }
    }

    /// Gives back addresses that contain no block.
    pub(crate) fn give_up_range(&mut self, address: u64, bytes: u64) {
        self.backing.give_up_range(self.driver, address, bytes);
        self.count_pages();
    }

    /// Tries again to give back addresses that the driver refused.
    pub(crate) fn retry_ranges(&mut self) {
        self.backing.retry_ranges(self.driver);
        self.count_pages();
    }

    /// Tries again to give back everything that the driver refused so far, and addresses that lost
    /// their last page.
    pub(crate) fn retry_refused(&mut self) {
        self.backing.retry_pages(self.driver);
        self.count_pages();
        self.retry_ranges();
        let unmapped = self.heap.lanes().flat_map(|(_, lane)| lane.unmapped().map(|(_, id)| id));
        let unused: Vec<BlockId> = unmapped.filter(|&id| !self.heap[id].is_split()).collect();
        for id in unused {
            // If the driver refuses, this is tried again.
            let _ = self.unreserve(id);
        }
    }
}
