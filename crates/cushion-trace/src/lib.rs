//! Recorded traces: reads PyTorch's memory snapshots and RMM's logs, and replays them on Cushion's
//! engine and a simulated device.
//!
//! [`open`] reads a file, [`Program::of`] works out the requests and frees of the recorded program,
//! and [`replay`] runs it under a policy and returns the memory it took. [`read_receipts`] reads
//! the receipts of shortages that a run wrote.
//!
//! Folders, each importing only from those below it (`tests/rooms.rs` checks this):
//!
//! | folder | subject |
//! |---|---|
//! | `infer` | [`Program::of`]: private pools, inferred by trial replays |
//! | `replay` | runs a program on the engine: [`replay`], [`min_capacity`] |
//! | `program` | the steps of a recorded program, and the memory held before them |
//! | `write` | writes Cushion's traces, pickles and JSON; checks consistency |
//! | `read` | reads pickles, JSON, RMM logs, Cushion's traces and receipts |
//! | `format` | definitions that readers and writers share |
//! | `model` | the trace as Rust values: snapshot, events, stacks, errors |

#![forbid(unsafe_code)]

mod format;
mod infer;
mod model;
mod program;
mod read;
mod replay;
#[cfg(test)]
mod testing;
mod write;

pub use model::error::{Format, Offset, TraceError};
pub use model::event::{Action, Event};
pub use model::events::{Events, Iter};
pub use model::settings::Settings;
pub use model::snapshot::{Block, BlockState, Origin, Segment, Snapshot};
pub use model::stacks::{Frame, StackId, Stacks};
pub use model::tally::Tally;
pub use program::Program;
pub use program::refused::{RecordedOom, Room};
pub use read::limits::Limits;
pub use read::open::{open, open_with, read, read_with};
pub use read::receipts::{Receipts, ReceiptsError, read_receipts};
pub use replay::capacity::{CAPACITY_STEP, min_capacity};
pub use replay::outcome::{Difference, Outcome, Refusal, ReplayConfig, State, Watch};
pub use replay::{replay, replay_watched, state_at};
pub use write::consistency::{Inconsistency, inconsistencies};
pub use write::{FileFormat, Written, write_snapshot};
