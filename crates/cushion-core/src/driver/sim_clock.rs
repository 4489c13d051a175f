//! Virtual time for a simulated device: each wait lets the device make one step.

use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use super::SimDriver;
use crate::base::clock::{Bell, Clock, VirtualClock};

/// A virtual clock on which every wait finishes the unfinished work that was queued first. The
/// clock does not model how long work takes.
#[derive(Debug)]
pub struct SimClock {
    time: VirtualClock,
    device: Arc<SimDriver>,
}

impl SimClock {
    /// Creates a clock that shows zero.
    #[must_use]
    pub fn new(device: Arc<SimDriver>) -> Self {
        Self { time: VirtualClock::new(), device }
    }

    /// Moves the clock forward. The device makes no step.
    pub fn advance(&self, duration: Duration) {
        self.time.advance(duration);
    }
}

impl Clock for SimClock {
    fn now(&self) -> Duration {
        self.time.now()
    }

    fn wait(&self, at_most: Duration, bell: &Bell) {
        self.device.finish_oldest();
        self.time.wait(at_most, bell);
    }

    fn wake_at(&self, at: Duration, waker: Waker) {
        self.time.wake_at(at, waker);
    }
}
