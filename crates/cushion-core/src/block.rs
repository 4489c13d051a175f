//! The block table: every block of every segment, linked to its neighbours.
//!
//! Blocks are kept outside the memory they describe, in a slab indexed by [`BlockId`]; the blocks
//! of a segment tile it without gaps, in address order, through `prev` and `next`.

use crate::driver::StreamId;
use crate::history::Tag;
use crate::owner::Owner;
use crate::pool::PoolIndex;
use crate::proof::Moment;
use crate::segment::SegmentId;
use crate::table::{Id, Table};

/// A block, by its place in the table.
pub(crate) type BlockId = Id<Block>;

/// What a block is being used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BlockState {
    /// In the free index of its lane.
    Free,
    /// Handed out.
    Live,
    /// Given back by its owner, but a stream that used it may still be at work.
    Pending,
    /// Addresses with no pages behind them, in the unmapped index of its lane.
    Unmapped,
    /// A whole plain segment, or a page, on its way back to the driver, in no index.
    Leaving,
    /// At home, but in use at a second address; in no index.
    Lent,
    /// Second addresses that are not in use: what is behind them is at home. In no index.
    Shadow,
}

/// One range of device addresses.
#[derive(Debug, Clone)]
pub(crate) struct Block {
    pub(crate) address: u64,
    pub(crate) size: u64,
    /// What the caller asked for; stale unless live or pending.
    pub(crate) requested: u64,
    pub(crate) prev: Option<BlockId>,
    pub(crate) next: Option<BlockId>,
    pub(crate) segment: SegmentId,
    pub(crate) pool: PoolIndex,
    pub(crate) stream: StreamId,
    pub(crate) state: BlockState,
    /// The pool's search count when the block became free; its age for garbage collection.
    pub(crate) free_since: u64,
    /// When the memory was last freed: the latest of all its bytes.
    pub(crate) freed: Moment,
    /// Events that must finish before the block is free; waiting for the device counts as one.
    pub(crate) events: u32,
    /// Other streams that used the block; allocated only for blocks that have any.
    pub(crate) uses: Option<Box<Uses>>,
    /// Who asked for it, when history is on.
    pub(crate) tag: Tag,
    /// The thread or task that asked for it; stale unless live.
    pub(crate) owner: Owner,
}

/// Other streams that used a block.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Uses {
    /// Streams with no event recorded yet.
    pub(crate) streams: Vec<StreamId>,
    /// Those of them recorded while a capture was under way: no event is needed once it has ended.
    pub(crate) in_capture: Vec<StreamId>,
    /// Those of them that the program did not name itself: it may have destroyed them before the free.
    pub(crate) ours: Vec<StreamId>,
}

impl Block {
    pub(crate) fn end(&self) -> u64 {
        self.address + self.size
    }

    /// Whether the segment has other blocks too.
    pub(crate) fn is_split(&self) -> bool {
        self.prev.is_some() || self.next.is_some()
    }

    pub(crate) fn is_free(&self) -> bool {
        self.state == BlockState::Free
    }

    pub(crate) fn is_mapped(&self) -> bool {
        self.state != BlockState::Unmapped
    }

    /// Streams whose use of the block has no event yet.
    pub(crate) fn uses_without_event(&self) -> &[StreamId] {
        self.uses.as_ref().map_or(&[], |uses| &uses.streams)
    }
}

/// All blocks.
pub(crate) type BlockTable = Table<Block>;

impl BlockTable {
    /// Cuts the first `size` bytes off a block into a new block before it, and returns that one.
    /// The block cut from keeps its identity, its state and the rest.
    pub(crate) fn split_front(&mut self, id: BlockId, size: u64, state: BlockState) -> BlockId {
        let rest = &mut self[id];
        debug_assert!(size < rest.size, "a split leaves two blocks");
        let front = Block {
            size,
            prev: rest.prev,
            next: Some(id),
            state,
            uses: None,
            events: 0,
            requested: 0,
            tag: Tag::NONE,
            ..*rest
        };
        rest.address += size;
        rest.size -= size;
        let before = rest.prev;
        let front = self.insert(front);
        self[id].prev = Some(front);
        if let Some(before) = before {
            self[before].next = Some(front);
        }
        front
    }

    /// Cuts a block to its first `keep` bytes; the rest becomes a new block after it, in the same
    /// state, and is returned.
    pub(crate) fn split_back(&mut self, id: BlockId, keep: u64) -> BlockId {
        let front = &mut self[id];
        debug_assert!(keep < front.size, "a split leaves two blocks");
        let back = Block {
            address: front.address + keep,
            size: front.size - keep,
            prev: Some(id),
            uses: None,
            events: 0,
            requested: 0,
            tag: Tag::NONE,
            ..*front
        };
        front.size = keep;
        let after = front.next;
        let back = self.insert(back);
        self[id].next = Some(back);
        if let Some(after) = after {
            self[after].prev = Some(back);
        }
        back
    }

    /// Cuts a block to `start..end`; what is before and after it become blocks of their own, in the same state, and are
    /// returned.
    pub(crate) fn cut(&mut self, id: BlockId, start: u64, end: u64) -> [Option<BlockId>; 2] {
        let (address, after, state) = (self[id].address, self[id].end(), self[id].state);
        let before = (address < start).then(|| self.split_front(id, start - address, state));
        let behind = (end < after).then(|| self.split_back(id, end - start));
        [before, behind]
    }

    /// Lets `into` swallow its neighbour `other`, which leaves the table.
    pub(crate) fn absorb(&mut self, into: BlockId, other: BlockId) -> Block {
        let gone = self.remove(other);
        if self[into].prev == Some(other) {
            self[into].address = gone.address;
            self[into].prev = gone.prev;
            if let Some(before) = gone.prev {
                self[before].next = Some(into);
            }
        } else {
            debug_assert_eq!(self[into].next, Some(other), "only neighbours merge");
            self[into].next = gone.next;
            if let Some(after) = gone.next {
                self[after].prev = Some(into);
            }
        }
        self[into].size += gone.size;
        self[into].freed = self[into].freed.max(gone.freed);
        gone
    }
}
