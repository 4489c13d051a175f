//! Giving memory back to the driver, without holding the lock while the driver waits.
//!
//! To free a plain segment, the driver waits for the whole device. The segment is therefore
//! detached from its lane first, and no lock is held meanwhile. Unmapping pages does not wait, but
//! the work that used them must be done before.

use crate::backing::Backing;
use crate::base::names::{PoolId, Tag};
use crate::core::{Locked, Shared};
use crate::driver::{Driver, DriverResult};
use crate::heap::block::BlockId;
use crate::heap::pool::PoolIndex;
use crate::ledger::change::Change;
use crate::memory::unmap::{Calls, join_unmapped};
use crate::memory::{Detached, GiveBack};
use crate::streams::proof::Proof;
use crate::streams::{AT_ONCE, Streams};

impl<D: Driver> Shared<D> {
    /// Gives back all cached memory of the default pools and of private pools that are no longer in
    /// use; none while allocations go to a private pool, because a capture may be under way. With
    /// the id of a private pool, gives back only that pool's memory, if it is no longer in use.
    /// Waits for pending frees first.
    pub(crate) fn give_back_cached(&self, id: PoolId, tag: Tag) -> DriverResult<()> {
        let given_back = self.give_back_unless_captured(id, tag);
        self.locked(|mut core| core.shrink());
        self.wake();
        given_back
    }

    fn give_back_unless_captured(&self, id: PoolId, tag: Tag) -> DriverResult<()> {
        let _no_capture_begins = self.no_capture_begins();
        if id == PoolId::DEFAULT {
            if self.is_recording() {
                return Ok(());
            }
            self.locked(|mut core| core.retry_refused());
            self.finish_pending(None)?;
        } else {
            self.locked(|mut core| core.retry_refused());
        }
        let pools = self.locked(|core| core.unused_pools(id));
        if pools.contains(&id) && !self.is_recording() {
            self.finish_pending(Some(id))?;
        }
        let mut halves = vec![];
        if id == PoolId::DEFAULT {
            halves.extend([(id, false), (id, true)]);
        }
        halves.extend(pools.iter().flat_map(|&pool| [(pool, true), (pool, false)]));
        let given_back = self.give_back_halves(&halves, tag);
        self.locked(|core| {
            pools.into_iter().for_each(|pool| core.mem.heap.close_private_if_empty(pool));
        });
        given_back
    }

    /// Gives back memory of these halves of pools: plain segments first, then, after one wait for
    /// the device, pages. While allocations go to a private pool, a capture may be under way, which
    /// a wait would invalidate; pages are kept then.
    fn give_back_halves(&self, halves: &[(PoolId, bool)], tag: Tag) -> DriverResult<()> {
        for &(pool, small) in halves {
            let detached = self.locked(|mut core| core.detach_half(pool, small));
            self.release(detached, tag)?;
        }
        // Blocks that other threads free meanwhile may have merged with blocks whose work was
        // waited for.
        for _ in 0..3 {
            let blocks = self.locked(|core| core.blocks_with_pages(halves));
            if blocks.is_empty() || self.is_recording() {
                break;
            }
            let proof = self.wait_for_device()?;
            let blocks = blocks.into_iter().map(|id| (id, proof)).collect();
            let (_, all) = self.unmap_blocks(blocks, tag)?;
            if all {
                break;
            }
        }
        Ok(())
    }

    /// Waits for the events that are pending now (of one private pool, if given) and completes the
    /// frees behind them.
    fn finish_pending(&self, only: Option<PoolId>) -> DriverResult<()> {
        let awaited = self.locked(|mut core| {
            core.mem.ledger.apply(Change::EventsAwaited);
            let awaited = core.mem.streams.awaited(core.mem.heap, core.mem.driver, only);
            core.complete_done();
            awaited
        })?;
        for some in awaited.chunks(AT_ONCE) {
            let mut waited = Ok(());
            let mut done = 0;
            for &(_, event, _) in some {
                waited = Streams::wait_for_event(&self.driver, event);
                if waited.is_err() {
                    break;
                }
                done += 1;
            }
            self.locked(|mut core| {
                let (streams, heap) = (&mut *core.mem.streams, &mut *core.mem.heap);
                let asked = streams.events_waited_for(heap, core.mem.driver, &some[..done]);
                core.complete_done();
                asked
            })?;
            waited?;
        }
        if self.locked(|core| core.mem.streams.awaits_device()) {
            self.wait_for_device()?;
        }
        Ok(())
    }

