//! The result of one attempt to serve a request.

use std::time::Duration;

use crate::driver::{DriverError, DriverResult};
use crate::options::inject::Injected;
use crate::outcome::error::Ended;

/// How much effort a request may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Effort {
    /// Only free memory or new memory of the driver. The request neither waits nor gives memory
    /// back.
    AtOnce,
    /// The whole ladder, on a thread that waits.
    Wait,
    /// The whole ladder, in a future that is polled.
    Poll,
}

/// The result of one attempt to serve a request: a search of memory, or a rung of the ladder.
#[derive(Debug)]
pub(crate) enum Attempt {
    /// The request was served at this address. The attempt won this many bytes for it.
    Served { address: u64, won: u64 },
    /// Memory was won: the attempts that follow the rung are worth trying.
    Won(u64),
    /// No memory was won, for this reason.
    Nothing(Ended),
    /// The attempt was not made, because no option asks for it.
    Skipped,
    /// Something changed: the request climbs again from the bottom.
    Again,
    /// The request waits, at most this long: for its turn, or for memory.
    Wait(Duration),
    /// The request is made to fail.
    Injected(Injected),
    /// The driver failed.
    Failed(DriverError),
}

impl Attempt {
    /// Returns `Served` at an address without memory won first, or `Nothing`.
    pub(crate) fn served_or_nothing(served: Option<u64>) -> Self {
        served.map_or(Self::Nothing(Ended::Nothing), |address| Self::Served { address, won: 0 })
    }
}

impl From<DriverResult<Attempt>> for Attempt {
    fn from(result: DriverResult<Self>) -> Self {
        result.unwrap_or_else(Self::Failed)
    }
}
