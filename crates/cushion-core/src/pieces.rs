//! What a new range is made of: which of the free pieces of a lane serve a request together.
//!
//! The free end of one page comes first, then whole pages, then the free beginning of one page; as few as will do, since
//! the price is by the page. Whole pages of the lane's small half serve as well.

use std::cmp::Reverse;

use crate::driver::Driver;
use crate::free_pages::{FreePages, Key};
use crate::locked::{Locked, State};
use crate::pages::PageTable;
use crate::pool::PoolIndex;
use crate::stitch::{Family, Part};

/// What a new range would be made of.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    /// The pages there are, in order; fresh ones come before `beginning`.
    pub(crate) parts: Vec<Part>,
    /// Where what is handed out begins in the first.
    pub(crate) start: u64,
    /// A page of which only the beginning is free, and how much of it.
    pub(crate) beginning: Option<(u64, Part)>,
    /// What fresh pages have to bring.
    pub(crate) missing: u64,
}

/// Free memory of a family, by how it lies on its pages.
#[derive(Debug)]
pub(crate) struct Pieces<'a> {
    /// Of the lane, and of its small half.
    halves: [Option<(PoolIndex, &'a FreePages)>; 2],
    pages: &'a PageTable,
}

impl Plan {
    /// The page, free as a whole, that `size` bytes would take only a part of, and how much.
    pub(crate) fn taken_in_part(&self, size: u64) -> Option<(Part, u64)> {
        let whole = if self.start > 0 { self.parts.get(1..)? } else { &self.parts[..] };
        let last = whole.last().filter(|_| self.beginning.is_none())?;
        let usable = self.parts.iter().map(|part| part.bytes).sum::<u64>() - self.start;
        let rest = usable.checked_sub(size).filter(|&rest| rest > 0)?;
        Some((*last, last.bytes.checked_sub(rest)?))
    }

    /// How many pages it maps again.
    pub(crate) fn pages(&self) -> usize {
        self.parts.len() + usize::from(self.beginning.is_some())
    }
}

impl Pieces<'_> {
    /// The largest free end and the largest free beginning, of two pages.
    fn at_borders(&self) -> [Option<Key>; 2] {
        let Some((_, pages)) = self.halves[0] else { return [None; 2] };
        let end = pages.ends().next();
        let is_other = |it: &Key| end.is_none_or(|end| end.1 != it.1);
        [end, pages.beginnings().find(is_other)]
    }

    /// Bytes of the largest free end and the largest free beginning.
    pub(crate) fn bytes_at_borders(&self) -> u64 {
        self.at_borders().into_iter().flatten().map(|(free, _)| free).sum()
    }

    /// Enough of them for `size` bytes, or all of them, with `least` bytes in each.
    pub(crate) fn plan(&self, size: u64, least: u64) -> Plan {
        let is_worth = |(free, _): &Key| *free >= least;
        let [end, beginning] = self.at_borders().map(|it| it.filter(is_worth));
        let mut plan = Plan { missing: size, ..Plan::default() };
        if let Some((free, home)) = end {
            let part = self.part(0, home);
            plan.start = part.bytes - free;
            plan.parts.push(part);
            plan.missing = plan.missing.saturating_sub(free);
        }
        let at_end = beginning.map_or(0, |(free, _)| free);
        // Largest first, for the price is by the page; the last is as small as will do.
        let whole = |half: usize| {
            let pages = self.halves[half].into_iter().flat_map(|(_, pages)| pages.whole());
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
            let part = self.part(half, home);
            plan.parts.push(part);
            plan.missing = plan.missing.saturating_sub(part.bytes);
        }
        if plan.missing > 0 {
            plan.beginning = beginning.map(|(free, home)| (free, self.part(0, home)));
            plan.missing = plan.missing.saturating_sub(at_end);
        }
        plan
    }

    /// The smallest page of at least so many bytes that is free as a whole, the highest of those.
    fn smallest_whole(&self, least: u64) -> Option<(usize, Reverse<u64>)> {
        let smallest =
            |half: usize| self.halves[half]?.1.smallest_whole(least).map(|key| (key, half));
        let smallest = [0, 1].into_iter().filter_map(smallest).min();
        smallest.map(|((_, home), half)| (half, home))
    }

    fn part(&self, half: usize, Reverse(home): Reverse<u64>) -> Part {
        let (pool, free) = self.halves[half].expect("it has a page");
        let (_, bytes, page) = self.pages.page_around(home).expect("a page at home");
        let segment = free.segment_of(home).expect("the homes of a page");
        Part { page, pool, segment, home, bytes, offset: 0 }
    }
}

impl<D: Driver> Locked<'_, D> {
    /// The free memory that a new range could be made of: of the lane, and whole pages of its small half.
    pub(crate) fn pieces(&mut self, family: Family) -> Pieces<'_> {
        let State { pools, pages, blocks, looks, .. } = &mut *self.state;
        for pool in [family.0, pools.other_half(family.0)] {
            if let Some(lane) = pools[pool].lane_if_any(family.1) {
                looks.at_pages(lane.look_at_changes(pages, blocks));
            }
        }
        self.pieces_before(family)
    }

    /// The same, as it was when it was last looked for. All of it must be there.
    pub(crate) fn pieces_before(&self, (large, stream): Family) -> Pieces<'_> {
        let State { pools, pages, .. } = &*self.state;
        let half = |pool| Some((pool, pools[pool].lane(stream)?.free_pages()?));
        Pieces { halves: [half(large), half(pools.other_half(large))], pages }
    }
}
