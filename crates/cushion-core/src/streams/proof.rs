//! Why no memory is unmapped, released or given to another stream while the device may still use
//! it.
//!
//! # The rule
//!
//! Unmapping and releasing pages, splitting a page, dissolving a stitch and handing a block to
//! another stream all take an [`Idle`]: evidence that no work can use the memory of one block. Only
//! this file creates one. It is bound to one hold of the engine's lock, so that no work can begin
//! to use the block before the call that takes it.
//!
//! # What may use a free block
//!
//! * Work of the block's own stream that was queued before the free. A free on the own stream
//!   records no event.
//! * Work of other streams. The block is not free before that work is done (`events.rs`).
//! * Graphs, if the block belongs to a private pool. A graph may be replayed on any stream until
//!   its pool is released,
//!   and the last replay may still run after that.
//!
//! # How it is known that this work is done
//!
//! The engine counts *moments*: each completed free is one, and so is each release of a private
//! pool. A block stores the moment of its last free, a private pool that of its release. A
//! [`Proof`] says that all work is done that may use memory freed up to a moment. There are two
//! ways to get one:
//!
//! * Note [`Streams::now`], let the driver wait for the whole device, then create
//!   [`Proof::of_device`]. The proof covers the default pools, and the private pools that had been
//!   released by that moment.
//! * [`Streams::poll_stream`], or a [`Mark`] that is polled later, records an event on one stream,
//!   notes the moment, and finds the event finished. The proof covers blocks of that stream in the
//!   default pools, and never a private pool.
//!
//! [`Streams::idle`] compares a block with a proof. A block that was used and freed again has a
//! later moment, and so has a pool that was released later: the proof does not cover them.
//!
//! Plain segments need no proof. [`Driver::free`] waits for the device itself.
//!
//! # Streams that may no longer exist
//!
//! The program may destroy a stream at any time, and CUDA crashes if the handle of a destroyed
//! stream is used. Events are recorded only on streams that certainly exist: the stream of the
//! request, the default stream, streams that the program says it never destroys
//! ([`LastingStreams`]), and streams that the program itself names for a block. A stream that is
//! being captured is not touched either: an event would become part of the graph, or break it.
//!
//! CUDA may give the handle of a destroyed stream to a new one. The engine cannot tell them apart,
//! and neither can PyTorch: a program that destroys a stream must wait for its work first, or free
//! its tensors after that work.

use std::collections::BTreeSet;
use std::marker::PhantomData;

use super::Streams;
use crate::base::names::{Moment, PoolId};
use crate::driver::{Driver, DriverResult, EventId, StreamId};
use crate::heap::Heap;
use crate::heap::block::{BlockId, BlockState};
use crate::heap::pool::{LaneId, PoolTable};

/// Streams that are never destroyed, so that their handles may be used at any time. The default
/// stream is always one.
#[derive(Debug, Clone, Default)]
pub enum LastingStreams {
    /// No stream is known to be one.
    #[default]
    Unknown,
    /// These streams.
    These(BTreeSet<StreamId>),
    /// All streams.
    All,
}

impl LastingStreams {
    fn contains(&self, stream: StreamId) -> bool {
        match self {
            Self::Unknown => false,
            Self::These(streams) => streams.contains(&stream),
            Self::All => true,
        }
    }
}

/// The statement that all work is done that may use memory freed up to a moment, on the streams and
/// in the pools that it covers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Proof {
    until: Moment,
    covers: Covers,
}

#[derive(Debug, Clone, Copy)]
enum Covers {
    Nothing,
    /// Blocks of one stream in the default pools.
    Stream(StreamId),
    /// Blocks of all streams, in the default pools and in private pools that were released before.
    Device,
}

impl Proof {
    /// The proof that covers nothing.
    pub(crate) const NONE: Self = Self { until: Moment::FIRST, covers: Covers::Nothing };

    /// Returns the proof of a caller that noted the moment `until` and then waited for all work on
    /// the device.
    pub(crate) fn of_device(until: Moment) -> Self {
        Self { until, covers: Covers::Device }
    }

    /// Returns whether the device was waited for after `moment`.
    pub(super) fn covers_device_until(&self, moment: Moment) -> bool {
        matches!(self.covers, Covers::Device) && moment <= self.until
    }
}

/// Evidence that no work can use the memory of this block while the engine's lock is held for
/// `'lock`.
#[derive(Debug)]
#[must_use = "it is made to take memory away"]
pub(crate) struct Idle<'lock> {
    block: BlockId,
    lock: PhantomData<&'lock mut Streams>,
}

impl Idle<'_> {
    pub(crate) fn block(&self) -> BlockId {
        self.block
    }
}

/// An event after the work that a stream had at one moment.
#[derive(Debug)]
pub(crate) struct Mark {
    event: EventId,
    stream: StreamId,
    at: Moment,
}

impl Mark {
    /// Returns the proof, for a mark whose event has finished.
    fn proof(&self) -> Proof {
        Proof { until: self.at, covers: Covers::Stream(self.stream) }
    }
}

/// Marked work, under way or done.
#[derive(Debug)]
pub(crate) enum Marked {
    UnderWay(Mark),
    Done(Proof),
}

impl Marked {
    /// Returns the event of a mark that is no longer needed; `None` if the event was kept for reuse
    /// already.
    pub(crate) fn into_event(self) -> Option<EventId> {
        match self {
            Self::UnderWay(mark) => Some(mark.event),
            Self::Done(_) => None,
        }
    }
}

