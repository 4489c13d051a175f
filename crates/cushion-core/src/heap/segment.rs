//! Segments: the ranges of device addresses that blocks are cut from, and what is behind them.

use super::pool::LaneId;
use crate::base::names::{PolicyIndex, Tag};
use crate::base::table::{Id, Table};

/// A segment, by its place in the table.
pub(crate) type SegmentId = Id<Segment>;

/// What is behind the addresses of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// One plain allocation of the driver, whole.
    Plain,
    /// Reserved addresses; pages of this size come and go behind them.
    Pages { page_size: u64 },
    /// Reserved addresses; pages of any size have their homes in them.
    Homes,
    /// Second addresses of pages that have their homes elsewhere. The policy knows the stitch by this number.
    Stitch(u32),
    /// One page of host memory.
    Host,
}

/// One range of device addresses.
#[derive(Debug)]
pub(crate) struct Segment {
    pub(crate) address: u64,
    pub(crate) size: u64,
    pub(crate) lane: LaneId,
    pub(crate) kind: Kind,
    /// The policy that made it, and that says what of it may be given back.
    pub(crate) policy: PolicyIndex,
    /// The tag of the request that it was made for.
    pub(crate) tag: Tag,
}

impl Segment {
    pub(crate) fn end(&self) -> u64 {
        self.address + self.size
    }

    pub(crate) fn is_plain(&self) -> bool {
        self.kind == Kind::Plain
    }
}

/// All segments.
pub(super) type SegmentTable = Table<Segment>;
