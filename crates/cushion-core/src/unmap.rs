//! Taking pages away from the addresses that they are at, and addresses from the segments that have none left.

use crate::block::{BlockId, BlockState};
use crate::driver::{Driver, DriverResult};
use crate::history::{Action, Context};
use crate::locked::{Locked, State};
use crate::policy::GiveBack;

impl<D: Driver> Locked<'_, D> {
    /// Takes away and gives back the pages that lie wholly in a free block; then, if nothing of the
    /// segment is mapped any more, its addresses too. Where the driver fails half-way, what was
    /// unmapped so far is. The work that used the pages must be done.
    pub(crate) fn unmap_block(&mut self, id: BlockId, context: Context) -> DriverResult<()> {
        let GiveBack::Pages { start, end } = self.may_give_back(id) else { return Ok(()) };
        let block = &self.state.blocks[id];
        let (pool, stream) = (block.pool, block.stream);
        let mut at = start;
        let mut failed = Ok(());
        while at < end {
            let page = self.state.pages.page_around(at);
            let (_, bytes, page) = page.expect("a free block has pages behind it");
            self.leave_ranges(page);
            failed = self.state.pages.unmap(self.driver, at);
            if failed.is_err() {
                break;
            }
            at += bytes;
        }
        if at > start {
            self.mark_unmapped(id, start, at);
            let (private, small) = (self.state.pools[pool].id, self.state.pools[pool].small);
            self.count_pages();
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
    pub(crate) fn mark_unmapped(&mut self, id: BlockId, start: u64, end: u64) {
        self.cut_free(id, start, end);
        let blocks = &mut self.state.blocks;
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
    pub(crate) fn unreserve(&mut self, id: BlockId) -> DriverResult<()> {
        let block = &self.state.blocks[id];
        let (address, size, pool) = (block.address, block.size, block.pool);
        let (stream, segment) = (block.stream, block.segment);
        let unstuck = self.state.pages.unstick(self.driver, address..address + size);
        self.count_pages();
        unstuck?;
        self.driver.unreserve(address, size)?;
        let State { blocks, segments, pools, .. } = &mut *self.state;
        let lane = pools[pool].lane_mut(stream);
        lane.remove_unmapped(address);
        lane.remove_homes(address);
        pools[pool].segments -= 1;
        blocks.remove(id);
        segments.remove(segment);
        Ok(())
    }
}