/// What is known of the work on a lane's free memory.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Work {
    Done(Proof),
    UnderWay,
    /// The stream may no longer exist, or a graph may run on any stream: only a wait for the device
    /// helps.
    Unknown,
}

impl Streams {
    // ---- comparing a block with a proof ----

    /// Returns evidence that no work can use a block without an owner, if the proof covers the
    /// block. `'lock` must be one hold of the engine's lock: only
    /// [`Mem::idle`](crate::memory::Mem::idle) names it.
    pub(crate) fn idle<'lock>(
        &self,
        heap: &Heap,
        id: BlockId,
        proof: Proof,
    ) -> Option<Idle<'lock>> {
        let block = heap.get(id)?;
        let is_unowned =
            matches!(block.state, BlockState::Free | BlockState::Detached | BlockState::Shadow);
        let pool = heap[block.lane.pool].id;
        let is_covered = match proof.covers {
            Covers::Nothing => false,
            Covers::Stream(stream) => block.lane.stream == stream && pool == PoolId::DEFAULT,
            Covers::Device if pool == PoolId::DEFAULT => true,
            Covers::Device => {
                let released = heap.pools().private(pool).and_then(|private| private.released);
                released.is_some_and(|released| released <= proof.until)
            }
        };
        let is_idle = is_unowned && is_covered && block.freed <= proof.until;
        is_idle.then_some(Idle { block: id, lock: PhantomData })
    }

    /// Returns the same for a block in host memory with which all streams, its own included, are
    /// done.
    pub(crate) fn idle_on_host<'lock>(&self, heap: &Heap, id: BlockId) -> Idle<'lock> {
        let block = &heap[id];
        assert!(
            block.lane.pool == PoolTable::SPILL
                && block.state == BlockState::Pending
                && block.users.are_none(),
            "a spilled block is given back before its streams are done with it"
        );
        Idle { block: id, lock: PhantomData }
    }

    // ---- polling ----

    /// Returns the moment of the latest free.
    pub(crate) fn now(&self) -> Moment {
        self.moments.now()
    }

    /// Returns the moment of a free or a release of a pool that happens now.
    pub(crate) fn next_moment(&mut self) -> Moment {
        self.moments.next()
    }

    /// Sets the streams that the program never destroys.
    pub(crate) fn set_lasting(&mut self, streams: LastingStreams) {
        self.lasting = streams;
    }

    /// Returns whether a stream certainly exists, whichever stream a request is for.
    pub(crate) fn lasts(&self, stream: StreamId) -> bool {
        stream == StreamId(0) || self.lasting.contains(stream)
    }

    /// Marks the work that is queued on a stream now; `None` if the stream is being captured. The
    /// stream must exist, and allocations must not go to a private pool.
    pub(crate) fn mark(
        &mut self,
        driver: &impl Driver,
        stream: StreamId,
    ) -> DriverResult<Option<Mark>> {
        if !is_uncaptured(driver, stream) {
            return Ok(None);
        }
        let event = self.event_now(driver, stream)?;
        Ok(Some(Mark { event, stream, at: self.now() }))
    }

    /// Returns whether marked work is done by now, and an error if the driver failed. Never waits.
    pub(crate) fn poll(&mut self, driver: &impl Driver, mark: Mark) -> (Marked, DriverResult<()>) {
        // The handle of a stream that may be destroyed is not used. The event exists in any case.
        if self.lasts(mark.stream) && !is_uncaptured(driver, mark.stream) {
            return (Marked::UnderWay(mark), Ok(()));
        }
        match driver.event_query(mark.event) {
            Ok(true) => {
                self.keep_event(mark.event);
                (Marked::Done(mark.proof()), Ok(()))
            }
            Ok(false) => (Marked::UnderWay(mark), Ok(())),
            Err(error) => (Marked::UnderWay(mark), Err(error)),
        }
    }

    /// Returns the proof that a stream is idle, if it is idle now. Never waits. The stream must
    /// exist, and allocations must not go to a private pool.
    pub(crate) fn poll_stream(
        &mut self,
        driver: &impl Driver,
        stream: StreamId,
    ) -> DriverResult<Option<Proof>> {
        let Some(mark) = self.mark(driver, stream)? else { return Ok(None) };
        let done = driver.event_query(mark.event);
        self.keep_event(mark.event);
        Ok(done?.then_some(mark.proof()))
    }

    /// Returns what is known of the work on the free memory of a lane. `asking` is the stream of
    /// the request. Never waits, and must not be called while allocations go to a private pool.
    pub(crate) fn work_on(
        &mut self,
        heap: &Heap,
        driver: &impl Driver,
        lane: LaneId,
        asking: StreamId,
    ) -> DriverResult<Work> {
        let is_private = heap[lane.pool].id != PoolId::DEFAULT;
        if is_private || lane.stream != asking && !self.lasts(lane.stream) {
            return Ok(Work::Unknown);
        }
        Ok(self.poll_stream(driver, lane.stream)?.map_or(Work::UnderWay, Work::Done))
    }
}

/// Returns whether an existing stream is certainly not being captured. A library may capture one of
/// the program's streams without telling the allocator.
pub(super) fn is_uncaptured(driver: &impl Driver, stream: StreamId) -> bool {
    matches!(driver.capture(stream), Ok(None))
}
