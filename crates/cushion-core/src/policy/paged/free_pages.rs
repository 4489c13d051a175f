//! The wholly or partly free pages of a lane, so that a plan for a new stitch need not look at
//! every free block. A pure data structure.
//!
//! It is brought up to date when a miss needs it: the heap reports the addresses that changed since
//! the last time, and each page there is looked at once, however often it changed.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::heap::{Changed, Dirty};

/// Free bytes of a page, and its home. The order puts the largest page last, and among equals the
/// lowest.
pub(super) type Key = (u64, Reverse<u64>);

/// How much of a page is free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Free {
    /// The size of the page.
    bytes: u64,
    /// Free bytes from its start on.
    beginning: u64,
    /// Free bytes up to its end. Both are the whole page, or neither is.
    end: u64,
}

/// The pages of one lane that are free in a way that a stitch can use.
#[derive(Debug)]
pub(super) struct FreePages {
    /// Whether only wholly free pages count.
    only_whole: bool,
    known: BTreeMap<u64, Free>,
    whole: BTreeSet<Key>,
    /// Partly free pages that are free up to their end.
    ends: BTreeSet<Key>,
    /// Partly free pages that are free from their start on.
    beginnings: BTreeSet<Key>,
    /// A buffer for the earlier entries of the pages being looked at.
    before: Vec<(u64, Free)>,
}

impl Free {
    fn is_whole(&self) -> bool {
        self.beginning == self.bytes
    }

    /// Returns how the page at `home` is free, if it is. `around` returns the free block that
    /// contains an address.
    fn of_page(
        home: u64,
        bytes: u64,
        only_whole: bool,
        mut around: impl FnMut(u64) -> Option<Range<u64>>,
    ) -> Option<Self> {
        let until = home + bytes;
        let first = around(home);
        let beginning = first.map_or(0, |free| free.end.min(until) - home);
        if beginning == bytes || only_whole {
            return (beginning == bytes).then_some(Self { bytes, beginning, end: bytes });
        }
        let end = around(until - 1).map_or(0, |free| until - free.start);
        (beginning > 0 || end > 0).then_some(Self { bytes, beginning, end })
    }
}

impl FreePages {
    pub(super) fn new(only_whole: bool) -> Self {
        Self {
            only_whole,
            known: BTreeMap::new(),
            whole: BTreeSet::new(),
            ends: BTreeSet::new(),
            beginnings: BTreeSet::new(),
            before: Vec::new(),
        }
    }

    /// Looks at the pages in the addresses that changed, and returns their number. `pages` returns
    /// the pages in a range, lowest first: start and size of each. `around` returns the free block
    /// that contains an address.
    pub(super) fn refresh<I: Iterator<Item = (u64, u64)>>(
        &mut self,
        changes: impl IntoIterator<Item = Changed>,
        pages: impl Fn(Range<u64>) -> I,
        around: impl Fn(u64) -> Option<Range<u64>>,
    ) -> u64 {
        let mut looked_at = 0;
        // Many adjacent pages lie in one free block.
        let mut latest = 0..0;
        let mut around = |address| {
            if !latest.contains(&address) {
                latest = around(address)?;
            }
            Some(latest.clone())
        };
        let mut before = std::mem::take(&mut self.before);
        for changed in changes {
            let changed = match changed {
                Changed::Here(changed) => changed,
                Changed::Gone(gone) => {
                    let known: Vec<u64> = self.known.range(gone).map(|(&home, _)| home).collect();
                    known.into_iter().for_each(|home| self.set(home, None));
                    continue;
                }
            };
            let mut pages = pages(changed.clone()).peekable();
            // A page that lies only partly in the changed addresses was there before.
            let from = pages.peek().map_or(changed.start, |&(home, _)| home.min(changed.start));
            before.extend(self.known.range(from..changed.end).map(|(&home, &free)| (home, free)));
            let mut known = before.drain(..).peekable();
            for (home, bytes) in pages {
                looked_at += 1;
                let free = Free::of_page(home, bytes, self.only_whole, &mut around);
                while let Some((gone, _)) = known.next_if(|&(it, _)| it < home) {
                    self.set(gone, None);
                }
                let was = known.next_if(|&(it, _)| it == home).map(|(_, free)| free);
                if was != free {
                    self.set(home, free);
                }
            }
            known.for_each(|(gone, _)| self.set(gone, None));
        }
        self.before = before;
        looked_at
    }

    /// Sets or removes the entry of a page.
    fn set(&mut self, home: u64, free: Option<Free>) {
        let was = match free {
            Some(free) => self.known.insert(home, free),
            None => self.known.remove(&home),
        };
        let key = |free: u64| (free, Reverse(home));
        if let Some(was) = was {
            if was.is_whole() {
                self.whole.remove(&key(was.bytes));
            } else {
                self.ends.remove(&key(was.end));
                self.beginnings.remove(&key(was.beginning));
            }
        }
        match free {
            Some(free) if free.is_whole() => {
                self.whole.insert(key(free.bytes));
            }
            Some(free) => {
                if free.end > 0 {
                    self.ends.insert(key(free.end));
                }
                if free.beginning > 0 {
                    self.beginnings.insert(key(free.beginning));
                }
            }
            None => {}
        }
    }

