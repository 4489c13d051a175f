//! A snapshot: every segment and block at one moment, in plain structs for others to render.

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
    /// Ranges with memory behind them, lowest address first.
    pub segments: Vec<SegmentFigures>,
    /// Bytes of physical memory held: plain segments, and each page once.
    pub reserved: u64,
}

/// One range of addresses with memory behind all of it. A segment that pages come and go behind is
/// shown as one range per run of addresses that are mapped and not in use elsewhere.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SegmentFigures {
    /// Where it begins.
    pub address: u64,
    /// Its size.
    pub size: u64,
    /// The stream it belongs to.
    pub stream: StreamId,
    /// The pool it belongs to.
    pub pool: PoolId,
    /// Whether it serves small requests.
    pub small: bool,
    /// Whether pages are behind it, rather than a plain allocation.
    pub paged: bool,
    /// Whether it is at second addresses: its pages have their homes elsewhere, where what is in use here is left out,
    /// so that every byte is shown once.
    pub stitched: bool,
    /// Whether it is in host memory; the device's figures do not count it.
    pub spilled: bool,
    /// The tag of the request it was made for.
    pub tag: Tag,
    /// Its blocks, in address order.
    pub blocks: Vec<BlockFigures>,
}

/// One block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct BlockFigures {
    /// Where it begins.
    pub address: u64,
    /// Its size.
    pub size: u64,
    /// What was last asked for.
    pub requested: u64,
    /// What it is used for.
    pub use_: BlockUse,
    /// The tag of the request.
    pub tag: Tag,
}

/// What a block is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BlockUse {
    /// Handed out.
    Live,
    /// Given back, waiting for another stream.
    Pending,
    /// Free.
    Free,
}

impl BlockUse {
    /// The name PyTorch gives it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Live => "active_allocated",
            Self::Pending => "active_pending_free",
            Self::Free => "inactive",
        }
    }
}

/// What a block is used for; `None` if what is behind it, if anything, is shown elsewhere.
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
