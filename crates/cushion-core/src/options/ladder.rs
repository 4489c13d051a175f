//! The names of ladders and rungs: `shortage/ladder.rs` has the steps of each ladder.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The ladders there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Ladder {
    /// What PyTorch does.
    Torch,
    /// Ours.
    Graceful,
}

impl Ladder {
    /// Its name.
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

/// One way to win memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Rung {
    /// Give back what has been idle for long, if that is asked for.
    Garbage,
    /// Ask the driver for more. What fails here falls short.
    Grow,
    /// Complete the frees that other streams are done with by now.
    Poll,
    /// Use free blocks of other pools and streams that nobody is at work on, whole.
    Borrow,
    /// Wait for pending frees: for just enough of them.
    Events,
    /// Give back cached memory that is too large to be split: just enough of it.
    Oversize,
    /// Give back cached memory, so that the driver can lay it out anew.
    Cached,
    /// Cut a piece out of free memory of other pools and streams, which keeps the rest of it from being given
    /// back.
    Pieces,
    /// Ask the program's own callbacks.
    Callbacks,
    /// Wait for other threads, and other processes, to give memory back.
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

    /// Its name.
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

    /// The rung of that name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|rung| rung.name() == name)
    }

    /// What it does, to complete "Cushion ...".
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

    /// Whether it may be switched off: without asking the driver there is no allocator.
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

/// Some of the rungs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RungSet(u16);

impl RungSet {
    /// None.
    pub const NONE: Self = Self(0);

    /// Whether a rung is among them.
    #[must_use]
    pub fn contains(self, rung: Rung) -> bool {
        self.0 & (1 << rung as u16) != 0
    }

    /// These and one more.
    #[must_use]
    pub fn with(self, rung: Rung) -> Self {
        Self(self.0 | 1 << rung as u16)
    }

    /// These and those.
    #[must_use]
    pub fn and(self, others: Self) -> Self {
        Self(self.0 | others.0)
    }

    /// The rungs, in order.
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
