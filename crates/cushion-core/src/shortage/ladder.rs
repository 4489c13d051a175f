//! Ladders: the ordered steps tried before a request is refused.
//!
//! A ladder is data: a list of steps, each with a rung and the attempts that follow it. `torch`
//! takes the same steps as PyTorch. `graceful` searches the pool again after every rung that may
//! have freed memory; PyTorch does not, and refuses requests that would fit. `climb.rs` executes
//! the steps.

use crate::options::ladder::{Ladder, Rung};

impl Ladder {
    pub(crate) fn steps(self) -> &'static [Step] {
        match self {
            Self::Torch => TORCH,
            Self::Graceful => GRACEFUL,
        }
    }

    /// Returns its rungs, in order.
    pub fn rungs(self) -> impl Iterator<Item = Rung> {
        self.steps().iter().map(|step| step.rung)
    }
}

/// An attempt to serve the request after a rung that may have won memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Then {
    /// Search the request's own pool.
    Search,
    /// Ask the driver for memory.
    Ask,
    /// Ask the driver again, counted as a retry.
    AskAgain,
}

/// When a rung may be tried. Waiting and giving memory back are illegal during a capture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Legal {
    Always,
    /// Unless the request's own stream is being captured. PyTorch does not check even that; the
    /// driver then fails the call.
    OutsideCapture,
    /// Unless allocations go to a private pool: a stream may be being captured.
    OutsidePools,
    /// Unless the request itself goes to a private pool, and so may be part of a capture. The rung
    /// must not call the driver.
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

// A rung that asks other Cushion processes on the same device belongs between the callbacks and the
// wait.
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
    fn graceful_has_every_rung_in_order() {
        assert_eq!(Ladder::Graceful.rungs().collect::<Vec<_>>(), Rung::ALL);
    }
}
