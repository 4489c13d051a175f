//! Cutting free blocks, and merging them with their neighbours.

use std::ops::Range;

use crate::block::{BlockId, BlockState};
use crate::driver::Driver;
use crate::locked::{Locked, State};

impl<D: Driver> Locked<'_, D> {
    /// Takes `start..end` of a free block, which keeps the block's identity, out of its lane; the rest stays.
    pub(crate) fn cut_free(&mut self, id: BlockId, start: u64, end: u64) {
        let State { blocks, pools, .. } = &mut *self.state;
        let block = &blocks[id];
        let pool = &mut pools[block.pool];
        let searches = pool.searches;
        let lane = pool.lane_mut(block.stream);
        lane.remove_free(block.size, block.address);
        lane.changed(block.size, start..end);
        for rest in blocks.cut(id, start, end).into_iter().flatten() {
            let block = &mut blocks[rest];
            block.free_since = searches;
            lane.insert_free(block.size, block.address, rest);
        }
    }

    /// A block becomes free and merges with its neighbours; returns how many, and their bytes.
    pub(crate) fn merge_free(&mut self, id: BlockId) -> (u64, u64) {
        let block = &self.state.blocks[id];
        let freed = block.address..block.end();
        let mut merged = (0, 0);
        for neighbour in [block.prev, block.next].into_iter().flatten() {
            if let Some(bytes) = self.try_merge(id, neighbour, BlockState::Free) {
                merged = (merged.0 + 1, merged.1 + bytes);
            }
        }
        self.put_free(id, freed);
        merged
    }

    /// PyTorch counts the change of free split blocks net, so that its totals agree with ours.
    pub(crate) fn count_split_change(
        &mut self,
        id: BlockId,
        small: bool,
        merged: u64,
        merged_bytes: u64,
    ) {
        let block = &self.state.blocks[id];
        let (count, bytes) = if block.is_split() { (1, block.size) } else { (0, 0) };
        for (stat, gained, lost) in [
            (&self.counters.inactive_split, count, merged),
            (&self.counters.inactive_split_bytes, bytes, merged_bytes),
        ] {
            if gained > lost {
                stat.increase(small, gained - lost);
            } else if lost > gained {
                stat.decrease(small, lost - gained);
            }
        }
    }

    /// Lets `into` swallow its neighbour if that one is in `state`; returns the bytes swallowed.
    /// `into` is in no index at that moment.
    pub(crate) fn try_merge(
        &mut self,
        into: BlockId,
        neighbour: BlockId,
        state: BlockState,
    ) -> Option<u64> {
        let other = &self.state.blocks[neighbour];
        if other.state != state {
            return None;
        }
        let (size, address) = (other.size, other.address);
        let lane = self.state.pools[other.pool].lane_mut(other.stream);
        match state {
            BlockState::Free => lane.remove_free(size, address),
            BlockState::Unmapped => lane.remove_unmapped(address),
            _ => unreachable!("only idle blocks merge"),
        }
        self.state.blocks.absorb(into, neighbour);
        Some(size)
    }

    /// Puts a block into the free index of its lane.
    pub(crate) fn insert_free(&mut self, id: BlockId) {
        let block = &self.state.blocks[id];
        self.put_free(id, block.address..block.end());
    }

    /// Puts a block, of which only a part was not free before, into the free index of its lane.
    #[expect(clippy::inline_always, reason = "one call in a free fewer")]
    #[inline(always)]
    fn put_free(&mut self, id: BlockId, freed: Range<u64>) {
        let State { blocks, pools, .. } = &mut *self.state;
        let block = &mut blocks[id];
        let pool = &mut pools[block.pool];
        block.state = BlockState::Free;
        block.free_since = pool.searches;
        let lane = pool.lane_mut(block.stream);
        lane.insert_free(block.size, block.address, id);
        lane.changed(block.size, freed);
    }
}
