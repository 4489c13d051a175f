//! Captures: private pools that the allocations of some streams go to now.
//!
//! While there is one, a CUDA graph may be being captured: no event is recorded or queried, and nothing is given back.

use std::fmt;

use super::Streams;
use crate::base::names::PoolId;
use crate::driver::StreamId;

/// Which streams' allocations go to a private pool. Called with the engine's lock held: it must not call the engine.
pub type StreamFilter = Box<dyn Fn(StreamId) -> bool + Send>;

/// A private pool that allocations go to now.
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
    /// Whether allocations of any stream go to a private pool.
    pub(crate) fn is_recording(&self) -> bool {
        !self.captures.is_empty()
    }

    /// Whether allocations go to this private pool.
    pub(crate) fn is_recording_to(&self, pool: PoolId) -> bool {
        self.captures.iter().any(|capture| capture.pool == pool)
    }

    /// The private pool that takes a stream's allocations, the latest begun first.
    pub(crate) fn recorded_pool(&self, stream: StreamId) -> Option<PoolId> {
        let capture = self.captures.iter().rev().find(|capture| (capture.filter)(stream))?;
        Some(capture.pool)
    }

    /// Sends the allocations of these streams to a private pool from now on.
    pub(crate) fn begin_recording(&mut self, pool: PoolId, filter: StreamFilter) {
        self.captures.push(Capture { pool, filter });
    }

    /// Ends that. Returns the capture for the caller to drop without the lock, or `None` if there is none.
    pub(crate) fn end_recording(&mut self, pool: PoolId) -> Option<Capture> {
        let index = self.captures.iter().position(|capture| capture.pool == pool)?;
        // What was known of the order of its graph is of no use any more.
        self.ordered.clear();
        Some(self.captures.remove(index))
    }

    /// Ends all captures. Returns them for the caller to drop without the lock.
    pub(crate) fn end_all_recording(&mut self) -> Vec<Capture> {
        std::mem::take(&mut self.captures)
    }
}
