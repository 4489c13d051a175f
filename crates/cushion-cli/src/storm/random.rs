//! Pseudo-random numbers by seed, the same on every machine.

use std::ops::RangeInclusive;

use cushion_core::random;

/// A pseudo-random generator.
#[derive(Debug, Clone)]
pub(crate) struct Random(random::Random);

impl Random {
    /// Makes an independent generator for each seed and purpose.
    pub(crate) fn new(seed: u64, purpose: u64) -> Self {
        let mixed = random::Random(seed).next();
        Self(random::Random(mixed ^ purpose.wrapping_mul(0xd6e8_feb8_6659_fd93)))
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0.next()
    }

    /// Returns a number in `range`, uniformly.
    pub(crate) fn within(&mut self, range: RangeInclusive<u64>) -> u64 {
        let (least, most) = range.into_inner();
        let span = most.saturating_sub(least).saturating_add(1);
        least + self.next() % span
    }

    /// Returns a number in `range`, with each power of two equally likely.
    pub(crate) fn skewed(&mut self, range: RangeInclusive<u64>) -> u64 {
        let (least, most) = range.into_inner();
        let (least, most) = (least.max(1), most.max(least).max(1));
        let power = self.within(u64::from(least.ilog2())..=u64::from(most.ilog2()));
        let (from, to) = (1 << power, (1_u64 << power) * 2 - 1);
        self.within(from.max(least)..=to.min(most))
    }

    /// Returns true once in `times` times on average.
    pub(crate) fn once_in(&mut self, times: u64) -> bool {
        self.next().is_multiple_of(times)
    }

    /// Returns an index below `count`.
    pub(crate) fn index(&mut self, count: usize) -> usize {
        debug_assert!(count > 0, "count is zero");
        usize::try_from(self.next() % count as u64).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_depend_only_on_seed_and_purpose() {
        let first = |seed, purpose| Random::new(seed, purpose).next();
        assert_eq!(first(1, 2), first(1, 2));
        assert_ne!(first(1, 2), first(2, 2));
        assert_ne!(first(1, 2), first(1, 3));
    }

    #[test]
    fn numbers_stay_in_their_range() {
        let mut random = Random::new(7, 0);
        let mut seen = [false; 4];
        for _ in 0..1000 {
            assert!((5..=9).contains(&random.within(5..=9)));
            assert!((3..=1000).contains(&random.skewed(3..=1000)));
            assert_eq!(random.skewed(6..=6), 6);
            seen[random.index(4)] = true;
        }
        assert_eq!(seen, [true; 4]);
    }
}
