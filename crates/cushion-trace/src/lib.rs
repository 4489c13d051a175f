//! Recorded traces: reads PyTorch's memory snapshots and RMM's logs, and replays them on Cushion's
//! engine and a simulated device.
//!
//! [`open`] reads a file, [`Program::of`] works out what the recorded program asked for, and
//! [`replay`] runs it under a policy and says what it took.

#![forbid(unsafe_code)]

mod arena;
mod detect;
mod error;
mod events;
mod holdings;
mod json;
mod memo;
mod open;
mod pack;
mod pickle;
mod pools;
mod program;
mod replay;
mod rmm;
mod snapshot;
mod source;
mod stacks;
mod zstd;

pub use error::{Format, Offset, TraceError};
pub use events::{Events, Iter};
pub use open::{Limits, open, read, read_with};
pub use program::Program;
pub use replay::{Difference, Outcome, Refusal, ReplayConfig, replay};
pub use snapshot::{Action, Block, BlockState, Event, Origin, Segment, Settings, Snapshot};
pub use stacks::{Frame, StackId, Stacks};
