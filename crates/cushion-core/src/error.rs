//! What can go wrong, each kind apart: full now, can never fit, driver broken, misuse.

use crate::driver::{DriverError, StreamId};
use crate::pool::PoolId;
use crate::size::display;

/// Why an allocation was refused. Nothing was handed out and nothing is lost.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum AllocError {
    /// The device, or the limit on it, is full now; it may fit later.
    #[error("out of memory: {0}")]
    FullNow(Box<Shortage>),
    /// More than the device, or the limit on it, could ever give.
    #[error("out of memory, and it can never fit: {0}")]
    NeverFits(Box<Shortage>),
    /// The driver failed for another reason than memory.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

/// The figures behind a refusal.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Shortage {
    /// What the caller asked for.
    pub requested: u64,
    /// What the engine wanted to get from the device for it; `u64::MAX` if that overflows.
    pub wanted: u64,
    /// The stream it was for.
    pub stream: StreamId,
    /// The pool it was for.
    pub pool: PoolId,
    /// Physical memory of the device.
    pub device_total: u64,
    /// What the device reported free, other processes included; `None` if it would not say.
    pub device_free: Option<u64>,
    /// The limit set for this process, if any.
    pub allowed: Option<u64>,
    /// Bytes of physical memory held.
    pub reserved: u64,
    /// Bytes of blocks their owners have not given back.
    pub allocated: u64,
    /// Bytes given back that wait for another stream.
    pub pending: u64,
    /// Free bytes kept for private pools.
    pub private_free: u64,
    /// The largest free block of any pool on any stream.
    pub largest_free: u64,
    /// Whether allocations went to a private pool, so that nothing could be given back: a graph
    /// capture may have been under way.
    pub recording: bool,
    /// What was tried before the refusal, in order.
    pub tried: Vec<Tried>,
}

/// A rung that was tried in vain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Tried {
    /// What was done, to complete "Cushion ...".
    pub what: &'static str,
    /// Bytes that went back to the driver by it.
    pub given_back: u64,
}

impl std::fmt::Display for Tried {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.what)?;
        if self.given_back > 0 {
            write!(f, " ({})", display(self.given_back))?;
        }
        Ok(())
    }
}

impl std::fmt::Display for Shortage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} asked for", display(self.requested))?;
        if self.wanted == u64::MAX {
            return write!(f, ", more than any device has");
        }
        write!(f, " ({} from the device", display(self.wanted))?;
        match self.device_free {
            Some(free) => {
                write!(f, ", which has {} of {} free", display(free), display(self.device_total))?;
            }
            None => write!(f, " of {}", display(self.device_total))?,
        }
        if let Some(allowed) = self.allowed {
            write!(f, "; this process may hold {}", display(allowed))?;
        }
        write!(
            f,
            "). Held: {}, of which {} allocated, {} pending, the rest cached; \
             the largest free block is {}",
            display(self.reserved),
            display(self.allocated),
            display(self.pending),
            display(self.largest_free),
        )?;
        if self.private_free > 0 {
            write!(f, "; {} are free in private pools", display(self.private_free))?;
        }
        if self.recording {
            write!(
                f,
                "; allocations go to a private pool, where a graph capture may be under way, so \
                 nothing could be given back"
            )?;
        }
        for (index, tried) in self.tried.iter().enumerate() {
            write!(f, "{} {tried}", if index == 0 { ". Cushion" } else { ", then" })?;
        }
        Ok(())
    }
}

/// Why a free, or a note about an address, was not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AddressError {
    /// No live allocation starts at this address: it was never handed out, or already given back.
    #[error(
        "no live allocation starts at {address:#x}: it was never handed out here, or was freed before"
    )]
    Unknown {
        /// The address.
        address: u64,
    },
    /// The free was taken, but an event could not be recorded for it. The block stays pending and
    /// the event is tried again; do not free it again.
    #[error("the free of {address:#x} was taken, but it stays pending: {source}")]
    Driver {
        /// The address.
        address: u64,
        /// What the driver said.
        source: DriverError,
    },
}

/// Why a call about a private pool was not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// There is no such pool.
    #[error("no private pool {0}")]
    Unknown(PoolId),
    /// `(0, 0)` is the default pool; it cannot be made, recorded to or released.
    #[error("{0} is the default pool, not a private one")]
    Default(PoolId),
    /// Its last use was released.
    #[error("private pool {0} was released; its memory may be given back at any time")]
    Released(PoolId),
    /// Allocations go to it already.
    #[error("allocations go to private pool {0} already")]
    AlreadyRecording(PoolId),
    /// Allocations still go to it, so its last use cannot be released.
    #[error("allocations still go to private pool {0}: end that before its last use is released")]
    StillRecording(PoolId),
    /// Allocations do not go to it.
    #[error("allocations do not go to private pool {0}")]
    NotRecording(PoolId),
}

/// A memory fraction that is not between 0 and 1.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[error("a memory fraction of {0}: it must lie between 0 and 1")]
pub struct FractionError(pub f64);
