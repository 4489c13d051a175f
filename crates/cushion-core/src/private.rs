//! Private pools: memory set apart for a CUDA graph, or for a use of the caller's own.
//!
//! While allocations go to a private pool, a capture may be under way: no event is queried, nothing
//! is given back. A pool counts its uses; when the last is released its memory may be given back,
//! and the pool is forgotten once none is left.

use std::fmt;
use std::sync::PoisonError;

use crate::driver::{Driver, StreamId};
use crate::engine::Engine;
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

impl<D: Driver> Engine<D> {
    /// Makes a private pool, or adds a use to one.
    pub fn create_pool(&self, pool: PoolId) -> Result<(), PoolError> {
        self.locked(|mut engine| engine.use_pool(pool))
    }

    /// From now on, allocations of the streams that `filter` accepts go to `pool`, which is made if
    /// need be and has one more use. The latest begun wins.
    pub fn begin_allocate_to_pool(
        &self,
        pool: PoolId,
        filter: StreamFilter,
    ) -> Result<(), PoolError> {
        let begun = {
            let _nobody_waits = self.captures.write().unwrap_or_else(PoisonError::into_inner);
            self.locked(|mut engine| engine.begin_pool(pool, filter))
        };
        // A filter that is not needed is the caller's: it goes with no lock held.
        begun.map_err(|(error, _filter)| error)
    }

    /// Allocations go to `pool` no longer.
    pub fn end_allocate_to_pool(&self, pool: PoolId) -> Result<(), PoolError> {
        // The filter is the caller's: it goes with no lock held.
        let ended = self.changing(|mut engine| engine.end_pool(pool));
        ended.map(drop)
    }

    /// Takes one use from `pool`. At the last its memory may be given back.
    pub fn release_pool(&self, pool: PoolId) -> Result<(), PoolError> {
        self.changing(|mut engine| engine.release_pool(pool))
    }

    /// How many uses a private pool has.
    pub fn pool_uses(&self, pool: PoolId) -> Result<u32, PoolError> {
        let state = self.lock();
        state.pools.private.get(&pool).map(|pool| pool.uses).ok_or(PoolError::Unknown(pool))
    }

    /// Whether free blocks of `pool` may serve the default pool when memory runs out.
    pub fn set_use_on_oom(&self, pool: PoolId, allow: bool) -> Result<(), PoolError> {
        let mut state = self.lock();
        if !state.pools.private.contains_key(&pool) {
            return Err(PoolError::Unknown(pool));
        }
        if allow {
            state.pools.use_on_oom.insert(pool);
        } else {
            state.pools.use_on_oom.remove(&pool);
        }
        drop(state);
        self.wake();
        Ok(())
    }

    /// Blocks of `pool` are not split from now on. Under the policy `paged` it changes nothing: a free block that is too
    /// large serves a part there, and the rest of its pages stays free for others.
    pub fn set_no_split(&self, pool: PoolId) -> Result<(), PoolError> {
        let mut state = self.lock();
        let private = state.pools.private.get_mut(&pool).ok_or(PoolError::Unknown(pool))?;
        private.no_split = true;
        Ok(())
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

    pub(crate) fn begin_pool(
        &mut self,
        id: PoolId,
        filter: StreamFilter,
    ) -> Result<(), (PoolError, StreamFilter)> {
        if self.state.recording.iter().any(|recording| recording.pool == id) {
            return Err((PoolError::AlreadyRecording(id), filter));
        }
        if let Err(error) = self.use_pool(id) {
            return Err((error, filter));
        }
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
            1 => {
                pool.release_all(self.state.moments.next());
                Ok(())
            }
            _ => {
                pool.uses -= 1;
                Ok(())
            }
        }
    }
}
