//! The heap: every block of every segment, the lanes in which free blocks are found, and the map
//! from addresses to live blocks.
//!
//! Blocks are kept outside the memory that they describe. Only this room cuts and merges blocks and
//! moves them between indexes; other rooms read. The heap knows nothing of pages or the driver: the
//! caller that maps, unmaps or frees memory tells the heap the new state of the block.

pub(crate) mod block;
mod check;
mod cut;
mod dirty;
mod free_index;
mod lane;
mod marks;
pub(crate) mod pool;
pub(crate) mod segment;

pub(crate) use self::check::Chains;
pub(crate) use self::dirty::{Changed, Dirty};
pub(crate) use self::lane::{Lane, Notes};

use std::ops::{Index, Range};
use std::sync::Arc;

use rustc_hash::FxHashMap;

use self::block::{Block, BlockId, BlockState, BlockTable, Holder, Users};
use self::pool::{LaneId, Pool, PoolIndex, PoolTable, PrivatePool};
use self::segment::{Kind, Segment, SegmentId, SegmentTable};
use crate::base::names::{Moment, PoolId};
use crate::ledger::change::{Held, Place, Span};
use crate::ledger::lanes::Lanes;

/// All blocks, segments and lanes.
#[derive(Debug)]
pub(crate) struct Heap {
    blocks: BlockTable,
    segments: SegmentTable,
    pools: PoolTable,
    /// Live blocks by address.
    live: FxHashMap<u64, BlockId>,
    lanes: Arc<Lanes>,
}

impl Heap {
    pub(crate) fn new(lanes: Arc<Lanes>) -> Self {
        Self {
            blocks: BlockTable::default(),
            segments: SegmentTable::default(),
            pools: PoolTable::new(),
            live: FxHashMap::default(),
            lanes,
        }
    }

    // ---- looking ----

    /// Returns a block, if the table has one at this index.
    pub(crate) fn get(&self, id: BlockId) -> Option<&Block> {
        self.blocks.get(id)
    }

