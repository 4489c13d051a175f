//! Real time for tests and simulations, where nobody waits but threads that block.

use std::task::Waker;
use std::time::{Duration, Instant};

use crate::{Bell, Clock};

/// Real time, from when the clock was made.
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

    /// At once: a future that waits would spin, which no test of threads that block has.
    fn wake_at(&self, _at: Duration, waker: Waker) {
        waker.wake();
    }
}
