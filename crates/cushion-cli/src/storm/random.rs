//! Chance by seed: the same numbers on every machine, and others for every seed.

use std::ops::RangeInclusive;

use cushion_core::random;

/// Numbers that only look like chance.
#[derive(Debug, Clone)]
pub(crate) struct Random(random::Random);

impl Random {
    /// A source of its own for each seed and purpose: neighbouring ones have nothing in common.
    pub(crate) fn new(seed: u64, purpose: u64) -> Self {
        let mixed = random::Random(seed).next();
        Self(random::Random(mixed ^ purpose.wrapping_mul(0xd6e8_feb8_6659_fd93)))
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0.next()
    }

    /// From `range`, each as likely.
    pub(crate) fn within(&mut self, range: RangeInclusive<u64>) -> u64 {
        let (least, most) = range.into_inner();
        let span = most.saturating_sub(least).saturating_add(1);
        least + self.next() % span
    }

    /// From `range`, each power of two as likely: the small ones as often as the large.
    pub(crate) fn skewed(&mut self, range: RangeInclusive<u64>) -> u64 {
        let (least, most) = range.into_inner();
        let (least, most) = (least.max(1), most.max(least).max(1));
        let power = self.within(u64::from(least.ilog2())..=u64::from(most.ilog2()));
        let (from, to) = (1 << power, (1_u64 << power) * 2 - 1);
        self.within(from.max(least)..=to.min(most))
    }

    /// True once in so many times.
    pub(crate) fn once_in(&mut self, times: u64) -> bool {
        self.next().is_multiple_of(times)
    }

    /// One of so many.
    pub(crate) fn index(&mut self, count: usize) -> usize {
        debug_assert!(count > 0, "one of none");
        usize::try_from(self.next() % count as u64).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_depend_on_the_seed_and_the_purpose_alone() {
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
