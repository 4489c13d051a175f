//! The engine of Cushion: a caching allocator for device memory. It knows nothing of CUDA, Python,
//! files, clocks or the environment, and forbids `unsafe`.
//!
//! # Rooms
//!
//! Each folder is a room with one subject and private state. A room uses only the rooms below it;
//! `tests/rooms.rs` checks that. From the top:
//!
//! | room | subject |
//! |---|---|
//! | `engine` | the front door: [`Engine`], its figures, its configuration |
//! | `shortage` | the steps tried when neither a free block nor the driver serves a request |
//! | `core` | everything that the lock protects; serving a request, freeing |
//! | `demand` | requests, their owners, and the queue of those that wait |
//! | `policy` | the layout of memory: `segments`, `expandable`, `paged` |
//! | `memory` | operations that need heap, backing and streams, and no policy |
//! | `backing` | physical memory: the only caller of the driver's memory calls |
//! | `streams` | pending frees, captures, and the proof that work is done |
//! | `heap` | blocks, segments and lanes: the only place that cuts and merges |
//! | `ledger` | statistics and history |
//! | `outcome` | results for callers: errors and receipts |
//! | `options` | options, each declared once |
//! | `driver` | the [`Driver`] trait and the simulated device |
//! | `base` | identifiers, tables, sizes, time |
//!
//! `ARCHITECTURE.md` follows one hit, one miss, one free and one refusal through the rooms.

#![forbid(unsafe_code)]

pub mod driver;
pub mod options;
pub mod testing;

mod backing;
mod base;
mod core;
mod demand;
mod engine;
mod heap;
mod ledger;
mod memory;
mod outcome;
mod policy;
mod shortage;
mod streams;

/// Byte arithmetic: units, the sizes that PyTorch rounds to, and the text form of sizes.
pub mod size {
    pub use crate::base::size::*;
    pub use crate::options::rounding::{block_size, segment_size};
}

pub use base::bytes::parse_bytes;
pub use base::check::Violation;
pub use base::clock::{Bell, Clock, VirtualClock};
#[doc(hidden)]
pub use base::looks::LookedAt;
pub use base::names::{Owner, PoolId, Tag};
#[doc(hidden)]
pub use base::random;
#[doc(hidden)]
pub use demand::owner::{OwnersHeld, hold_owners};
pub use demand::owner::{
    Task, Working, budget, current_owner, in_callback, is_in_callback, note_waiting_in_callback,
    priority, set_budget, set_followers, set_priority, set_skipped_rungs, skipped_rungs,
};
pub use driver::{CheckedDriver, Driver, DriverError, SimClock, SimConfig, SimDriver, StreamId};
#[doc(hidden)]
pub use engine::Kept;
pub use engine::{
    AllocFuture, BlockFigures, BlockUse, Engine, EngineConfig, HeldBlock, HeldSegment, PageFigures,
    RestoreError, SegmentFigures, Snapshot,
};
pub use ledger::history::{Action, Entry};
pub use ledger::lanes::LaneFigures;
pub use ledger::stats::{Stat, StatArray, Stats};
pub use options::inject::{Faults, Injection, InjectionError};
pub use options::ladder::{Ladder, Rung, RungSet};
pub use options::{Options, Policy};
pub use outcome::error::{
    AddressError, AllocError, Ended, FractionError, PoolError, Remedy, Shortage, Tried,
};
pub use outcome::receipt::{Answer, Group, Holder, Outcome, Receipt};
pub use shortage::callbacks::{Callback, CallbackId, Plea, Reply};
pub use shortage::climb::Waited;
pub use streams::captures::StreamFilter;
pub use streams::proof::LastingStreams;
