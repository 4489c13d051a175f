//! Errors, one type or variant for each kind: full now, can never fit, told to give way or to
//! split, driver failure, misuse.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::base::names::PoolId;
use crate::base::size::display;
use crate::driver::{DriverError, StreamId};
use crate::options::Policy;
use crate::options::ladder::Rung;

/// Why an allocation was refused. No memory was handed out or lost.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum AllocError {
    /// The device, or the limit on it, is full now. The request may fit later.
    #[error("out of memory: {0}")]
    FullNow(Box<Shortage>),
    /// The request needs more than the device has, or than the limit allows.
    #[error("out of memory, and it can never fit: {0}")]
    NeverFits(Box<Shortage>),
    /// Every task that holds memory waits for more, and this task is the least valuable. If it
    /// frees its memory and starts again later, the others can go on.
    #[error(
        "out of memory, because all tasks wait for each other: give back what this one holds, and \
         begin again; {0}"
    )]
    GiveWay(Box<Shortage>),
    /// No other task holds memory, so that waiting cannot help. The task can ask for less at a
    /// time, or free everything, empty the cache and start again.
    #[error("out of memory, and no other task holds any: ask for less at a time; {0}")]
    Split(Box<Shortage>),
    /// The driver failed for a reason other than lack of memory.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

impl AllocError {
    /// Returns the figures, if memory ran out.
    #[must_use]
    pub fn shortage(&self) -> Option<&Shortage> {
        match self {
            Self::FullNow(shortage)
            | Self::NeverFits(shortage)
            | Self::GiveWay(shortage)
            | Self::Split(shortage) => Some(shortage),
            Self::Driver(_) => None,
        }
    }
}

/// The figures of a shortage.
///
/// It has many fields because they are the JSON form of receipts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Shortage {
    /// The number of its receipt.
    pub receipt: u64,
    /// Bytes that the caller asked for.
    pub requested: u64,
    /// Bytes of the block that would serve the request.
    pub size: u64,
    /// Bytes that the engine wanted from the device for it; `u64::MAX` on overflow.
    pub wanted: u64,
    /// The stream of the request.
    pub stream: StreamId,
    /// The pool of the request.
    pub pool: PoolId,
    /// The policy in force.
    pub policy: Policy,
    /// Physical memory of the device.
    pub device_total: u64,
    /// Bytes that the device reported as free, with other processes counted; `None` if it did not
    /// report.
    pub device_free: Option<u64>,
    /// The limit set for this process, if any.
    pub allowed: Option<u64>,
    /// Bytes of physical memory held.
    pub reserved: u64,
    /// Bytes of live blocks that their owners have not freed.
    pub allocated: u64,
    /// Bytes that were freed and wait for another stream.
    pub pending: u64,
    /// Bytes in host memory, at device addresses.
    pub spilled: u64,
    /// Bytes of the device that are neither free, nor reserved by this engine, nor the fixed cost
    /// of a process. Other processes hold them, or this process does outside its allocator.
    #[serde(default)]
    pub others: u64,
    /// Reserved bytes that cannot be given back as blocks lie now; set for refused requests.
    #[serde(default)]
    pub stuck: Option<u64>,
    /// Whether the request would fit if live blocks lay on pages, as under policy `expandable`.
    #[serde(default)]
    pub fits_on_pages: bool,
    /// Free bytes in private pools.
    pub private_free: u64,
    /// The largest free block of any pool on any stream.
    pub largest_free: u64,
    /// Whether allocations went to a private pool, so that no memory could be given back: a graph
    /// capture may have been under way.
    pub recording: bool,
    /// Whether the shortage was injected, to test how a program handles it.
    pub injected: bool,
    /// Whether the request was a prefetch: see [`Engine::prefetch`](crate::Engine::prefetch).
    #[serde(default)]
    pub ahead: bool,
    /// How long the request was allowed to wait.
    #[serde(with = "seconds", default)]
    pub budget: Duration,
    /// The rungs in order, tried or not.
    pub tried: Vec<Tried>,
}

