//! Giving memory back to the driver: everything cached, just enough, or what is old.
//!
//! To free a plain segment, the driver waits for the whole device. No lock is held meanwhile: the segment
//! is taken out of its pool first, freed, and then forgotten, or put back where the driver would not have
//! it. Pages do not wait, but the work that used them must be done before they go.

use std::collections::BTreeMap;

use rustc_hash::FxHashSet;

use crate::block::{BlockId, BlockState};
use crate::driver::{Driver, DriverResult, StreamId};
use crate::engine::Engine;
use crate::history::{Action, Tag};
use crate::locked::{Locked, State};
use crate::pending::AT_ONCE;
use crate::policy::{GiveBack, Request};
use crate::pool::{PoolId, PoolIndex, PoolTable};
use crate::proof::{Proof, Work};

/// What could be given back.
#[derive(Debug, Default)]
struct Candidates {
    /// Plain segments, each with its bytes.
    segments: Vec<(u64, BlockId)>,
    /// Pages that nobody is at work on, and the proof.
    pages: Vec<(u64, BlockId, Proof)>,
    /// Whether there are pages that a stream is at work on.
    later: bool,
    /// Bytes of pages that the device has to be waited for.
    after_wait: u64,
}

/// What is to be given back for a request.
#[derive(Debug, Default)]
pub(crate) struct Enough {
    /// Plain segments.
    pub(crate) segments: Vec<BlockId>,
    /// Blocks with pages that nobody is at work on, and the proof.
    pub(crate) pages: Vec<(BlockId, Proof)>,
}

impl Candidates {
    /// What can be given back at once.
    fn now(&self) -> u64 {
        let segments = self.segments.iter().map(|&(bytes, _)| bytes);
        segments.chain(self.pages.iter().map(|&(bytes, ..)| bytes)).sum()
    }
}

/// A plain segment on its way back to the driver.
#[derive(Debug)]
#[must_use = "it is in no pool until it is released"]
pub(crate) struct Leaving {
    block: BlockId,
    address: u64,
    bytes: u64,
}

impl<D: Driver> Engine<D> {
    /// Gives back everything cached that may be: of the default pools and of private pools nobody
    /// uses any more; nothing while allocations go to a private pool, because a capture may be under
    /// way. With the id of a private pool, only that one, if nobody uses it. Waits for pending frees first.
    pub(crate) fn give_back_cached(&self, id: PoolId, tag: Tag) -> DriverResult<()> {
        let given_back = self.give_back_unless_captured(id, tag);
        self.locked(|engine| engine.state.shrink());
        self.wake();
        given_back
    }

    fn give_back_unless_captured(&self, id: PoolId, tag: Tag) -> DriverResult<()> {
        let _no_capture_begins = self.no_capture_begins();
        if id == PoolId::DEFAULT {
            if self.locked(|engine| engine.is_recording()) {
                return Ok(());
            }
            self.locked(|mut engine| engine.retry_leftovers());
            self.finish_pending(None)?;
        } else {
            self.locked(|mut engine| engine.retry_leftovers());
        }
        let pools = self.locked(|engine| engine.unused_pools(id));
        if pools.contains(&id) && !self.locked(|engine| engine.is_recording()) {
            self.finish_pending(Some(id))?;
        }
        let mut halves = vec![];
        if id == PoolId::DEFAULT {
            halves.extend([(id, false), (id, true)]);
        }
        halves.extend(pools.iter().flat_map(|&pool| [(pool, true), (pool, false)]));
        let given_back = self.give_back_halves(&halves, tag);
        self.locked(|mut engine| pools.into_iter().for_each(|pool| engine.close_if_empty(pool)));
        given_back
    }

