//! Requests: the sizes and the lane of one allocation, and the memory that may serve it.

use super::Mem;
use crate::base::names::{Owner, Tag};
use crate::base::size::is_small;
use crate::driver::{Driver, StreamId};
use crate::heap::block::BlockId;
use crate::heap::pool::{LaneId, PoolIndex, PoolTable};
use crate::options::rounding::{block_size, segment_size};

/// One allocation that is to be served.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Request {
    /// The bytes that the caller asked for.
    pub(crate) requested: u64,
    /// The size of the block that serves it.
    pub(crate) size: u64,
    /// Bytes of a segment that would be created for it.
    pub(crate) wanted: u64,
    /// The lane whose free blocks may serve it at once.
    pub(crate) lane: LaneId,
    /// Whether the pool is a small one.
    pub(crate) small: bool,
    /// The thread or task that asks.
    pub(crate) owner: Owner,
    pub(crate) tag: Tag,
}

/// Reserved memory that serves a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Found {
    /// A free block, from its start on.
    Block(BlockId),
    /// The bytes of a free block that begin at `address`.
    Within { block: BlockId, address: u64 },
    /// A stitch, by the number that its policy gave it.
    Stitch(u32),
}

/// How much of a free block may be given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GiveBack {
    Nothing,
    /// Its whole plain segment.
    Segment,
    /// The pages of `start..end`.
    Pages {
        start: u64,
        end: u64,
    },
}

impl GiveBack {
    /// Returns the bytes that may be given back of a block of `size` bytes.
    pub(crate) fn bytes(self, size: u64) -> u64 {
        match self {
            Self::Nothing => 0,
            Self::Segment => size,
            Self::Pages { start, end } => end - start,
        }
    }
}

impl<D: Driver> Mem<'_, D> {
    /// Returns the sizes and the lane of a request. A size that overflows becomes `u64::MAX`.
    pub(crate) fn request(
        &self,
        requested: u64,
        stream: StreamId,
        owner: Owner,
        tag: Tag,
    ) -> Request {
        let size = block_size(requested, self.options);
        let wanted = size.and_then(|size| segment_size(size, self.options));
        let small = size.is_some_and(is_small);
        Request {
            requested,
            size: size.unwrap_or(u64::MAX),
            wanted: wanted.unwrap_or(u64::MAX),
            lane: LaneId { pool: self.pool_for(small, stream), stream },
            small,
            owner,
            tag,
        }
    }

    /// Returns the pool that serves a stream's requests now: the default, or a private one.
    fn pool_for(&self, small: bool, stream: StreamId) -> PoolIndex {
        if self.streams.is_recording()
            && let Some(pool) = self.streams.recorded_pool(stream)
            && let Some(private) = self.heap.pools().private(pool)
        {
            return private.half(small);
        }
        PoolTable::default_half(small)
    }

    /// Returns whether garbage collection is on.
    pub(crate) fn is_collecting_garbage(&self) -> bool {
        self.backing.limit().is_some() && self.options.garbage_collection_threshold > 0.0
    }

    /// Counts a search of the request's pool, if garbage collection is on: ages are measured in
    /// searches.
    pub(crate) fn count_search(&mut self, request: &Request) {
        if self.is_collecting_garbage() {
            self.heap.count_search(request.lane.pool);
        }
    }
}
