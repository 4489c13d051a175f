//! Private pools: memory set apart for a CUDA graph, or for a use of the caller's own.
//!
//! While allocations go to a private pool, a capture may be under way: no event is queried, nothing
//! is given back. A pool counts its uses; when the last is released its memory may be given back,
//! and the pool is forgotten once none is left.

use std::fmt;

use crate::driver::{Driver, StreamId};
use crate::error::PoolError;
use crate::locked::Locked;
use crate::pool::{PoolId, PoolIndex};

/// Which streams' allocations go to a private pool. Called with the engine's lock held: it must not
/// call the engine.
pub type StreamFilter = Box<dyn Fn(StreamId) -> bool + Send>;

/// A private pool that allocations go to now.
pub(crate) struct Recording {
    pub(crate) pool: PoolId,
    filter: StreamFilter,
}

impl fmt::Debug for Recording {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recording").field("pool", &self.pool).finish_non_exhaustive()
    }
}

impl<D: Driver> Locked<'_, D> {
    /// Whether allocations of any stream go to a private pool.
    pub(crate) fn is_recording(&self) -> bool {
        !self.state.recording.is_empty()
    }

    /// The private pool that takes a stream's allocations, the latest begun first.
    pub(crate) fn recorded_pool(&self, small: bool, stream: StreamId) -> Option<PoolIndex> {
        let recording = self.state.recording.iter().rev().find(|r| (r.filter)(stream))?;
        let private = &self.state.pools.private[&recording.pool];
        Some(if small { private.small } else { private.large })
    }

    /// Makes a private pool, or adds a use to one there is.
    pub(crate) fn use_pool(&mut self, id: PoolId) -> Result<(), PoolError> {
        if id == PoolId::DEFAULT {
            return Err(PoolError::Default(id));
        }
        match self.state.pools.private.get_mut(&id) {
            None => self.state.pools.open_private(id),
            Some(pool) if pool.uses == 0 => return Err(PoolError::Released(id)),
            Some(pool) => pool.uses += 1,
        }
        Ok(())
    }

    pub(crate) fn begin_pool(&mut self, id: PoolId, filter: StreamFilter) -> Result<(), PoolError> {
        if self.state.recording.iter().any(|recording| recording.pool == id) {
            return Err(PoolError::AlreadyRecording(id));
        }
        self.use_pool(id)?;
        self.state.recording.push(Recording { pool: id, filter });
        Ok(())
    }

    /// Returned is what the pool was recorded with, for its owner to drop.
    pub(crate) fn end_pool(&mut self, id: PoolId) -> Result<Recording, PoolError> {
        let index = self.state.recording.iter().position(|recording| recording.pool == id);
        let index = index.ok_or(PoolError::NotRecording(id))?;
        self.state.pending.forget_order();
        Ok(self.state.recording.remove(index))
    }

    pub(crate) fn release_pool(&mut self, id: PoolId) -> Result<(), PoolError> {
        let recording = self.state.recording.iter().any(|recording| recording.pool == id);
        let pool = self.state.pools.private.get_mut(&id).ok_or(PoolError::Unknown(id))?;
        match pool.uses {
            0 => Err(PoolError::Released(id)),
            1 if recording => Err(PoolError::StillRecording(id)),
            _ => {
                pool.uses -= 1;
                Ok(())
            }
        }
    }
}