    /// Gives back what it may of these halves of pools: plain segments first, then, after one wait for the device, pages.
    /// While allocations go to a private pool, a capture may be under way, which a wait would end: pages stay.
    fn give_back_halves(&self, halves: &[(PoolId, bool)], tag: Tag) -> DriverResult<()> {
        for &(pool, small) in halves {
            let leaving = self.locked(|mut engine| engine.detach_half(pool, small));
            self.release(leaving, tag)?;
        }
        // What another thread frees meanwhile may lie beside what was waited for.
        for _ in 0..3 {
            let blocks = self.locked(|engine| engine.blocks_with_pages(halves));
            if blocks.is_empty() || self.locked(|engine| engine.is_recording()) {
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

    /// Waits for the events that are pending now (of one private pool, if given) and completes the frees
    /// behind them.
    fn finish_pending(&self, only: Option<PoolId>) -> DriverResult<()> {
        let awaited = self.locked(|mut engine| {
            engine.counters.num_sync_all_streams.add(1);
            engine.awaited(only)
        })?;
        for some in awaited.chunks(AT_ONCE) {
            let mut waited = Ok(());
            let mut done = 0;
            for &(_, event, _) in some {
                waited = self.driver.event_synchronize(event);
                if waited.is_err() {
                    break;
                }
                done += 1;
            }
            self.locked(|mut engine| engine.waited_for(&some[..done]))?;
            waited?;
        }
        if self.locked(|engine| engine.state.pending.awaits_device()) {
            self.wait_for_device()?;
        }
        Ok(())
    }

    /// Gives segments back to the driver, and returns how many bytes it took. Where it fails, those not
    /// yet given back are put into their pools again. Whoever waits is to be woken afterwards.
    pub(crate) fn release(&self, leaving: Vec<Leaving>, tag: Tag) -> DriverResult<u64> {
        if leaving.is_empty() {
            return Ok(0);
        }
        let mut failed = Ok(());
        let mut taken = 0;
        for segment in &leaving {
            failed = self.driver.free(segment.address);
            if failed.is_err() {
                break;
            }
            taken += 1;
        }
        let won = self.locked(|mut engine| {
            let mut won = 0;
            for (index, segment) in leaving.into_iter().enumerate() {
                if index < taken {
                    won += segment.bytes;
                    engine.segment_left(&segment, tag);
                } else {
                    engine.segment_stays(&segment);
                }
            }
            won
        });
        failed.map(|()| won)
    }
}

impl<D: Driver> Locked<'_, D> {
    fn half(&self, pool: PoolId, small: bool) -> Option<PoolIndex> {
        if pool == PoolId::DEFAULT {
            return Some(if small { PoolTable::SMALL } else { PoolTable::LARGE });
        }
        let private = self.state.pools.private.get(&pool)?;
        Some(if small { private.small } else { private.large })
    }

    fn retry_leftovers(&mut self) {
        self.recall_leaving();
        self.state.pages.retry_leftovers(self.driver);
        self.count_pages();
        self.retry_ranges();
        self.retry_addresses();
    }

    /// Gives back the addresses of segments with no page in them that the driver would not take, or that lost their last
    /// page to somebody else.
    fn retry_addresses(&mut self) {
        let State { pools, blocks, .. } = &*self.state;
        let lanes = pools.iter().flat_map(|(_, pool)| pool.lanes());
        let unmapped = lanes.flat_map(|(_, lane)| lane.unmapped().map(|(_, id)| id));
        let unused: Vec<BlockId> = unmapped.filter(|&id| !blocks[id].is_split()).collect();
        for id in unused {
            // What it will not take stays for the next time.
            let _ = self.unreserve(id);
        }
    }

    /// Private pools that nobody uses any more: all of them, or the one named.
    fn unused_pools(&self, id: PoolId) -> Vec<PoolId> {
        let private = self.state.pools.private.iter();
        let asked_for = |pool: PoolId| id == PoolId::DEFAULT || id == pool;
        let unused = private.filter(|&(&pool, private)| private.uses == 0 && asked_for(pool));
        unused.map(|(&pool, _)| pool).collect()
    }

    /// Forgets the private pools that nobody uses and that hold nothing any more.
    pub(crate) fn close_empty_pools(&mut self) {
        for pool in self.unused_pools(PoolId::DEFAULT) {
            self.close_if_empty(pool);
        }
    }

    fn close_if_empty(&mut self, pool: PoolId) {
        let halves = [self.half(pool, true), self.half(pool, false)];
        let mut halves = halves.into_iter().flatten();
        if self.state.pools.private.contains_key(&pool)
            && halves.all(|half| self.state.pools[half].segments() == 0)
        {
            self.state.pools.close_private(pool);
        }
    }

    /// Takes the plain segments that may be given back out of half a pool.
    fn detach_half(&mut self, pool: PoolId, small: bool) -> Vec<Leaving> {
        let Some(half) = self.half(pool, small) else { return Vec::new() };
        let is_segment =
            |&id: &BlockId| self.is_plain(id) && self.may_give_back(id) == GiveBack::Segment;
        let segments: Vec<BlockId> =
            self.state.pools[half].free_blocks().filter(is_segment).collect();
        segments.into_iter().map(|id| self.detach(id)).collect()
    }

    fn is_plain(&self, id: BlockId) -> bool {
        self.state.segments[self.state.blocks[id].segment].is_plain()
    }

    /// The free blocks in these halves of pools that may have pages to give back; none if no block has any.
    fn blocks_with_pages(&self, halves: &[(PoolId, bool)]) -> Vec<BlockId> {
        let halves = halves.iter().filter_map(|&(pool, small)| self.half(pool, small));
        let lanes = halves.flat_map(|half| self.state.pools[half].lanes());
        // A smaller one has no whole page in it.
        let free = lanes.flat_map(|(_, lane)| lane.free().at_least(self.device.granularity));
        let blocks: Vec<_> = free.filter(|&id| !self.is_plain(id)).collect();
        let has_pages = |&id: &BlockId| matches!(self.may_give_back(id), GiveBack::Pages { .. });
        if blocks.iter().any(has_pages) { blocks } else { Vec::new() }
    }

    pub(crate) fn may_give_back(&self, id: BlockId) -> GiveBack {
        let view = self.state.view(self.device);
        let block = &view.blocks[id];
        view.segments[block.segment].policy.rules().give_back(view, block)
    }

    /// Bytes held and in nobody's use.
    pub(crate) fn cached(&self) -> u64 {
        self.reserved().saturating_sub(self.counters.active_bytes.current())
    }

    /// Bytes given back by their owners that wait for other streams.
    pub(crate) fn pending_bytes(&self) -> u64 {
        let active = self.counters.active_bytes.current();
        active.saturating_sub(self.counters.allocated_bytes.current())
    }

    /// Bytes that could still be got from a device that reports `free` bytes.
    pub(crate) fn room_of(&self, free: u64) -> u64 {
        let held = self.reserved().saturating_add(self.state.leaving);
        let allowed = self.state.limit.map_or(u64::MAX, |limit| limit.saturating_sub(held));
        free.min(allowed)
    }

    fn room(&self) -> DriverResult<u64> {
        Ok(self.room_of(self.driver.memory_info()?.free))
    }

    /// The halves of pools that memory may be given back from.
    pub(crate) fn halves_to_give_back(&self) -> Vec<PoolIndex> {
        let mut halves = vec![PoolTable::LARGE, PoolTable::SMALL];
        for pool in self.unused_pools(PoolId::DEFAULT) {
            halves.extend([self.half(pool, false), self.half(pool, true)].into_iter().flatten());
        }
        halves
    }

    /// What could be given back: whole free segments, and pages that nobody is at work on, by `proof` or as far as that
    /// can be told without waiting.
    fn candidates(&mut self, asking: StreamId, proof: Proof) -> DriverResult<Candidates> {
        self.recall_leaving();
        let mut work: BTreeMap<(PoolIndex, StreamId), Work> = BTreeMap::new();
        let mut found = Candidates::default();
        for half in self.halves_to_give_back() {
            let free: Vec<BlockId> = self.state.pools[half].free_blocks().collect();
            for id in free {
                let block = &self.state.blocks[id];
                let (size, lane) = (block.size, (half, block.stream));
                let bytes = match self.may_give_back(id) {
                    GiveBack::Nothing => continue,
                    GiveBack::Segment => {
                        found.segments.push((size, id));
                        continue;
                    }
                    GiveBack::Pages { start, end } => end - start,
                };
                if self.idle(id, proof).is_some() {
                    found.pages.push((bytes, id, proof));
                    continue;
                }
                let known = match work.get(&lane) {
                    Some(&known) => known,
                    None => self.work_on(lane, asking)?,
                };
                work.insert(lane, known);
                match known {
                    Work::Done(proof) => found.pages.push((bytes, id, proof)),
                    Work::UnderWay => found.later = true,
                    Work::Unknown => found.after_wait += bytes,
                }
            }
        }
        Ok(found)
    }

    /// Whether blocks that are free or pending lie together in the request's own lane, so that they would serve
    /// it once the pending ones are free.
    pub(crate) fn pending_would_serve(&self, request: &Request) -> bool {
        let State { blocks, pending, .. } = &*self.state;
        let is_pending = |id: &BlockId| blocks[*id].state == BlockState::Pending;
        let is_free = |id: &BlockId| blocks[*id].is_free();
        // The blocks of a segment are all of one lane.
        let is_own =
            |id: &BlockId| (blocks[*id].pool, blocks[*id].stream) == (request.pool, request.stream);
        let mut seen = FxHashSet::default();
        let own = pending.blocks().inspect(|_| pending.looks.update(|looks| looks + 1));
        let own = own.filter(is_own);
        // Each run is looked at once, from its first block on; no two free blocks lie together.
        let mut starts = own.filter_map(|first| match blocks[first].prev {
            Some(prev) if is_pending(&prev) => None,
            Some(prev) if is_free(&prev) => {
                let before = blocks[prev].prev.filter(is_pending);
                before.is_none().then_some(prev)
            }
            _ => Some(first),
        });
        starts.any(|start| {
            let mut bytes = 0;
            let run = std::iter::successors(Some(start), |&id| {
                pending.looks.update(|looks| looks + 1);
                blocks[id].next.filter(|next| is_pending(next) || is_free(next))
            });
            seen.insert(start)
                && run.map(|id| blocks[id].size).any(|more| {
                    bytes += more;
                    bytes >= request.size
                })
        })
    }

    /// Whether waiting for pending frees, and for streams that are at work on free memory, may be enough for the
    /// request.
    pub(crate) fn events_help(&mut self, request: &Request) -> DriverResult<bool> {
        if self.pending_would_serve(request) || self.could_borrow_later(request)? {
            return Ok(true);
        }
        let pending = self.pending_bytes();
        let most = self.room()?.saturating_add(self.cached()).saturating_add(pending);
        if pending > 0 || most < self.needed(request) {
            return Ok(most >= self.needed(request));
        }
        Ok(self.candidates(request.stream, Proof::NONE)?.later)
    }

    /// Whether giving back would make room for the request now.
    pub(crate) fn giving_back_helps(&mut self, request: &Request) -> DriverResult<bool> {
        Ok(self.waits_to_give_back(request)?.is_some())
    }

    /// Whether the device has to be waited for before everything cached is given back, if that would make room for the
    /// request; `None` if it would not.
    pub(crate) fn waits_to_give_back(&mut self, request: &Request) -> DriverResult<Option<bool>> {
        let room = self.room()?;
        let needed = self.needed(request);
        if room.saturating_add(self.cached()) < needed {
            return Ok(None);
        }
        let found = self.candidates(request.stream, Proof::NONE)?;
        let bytes = found.now().saturating_add(found.after_wait);
        let helps = bytes > 0 && room.saturating_add(bytes) >= needed;
        Ok(helps.then_some(found.after_wait > 0))
    }

    /// Everything cached that nobody is at work on, if the driver could serve the request once it has it: that is when
    /// it can lay out anew what lies in pieces.
    pub(crate) fn enough_to_give_back(
        &mut self,
        request: &Request,
        proof: Proof,
    ) -> DriverResult<Enough> {
        let room = self.room()?;
        let found = self.candidates(request.stream, proof)?;
        let most = found.now();
        if most == 0 || room.saturating_add(most) < self.needed(request) {
            return Ok(Enough::default());
        }
        let segments = found.segments.into_iter().map(|(_, id)| id).collect();
        let pages = found.pages.into_iter().map(|(_, id, proof)| (id, proof)).collect();
        Ok(Enough { segments, pages })
    }

    /// Takes those of these blocks out of their pool that still are whole free plain segments. The lock was free since they
    /// were chosen: the same number may be another block's by now, even one of a graph's pool.
    pub(crate) fn detach_segments(&mut self, blocks: &[BlockId]) -> Vec<Leaving> {
        let halves = self.halves_to_give_back();
        let is_segment = |id: BlockId| {
            let block = self.state.blocks.get(id).filter(|block| block.is_free());
            block.is_some_and(|block| halves.contains(&block.pool))
                && self.may_give_back(id) == GiveBack::Segment
        };
        let segments: Vec<_> = blocks.iter().copied().filter(|&id| is_segment(id)).collect();
        segments.into_iter().map(|id| self.detach(id)).collect()
    }

    /// Takes enough blocks that are too large to be split out of their pool for the driver to serve the
    /// request; and whether they are enough. Never of a private pool: a graph may use them.
    pub(crate) fn detach_oversize(&mut self, request: &Request) -> (Vec<Leaving>, bool) {
        let Some(max_split) = self.state.options.max_split_size else { return (Vec::new(), false) };
        if self.state.pools[request.pool].id != PoolId::DEFAULT {
            return (Vec::new(), false);
        }
        let Some(lane) = self.state.pools[request.pool].lane(request.stream) else {
            return (Vec::new(), false);
        };
        let enough = request.size.max(max_split);
        let is_whole = |id: &BlockId| self.may_give_back(*id) == GiveBack::Segment;
        let one = lane.free().at_least(enough).next().filter(is_whole);
        if let Some(id) = one {
            return (vec![self.detach(id)], true);
        }
        let mut won = 0;
        let mut chosen = Vec::new();
        for id in lane.free().smaller_than(enough) {
            let size = self.state.blocks[id].size;
            if won >= enough || size < max_split {
                break;
            }
            if is_whole(&id) {
                won += size;
                chosen.push(id);
            }
        }
        (chosen.into_iter().map(|id| self.detach(id)).collect(), won >= enough)
    }

    /// Takes blocks that have not been used for longer than the average out of their pool, while more than
    /// the threshold is held.
    pub(crate) fn detach_garbage(&mut self) -> Vec<Leaving> {
        let threshold = self.state.options.garbage_collection_threshold;
        let Some(limit) = self.state.limit.filter(|_| threshold > 0.0) else { return Vec::new() };
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a fraction of a positive limit, truncated as PyTorch does"
        )]
        let keep = (threshold * limit as f64) as u64;
        let Some(target) = self.reserved().checked_sub(keep).filter(|&target| target > 0) else {
            return Vec::new();
        };
        let age = |state: &State, id: BlockId| {
            state.pools[PoolTable::LARGE].searches - state.blocks[id].free_since
        };
        let mut total_age = 0;
        let mut count = 0_u32;
        let free: Vec<BlockId> = self.state.pools[PoolTable::LARGE].free_blocks().collect();
        let mut candidates = Vec::new();
        for id in free {
            if !self.state.blocks[id].is_split() {
                total_age += age(self.state, id);
                count += 1;
                candidates.push(id);
            }
        }
        let mut won = 0;
        let mut leaving = Vec::new();
        let mut progress = true;
        while won < target && progress && count > 0 {
            #[expect(clippy::cast_precision_loss, reason = "an average of counts")]
            let average = total_age as f64 / f64::from(count);
            progress = false;
            // All that are older than the average, even beyond the target: it should not be needed
            // again soon.
            let mut kept = Vec::with_capacity(candidates.len());
            for id in candidates {
                let old = age(self.state, id);
                #[expect(clippy::cast_precision_loss, reason = "an age is a count of searches")]
                let is_old = old as f64 >= average;
                if is_old && self.may_give_back(id) == GiveBack::Segment {
                    progress = true;
                    won += self.state.blocks[id].size;
                    total_age -= old;
                    count -= 1;
                    leaving.push(self.detach(id));
                } else {
                    kept.push(id);
                }
            }
            candidates = kept;
        }
        leaving
    }

