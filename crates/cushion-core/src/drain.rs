//! Whether the work that used free memory is done: asked before it goes to another stream, or its pages go.
//!
//! A free on a block's own stream records no event. Of a stream that is certainly there, the one that asks, the
//! default one, or one that the program says it never destroys, the driver can tell at the moment of need. Any other may
//! have been destroyed, and its handle must not be used: such streams are waited for without it, with no lock held. What
//! was free in a lane before the wait, and is still there because nothing has been freed in that lane since, is done with.

use std::collections::{BTreeMap, BTreeSet};

use crate::driver::{Driver, DriverResult, StreamId};
use crate::engine::Engine;
use crate::locked::Locked;
use crate::pool::{Lane, PoolId, PoolIndex};

/// What is known of the work on a lane's free memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Work {
    Done,
    UnderWay,
    /// The stream may be gone: it can only be waited for.
    Unknown,
}

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

/// Lanes that were waited for, each with the count of frees it had seen before.
#[derive(Debug, Default)]
pub(crate) struct Drained(BTreeMap<(PoolIndex, StreamId), u64>);

impl Drained {
    /// Whether nothing was freed in a lane since it was waited for.
    pub(crate) fn covers(&self, at: (PoolIndex, StreamId), lane: &Lane) -> bool {
        self.0.get(&at) == Some(&lane.frees())
    }
}

impl<D: Driver> Engine<D> {
    /// Waits for all work of these streams. No capture may be under way, or begin.
    pub(crate) fn drain(&self, streams: &[StreamId]) -> DriverResult<Drained> {
        let drained = self.locked(|engine| engine.about_to_drain(streams));
        for &stream in streams {
            self.driver.stream_synchronize(stream)?;
        }
        Ok(drained)
    }
}

impl<D: Driver> Locked<'_, D> {
    fn about_to_drain(&self, streams: &[StreamId]) -> Drained {
        let lanes = self.state.pools.iter().flat_map(|(pool, lanes)| {
            lanes.lanes().map(move |(stream, lane)| ((pool, stream), lane.frees()))
        });
        Drained(lanes.filter(|((_, stream), _)| streams.contains(stream)).collect())
    }

    /// Whether a stream is certainly there, whoever asks.
    pub(crate) fn lasts(&self, stream: StreamId) -> bool {
        stream == StreamId(0) || self.state.lasting.contains(stream)
    }

    /// What is known of the work on a lane's free memory. `asking` is the stream of the request.
    /// Never waits, and must not be called during a capture.
    pub(crate) fn work_on(
        &mut self,
        (pool, stream): (PoolIndex, StreamId),
        asking: StreamId,
        drained: &Drained,
    ) -> DriverResult<Work> {
        let lane = self.state.pools[pool].lane(stream);
        if lane.is_some_and(|lane| drained.covers((pool, stream), lane)) {
            return Ok(Work::Done);
        }
        // A graph is replayed on any stream, and may still run when its pool is released.
        let is_graphs = self.state.pools[pool].id != PoolId::DEFAULT;
        if is_graphs || stream != asking && !self.lasts(stream) {
            return Ok(Work::Unknown);
        }
        Ok(if self.is_idle(stream)? { Work::Done } else { Work::UnderWay })
    }
}
