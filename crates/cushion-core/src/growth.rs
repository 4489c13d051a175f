//! Getting memory from the driver for a request that no free block serves.

use crate::block::{Block, BlockId, BlockState};
use crate::driver::{Driver, DriverResult};
use crate::history::{Action, Tag};
use crate::homes::Found;
use crate::locked::{Locked, State};
use crate::owner::Owner;
use crate::pages::PageUse;
use crate::policy::{Policy, Request, Source};
use crate::proof::Moment;
use crate::segment::{Backing, Segment};

impl<D: Driver> Locked<'_, D> {
    /// Serves a request from memory that the driver gives now, or that need not be asked for; `None` if memory ran out.
    pub(crate) fn serve_new(
        &mut self,
        request: &Request,
        policy: Policy,
        may_borrow: bool,
        tag: Tag,
    ) -> DriverResult<Option<u64>> {
        if let Some(found) = self.find_recalled(request, policy) {
            return Ok(Some(self.hand_out(found, policy, request, tag)));
        }
        if may_borrow
            && policy.rules().stitches()
            && !request.small
            && !self.is_recording()
            && self.growing_passes_high_water(request)
            && let Some(address) = self.borrow_idle(request, tag)
        {
            return Ok(Some(address));
        }
        let block = self.ask_driver(request, policy, tag)?;
        let found = block.map(Found::Block);
        Ok(found.map(|found| self.hand_out(found, policy, request, tag)))
    }

    /// A free block for the request out of new memory, in its lane; `None` if memory ran out.
    pub(crate) fn ask_driver(
        &mut self,
        request: &Request,
        policy: Policy,
        tag: Tag,
    ) -> DriverResult<Option<BlockId>> {
        if self.wanted_of(request) > self.device.total {
            return Ok(None);
        }
        let lane = self.state.pools[request.pool].lane(request.stream);
        let view = self.state.view(self.device);
        let source = policy.rules().source(view, lane, request);
        if source != Source::Home && self.may_grow_by() < request.wanted {
            return Ok(None);
        }
        match source {
            Source::Home => self.grow_homes(request, policy, tag),
            Source::Plain(bytes) => self.plain_segment(bytes, request, policy, tag),
            Source::Extend(block) => self.extend(block, request.size, tag),
            Source::Reserve { bytes, page_size } => {
                let bytes = self.addresses_as_pytorch(request, bytes, page_size);
                let backing = Backing::Pages { page_size };
                match self.paged_segment(bytes, backing, request, policy, tag)? {
                    Some(unmapped) => {
                        let grown = self.extend(unmapped, request.size, tag);
                        self.leave_if_unused(unmapped);
                        grown
                    }
                    None => Ok(None),
                }
            }
        }
    }

    /// What the limit still allows. What is on its way back to the driver is still held.
    pub(crate) fn may_grow_by(&self) -> u64 {
        let held = self.reserved().saturating_add(self.state.leaving);
        self.state.limit.map_or(u64::MAX, |limit| limit.saturating_sub(held))
    }

    pub(crate) fn plain_segment(
        &mut self,
        bytes: u64,
        request: &Request,
        policy: Policy,
        tag: Tag,
    ) -> DriverResult<Option<BlockId>> {
        let Some(address) = unless_full(self.driver.alloc(bytes))? else { return Ok(None) };
        let id = self.add_segment(address, bytes, request, Backing::Plain, policy, tag);
        self.insert_free(id);
        let small = request.small;
        self.counters.segment.increase(small, 1);
        self.counters.reserved_bytes.increase(small, bytes);
        let private = self.state.pools[request.pool].id;
        self.counters.reserved_by_private.increase(private, small, bytes);
        if self.is_oversize(bytes) {
            self.counters.oversize_segments.increase(1);
        }
        self.counters.num_device_alloc.add(1);
        let place = (request.stream, request.pool);
        self.record(Action::SegmentAlloc, address, bytes, place, tag);
        Ok(Some(id))
    }

    /// A segment that pages come and go behind, with none so far.
    pub(crate) fn paged_segment(
        &mut self,
        bytes: u64,
        backing: Backing,
        request: &Request,
        policy: Policy,
        tag: Tag,
    ) -> DriverResult<Option<BlockId>> {
        let Some(address) = unless_full(self.driver.reserve(bytes))? else { return Ok(None) };
        let id = self.add_segment(address, bytes, request, backing, policy, tag);
        self.state.blocks[id].state = BlockState::Unmapped;
        let lane = self.state.pools[request.pool].lane_mut(request.stream);
        lane.insert_unmapped(address, id);
        lane.addresses_came(bytes);
        self.state.homes.addresses += bytes;
        Ok(Some(id))
    }

    /// Enters a segment with one block over all of it, which is in no index yet. Its lane is there from now on.
    pub(crate) fn add_segment(
        &mut self,
        address: u64,
        size: u64,
        request: &Request,
        backing: Backing,
        policy: Policy,
        tag: Tag,
    ) -> BlockId {
        let &Request { pool, stream, .. } = request;
        let State { blocks, segments, pools, .. } = &mut *self.state;
        pools[pool].segment_came(stream, self.lanes);
        let segment =
            segments.insert(Segment { address, size, pool, stream, backing, policy, tag });
        blocks.insert(Block {
            address,
            size,
            requested: 0,
            prev: None,
            next: None,
            segment,
            pool,
            stream,
            state: BlockState::Free,
            free_since: 0,
            freed: Moment::default(),
            events: 0,
            uses: None,
            tag: Tag::NONE,
            owner: Owner::NOBODY,
        })
    }

    /// Puts pages behind the unmapped blocks from `start` on until a free block of `size` bytes is
    /// there. Where memory runs out half-way, what was mapped stays as free memory.
    pub(crate) fn extend(
        &mut self,
        start: BlockId,
        size: u64,
        tag: Tag,
    ) -> DriverResult<Option<BlockId>> {
        let mut at = start;
        loop {
            let block = &self.state.blocks[at];
            if block.is_free() && block.size >= size {
                return Ok(Some(at));
            }
            let (target, missing) = if block.is_free() {
                (block.next.expect("room after the block"), size - block.size)
            } else {
                (at, size)
            };
            let bytes = missing.min(self.state.blocks[target].size);
            if !self.map_block(target, bytes, tag)? {
                return Ok(None);
            }
            at = target;
        }
    }

    /// Puts pages behind the first `bytes` bytes, or more, of an unmapped block; false if memory ran out.
    pub(crate) fn map_block(&mut self, id: BlockId, bytes: u64, tag: Tag) -> DriverResult<bool> {
        let block = &self.state.blocks[id];
        let lane = (block.pool, block.stream);
        match self.state.segments[block.segment].backing {
            Backing::Pages { page_size } => {
                let sizes = vec![page_size; pages_in(bytes, page_size)];
                self.map_pages(id, &sizes, tag)
            }
            Backing::Homes => {
                let most = block.size.min(self.may_grow_by());
                let sizes = self.sizes_of_fresh_pages(lane, bytes, most);
                if self.map_pages(id, &sizes, tag)? {
                    return Ok(true);
                }
                // Whole ones are more than the device has: then what is missing, and no more.
                let least = self.sizes_of_fresh_pages(lane, bytes, 0);
                Ok(least != sizes && self.map_pages(id, &least, tag)?)
            }
            Backing::Plain | Backing::Stitched(_) => unreachable!("only pages come and go"),
        }
    }

    /// Puts pages of these sizes behind an unmapped block, from its beginning on; false if memory ran out.
    pub(crate) fn map_pages(&mut self, id: BlockId, sizes: &[u64], tag: Tag) -> DriverResult<bool> {
        let block = &self.state.blocks[id];
        let (address, room, pool, stream) = (block.address, block.size, block.pool, block.stream);
        let bytes: u64 = sizes.iter().sum();
        let small = self.state.pools[pool].small;
        let mapped = self.state.pages.map_fresh(self.driver, address, sizes, PageUse::of(small));
        self.count_pages();
        if unless_full(mapped)?.is_none() {
            return Ok(false);
        }
        let State { blocks, pools, .. } = &mut *self.state;
        let lane = pools[pool].lane_mut(stream);
        lane.remove_unmapped(address);
        lane.reach(&(address..address + bytes));
        if bytes < room {
            let rest = blocks.split_back(id, bytes);
            lane.insert_unmapped(address + bytes, rest);
        }
        blocks[id].state = BlockState::Free;
        self.merge_free(id);
        let private = self.state.pools[pool].id;
        self.counters.reserved_by_private.increase(private, small, bytes);
        self.counters.num_device_alloc.add(1);
        self.record(Action::SegmentMap, address, bytes, (stream, pool), tag);
        Ok(true)
    }

    /// Brings the figures up to date with the page table.
    pub(crate) fn count_pages(&mut self) {
        for use_ in PageUse::ALL {
            let held = self.state.pages.held(use_);
            let counted = std::mem::replace(&mut self.state.pages_counted[use_ as usize], held);
            let (more, less) = (held.saturating_sub(counted), counted.saturating_sub(held));
            match use_ {
                PageUse::Host if more > 0 => self.counters.spilled_bytes.increase(more),
                PageUse::Host if less > 0 => self.counters.spilled_bytes.decrease(less),
                _ if more > 0 => {
                    self.counters.reserved_bytes.increase(use_ == PageUse::Small, more);
                }
                _ if less > 0 => {
                    self.counters.reserved_bytes.decrease(use_ == PageUse::Small, less);
                }
                _ => {}
            }
        }
    }
}

/// How many pages `bytes` bytes take.
fn pages_in(bytes: u64, page_size: u64) -> usize {
    usize::try_from(bytes.div_ceil(page_size)).expect("a segment of few pages")
}

/// Tells a shortage, `None`, apart from a broken driver.
pub(crate) fn unless_full<T>(result: DriverResult<T>) -> DriverResult<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.is_out_of_memory() => Ok(None),
        Err(error) => Err(error),
    }
}