    /// Frees detached segments and returns how many bytes the driver took. If it fails, the
    /// segments not yet freed return to their lanes. The caller must wake the requests that wait
    /// afterwards.
    pub(crate) fn release(&self, detached: Vec<Detached>, tag: Tag) -> DriverResult<u64> {
        if detached.is_empty() {
            return Ok(0);
        }
        let (freed, failed) = Backing::free(&self.driver, detached.iter().map(Detached::address));
        let won = self.locked(|mut core| {
            let mut won = 0;
            for (index, segment) in detached.into_iter().enumerate() {
                if index < freed {
                    won += segment.bytes();
                    core.mem.forget(&segment, tag);
                } else {
                    core.mem.reattach(&segment);
                }
            }
            won
        });
        failed.map(|()| won)
    }

    /// Unmaps and releases the pages of free blocks, each with the proof that its work is done, a
    /// few at a time. Returns the bytes, and whether all proofs held. Skips blocks that are in use
    /// again.
    pub(crate) fn unmap_blocks(
        &self,
        mut blocks: Vec<(BlockId, Proof)>,
        tag: Tag,
    ) -> DriverResult<(u64, bool)> {
        blocks.reverse();
        let (mut won, mut all) = (0, true);
        // Pages unmapped in several holds of the lock are one entry of the history.
        let mut open = None;
        while !blocks.is_empty() {
            self.locked(|mut core| {
                let before = core.mem.reserved();
                let mut calls = Calls::of_one_hold();
                let mut failed = Ok(());
                while calls.are_left()
                    && failed.is_ok()
                    && let Some((id, proof)) = blocks.pop()
                {
                    let Some(idle) = core.mem.idle(id, proof) else {
                        core.mem.note_unmapped(open.take(), tag);
                        all = false;
                        continue;
                    };
                    let rules = core.policies.of_block(&core.mem, id);
                    let unmapping = rules.unmap(&mut core.mem, &idle, &mut calls);
                    let ended = join_unmapped(&mut open, unmapping.unmapped);
                    core.mem.note_unmapped(ended, tag);
                    if !matches!(unmapping.rest, Ok(Some(_))) {
                        core.mem.note_unmapped(open.take(), tag);
                    }
                    let rest = unmapping.rest;
                    failed = rest.map(|rest| blocks.extend(rest.map(|rest| (rest, proof))));
                }
                won += before.saturating_sub(core.mem.reserved());
                failed
            })?;
        }
        Ok((won, all))
    }
}

