//! Memory that could be given back or will be free by itself, and whether it would be enough for a
//! request.

use std::collections::BTreeMap;

use rustc_hash::FxHashSet;

use crate::base::names::PoolId;
use crate::core::Locked;
use crate::driver::{Driver, DriverResult, StreamId};
use crate::heap::block::{BlockId, BlockState};
use crate::heap::pool::{LaneId, PoolIndex, PoolTable};
use crate::memory::{Detached, GiveBack, Request};
use crate::streams::proof::{Proof, Work};

/// The memory that could be given back.
#[derive(Debug, Default)]
struct Candidates {
    /// Plain segments, each with its bytes.
    segments: Vec<(u64, BlockId)>,
    /// Blocks with idle pages, with the bytes of the pages and the proof that no work uses them.
    pages: Vec<(u64, BlockId, Proof)>,
    /// Whether there are pages that a stream is at work on.
    later: bool,
    /// Bytes of pages that can be given back after a wait for the device.
    after_wait: u64,
}

impl Candidates {
    /// Returns the bytes that can be given back at once.
    fn now(&self) -> u64 {
        let segments = self.segments.iter().map(|&(bytes, _)| bytes);
        segments.chain(self.pages.iter().map(|&(bytes, ..)| bytes)).sum()
    }
}

/// The memory to give back for a request.
#[derive(Debug, Default)]
pub(super) struct Enough {
    /// Plain segments.
    pub(super) segments: Vec<BlockId>,
    /// Blocks with idle pages, and the proof that no work uses them.
    pub(super) pages: Vec<(BlockId, Proof)>,
}

