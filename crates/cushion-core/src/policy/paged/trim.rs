//! Trimming: pages that a program has not needed for a while are given back while it runs.
//!
//! Time is divided into windows, half as long as the option `trim_ms`. Memory held beyond the peak
//! of live bytes in the last two windows, and in the current one, was not needed. That many bytes
//! of pages, idle for a full window, are released.
//!
//! Trimming never waits. One look detaches pages from their lanes and marks the work of their
//! streams; the next look unmaps those whose work is done, a few at a time. If a request finds no
//! memory in between, the pages return to their lanes before anything else is tried. They were
//! needed, so fewer are detached in the next window. While a capture may be under way, nothing is
//! recorded, polled or unmapped.
//!
//! An event can be recorded only on a stream that certainly exists. Memory of streams that may have
//! been destroyed is never trimmed; it is given back when the cache is emptied or memory is short.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use super::Paged;
use super::stitch::StitchId;
use crate::base::names::Tag;
use crate::driver::{Driver, DriverResult, StreamId};
use crate::heap::block::{Block, BlockId};
use crate::heap::pool::{LaneId, PoolTable};
use crate::heap::segment::Kind;
use crate::memory::unmap::{CALLS_A_PAGE, Calls};
use crate::memory::{Found, GiveBack, Mem, Request};
use crate::policy::Rules;
use crate::streams::proof::{Idle, Marked};

/// How many pages one look detaches at most: less than a millisecond of work.
const MOST_PAGES: usize = 512;

/// A surplus of less than one in this many of the reserved bytes is not given back.
const NOT_WORTH: u64 = 64;

/// How often the bytes detached at a look are halved at most.
const MOST_HALVINGS: u32 = 16;

/// The program's need of memory by window, and the pages on their way back. The ledger's watermark
/// is the peak of live bytes in the current window.
#[derive(Debug, Default)]
pub(super) struct Windows {
    /// When the current window began.
    began: Option<Duration>,
    /// The peak of live bytes in the window before it.
    before: u64,
    /// The peak of live bytes in the last two complete windows; `None` before the first is
    /// complete.
    needed: Option<u64>,
    /// Pages by their homes, each with the first of the looks since which it was always wholly
    /// free.
    free_since: BTreeMap<u64, Duration>,
    pub(super) detached: Vec<DetachedPages>,
    /// How often the bytes detached at a look were halved, because some were needed.
    halvings: u32,
    /// Whether some pages detached in this window were needed. Then no more are detached in it.
    was_needed: bool,
}

/// Pages of one stream on their way back to the driver.
#[derive(Debug)]
pub(super) struct DetachedPages {
    pub(super) stream: StreamId,
    /// The work that the stream had when the pages were detached.
    work: Marked,
    pub(super) pages: Vec<BlockId>,
}

/// A page that is wholly free in its lane.
#[derive(Debug, Clone, Copy)]
struct FreePage {
    home: u64,
    bytes: u64,
    lane: LaneId,
}

impl Paged {
    // ---- pages detached at an earlier look ----

    /// Checks whether the work that detached pages wait for is done.
    pub(super) fn poll_work<D: Driver>(&mut self, mem: &mut Mem<'_, D>) -> DriverResult<()> {
        if mem.is_recording() {
            return Ok(());
        }
        let mut failed = Ok(());
        let detached = std::mem::take(&mut self.windows.detached);
        let polled = detached.into_iter().map(|mut detached| {
            if let Marked::UnderWay(mark) = detached.work {
                let (work, polled) = mem.poll(mark);
                detached.work = work;
                failed = failed.and(polled);
            }
            detached
        });
        self.windows.detached = polled.collect();
        failed
    }

    /// Unmaps a few of the pages whose work is done. Returns their bytes, or `None` if there are
    /// none.
    pub(super) fn release_some<D: Driver>(&mut self, mem: &mut Mem<'_, D>) -> Option<u64> {
        if mem.is_recording() {
            return None;
        }
        let is_done = |detached: &DetachedPages| matches!(detached.work, Marked::Done(_));
        let index = self.windows.detached.iter().position(is_done)?;
        let before = mem.reserved();
        let mut calls = Calls::of_one_hold();
        while let Some(page) = self.windows.detached[index].pages.pop() {
            let Marked::Done(proof) = self.windows.detached[index].work else { break };
            match mem.idle(page, proof) {
                Some(idle) if self.release(mem, &idle, &mut calls) => {}
                Some(_) => {
                    self.windows.detached[index].pages.push(page);
                    break;
                }
                None => {
                    mem.heap.merge_free(page);
                }
            }
        }
        if self.windows.detached[index].pages.is_empty() {
            self.windows.detached.swap_remove(index);
            self.windows.halvings = self.windows.halvings.saturating_sub(1);
        }
        Some(before.saturating_sub(mem.reserved()))
    }