impl<D: Driver> Locked<'_, D> {
    /// Shrinks the tables to their contents. It may take a while.
    pub(crate) fn shrink(&mut self) {
        self.mem.heap.shrink();
        self.policies.all_mut().for_each(|rules| rules.shrink());
    }

    /// Offers the driver again the memory that it refused to take, and recalls pages on their way
    /// back.
    fn retry_refused(&mut self) {
        self.recall_all();
        self.mem.retry_refused();
    }

    /// Returns the private pools that are no longer in use: all of them, or the one named.
    pub(crate) fn unused_pools(&self, id: PoolId) -> Vec<PoolId> {
        let private = self.mem.heap.pools().privates();
        let asked_for = |pool: PoolId| id == PoolId::DEFAULT || id == pool;
        let unused = private.filter(|&(pool, private)| private.uses == 0 && asked_for(pool));
        unused.map(|(pool, _)| pool).collect()
    }

    /// Removes the private pools that are no longer in use and hold no memory.
    pub(crate) fn close_empty_pools(&mut self) {
        for pool in self.unused_pools(PoolId::DEFAULT) {
            self.mem.heap.close_private_if_empty(pool);
        }
    }

    /// Returns how much of a free block may be given back.
    pub(super) fn may_give_back(&self, id: BlockId) -> GiveBack {
        self.policies.give_back(&self.mem, id)
    }

    /// Detaches the plain segments of half a pool that may be given back.
    fn detach_half(&mut self, pool: PoolId, small: bool) -> Vec<Detached> {
        let Some(half) = self.mem.heap.pools().half(pool, small) else { return Vec::new() };
        let is_segment =
            |&id: &BlockId| self.is_plain(id) && self.may_give_back(id) == GiveBack::Segment;
        let segments: Vec<BlockId> = self.mem.heap[half].free_blocks().filter(is_segment).collect();
        segments.into_iter().map(|id| self.mem.detach(id)).collect()
    }

    fn is_plain(&self, id: BlockId) -> bool {
        self.mem.heap.segment_of(id).is_plain()
    }

    /// Returns the free blocks of these halves of pools that may have pages to give back; none if
    /// no block has any.
    fn blocks_with_pages(&self, halves: &[(PoolId, bool)]) -> Vec<BlockId> {
        let pools = self.mem.heap.pools();
        let halves = halves.iter().filter_map(|&(pool, small)| pools.half(pool, small));
        let lanes = halves.flat_map(|half: PoolIndex| self.mem.heap[half].lanes());
        // A smaller block contains no whole page.
        let free = lanes.flat_map(|(_, lane)| lane.free().at_least(self.mem.device.granularity));
        let blocks: Vec<_> = free.filter(|&id| !self.is_plain(id)).collect();
        let has_pages = |&id: &BlockId| matches!(self.may_give_back(id), GiveBack::Pages { .. });
        if blocks.iter().any(has_pages) { blocks } else { Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use crate::base::clock::VirtualClock;
    use crate::base::names::{Owner, PoolId, Tag};
    use crate::base::size::MIB;
    use crate::core::{Locked, Shared};
    use crate::driver::{Driver, SimConfig, SimDriver, StreamId};
    use crate::heap::block::BlockId;
    use crate::heap::pool::{PoolIndex, PoolTable};
    use crate::memory::Detached;
    use crate::options::ladder::Ladder;
    use crate::options::{Options, Policy};

    /// A block that was chosen to be given back may no longer exist, and its number may belong to a
    /// block of a graph's pool.
    #[test]
    fn segments_of_a_graphs_pool_are_not_detached() {
        let driver = SimDriver::new(SimConfig::with_capacity(64 * MIB));
        let device = driver.properties();
        let clock = Arc::new(VirtualClock::new());
        let (options, ladder) = (Options::default(), Ladder::Graceful);
        let gpu = Shared::new(driver, device, clock, options, Policy::Segments, ladder, None);
        let pool = PoolId(0, 1);
        gpu.locked(|core| {
            core.mem.heap.open_private(pool);
            core.mem.streams.begin_recording(pool, Box::new(|_| true));
        });
        let alloc = |mut core: Locked<'_, SimDriver>| {
            let request = core.mem.request(20 * MIB, StreamId(0), Owner::NOBODY, Tag::NONE);
            core.serve_new(&request, false).unwrap().unwrap()
        };
        let graphs = gpu.locked(alloc);
        gpu.locked(|core| core.mem.streams.end_recording(pool)).unwrap();
        let own = gpu.locked(alloc);
        let free = |address| {
            gpu.locked(|mut core| core.free(address, Owner::NOBODY, Tag::NONE)).unwrap();
        };
        [graphs, own].into_iter().for_each(free);
        let (of_graph, of_default) = gpu.locked(|core| {
            let heap = &core.mem.heap;
            let large = heap.pools().half(pool, false).unwrap();
            let free = |half: PoolIndex| heap[half].free_blocks().next().unwrap();
            (free(large), free(PoolTable::LARGE))
        });
        let detach = |blocks: &[BlockId]| gpu.locked(|mut core| core.detach_segments(blocks));
        let addresses = |detached: &[Detached]| -> Vec<u64> {
            detached.iter().map(Detached::address).collect()
        };
        let detached = detach(&[of_graph, of_default]);
        assert_eq!(addresses(&detached), [own]);
        assert_eq!(gpu.release(detached, Tag::NONE), Ok(20 * MIB));
        gpu.locked(|core| {
            let released = core.mem.streams.next_moment();
            core.mem.heap.release_all_private(released);
        });
        let detached = detach(&[of_graph]);
        assert_eq!(addresses(&detached), [graphs]);
        assert_eq!(gpu.release(detached, Tag::NONE), Ok(20 * MIB));
        let stats = gpu.stats();
        gpu.locked(|core| core.check_invariants(&stats)).unwrap();
    }
}
