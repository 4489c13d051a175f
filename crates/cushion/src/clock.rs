//! Real time for the engine.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use cushion_core::Clock;

/// Time since the Unix epoch as it was when the clock was made; from then on it never goes back, even
/// if somebody sets the system's clock.
#[derive(Debug, Clone, Copy)]
pub struct SystemClock {
    made: Instant,
    made_at: Duration,
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl SystemClock {
    /// A clock that starts now.
    #[must_use]
    #[expect(
        clippy::disallowed_methods,
        reason = "this is the clock that everybody else goes through"
    )]
    pub fn new() -> Self {
        let made_at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { made: Instant::now(), made_at }
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Duration {
        self.made_at + self.made.elapsed()
    }

    #[expect(
        clippy::disallowed_methods,
        reason = "this is the clock that everybody else goes through"
    )]
    fn wait(&self, duration: Duration) {
        std::thread::sleep(duration);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_is_of_this_century_and_moves_on() {
        let clock = SystemClock::new();
        let before = clock.now();
        assert!(before > Duration::from_secs(1_600_000_000));
        clock.wait(Duration::from_millis(2));
        assert!(clock.now() >= before + Duration::from_millis(2));
    }
}