    /// Takes a plain segment whose only block is free out of its pool, and out of the figures: another thread
    /// may get its memory before this one has the lock again.
    fn detach(&mut self, id: BlockId) -> Leaving {
        let State { blocks, pools, .. } = &mut *self.state;
        let block = &mut blocks[id];
        debug_assert!(block.is_free() && !block.is_split());
        block.state = BlockState::Leaving;
        let (address, bytes, pool) = (block.address, block.size, block.pool);
        pools[pool].lane_mut(block.stream).remove_free(bytes, address);
        let (private, small) = (pools[pool].id, pools[pool].small);
        self.counters.segment.decrease(small, 1);
        self.counters.reserved_bytes.decrease(small, bytes);
        self.counters.reserved_by_private.decrease(private, small, bytes);
        if self.is_oversize(bytes) {
            self.counters.oversize_segments.decrease(1);
        }
        self.state.leaving += bytes;
        Leaving { block: id, address, bytes }
    }

    /// The driver would not have a segment: it is as free as before.
    fn segment_stays(&mut self, segment: &Leaving) {
        let &Leaving { block, bytes, .. } = segment;
        self.state.leaving -= bytes;
        self.insert_free(block);
        let pool = &self.state.pools[self.state.blocks[block].pool];
        let (private, small) = (pool.id, pool.small);
        self.counters.segment.increase(small, 1);
        self.counters.reserved_bytes.increase(small, bytes);
        self.counters.reserved_by_private.increase(private, small, bytes);
        if self.is_oversize(bytes) {
            self.counters.oversize_segments.increase(1);
        }
    }

