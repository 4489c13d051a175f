//! Freeing, from the owner's call until the block can serve another request.

use super::Locked;
use crate::base::names::{Owner, Tag};
use crate::driver::{Driver, DriverResult, StreamId};
use crate::heap::block::{Block, BlockId, Holder};
use crate::heap::pool::PoolTable;
use crate::heap::segment::{Segment, SegmentId};
use crate::outcome::error::AddressError;

impl<D: Driver> Locked<'_, D> {
    /// Frees a block for its owner. It is free at once, or when all streams that used it are done
    /// with it.
    pub(crate) fn free(&mut self, address: u64, by: Owner, tag: Tag) -> Result<(), AddressError> {
        let unknown = AddressError::Unknown { address };
        let id = self.mem.begin_free(address, tag).ok_or(unknown)?;
        let &Block { lane, segment, holder: Holder { owner, .. }, ref users, .. } =
            &self.mem.heap[id];
        let (is_spilled, is_used) = (lane.pool == PoolTable::SPILL, users.uses.is_some());
        if owner != by {
            self.demand.queue.note_freed_by(owner, by);
        }
        let failed = |source| AddressError::Driver { address, source };
        if is_spilled {
            return self.mem.free_spilled(id).map_err(failed);
        }
        if is_used {
            return self.mem.free_when_done(id).map_err(failed);
        }
        self.complete_free_in(segment, id, tag);
        Ok(())
    }

    /// Makes a block on the device free for reuse on its stream.
    #[inline]
    fn complete_free_in(&mut self, segment: SegmentId, id: BlockId, tag: Tag) {
        let &Segment { policy, kind, .. } = &self.mem.heap[segment];
        self.policies.rules_mut(policy).complete_free(&mut self.mem, id, kind, tag);
    }

    /// Makes a block free for reuse on its stream, or releases it if it is in host memory.
    fn complete_free(&mut self, id: BlockId, tag: Tag) {
        if self.mem.is_spilled(id) {
            self.mem.complete_free_of_spill(id, tag);
        } else {
            self.complete_free_in(self.mem.heap[id].segment, id, tag);
        }
    }

    /// Completes the frees of the blocks with which all streams are done.
    pub(crate) fn complete_done(&mut self) {
        while let Some(id) = self.mem.streams.next_done() {
            self.complete_free(id, Tag::NONE);
        }
    }

    /// Notes that the program uses the block at `address` on `stream`.
    pub(crate) fn record_stream(
        &mut self,
        address: u64,
        stream: StreamId,
    ) -> Result<(), AddressError> {
        let id = self.mem.heap.live_at(address).ok_or(AddressError::Unknown { address })?;
        self.mem.streams.record_use(self.mem.heap, self.mem.driver, id, stream);
        Ok(())
    }

    /// Completes frees that other streams are done with, as many as a request has time for.
    pub(crate) fn complete_finished_frees(&mut self, stream: StreamId) -> DriverResult<()> {
        let mem = &mut self.mem;
        let processed = if mem.streams.is_recording() {
            // Events may not be queried during a capture.
            if !mem.options.graph_capture_record_stream_reuse {
                return Ok(());
            }
            mem.streams.process_capture(mem.heap, mem.driver, stream)
        } else if mem.streams.is_nothing_pending() {
            return Ok(());
        } else {
            mem.streams.process(mem.heap, mem.driver)
        };
        self.complete_done();
        processed
    }

    /// Completes many of the frees that other streams are done with.
    pub(crate) fn process_many_events(&mut self) -> DriverResult<()> {
        let processed = self.mem.streams.process_many(self.mem.heap, self.mem.driver);
        self.complete_done();
        processed
    }

    /// Like [`process_many_events`](Self::process_many_events). Returns the bytes, or `None` while
    /// a capture may be under way.
    pub(crate) fn complete_frees(&mut self) -> DriverResult<Option<u64>> {
        if self.mem.is_recording() {
            return Ok(None);
        }
        let before = self.mem.ledger.active();
        self.process_many_events()?;
        Ok(Some(before.saturating_sub(self.mem.ledger.active())))
    }
}
