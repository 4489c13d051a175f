//! Figures of each lane.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::stats::{add, subtract};
use crate::base::names::PoolId;
use crate::driver::StreamId;

/// The figures of one lane: the memory of one stream in one pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct LaneFigures {
    /// The stream.
    pub stream: StreamId,
    /// The private pool, or the default.
    pub pool: PoolId,
    /// Whether it is the small half of the pool.
    pub small: bool,
    /// Bytes of blocks that are live or pending.
    pub active_bytes: u64,
    /// Bytes of free blocks.
    pub free_bytes: u64,
    /// The number of free blocks.
    pub free_blocks: u64,
    /// Bytes of the largest free block.
    pub largest_free: u64,
}

/// The live counterpart of [`LaneFigures`].
#[derive(Debug)]
pub(crate) struct LaneStats {
    /// Its index among all lanes.
    place: AtomicUsize,
    stream: StreamId,
    pool: PoolId,
    small: bool,
    active_bytes: AtomicU64,
    free_bytes: AtomicU64,
    free_blocks: AtomicU64,
    largest_free: AtomicU64,
}

impl LaneStats {
    /// Counts a block of `size` bytes that was added to the free index.
    pub(crate) fn freed(&self, size: u64) {
        add(&self.free_bytes, size);
        add(&self.free_blocks, 1);
        if size > self.largest_free.load(Relaxed) {
            self.largest_free.store(size, Relaxed);
        }
    }

    /// Counts a block of `size` bytes that was removed from the free index.
    pub(crate) fn taken(&self, size: u64, largest_left: impl FnOnce() -> u64) {
        subtract(&self.free_bytes, size);
        subtract(&self.free_blocks, 1);
        if size == self.largest_free.load(Relaxed) {
            self.largest_free.store(largest_left(), Relaxed);
        }
    }

    pub(crate) fn activated(&self, size: u64) {
        add(&self.active_bytes, size);
    }

    pub(crate) fn deactivated(&self, size: u64) {
        subtract(&self.active_bytes, size);
    }

    pub(crate) fn read(&self) -> LaneFigures {
        LaneFigures {
            stream: self.stream,
            pool: self.pool,
            small: self.small,
            active_bytes: self.active_bytes.load(Relaxed),
            free_bytes: self.free_bytes.load(Relaxed),
            free_blocks: self.free_blocks.load(Relaxed),
            largest_free: self.largest_free.load(Relaxed),
        }
    }
}

/// The figures of all lanes. They have a lock of their own: lanes are created and removed only when
/// memory is obtained from the driver or given back, and a reader does not block a hit.
#[derive(Debug, Default)]
pub(crate) struct Lanes(Mutex<Vec<Arc<LaneStats>>>);

impl Lanes {
    fn all(&self) -> MutexGuard<'_, Vec<Arc<LaneStats>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn open(&self, stream: StreamId, pool: PoolId, small: bool) -> Arc<LaneStats> {
        let mut all = self.all();
        let stats = Arc::new(LaneStats {
            place: AtomicUsize::new(all.len()),
            stream,
            pool,
            small,
            active_bytes: AtomicU64::default(),
            free_bytes: AtomicU64::default(),
            free_blocks: AtomicU64::default(),
            largest_free: AtomicU64::default(),
        });
        all.push(Arc::clone(&stats));
        stats
    }

    /// Removes a lane.
    pub(crate) fn close(&self, stats: &LaneStats) {
        let mut all = self.all();
        let place = stats.place.load(Relaxed);
        all.swap_remove(place);
        if let Some(moved) = all.get(place) {
            moved.place.store(place, Relaxed);
        }
        let count = all.len();
        if all.capacity() / 4 > count.max(16) {
            all.shrink_to(2 * count);
        }
    }

    /// Returns the number of lanes, and the capacity of the table.
    pub(crate) fn size(&self) -> (usize, usize) {
        let all = self.all();
        (all.len(), all.capacity())
    }

    pub(super) fn read(&self) -> Vec<LaneFigures> {
        self.all().iter().map(|stats| stats.read()).collect()
    }
}
