//! Taking pages away from the addresses that they are at, and addresses from the segments that have none left.
//!
//! Every call of the driver takes tens of microseconds, and a page may be in hundreds of ranges. So the lock is held for a
//! limited number of calls at a time: what is left is done in the next hold, if it is still free then.

use crate::block::{BlockId, BlockState};
use crate::driver::{Driver, DriverResult, StreamId};
use crate::engine::Engine;
use crate::history::{Action, Tag};
use crate::locked::{Locked, State};
use crate::policy::GiveBack;
use crate::pool::PoolId;
use crate::proof::{Idle, Proof};

/// How many driver calls are made before others get the lock.
const CALLS_A_HOLD: u32 = 32;

/// What unmapping and releasing one page takes, and giving back the addresses of its segment.
pub(crate) const CALLS_A_PAGE: u32 = 3;

/// How many driver calls may still be made in this hold of the lock.
#[derive(Debug)]
pub(crate) struct Calls(u32);

impl Calls {
    /// For one hold of the lock.
    pub(crate) fn of_one_hold() -> Self {
        Self(CALLS_A_HOLD)
    }

    /// No limit: a request needs the page now, or the calls were counted before.
    pub(crate) fn unlimited() -> Self {
        Self(u32::MAX)
    }

    /// Whether so many are left; then they are spent.
    pub(crate) fn spend(&mut self, calls: u32) -> bool {
        let left = self.0.checked_sub(calls);
        self.0 = left.unwrap_or(0);
        left.is_some()
    }

    pub(crate) fn are_left(&self) -> bool {
        self.0 > 0
    }
}

/// Addresses that lost their pages.
#[derive(Debug)]
pub(crate) struct Unmapped {
    start: u64,
    end: u64,
    stream: StreamId,
    /// By name: it may be gone before this is noted.
    pool: PoolId,
}

impl Unmapped {
    /// Adds what follows; otherwise returns what was there before, and begins anew.
    fn extend(open: &mut Option<Self>, more: Option<Self>) -> Option<Self> {
        match (&mut *open, more) {
            (_, None) => None,
            (Some(before), Some(more)) if before.end == more.start => {
                before.end = more.end;
                None
            }
            (before, Some(more)) => before.replace(more),
        }
    }
}

impl<D: Driver> Engine<D> {
    /// Takes away and gives back the pages of free blocks, each with the proof that its work is done, a few at a time;
    /// returns the bytes, and whether all proofs held. Blocks that are in use again are passed over.
    pub(crate) fn unmap_blocks(
        &self,
        mut blocks: Vec<(BlockId, Proof)>,
        tag: Tag,
    ) -> DriverResult<(u64, bool)> {
        blocks.reverse();
        let (mut won, mut all) = (0, true);
        // What goes in several holds of the lock is one event in the history.
        let mut open = None;
        while !blocks.is_empty() {
            self.locked(|mut engine| {
                let before = engine.reserved();
                let mut calls = Calls::of_one_hold();
                let mut failed = Ok(());
                while calls.are_left()
                    && failed.is_ok()
                    && let Some((id, proof)) = blocks.pop()
                {
                    let Some(idle) = engine.idle(id, proof) else {
                        engine.note_unmapped(open.take(), tag);
                        all = false;
                        continue;
                    };
                    let (unmapped, rest) = engine.unmap_block(&idle, &mut calls);
                    engine.note_unmapped(Unmapped::extend(&mut open, unmapped), tag);
                    if !matches!(rest, Ok(Some(_))) {
                        engine.note_unmapped(open.take(), tag);
                    }
                    failed = rest.map(|rest| blocks.extend(rest.map(|rest| (rest, proof))));
                }
                won += before.saturating_sub(engine.reserved());
                failed
            })?;
        }
        Ok((won, all))
    }
}

