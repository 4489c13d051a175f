//! Cutting and merging blocks, and changing their state.

use std::ops::Range;

use super::block::{BlockId, BlockState, BlockTable, Holder};
use super::pool::LaneId;
use super::segment::Kind;
use super::{Heap, Lane};
use crate::base::names::Moment;
use crate::ledger::change::{Held, Span, Splits};

/// A block that was handed out.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Taken {
    pub(crate) held: Held,
    pub(crate) splits: Splits,
}

/// A block that became free.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Freed {
    pub(crate) held: Held,
    pub(crate) splits: Splits,
}

impl Heap {
    // ---- handing out and freeing ----

    /// Hands out a free block: its first `size` bytes if `splits`, else all of it.
    #[expect(clippy::inline_always, reason = "the result stays in registers")]
    #[inline(always)]
    pub(crate) fn take(&mut self, id: BlockId, size: u64, splits: bool, holder: Holder) -> Taken {
        let Self { blocks, segments, pools, live, .. } = self;
        let block = &blocks[id];
        let (lane_id, address, whole) = (block.lane, block.address, block.size);
        let was_split = block.is_split();
        let plain = segments[block.segment].is_plain();
        let pool = &mut pools[lane_id.pool];
        let (searches, place) = (pool.searches, pool.place(lane_id));
        let lane = pool.lane_mut(lane_id.stream);
        lane.remove_free(whole, address);
        let mut change = Splits::default();
        let id = if splits {
            let front = blocks.split_front(id, size, BlockState::Live);
            let rest = &mut blocks[id];
            rest.free_since = searches;
            lane.insert_free(rest.size, rest.address, id);
            if plain && was_split {
                change.bytes = -size.cast_signed();
            } else if plain {
                change = Splits { blocks: 1, bytes: rest.size.cast_signed() };
            }
            front
        } else {
            if plain && was_split {
                change = Splits { blocks: -1, bytes: -whole.cast_signed() };
            }
            id
        };
        let block = &mut blocks[id];
        block.state = BlockState::Live;
        block.holder = holder;
        let bytes = block.size;
        lane.activated(address, bytes);
        lane.mark(whole, address..address + bytes);
        live.insert(address, id);
        let Holder { requested, tag, .. } = holder;
        let held = Held { span: Span { address, bytes, place }, requested, tag };
        Taken { held, splits: change }
    }

    /// Makes the live block at an address pending. Returns `None` if no live block begins there.
    pub(crate) fn begin_free(&mut self, address: u64) -> Option<BlockId> {
        let id = self.live.remove(&address)?;
        self.blocks[id].state = BlockState::Pending;
        Some(id)
    }

    /// Makes a pending block of a segment of this kind free, and merges it with its neighbours.
    #[expect(clippy::inline_always, reason = "the result stays in registers")]
    #[inline(always)]
    pub(crate) fn complete_free(&mut self, id: BlockId, kind: Kind, freed: Moment) -> Freed {
        let Self { blocks, pools, .. } = self;
        let block = &mut blocks[id];
        debug_assert!(block.state == BlockState::Pending && block.users.are_none());
        block.freed = freed;
        let (address, bytes) = (block.address, block.size);
        let Holder { requested, tag, .. } = block.holder;
        let pool = &mut pools[block.lane.pool];
        let (searches, place) = (pool.searches, pool.place(block.lane));
        let lane = pool.lane_mut(block.lane.stream);
        let merged = merge_in_lane(blocks, lane, id, searches);
        lane.deactivated(address, bytes);
        let mut splits = Splits::default();
        if kind == Kind::Plain {
            let block = &blocks[id];
            let (count, bytes) = if block.is_split() { (1, block.size) } else { (0, 0) };
            splits.blocks = count - merged.0;
            splits.bytes = bytes.cast_signed() - merged.1.cast_signed();
        }
        let held = Held { span: Span { address, bytes, place }, requested, tag };
        Freed { held, splits }
    }

