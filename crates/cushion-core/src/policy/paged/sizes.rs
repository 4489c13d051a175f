//! The sizes of fresh pages. Pure functions.
//!
//! Large pages cost fewer driver calls, small ones waste less. Pages grow with the live bytes of
//! the program, and shrink when little of the limit is left.

use crate::base::size::{MIB, SMALL_SEGMENT, round_up};
use crate::options::Options;

/// A page is at most one in this many of the peak live bytes.
const PARTS_OF_LIVE: u64 = 24;

/// The same while a program loads.
const PARTS_OF_LOADED: u64 = 8;

/// Near the limit, a page is at most one in this many of the bytes left.
const PARTS_OF_ROOM: u64 = 256;

/// The largest pages for small requests.
const MOST_SMALL: u64 = 8 * MIB;

/// The sizes of fresh pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PageSizes {
    /// The largest.
    most: u64,
    /// The largest while a program loads memory that it keeps.
    loading: u64,
}

impl PageSizes {
    /// Returns the sizes that the options ask for, but no larger than a fraction of `high_water`,
    /// the peak of live bytes. If more than half of `limit` is held, also no larger than a fraction
    /// of the bytes left, so that these are not wasted on half-used pages.
    pub(super) fn asked_for(options: &Options, high_water: u64, held: u64, limit: u64) -> Self {
        let part =
            |parts: u64| (high_water / parts).next_multiple_of(SMALL_SEGMENT).max(SMALL_SEGMENT);
        let most = options.page_size.min(part(PARTS_OF_LIVE));
        let loading = (options.page_size + 20 * MIB).min(part(PARTS_OF_LOADED));
        let cut = Self::cut(held, limit).unwrap_or(u64::MAX);
        Self { most: most.min(cut), loading: loading.min(cut) }
    }

    /// Returns whether pages are smaller than the options ask for, because little of `limit` is
    /// left.
    pub(super) fn are_cut(options: &Options, held: u64, limit: u64) -> bool {
        Self::cut(held, limit).is_some_and(|cut| cut < options.page_size)
    }

    /// Returns the largest size near the limit, if more than half of `limit` is held.
    fn cut(held: u64, limit: u64) -> Option<u64> {
        let part = limit.saturating_sub(held) / PARTS_OF_ROOM / SMALL_SEGMENT;
        (held >= limit / 2).then_some(part.max(1) * SMALL_SEGMENT)
    }

    /// Returns the fresh pages for `missing` bytes, on a device whose page sizes are multiples of
    /// `unit`: the size of each, and the bytes of all together, of which the last page may be a
    /// smaller rest. If whole pages would exceed `most` bytes, only the missing bytes. `small` is
    /// the bytes that a lane for small requests holds: its pages grow with it, because they become
    /// empty one by one.
    pub(super) fn of(
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