    /// Releases a detached page, or returns it to its lane if that fails. Returns false if it takes
    /// more calls than are left.
    fn release<D: Driver>(
        &mut self,
        mem: &mut Mem<'_, D>,
        idle: &Idle<'_>,
        calls: &mut Calls,
    ) -> bool {
        let id = idle.block();
        let home = mem.backing.page_around(mem.heap[id].address);
        let (_, _, page) = home.expect("a page at home");
        if !self.take_out_of_stitches(mem, page, idle, calls) || !calls.spend(CALLS_A_PAGE) {
            return false;
        }
        mem.heap.attach(id);
        let unmapping = self.unmap(mem, idle, &mut Calls::unlimited());
        mem.note_unmapped(unmapping.unmapped, Tag::NONE);
        if unmapping.rest.is_err() && mem.heap.get(id).is_some_and(Block::is_free) {
            mem.heap.merge_again(id);
        }
        true
    }

    // ---- recalling them ----

    /// Returns all detached pages to their lanes.
    pub(super) fn recall_all<D: Driver>(&mut self, mem: &mut Mem<'_, D>) {
        for detached in std::mem::take(&mut self.windows.detached) {
            mem.streams.keep_events(detached.work.into_event());
            for page in detached.pages {
                mem.heap.merge_free(page);
            }
        }
    }

    /// Returns the detached pages that could serve a request to their lanes.
    pub(super) fn recall_for<D: Driver>(&mut self, mem: &mut Mem<'_, D>, request: &Request) {
        let other = (!request.small).then(|| mem.heap.pools().other_half(request.lane.pool));
        let serves = |page: &mut BlockId| {
            let pool = mem.heap[*page].lane.pool;
            pool == request.lane.pool || Some(pool) == other
        };
        let mut back = Vec::new();
        for detached in &mut self.windows.detached {
            if detached.stream == request.lane.stream {
                back.extend(detached.pages.extract_if(.., serves));
            }
        }
        let is_over = |detached: &mut DetachedPages| detached.pages.is_empty();
        for detached in self.windows.detached.extract_if(.., is_over) {
            mem.streams.keep_events(detached.work.into_event());
        }
        for page in back {
            mem.heap.merge_free(page);
        }
    }

    /// Notes that detached pages were needed for a request.
    #[cold]
    pub(super) fn note_needed<D: Driver>(&mut self, mem: &Mem<'_, D>, found: Found, size: u64) {
        let windows = &mut self.windows;
        windows.was_needed = true;
        windows.halvings = (windows.halvings + 1).min(MOST_HALVINGS);
        let start = match found {
            Found::Block(id) => mem.heap[id].address,
            Found::Within { address, .. } => address,
            Found::Stitch(number) => {
                for page in &self.stitches.get(StitchId::new(number)).pages {
                    windows.free_since.remove(&page.home);
                }
                return;
            }
        };
        let first = mem.backing.page_around(start).map_or(start, |(home, ..)| home);
        windows.free_since.extract_if(first..start + size, |_, _| true).for_each(drop);
    }

    /// Returns the bytes of detached pages.
    pub(super) fn detached_bytes<D: Driver>(&self, mem: &Mem<'_, D>) -> u64 {
        let pages = self.windows.detached.iter().flat_map(|detached| &detached.pages);
        pages.map(|&page| mem.heap[page].size).sum()
    }

    // ---- finding pages that are not needed ----

    /// Looks at free memory and detaches pages if there are more than were needed. `may_take`
    /// allows detaching.
    pub(super) fn look<D: Driver>(
        &mut self,
        mem: &mut Mem<'_, D>,
        now: Duration,
        may_take: bool,
    ) -> DriverResult<()> {
        if mem.is_recording() {
            return Ok(());
        }
        let window = Duration::from_millis(mem.options.trim_ms) / 2;
        if window.is_zero() {
            self.recall_all(mem);
            return Ok(());
        }
        self.end_window(mem, now, window);
        let (held, peak) = (mem.reserved(), mem.ledger.watermark());
        let windows = &mut self.windows;
        let beyond =
            |needed: u64| Some(held.saturating_sub(needed)).filter(|&it| it > held / NOT_WORTH);
        if beyond(peak).is_none() {
            windows.free_since.clear();
            return Ok(());
        }
        let surplus = windows.needed.and_then(|needed| beyond(needed.max(peak)));
        let may_take = !windows.was_needed && may_take;
        let pages = self.free_pages(mem);
        self.note_free(mem, &pages, now);
        match surplus.filter(|_| may_take) {
            Some(surplus) => self.detach_pages(mem, pages, surplus, now.saturating_sub(window)),
            None => Ok(()),
        }
    }

