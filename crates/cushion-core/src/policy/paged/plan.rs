//! Plans: the free memory of a lane that together serves a request through a new stitch.
//!
//! The free end of one page comes first, then whole pages, then the free start of one page; as few
//! as possible, because the cost is per page. Whole pages of the lane's small half serve as well.

use std::cmp::Reverse;

use super::PagedLane;
use super::free_pages::{FreePages, Key};
use super::stitch::StitchedPage;
use crate::backing::Backing;
use crate::driver::Driver;
use crate::heap::Lane;
use crate::heap::pool::{LaneId, PoolIndex};
use crate::memory::Mem;

/// The memory of a new stitch.
#[derive(Debug, Default)]
pub(super) struct Plan {
    /// Pages that are held already, in order. Fresh pages come after them and before `beginning`.
    pub(super) pages: Vec<StitchedPage>,
    /// Where the usable bytes begin in the first page.
    pub(super) start: u64,
    /// A page of which only the start is free, and the free bytes.
    pub(super) beginning: Option<(u64, StitchedPage)>,
    /// The bytes that fresh pages must provide.
    pub(super) missing: u64,
}

/// The free memory of a lane, by pages.
#[derive(Debug)]
pub(super) struct FreeMemory<'a> {
    /// The lane itself, and its small half.
    halves: [Option<(PoolIndex, &'a Lane, &'a FreePages)>; 2],
    backing: &'a Backing,
}

impl Plan {
    /// Returns the wholly free page of which `size` bytes would take only a part, and the bytes
    /// taken.
    pub(super) fn taken_in_part(&self, size: u64) -> Option<(StitchedPage, u64)> {
        let whole = if self.start > 0 { self.pages.get(1..)? } else { &self.pages[..] };
        let last = whole.last().filter(|_| self.beginning.is_none())?;
        let usable = self.pages.iter().map(|page| page.bytes).sum::<u64>() - self.start;
        let rest = usable.checked_sub(size).filter(|&rest| rest > 0)?;
        Some((*last, last.bytes.checked_sub(rest)?))
    }

    /// Returns how many pages it maps again.
    pub(super) fn page_count(&self) -> usize {
        self.pages.len() + usize::from(self.beginning.is_some())
    }
}

impl FreeMemory<'_> {
    /// Returns the largest free end and the largest free start, of two different pages.
    fn at_borders(&self) -> [Option<Key>; 2] {
        let Some((_, _, pages)) = self.halves[0] else { return [None; 2] };
        let end = pages.ends().next();
        let is_other = |it: &Key| end.is_none_or(|end| end.1 != it.1);
        [end, pages.beginnings().find(is_other)]
    }

    /// Returns the bytes of the largest free end and the largest free start.
    pub(super) fn bytes_at_borders(&self) -> u64 {
        self.at_borders().into_iter().flatten().map(|(free, _)| free).sum()
    }

    /// Returns a plan for `size` bytes, or with all free memory if that is less, using only pages
    /// with at least `least` free bytes.
    pub(super) fn plan(&self, size: u64, least: u64) -> Plan {
        let is_worth = |(free, _): &Key| *free >= least;
        let [end, beginning] = self.at_borders().map(|it| it.filter(is_worth));
        let mut plan = Plan { missing: size, ..Plan::default() };
        if let Some((free, home)) = end {
            let page = self.page(0, home);
            plan.start = page.bytes - free;
            plan.pages.push(page);
            plan.missing = plan.missing.saturating_sub(free);
        }
        let at_end = beginning.map_or(0, |(free, _)| free);
        // Largest first, because the cost is per page; the last one is as small as possible.
        let whole = |half: usize| {
            let pages = self.halves[half].into_iter().flat_map(|(_, _, pages)| pages.whole());
            pages.take_while(is_worth).peekable()
        };
        let mut largest = [whole(0), whole(1)];
        while plan.missing > at_end {
            let [of_lane, of_small] = largest.each_mut().map(|pages| pages.peek().copied());
            let half = usize::from(of_small > of_lane);
            let Some((bytes, home)) = largest[half].next() else { break };
            let enough = (bytes + at_end >= plan.missing)
                .then(|| self.smallest_whole((plan.missing - at_end).max(least)))
                .flatten();
            let (half, home) = enough.unwrap_or((half, home));
            let page = self.page(half, home);
            plan.pages.push(page);
            plan.missing = plan.missing.saturating_sub(page.bytes);
        }
        if plan.missing > 0 {
            plan.beginning = beginning.map(|(free, home)| (free, self.page(0, home)));
            plan.missing = plan.missing.saturating_sub(at_end);
        }
        plan
    }

    /// Returns the smallest wholly free page of at least `least` bytes, and among equals the
    /// highest.
    fn smallest_whole(&self, least: u64) -> Option<(usize, Reverse<u64>)> {
        let smallest =
            |half: usize| self.halves[half]?.2.smallest_whole(least).map(|key| (key, half));
        let smallest = [0, 1].into_iter().filter_map(smallest).min();
        smallest.map(|((_, home), half)| (half, home))
    }

    fn page(&self, half: usize, Reverse(home): Reverse<u64>) -> StitchedPage {
        let (pool, lane, _) = self.halves[half].expect("it has a page");
        let (_, bytes, page) = self.backing.page_around(home).expect("a page at home");
        let segment = lane.segment_at(home).expect("the homes of a page");
        StitchedPage { page, pool, segment, home, bytes, offset: 0 }
    }
}

/// Returns the free memory that a new stitch could consist of: that of the lane, and whole pages of
/// its small half.
pub(super) fn free_memory<'a, D: Driver>(mem: &'a mut Mem<'_, D>, lane: LaneId) -> FreeMemory<'a> {
    let other = LaneId { pool: mem.heap.pools().other_half(lane.pool), ..lane };
    for lane in [lane, other] {
        PagedLane::refresh(mem, lane);
    }
    free_memory_as_seen(mem, lane)
}

/// Returns the same as of the last look. All of it must still be free.
pub(super) fn free_memory_as_seen<'a, D: Driver>(
    mem: &'a Mem<'_, D>,
    lane: LaneId,
) -> FreeMemory<'a> {
    let half = |pool| {
        let lane = mem.heap.lane(LaneId { pool, ..lane })?;
        Some((pool, lane, lane.notes::<PagedLane>()?.free_pages()))
    };
    let halves = [half(lane.pool), half(mem.heap.pools().other_half(lane.pool))];
    FreeMemory { halves, backing: mem.backing }
}
