//! Giving back by itself: what a program has not needed for a while goes back to the driver, while it runs on.
//!
//! Somebody looks now and then. Time goes in windows, half as long as the option `trim_ms` says: what is held beyond the
//! most that was live in the last two of them, and in the one under way, was not needed. For so many bytes, pages go that
//! were wholly free at every look for a window at least.
//!
//! Nothing waits. At one look pages are taken out of their lanes, and an event is recorded on the stream of each; at the
//! next, those whose event is done are unmapped, a few at a time. If a request finds no memory in between, they are all
//! back in their lanes before anything else is tried: they were needed, and fewer are taken in the next window. While a
//! capture may be under way nothing is recorded, asked or unmapped.
//!
//! An event can be recorded only on a stream that is certainly there: memory of streams that may have been destroyed
//! goes when the cache is emptied or memory is short, and not by itself. Only pages of `paged` go: the other policies
//! keep what PyTorch would keep.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::block::{Block, BlockId, BlockState};
use crate::check::Violation;
use crate::driver::{Driver, DriverResult, StreamId};
use crate::engine::Engine;
use crate::history::Tag;
use crate::homes::Found;
use crate::locked::{Locked, State};
use crate::policy::{GiveBack, Policy, Request};
use crate::pool::{PoolIndex, PoolTable};
use crate::proof::{Idle, Marked};
use crate::segment::Backing;
use crate::unmap::{CALLS_A_PAGE, Calls};

/// How many pages are taken out of their lanes at one look: less than a millisecond.
const MOST_PAGES: usize = 512;

/// What is not worth giving back: this part of what is held.
const NOT_WORTH: u64 = 64;

/// How often the bytes that are taken at a look are halved at most.
const MOST_HALVINGS: u32 = 16;

/// What is known of what a program needs, and what is on its way back.
#[derive(Debug, Default)]
pub(crate) struct Windows {
    /// When the one that is under way began.
    began: Option<Duration>,
    /// The most that was live in it, and in the one before.
    pub(crate) peak: u64,
    before: u64,
    /// The most that was live in the last two that are over; none before the first is.
    needed: Option<u64>,
    /// Pages by their homes, each with the look since which it was found wholly free every time.
    free_since: BTreeMap<u64, Duration>,
    /// Pages that are out of their lanes.
    leaving: Vec<Leave>,
    /// How often what is taken at a look was halved, because some of it was needed.
    halvings: u32,
    /// Whether some of what was taken in this window was needed: then no more is.
    was_needed: bool,
}

/// Pages of one stream on their way back to the driver.
#[derive(Debug)]
struct Leave {
    stream: StreamId,
    /// The work that the stream had when they were taken.
    work: Marked,
    pages: Vec<BlockId>,
}

/// A page that is wholly free in its lane.
#[derive(Debug, Clone, Copy)]
struct FreePage {
    home: u64,
    bytes: u64,
    pool: PoolIndex,
    stream: StreamId,
}

impl<D: Driver> Engine<D> {
    /// Looks whether there is memory that has not been needed for a while, by the option `trim_ms`, and gives back what
    /// was found at an earlier look and is not in use by the device any more; returns how many bytes. To be called now
    /// and then, say every two seconds. Never waits.
    pub fn trim(&self) -> DriverResult<u64> {
        let now = self.clock.now();
        self.locked(|mut engine| engine.ask_for_leaving())?;
        let mut given_back = 0;
        while let Some(bytes) = self.locked(|mut engine| engine.some_go()) {
            given_back += bytes;
        }
        if given_back > 0 {
            self.wake();
        }
        self.locked(|mut engine| {
            engine.state.shrink();
            engine.look(now)
        })?;
        Ok(given_back)
    }
}

