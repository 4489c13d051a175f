//! Plain segments on their way back to the driver.
//!
//! To free a plain segment, the driver waits for the whole device. No lock is held meanwhile: the
//! segment is first detached from its lane, then freed, and then removed, or attached again if the
//! driver refused to free it.

use super::Mem;
use crate::base::names::Tag;
use crate::driver::Driver;
use crate::heap::block::BlockId;
use crate::ledger::change::Change;

/// A plain segment on its way back to the driver.
#[derive(Debug)]
#[must_use = "it is in no lane until it is settled"]
pub(crate) struct Detached {
    block: BlockId,
    address: u64,
    bytes: u64,
}

impl Detached {
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl<D: Driver> Mem<'_, D> {
    /// Takes a plain segment whose only block is free out of its lane and out of the figures:
    /// another thread may obtain its memory before this thread holds the lock again.
    pub(crate) fn detach(&mut self, id: BlockId) -> Detached {
        self.heap.detach_whole(id);
        let span = self.heap.span(id);
        self.ledger.apply(Change::SegmentDetached(span));
        self.backing.segment_detached(span.bytes);
        Detached { block: id, address: span.address, bytes: span.bytes }
    }

    /// Returns a segment that the driver refused to free to its lane.
    pub(crate) fn reattach(&mut self, segment: &Detached) {
        self.backing.segment_settled(segment.bytes);
        self.heap.attach(segment.block);
        self.ledger.apply(Change::SegmentAttached(self.heap.span(segment.block)));
    }

    /// Removes a segment that the driver freed.
    pub(crate) fn forget(&mut self, segment: &Detached, tag: Tag) {
        self.backing.segment_settled(segment.bytes);
        let span = self.heap.span(segment.block);
        let removed = self.heap.remove_segment(segment.block);
        self.ledger.apply(Change::SegmentFreed(span, tag.or(removed.tag)));
    }
}
