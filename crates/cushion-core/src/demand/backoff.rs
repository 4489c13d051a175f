//! Exponential backoff: each pause is longer than the last, up to a ceiling, and half of it is
//! random.

use std::time::Duration;

use crate::base::random::Random;
use crate::options::Options;

/// The pauses of one request.
#[derive(Debug, Clone)]
pub(crate) struct Backoff {
    next: Duration,
    factor: f64,
    ceiling: Duration,
    random: Random,
}

impl Backoff {
    /// Returns the pauses that the options ask for. The same seed gives the same pauses.
    pub(crate) fn new(options: &Options, seed: u64) -> Self {
        Self {
            next: Duration::from_micros(options.wait_base_us),
            factor: options.wait_factor,
            ceiling: Duration::from_millis(options.wait_ceiling_ms),
            random: Random(seed),
        }
    }

    /// Returns the next pause.
    pub(crate) fn pause(&mut self) -> Duration {
        let whole = self.next.min(self.ceiling);
        let longer = Duration::try_from_secs_f64(whole.as_secs_f64() * self.factor);
        self.next = longer.unwrap_or(self.ceiling).min(self.ceiling);
        let half = whole / 2;
        half + half.mul_f64(self.random.share())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_the_ceiling_and_differ_by_seed() {
        let options = Options {
            wait_base_us: 100,
            wait_factor: 2.0,
            wait_ceiling_ms: 1,
            ..Options::default()
        };
        let pauses = |seed| {
            let mut backoff = Backoff::new(&options, seed);
            (0..8).map(|_| backoff.pause()).collect::<Vec<_>>()
        };
        let first = pauses(1);
        for (index, pause) in first.iter().enumerate() {
            let whole = Duration::from_micros(100 << index).min(Duration::from_millis(1));
            assert!((whole / 2..=whole).contains(pause), "{index}: {pause:?} of {whole:?}");
        }
        assert_eq!(first, pauses(1));
        assert_ne!(first, pauses(2));
    }
}
