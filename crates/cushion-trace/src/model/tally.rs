//! Counts of shortages.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use cushion_core::{Outcome, Receipt, Rung};

/// Counts of shortages by outcome.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Tally {
    /// The number of shortages.
    pub shortages: u64,
    /// Survived shortages, by the rung that served the request.
    pub by_rung: BTreeMap<Rung, u64>,
    /// Shortages that ended in an out-of-memory error.
    pub refused: u64,
    /// The total time that requests spent in shortages.
    pub lost: Duration,
}

impl Tally {
    /// Adds a shortage.
    pub fn add(&mut self, receipt: &Receipt) {
        self.shortages += 1;
        self.lost = self.lost.saturating_add(receipt.took);
        match receipt.outcome {
            Outcome::Survived(rung) => *self.by_rung.entry(rung).or_default() += 1,
            Outcome::GivenUp | Outcome::Driver => {}
            _ => self.refused += 1,
        }
    }

    /// Returns the number of survived shortages.
    #[must_use]
    pub fn survived(&self) -> u64 {
        self.by_rung.values().sum()
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (all, survived) = (self.shortages, self.survived());
        write!(f, "{all} {}, ", if all == 1 { "shortage" } else { "shortages" })?;
        write!(f, "{survived} survived")?;
        for (index, (rung, count)) in self.by_rung.iter().enumerate() {
            write!(f, "{}{rung} {count}", if index == 0 { " (by " } else { ", " })?;
        }
        write!(f, "{}, {} refused", if survived > 0 { ")" } else { "" }, self.refused)?;
        let others = all.saturating_sub(survived).saturating_sub(self.refused);
        if others > 0 {
            write!(f, ", {others} given up or failed by the driver")?;
        }
        write!(f, ", {:.1} ms lost", self.lost.as_secs_f64() * 1e3)
    }
}
