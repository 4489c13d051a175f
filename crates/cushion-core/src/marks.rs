//! Marks on a range of addresses: which parts of it changed since somebody last looked. A pure data structure.
//!
//! Whoever changes something sets a few bits; whoever wants to know takes the marked parts, lowest first, and they are
//! unmarked. Setting takes nothing from the heap: room is made beforehand, as far as anything will change.

use std::ops::Range;

/// Bits in a word.
const WORD: usize = u64::BITS as usize;

/// Marks from one address on, one for each unit of addresses.
#[derive(Debug)]
pub(crate) struct Marks {
    start: u64,
    /// A unit is two to this power.
    shift: u32,
    words: Vec<u64>,
    /// No word outside of these has a mark.
    low: usize,
    high: usize,
}

impl Marks {
    /// For addresses from `start` on, as fine as `unit` at least.
    pub(crate) fn new(start: u64, unit: u64) -> Self {
        Self { start, shift: unit.ilog2(), words: Vec::new(), low: usize::MAX, high: 0 }
    }

    /// Makes room for marks on what lies before `end`.
    pub(crate) fn reach(&mut self, end: u64) {
        let words = self.unit_of(end - 1) / WORD + 1;
        if words > self.words.len() {
            self.words.resize(words, 0);
        }
    }

    #[expect(clippy::cast_possible_truncation, reason = "units of memory that is held")]
    fn unit_of(&self, address: u64) -> usize {
        ((address - self.start) >> self.shift) as usize
    }

    /// Marks what is not empty and what there is room for.
    #[inline]
    pub(crate) fn mark(&mut self, range: Range<u64>) {
        let (first, last) = (self.unit_of(range.start), self.unit_of(range.end - 1));
        // Most often it is marked already: the same memory is handed out again and again.
        let in_first = u64::MAX >> (WORD - 1 - last % WORD) & u64::MAX << (first % WORD);
        let is_marked = |word: &u64| word & in_first == in_first;
        if first / WORD != last / WORD || !self.words.get(first / WORD).is_some_and(is_marked) {
            self.mark_units(first, last);
        }
    }

    #[inline(never)]
    fn mark_units(&mut self, first: usize, last: usize) {
        let (low, high) = (first / WORD, last / WORD);
        let (from, to) = (u64::MAX << (first % WORD), u64::MAX >> (WORD - 1 - last % WORD));
        if low == high {
            self.words[low] |= from & to;
        } else {
            self.words[low] |= from;
            self.words[low + 1..high].fill(u64::MAX);
            self.words[high] |= to;
        }
        self.low = self.low.min(low);
        self.high = self.high.max(high);
    }

    /// Takes the lowest marks that lie together: what they are on.
    pub(crate) fn take(&mut self) -> Option<Range<u64>> {
        let Some(word) = (self.low..=self.high).find(|&word| self.words[word] != 0) else {
            (self.low, self.high) = (usize::MAX, 0);
            return None;
        };
        let first = self.words[word].trailing_zeros() as usize;
        let (mut end, mut bit) = (word, first);
        loop {
            let more = (self.words[end] >> bit).trailing_ones() as usize;
            self.words[end] &= !(u64::MAX >> (WORD - more) << bit);
            bit += more;
            if bit < WORD || end == self.high || self.words[end + 1] & 1 == 0 {
                break;
            }
            (end, bit) = (end + 1, 0);
        }
        self.low = end;
        let address = |unit: usize| self.start + ((unit as u64) << self.shift);
        Some(address(word * WORD + first)..address(end * WORD + bit))
    }

    /// Whether anything of a range that is not empty is marked.
    pub(crate) fn any(&self, range: Range<u64>) -> bool {
        let is_marked = |unit: usize| {
            self.words.get(unit / WORD).is_some_and(|word| word >> (unit % WORD) & 1 == 1)
        };
        (self.unit_of(range.start)..=self.unit_of(range.end - 1)).any(is_marked)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    const START: u64 = 1 << 40;
    const UNIT: u64 = 1 << 12;

    proptest! {
        /// The same as a set of units, whatever happens.
        #[test]
        fn they_are_a_set_of_units(
            steps in prop::collection::vec((0_u64..300, 1_u64..200, any::<bool>()), 1..60)
        ) {
            let mut marks = Marks::new(START, UNIT);
            let mut model = BTreeSet::new();
            for (from, length, takes) in steps {
                let range = START + from * UNIT + 7..START + (from + length) * UNIT - 9;
                marks.reach(range.end);
                marks.mark(range.clone());
                model.extend(from..from + length);
                prop_assert!(marks.any(range));
                for unit in 0..510 {
                    let at = START + unit * UNIT;
                    prop_assert_eq!(marks.any(at..at + 1), model.contains(&unit));
                }
                if takes {
                    let mut last = 0;
                    while let Some(run) = marks.take() {
                        prop_assert!(run.start > last, "runs do not touch, and the lowest is first");
                        last = run.end;
                        for unit in (run.start - START) / UNIT..(run.end - START) / UNIT {
                            prop_assert!(model.remove(&unit));
                        }
                    }
                    prop_assert!(model.is_empty());
                }
            }
        }
    }
}
