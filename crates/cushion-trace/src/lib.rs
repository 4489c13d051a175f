//! Recorded traces: reads PyTorch's memory snapshots and RMM's logs, and replays them on Cushion's
//! engine and a simulated device.
//!
//! [`open`] reads a file, [`Program::of`] works out what the recorded program asked for, and
//! [`replay`] runs it under a policy and says what it took. [`read_receipts`] reads what a run wrote of its
//! shortages.

#![forbid(unsafe_code)]

mod arena;
mod beginning;
mod capacity;
mod columns;
mod consistency;
mod detect;
mod error;
mod events;
mod floor;
mod holdings;
mod json;
mod memo;
mod open;
mod own;
mod pack;
mod pickle;
mod pools;
mod program;
mod receipts;
mod refused;
mod replay;
mod rmm;
mod run;
mod snapshot;
mod source;
mod stacks;
mod steps;
mod value;
mod viewer;
mod write;
mod zstd;

pub use capacity::{CAPACITY_STEP, min_capacity};
pub use consistency::{Inconsistency, inconsistencies};
pub use error::{Format, Offset, TraceError};
pub use events::{Events, Iter};
pub use open::{Limits, open, open_with, read, read_with};
pub use program::Program;
pub use receipts::{Receipts, ReceiptsError, Tally, read_receipts};
pub use refused::{RecordedOom, Room};
pub use replay::{
    Difference, Outcome, Refusal, ReplayConfig, State, Watch, replay, replay_watched, state_at,
};
pub use snapshot::{Action, Block, BlockState, Event, Origin, Segment, Settings, Snapshot};
pub use stacks::{Frame, StackId, Stacks};
pub use write::{FileFormat, Written, write_snapshot};