impl Shortage {
    /// Returns the bytes that are reserved and neither allocated nor pending.
    #[must_use]
    pub fn cached(&self) -> u64 {
        self.reserved.saturating_sub(self.allocated).saturating_sub(self.pending)
    }

    /// Returns the bytes that the device could still provide.
    #[must_use]
    pub fn room(&self) -> u64 {
        let allowed = self.allowed.map_or(u64::MAX, |most| most.saturating_sub(self.reserved));
        self.device_free.unwrap_or(0).min(allowed)
    }

    /// Returns the bytes that would have to be given back in addition to those that can be now, for
    /// the driver to serve the request. Zero if it is not known how many can be.
    fn missing_in_one(&self) -> u64 {
        let stuck = if self.recording { Some(self.reserved) } else { self.stuck };
        stuck.map_or(0, |stuck| {
            let in_one = self.room().saturating_add(self.reserved.saturating_sub(stuck));
            let needed = if self.policy.uses_pages() { self.size } else { self.wanted };
            needed.saturating_sub(in_one)
        })
    }

    /// Returns the rungs that did something, for people.
    pub fn deeds(&self) -> impl Iterator<Item = &Tried> {
        self.tried.iter().filter(|tried| match tried.ended {
            Ended::Nothing => tried.rung == Rung::Grow,
            // Shorter: it had no time to begin with.
            Ended::TimeIsUp => tried.took >= Duration::from_millis(1),
            ended => ended.was_tried(),
        })
    }

    /// Returns changes that would make the request fit, the smallest first. Computed on each call.
    #[must_use]
    pub fn remedies(&self) -> Vec<Remedy> {
        let most = self.allowed.unwrap_or(u64::MAX).min(self.device_total);
        if self.size > most {
            return vec![Remedy::More(self.size - most)];
        }
        let mut remedies = Vec::new();
        let own = self.cached().saturating_add(self.room());
        if own >= self.size {
            // There is enough memory, but it is not contiguous.
            if self.fits_on_pages && !self.recording {
                remedies.push(Remedy::Policy(Policy::Expandable));
            }
            let missing = self.missing_in_one();
            remedies.extend((missing > 0).then_some(Remedy::More(missing)));
        } else {
            let missing = (self.size - own).max(self.missing_in_one());
            if self.pending >= missing {
                remedies.push(Remedy::Pending(self.pending));
            }
            let may_hold =
                self.allowed.is_none_or(|most| self.reserved.saturating_add(missing) <= most);
            if self.others >= missing && may_hold {
                remedies.push(Remedy::Others(self.others));
            }
            remedies.push(Remedy::More(missing));
        }
        if self.recording {
            remedies.push(Remedy::OutsideCapture);
        }
        remedies
    }
}

/// A change that would make a request fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Remedy {
    /// Use another policy: there is enough memory, but it is not contiguous.
    Policy(Policy),
    /// Wait: this many bytes are pending.
    Pending(u64),
    /// End other processes: they hold this many bytes.
    Others(u64),
    /// Provide this many more bytes.
    More(u64),
    /// Allocate before a graph is captured, when memory can be given back.
    OutsideCapture,
}

impl fmt::Display for Remedy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Policy(policy) => write!(f, "fits with policy {policy}"),
            Self::Pending(bytes) => {
                write!(f, "fits once other streams are done with {}", display(*bytes))
            }
            Self::Others(bytes) => {
                write!(f, "fits without the {} that other processes hold", display(*bytes))
            }
            Self::More(bytes) => write!(f, "needs {} more", display(*bytes)),
            Self::OutsideCapture => write!(f, "cached memory can be used outside a graph capture"),
        }
    }
}

/// A rung, the bytes it won and how it ended.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Tried {
    /// The rung.
    pub rung: Rung,
    /// How its latest try ended.
    pub ended: Ended,
    /// Bytes that became free or that the driver got back.
    pub won: u64,
    /// The time it took.
    #[serde(with = "seconds", rename = "seconds")]
    pub took: Duration,
    /// How often it was tried.
    pub times: u32,
}