impl<D: Driver> Locked<'_, D> {
    // ---- what left at an earlier look ----

    /// Asks whether the work is done that pages wait for.
    fn ask_for_leaving(&mut self) -> DriverResult<()> {
        if self.is_recording() {
            return Ok(());
        }
        let mut failed = Ok(());
        let leaving = std::mem::take(&mut self.state.homes.windows.leaving);
        let polled = leaving.into_iter().map(|mut leave| {
            if let Marked::UnderWay(mark) = leave.work {
                let (work, polled) = self.poll(mark);
                leave.work = work;
                failed = failed.and(polled);
            }
            leave
        });
        let polled = polled.collect();
        self.state.homes.windows.leaving = polled;
        failed
    }

    /// Unmaps a few of the pages whose work is done; returns their bytes, or `None` if there are none.
    fn some_go(&mut self) -> Option<u64> {
        if self.is_recording() {
            return None;
        }
        let is_done = |leave: &Leave| matches!(leave.work, Marked::Done(_));
        let index = self.state.homes.windows.leaving.iter().position(is_done)?;
        let before = self.reserved();
        let mut calls = Calls::of_one_hold();
        while let Some(page) = self.state.homes.windows.leaving[index].pages.pop() {
            let Marked::Done(proof) = self.state.homes.windows.leaving[index].work else { break };
            match self.idle(page, proof) {
                Some(idle) if self.page_goes(&idle, &mut calls) => {}
                Some(_) => {
                    self.state.homes.windows.leaving[index].pages.push(page);
                    break;
                }
                None => {
                    self.merge_free(page);
                }
            }
        }
        let windows = &mut self.state.homes.windows;
        if windows.leaving[index].pages.is_empty() {
            windows.leaving.swap_remove(index);
            windows.halvings = windows.halvings.saturating_sub(1);
        }
        self.close_empty_pools();
        Some(before.saturating_sub(self.reserved()))
    }

    /// A page that was taken out of its lane goes to the driver, or, where that fails, back to its lane; false if it
    /// takes more calls than are left.
    fn page_goes(&mut self, idle: &Idle<'_>, calls: &mut Calls) -> bool {
        let id = idle.block();
        let home = self.state.pages.page_around(self.state.blocks[id].address);
        let (_, _, page) = home.expect("a page at home");
        if !self.leave_ranges(page, idle, calls) || !calls.spend(CALLS_A_PAGE) {
            return false;
        }
        self.insert_free(id);
        let (unmapped, gone) = self.unmap_block(idle, &mut Calls::unlimited());
        self.note_unmapped(unmapped, Tag::NONE);
        if gone.is_err() && self.state.blocks.get(id).is_some_and(Block::is_free) {
            let block = &self.state.blocks[id];
            let (size, address, pool, stream) =
                (block.size, block.address, block.pool, block.stream);
            self.state.pools[pool].lane_mut(stream).remove_free(size, address);
            self.merge_free(id);
        }
        true
    }

    // ---- taking it back ----

    /// Puts all pages that are on their way back into their lanes, so that nobody is short of them.
    pub(crate) fn recall_leaving(&mut self) {
        for leave in std::mem::take(&mut self.state.homes.windows.leaving) {
            self.state.pending.keep_events(leave.work.into_event());
            for page in leave.pages {
                self.merge_free(page);
            }
        }
    }

    /// Puts those pages back into their lanes that a request could be made of.
    fn recall_for(&mut self, request: &Request) {
        let State { homes, blocks, pools, pending, .. } = &mut *self.state;
        let other = (!request.small).then(|| pools.other_half(request.pool));
        let serves = |page: &mut BlockId| {
            let pool = blocks[*page].pool;
            pool == request.pool || Some(pool) == other
        };
        let mut back = Vec::new();
        for leave in &mut homes.windows.leaving {
            if leave.stream == request.stream {
                back.extend(leave.pages.extract_if(.., serves));
            }
        }
        let is_over = |leave: &mut Leave| leave.pages.is_empty();
        for leave in homes.windows.leaving.extract_if(.., is_over) {
            pending.keep_events(leave.work.into_event());
        }
        back.into_iter().for_each(|page| {
            self.merge_free(page);
        });
    }

    /// What serves a request that found nothing, with the pages that were on their way back.
    pub(crate) fn find_recalled(&mut self, request: &Request, policy: Policy) -> Option<Found> {
        if self.state.homes.windows.leaving.is_empty() {
            return None;
        }
        self.recall_for(request);
        let found = self.find(request, policy)?;
        self.note_needed(found, request.size);
        Some(found)
    }

    /// Pages that were about to go serve a request.
    #[cold]
    fn note_needed(&mut self, found: Found, size: u64) {
        let windows = &mut self.state.homes.windows;
        windows.was_needed = true;
        windows.halvings = (windows.halvings + 1).min(MOST_HALVINGS);
        let start = match found {
            Found::Block(id) => self.state.blocks[id].address,
            Found::Piece { address, .. } => address,
            Found::Range(range) => {
                for part in &self.state.stitches.get(range).parts {
                    windows.free_since.remove(&part.home);
                }
                return;
            }
        };
        let first = self.state.pages.page_around(start).map_or(start, |(home, ..)| home);
        windows.free_since.extract_if(first..start + size, |_, _| true).for_each(drop);
    }

    // ---- finding what is not needed ----

    /// Looks at what is free, and takes pages out of their lanes if there are more than were needed.
    fn look(&mut self, now: Duration) -> DriverResult<()> {
        if self.is_recording() {
            return Ok(());
        }
        let window = Duration::from_millis(self.state.options.trim_ms) / 2;
        if window.is_zero() {
            self.recall_leaving();
            return Ok(());
        }
        self.end_window(now, window);
        let held = self.reserved();
        let windows = &mut self.state.homes.windows;
        let beyond =
            |needed: u64| Some(held.saturating_sub(needed)).filter(|&it| it > held / NOT_WORTH);
        if beyond(windows.peak).is_none() {
            windows.free_since.clear();
            return Ok(());
        }
        let surplus = windows.needed.and_then(|needed| beyond(needed.max(windows.peak)));
        let may_take = !windows.was_needed && self.state.queue.is_idle();
        let pages = self.free_pages();
        self.note_free(&pages, now);
        match surplus.filter(|_| may_take) {
            Some(surplus) => self.take_pages(pages, surplus, now.saturating_sub(window)),
            None => Ok(()),
        }
    }

    /// Ends the window, if its time is up.
    fn end_window(&mut self, now: Duration, length: Duration) {
        let live = self.counters.active_bytes.current();
        let windows = &mut self.state.homes.windows;
        let began = *windows.began.get_or_insert(now);
        if now.saturating_sub(began) < length {
            return;
        }
        windows.began = Some(now);
        windows.was_needed = false;
        let peak = std::mem::replace(&mut windows.peak, live);
        let needed = peak.max(std::mem::replace(&mut windows.before, peak));
        windows.needed = Some(needed);
        // From here on, waste is measured by what was live lately.
        self.state.homes.high_water = needed;
    }

    /// The pages that are wholly free, of streams that an event can be recorded on.
    fn free_pages(&self) -> Vec<FreePage> {
        let mut free = Vec::new();
        // A graph may still run, on any stream, when its pool is released: what it had goes with the cache.
        for pool in [PoolTable::LARGE, PoolTable::SMALL] {
            let lanes = self.state.pools[pool].lanes().filter(|&(stream, _)| self.lasts(stream));
            for (stream, lane) in lanes {
                // A smaller one has no whole page in it.
                for id in lane.free().at_least(self.device.granularity) {
                    let segment = self.state.blocks[id].segment;
                    if self.state.segments[segment].backing != Backing::Homes {
                        continue;
                    }
                    let GiveBack::Pages { start, end } = self.may_give_back(id) else { continue };
                    let mut home = start;
                    while home < end {
                        let (_, bytes, _) =
                            self.state.pages.page_around(home).expect("a page at home");
                        free.push(FreePage { home, bytes, pool, stream });
                        home += bytes;
                    }
                }
            }
        }
        free
    }

    /// Remembers since when pages have been free.
    fn note_free(&mut self, pages: &[FreePage], now: Duration) {
        let windows = &mut self.state.homes.windows;
        let before = std::mem::take(&mut windows.free_since);
        let leaving = windows.leaving.iter().flat_map(|leave| &leave.pages);
        let leaving = leaving.map(|&page| self.state.blocks[page].address);
        let homes = pages.iter().map(|page| page.home).chain(leaving);
        windows.free_since =
            homes.map(|home| (home, before.get(&home).copied().unwrap_or(now))).collect();
    }

    /// Takes pages that have been free since `by` out of their lanes, `surplus` bytes of them at most, and records an
    /// event on the stream of each.
    fn take_pages(
        &mut self,
        mut pages: Vec<FreePage>,
        surplus: u64,
        by: Duration,
    ) -> DriverResult<()> {
        let windows = &self.state.homes.windows;
        let waits = |stream: StreamId| windows.leaving.iter().any(|leave| leave.stream == stream);
        let since = |page: &FreePage| windows.free_since.get(&page.home).copied();
        pages.retain(|page| since(page).is_some_and(|since| since <= by) && !waits(page.stream));
        // The longest free first; of those the highest, which best fit takes last.
        pages.sort_unstable_by_key(|page| (since(page), Reverse(page.home)));
        let surplus = surplus.saturating_sub(self.leaving_bytes());
        let most = surplus >> windows.halvings;
        let mut taken = 0;
        let mut by_stream: BTreeMap<StreamId, Vec<FreePage>> = BTreeMap::new();
        let mut count = 0;
        for page in pages {
            let is_first = taken == 0 && page.bytes <= surplus;
            if count < MOST_PAGES && (is_first || taken + page.bytes <= most) {
                taken += page.bytes;
                count += 1;
                by_stream.entry(page.stream).or_default().push(page);
            }
        }
        for (stream, pages) in by_stream {
            let Some(mark) = self.mark(stream)? else { continue };
            let pages = pages.into_iter().filter_map(|page| self.take_page(page)).collect();
            let work = Marked::UnderWay(mark);
            self.state.homes.windows.leaving.push(Leave { stream, work, pages });
        }
        Ok(())
    }

    /// Takes a page out of its lane.
    fn take_page(&mut self, FreePage { home, bytes, pool, stream }: FreePage) -> Option<BlockId> {
        let id = self.state.pools[pool].lane(stream)?.free_at(home)?;
        self.cut_free(id, home, home + bytes);
        self.state.blocks[id].state = BlockState::Leaving;
        Some(id)
    }

    // ---- small questions ----

    /// Bytes of pages that are on their way back.
    pub(crate) fn leaving_bytes(&self) -> u64 {
        let leaving = self.state.homes.windows.leaving.iter().flat_map(|leave| &leave.pages);
        leaving.map(|&page| self.state.blocks[page].size).sum()
    }

    /// What is out of its lane is on its way back, a page at a time, and nothing else is.
    pub(crate) fn check_leaving(&self) -> Result<(), Violation> {
        let mut known = BTreeSet::new();
        for leave in &self.state.homes.windows.leaving {
            for &page in &leave.pages {
                let block = &self.state.blocks[page];
                let here = self.state.pages.page_around(block.address);
                let is_page = here
                    .is_some_and(|(home, bytes, _)| (home, bytes) == (block.address, block.size));
                let is_sound = is_page
                    && (block.state, block.stream) == (BlockState::Leaving, leave.stream)
                    && known.insert(page);
                if !is_sound || leave.pages.is_empty() {
                    return Err(Violation(format!("{block:?} does not leave, or twice")));
                }
            }
        }
        let leaving = self.state.blocks.iter().filter(|(_, block)| {
            block.state == BlockState::Leaving && !self.state.segments[block.segment].is_plain()
        });
        let leaving = leaving.count();
        if leaving == known.len() {
            return Ok(());
        }
        Err(Violation(format!("{leaving} pages leave, of which {} are known", known.len())))
    }
}
