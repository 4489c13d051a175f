//! What can go wrong, each kind apart: full now, can never fit, told to give way or to split, driver
//! broken, misuse.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::base::names::PoolId;
use crate::base::size::display;
use crate::driver::{DriverError, StreamId};
use crate::options::Policy;
use crate::options::ladder::Rung;

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
    /// Every task that holds memory waits for more, and this one is the least valuable: if it gives back
    /// what it holds and begins again later, the others can go on.
    #[error(
        "out of memory, because all tasks wait for each other: give back what this one holds, and begin again; {0}"
    )]
    GiveWay(Box<Shortage>),
    /// The task is the only one that holds memory, so that nobody else can make room: it can ask for less
    /// at a time, or give everything back, empty the cache and begin again.
    #[error("out of memory, and nobody else holds any: ask for less at a time; {0}")]
    Split(Box<Shortage>),
    /// The driver failed for another reason than memory.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

impl AllocError {
    /// The figures, where memory ran out.
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

/// The figures behind a shortage.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Shortage {
    /// The number of its receipt.
    pub receipt: u64,
    /// What the caller asked for.
    pub requested: u64,
    /// The size of the block that would serve it.
    pub size: u64,
    /// What the engine wanted to get from the device for it; `u64::MAX` if that overflows.
    pub wanted: u64,
    /// The stream it was for.
    pub stream: StreamId,
    /// The pool it was for.
    pub pool: PoolId,
    /// The policy in force.
    pub policy: Policy,
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
    /// Bytes in host memory, at device addresses.
    pub spilled: u64,
    /// Bytes of the device that are neither free nor this engine's, nor what every process costs: other processes
    /// have them, or this one has them past its allocator.
    #[serde(default)]
    pub others: u64,
    /// Bytes held that cannot be given back as things lie; known of requests that were refused.
    #[serde(default)]
    pub stuck: Option<u64>,
    /// Whether it would fit if what lives lay on pages, as it does with policy expandable.
    #[serde(default)]
    pub fits_on_pages: bool,
    /// Free bytes kept for private pools.
    pub private_free: u64,
    /// The largest free block of any pool on any stream.
    pub largest_free: u64,
    /// Whether allocations went to a private pool, so that nothing could be given back: a graph
    /// capture may have been under way.
    pub recording: bool,
    /// Whether the shortage was made up, to test how a program takes it.
    pub injected: bool,
    /// Whether the memory was to be there for later: see [`Engine::prefetch`](crate::Engine::prefetch).
    #[serde(default)]
    pub ahead: bool,
    /// How long the request might have waited.
    #[serde(with = "seconds", default)]
    pub budget: Duration,
    /// What was tried, in order, and what could not be.
    pub tried: Vec<Tried>,
}

impl Shortage {
    /// Bytes held and in nobody's use.
    #[must_use]
    pub fn cached(&self) -> u64 {
        self.reserved.saturating_sub(self.allocated).saturating_sub(self.pending)
    }

    /// Bytes that could still be got from the device.
    #[must_use]
    pub fn room(&self) -> u64 {
        let allowed = self.allowed.map_or(u64::MAX, |most| most.saturating_sub(self.reserved));
        self.device_free.unwrap_or(0).min(allowed)
    }

    /// Bytes that would have to be given back beside what could be now, for the driver to serve the request; zero if it
    /// is not known how much could be.
    fn missing_in_one(&self) -> u64 {
        let stuck = if self.recording { Some(self.reserved) } else { self.stuck };
        stuck.map_or(0, |stuck| {
            let in_one = self.room().saturating_add(self.reserved.saturating_sub(stuck));
            let needed = if self.policy.uses_pages() { self.size } else { self.wanted };
            needed.saturating_sub(in_one)
        })
    }

    /// The rungs that did something, for people.
    pub fn deeds(&self) -> impl Iterator<Item = &Tried> {
        self.tried.iter().filter(|tried| match tried.ended {
            Ended::Nothing => tried.rung == Rung::Grow,
            // It had no time to begin with.
            Ended::TimeIsUp => tried.took >= Duration::from_millis(1),
            ended => ended.was_tried(),
        })
    }

    /// What would make the request fit, the least change first. Worked out when asked.
    #[must_use]
    pub fn remedies(&self) -> Vec<Remedy> {
        let most = self.allowed.unwrap_or(u64::MAX).min(self.device_total);
        if self.size > most {
            return vec![Remedy::More(self.size - most)];
        }
        let mut remedies = Vec::new();
        let own = self.cached().saturating_add(self.room());
        if own >= self.size {
            // It is there, in pieces.
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

/// What would make a request fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Remedy {
    /// Another policy: memory enough is there, in pieces.
    Policy(Policy),
    /// Time: so many bytes wait for other streams.
    Pending(u64),
    /// Other processes hold so many bytes.
    Others(u64),
    /// So many bytes more.
    More(u64),
    /// To ask before a graph is captured, when memory can be given back.
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

/// One rung: what it won, or why it did not.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Tried {
    /// The rung.
    pub rung: Rung,
    /// How it ended, the last time.
    pub ended: Ended,
    /// Bytes it won: that became free, or that the driver got back.
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
    /// It won something, but not enough.
    TooLittle,
    /// It won nothing.
    Nothing,
    /// What there was time for was not enough.
    TimeIsUp,
    /// It failed: the driver did, or the program's own callbacks.
    Failed,
    /// It is switched off.
    Off,
    /// It is illegal while allocations go to a private pool, where a graph capture may be under way.
    Illegal,
    /// An injected failure kept it from being tried.
    Injected,
}

impl Ended {
    /// Whether something was done at all.
    #[must_use]
    pub fn was_tried(self) -> bool {
        !matches!(self, Self::Off | Self::Illegal | Self::Injected)
    }

    /// For people.
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