/// How a rung ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ended {
    /// It won enough: the request was served.
    Served,
    /// It won memory, but not enough.
    TooLittle,
    /// It won no memory.
    Nothing,
    /// Time ran out before it won enough.
    TimeIsUp,
    /// The driver or a callback of the program failed.
    Failed,
    /// It is switched off.
    Off,
    /// It is illegal while allocations go to a private pool: a graph capture may be under way.
    Illegal,
    /// An injected failure skipped it.
    Injected,
}

impl Ended {
    /// Returns whether the rung was tried at all.
    #[must_use]
    pub fn was_tried(self) -> bool {
        !matches!(self, Self::Off | Self::Illegal | Self::Injected)
    }

    /// Returns the text for people.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Self::Served => "served",
            Self::TooLittle => "won too little",
            Self::Nothing => "won nothing",
            Self::TimeIsUp => "ran out of time",
            Self::Failed => "failed",
            Self::Off => "is off",
            Self::Illegal => "is illegal during a capture",
            Self::Injected => "kept from trying",
        }
    }
}

impl fmt::Display for Tried {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.rung.deed())?;
        let millis = self.took.as_millis();
        match (self.won > 0, millis > 0) {
            (true, true) => write!(f, " ({} in {millis} ms)", display(self.won)),
            (true, false) => write!(f, " ({})", display(self.won)),
            (false, true) => write!(f, " ({millis} ms)"),
            (false, false) => Ok(()),
        }
    }
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
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
        if self.spilled > 0 {
            write!(f, "; {} more are in host memory", display(self.spilled))?;
        }
        if self.private_free > 0 {
            write!(f, "; {} are free in private pools", display(self.private_free))?;
        }
        if self.recording {
            write!(
                f,
                "; allocations go to a private pool, where a graph capture may be under way, so \
                 nothing could be given back"
            )?;
            let waited = |tried: &Tried| tried.rung == Rung::Wait && tried.ended.was_tried();
            if !self.tried.iter().any(waited) {
                write!(f, " or waited for")?;
            }
        }
        if self.injected {
            write!(f, "; this failure was injected")?;
        }
        for (index, tried) in self.deeds().enumerate() {
            write!(f, "{} {tried}", if index == 0 { ". Cushion" } else { ", then" })?;
        }
        Ok(())
    }
}

/// Durations in JSON: seconds.
pub(crate) mod seconds {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(crate) fn serialize<S: Serializer>(value: &Duration, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_f64(value.as_secs_f64())
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
        let seconds = f64::deserialize(from)?;
        Duration::try_from_secs_f64(seconds).map_err(D::Error::custom)
    }
}

/// Why a free, or a call about an address, was rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AddressError {
    /// No live allocation starts at this address: it was never handed out, or was freed before.
    #[error(
        "no live allocation starts at {address:#x}: it was never handed out here, or was freed \
         before"
    )]
    Unknown {
        /// The address.
        address: u64,
    },
    /// The free was accepted, but no event could be recorded for it. The block stays pending and
    /// the event is tried again; do not free the address again.
    #[error("the free of {address:#x} was taken, but it stays pending: {source}")]
    Driver {
        /// The address.
        address: u64,
        /// The driver's error.
        source: DriverError,
    },
}

/// Why a call about a private pool was rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// No such pool exists.
    #[error("no private pool {0}")]
    Unknown(PoolId),
    /// `(0, 0)` is the default pool. It cannot be created, recorded to or released.
    #[error("{0} is the default pool, not a private one")]
    Default(PoolId),
    /// The last use of the pool was released.
    #[error("private pool {0} was released; its memory may be given back at any time")]
    Released(PoolId),
    /// Allocations already go to the pool.
    #[error("allocations go to private pool {0} already")]
    AlreadyRecording(PoolId),
    /// Allocations still go to the pool, so that its last use cannot be released.
    #[error("allocations still go to private pool {0}: end that before its last use is released")]
    StillRecording(PoolId),
    /// Allocations do not go to the pool.
    #[error("allocations do not go to private pool {0}")]
    NotRecording(PoolId),
}

/// A memory fraction that is not between 0 and 1.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[error("a memory fraction of {0}: it must lie between 0 and 1")]
pub struct FractionError(pub f64);
