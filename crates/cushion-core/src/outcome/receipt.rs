//! Receipts: one record per shortage, survived or refused.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::error::{Shortage, seconds};
use crate::base::names::{Owner, Tag};
use crate::base::size::display;
use crate::options::ladder::{Ladder, Rung};

/// The record of one shortage.
///
/// It has many fields because they are the JSON form of receipts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Receipt {
    /// Its number, counted from 1 for each engine.
    pub number: u64,
    /// The device.
    pub device: u32,
    /// When the request fell short, on the engine's clock.
    #[serde(with = "seconds")]
    pub at: Duration,
    /// The time from then until the request ended.
    #[serde(with = "seconds")]
    pub took: Duration,
    /// The ladder in force.
    pub ladder: Ladder,
    /// The name of the thread or task that asked.
    pub who: String,
    /// The number of the thread or task, valid in this process only.
    #[serde(skip)]
    pub owner: Owner,
    /// The tag of the request: the number of its stack, if stacks are recorded.
    #[serde(rename = "context")]
    pub tag: Tag,
    /// The stack, innermost frame first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stack: Vec<String>,
    /// How the shortage ended.
    pub outcome: Outcome,
    /// The figures and each rung. If the request was served, the figures are those of the moment
    /// when it fell short; if it was refused, those of the end.
    pub shortage: Shortage,
    /// The largest groups of live allocations at that moment, largest first.
    pub groups: Vec<Group>,
    /// The owners of live memory at that moment, largest first.
    pub holders: Vec<Holder>,
    /// What each callback of the program did, in order.
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
    /// Refused: the device or the limit is full now.
    Full,
    /// Refused: the request can never fit.
    NeverFits,
    /// Refused: the task was told to give way.
    GiveWay,
    /// Refused: the task was told to split.
    Split,
    /// Refused: the driver failed.
    Driver,
    /// The caller abandoned the request.
    GivenUp,
}

impl Outcome {
    /// Returns whether the request was served.
    #[must_use]
    pub fn is_survived(self) -> bool {
        matches!(self, Self::Survived(_))
    }

    /// Returns the text for people.
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
    /// The tag: the number of a stack, if stacks are recorded.
    #[serde(rename = "context")]
    pub tag: Tag,
    /// Bytes requested for each allocation.
    pub each: u64,
    /// The number of allocations.
    pub count: u64,
    /// Bytes of their blocks together.
    pub bytes: u64,
    /// The stack behind the tag, innermost frame first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stack: Vec<String>,
}

/// The live memory of one thread or task.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Holder {
    /// The name of the thread or task.
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

/// The result of one callback.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Answer {
    /// The name of the callback.
    pub callback: String,
    /// The message it returned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub said: Option<String>,
    /// The error it failed with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<String>,
    /// Bytes that became free, or that the driver got back, while it ran.
    pub won: u64,
    /// How long it took.
    #[serde(with = "seconds", rename = "seconds")]
    pub took: Duration,
    /// Whether it exceeded its time and is not called again.
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
