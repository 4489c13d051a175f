//! Receipts: one record per shortage, survived or refused.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::error::{Shortage, seconds};
use crate::base::names::{Owner, Tag};
use crate::base::size::display;
use crate::options::ladder::{Ladder, Rung};

/// The record of one shortage.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Receipt {
    /// Its number, from 1 for each engine.
    pub number: u64,
    /// The device.
    pub device: u32,
    /// When the request fell short, on the engine's clock.
    #[serde(with = "seconds")]
    pub at: Duration,
    /// The time lost by it.
    #[serde(with = "seconds")]
    pub took: Duration,
    /// The ladder that was climbed.
    pub ladder: Ladder,
    /// Who asked: the thread, or the task.
    pub who: String,
    /// The same, for this process alone.
    #[serde(skip)]
    pub owner: Owner,
    /// The tag of the request: the number of its stack, where those are recorded.
    #[serde(rename = "context")]
    pub tag: Tag,
    /// That stack, innermost frame first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stack: Vec<String>,
    /// How it ended.
    pub outcome: Outcome,
    /// The figures and each rung. The figures are those of the moment it fell short if it was survived, and of the end
    /// if it was refused.
    pub shortage: Shortage,
    /// The largest groups of live allocations at that moment, the largest first.
    pub groups: Vec<Group>,
    /// Who held live memory at that moment, the most first.
    pub holders: Vec<Holder>,
    /// What the program's callbacks did, in order.
    #[serde(default)]
    pub answers: Vec<Answer>,
}

/// How a shortage ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Outcome {
    /// The request was served, by this rung.
    Survived(Rung),
    /// Refused: full now.
    Full,
    /// Refused: it can never fit.
    NeverFits,
    /// Refused: the task was told to give way.
    GiveWay,
    /// Refused: the task was told to split.
    Split,
    /// Refused: the driver failed.
    Driver,
    /// The request was given up by who made it.
    GivenUp,
}

impl Outcome {
    /// Whether the request was served.
    #[must_use]
    pub fn is_survived(self) -> bool {
        matches!(self, Self::Survived(_))
    }

    /// For people.
    #[must_use]
    pub fn text(self) -> String {
        match self {
            Self::Survived(rung) => format!("survived by {rung}"),
            Self::Full => "refused".to_owned(),
            Self::NeverFits => "refused: it can never fit".to_owned(),
            Self::GiveWay => "told to give way".to_owned(),
            Self::Split => "told to split".to_owned(),
            Self::Driver => "refused: the driver failed".to_owned(),
            Self::GivenUp => "given up".to_owned(),
        }
    }
}

/// Live allocations of one size and one tag.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Group {
    /// The tag: the number of a stack, where those are recorded.
    #[serde(rename = "context")]
    pub tag: Tag,
    /// Bytes each was asked for with.
    pub each: u64,
    /// How many there are.
    pub count: u64,
    /// Bytes of their blocks together.
    pub bytes: u64,
    /// The stack that the tag stands for, innermost frame first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stack: Vec<String>,
}

/// What one thread or task held.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Holder {
    /// Who.
    pub who: String,
    /// Bytes of live blocks.
    pub bytes: u64,
}

impl fmt::Display for Receipt {
    /// One line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "shortage {} on device {}: {} for {}, {} after {:.1} ms",
            self.number,
            self.device,
            display(self.shortage.requested),
            self.who,
            self.outcome.text(),
            self.took.as_secs_f64() * 1e3,
        )
    }
}

/// What one callback did about a shortage.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Answer {
    /// The callback, by its name.
    pub callback: String,
    /// What it said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub said: Option<String>,
    /// What it failed with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<String>,
    /// Bytes that became free, or that the driver got back, while it ran.
    pub won: u64,
    /// How long it took.
    #[serde(with = "seconds", rename = "seconds")]
    pub took: Duration,
    /// It took longer than it was given, and is not called again.
    #[serde(default)]
    pub switched_off: bool,
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.callback)?;
        match (&self.failed, &self.said) {
            (Some(failed), _) => write!(f, " failed: {failed}")?,
            (None, Some(said)) => write!(f, " said: {said}")?,
            (None, None) => {}
        }
        if self.switched_off {
            write!(f, " (switched off, as it took {:.1} s)", self.took.as_secs_f64())?;
        }
        Ok(())
    }
}
