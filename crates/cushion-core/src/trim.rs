//! Giving back by itself: what a program has not needed for a while goes back to the driver, while it runs on.
//!
//! Time goes in windows. What is held beyond the most that was live in this window and the one before was not needed
//! for a whole window at least: so many bytes of wholly free pages go, the largest first. They are taken out of their
//! lane, so that nobody gets them, then their streams are waited for with no lock held, then they are unmapped a few at
//! a time. Only pages of `paged` go: the other policies keep what PyTorch would keep.

use std::time::Duration;

use crate::block::{BlockId, BlockState};
use crate::driver::{Driver, DriverResult, StreamId};
use crate::engine::Engine;
use crate::history::Context;
use crate::locked::Locked;
use crate::policy::GiveBack;
use crate::segment::Backing;

/// How many pages are unmapped before others get the lock: some hundreds of microseconds.
const AT_ONCE: usize = 4;

/// What is not worth giving back: this part of what is held.
const NOT_WORTH: u64 = 64;

/// The most that was live, by windows.
#[derive(Debug, Default)]
pub(crate) struct Windows {
    /// When the one that is under way began.
    began: Option<Duration>,
    /// The most that was live in it, and in the one before.
    pub(crate) peak: u64,
    before: u64,
}

impl<D: Driver> Engine<D> {
    /// Gives back what has not been needed for a while, by the option `trim_ms`; returns how many bytes. To be called
    /// now and then: less than that time after the last window ended it does nothing. Waits for the device, but holds
    /// no lock meanwhile.
    pub fn trim(&self) -> DriverResult<u64> {
        let now = self.clock.now();
        let Some(_no_capture_begins) = self.outside_captures() else { return Ok(0) };
        let surplus = self.locked(|mut engine| engine.end_window(now));
        if surplus == 0 {
            return Ok(0);
        }
        let (pages, streams) = self.locked(|mut engine| engine.detach_pages(surplus));
        let drained = self.drain(&streams);
        let mut given_back = 0;
        for some in pages.chunks(AT_ONCE) {
            given_back += self.locked(|mut engine| {
                some.iter().map(|&page| engine.page_goes(page, drained.is_ok())).sum::<u64>()
            });
        }
        if !pages.is_empty() {
            self.wake();
        }
        drained.map(|_| given_back)
    }
}

impl<D: Driver> Locked<'_, D> {
    /// Ends the window, if its time is up; returns what was held all the time and not needed.
    fn end_window(&mut self, now: Duration) -> u64 {
        let length = Duration::from_millis(self.state.options.trim_ms);
        let live = self.counters.active_bytes.current();
        let windows = &mut self.state.homes.windows;
        let began = *windows.began.get_or_insert(now);
        if length.is_zero() || now.saturating_sub(began) < length {
            return 0;
        }
        windows.began = Some(now);
        let peak = std::mem::replace(&mut windows.peak, live);
        let needed = peak.max(std::mem::replace(&mut windows.before, peak));
        // From here on, waste is measured by what was live lately.
        self.state.homes.high_water = needed;
        let held = self.reserved();
        let surplus = held.saturating_sub(needed);
        if surplus > held / NOT_WORTH { surplus } else { 0 }
    }

    /// Takes wholly free pages out of their lanes, `most` bytes at most, the largest first; and their streams.
    fn detach_pages(&mut self, most: u64) -> (Vec<BlockId>, Vec<StreamId>) {
        let mut free = Vec::new();
        for half in self.halves_to_give_back() {
            for id in self.state.pools[half].free_blocks() {
                let block = &self.state.blocks[id];
                if self.state.segments[block.segment].backing != Backing::Homes {
                    continue;
                }
                let GiveBack::Pages { start, end } = self.may_give_back(id) else { continue };
                let mut at = start;
                while at < end {
                    let (_, bytes, _) = self.state.pages.page_around(at).expect("a page at home");
                    free.push((bytes, at, half, block.stream));
                    at += bytes;
                }
            }
        }
        free.sort_unstable_by_key(|&(bytes, at, ..)| (std::cmp::Reverse(bytes), at));
        let mut left = most;
        let (mut pages, mut streams) = (Vec::new(), Vec::new());
        for (bytes, at, half, stream) in free {
            if bytes > left {
                continue;
            }
            let lane = self.state.pools[half].lane(stream);
            let Some(id) = lane.and_then(|lane| lane.free_at(at)) else { continue };
            self.cut_free(id, at, at + bytes);
            self.state.blocks[id].state = BlockState::Leaving;
            pages.push(id);
            streams.push(stream);
            left -= bytes;
        }
        streams.sort_unstable();
        streams.dedup();
        (pages, streams)
    }

    /// A page that was taken out of its lane goes to the driver, or, if it may not or the driver fails, back to its
    /// lane; returns its bytes if it went.
    fn page_goes(&mut self, id: BlockId, may_go: bool) -> u64 {
        if !may_go {
            self.merge_free(id);
            return 0;
        }
        let before = self.reserved();
        self.insert_free(id);
        if self.unmap_block(id, Context::NONE).is_err() && self.state.blocks[id].is_free() {
            let block = &self.state.blocks[id];
            let (size, address, pool, stream) =
                (block.size, block.address, block.pool, block.stream);
            self.state.pools[pool].lane_mut(stream).remove_free(size, address);
            self.merge_free(id);
        }
        before.saturating_sub(self.reserved())
    }
}
