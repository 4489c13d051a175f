//! The addresses of a lane that changed since the policy last looked at them. A pure data
//! structure.
//!
//! A hit and a free only mark the addresses that they change, a few bits each. The policy looks at
//! the marked addresses when it needs to, each once, however often they changed.

use std::ops::Range;

use super::marks::Marks;
use super::segment::SegmentId;

/// Addresses of one segment.
#[derive(Debug)]
struct Area {
    addresses: Range<u64>,
    segment: SegmentId,
    changed: Marks,
}

/// Addresses that the policy must look at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Changed {
    /// Some of these became free, are no longer free, or have other pages.
    Here(Range<u64>),
    /// The segment with these addresses was removed. Another lane may own them by now.
    Gone(Range<u64>),
}

/// The changes in the segments of one lane.
#[derive(Debug, Default)]
pub(crate) struct Dirty {
    /// Lowest first.
    areas: Vec<Area>,
    /// Addresses that are all marked: a change within them needs no look-up.
    marked: Range<u64>,
    /// Removed segments that the policy has not looked at since.
    gone: Vec<Range<u64>>,
}

impl Dirty {
    /// Adds the addresses of a segment, marked by units of `unit` bytes.
    pub(crate) fn add(&mut self, addresses: Range<u64>, segment: SegmentId, unit: u64) {
        let place = self.areas.partition_point(|it| it.addresses.start < addresses.start);
        let changed = Marks::new(addresses.start, unit);
        self.areas.insert(place, Area { addresses, segment, changed });
    }

    /// Removes the segment that begins at `start`, if it is known.
    pub(crate) fn remove(&mut self, start: u64) {
        if let Some(place) = self.areas.iter().position(|it| it.addresses.start == start) {
            self.marked = 0..0;
            self.gone.push(self.areas.remove(place).addresses);
        }
    }

    /// Makes room for marks on these addresses: pages are about to be mapped there.
    pub(crate) fn reach(&mut self, addresses: &Range<u64>) {
        if let Some(place) = self.place_of(addresses.start) {
            self.areas[place].changed.reach(addresses.end);
        }
    }

    /// Marks addresses, unless their segment is unknown.
    #[inline]
    pub(crate) fn mark(&mut self, addresses: Range<u64>) {
        // Usually they are marked already: the same memory is handed out again and again.
        if addresses.start < self.marked.start || self.marked.end < addresses.end {
            self.mark_anew(addresses);
        }
    }

    #[inline(never)]
    fn mark_anew(&mut self, addresses: Range<u64>) {
        if let Some(place) = self.place_of(addresses.start) {
            self.marked = self.areas[place].changed.mark(addresses);
        }
    }

    /// Returns the next addresses to look at, and unmarks them.
    pub(crate) fn take(&mut self) -> Option<Changed> {
        if let Some(gone) = self.gone.pop() {
            return Some(Changed::Gone(gone));
        }
        self.marked = 0..0;
        self.areas.iter_mut().find_map(|area| area.changed.take()).map(Changed::Here)
    }

    /// Returns whether any address of a range is marked or removed. The range must not be empty.
    pub(crate) fn any(&self, range: &Range<u64>) -> bool {
        let here = self.place_of(range.start);
        here.is_some_and(|place| self.areas[place].changed.any(range.clone()))
            || self.gone.iter().any(|gone| gone.contains(&range.start))
    }

    /// Returns the segment that contains an address.
    pub(crate) fn segment_at(&self, address: u64) -> Option<SegmentId> {
        self.place_of(address).map(|place| self.areas[place].segment)
    }

    fn place_of(&self, address: u64) -> Option<usize> {
        let after = self.areas.partition_point(|it| it.addresses.start <= address);
        after.checked_sub(1).filter(|&place| self.areas[place].addresses.contains(&address))
    }
}