impl<D: Driver> Locked<'_, D> {
    /// Returns the halves of pools whose memory may be given back.
    fn halves_to_give_back(&self) -> Vec<PoolIndex> {
        let pools = self.mem.heap.pools();
        let mut halves = vec![PoolTable::LARGE, PoolTable::SMALL];
        for pool in self.unused_pools(PoolId::DEFAULT) {
            halves.extend([pools.half(pool, false), pools.half(pool, true)].into_iter().flatten());
        }
        halves
    }

    /// Returns whole free segments, and pages that are idle by `proof` or as far as is known
    /// without waiting.
    fn candidates(&mut self, asking: StreamId, proof: Proof) -> DriverResult<Candidates> {
        self.recall_all();
        let mut work: BTreeMap<LaneId, Work> = BTreeMap::new();
        let mut found = Candidates::default();
        for half in self.halves_to_give_back() {
            let free: Vec<BlockId> = self.mem.heap[half].free_blocks().collect();
            for id in free {
                let block = &self.mem.heap[id];
                let (size, lane) = (block.size, block.lane);
                let bytes = match self.may_give_back(id) {
                    GiveBack::Nothing => continue,
                    GiveBack::Segment => {
                        found.segments.push((size, id));
                        continue;
                    }
                    GiveBack::Pages { start, end } => end - start,
                };
                if self.mem.idle(id, proof).is_some() {
                    found.pages.push((bytes, id, proof));
                    continue;
                }
                let known = match work.get(&lane) {
                    Some(&known) => known,
                    None => self.mem.work_on(lane, asking)?,
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

    /// Returns whether adjacent free and pending blocks of the request's own lane would serve it
    /// once the pending ones are free.
    pub(super) fn pending_would_serve(&self, request: &Request) -> bool {
        let (heap, streams) = (&*self.mem.heap, &*self.mem.streams);
        let is_pending = |id: &BlockId| heap[*id].state == BlockState::Pending;
        let is_free = |id: &BlockId| heap[*id].is_free();
        // All blocks of a segment belong to one lane.
        let own = streams.pending().filter(|id| heap[*id].lane == request.lane);
        let mut seen = FxHashSet::default();
        // Each row of adjacent blocks is looked at once, from its first block on. Two free blocks
        // are never adjacent.
        let mut starts = own.filter_map(|first| match heap[first].prev {
            Some(prev) if is_pending(&prev) => None,
            Some(prev) if is_free(&prev) => {
                let before = heap[prev].prev.filter(is_pending);
                before.is_none().then_some(prev)
            }
            _ => Some(first),
        });
        starts.any(|start| {
            let mut bytes = 0;
            let run = std::iter::successors(Some(start), |&id| {
                streams.look();
                heap[id].next.filter(|next| is_pending(next) || is_free(next))
            });
            seen.insert(start)
                && run.map(|id| heap[id].size).any(|more| {
                    bytes += more;
                    bytes >= request.size
                })
        })
    }

    /// Returns whether waiting for pending frees, and for streams at work on free memory, may be
    /// enough for the request.
    pub(super) fn events_help(&mut self, request: &Request) -> DriverResult<bool> {
        if self.pending_would_serve(request) || self.could_borrow_later(request)? {
            return Ok(true);
        }
        let (pending, cached) = (self.mem.ledger.pending(), self.mem.ledger.cached());
        let most = self.mem.room()?.saturating_add(cached).saturating_add(pending);
        if pending > 0 || most < self.needed(request) {
            return Ok(most >= self.needed(request));
        }
        Ok(self.candidates(request.lane.stream, Proof::NONE)?.later)
    }

    /// Returns whether giving memory back would make room for the request now.
    pub(super) fn giving_back_helps(&mut self, request: &Request) -> DriverResult<bool> {
        Ok(self.waits_to_give_back(request)?.is_some())
    }

    /// Returns whether the engine must wait for the device before it gives back everything cached;
    /// `None` if that would not make room for the request.
    pub(super) fn waits_to_give_back(&mut self, request: &Request) -> DriverResult<Option<bool>> {
        let room = self.mem.room()?;
        let needed = self.needed(request);
        if room.saturating_add(self.mem.ledger.cached()) < needed {
            return Ok(None);
        }
        let found = self.candidates(request.lane.stream, Proof::NONE)?;
        let bytes = found.now().saturating_add(found.after_wait);
        let helps = bytes > 0 && room.saturating_add(bytes) >= needed;
        Ok(helps.then_some(found.after_wait > 0))
    }

    /// Returns everything cached that is idle, if the driver could then serve the request by laying
    /// out scattered memory anew.
    pub(super) fn enough_to_give_back(
        &mut self,
        request: &Request,
        proof: Proof,
    ) -> DriverResult<Enough> {
        let room = self.mem.room()?;
        let found = self.candidates(request.lane.stream, proof)?;
        let most = found.now();
        if most == 0 || room.saturating_add(most) < self.needed(request) {
            return Ok(Enough::default());
        }
        let segments = found.segments.into_iter().map(|(_, id)| id).collect();
        let pages = found.pages.into_iter().map(|(_, id, proof)| (id, proof)).collect();
        Ok(Enough { segments, pages })
    }

    /// Returns the reserved bytes that cannot be given back as blocks lie now.
    pub(crate) fn pinned(&self) -> u64 {
        let free = self.halves_to_give_back().into_iter();
        let free = free.flat_map(|half| self.mem.heap[half].free_blocks());
        let could_go: u64 =
            free.map(|id| self.may_give_back(id).bytes(self.mem.heap[id].size)).sum();
        let detached: u64 = self.policies.all().map(|rules| rules.detached(&self.mem)).sum();
        self.mem.reserved().saturating_sub(could_go).saturating_sub(detached)
    }

    // ---- detaching plain segments ----

    /// Detaches those of these blocks that still are whole free plain segments. The lock was free
    /// since they were chosen: a number may belong to another block by now, even to one of a
    /// graph's pool.
    pub(super) fn detach_segments(&mut self, blocks: &[BlockId]) -> Vec<Detached> {
        let halves = self.halves_to_give_back();
        let is_segment = |id: BlockId| {
            let block = self.mem.heap.get(id).filter(|block| block.is_free());
            block.is_some_and(|block| halves.contains(&block.lane.pool))
                && self.may_give_back(id) == GiveBack::Segment
        };
        let segments: Vec<_> = blocks.iter().copied().filter(|&id| is_segment(id)).collect();
        segments.into_iter().map(|id| self.mem.detach(id)).collect()
    }

    /// Detaches blocks too large to be split until the driver could serve the request. Returns
    /// them, and whether they are enough. Never detaches blocks of a private pool: a graph may use
    /// them.
    pub(super) fn detach_oversize(&mut self, request: &Request) -> (Vec<Detached>, bool) {
        let Some(max_split) = self.mem.options.max_split_size else { return (Vec::new(), false) };
        if self.mem.heap[request.lane.pool].id != PoolId::DEFAULT {
            return (Vec::new(), false);
        }
        let Some(lane) = self.mem.heap.lane(request.lane) else { return (Vec::new(), false) };
        let enough = request.size.max(max_split);
        let is_whole = |id: &BlockId| self.may_give_back(*id) == GiveBack::Segment;
        let one = lane.free().at_least(enough).next().filter(is_whole);
        if let Some(id) = one {
            return (vec![self.mem.detach(id)], true);
        }
        let mut won = 0;
        let mut chosen = Vec::new();
        for id in lane.free().smaller_than(enough) {
            let size = self.mem.heap[id].size;
            if won >= enough || size < max_split {
                break;
            }
            if is_whole(&id) {
                won += size;
                chosen.push(id);
            }
        }
        (chosen.into_iter().map(|id| self.mem.detach(id)).collect(), won >= enough)
    }

    /// Detaches blocks unused for longer than the average, while more than the threshold is
    /// reserved.
    pub(super) fn detach_garbage(&mut self) -> Vec<Detached> {
        let Some(target) = self.garbage_target() else { return Vec::new() };
        let is_whole = |id: &BlockId| !self.mem.heap[*id].is_split();
        let free = self.mem.heap[PoolTable::LARGE].free_blocks();
        let mut candidates: Vec<BlockId> = free.filter(is_whole).collect();
        let mut total_age: u64 = candidates.iter().map(|&id| self.mem.heap.age(id)).sum();
        let mut won = 0;
        let mut detached = Vec::new();
        let mut progress = true;
        while won < target && progress && !candidates.is_empty() {
            #[expect(clippy::cast_precision_loss, reason = "an average of counts")]
            let average = total_age as f64 / candidates.len() as f64;
            progress = false;
            // All that are older than the average, even beyond the target: they are not expected to
            // be needed soon.
            let mut kept = Vec::with_capacity(candidates.len());
            for id in candidates {
                let age = self.mem.heap.age(id);
                #[expect(clippy::cast_precision_loss, reason = "an age is a count of searches")]
                let is_old = age as f64 >= average;
                if is_old && self.may_give_back(id) == GiveBack::Segment {
                    progress = true;
                    won += self.mem.heap[id].size;
                    total_age -= age;
                    detached.push(self.mem.detach(id));
                } else {
                    kept.push(id);
                }
            }
            candidates = kept;
        }
        detached
    }

    /// Returns how many bytes garbage collection should win; `None` for none.
    fn garbage_target(&self) -> Option<u64> {
        let threshold = self.mem.options.garbage_collection_threshold;
        let limit = self.mem.backing.limit().filter(|_| threshold > 0.0)?;
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a fraction of a positive limit, truncated as PyTorch does"
        )]
        let keep = (threshold * limit as f64) as u64;
        self.mem.reserved().checked_sub(keep).filter(|&target| target > 0)
    }
}