    /// Returns all blocks, in table order.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = (BlockId, &Block)> {
        self.blocks.iter()
    }

    /// Returns all live blocks.
    pub(crate) fn live_blocks(&self) -> impl Iterator<Item = &Block> {
        self.blocks().map(|(_, block)| block).filter(|block| block.state == BlockState::Live)
    }

    /// Returns all segments, in table order.
    pub(crate) fn segments(&self) -> impl Iterator<Item = (SegmentId, &Segment)> {
        self.segments.iter()
    }

    /// Returns the segment of a block.
    pub(crate) fn segment_of(&self, id: BlockId) -> &Segment {
        &self.segments[self.blocks[id].segment]
    }

    pub(crate) fn pools(&self) -> &PoolTable {
        &self.pools
    }

    /// Returns a lane, if its stream holds memory of its pool.
    pub(crate) fn lane(&self, lane: LaneId) -> Option<&Lane> {
        self.pools[lane.pool].lane(lane.stream)
    }

    /// Returns all lanes.
    pub(crate) fn lanes(&self) -> impl Iterator<Item = (LaneId, &Lane)> {
        let of_pool = |(pool, it): (PoolIndex, _)| {
            let lanes = Pool::lanes(it);
            lanes.map(move |(stream, lane)| (LaneId { pool, stream }, lane))
        };
        self.pools.iter().flat_map(of_pool)
    }

    /// Returns the live block that begins at an address.
    pub(crate) fn live_at(&self, address: u64) -> Option<BlockId> {
        self.live.get(&address).copied()
    }

    /// Returns the figures that the memory of a lane counts in.
    pub(crate) fn place(&self, lane: LaneId) -> Place {
        self.pools[lane.pool].place(lane)
    }

    /// Returns the addresses of a block, for the ledger.
    pub(crate) fn span(&self, id: BlockId) -> Span {
        let block = &self.blocks[id];
        Span { address: block.address, bytes: block.size, place: self.place(block.lane) }
    }

    /// Returns a live or pending block, for the ledger.
    pub(crate) fn held(&self, id: BlockId) -> Held {
        let Holder { requested, tag, .. } = self.blocks[id].holder;
        Held { span: self.span(id), requested, tag }
    }

    /// Returns the number of blocks, segments and live addresses, each with the capacity of its
    /// table.
    pub(crate) fn sizes(&self) -> [(usize, usize); 3] {
        let live = (self.live.len(), self.live.capacity());
        [self.blocks.size(), self.segments.size(), live]
    }

    // ---- segments ----

    /// Adds a segment with one block over all of it: free, unmapped, or the shadow of a stitch.
    pub(crate) fn add_segment(&mut self, segment: Segment, state: BlockState) -> BlockId {
        let &Segment { address, size, lane, .. } = &segment;
        self.pools[lane.pool].segment_added(lane.stream, &self.lanes);
        let segment = self.segments.insert(segment);
        let id = self.blocks.insert(Block {
            address,
            size,
            prev: None,
            next: None,
            segment,
            lane,
            state,
            free_since: 0,
            freed: Moment::FIRST,
            users: Users::default(),
            holder: Holder::NONE,
        });
        match state {
            BlockState::Free => self.insert_free(id),
            BlockState::Unmapped => {
                let lane = self.lane_mut(lane);
                lane.insert_unmapped(address, id);
                lane.addresses_added(size);
            }
            _ => debug_assert_eq!(state, BlockState::Shadow, "a new block was never handed out"),
        }
        id
    }

    /// Removes a segment whose only block is unmapped, or in no index.
    pub(crate) fn remove_segment(&mut self, id: BlockId) -> Segment {
        let block = self.blocks.remove(id);
        debug_assert!(!block.is_split() && block.state != BlockState::Free);
        let segment = self.segments.remove(block.segment);
        if block.state == BlockState::Unmapped {
            let lane = self.lane_mut(block.lane);
            lane.remove_unmapped(block.address);
            lane.addresses_removed(block.address, block.size);
        }
        let LaneId { pool, stream } = block.lane;
        self.pools[pool].segment_removed(stream, &self.lanes);
        segment
    }

    // ---- notes of other rooms on blocks and lanes ----

    /// Returns the streams that use a block. Only the `streams` room writes them.
    pub(crate) fn users_mut(&mut self, id: BlockId) -> &mut Users {
        &mut self.blocks[id].users
    }

    /// Notes that the program uses blocks of a lane on other streams.
    pub(crate) fn set_shared(&mut self, lane: LaneId) {
        self.lane_mut(lane).set_shared();
    }

    /// Notes when the memory of a block was last freed.
    pub(crate) fn set_freed(&mut self, id: BlockId, freed: Moment) {
        self.blocks[id].freed = freed;
    }

    /// Counts a search, for the ages of free blocks.
    pub(crate) fn count_search(&mut self, pool: PoolIndex) {
        self.pools[pool].searches += 1;
    }

    /// Returns how many searches ago a block became free.
    pub(crate) fn age(&self, id: BlockId) -> u64 {
        let block = &self.blocks[id];
        self.pools[block.lane.pool].searches - block.free_since
    }

    /// From now on, indexes the free blocks of at least `least` bytes in the segment's lane by
    /// address, and marks changes in the segment by units of `unit` bytes.
    pub(crate) fn index_by_address(&mut self, id: BlockId, least: u64, unit: u64) {
        let &Block { segment, lane, .. } = &self.blocks[id];
        let &Segment { address, size, .. } = &self.segments[segment];
        self.lane_mut(lane).index_by_address(address..address + size, segment, least, unit);
    }

    /// Marks addresses in a free block of `block` bytes as changed.
    pub(crate) fn mark(&mut self, lane: LaneId, block: u64, part: Range<u64>) {
        self.lane_mut(lane).mark(block, part);
    }

    /// Returns the next changed addresses of a lane, and unmarks them.
    pub(crate) fn take_changed(&mut self, lane: LaneId) -> Option<Changed> {
        self.pools[lane.pool].lane_if_any(lane.stream)?.take_changed()
    }

    /// Takes the policy's notes on a lane. The caller puts them back.
    pub(crate) fn take_notes(&mut self, lane: LaneId) -> Option<Notes> {
        self.pools[lane.pool].lane_if_any(lane.stream)?.take_notes()
    }

    /// Stores the policy's notes on a lane. They are dropped with the lane.
    pub(crate) fn put_notes(&mut self, lane: LaneId, notes: Notes) {
        self.lane_mut(lane).put_notes(notes);
    }

    fn lane_mut(&mut self, lane: LaneId) -> &mut Lane {
        self.pools[lane.pool].lane_mut(lane.stream)
    }

    // ---- private pools ----

    /// Returns a private pool, to change its uses.
    pub(crate) fn private_mut(&mut self, id: PoolId) -> Option<&mut PrivatePool> {
        self.pools.private.get_mut(&id)
    }

    /// Creates a private pool with one use.
    pub(crate) fn open_private(&mut self, id: PoolId) {
        self.pools.open_private(id);
    }

    /// Removes a private pool, if it has no segment.
    pub(crate) fn close_private_if_empty(&mut self, id: PoolId) {
        let is_empty = |small| {
            let half = self.pools.half(id, small);
            half.is_none_or(|half| self.pools[half].segments() == 0)
        };
        if self.pools.private(id).is_some() && is_empty(true) && is_empty(false) {
            self.pools.close_private(id);
        }
    }

    /// Marks all private pools as unused from `released` on.
    pub(crate) fn release_all_private(&mut self, released: Moment) {
        self.pools.private.values_mut().for_each(|pool| pool.release_all(released));
    }

    /// Sets whether a private pool may serve the default pool when memory runs out.
    pub(crate) fn set_use_on_oom(&mut self, id: PoolId, allow: bool) {
        if allow {
            self.pools.use_on_oom.insert(id);
        } else {
            self.pools.use_on_oom.remove(&id);
        }
    }

    /// Shrinks the tables to their contents.
    pub(crate) fn shrink(&mut self) {
        self.blocks.shrink();
        self.segments.shrink();
        self.pools.shrink();
        let live = self.live.len();
        if self.live.capacity() / 8 > live.max(128) {
            self.live.shrink_to(2 * live);
        }
    }
}

impl Index<BlockId> for Heap {
    type Output = Block;

    fn index(&self, id: BlockId) -> &Block {
        &self.blocks[id]
    }
}

impl Index<SegmentId> for Heap {
    type Output = Segment;

    fn index(&self, id: SegmentId) -> &Segment {
        &self.segments[id]
    }
}

impl Index<PoolIndex> for Heap {
    type Output = Pool;

    fn index(&self, index: PoolIndex) -> &Pool {
        &self.pools[index]
    }
}

impl Segment {
    /// Returns whether pages are mapped and unmapped behind its addresses.
    pub(crate) fn is_reserved(&self) -> bool {
        matches!(self.kind, Kind::Pages { .. } | Kind::Homes)
    }
}

#[cfg(test)]
mod tests;