    /// Completes the free of a block of a stitch: it becomes a shadow, together with all other
    /// addresses of its segment.
    pub(crate) fn complete_free_of_stitch(&mut self, id: BlockId, freed: Moment) -> Freed {
        let held = self.held(id);
        self.blocks[id].freed = freed;
        self.deactivate(&held, id);
        while let Some(beside) = self.blocks[id].prev.or(self.blocks[id].next) {
            self.blocks.absorb(id, beside);
        }
        self.blocks[id].state = BlockState::Shadow;
        Freed { held, splits: Splits::default() }
    }

    /// Completes the free of a block in host memory, which is never reused.
    pub(crate) fn complete_free_on_host(&mut self, id: BlockId) -> Freed {
        let held = self.held(id);
        self.deactivate(&held, id);
        Freed { held, splits: Splits::default() }
    }

    fn deactivate(&mut self, held: &Held, id: BlockId) {
        let lane = self.blocks[id].lane;
        self.lane_mut(lane).deactivated(held.span.address, held.span.bytes);
    }

    // ---- cutting ----

    /// Takes `start..end` of a free block out of its lane. These bytes keep the block's id; the
    /// rest stays free.
    pub(crate) fn cut_free(&mut self, id: BlockId, start: u64, end: u64) {
        let Self { blocks, pools, .. } = self;
        let block = &blocks[id];
        let pool = &mut pools[block.lane.pool];
        let searches = pool.searches;
        let lane = pool.lane_mut(block.lane.stream);
        lane.remove_free(block.size, block.address);
        lane.mark(block.size, start..end);
        for rest in blocks.cut(id, start, end).into_iter().flatten() {
            let block = &mut blocks[rest];
            block.free_since = searches;
            lane.insert_free(block.size, block.address, rest);
        }
    }

    /// Cuts a free block at `start` and `end`. All parts stay free.
    pub(crate) fn cut_within_lane(&mut self, id: BlockId, start: u64, end: u64) {
        self.cut_free(id, start, end);
        self.insert_free(id);
    }

    /// Takes `start..end` of a free block out of its lane, for use through a stitch.
    pub(crate) fn lend(&mut self, id: BlockId, start: u64, end: u64) {
        self.cut_free(id, start, end);
        self.blocks[id].state = BlockState::Lent;
    }

    /// Makes `start..end` of a stitch's shadow a free block of its lane.
    pub(crate) fn show(&mut self, id: BlockId, start: u64, end: u64) {
        debug_assert_eq!(self.blocks[id].state, BlockState::Shadow);
        self.blocks.cut(id, start, end);
        self.insert_free(id);
    }

    /// Takes `start..end` of a free block out of its lane, to give it back to the driver.
    pub(crate) fn detach(&mut self, id: BlockId, start: u64, end: u64) {
        self.cut_free(id, start, end);
        self.blocks[id].state = BlockState::Detached;
    }

    /// Takes a whole free block out of its lane, to give it back to the driver.
    pub(crate) fn detach_whole(&mut self, id: BlockId) {
        let block = &mut self.blocks[id];
        debug_assert!(block.is_free() && !block.is_split());
        block.state = BlockState::Detached;
        let (lane, size, address) = (block.lane, block.size, block.address);
        self.lane_mut(lane).remove_free(size, address);
    }

    /// Returns a detached block to its lane as a free block, without merging it.
    pub(crate) fn attach(&mut self, id: BlockId) {
        debug_assert_eq!(self.blocks[id].state, BlockState::Detached);
        self.insert_free(id);
    }

    /// Merges a free block with its neighbours.
    pub(crate) fn merge_again(&mut self, id: BlockId) {
        let block = &self.blocks[id];
        let (lane, size, address) = (block.lane, block.size, block.address);
        self.lane_mut(lane).remove_free(size, address);
        self.merge_free(id);
    }

    // ---- mapping ----

    /// Marks the first `bytes` bytes of an unmapped block as mapped: they become free, and merge.
    pub(crate) fn mark_mapped(&mut self, id: BlockId, bytes: u64) {
        let Self { blocks, pools, .. } = self;
        let block = &blocks[id];
        let (address, room) = (block.address, block.size);
        let lane = pools[block.lane.pool].lane_mut(block.lane.stream);
        lane.remove_unmapped(address);
        lane.reach(&(address..address + bytes));
        if bytes < room {
            let rest = blocks.split_back(id, bytes);
            lane.insert_unmapped(address + bytes, rest);
        }
        blocks[id].state = BlockState::Free;
        self.merge_free(id);
    }