    // ---- as of the last look ----

    /// Returns the wholly free pages, largest first, and among equals lowest first.
    pub(super) fn whole(&self) -> impl Iterator<Item = Key> {
        self.whole.iter().rev().copied()
    }

    /// Returns the smallest wholly free page of at least `least` bytes, and among equals the
    /// highest.
    pub(super) fn smallest_whole(&self, least: u64) -> Option<Key> {
        self.whole.range((least, Reverse(u64::MAX))..).next().copied()
    }

    /// Returns the free ends, largest first, and among equals lowest first.
    pub(super) fn ends(&self) -> impl Iterator<Item = Key> {
        self.ends.iter().rev().copied()
    }

    /// Returns the free starts, in the same order.
    pub(super) fn beginnings(&self) -> impl Iterator<Item = Key> {
        self.beginnings.iter().rev().copied()
    }

    /// Returns whether the entries agree with pages and free blocks, except at addresses marked as
    /// changed: for the invariant check. `homes` are all addresses in which pages of the lane have
    /// their homes.
    pub(super) fn agrees<I: Iterator<Item = (u64, u64)>>(
        &self,
        homes: impl Iterator<Item = Range<u64>>,
        dirty: &Dirty,
        pages: impl Fn(Range<u64>) -> I,
        around: impl Fn(u64) -> Option<Range<u64>>,
    ) -> bool {
        let mut known = self.known.clone();
        for addresses in homes {
            for (home, bytes) in pages(addresses) {
                let free = Free::of_page(home, bytes, self.only_whole, &around);
                if known.remove(&home) != free && !dirty.any(&(home..home + bytes)) {
                    return false;
                }
            }
        }
        // A page that no longer exists was marked when it was unmapped.
        known.retain(|home, free| !dirty.any(&(*home..*home + free.bytes)));
        let count =
            |is_counted: fn(&Free) -> bool| self.known.values().filter(|it| is_counted(it)).count();
        let sizes = [self.whole.len(), self.ends.len(), self.beginnings.len()];
        let expected = [
            count(Free::is_whole),
            count(|free| !free.is_whole() && free.end > 0),
            count(|free| !free.is_whole() && free.beginning > 0),
        ];
        known.is_empty() && sizes == expected
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::heap::segment::SegmentId;

    const UNIT: u64 = 2048;
    const UNITS: u64 = 100;
    const STARTS: [u64; 2] = [1 << 30, 1 << 31];

    /// A model of pages and free bytes, in the simplest form.
    #[derive(Debug, Default)]
    struct Model {
        pages: BTreeMap<u64, u64>,
        /// Free blocks: start and end. Neighbours have merged.
        free: BTreeMap<u64, u64>,
    }

    impl Model {
        fn pages(&self, range: Range<u64>) -> impl Iterator<Item = (u64, u64)> {
            let pages = self.pages.iter().map(|(&home, &bytes)| (home, bytes));
            pages.filter(move |&(home, bytes)| home < range.end && range.start < home + bytes)
        }

        fn around(&self, address: u64) -> Option<Range<u64>> {
            let (&start, &end) = self.free.range(..=address).next_back()?;
            (address < end).then_some(start..end)
        }

        fn is_mapped(&self, range: &Range<u64>) -> bool {
            let bytes =
                |(home, bytes): (u64, u64)| (home + bytes).min(range.end) - home.max(range.start);
            self.pages(range.clone()).map(bytes).sum::<u64>() == range.end - range.start
        }

        /// Marks a range as free or not free.
        fn set(&mut self, range: &Range<u64>, is_free: bool) {
            let mut parts = Vec::new();
            let (mut start, mut end) = (range.start, range.end);
            for (at, until) in std::mem::take(&mut self.free) {
                if until < range.start || range.end < at {
                    parts.push((at, until));
                } else if is_free {
                    (start, end) = (start.min(at), end.max(until));
                } else {
                    parts.push((at, range.start.min(until)));
                    parts.push((range.end.max(at), until));
                }
            }
            if is_free {
                parts.push((start, end));
            }
            self.free = parts.into_iter().filter(|(start, end)| start < end).collect();
        }

        /// Maps, unmaps or splits pages, or hands out or frees bytes of them, and marks the
        /// changes.
        fn change(&mut self, dirty: &mut Dirty, kind: u8, homes: Range<u64>, at: u64, length: u64) {
            let quarter = homes.start + at * UNIT / 4;
            let unit = homes.start + at / 4 * UNIT;
            match kind {
                // Pages are mapped.
                0..=2 => {
                    let range = unit..(unit + length % 9 * UNIT + UNIT).min(homes.end);
                    if self.pages(range.clone()).next().is_none() {
                        dirty.reach(&range);
                        self.pages.insert(range.start, range.end - range.start);
                        self.set(&range, true);
                        dirty.mark(range);
                    }
                }
                // Pages are unmapped or split.
                3 => {
                    let page = self.pages(quarter..quarter + 1).next();
                    if let Some((home, bytes)) = page {
                        let range = home..home + bytes;
                        self.pages.remove(&home);
                        let keep = length * UNIT;
                        if keep < bytes {
                            self.pages.insert(home, keep);
                            self.pages.insert(home + keep, bytes - keep);
                        } else {
                            self.set(&range, false);
                        }
                        dirty.mark(range);
                    }
                }
                // Bytes of pages are handed out and freed.
                _ => {
                    let range = quarter..(quarter + length * UNIT / 4).min(homes.end);
                    if self.is_mapped(&range) {
                        self.set(&range, kind.is_multiple_of(2));
                        dirty.mark(range);
                    }
                }
            }
        }

        /// Returns the free pages by a look at everything: whole, ends, starts.
        fn keys(&self, only_whole: bool) -> [Vec<Key>; 3] {
            let mut keys = [const { Vec::new() }; 3];
            for (&home, &bytes) in &self.pages {
                let end = home + bytes;
                let first = self.around(home).map_or(0, |it| it.end.min(end) - home);
                let last = self.around(end - 1).map_or(0, |it| end - it.start.max(home));
                if first == bytes {
                    keys[0].push((bytes, Reverse(home)));
                } else if !only_whole {
                    keys[1].extend((last > 0).then_some((last, Reverse(home))));
                    keys[2].extend((first > 0).then_some((first, Reverse(home))));
                }
            }
            keys.iter_mut().for_each(|keys| keys.sort_unstable_by_key(|&key| Reverse(key)));
            keys
        }
    }

    proptest! {
        /// The entries equal those of a look at every page and every free block.
        #[test]
        fn it_equals_a_look_at_everything(
            only_whole: bool,
            steps in prop::collection::vec(
                (0_u8..8, 0_usize..2, 0..UNITS * 4, 1..UNITS, any::<bool>()), 1..80)
        ) {
            let mut free_pages = FreePages::new(only_whole);
            let mut dirty = Dirty::default();
            let mut model = Model::default();
            for start in STARTS {
                let segment = SegmentId::new(u32::from(start == STARTS[1]));
                dirty.add(start..start + UNITS * UNIT, segment, UNIT);
            }
            for (kind, which, at, length, looks) in steps {
                let start = STARTS[which];
                let end = start + UNITS * UNIT;
                model.change(&mut dirty, kind, start..end, at, length);
                // Addresses outside all homes.
                dirty.mark(end..end + UNIT);
                let homes = || STARTS.into_iter().map(|start| start..start + UNITS * UNIT);
                let agrees = |it: &FreePages, dirty: &Dirty| {
                    it.agrees(homes(), dirty, |range| model.pages(range), |at| model.around(at))
                };
                prop_assert!(agrees(&free_pages, &dirty));
                if looks {
                    let changes = std::iter::from_fn(|| dirty.take());
                    free_pages.refresh(changes, |range| model.pages(range), |at| model.around(at));
                    prop_assert!(agrees(&free_pages, &dirty));
                    let [whole, ends, beginnings] = model.keys(only_whole);
                    prop_assert_eq!(free_pages.whole().collect::<Vec<_>>(), &whole[..]);
                    prop_assert_eq!(free_pages.ends().collect::<Vec<_>>(), ends);
                    prop_assert_eq!(free_pages.beginnings().collect::<Vec<_>>(), beginnings);
                    let least = length * UNIT / 2;
                    let smallest = whole.iter().rfind(|(bytes, _)| *bytes >= least);
                    prop_assert_eq!(free_pages.smallest_whole(least), smallest.copied());
                    for (_, Reverse(home)) in whole {
                        let segment = SegmentId::new(u32::from(home >= STARTS[1]));
                        prop_assert_eq!(dirty.segment_at(home), Some(segment));
                    }
                    let changes = std::iter::from_fn(|| dirty.take());
                    let again = free_pages
                        .refresh(changes, |range| model.pages(range), |at| model.around(at));
                    prop_assert_eq!(again, 0, "nothing changed since");
                }
            }
            dirty.remove(STARTS[0]);
            let changes = std::iter::from_fn(|| dirty.take());
            free_pages.refresh(changes, |range| model.pages(range), |at| model.around(at));
            prop_assert!(free_pages.known.keys().all(|&home| home >= STARTS[1]));
        }
    }
}
