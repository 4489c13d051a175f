//! The rare steps of a replay.

use cushion_core::size::{block_size, segment_size};
use cushion_core::{BlockUse, PoolId, SegmentFigures, StreamId};

use super::outcome::Watch;
use super::run::{Run, Stop};
use crate::program::steps::{Rare, Slot};

/// The first stream of the simulator's own, for the work that pending frees wait for.
const OTHER_STREAMS: u64 = 1 << 63;

impl<W: Watch> Run<'_, W> {
    #[cold]
    pub(super) fn rare(&mut self, step: Rare) -> Result<(), Stop> {
        match step {
            Rare::FreeLater { slot, other } => self.free_later(slot, other)?,
            Rare::Complete { slot } => self.complete(slot)?,
            Rare::Refused { event, size, stream, private } => {
                self.refused(event, size, stream, private)?;
            }
            Rare::EmptyCache { plain, events, before } => {
                if !before.is_some_and(|size| self.would_be_short(size, plain)) {
                    self.release_cached(PoolId::DEFAULT, events)?;
                }
            }
            Rare::EmptyPool { pool, events } => self.release_cached(pool, events)?,
            Rare::PlaceSegment { bytes, address } if self.goal.follows => {
                self.driver.place_alloc(bytes, address);
                self.placed = true;
            }
            Rare::PlaceRange { address } if self.goal.follows => {
                if !self.placed {
                    self.driver.place_reserve(address);
                }
                self.placed = true;
            }
            Rare::PlaceSegment { .. } | Rare::PlaceRange { .. } => {}
            Rare::SetPolicy(policy) => {
                if self.goal.follows {
                    self.engine.set_policy(policy);
                }
            }
            Rare::BeginPool(pool) => {
                // A capture cannot poll, so frees that are complete by now are completed here.
                self.engine.process_events()?;
                self.begin_pool(pool);
            }
            Rare::EndPool => self.end_pool(),
            Rare::ReleasePool(pool) => {
                for _ in 0..self.pools.uses.remove(&pool).unwrap_or(0) {
                    let _ = self.engine.release_pool(pool);
                }
            }
        }
        Ok(())
    }

    /// Frees a slot while work on another stream still uses it.
    fn free_later(&mut self, slot: Slot, other: u32) -> Result<(), Stop> {
        self.seen.waited += 1;
        let other = StreamId(OTHER_STREAMS + u64::from(other));
        self.pending.insert(slot, (other, self.driver.launch(other)));
        let address = self.addresses[slot as usize];
        if address != 0 {
            self.engine.record_stream(address, other).unwrap_or_else(|error| {
                unreachable!("a program uses only what it allocated: {error}")
            });
        }
        // In a capture the event would be recorded at the end only, after the events of later
        // frees.
        self.outside_capture(|run| run.free(slot))
    }

    /// Finishes the work that a pending free waits for.
    fn complete(&mut self, slot: Slot) -> Result<(), Stop> {
        if let Some((other, work)) = self.pending.remove(&slot) {
            self.seen.hurried += u64::from(self.driver.is_finished(other, work));
            self.driver.finish_until(other, work);
            // During a capture, PyTorch can complete a free by the order of the graph, which is not
            // in the trace. The recorded completion is enough.
            if self.pools.window.is_some() {
                self.outside_capture(|run| Ok(run.engine.process_events()?))?;
            }
        }
        Ok(())
    }

    /// Tries a request that PyTorch refused.
    fn refused(
        &mut self,
        event: u32,
        size: u64,
        stream: StreamId,
        private: Option<PoolId>,
    ) -> Result<(), Stop> {
        if self.goal.last.is_some_and(|last| event > last) {
            return Err(Stop::LastEvent);
        }
        if self.goal.capacity.is_none() {
            self.seen.passed_over += 1;
            return Ok(());
        }
        // If the default pool has room, a private pool was full, possibly one that never got any
        // memory.
        let unnamed = PoolId(u64::MAX, u64::MAX - u64::from(event));
        let private = (self.goal.follows && self.pools.window.is_none())
            .then(|| private.unwrap_or(unnamed))
            .filter(|_| self.engine.would_hit(size, stream));
        if let Some(pool) = private {
            self.begin_pool(pool);
        }
        let got = self.alloc(event, size, stream, None)?;
        if private.is_some() {
            self.end_pool();
        }
        if let Some(address) = got {
            self.retried = Some((address, event));
            self.note_peaks(event);
            self.look(event);
        }
        if self.goal.last == Some(event) {
            return Err(Stop::LastEvent);
        }
        if let Some(address) = got {
            // The request fits here. The recorded program continued without this memory.
            let _ = self.engine.free(address);
            self.retried = None;
        }
        Ok(())
    }

    /// Returns whether the limit would refuse a miss of this size now, or make the engine collect
    /// garbage. Then the recorded release of `plain` segments and pages was made by the allocator,
    /// and the engine will make it too.
    fn would_be_short(&self, size: u64, plain: u32) -> bool {
        let Some(limit) = self.goal.capacity else { return false };
        let wanted = block_size(size, &self.options)
            .and_then(|size| segment_size(size, &self.options))
            .unwrap_or(u64::MAX);
        let (_, reserved) = self.engine.live_and_reserved();
        let threshold = self.options.garbage_collection_threshold;
        #[expect(clippy::cast_precision_loss, reason = "a threshold")]
        let over_threshold = threshold > 0.0 && reserved as f64 > threshold * limit as f64;
        reserved.saturating_add(wanted) > limit
            || over_threshold && plain > 0 && (plain as usize) < self.releasable_segments()
    }

    /// Returns the number of empty plain segments of the default pool.
    fn releasable_segments(&self) -> usize {
        let is_releasable = |segment: &&SegmentFigures| {
            !segment.paged
                && segment.pool == PoolId::DEFAULT
                && matches!(&segment.blocks[..], [only] if only.use_ == BlockUse::Free)
        };
        self.engine.snapshot().segments.iter().filter(is_releasable).count()
    }
}
