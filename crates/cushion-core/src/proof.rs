//! Why no memory is unmapped, released or given to another stream while the device may still use it.
//!
//! # The rule
//!
//! Unmapping and releasing pages, splitting a page, dissolving a stitched range and handing a block to another stream all
//! take an [`Idle`]: the statement that no work can use the memory of one block. Only this file makes one. It is bound to
//! one hold of the engine's lock, so nothing can begin to use the block before the call that takes it.
//!
//! # What may use a free block
//!
//! * Work of the block's own stream that was queued before the free. A free on the own stream records no event.
//! * Work of other streams. The block is not free before that work is done (`pending.rs`).
//! * Graphs, if the block belongs to a private pool. A graph may be replayed on any stream until its pool is released,
//!   and the last replay may still run after that.
//!
//! # How it is known that this work is done
//!
//! The engine counts *moments*: each completed free is one, and so is each release of a private pool. A block remembers
//! the moment of its last free, a private pool that of its release. A [`Proof`] says that all work is done which may use
//! memory that was freed up to a moment. There are two ways to get one:
//!
//! * [`Engine::wait_for_device`] notes the moment, and then lets the driver wait for the whole device. The proof covers
//!   the default pools, and those private pools that had been released by that moment.
//! * [`Locked::poll_stream`], or a [`Mark`] that is polled later, records an event on one stream, notes the moment, and
//!   finds the event finished. The proof covers blocks of that stream in the default pools, and never a private pool.
//!
//! [`Locked::idle`] compares a block with a proof. A block that was used and freed again has a later moment, and so has a
//! pool that was released later: for these the proof is stale.
//!
//! Plain segments need no proof. [`Driver::free`] waits for the device itself.
//!
//! # Streams that may be gone
//!
//! The program may destroy a stream at any time, and CUDA crashes if the handle of a destroyed stream is used. Events are
//! recorded only on streams that are certainly there: the stream that asks, the default stream, those that the program
//! says it never destroys ([`LastingStreams`]), and those that the program itself names for a block. A stream that is
//! being captured is not touched either: an event would become a part of the graph, or break it.
//!
//! CUDA may give the handle of a destroyed stream to a new one. The engine cannot tell them apart, and neither can PyTorch:
//! a program that destroys a stream waits for its work first, or frees its tensors after that work.

use std::collections::BTreeSet;
use std::marker::PhantomData;

use crate::block::{BlockId, BlockState};
use crate::driver::{Driver, DriverResult, EventId, StreamId};
use crate::engine::Engine;
use crate::homes::Found;
use crate::locked::{Locked, State};
use crate::pool::{PoolId, PoolIndex};

/// Streams that are never destroyed, so that their handles may be used at any time. The default stream always is one.
#[derive(Debug, Clone, Default)]
pub enum LastingStreams {
    /// None is known to be.
    #[default]
    Unknown,
    /// These are.
    These(BTreeSet<StreamId>),
    /// All are.
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

/// A point in the order of completed frees and released pools. Memory that was never handed out has the first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(crate) struct Moment(u64);

/// Counts moments.
#[derive(Debug, Default)]
pub(crate) struct Moments(u64);

impl Moments {
    /// The moment of a free or a release that happens now.
    pub(crate) fn next(&mut self) -> Moment {
        self.0 += 1;
        Moment(self.0)
    }

    fn now(&self) -> Moment {
        Moment(self.0)
    }
}

/// All work is done that may use memory which was freed up to a moment, on the streams and in the pools that it covers.
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
    /// Nothing was waited for, and nothing polled.
    pub(crate) const NONE: Self = Self { until: Moment(0), covers: Covers::Nothing };

    /// Whether the device was waited for after `moment`.
    pub(crate) fn covers_device_until(&self, moment: Moment) -> bool {
        matches!(self.covers, Covers::Device) && moment <= self.until
    }
}

/// No work can use the memory of this block, as long as the lock is held for `'lock`.
#[derive(Debug)]
#[must_use = "it is made to take memory away"]
pub(crate) struct Idle<'lock> {
    block: BlockId,
    lock: PhantomData<&'lock mut State>,
}

impl Idle<'_> {
    pub(crate) fn block(&self) -> BlockId {
        self.block
    }
}

/// An event behind the work that a stream had at one moment.
#[derive(Debug)]
pub(crate) struct Mark {
    event: EventId,
    stream: StreamId,
    at: Moment,
}

impl Mark {
    /// For one whose event was found finished.
    fn proof(&self) -> Proof {
        Proof { until: self.at, covers: Covers::Stream(self.stream) }
    }
}

/// Work that was marked, and may have been seen done since.
#[derive(Debug)]
pub(crate) enum Marked {
    UnderWay(Mark),
    Done(Proof),
}

impl Marked {
    /// The event, for somebody who needs the mark no more; none if it was used up.
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
    /// The stream may be gone, or a graph may run on any stream: only the device can be waited for.
    Unknown,
}

impl<D: Driver> Engine<D> {
    /// Waits for all work on the device, with no lock held. No capture may be under way, or begin.
    pub(crate) fn wait_for_device(&self) -> DriverResult<Proof> {
        let until = self.locked(|engine| engine.state.moments.now());
        // Any stream's name will do: the driver waits for all of them.
        self.driver.stream_synchronize(StreamId(0))?;
        let proof = Proof { until, covers: Covers::Device };
        self.locked(|mut engine| engine.complete_awaiting_device(proof));
        Ok(proof)
    }
}

