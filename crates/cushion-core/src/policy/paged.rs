//! `paged`: addresses are plentiful, pages are not.
//!
//! Every page has one home address for as long as it is held; the homes of a lane lie end to end, so that free
//! memory merges as in one large segment, and a hit is plain best fit. Where no free block serves a request though
//! there is free memory enough, pieces of it get a second address side by side: they are stitched (see
//! [`crate::stitch`]). Only what is missing then is asked of the driver.

use super::{GiveBack, Request, Rules, Source, View};
use crate::block::{Block, BlockId};
use crate::options::Options;
use crate::pool::Lane;
use crate::segment::Backing;
use crate::size::{MIB, MIN_BLOCK, SMALL_SEGMENT, round_up};

#[derive(Debug)]
pub(super) struct Paged;

impl Rules for Paged {
    fn stitches(&self) -> bool {
        true
    }

    fn choose(&self, _view: View<'_>, lane: &Lane, size: u64) -> Option<BlockId> {
        lane.free().at_least(size).next()
    }

    fn splits(&self, _view: View<'_>, block: &Block, size: u64, _small: bool) -> bool {
        block.size - size >= MIN_BLOCK
    }

    fn source(&self, _view: View<'_>, _lane: Option<&Lane>, _request: &Request) -> Source {
        Source::Home
    }

    /// Some of the pages may be there.
    fn needed(&self, size: u64, _wanted: u64) -> u64 {
        size
    }

    fn give_back(&self, view: View<'_>, block: &Block) -> GiveBack {
        if view.segments[block.segment].backing != Backing::Homes {
            return GiveBack::Nothing;
        }
        let page_around = |address| view.pages.page_around(address).expect("a page at home");
        // Whole pages only.
        let page = page_around(block.address);
        let (first, bytes, _) = page;
        let start = if first == block.address { first } else { first + bytes };
        let is_in_one = block.end() <= first + bytes;
        let (last, bytes, _) = if is_in_one { page } else { page_around(block.end() - 1) };
        let end = if last + bytes == block.end() { block.end() } else { last };
        if start < end { GiveBack::Pages { start, end } } else { GiveBack::Nothing }
    }
}

/// A page is at most this part of what was live.
const PARTS_OF_LIVE: u64 = 24;

/// The same while a program loads.
const PARTS_OF_LOADED: u64 = 8;

/// Near the limit, a page is at most this part of what is left.
const PARTS_OF_ROOM: u64 = 256;

/// The largest pages for small requests.
const MOST_SMALL: u64 = 8 * MIB;

/// How large pages are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PageSizes {
    /// The largest.
    most: u64,
    /// While a program loads what it will not free.
    loading: u64,
}

impl PageSizes {
    /// As options ask for them, but no larger than a part of `high_water`, the most that was live; and where more than
    /// half of `limit` is held, no larger than a part of what is left, so that the last of it is not wasted on
    /// pages that are half used.
    pub(crate) fn asked_for(options: &Options, high_water: u64, held: u64, limit: u64) -> Self {
        let part =
            |parts: u64| (high_water / parts).next_multiple_of(SMALL_SEGMENT).max(SMALL_SEGMENT);
        let most = options.page_size.min(part(PARTS_OF_LIVE));
        let loading = (options.page_size + 20 * MIB).min(part(PARTS_OF_LOADED));
        let cut = Self::cut(held, limit).unwrap_or(u64::MAX);
        Self { most: most.min(cut), loading: loading.min(cut) }
    }

    /// Whether they are smaller than options ask for, because little of `limit` is left.
    pub(crate) fn are_cut(options: &Options, held: u64, limit: u64) -> bool {
        Self::cut(held, limit).is_some_and(|cut| cut < options.page_size)
    }

    /// What they are cut to, if more than half of `limit` is held.
    fn cut(held: u64, limit: u64) -> Option<u64> {
        let part = limit.saturating_sub(held) / PARTS_OF_ROOM / SMALL_SEGMENT;
        (held >= limit / 2).then_some(part.max(1) * SMALL_SEGMENT)
    }

    /// What fresh pages to make where `missing` bytes are, on a device with pages of multiples of `unit`: the size of
    /// each, and of all together, of which the last page may be a smaller rest. Where there is no room for as much as
    /// whole ones would be, `most`, they are what is missing. `small` is what a lane for small requests holds: its
    /// pages grow with it, for they are emptied one by one.
    pub(crate) fn of(
        &self,
        small: Option<u64>,
        loading: bool,
        missing: u64,
        most: u64,
        unit: u64,
    ) -> Option<(u64, u64)> {
        let least = round_up(missing, unit)?;
        let (page, rounds) = match (small, loading) {
            (Some(held), _) => ((held / 2).clamp(SMALL_SEGMENT, MOST_SMALL), true),
            (None, true) => (self.loading, true),
            (None, false) => (self.most, false),
        };
        let page = round_up(page, unit)?;
        let whole = round_up(least, page)?;
        Some((page, if rounds && whole <= most { whole } else { least }))
    }
}
