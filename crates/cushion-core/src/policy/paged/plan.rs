//! Plans: which free memory of a lane serves a request together, through a new stitch.
//!
//! The free end of one page comes first, then whole pages, then the free beginning of one page; as few as will do, since
//! the price is by the page. Whole pages of the lane's small half serve as well.

use std::cmp::Reverse;

use super::PagedLane;
use super::free_pages::{FreePages, Key};
use super::stitch::StitchedPage;
use crate::backing::Backing;
use crate::driver::Driver;
use crate::heap::Lane;
use crate::heap::pool::{LaneId, PoolIndex};
use crate::memory::Mem;

/// What a new stitch would be made of.
#[derive(Debug, Default)]
pub(super) struct Plan {
    /// Pages that are held already, in order; fresh ones come before `beginning`.
    pub(super) pages: Vec<StitchedPage>,
    /// Where what is handed out begins in the first page.
    pub(super) start: u64,
    /// A page of which only the beginning is free, and how much of it.
    pub(super) beginning: Option<(u64, StitchedPage)>,
    /// The bytes that fresh pages have to bring.
    pub(super) missing: u64,
}

/// Free memory of a lane, by how it lies on its pages.
#[derive(Debug)]
pub(super) struct FreeMemory<'a> {
    /// Of the lane, and of its small half.
    halves: [Option<(PoolIndex, &'a Lane, &'a FreePages)>; 2],
    backing: &'a Backing,
}

impl Plan {
    /// The page, free as a whole, that `size` bytes would take only a part of, and how much.
    pub(super) fn taken_in_part(&self, size: u64) -> Option<(StitchedPage, u64)> {
        let whole = if self.start > 0 { self.pages.get(1..)? } else { &self.pages[..] };
        let last = whole.last().filter(|_| self.beginning.is_none())?;
        let usable = self.pages.iter().map(|page| page.bytes).sum::<u64>() - self.start;
        let rest = usable.checked_sub(size).filter(|&rest| rest > 0)?;
        Some((*last, last.bytes.checked_sub(rest)?))
    }

    /// How many pages it maps again.
    pub(super) fn page_count(&self) -> usize {
        self.pages.len() + usize::from(self.beginning.is_some())
    }
}

impl FreeMemory<'_> {
    /// The largest free end and the largest free beginning, of two pages.
    fn at_borders(&self) -> [Option<Key>; 2] {
        let Some((_, _, pages)) = self.halves[0] else { return [None; 2] };
        let end = pages.ends().next();
        let is_other = |it: &Key| end.is_none_or(|end| end.1 != it.1);
        [end, pages.beginnings().find(is_other)]
    }

    /// Bytes of the largest free end and the largest free beginning.
    pub(super) fn bytes_at_borders(&self) -> u64 {
        self.at_borders().into_iter().flatten().map(|(free, _)| free).sum()
    }

    /// Enough of it for `size` bytes, or all of it, with at least `least` bytes of each page.
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
        // Largest first, for the price is by the page; the last is as small as will do.
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

    /// The smallest page of at least so many bytes that is free as a whole, the highest of those.
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

/// The free memory that a new stitch could be made of: of the lane, and whole pages of its small half.
pub(super) fn free_memory<'a, D: Driver>(mem: &'a mut Mem<'_, D>, lane: LaneId) -> FreeMemory<'a> {
    let other = LaneId { pool: mem.heap.pools().other_half(lane.pool), ..lane };
    for lane in [lane, other] {
        PagedLane::refresh(mem, lane);
    }
    free_memory_as_seen(mem, lane)
}

/// The same, as it was when it was last looked at. All of it must still be there.
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
