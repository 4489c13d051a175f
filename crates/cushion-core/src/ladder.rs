//! Ladders: the ordered steps tried before an allocation is refused.
//!
//! A ladder is data: a list of steps, each a rung and what is tried after it. `torch` does what
//! PyTorch does on a shortage, step by step. `graceful` searches the pool again after every rung
//! that may have freed something: PyTorch does not, and refuses requests that would fit.
//!
//! `climb.rs` takes the steps.

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

    pub(crate) fn steps(self) -> &'static [Step] {
        match self {
            Self::Torch => TORCH,
            Self::Graceful => GRACEFUL,
        }
    }

    /// Its rungs, in order.
    pub fn rungs(self) -> impl Iterator<Item = Rung> {
        self.steps().iter().map(|step| step.rung)
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

/// What is tried after a rung that may have won something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Then {
    /// Search the request's own pool.
    Search,
    /// Ask the driver for memory.
    Ask,
    /// Ask the driver again, counted as a retry.
    AskAgain,
}

/// When a rung may be tried. Waiting, and giving memory back, are illegal during a capture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Legal {
    Always,
    /// Unless the request's own stream is being captured. PyTorch does not ask even that, and the
    /// driver then fails it.
    OutsideCapture,
    /// Unless allocations go to a private pool: some stream may be being captured.
    OutsidePools,
    /// Unless the request is one for a private pool, and so maybe part of a capture. Nothing is asked of the driver.
    OfDefaultPool,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Step {
    pub(crate) rung: Rung,
    pub(crate) legal: Legal,
    pub(crate) then: &'static [Then],
}

const fn step(rung: Rung, legal: Legal, then: &'static [Then]) -> Step {
    Step { rung, legal, then }
}

const TORCH: &[Step] = &[
    step(Rung::Garbage, Legal::OutsideCapture, &[]),
    step(Rung::Grow, Legal::Always, &[]),
    step(Rung::Borrow, Legal::Always, &[]),
    step(Rung::Oversize, Legal::OutsideCapture, &[Then::Ask]),
    step(Rung::Cached, Legal::OutsidePools, &[Then::AskAgain]),
];

// Between the callbacks and the wait is the place of neighbours: other processes that use Cushion on the
// same device, once they can be asked.
const GRACEFUL: &[Step] = &[
    step(Rung::Garbage, Legal::OutsidePools, &[]),
    step(Rung::Grow, Legal::Always, &[]),
    step(Rung::Poll, Legal::OutsidePools, &[Then::Search]),
    step(Rung::Borrow, Legal::Always, &[]),
    step(Rung::Events, Legal::OutsidePools, &[]),
    step(Rung::Oversize, Legal::OutsidePools, &[Then::Search, Then::Ask]),
    step(Rung::Cached, Legal::OutsidePools, &[Then::Search, Then::AskAgain]),
    step(Rung::Pieces, Legal::OutsidePools, &[]),
    step(Rung::Callbacks, Legal::OutsidePools, &[Then::Search, Then::AskAgain]),
    step(Rung::Wait, Legal::OfDefaultPool, &[]),
    step(Rung::Spill, Legal::OutsidePools, &[]),
];

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

    #[test]
    fn ours_has_every_rung_in_order() {
        assert_eq!(Ladder::Graceful.rungs().collect::<Vec<_>>(), Rung::ALL);
    }
}
