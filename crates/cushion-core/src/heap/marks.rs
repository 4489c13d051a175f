//! Marks on a range of addresses: the units that changed since the last look. A pure data
//! structure.
//!
//! A change sets a few bits. A look takes the marked addresses, lowest first, and unmarks them.
//! Marking allocates no host memory: [`Marks::reach`] makes room beforehand.

use std::ops::Range;

/// Bits in a word.
const WORD: usize = u64::BITS as usize;

/// Marks from one address on, one for each unit of addresses.
#[derive(Debug)]
pub(crate) struct Marks {
    start: u64,
    /// The binary logarithm of the unit.
    shift: u32,
    words: Vec<u64>,
    /// All words with a mark lie between these two.
    low: usize,
    high: usize,
}

impl Marks {
    /// Creates marks for addresses from `start` on, in units of at most `unit` bytes.
    pub(crate) fn new(start: u64, unit: u64) -> Self {
        Self { start, shift: unit.ilog2(), words: Vec::new(), low: usize::MAX, high: 0 }
    }

    /// Makes room for marks on addresses before `end`.
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

    /// Marks a range, which must not be empty and must have room. Returns it together with adjacent
    /// marked addresses, as far as those are in the same words.
    pub(crate) fn mark(&mut self, range: Range<u64>) -> Range<u64> {
        let (mut first, mut last) = (self.unit_of(range.start), self.unit_of(range.end - 1));
        let (low, high) = (first / WORD, last / WORD);
        let (below, above) = (WORD - 1 - first % WORD, WORD - 1 - last % WORD);
        let (from, to) = (u64::MAX << (first % WORD), u64::MAX >> above);
        if low == high {
            self.words[low] |= from & to;
        } else {
            self.words[low] |= from;
            self.words[low + 1..high].fill(u64::MAX);
            self.words[high] |= to;
        }
        self.low = self.low.min(low);
        self.high = self.high.max(high);
        first -= (self.words[low] << below).leading_ones() as usize - 1;
        last += (self.words[high] >> (last % WORD)).trailing_ones() as usize - 1;
        self.address_of(first)..self.address_of(last + 1)
    }

    fn address_of(&self, unit: usize) -> u64 {
        self.start + ((unit as u64) << self.shift)
    }

    /// Takes the lowest contiguous marked addresses, and unmarks them.
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
        Some(self.address_of(word * WORD + first)..self.address_of(end * WORD + bit))
    }

    /// Returns whether any unit of a range is marked. The range must not be empty.
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
        /// They behave like a set of units.
        #[test]
        fn they_behave_like_a_set_of_units(
            steps in prop::collection::vec((0_u64..300, 1_u64..200, any::<bool>()), 1..60)
        ) {
            let mut marks = Marks::new(START, UNIT);
            let mut model = BTreeSet::new();
            for (from, length, takes) in steps {
                let range = START + from * UNIT + 7..START + (from + length) * UNIT - 9;
                marks.reach(range.end);
                let around = marks.mark(range.clone());
                model.extend(from..from + length);
                prop_assert!(around.start <= range.start && range.end <= around.end);
                let units = (around.start - START) / UNIT..(around.end - START) / UNIT;
                prop_assert!(units.clone().all(|unit| model.contains(&unit)), "{:?}", units);
                prop_assert!(marks.any(range));
                for unit in 0..510 {
                    let at = START + unit * UNIT;
                    prop_assert_eq!(marks.any(at..at + 1), model.contains(&unit));
                }
                if takes {
                    let mut last = 0;
                    while let Some(run) = marks.take() {
                        prop_assert!(run.start > last, "apart, and lowest first");
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
