//! Snapshots: every segment and block at one moment, in plain structs for other code to render.

use std::collections::BTreeMap;

use crate::base::names::{PoolId, Tag};
use crate::core::Locked;
use crate::driver::{Driver, StreamId};
use crate::heap::block::{Block, BlockId, BlockState, Holder};
use crate::heap::segment::Kind;
use crate::ledger::change::Change;

/// Every segment and block at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Snapshot {
    /// Mapped ranges of addresses, lowest first.
    pub segments: Vec<SegmentFigures>,
    /// Bytes of physical memory held: plain segments, and each page once.
    pub reserved: u64,
}

/// One range of addresses that is mapped completely. A segment of pages appears as one range for
/// each contiguous part that is mapped and not in use elsewhere.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SegmentFigures {
    /// Its start.
    pub address: u64,
    /// Its size.
    pub size: u64,
    /// Its stream.
    pub stream: StreamId,
    /// Its pool.
    pub pool: PoolId,
    /// Whether it serves small requests.
    pub small: bool,
    /// Whether it consists of pages, not of a plain allocation.
    pub paged: bool,
    /// Whether it is a stitch: its pages have their homes elsewhere. Bytes in use here are left out
    /// there, so that every byte appears once.
    pub stitched: bool,
    /// Whether it is in host memory, which the figures of the device do not count.
    pub spilled: bool,
    /// The tag of the request that it was created for.
    pub tag: Tag,
    /// Its blocks, in address order.
    pub blocks: Vec<BlockFigures>,
}

/// One block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct BlockFigures {
    /// Its start.
    pub address: u64,
    /// Its size.
    pub size: u64,
    /// The bytes of the latest request.
    pub requested: u64,
    /// Its state.
    pub use_: BlockUse,
    /// The tag of the request.
    pub tag: Tag,
}

/// The state of a block in a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BlockUse {
    /// Handed out.
    Live,
    /// Freed by its owner, waiting for another stream.
    Pending,
    /// Free.
    Free,
}

impl BlockUse {
    /// Returns PyTorch's name of the state.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Live => "active_allocated",
            Self::Pending => "active_pending_free",
            Self::Free => "inactive",
        }
    }
}

/// Returns the state of a block; `None` if nothing is mapped there, or its memory appears
/// elsewhere.
fn use_of(block: &Block) -> Option<BlockUse> {
    match block.state {
        BlockState::Live => Some(BlockUse::Live),
        BlockState::Pending => Some(BlockUse::Pending),
        BlockState::Free | BlockState::Detached => Some(BlockUse::Free),
        BlockState::Unmapped | BlockState::Lent | BlockState::Shadow => None,
    }
}

impl<D: Driver> Locked<'_, D> {
    pub(crate) fn snapshot(&mut self) -> Snapshot {
        let heap = &*self.mem.heap;
        let is_shown = |id: BlockId| use_of(&heap[id]).is_some();
        let heads: BTreeMap<u64, BlockId> = heap
            .blocks()
            .filter(|(id, block)| is_shown(*id) && !block.prev.is_some_and(is_shown))
            .map(|(id, block)| (block.address, id))
            .collect();
        let segments = heads.into_values().map(|head| self.segment_from(head)).collect();
        let snapshot = Snapshot { segments, reserved: self.mem.reserved() };
        if self.mem.ledger.history().is_on() {
            let active: u64 = snapshot
                .segments
                .iter()
                .filter(|segment| !segment.spilled)
                .flat_map(|segment| &segment.blocks)
                .filter(|block| block.use_ != BlockUse::Free)
                .map(|block| block.size)
                .sum();
            self.mem.ledger.apply(Change::SnapshotTaken { active });
        }
        snapshot
    }

    fn segment_from(&self, head: BlockId) -> SegmentFigures {
        let heap = &*self.mem.heap;
        let first = &heap[head];
        let segment = &heap[first.segment];
        let pool = &heap[first.lane.pool];
        let mut blocks = Vec::new();
        let mut at = Some(head);
        while let Some(block) = at.map(|id| &heap[id]) {
            let Some(use_) = use_of(block) else { break };
            let &Block { address, size, holder: Holder { requested, tag, .. }, .. } = block;
            blocks.push(BlockFigures { address, size, requested, use_, tag });
            at = block.next;
        }
        SegmentFigures {
            address: first.address,
            size: blocks.iter().map(|block| block.size).sum(),
            stream: first.lane.stream,
            pool: pool.id,
            small: pool.small,
            paged: !segment.is_plain(),
            stitched: matches!(segment.kind, Kind::Stitch(_)),
            spilled: self.mem.is_spilled(head),
            tag: segment.tag,
            blocks,
        }
    }
}
