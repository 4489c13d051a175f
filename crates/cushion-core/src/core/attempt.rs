//! How an attempt to serve a request ended.

use std::time::Duration;

use crate::driver::{DriverError, DriverResult};
use crate::options::inject::Injected;
use crate::outcome::error::Ended;

/// How much a request may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Effort {
    /// What can be had at once: free memory, or new memory of the driver. Nothing is waited for or given back.
    AtOnce,
    /// All that the ladder allows, on a thread that waits.
    Wait,
    /// The same, on a future that is polled.
    Poll,
}

/// How an attempt to serve a request ended: a look at memory, or a rung of the ladder.
#[derive(Debug)]
pub(crate) enum Attempt {
    /// Served at this address; the attempt won so many bytes for it.
    Served { address: u64, won: u64 },
    /// Memory was won: what follows the attempt is worth trying.
    Won(u64),
    /// No memory was won, and why.
    Nothing(Ended),
    /// The attempt was not made, because nobody asked for it.
    Skipped,
    /// Something changed: the ladder is climbed from the bottom once more.
    Again,
    /// The request waits, at most this long: its turn has not come, or memory may come.
    Wait(Duration),
    /// The request is made to fail.
    Injected(Injected),
    /// The driver failed.
    Failed(DriverError),
}

impl Attempt {
    /// Served at an address without winning memory first, or nothing.
    pub(crate) fn served_or_nothing(served: Option<u64>) -> Self {
        served.map_or(Self::Nothing(Ended::Nothing), |address| Self::Served { address, won: 0 })
    }
}

impl From<DriverResult<Attempt>> for Attempt {
    fn from(result: DriverResult<Self>) -> Self {
        result.unwrap_or_else(Self::Failed)
    }
}
