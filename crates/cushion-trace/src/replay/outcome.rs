//! The configuration and the results of a replay.

use std::collections::BTreeMap;
use std::sync::Arc;

use cushion_core::driver::CallCounts;
use cushion_core::{Ladder, Options, Policy, Receipt, Snapshot, Stats};

use crate::model::tally::Tally;

/// The configuration of a replay.
#[derive(Debug, Clone)]
pub struct ReplayConfig {
    /// The policy.
    pub policy: Policy,
    /// The ladder.
    pub ladder: Ladder,
    /// The most bytes the allocator may reserve, like PyTorch's memory fraction; `None` for no
    /// limit.
    pub capacity: Option<u64>,
    /// Options to use instead of the recorded ones.
    pub options: Option<Options>,
}

/// The result of a replay.
// One flat struct: callers read these figures by name, and it is part of the public interface.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Outcome {
    /// The number of events replayed.
    pub events: u64,
    /// The number of requests served.
    pub allocs: u64,
    /// The peak of live bytes, as requested.
    pub live_peak: u64,
    /// The first event at the peak of live bytes.
    pub live_peak_event: u64,
    /// The peak of reserved bytes.
    pub reserved_peak: u64,
    /// The first event at the peak of reserved bytes.
    pub reserved_peak_event: u64,
    /// The event of the last driver call that allocates, maps, reserves or releases.
    pub last_driver_event: u64,
    /// The number of requests that got PyTorch's address; `None` if PyTorch ran with another
    /// policy, which makes addresses incomparable.
    pub same_address: Option<u64>,
    /// The first request or refusal with another result than in PyTorch.
    pub difference: Option<Difference>,
    /// The driver calls and their cost.
    pub driver: CallCounts,
    /// The number of requests tried again after all cached memory was released.
    pub retries: u64,
    /// The first refusal.
    pub oom: Option<Refusal>,
    /// The number of requests that PyTorch refused and this replay skipped, because it has no
    /// limit.
    pub refusals_passed_over: u64,
    /// The number of frees that waited for work on another stream. That work counts as done when
    /// PyTorch noticed it.
    pub pending_frees: u64,
    /// The number of pending frees whose work this allocator waited for, so that it reused the
    /// memory earlier than PyTorch. The length of that wait is not known.
    pub hurried_frees: u64,
    /// The engine's statistics at the end.
    pub stats: Stats,
    /// The latest shortages, survived and refused, oldest first, at most 10,000.
    pub receipts: Vec<Arc<Receipt>>,
    /// Counts of all shortages.
    pub tally: Tally,
}

impl Outcome {
    /// Returns peak reserved bytes over peak live bytes; `None` if nothing was live.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a ratio")]
    pub fn excess(&self) -> Option<f64> {
        (self.live_peak > 0).then(|| self.reserved_peak as f64 / self.live_peak as f64)
    }
}

/// A refused request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Refusal {
    /// The event, counted from 0.
    pub event: u64,
    /// The requested bytes.
    pub requested: u64,
    /// The live bytes at that moment.
    pub live: u64,
    /// The reserved bytes at that moment.
    pub reserved: u64,
    /// The largest free block at that moment.
    pub largest_free: u64,
    /// Whether PyTorch refused the request too.
    pub recorded: bool,
    /// Whether the memory held before the first event already exceeds the capacity.
    pub at_beginning: bool,
}

/// The first difference from PyTorch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Difference {
    /// The event, counted from 0.
    pub event: u64,
    /// The requested bytes.
    pub requested: u64,
    /// PyTorch's address; `None` if PyTorch refused.
    pub pytorch: Option<u64>,
    /// The replay's address; `None` if the replay refused.
    pub ours: Option<u64>,
}

/// Observes a replay.
pub trait Watch {
    /// Whether [`Self::moment`] is called.
    const LOOKS: bool = true;

    /// Called after each step with the event of the latest request, counted from 0, and the live
    /// and reserved bytes after the step.
    fn moment(&mut self, event: u64, live: u64, reserved: u64);
}

/// No observer.
impl Watch for () {
    const LOOKS: bool = false;

    fn moment(&mut self, _: u64, _: u64, _: u64) {}
}

/// The state of an allocator at one moment of a replay.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct State {
    /// The segments and blocks.
    pub snapshot: Snapshot,
    /// The event that allocated each address; `None` for memory from before the first event.
    pub allocated_by: BTreeMap<u64, Option<u64>>,
}
