//! The program of a trace: the requests, frees and other steps that the recorded program made.
//!
//! A trace records the actions of PyTorch's allocator, not the calls of the program. Most actions
//! map directly: `alloc` is a request, `free_requested` followed by its `free_completed` is a free,
//! and a later `free_completed` is a free that waited for another stream. The rest is inferred:
//!
//! - **Private pools**: newer PyTorch names the pool in each event, and the final `segments` have
//!   it. For other segments it is inferred by trial replays (folder `infer`). An allocation in a
//!   segment of a private pool belongs to that pool. Consecutive allocations from one private pool
//!   count as one capture.
//! - **`empty_cache`** appears as a sequence of `segment_free` or `segment_unmap`. Right before a
//!   miss, the sequence can also be PyTorch's reaction to a shortage; the replay decides which by
//!   checking whether the limit would have been exceeded.
//! - **Pending frees that complete in such a sequence** were waited for, not polled.
//! - **Addresses** of segments are the recorded ones, so that block addresses can be compared.
//! - **A refused request** (`oom`) is tried again by a replay with a limit.
//! - **The memory held before the first event** is worked out in `beginning`.

pub(crate) mod beginning;
mod builder;
mod device;
mod floor;
pub(crate) mod holdings;
pub(crate) mod labels;
mod options;
pub(crate) mod recording;
pub(crate) mod refused;
pub(crate) mod steps;
mod streams;

use cushion_core::size::GIB;
use cushion_core::{Options, Policy, PoolId};

use self::beginning::Beginning;
use self::refused::RecordedOom;
use self::steps::{Rare, Steps};
use crate::model::snapshot::Origin;

/// The size of a device that no trace fills.
pub(crate) const UNLIMITED: u64 = 1024 * GIB;

/// The steps of a recorded program, and the options it ran with.
#[derive(Debug, Clone)]
pub struct Program {
    /// The steps, in order.
    pub(crate) steps: Steps,
    /// The memory that was held before the first event.
    pub(crate) beginning: Beginning,
    /// The pool of each segment of the beginning.
    pub(crate) beginning_pools: Vec<PoolId>,
    /// The number of events in the trace.
    pub events: u64,
    /// The number of allocations in the trace.
    pub allocs: u64,
    /// The options PyTorch ran with.
    pub options: Options,
    /// The policy PyTorch ran with.
    pub policy: Policy,
    /// The program that recorded the trace. Only traces of PyTorch have addresses to compare with.
    pub origin: Origin,
    /// The size of the device, if it can be inferred.
    pub(crate) device_total: Option<u64>,
    /// The out-of-memory error of the recorded run, if there was one.
    pub oom: Option<RecordedOom>,
    /// Notes for the user about what is inferred or unknown.
    pub notes: Vec<String>,
}

impl Program {
    /// Returns whether the program has no steps.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// Returns whether any free waits for work on another stream.
    #[must_use]
    pub fn waits(&self) -> bool {
        self.steps.rare_steps().iter().any(|step| matches!(step, Rare::FreeLater { .. }))
    }

    /// Returns whether memory was held before the first event.
    #[must_use]
    pub fn begins_in_the_middle(&self) -> bool {
        !self.beginning.is_empty()
    }
}

/// Returns an index as 32 bits. Readers refuse traces with more events.
fn narrow(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(u32::MAX)
}
