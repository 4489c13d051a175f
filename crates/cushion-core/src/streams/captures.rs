//! Captures: private pools to which the allocations of some streams go now.
//!
//! While there is one, a CUDA graph may be being captured: no event is recorded or queried, and no
//! memory is given back.

use std::fmt;

use super::Streams;
use crate::base::names::PoolId;
use crate::driver::StreamId;

/// Selects the streams whose allocations go to a private pool. Called with the engine's lock held:
/// it must not call the engine.
pub type StreamFilter = Box<dyn Fn(StreamId) -> bool + Send>;

/// A private pool to which allocations go now.
pub(crate) struct Capture {
    pool: PoolId,
    filter: StreamFilter,
}

impl fmt::Debug for Capture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Capture").field("pool", &self.pool).finish_non_exhaustive()
    }
}

impl Streams {
    /// Returns whether allocations of any stream go to a private pool.
    pub(crate) fn is_recording(&self) -> bool {
        !self.captures.is_empty()
    }

    /// Returns whether allocations go to this private pool.
    pub(crate) fn is_recording_to(&self, pool: PoolId) -> bool {
        self.captures.iter().any(|capture| capture.pool == pool)
    }

    /// Returns the private pool that takes a stream's allocations. If several do, the latest wins.
    pub(crate) fn recorded_pool(&self, stream: StreamId) -> Option<PoolId> {
        let capture = self.captures.iter().rev().find(|capture| (capture.filter)(stream))?;
        Some(capture.pool)
    }

    /// Sends the allocations of the streams that `filter` accepts to a private pool from now on.
    pub(crate) fn begin_recording(&mut self, pool: PoolId, filter: StreamFilter) {
        self.captures.push(Capture { pool, filter });
    }

    /// Stops that. Returns the capture, for the caller to drop without the lock, or `None` if there
    /// is none.
    pub(crate) fn end_recording(&mut self, pool: PoolId) -> Option<Capture> {
        let index = self.captures.iter().position(|capture| capture.pool == pool)?;
        // The known order of its graph is no longer needed.
        self.ordered.clear();
        Some(self.captures.remove(index))
    }

    /// Stops all captures. Returns them, for the caller to drop without the lock.
    pub(crate) fn end_all_recording(&mut self) -> Vec<Capture> {
        std::mem::take(&mut self.captures)
    }
}