    /// Marks `start..end` of a free block as unmapped. These bytes keep the block's id.
    pub(crate) fn mark_unmapped(&mut self, id: BlockId, start: u64, end: u64) {
        self.cut_free(id, start, end);
        let Self { blocks, pools, .. } = self;
        let block = &mut blocks[id];
        block.state = BlockState::Unmapped;
        let neighbours = [block.prev, block.next];
        let lane = pools[block.lane.pool].lane_mut(block.lane.stream);
        for neighbour in neighbours.into_iter().flatten() {
            try_merge(blocks, lane, id, neighbour, BlockState::Unmapped);
        }
        lane.insert_unmapped(blocks[id].address, id);
    }

    /// Cuts an unmapped block in two at `address`. The part from `address` on keeps its id.
    pub(crate) fn split_unmapped(&mut self, id: BlockId, address: u64) {
        let (lane, low) = (self.blocks[id].lane, self.blocks[id].address);
        if address > low {
            let front = self.blocks.split_front(id, address - low, BlockState::Unmapped);
            let lane = self.lane_mut(lane);
            lane.remove_unmapped(low);
            lane.insert_unmapped(low, front);
            lane.insert_unmapped(address, id);
        }
    }

    // ---- merging ----

    /// Makes a block that is in no index free, and merges it with its neighbours.
    pub(crate) fn merge_free(&mut self, id: BlockId) {
        let Self { blocks, pools, .. } = self;
        let LaneId { pool, stream } = blocks[id].lane;
        let pool = &mut pools[pool];
        let searches = pool.searches;
        merge_in_lane(blocks, pool.lane_mut(stream), id, searches);
    }

    /// Adds a block to the free index of its lane.
    pub(super) fn insert_free(&mut self, id: BlockId) {
        let Self { blocks, pools, .. } = self;
        let block = &blocks[id];
        let freed = block.address..block.end();
        let pool = &mut pools[block.lane.pool];
        let searches = pool.searches;
        put_free(blocks, pool.lane_mut(block.lane.stream), id, searches, freed);
    }
}

/// Makes a block that is in no index free, and merges it with its neighbours, which are all of one
/// lane. Returns how many neighbours merged, and their bytes.
#[inline]
fn merge_in_lane(
    blocks: &mut BlockTable,
    lane: &mut Lane,
    id: BlockId,
    searches: u64,
) -> (i64, u64) {
    let block = &blocks[id];
    let freed = block.address..block.end();
    let mut merged = (0, 0);
    for neighbour in [block.prev, block.next].into_iter().flatten() {
        if let Some(bytes) = try_merge(blocks, lane, id, neighbour, BlockState::Free) {
            merged = (merged.0 + 1, merged.1 + bytes);
        }
    }
    put_free(blocks, lane, id, searches, freed);
    merged
}

/// Merges the neighbour into `into`, if the neighbour is in `state`; returns its bytes. `into` must
/// be in no index.
fn try_merge(
    blocks: &mut BlockTable,
    lane: &mut Lane,
    into: BlockId,
    neighbour: BlockId,
    state: BlockState,
) -> Option<u64> {
    let other = &blocks[neighbour];
    if other.state != state {
        return None;
    }
    let (size, address) = (other.size, other.address);
    match state {
        BlockState::Free => lane.remove_free(size, address),
        BlockState::Unmapped => lane.remove_unmapped(address),
        _ => unreachable!("only idle blocks merge"),
    }
    blocks.absorb(into, neighbour);
    Some(size)
}

/// Adds a block, of which only `freed` was not free before, to the free index of its lane.
#[expect(clippy::inline_always, reason = "saves a call in every free")]
#[inline(always)]
fn put_free(
    blocks: &mut BlockTable,
    lane: &mut Lane,
    id: BlockId,
    searches: u64,
    freed: Range<u64>,
) {
    let block = &mut blocks[id];
    block.state = BlockState::Free;
    block.free_since = searches;
    lane.insert_free(block.size, block.address, id);
    lane.mark(block.size, freed);
}