impl<D: Driver> Locked<'_, D> {
    /// Takes away and gives back the pages that lie wholly in a free block, as far as `calls` go; then, if nothing of
    /// the segment is mapped any more, its addresses too. Returned is what was unmapped, which the caller has to
    /// [note](Self::note_unmapped), and the block with pages that are left to do. Where the driver fails half-way, what
    /// was unmapped so far is.
    pub(crate) fn unmap_block(
        &mut self,
        idle: &Idle<'_>,
        calls: &mut Calls,
    ) -> (Option<Unmapped>, DriverResult<Option<BlockId>>) {
        let id = idle.block();
        if !self.state.blocks[id].is_free() {
            return (None, Ok(None));
        }
        let GiveBack::Pages { start, end } = self.may_give_back(id) else {
            return (None, Ok(None));
        };
        let block = &self.state.blocks[id];
        let (pool, stream) = (block.pool, block.stream);
        let mut at = start;
        let mut failed = Ok(());
        while at < end {
            let page = self.state.pages.page_around(at);
            let (_, bytes, page) = page.expect("a free block has pages behind it");
            if !self.leave_ranges(page, idle, calls) || !calls.spend(CALLS_A_PAGE) {
                break;
            }
            failed = self.state.pages.unmap(self.driver, at, idle);
            if failed.is_err() {
                break;
            }
            at += bytes;
        }
        let (private, small) = (self.state.pools[pool].id, self.state.pools[pool].small);
        let unmapped = (at > start).then_some(Unmapped { start, end: at, stream, pool: private });
        if unmapped.is_some() {
            self.mark_unmapped(id, start, at);
            self.count_pages();
            self.counters.reserved_by_private.decrease(private, small, at - start);
        }
        let rest = failed.and_then(|()| {
            let block = &self.state.blocks[id];
            if at < end {
                return Ok(if block.is_mapped() { Some(id) } else { block.next });
            }
            if !block.is_split() && !block.is_mapped() {
                self.unreserve(id)?;
            }
            Ok(None)
        });
        (unmapped, rest)
    }

    /// Counts and records what was unmapped.
    pub(crate) fn note_unmapped(&mut self, unmapped: Option<Unmapped>, tag: Tag) {
        let Some(Unmapped { start, end, stream, pool }) = unmapped else { return };
        self.counters.num_device_free.add(1);
        self.record_in(Action::SegmentUnmap, start, end - start, (stream, pool), tag);
    }

    /// Turns `start..end` of a free block into an unmapped block, which keeps the block's identity.
    pub(crate) fn mark_unmapped(&mut self, id: BlockId, start: u64, end: u64) {
        self.cut_free(id, start, end);
        let blocks = &mut self.state.blocks;
        blocks[id].state = BlockState::Unmapped;
        let (prev, next) = (blocks[id].prev, blocks[id].next);
        for neighbour in [prev, next].into_iter().flatten() {
            self.try_merge(id, neighbour, BlockState::Unmapped);
        }
        let State { blocks, pools, .. } = &mut *self.state;
        let block = &blocks[id];
        pools[block.pool].lane_mut(block.stream).insert_unmapped(block.address, id);
    }

    /// Gives back the addresses of a segment with no page in it.
    pub(crate) fn unreserve(&mut self, id: BlockId) -> DriverResult<()> {
        let block = &self.state.blocks[id];
        let (address, size, pool) = (block.address, block.size, block.pool);
        let (stream, segment) = (block.stream, block.segment);
        let unstuck = self.state.pages.unstick(self.driver, address..address + size);
        self.count_pages();
        unstuck?;
        self.driver.unreserve(address, size)?;
        let State { blocks, segments, pools, homes, .. } = &mut *self.state;
        blocks.remove(id);
        segments.remove(segment);
        homes.addresses -= size;
        let lane = pools[pool].lane_mut(stream);
        lane.remove_unmapped(address);
        lane.remove_homes(address);
        lane.addresses_went(size);
        pools[pool].segment_went(stream, self.lanes);
        Ok(())
    }
}
