//! The names of ladders and rungs. `shortage/ladder.rs` holds the steps of each ladder.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The ladders.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Ladder {
    /// PyTorch's steps.
    Torch,
    /// Cushion's own steps.
    Graceful,
}

impl Ladder {
    /// Returns its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Torch => "torch",
            Self::Graceful => "graceful",
        }
    }
}

impl fmt::Display for Ladder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// One step of a ladder: a way to obtain memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Rung {
    /// Give back segments that have been idle for long, if garbage collection is on.
    Garbage,
    /// Ask the driver for more memory. A request that fails here is short of memory.
    Grow,
    /// Complete the frees that other streams are done with by now.
    Poll,
    /// Use whole free blocks of other pools and streams on which no work runs.
    Borrow,
    /// Wait for as many pending frees as are needed.
    Events,
    /// Give back cached blocks that are too large to be split, as many as are needed.
    Oversize,
    /// Give back cached memory, so that the driver can lay it out anew.
    Cached,
    /// Cut a block out of free memory of other pools and streams. The rest of that memory can then
    /// not be given back.
    Pieces,
    /// Call the program's own callbacks.
    Callbacks,
    /// Wait for other threads and other processes to give memory back.
    Wait,
    /// Use host memory at a device address.
    Spill,
}

impl Rung {
    /// Every rung.
    pub const ALL: [Self; 11] = [
        Self::Garbage,
        Self::Grow,
        Self::Poll,
        Self::Borrow,
        Self::Events,
        Self::Oversize,
        Self::Cached,
        Self::Pieces,
        Self::Callbacks,
        Self::Wait,
        Self::Spill,
    ];

    /// Returns its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Garbage => "garbage",
            Self::Grow => "grow",
            Self::Poll => "poll",
            Self::Borrow => "borrow",
            Self::Events => "events",
            Self::Oversize => "oversize",
            Self::Cached => "cached",
            Self::Pieces => "pieces",
            Self::Callbacks => "callbacks",
            Self::Wait => "wait",
            Self::Spill => "spill",
        }
    }

    /// Returns the rung with this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|rung| rung.name() == name)
    }

    /// Returns what it does, to complete "Cushion ...".
    pub(crate) fn deed(self) -> &'static str {
        match self {
            Self::Garbage => "gave back what was idle for long",
            Self::Grow => "asked for more memory",
            Self::Poll => "completed the frees that other streams were done with",
            Self::Borrow => "searched the pools and streams that may help out",
            Self::Pieces => "looked for pieces of other streams' memory",
            Self::Events => "waited for pending frees",
            Self::Oversize => "gave back oversized cached memory",
            Self::Cached => "gave back cached memory and asked again",
            Self::Callbacks => "asked the program's callbacks",
            Self::Wait => "waited for others to give memory back",
            Self::Spill => "tried host memory",
        }
    }

    /// Returns whether it may be switched off. Without [`Grow`](Self::Grow) the engine would never
    /// obtain memory.
    #[must_use]
    pub fn can_be_skipped(self) -> bool {
        self != Self::Grow
    }
}

impl fmt::Display for Rung {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A set of rungs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RungSet(u16);

impl RungSet {
    /// The empty set.
    pub const NONE: Self = Self(0);

    /// Returns whether the set contains a rung.
    #[must_use]
    pub fn contains(self, rung: Rung) -> bool {
        self.0 & (1 << rung as u16) != 0
    }

    /// Returns the set with one more rung.
    #[must_use]
    pub fn with(self, rung: Rung) -> Self {
        Self(self.0 | 1 << rung as u16)
    }

    /// Returns the union of two sets.
    #[must_use]
    pub fn and(self, others: Self) -> Self {
        Self(self.0 | others.0)
    }

    /// Returns the rungs, in order.
    pub fn iter(self) -> impl Iterator<Item = Rung> {
        Rung::ALL.into_iter().filter(move |&rung| self.contains(rung))
    }
}

impl FromIterator<Rung> for RungSet {
    fn from_iter<I: IntoIterator<Item = Rung>>(rungs: I) -> Self {
        rungs.into_iter().fold(Self::NONE, Self::with)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rungs_have_names_of_their_own() {
        for rung in Rung::ALL {
            assert_eq!(Rung::named(rung.name()), Some(rung));
            assert!(RungSet::NONE.with(rung).contains(rung));
        }
        assert_eq!(Rung::named("neighbours"), None);
        let some: RungSet = [Rung::Wait, Rung::Poll].into_iter().collect();
        assert_eq!(some.iter().collect::<Vec<_>>(), [Rung::Poll, Rung::Wait]);
    }
}