impl<'lock, D: Driver> Locked<'lock, D> {
    // ---- comparing a block with a proof ----

    /// The statement that no work can use a block which nobody holds, if the proof covers it.
    pub(crate) fn idle(&self, id: BlockId, proof: Proof) -> Option<Idle<'lock>> {
        let State { blocks, pools, .. } = &*self.state;
        let block = blocks.get(id)?;
        let is_nobodys =
            matches!(block.state, BlockState::Free | BlockState::Leaving | BlockState::Shadow);
        let pool = pools[block.pool].id;
        let is_covered = match proof.covers {
            Covers::Nothing => false,
            Covers::Stream(stream) => block.stream == stream && pool == PoolId::DEFAULT,
            Covers::Device if pool == PoolId::DEFAULT => true,
            Covers::Device => {
                let released = pools.private.get(&pool).and_then(|private| private.released);
                released.is_some_and(|released| released <= proof.until)
            }
        };
        let is_idle = is_nobodys && is_covered && block.freed <= proof.until;
        is_idle.then_some(Idle { block: id, lock: PhantomData })
    }

    /// As [`idle`](Self::idle), for everything that a request would be served from. What is returned names one block
    /// of several.
    pub(crate) fn idle_found(&self, found: Found, size: u64, proof: Proof) -> Option<Idle<'lock>> {
        match found {
            Found::Block(block) | Found::Piece { block, .. } => self.idle(block, proof),
            Found::Range(range) => {
                let at_home = |id| self.idle(id, proof).is_some();
                let range_block = self.state.stitches.get(range).block;
                let idle = self.idle(range_block, proof)?;
                self.homes_of(range, size).all(at_home).then_some(idle)
            }
        }
    }

    /// The statement about a block in host memory whose streams are all done with it, its own among them.
    pub(crate) fn idle_spill(&self, id: BlockId) -> Idle<'lock> {
        let block = &self.state.blocks[id];
        assert!(
            Self::is_spill(block.pool)
                && block.state == BlockState::Pending
                && block.events == 0
                && block.uses.is_none(),
            "a spilled block is given back before its streams are done with it"
        );
        Idle { block: id, lock: PhantomData }
    }

    // ---- polling ----

    /// Whether a stream is certainly there, whichever stream asks.
    pub(crate) fn lasts(&self, stream: StreamId) -> bool {
        stream == StreamId(0) || self.state.lasting.contains(stream)
    }

    /// Whether a stream, which is there, is certainly not being captured. A library may capture one of the program's
    /// streams without telling the allocator.
    pub(crate) fn is_uncaptured(&self, stream: StreamId) -> bool {
        matches!(self.driver.capture(stream), Ok(None))
    }

    /// Marks the work that is queued on a stream now; `None` if the stream is being captured. The stream must be
    /// there, and allocations must not go to a private pool.
    pub(crate) fn mark(&mut self, stream: StreamId) -> DriverResult<Option<Mark>> {
        if !self.is_uncaptured(stream) {
            return Ok(None);
        }
        let event = self.event_now(stream)?;
        Ok(Some(Mark { event, stream, at: self.state.moments.now() }))
    }

    /// Whether marked work is done by now; and whether the driver failed to tell. Never waits.
    pub(crate) fn poll(&mut self, mark: Mark) -> (Marked, DriverResult<()>) {
        // The handle of a stream that may be gone is not used; the event is there in any case.
        if self.lasts(mark.stream) && !self.is_uncaptured(mark.stream) {
            return (Marked::UnderWay(mark), Ok(()));
        }
        match self.driver.event_query(mark.event) {
            Ok(true) => {
                self.state.pending.keep_event(mark.event);
                (Marked::Done(mark.proof()), Ok(()))
            }
            Ok(false) => (Marked::UnderWay(mark), Ok(())),
            Err(error) => (Marked::UnderWay(mark), Err(error)),
        }
    }

    /// The proof that a stream has no work left, if that is so now. Never waits. The stream must be there, and
    /// allocations must not go to a private pool.
    pub(crate) fn poll_stream(&mut self, stream: StreamId) -> DriverResult<Option<Proof>> {
        let Some(mark) = self.mark(stream)? else { return Ok(None) };
        let done = self.driver.event_query(mark.event);
        self.state.pending.keep_event(mark.event);
        Ok(done?.then_some(mark.proof()))
    }

    /// What is known of the work on the free memory of a lane. `asking` is the stream of the request. Never waits,
    /// and must not be called while allocations go to a private pool.
    pub(crate) fn work_on(
        &mut self,
        (pool, stream): (PoolIndex, StreamId),
        asking: StreamId,
    ) -> DriverResult<Work> {
        let is_private = self.state.pools[pool].id != PoolId::DEFAULT;
        if is_private || stream != asking && !self.lasts(stream) {
            return Ok(Work::Unknown);
        }
        Ok(self.poll_stream(stream)?.map_or(Work::UnderWay, Work::Done))
    }
}
