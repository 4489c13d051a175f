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

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    const UNIT: u64 = 1 << 12;
    /// Units in a segment; the next segment begins right after it.
    const UNITS: u64 = 150;
    const SEGMENTS: u64 = 4;

    fn address(segment: u64, unit: u64) -> u64 {
        (1 << 40) + (segment * UNITS + unit) * UNIT
    }

    fn whole(segment: u64) -> Range<u64> {
        address(segment, 0)..address(segment + 1, 0)
    }

    /// What should be known.
    #[derive(Default)]
    struct Model {
        segments: BTreeSet<u64>,
        marked: BTreeSet<u64>,
        gone: Vec<Range<u64>>,
    }

    impl Model {
        fn take(&mut self, changed: Changed) {
            match changed {
                Changed::Gone(range) => {
                    let known = self.gone.iter().position(|gone| *gone == range);
                    self.gone.remove(known.expect("a removed segment is reported once"));
                }
                Changed::Here(range) => {
                    assert!(self.gone.is_empty(), "removed segments come first");
                    let units = (range.end - range.start) / UNIT;
                    for unit in 0..units {
                        let at = range.start + unit * UNIT;
                        assert!(self.marked.remove(&at), "{at:#x} did not change");
                    }
                }
            }
        }
    }

    #[test]
    fn a_new_segment_at_the_addresses_of_an_old_one_has_marks_of_its_own() {
        let mut dirty = Dirty::default();
        for number in 0..2 {
            dirty.add(whole(0), SegmentId::new(number), UNIT);
            dirty.reach(&whole(0));
            dirty.mark(whole(0));
            assert!(dirty.any(&whole(0)), "marked in the segment before");
            if number == 0 {
                dirty.remove(address(0, 0));
                assert_eq!(dirty.take(), Some(Changed::Gone(whole(0))));
                assert!(!dirty.any(&whole(0)), "reported once");
            }
        }
        assert_eq!(dirty.take(), Some(Changed::Here(whole(0))));
        assert_eq!(dirty.take(), None);
    }

    proptest! {
        /// Each change is reported once, and nothing else is; a removed segment is reported once,
        /// before all changes.
        #[test]
        fn each_change_is_reported_once(
            steps in prop::collection::vec((0..9, 0..SEGMENTS, 0..UNITS, 1..UNITS), 1..100)
        ) {
            let mut dirty = Dirty::default();
            let mut model = Model::default();
            for (step, segment, first, count) in steps {
                let id = SegmentId::new(u32::try_from(segment).unwrap());
                match step {
                    0 | 1 if model.segments.insert(segment) => {
                        dirty.add(whole(segment), id, UNIT);
                        dirty.reach(&whole(segment));
                    }
                    2 => {
                        dirty.remove(address(segment, 0));
                        if model.segments.remove(&segment) {
                            model.gone.push(whole(segment));
                        }
                        model.marked.retain(|at| !whole(segment).contains(at));
                    }
                    3 => {
                        if let Some(changed) = dirty.take() {
                            model.take(changed);
                        } else {
                            prop_assert!(model.marked.is_empty() && model.gone.is_empty());
                        }
                    }
                    4 => {
                        while let Some(changed) = dirty.take() {
                            model.take(changed);
                        }
                        prop_assert!(model.marked.is_empty() && model.gone.is_empty());
                    }
                    _ => {
                        let last = (first + count).min(UNITS);
                        dirty.mark(address(segment, first) + 5..address(segment, last) - 3);
                        if model.segments.contains(&segment) {
                            model.marked.extend((first..last).map(|at| address(segment, at)));
                        }
                    }
                }
                let known = dirty.segment_at(address(segment, first));
                prop_assert_eq!(known, model.segments.contains(&segment).then_some(id));
                let at = address(segment, first);
                let is_gone = model.gone.iter().any(|gone| gone.contains(&at));
                let expected = model.marked.contains(&at) || is_gone;
                prop_assert_eq!(dirty.any(&(at..at + UNIT)), expected);
            }
        }
    }
}
