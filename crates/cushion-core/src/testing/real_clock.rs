//! Real time, for tests and simulations in which only threads wait, not futures.

use std::task::Waker;
use std::time::{Duration, Instant};

use crate::{Bell, Clock};

/// A clock that shows the real time since its creation.
#[derive(Debug)]
pub struct RealClock(Instant);

impl Default for RealClock {
    #[expect(clippy::disallowed_methods, reason = "a clock for tests and simulations")]
    fn default() -> Self {
        Self(Instant::now())
    }
}

impl Clock for RealClock {
    fn now(&self) -> Duration {
        self.0.elapsed()
    }

    fn wait(&self, at_most: Duration, bell: &Bell) {
        bell.wait_at_most(at_most);
    }

    /// Wakes the future at once. A waiting future would spin; tests of blocking threads have none.
    fn wake_at(&self, _at: Duration, waker: Waker) {
        waker.wake();
    }
}
