//! Policies: how memory is laid out and got.
//!
//! A policy decides six things, and nothing else in the engine asks which policy it is: which free block
//! serves a hit, whether several may serve it together, when a block is split, where memory for a miss comes
//! from, how much the driver must have for it, and what of a free block may be given back. The last is asked of
//! the policy that made the segment, because the policy can be changed while the engine runs; the others of the
//! one in force.

mod expandable;
mod paged;
mod segments;

pub use crate::options::Policy;
pub(crate) use paged::PageSizes;

use crate::block::{Block, BlockId, BlockTable};
use crate::driver::{Properties, StreamId};
use crate::options::Options;
use crate::owner::Owner;
use crate::pages::PageTable;
use crate::pool::{Lane, PoolIndex};
use crate::segment::SegmentTable;

impl Policy {
    /// Its decisions.
    pub(crate) fn rules(self) -> &'static dyn Rules {
        match self {
            Self::Segments => &segments::Segments,
            Self::Expandable => &expandable::Expandable,
            Self::Paged => &paged::Paged,
        }
    }
}

/// What a policy may look at.
#[derive(Debug, Clone, Copy)]
pub(crate) struct View<'a> {
    pub(crate) blocks: &'a BlockTable,
    pub(crate) segments: &'a SegmentTable,
    pub(crate) pages: &'a PageTable,
    pub(crate) options: &'a Options,
    pub(crate) device: Properties,
}

/// One allocation on its way.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Request {
    /// What the caller asked for.
    pub(crate) requested: u64,
    /// The size of the block that serves it.
    pub(crate) size: u64,
    /// What a segment made for it takes from the device.
    pub(crate) wanted: u64,
    pub(crate) stream: StreamId,
    pub(crate) pool: PoolIndex,
    /// Whether `pool` is a small one.
    pub(crate) small: bool,
    /// Who asks.
    pub(crate) owner: Owner,
}

/// Where memory for a miss comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// A plain segment of this size.
    Plain(u64),
    /// Pages behind the unmapped blocks that follow (or are) this one.
    Extend(BlockId),
    /// Pages behind a newly reserved range.
    Reserve { bytes: u64, page_size: u64 },
    /// Pages with a home, or second addresses of those there are.
    Home,
}

/// What of a free block may be given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GiveBack {
    /// Nothing.
    Nothing,
    /// Its whole plain segment.
    Segment,
    /// The pages of `start..end`.
    Pages { start: u64, end: u64 },
}

/// The six decisions.
pub(crate) trait Rules: Sync {
    /// Whether it gives pages second addresses, so that several free blocks can serve one request.
    fn stitches(&self) -> bool {
        false
    }

    /// Which free block of the lane serves a request of this size.
    fn choose(&self, view: View<'_>, lane: &Lane, size: u64) -> Option<BlockId>;

    /// Whether the rest of `block`, cut to `size`, becomes a block of its own.
    fn splits(&self, view: View<'_>, block: &Block, size: u64, small: bool) -> bool;

    /// Where memory for a miss comes from.
    fn source(&self, view: View<'_>, lane: Option<&Lane>, request: &Request) -> Source;

    /// What the driver has to have before it can serve a miss of a block of `size` bytes, for which a segment takes
    /// `wanted`.
    fn needed(&self, size: u64, wanted: u64) -> u64;

    /// What of `block`, which is free and in a segment this policy made, may be given back.
    fn give_back(&self, view: View<'_>, block: &Block) -> GiveBack;
}

/// Whether a block found for a request is too large for it: blocks that must not be split serve
/// only requests of nearly their size.
fn is_oversized_for(options: &Options, block: u64, size: u64) -> bool {
    let Some(max_split) = options.max_split_size else { return false };
    let rounding = options.max_non_split_rounding.unwrap_or(options.large_segment_size);
    if size < max_split { block >= max_split } else { block >= size.saturating_add(rounding) }
}
