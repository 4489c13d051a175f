//! Time and waiting, behind a trait: the engine never reads a clock of its own, so budgets and
//! backoff can be tested by seed on virtual time.

use std::fmt::Debug;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Where the engine gets the time from, and how it waits.
pub trait Clock: Debug + Send + Sync {
    /// Time since an origin of the clock's own choosing; never goes back.
    fn now(&self) -> Duration;

    /// Returns after `duration` has passed on this clock. Never called with a lock held.
    fn wait(&self, duration: Duration);
}

/// A clock that moves only when told to, or when somebody waits on it.
#[derive(Debug, Default)]
pub struct VirtualClock {
    nanos: AtomicU64,
}

impl VirtualClock {
    /// A clock at zero.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Moves the clock forward.
    pub fn advance(&self, duration: Duration) {
        let nanos = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        self.nanos.fetch_add(nanos, Ordering::AcqRel);
    }
}

impl Clock for VirtualClock {
    fn now(&self) -> Duration {
        Duration::from_nanos(self.nanos.load(Ordering::Acquire))
    }

    fn wait(&self, duration: Duration) {
        self.advance(duration);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn virtual_time_moves_only_by_waiting() {
        let clock = VirtualClock::new();
        assert_eq!(clock.now(), Duration::ZERO);
        clock.wait(Duration::from_millis(3));
        clock.advance(Duration::from_millis(4));
        assert_eq!(clock.now(), Duration::from_millis(7));
    }
}