    /// The driver took a segment.
    fn segment_left(&mut self, segment: &Leaving, tag: Tag) {
        let &Leaving { block, address, bytes } = segment;
        let State { blocks, segments, pools, leaving, .. } = &mut *self.state;
        *leaving -= bytes;
        let block = blocks.remove(block);
        let (pool, stream) = (block.pool, block.stream);
        pools[pool].segment_went(stream, self.lanes);
        let segment = segments.remove(block.segment);
        let tag = if tag == Tag::NONE { segment.tag } else { tag };
        self.counters.num_device_free.add(1);
        self.record(Action::SegmentFree, address, bytes, (stream, pool), tag);
    }
}

#[cfg(test)]
mod tests {
    use crate::driver::{SimConfig, SimDriver, StreamId};
    use crate::engine::Engine;
    use crate::policy::Policy;
    use crate::pool::{PoolId, PoolTable};
    use crate::size::MIB;

    /// A block that was chosen to be given back may be gone, and its number that of a graph's memory.
    #[test]
    fn what_a_graph_may_use_is_not_detached() {
        let gpu = Engine::new(SimDriver::new(SimConfig::with_capacity(64 * MIB)));
        gpu.set_policy(Policy::Segments);
        let pool = PoolId(0, 1);
        gpu.begin_allocate_to_pool(pool, Box::new(|_| true)).unwrap();
        let graphs = gpu.alloc(20 * MIB, StreamId(0)).unwrap();
        gpu.end_allocate_to_pool(pool).unwrap();
        let own = gpu.alloc(20 * MIB, StreamId(0)).unwrap();
        [graphs, own].into_iter().for_each(|address| gpu.free(address).unwrap());
        let (of_graph, of_default) = gpu.locked(|engine| {
            let large = engine.state.pools.private[&pool].large;
            let free = |half| engine.state.pools[half].free_blocks().next().unwrap();
            (free(large), free(PoolTable::LARGE))
        });
        let leaving = gpu.locked(|mut engine| engine.detach_segments(&[of_graph, of_default]));
        assert_eq!(leaving.iter().map(|it| it.address).collect::<Vec<_>>(), [own]);
        assert_eq!(gpu.release(leaving, crate::history::Tag::NONE), Ok(20 * MIB));
        gpu.release_pool(pool).unwrap();
        let leaving = gpu.locked(|mut engine| engine.detach_segments(&[of_graph]));
        assert_eq!(leaving.iter().map(|it| it.address).collect::<Vec<_>>(), [graphs]);
        assert_eq!(gpu.release(leaving, crate::history::Tag::NONE), Ok(20 * MIB));
        gpu.check_invariants().unwrap();
    }
}
