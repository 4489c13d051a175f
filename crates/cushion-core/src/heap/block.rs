//! The block table: every block of every segment, linked to its neighbours.
//!
//! Blocks are kept outside the memory that they describe, in a table indexed by [`BlockId`]. The
//! blocks of a segment tile it without gaps, in address order, linked through `prev` and `next`.

use super::pool::LaneId;
use super::segment::SegmentId;
use crate::base::names::{Moment, Owner, Tag};
use crate::base::table::{Id, Table};
use crate::driver::StreamId;

/// The index of a block in the table.
pub(crate) type BlockId = Id<Block>;

/// The state of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BlockState {
    /// In the free index of its lane.
    Free,
    /// Handed out.
    Live,
    /// Freed by its owner, while another stream may still use it.
    Pending,
    /// Addresses with no pages behind them, in the unmapped index of its lane.
    Unmapped,
    /// A whole plain segment, or a page, on its way back to the driver. In no index.
    Detached,
    /// Free at home, in use through a stitch. In no index.
    Lent,
    /// Addresses of a stitch that are not in use: the pages behind them are at home. In no index.
    Shadow,
}

/// One range of device addresses. Only the heap writes it.
#[derive(Debug, Clone)]
pub(crate) struct Block {
    pub(crate) address: u64,
    pub(crate) size: u64,
    pub(crate) prev: Option<BlockId>,
    pub(crate) next: Option<BlockId>,
    pub(crate) segment: SegmentId,
    pub(crate) lane: LaneId,
    pub(crate) state: BlockState,
    /// The pool's search count when the block became free: its age for garbage collection.
    pub(crate) free_since: u64,
    /// The latest moment at which any of its memory was freed.
    pub(crate) freed: Moment,
    /// The streams other than its own that use it.
    pub(crate) users: Users,
    /// The request that it serves; stale unless the block is live or pending.
    pub(crate) holder: Holder,
}

/// The request that a block serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Holder {
    /// The bytes that the caller asked for.
    pub(crate) requested: u64,
    pub(crate) tag: Tag,
    /// The thread or task that asked.
    pub(crate) owner: Owner,
}

impl Holder {
    /// No request.
    pub(crate) const NONE: Self = Self { requested: 0, tag: Tag::NONE, owner: Owner::NOBODY };
}

/// The streams other than its own that use a block. The `streams` room defines their meaning.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Users {
    /// Events that must finish before the block is free; a wait for the device counts as one.
    pub(crate) events: u32,
    /// Uses without an event; allocated only for blocks that have any.
    pub(crate) uses: Option<Box<Uses>>,
}

/// Uses of a block that have no event yet.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Uses {
    pub(crate) streams: Vec<StreamId>,
    /// Those of the streams whose use was recorded during a capture. They need no event once it has
    /// ended.
    pub(crate) in_capture: Vec<StreamId>,
    /// Those of the streams that the engine named, not the program. The program may have destroyed
    /// them before the free.
    pub(crate) ours: Vec<StreamId>,
}

impl Users {
    /// Returns whether no other stream may use the block.
    pub(crate) fn are_none(&self) -> bool {
        self.events == 0 && self.uses.is_none()
    }

    /// Returns the streams whose use of the block has no event yet.
    pub(crate) fn without_event(&self) -> &[StreamId] {
        self.uses.as_ref().map_or(&[], |uses| &uses.streams)
    }
}

impl Block {
    pub(crate) fn end(&self) -> u64 {
        self.address + self.size
    }

    /// Returns whether its segment has other blocks, too.
    pub(crate) fn is_split(&self) -> bool {
        self.prev.is_some() || self.next.is_some()
    }

    pub(crate) fn is_free(&self) -> bool {
        self.state == BlockState::Free
    }

    pub(crate) fn is_mapped(&self) -> bool {
        self.state != BlockState::Unmapped
    }
}

/// All blocks.
pub(crate) type BlockTable = Table<Block>;

impl BlockTable {
    /// Cuts the first `size` bytes off a block into a new block before it, and returns the new
    /// block. The old block keeps its id, its state and the rest.
    pub(super) fn split_front(&mut self, id: BlockId, size: u64, state: BlockState) -> BlockId {
        let rest = &mut self[id];
        debug_assert!(size < rest.size, "a split leaves two blocks");
        let front = Block {
            size,
            prev: rest.prev,
            next: Some(id),
            state,
            users: Users::default(),
            holder: Holder { owner: rest.holder.owner, ..Holder::NONE },
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

    /// Cuts a block to its first `keep` bytes. The rest becomes a new block after it, in the same
    /// state, and is returned.
    pub(super) fn split_back(&mut self, id: BlockId, keep: u64) -> BlockId {
        let front = &mut self[id];
        debug_assert!(keep < front.size, "a split leaves two blocks");
        let back = Block {
            address: front.address + keep,
            size: front.size - keep,
            prev: Some(id),
            users: Users::default(),
            holder: Holder { owner: front.holder.owner, ..Holder::NONE },
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

    /// Cuts a block to `start..end`. The bytes before and after become blocks of their own, in the
    /// same state, and are returned.
    pub(super) fn cut(&mut self, id: BlockId, start: u64, end: u64) -> [Option<BlockId>; 2] {
        let (address, after, state) = (self[id].address, self[id].end(), self[id].state);
        let before = (address < start).then(|| self.split_front(id, start - address, state));
        let behind = (end < after).then(|| self.split_back(id, end - start));
        [before, behind]
    }

    /// Merges the neighbour `other` into `into` and removes it from the table.
    pub(super) fn absorb(&mut self, into: BlockId, other: BlockId) -> Block {
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
