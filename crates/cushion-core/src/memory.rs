//! Memory: heap, backing, streams and ledger, for one hold of the engine's lock.
//!
//! [`Mem`] has the operations that need several of these rooms and no policy: it maps pages behind
//! a block, hands out a block, unmaps pages. Policies are built on it.

pub(crate) mod addresses;
mod detach;
mod grow;
pub(crate) mod request;
mod spill;
pub(crate) mod unmap;

pub(crate) use self::detach::Detached;
pub(crate) use self::request::{Found, GiveBack, Request};

use crate::backing::Backing;
use crate::base::looks::Looks;
use crate::base::names::Tag;
use crate::driver::{Driver, DriverResult, Properties, StreamId};
use crate::heap::Heap;
use crate::heap::block::{BlockId, Holder};
use crate::heap::pool::LaneId;
use crate::heap::segment::Kind;
use crate::ledger::Ledger;
use crate::ledger::change::{Change, Held};
use crate::options::Options;
use crate::streams::Streams;
use crate::streams::proof::{Idle, Mark, Marked, Proof, Work};

/// Heap, backing, streams and ledger while the engine's lock is held.
#[derive(Debug)]
pub(crate) struct Mem<'lock, D> {
    pub(crate) heap: &'lock mut Heap,
    pub(crate) backing: &'lock mut Backing,
    pub(crate) streams: &'lock mut Streams,
    pub(crate) ledger: Ledger<'lock>,
    pub(crate) options: &'lock Options,
    pub(crate) driver: &'lock D,
    pub(crate) device: &'lock Properties,
    pub(crate) looks: &'lock Looks,
}

impl<'lock, D: Driver> Mem<'lock, D> {
    // ---- handing out and freeing ----

    /// Hands out a free block: its first `request.size` bytes if `splits`, else all of it.
    #[inline]
    pub(crate) fn take(&mut self, id: BlockId, splits: bool, request: &Request) -> u64 {
        let &Request { requested, size, owner, tag, .. } = request;
        let taken = self.heap.take(id, size, splits, Holder { requested, tag, owner });
        self.ledger.apply(Change::HandedOut(taken.held, taken.splits));
        taken.held.span.address
    }

    /// Makes the live block at `address` pending. Returns `None` if no live block begins there.
    pub(crate) fn begin_free(&mut self, address: u64, tag: Tag) -> Option<BlockId> {
        let id = self.heap.begin_free(address)?;
        let held = self.heap.held(id);
        self.ledger.apply(Change::FreeRequested(Held { tag: tag.or(held.tag), ..held }));
        Some(id)
    }

    /// Makes a pending block of a segment of this kind free for reuse on its stream, and merges it
    /// with its neighbours.
    #[expect(clippy::inline_always, reason = "saves a call in every free")]
    #[inline(always)]
    pub(crate) fn complete_free(&mut self, id: BlockId, kind: Kind, tag: Tag) {
        let freed = self.streams.next_moment();
        let freed = self.heap.complete_free(id, kind, freed);
        let held = Held { tag: tag.or(freed.held.tag), ..freed.held };
        self.ledger.apply(Change::FreeCompleted(held, freed.splits));
    }

    /// Like [`complete_free`](Self::complete_free), for the block of a stitch, whose addresses
    /// become a shadow.
    pub(crate) fn complete_free_of_stitch(&mut self, id: BlockId, tag: Tag) {
        let freed = self.streams.next_moment();
        let freed = self.heap.complete_free_of_stitch(id, freed);
        let held = Held { tag: tag.or(freed.held.tag), ..freed.held };
        self.ledger.apply(Change::FreeCompleted(held, freed.splits));
    }

    /// Frees a pending block that other streams used, once they are done with it.
    pub(crate) fn free_when_done(&mut self, id: BlockId) -> DriverResult<()> {
        let reuse = self.options.graph_capture_record_stream_reuse;
        self.streams.free_when_done(self.heap, self.driver, id, reuse)
    }

    // ---- idle memory ----

    /// Returns evidence that no work can use a block without an owner, if the proof covers the
    /// block.
    pub(crate) fn idle(&self, id: BlockId, proof: Proof) -> Option<Idle<'lock>> {
        self.streams.idle(self.heap, id, proof)
    }

    /// Marks the work that is queued on a stream now: see [`Streams::mark`].
    pub(crate) fn mark(&mut self, stream: StreamId) -> DriverResult<Option<Mark>> {
        self.streams.mark(self.driver, stream)
    }

    /// Returns whether marked work is done by now: see [`Streams::poll`].
    pub(crate) fn poll(&mut self, mark: Mark) -> (Marked, DriverResult<()>) {
        self.streams.poll(self.driver, mark)
    }

    /// Returns the proof that a stream is idle, if it is idle now: see [`Streams::poll_stream`].
    pub(crate) fn poll_stream(&mut self, stream: StreamId) -> DriverResult<Option<Proof>> {
        self.streams.poll_stream(self.driver, stream)
    }

    /// Returns what is known of the work on the free memory of a lane: see [`Streams::work_on`].
    pub(crate) fn work_on(&mut self, lane: LaneId, asking: StreamId) -> DriverResult<Work> {
        self.streams.work_on(self.heap, self.driver, lane, asking)
    }

    /// Returns whether allocations go to a private pool, so that a capture may be under way.
    pub(crate) fn is_recording(&self) -> bool {
        self.streams.is_recording()
    }

    // ---- figures ----

    /// Returns the bytes of physical memory held from the driver.
    pub(crate) fn reserved(&self) -> u64 {
        self.ledger.reserved()
    }

    /// Returns how many more bytes the limit allows.
    pub(crate) fn may_grow_by(&self) -> u64 {
        self.backing.may_grow_by(self.reserved())
    }

    /// Returns the most bytes that may be reserved: the limit, or all of the device.
    pub(crate) fn most(&self) -> u64 {
        self.backing.limit().unwrap_or(u64::MAX).min(self.device.total)
    }

    /// Returns the bytes that a device which reports `free` bytes could still provide.
    pub(crate) fn room_of(&self, free: u64) -> u64 {
        free.min(self.may_grow_by())
    }

    /// Returns the bytes that the device could still provide.
    pub(crate) fn room(&self) -> DriverResult<u64> {
        Ok(self.room_of(Backing::device_free(self.driver)?))
    }

    /// Rounds up to whole units of mapping.
    pub(crate) fn whole_units(&self, bytes: u64) -> u64 {
        crate::base::size::round_up(bytes, self.device.granularity).unwrap_or(u64::MAX)
    }

    /// Passes the change in bytes of pages to the ledger.
    pub(crate) fn count_pages(&mut self) {
        if let Some(change) = self.backing.take_change() {
            self.ledger.apply(change);
        }
    }

    /// Returns the kind of a block's segment.
    pub(crate) fn kind_of(&self, id: BlockId) -> Kind {
        self.heap.segment_of(id).kind
    }
}

#[cfg(test)]
mod tests;
