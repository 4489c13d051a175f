//! Identifiers that several rooms share. None of them carries behaviour.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The name of a private pool, in PyTorch's form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PoolId(pub u64, pub u64);

impl PoolId {
    /// The default pool, which all requests share unless they go to a private pool.
    pub const DEFAULT: Self = Self(0, 0);
}

impl fmt::Display for PoolId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "({}, {})", self.0, self.1)
    }
}

/// An opaque note of the caller on an allocation, such as the number of a recorded stack.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize,
)]
pub struct Tag(pub u64);

impl Tag {
    /// No tag.
    pub const NONE: Self = Self(0);

    /// This tag, or `other` if this one is [`NONE`](Self::NONE).
    pub(crate) fn or(self, other: Self) -> Self {
        if self == Self::NONE { other } else { self }
    }
}

/// The thread or task that holds an allocation, by its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Owner(pub(crate) u32);

impl Owner {
    /// No thread or task: memory that was held before the engine began to count.
    pub const NOBODY: Self = Self(0);

    /// The owner of the latest request on the same engine: see
    /// [`set_followers`](crate::set_followers).
    pub(crate) const FOLLOWER: Self = Self(u32::MAX);
}

/// A point in the order of completed frees and released pools. Memory that was never handed out has
/// the first one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(crate) struct Moment(u64);

impl Moment {
    /// Before every free.
    pub(crate) const FIRST: Self = Self(0);
}

/// Counts moments.
#[derive(Debug, Default)]
pub(crate) struct Moments(u64);

impl Moments {
    /// The moment of a free or a release that happens now.
    pub(crate) fn next(&mut self) -> Moment {
        self.0 += 1;
        Moment(self.0)
    }

    /// The moment of the latest free or release.
    pub(crate) fn now(&self) -> Moment {
        Moment(self.0)
    }
}

/// A policy, by its place among the policies of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PolicyIndex(pub(crate) u8);
