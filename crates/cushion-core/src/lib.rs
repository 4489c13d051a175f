//! The engine of Cushion: a caching allocator for device memory that knows nothing of CUDA, Python,
//! files, clocks or the environment. It forbids `unsafe`.
//!
//! # The path of one allocation
//!
//! 1. `engine.rs`: the front door takes the device's lock.
//! 2. `size.rs`: the request is rounded; `pool.rs`, `private.rs`: its pool is chosen.
//! 3. `pending.rs`: if frees wait for other streams, those that are done are completed.
//! 4. `policy/`: the policy chooses a free block of the pool's lane for the stream. A hit goes to 7.
//! 5. `climb.rs`: a miss climbs the ladder of `ladder.rs`, step by step and without the lock between
//!    them; its first step asks the driver,
//! 6. `growth.rs`: for a plain segment, or for pages. If memory ran out, `borrow.rs` looks elsewhere,
//!    `give_back.rs` gives back what is cached, `queue.rs` waits for others, `spill.rs` uses the host's;
//!    `receipt.rs` keeps the record.
//! 7. `locked.rs`: the block is cut to size and handed out; `stats.rs` counts it and `history.rs`
//!    notes it.
//!
//! `ARCHITECTURE.md` tells the same at length, and the life of a free.

#![forbid(unsafe_code)]

pub mod driver;
pub mod options;
#[doc(hidden)]
pub mod random;
pub mod size;
pub mod testing;

mod backoff;
mod block;
mod borrow;
mod bytes;
mod callbacks;
mod check;
mod climb;
mod clock;
mod engine;
mod error;
mod free_index;
mod free_pages;
mod future;
mod give_back;
mod growth;
mod history;
mod homes;
mod inject;
mod kept;
mod ladder;
mod layout;
mod locked;
mod looked_at;
mod marks;
mod merge;
mod owner;
mod pages;
mod pending;
mod pieces;
mod policy;
mod pool;
mod private;
mod proof;
mod queue;
mod receipt;
mod restore;
mod room;
mod segment;
mod settings;
mod shortages;
mod snapshot;
mod spill;
mod split;
mod stats;
mod stitch;
mod stuck;
mod table;
mod tags;
mod trim;
mod unmap;

pub use bytes::parse_bytes;
pub use callbacks::{Answer, Callback, CallbackId, Plea, Reply};
pub use check::Violation;
pub use climb::Waited;
pub use clock::{Bell, Clock, VirtualClock};
pub use driver::{CheckedDriver, Driver, DriverError, SimClock, SimConfig, SimDriver, StreamId};
pub use engine::{Engine, EngineConfig, PageFigures};
pub use error::{
    AddressError, AllocError, Ended, FractionError, PoolError, Remedy, Shortage, Tried,
};
pub use future::AllocFuture;
pub use history::{Action, Entry, Tag};
pub use inject::{Faults, Injection, InjectionError};
#[doc(hidden)]
pub use kept::Kept;
pub use ladder::{Ladder, Rung, RungSet};
#[doc(hidden)]
pub use looked_at::LookedAt;
pub use options::Options;
pub use owner::{
    Owner, Task, Working, budget, current_owner, in_callback, is_in_callback,
    note_waiting_in_callback, priority, set_budget, set_followers, set_priority, set_skipped_rungs,
    skipped_rungs,
};
#[doc(hidden)]
pub use owner::{OwnersHeld, hold_owners};
pub use policy::Policy;
pub use pool::PoolId;
pub use private::StreamFilter;
pub use proof::LastingStreams;
pub use receipt::{Group, Holder, Outcome, Receipt};
pub use restore::{HeldBlock, HeldSegment, RestoreError};
pub use snapshot::{BlockFigures, BlockUse, SegmentFigures, Snapshot};
pub use stats::{LaneFigures, Stat, StatArray, Stats};
