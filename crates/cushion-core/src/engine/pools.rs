//! Private pools: memory set apart for a CUDA graph, or for a use of the caller's own.
//!
//! While allocations go to a private pool, a capture may be under way: no event is queried, and no
//! memory is given back. A pool counts its uses. After the last one is released its memory may be
//! given back, and the pool is removed once it has none.

use super::Engine;
use crate::base::names::PoolId;
use crate::core::Locked;
use crate::driver::Driver;
use crate::outcome::error::PoolError;
use crate::streams::captures::{Capture, StreamFilter};

impl<D: Driver> Engine<D> {
    /// Creates a private pool, or adds a use to an existing one.
    pub fn create_pool(&self, pool: PoolId) -> Result<(), PoolError> {
        self.shared.locked(|mut core| core.use_pool(pool))
    }

    /// Sends allocations of the streams that `filter` accepts to `pool` from now on. Creates the
    /// pool if necessary, and adds one use. If several pools accept a stream, the latest wins.
    pub fn begin_allocate_to_pool(
        &self,
        pool: PoolId,
        filter: StreamFilter,
    ) -> Result<(), PoolError> {
        let begun = self.shared.beginning_capture(|mut core| core.begin_pool(pool, filter));
        // A rejected filter is dropped with no lock held: it is the caller's code.
        begun.map_err(|(error, _filter)| error)
    }

    /// Stops sending allocations to `pool`.
    pub fn end_allocate_to_pool(&self, pool: PoolId) -> Result<(), PoolError> {
        // The filter is dropped with no lock held: it is the caller's code.
        let ended = self.shared.changing(|mut core| core.end_pool(pool));
        ended.map(drop)
    }

    /// Removes one use of `pool`. After the last one its memory may be given back.
    pub fn release_pool(&self, pool: PoolId) -> Result<(), PoolError> {
        self.shared.changing(|mut core| core.release_pool(pool))
    }

    /// Returns how many uses a private pool has.
    pub fn pool_uses(&self, pool: PoolId) -> Result<u32, PoolError> {
        let core = self.shared.lock();
        let private = core.heap.pools().private(pool);
        private.map(|private| private.uses).ok_or(PoolError::Unknown(pool))
    }

    /// Sets whether free blocks of `pool` may serve the default pool when memory runs out.
    pub fn set_use_on_oom(&self, pool: PoolId, allow: bool) -> Result<(), PoolError> {
        {
            let mut core = self.shared.lock();
            if core.heap.pools().private(pool).is_none() {
                return Err(PoolError::Unknown(pool));
            }
            core.heap.set_use_on_oom(pool, allow);
        }
        self.shared.wake();
        Ok(())
    }

    /// Prevents blocks of `pool` from being split from now on. The policy `paged` ignores this:
    /// there, a part of a larger free block serves a request, and the rest of its pages stays free
    /// for others.
    pub fn set_no_split(&self, pool: PoolId) -> Result<(), PoolError> {
        let mut core = self.shared.lock();
        let private = core.heap.private_mut(pool).ok_or(PoolError::Unknown(pool))?;
        private.no_split = true;
        Ok(())
    }
}

impl<D: Driver> Locked<'_, D> {
    /// Creates a private pool, or adds a use to an existing one.
    fn use_pool(&mut self, id: PoolId) -> Result<(), PoolError> {
        if id == PoolId::DEFAULT {
            return Err(PoolError::Default(id));
        }
        match self.mem.heap.private_mut(id) {
            None => self.mem.heap.open_private(id),
            Some(pool) if pool.uses == 0 => return Err(PoolError::Released(id)),
            Some(pool) => pool.uses += 1,
        }
        Ok(())
    }

    fn begin_pool(
        &mut self,
        id: PoolId,
        filter: StreamFilter,
    ) -> Result<(), (PoolError, StreamFilter)> {
        if self.mem.streams.is_recording_to(id) {
            return Err((PoolError::AlreadyRecording(id), filter));
        }
        if let Err(error) = self.use_pool(id) {
            return Err((error, filter));
        }
        self.mem.streams.begin_recording(id, filter);
        Ok(())
    }

    /// Stops sending allocations to the pool. Returns the capture, for the caller to drop without
    /// the lock.
    fn end_pool(&mut self, id: PoolId) -> Result<Capture, PoolError> {
        self.mem.streams.end_recording(id).ok_or(PoolError::NotRecording(id))
    }

    fn release_pool(&mut self, id: PoolId) -> Result<(), PoolError> {
        let recording = self.mem.streams.is_recording_to(id);
        let pool = self.mem.heap.private_mut(id).ok_or(PoolError::Unknown(id))?;
        match pool.uses {
            0 => Err(PoolError::Released(id)),
            1 if recording => Err(PoolError::StillRecording(id)),
            1 => {
                pool.release_all(self.mem.streams.next_moment());
                Ok(())
            }
            _ => {
                pool.uses -= 1;
                Ok(())
            }
        }
    }
}
