//! Segments: the ranges of device addresses that blocks are cut from.

use super::pool::LaneId;
use crate::base::names::{PolicyIndex, Tag};
use crate::base::table::{Id, Table};

/// The index of a segment in the table.
pub(crate) type SegmentId = Id<Segment>;

/// What is mapped at the addresses of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// One plain allocation of the driver.
    Plain,
    /// Reserved addresses, behind which pages of this size are mapped and unmapped.
    Pages { page_size: u64 },
    /// Reserved addresses that are the homes of pages of any size.
    Homes,
    /// Second addresses of pages whose homes are elsewhere. The number identifies the stitch to its
    /// policy.
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
    /// The policy that created it, and that decides how much of it may be given back.
    pub(crate) policy: PolicyIndex,
    /// The tag of the request that it was created for.
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