    /// Ends the window, if its time is up.
    fn end_window<D: Driver>(&mut self, mem: &mut Mem<'_, D>, now: Duration, length: Duration) {
        let windows = &mut self.windows;
        let began = *windows.began.get_or_insert(now);
        if now.saturating_sub(began) < length {
            return;
        }
        windows.began = Some(now);
        windows.was_needed = false;
        let peak = mem.ledger.restart_watermark();
        let needed = peak.max(std::mem::replace(&mut windows.before, peak));
        windows.needed = Some(needed);
        // From here on, waste is measured against the recent peak of live bytes.
        self.high_water = needed;
    }

    /// Returns the wholly free pages of streams on which an event can be recorded.
    fn free_pages<D: Driver>(&self, mem: &Mem<'_, D>) -> Vec<FreePage> {
        let mut free = Vec::new();
        // A graph may still run, on any stream, when its pool is released: its memory is given back
        // with the cache.
        for pool in [PoolTable::LARGE, PoolTable::SMALL] {
            let lanes = mem.heap[pool].lanes().filter(|&(stream, _)| mem.streams.lasts(stream));
            for (stream, lane) in lanes {
                let at = LaneId { pool, stream };
                // A smaller block contains no whole page.
                for id in lane.free().at_least(mem.device.granularity) {
                    if mem.kind_of(id) != Kind::Homes {
                        continue;
                    }
                    let GiveBack::Pages { start, end } = self.give_back(mem, &mem.heap[id]) else {
                        continue;
                    };
                    let mut home = start;
                    while home < end {
                        let page = mem.backing.page_around(home);
                        let (_, bytes, _) = page.expect("a page at home");
                        free.push(FreePage { home, bytes, lane: at });
                        home += bytes;
                    }
                }
            }
        }
        free
    }

    /// Notes since when pages have been free.
    fn note_free<D: Driver>(&mut self, mem: &Mem<'_, D>, pages: &[FreePage], now: Duration) {
        let windows = &mut self.windows;
        let before = std::mem::take(&mut windows.free_since);
        let detached = windows.detached.iter().flat_map(|detached| &detached.pages);
        let detached = detached.map(|&page| mem.heap[page].address);
        let homes = pages.iter().map(|page| page.home).chain(detached);
        windows.free_since =
            homes.map(|home| (home, before.get(&home).copied().unwrap_or(now))).collect();
    }

    /// Detaches at most `surplus` bytes of pages that have been free since `by`, and marks the work
    /// of the stream of each.
    fn detach_pages<D: Driver>(
        &mut self,
        mem: &mut Mem<'_, D>,
        mut pages: Vec<FreePage>,
        surplus: u64,
        by: Duration,
    ) -> DriverResult<()> {
        let windows = &self.windows;
        let waits = |stream| windows.detached.iter().any(|detached| detached.stream == stream);
        let since = |page: &FreePage| windows.free_since.get(&page.home).copied();
        let is_due = |page: &FreePage| since(page).is_some_and(|since| since <= by);
        pages.retain(|page| is_due(page) && !waits(page.lane.stream));
        // The longest free first; among equals the highest, which best fit takes last.
        pages.sort_unstable_by_key(|page| (since(page), Reverse(page.home)));
        let surplus = surplus.saturating_sub(self.detached_bytes(mem));
        let most = surplus >> windows.halvings;
        let mut taken = 0;
        let mut by_stream: BTreeMap<StreamId, Vec<FreePage>> = BTreeMap::new();
        let mut count = 0;
        for page in pages {
            let is_first = taken == 0 && page.bytes <= surplus;
            if count < MOST_PAGES && (is_first || taken + page.bytes <= most) {
                taken += page.bytes;
                count += 1;
                by_stream.entry(page.lane.stream).or_default().push(page);
            }
        }
        for (stream, pages) in by_stream {
            let Some(mark) = mem.mark(stream)? else { continue };
            let detach = |FreePage { home, bytes, lane }| {
                let id = mem.heap.lane(lane)?.free_at(home)?;
                mem.heap.detach(id, home, home + bytes);
                Some(id)
            };
            let pages = pages.into_iter().filter_map(detach).collect();
            let work = Marked::UnderWay(mark);
            self.windows.detached.push(DetachedPages { stream, work, pages });
        }
        Ok(())
    }
}
