//! Segments: the ranges of device addresses that blocks are cut from, and what is behind them.

use crate::driver::StreamId;
use crate::history::Tag;
use crate::policy::Policy;
use crate::pool::PoolIndex;
use crate::stitch::StitchId;
use crate::table::{Id, Table};

/// A segment, by its place in the table.
pub(crate) type SegmentId = Id<Segment>;

/// What is behind the addresses of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Backing {
    /// One plain allocation of the driver, whole.
    Plain,
    /// A reserved range; pages of this size come and go behind it.
    Pages { page_size: u64 },
    /// A reserved range; pages of any size have their homes in it.
    Homes,
    /// Second addresses of pages that have their homes elsewhere.
    Stitched(StitchId),
}

/// One range of device addresses.
#[derive(Debug)]
pub(crate) struct Segment {
    pub(crate) address: u64,
    pub(crate) size: u64,
    pub(crate) pool: PoolIndex,
    pub(crate) stream: StreamId,
    pub(crate) backing: Backing,
    /// The policy that made it, and that says what of it may be given back.
    pub(crate) policy: Policy,
    /// Who asked for it, when history is on.
    pub(crate) tag: Tag,
}

impl Segment {
    pub(crate) fn end(&self) -> u64 {
        self.address + self.size
    }

    pub(crate) fn is_plain(&self) -> bool {
        self.backing == Backing::Plain
    }
}

/// All segments.
pub(crate) type SegmentTable = Table<Segment>;
