//! Giving memory back to the driver: everything cached, just enough, or what is old.

use crate::block::{BlockId, BlockState};
use crate::driver::{Driver, DriverResult};
use crate::history::{Action, Context};
use crate::locked::{Locked, State};
use crate::policy::{GiveBack, Request};
use crate::pool::{PoolId, PoolIndex, PoolTable};

impl<D: Driver> Locked<'_, D> {
    /// Gives back everything cached that may be: of the default pools and of private pools nobody
    /// uses any more; nothing while allocations go to a private pool, because a capture may be under
    /// way. With the id of a private pool, only that one, if nobody uses it.
    pub(crate) fn give_back_cached(&mut self, id: PoolId, context: Context) -> DriverResult<()> {
        if id == PoolId::DEFAULT && self.is_recording() {
            return Ok(());
        }
        self.state.pages.retry_leftovers(self.driver);
        self.count_pages(true);
        self.count_pages(false);
        if id == PoolId::DEFAULT {
            self.synchronize_events(None)?;
            self.give_back_pool(PoolTable::LARGE, context)?;
            self.give_back_pool(PoolTable::SMALL, context)?;
        }
        let unused: Vec<PoolId> = self
            .state
            .pools
            .private
            .iter()
            .filter(|&(&pool, private)| private.uses == 0 && (id == PoolId::DEFAULT || id == pool))
            .map(|(&pool, _)| pool)
            .collect();
        for pool in unused {
            if id == pool && !self.is_recording() {
                self.synchronize_events(Some(pool))?;
            }
            let private = &self.state.pools.private[&pool];
            let halves = [private.small, private.large];
            for half in halves {
                self.give_back_pool(half, context)?;
            }
            if halves.iter().all(|&half| self.state.pools[half].segments == 0) {
                self.state.pools.close_private(pool, self.lanes);
            }
        }
        Ok(())
    }

    /// Gives back what it may of one pool: plain segments first, then pages.
    fn give_back_pool(&mut self, pool: PoolIndex, context: Context) -> DriverResult<()> {
        let free: Vec<BlockId> = self.state.pools[pool].free_blocks().collect();
        let mut paged = Vec::new();
        for id in free {
            match self.may_give_back(id) {
                GiveBack::Nothing => {}
                GiveBack::Segment => {
                    self.give_back_segment(id, context)?;
                }
                GiveBack::Pages { .. } => paged.push(id),
            }
        }
        for id in paged {
            self.unmap_block(id, context)?;
        }
        Ok(())
    }

    fn may_give_back(&self, id: BlockId) -> GiveBack {
        let view = self.state.view(self.device);
        let block = &view.blocks[id];
        view.segments[block.segment].policy.rules().give_back(view, block)
    }

    /// Gives back enough blocks that are too large to be split for the driver to serve the request;
    /// false if there are not enough of them. Never of a private pool: a graph may use them.
    pub(crate) fn give_back_oversize(
        &mut self,
        request: &Request,
        context: Context,
    ) -> DriverResult<bool> {
        let Some(max_split) = self.state.options.max_split_size else { return Ok(false) };
        if self.state.pools[request.pool].id != PoolId::DEFAULT {
            return Ok(false);
        }
        let Some(lane) = self.state.pools[request.pool].lane(request.stream) else {
            return Ok(false);
        };
        let enough = request.size.max(max_split);
        let is_whole = |id: &BlockId| self.may_give_back(*id) == GiveBack::Segment;
        let one = lane.free().at_least(enough).next().filter(is_whole);
        if let Some(id) = one {
            self.give_back_segment(id, context)?;
            return Ok(true);
        }
        let mut won = 0;
        let mut chosen = Vec::new();
        for id in lane.free().smaller_than(enough) {
            let size = self.state.blocks[id].size;
            if won >= enough || size < max_split {
                break;
            }
            if is_whole(&id) {
                won += size;
                chosen.push(id);
            }
        }
        for id in chosen {
            self.give_back_segment(id, context)?;
        }
        Ok(won >= enough)
    }

    /// Gives back blocks that have not been used for longer than the average, while more than the
    /// threshold is held. Never waits.
    pub(crate) fn collect_garbage(&mut self, context: Context) -> DriverResult<()> {
        let threshold = self.state.options.garbage_collection_threshold;
        let Some(limit) = self.state.limit.filter(|_| threshold > 0.0) else { return Ok(()) };
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a fraction of a positive limit, truncated as PyTorch does"
        )]
        let keep = (threshold * limit as f64) as u64;
        let Some(target) = self.reserved().checked_sub(keep).filter(|&target| target > 0) else {
            return Ok(());
        };
        let age = |state: &State, id: BlockId| {
            state.pools[PoolTable::LARGE].searches - state.blocks[id].free_since
        };
        let mut total_age = 0;
        let mut count = 0_u32;
        let free: Vec<BlockId> = self.state.pools[PoolTable::LARGE].free_blocks().collect();
        let mut candidates = Vec::new();
        for id in free {
            if !self.state.blocks[id].is_split() {
                total_age += age(self.state, id);
                count += 1;
                candidates.push(id);
            }
        }
        let mut won = 0;
        let mut progress = true;
        while won < target && progress && count > 0 {
            #[expect(clippy::cast_precision_loss, reason = "an average of counts")]
            let average = total_age as f64 / f64::from(count);
            progress = false;
            // All that are older than the average, even beyond the target: it should not be needed
            // again soon.
            let mut kept = Vec::with_capacity(candidates.len());
            for id in candidates {
                let old = age(self.state, id);
                #[expect(clippy::cast_precision_loss, reason = "an age is a count of searches")]
                let is_old = old as f64 >= average;
                if is_old && self.may_give_back(id) == GiveBack::Segment {
                    progress = true;
                    won += self.state.blocks[id].size;
                    total_age -= old;
                    count -= 1;
                    self.give_back_segment(id, context)?;
                } else {
                    kept.push(id);
                }
            }
            candidates = kept;
        }
        Ok(())
    }

    /// Gives back a plain segment whose only block is free. On failure nothing has changed.
    fn give_back_segment(&mut self, id: BlockId, context: Context) -> DriverResult<()> {
        let block = &self.state.blocks[id];
        debug_assert!(block.is_free() && !block.is_split());
        let (address, size) = (block.address, block.size);
        let (pool, stream, segment) = (block.pool, block.stream, block.segment);
        self.driver.free(address)?;
        let State { blocks, segments, pools, .. } = &mut *self.state;
        pools[pool].lane_mut(stream).remove_free(size, address);
        pools[pool].segments -= 1;
        blocks.remove(id);
        let context = if context == Context::NONE { segments[segment].context } else { context };
        segments.remove(segment);
        let (private, small) = (pools[pool].id, pools[pool].small);
        self.counters.segment.decrease(small, 1);
        self.counters.reserved_bytes.decrease(small, size);
        self.counters.reserved_by_private.decrease(private, small, size);
        if self.is_oversize(size) {
            self.counters.oversize_segments.decrease(1);
        }
        self.counters.num_device_free.add(1);
        self.record(Action::SegmentFree, address, size, (stream, pool), context);
        Ok(())
    }

    /// Takes away and gives back the pages that lie wholly in a free block; then, if nothing of the
    /// segment is mapped any more, its addresses too. Where the driver fails half-way, what was
    /// unmapped so far is.
    fn unmap_block(&mut self, id: BlockId, context: Context) -> DriverResult<()> {
        let GiveBack::Pages { start, end } = self.may_give_back(id) else { return Ok(()) };
        let block = &self.state.blocks[id];
        let (pool, stream) = (block.pool, block.stream);
        // Unmapping does not wait for the work that used the pages.
        self.driver.stream_synchronize(stream)?;
        let mut at = start;
        let mut failed = Ok(());
        while at < end {
            let bytes = self.state.pages.page_at(at).expect("a free block has pages behind it");
            failed = self.state.pages.unmap(self.driver, at);
            if failed.is_err() {
                break;
            }
            at += bytes;
        }
        if at > start {
            self.mark_unmapped(id, start, at);
            let (private, small) = (self.state.pools[pool].id, self.state.pools[pool].small);
            self.count_pages(small);
            self.counters.reserved_by_private.decrease(private, small, at - start);
            self.counters.num_device_free.add(1);
            self.record(Action::SegmentUnmap, start, at - start, (stream, pool), context);
        }
        failed?;
        if !self.state.blocks[id].is_split() && !self.state.blocks[id].is_mapped() {
            self.unreserve(id)?;
        }
        Ok(())
    }

    /// Turns `start..end` of a free block into an unmapped block, which keeps the block's identity.
    fn mark_unmapped(&mut self, id: BlockId, start: u64, end: u64) {
        let State { blocks, pools, .. } = &mut *self.state;
        let block = &blocks[id];
        let (address, size, after) = (block.address, block.size, block.end());
        let pool = &mut pools[block.pool];
        let searches = pool.searches;
        let lane = pool.lane_mut(block.stream);
        lane.remove_free(size, address);
        let mut rests = Vec::with_capacity(2);
        if address < start {
            rests.push(blocks.split_front(id, start - address, BlockState::Free));
        }
        if end < after {
            rests.push(blocks.split_back(id, end - start));
        }
        for rest in rests {
            let block = &mut blocks[rest];
            block.free_since = searches;
            lane.insert_free(block.size, block.address, rest);
        }
        blocks[id].state = BlockState::Unmapped;
        let (prev, next) = (blocks[id].prev, blocks[id].next);
        for neighbour in [prev, next].into_iter().flatten() {
            self.try_merge(id, neighbour, BlockState::Unmapped);
        }
        let State { blocks, pools, .. } = &mut *self.state;
        let block = &blocks[id];
        pools[block.pool].lane_mut(block.stream).insert_unmapped(block.address, id);
    }

    /// Gives back the addresses of a segment with no page in it.
    fn unreserve(&mut self, id: BlockId) -> DriverResult<()> {
        let block = &self.state.blocks[id];
        let (address, size, pool) = (block.address, block.size, block.pool);
        let (stream, segment) = (block.stream, block.segment);
        let unstuck = self.state.pages.unstick(self.driver, address..address + size);
        self.count_pages(self.state.pools[pool].small);
        unstuck?;
        self.driver.unreserve(address, size)?;
        let State { blocks, segments, pools, .. } = &mut *self.state;
        pools[pool].lane_mut(stream).remove_unmapped(address);
        pools[pool].segments -= 1;
        blocks.remove(id);
        segments.remove(segment);
        Ok(())
    }
}
