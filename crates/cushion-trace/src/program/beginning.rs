//! The memory that was held before the first event.
//!
//! PyTorch keeps a limited number of events, so most traces begin in the middle of a run. The state
//! at that moment follows from the end of the trace: the file has all segments and blocks after the
//! last event, and every event can be undone.
//!
//! - A segment was there if it is left after undoing, from the final segments backwards, each event
//!   that got memory from the driver or returned it (`segments`).
//! - A block was live if the trace frees it without allocating it, or if it is live at the end and
//!   the trace did not allocate it (`blocks`).
//! - Everything else in those segments was free. Adjacent free blocks are always merged.
//! - A live block has its final size if it lives to the end. Otherwise its size is the requested
//!   size, rounded, plus the rest up to the next block if PyTorch would not have split off that
//!   rest. If the neighbour was freed before the trace begins, the next allocation behind the block
//!   shows its end.

mod blocks;
mod ranges;
mod segments;

use cushion_core::size::{GIB, MIN_BLOCK, display};
use cushion_core::{HeldBlock, HeldSegment, Options, PoolId, StreamId};

use self::blocks::Opening;
use self::segments::walk_back;
use crate::model::event::Action;
use crate::model::events::Events;
use crate::model::snapshot::Segment;

/// The memory that was held before the first event.
#[derive(Debug, Clone, Default)]
pub(crate) struct Beginning {
    /// By address.
    pub(crate) segments: Vec<Start>,
    /// By address. The index of a block is its slot.
    pub(crate) blocks: Vec<StartBlock>,
    /// The number of segments and blocks that are left out because they contradict others.
    pub(crate) left_out: u64,
    /// The number of blocks in unknown segments. Their size is the requested size, rounded.
    pub(crate) homeless: u64,
    /// The number of blocks that may have been up to 1 MiB longer than assumed.
    pub(crate) unsettled: u64,
}

/// A segment that was held.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Start {
    pub(crate) address: u64,
    pub(crate) size: u64,
    pub(crate) stream: u64,
    pub(crate) small: bool,
    /// The start of its reserved range, if this is a mapped range of an expandable segment.
    pub(crate) range: Option<u64>,
    /// The pool, if the file has it.
    pub(crate) pool: Option<PoolId>,
    /// The range of its blocks in [`Beginning::blocks`].
    pub(crate) blocks: (usize, usize),
}

/// A block that was live or pending.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StartBlock {
    pub(crate) address: u64,
    /// Zero while unknown.
    pub(crate) size: u64,
    pub(crate) requested: u64,
    pub(crate) stream: u64,
    pub(crate) pending: bool,
}

impl Beginning {
    /// Works out the beginning from the events and the final segments.
    pub(crate) fn of(events: &Events, segments: &[&Segment], options: &Options) -> Self {
        let mut changes = Vec::new();
        let mut blocks = Opening::default();
        for (index, event) in events.iter().enumerate() {
            match event.action {
                Action::SegmentAlloc
                | Action::SegmentFree
                | Action::SegmentMap
                | Action::SegmentUnmap => changes.push(event),
                _ => blocks.take(&event, index == 0),
            }
        }
        let mut beginning = Self { blocks: blocks.finish(segments), ..Self::default() };
        beginning.left_out += beginning.drop_overlaps();
        beginning.segments = walk_back(&changes, segments);
        beginning.left_out += beginning.drop_impossible();
        beginning.settle(options, events);
        beginning.left_out += beginning.drop_absurd();
        beginning.find_ranges(&changes, events);
        beginning
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.segments.is_empty() && self.blocks.is_empty()
    }

    /// Returns the requested bytes of all blocks.
    pub(crate) fn live(&self) -> u64 {
        self.blocks.iter().map(|block| block.requested).fold(0, u64::saturating_add)
    }

    /// Returns the bytes of all segments.
    pub(crate) fn reserved(&self) -> u64 {
        self.segments.iter().map(|segment| segment.size).fold(0, u64::saturating_add)
    }

    /// Returns notes for the user about what is inferred or unknown.
    pub(crate) fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if !self.is_empty() {
            notes.push(format!(
                "the trace begins in the middle of a run: {} live in {} blocks and {} reserved in \
                 {} segments before its first event are rebuilt from its end",
                display(self.live()),
                self.blocks.len(),
                display(self.reserved()),
                self.segments.len()
            ));
        }
        if self.homeless > 0 {
            notes.push(format!(
                "the place of {} of those blocks is not known: the file lacks their segments",
                self.homeless
            ));
        }
        if self.unsettled > 0 {
            notes.push(format!(
                "{} of those blocks may have been up to 1 MiB longer than assumed here",
                self.unsettled
            ));
        }
        if self.left_out > 0 {
            notes.push(format!(
                "{} segments or blocks that contradict others in the file are left out",
                self.left_out
            ));
        }
        notes
    }

    /// Returns whether there are mapped ranges (`paged`) or plain segments (not `paged`).
    pub(crate) fn has(&self, paged: bool) -> bool {
        self.segments.iter().any(|segment| segment.range.is_some() == paged)
    }

    /// Returns a segment in the form that the engine restores, in this pool.
    pub(crate) fn held(&self, segment: &Start, pool: PoolId) -> HeldSegment {
        let blocks = &self.blocks[segment.blocks.0..segment.blocks.1];
        let live = |block: &StartBlock| HeldBlock {
            address: block.address,
            size: block.size,
            requested: block.requested,
        };
        HeldSegment {
            address: segment.address,
            size: segment.size,
            stream: StreamId(segment.stream),
            pool,
            small: segment.small,
            range: segment.range,
            live: blocks.iter().map(live).collect(),
        }
    }

    /// Sorts the blocks and removes overlapping ones. Returns the number of removed blocks.
    fn drop_overlaps(&mut self) -> u64 {
        let before = self.blocks.len();
        self.blocks.sort_by_key(|block| block.address);
        let mut end = 0;
        self.blocks.retain(|block| {
            let extent = block.size.max(block.requested).max(1);
            let fits = block.address >= end && block.address.checked_add(extent).is_some();
            if fits {
                end = block.address + extent;
            }
            fits
        });
        (before - self.blocks.len()) as u64
    }

    /// Removes segments that no allocator can have held. Returns their number.
    fn drop_impossible(&mut self) -> u64 {
        let before = self.segments.len();
        let mut end = 0;
        self.segments.retain(|segment| {
            let own_end = segment.address.checked_add(segment.size);
            let possible = segment.address >= end
                && segment.address > 0
                && segment.size > 0
                && segment.size.is_multiple_of(MIN_BLOCK)
                && own_end.is_some();
            if possible {
                end = own_end.unwrap_or(u64::MAX);
            }
            possible
        });
        (before - self.segments.len()) as u64
    }

    /// Removes mapped ranges for small requests that are too large to be real: they would take long
    /// to restore in pages of 2 MiB. Returns their number.
    fn drop_absurd(&mut self) -> u64 {
        let before = self.segments.len();
        let most = 64 * GIB;
        self.segments.retain(|s| s.range.is_none() || !s.small || s.size <= most);
        (before - self.segments.len()) as u64
    }
}
