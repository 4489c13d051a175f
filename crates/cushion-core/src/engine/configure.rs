//! Changes while an engine runs: options, the policy, the limit, and the streams that last.

use super::Engine;
use crate::base::names::PolicyIndex;
use crate::core::Core;
use crate::driver::Driver;
use crate::heap::block::BlockState;
use crate::heap::pool::PoolTable;
use crate::ledger::change::Change;
use crate::options::{NotOurs, Options, OptionsError, Policy};
use crate::outcome::error::FractionError;
use crate::policy::possible;
use crate::streams::proof::LastingStreams;

impl<D: Driver> Engine<D> {
    /// Applies a `PYTORCH_CUDA_ALLOC_CONF` string. On error nothing changes. Returns the keys that
    /// are not Cushion's.
    pub fn configure(&self, conf: &str) -> Result<Vec<NotOurs>, OptionsError> {
        let not_ours = {
            let mut core = self.shared.lock();
            let mut options = core.options.clone();
            let not_ours = options.apply(conf)?;
            self.adopt(&mut core, options);
            not_ours
        };
        self.shared.wake();
        Ok(not_ours)
    }

    /// Replaces all options.
    pub fn set_options(&self, options: Options) {
        self.adopt(&mut self.shared.lock(), options);
        self.shared.wake();
    }

    fn adopt(&self, core: &mut Core<D>, options: Options) {
        let before = std::mem::replace(&mut core.options, options);
        let (wanted, wanted_before) = (Policy::of(&core.options), Policy::of(&before));
        // A policy set by `set_policy` stays, unless the options select another.
        if wanted != wanted_before {
            self.put_in_force(core, wanted);
        }
        let fraction = core.options.per_process_memory_fraction;
        if fraction.to_bits() != before.per_process_memory_fraction.to_bits() {
            core.backing.set_limit(limit_of(fraction, self.shared.device.total));
        }
        let most = core.options.max_split_size.unwrap_or(u64::MAX);
        let is_oversize = |size: u64| size >= most;
        let live = core.heap.live_blocks().filter(|block| block.lane.pool != PoolTable::SPILL);
        let allocations = live.filter(|block| is_oversize(block.size)).count() as u64;
        let heads = core.heap.blocks().map(|(_, block)| block).filter(|block| block.prev.is_none());
        let held = heads.filter(|block| block.state != BlockState::Detached);
        let segments = held.map(|block| &core.heap[block.segment]);
        let segments = segments.filter(|it| it.is_plain() && is_oversize(it.size)).count() as u64;
        let change = Change::OversizeChanged { most, allocations, segments };
        self.shared.open(core).mem.ledger.apply(change);
    }

    fn put_in_force(&self, core: &mut Core<D>, policy: Policy) {
        core.setup.policy = possible(&self.shared.device, policy);
        core.policies.set_in_force(PolicyIndex::from(core.setup.policy));
    }

    /// Returns the options in force.
    #[must_use]
    pub fn options(&self) -> Options {
        self.shared.lock().options.clone()
    }

    /// Returns the policy in force.
    #[must_use]
    pub fn policy(&self) -> Policy {
        self.shared.lock().setup.policy
    }

    /// Changes the policy. Memory that another policy laid out stays as it is until it is given
    /// back. On a device without pages the policy is always `segments`.
    pub fn set_policy(&self, policy: Policy) {
        {
            let mut core = self.shared.lock();
            self.put_in_force(&mut core, policy);
            let policy = core.setup.policy;
            core.options.ask_for(policy);
        }
        self.shared.wake();
    }

    /// Sets the streams that the program never destroys. Free memory of such a stream can serve
    /// another as soon as its work is done, without waiting.
    pub fn set_lasting_streams(&self, streams: LastingStreams) {
        self.shared.changing(|core| core.mem.streams.set_lasting(streams));
    }

    /// Limits this engine to a fraction of the device; 1 removes the limit.
    pub fn set_memory_fraction(&self, fraction: f64) -> Result<(), FractionError> {
        if !(0.0..=1.0).contains(&fraction) {
            return Err(FractionError(fraction));
        }
        self.set_memory_limit(limit_of(fraction, self.shared.device.total));
        Ok(())
    }

    /// Limits this engine to a number of bytes; `None` removes the limit.
    pub fn set_memory_limit(&self, limit: Option<u64>) {
        self.shared.changing(|core| core.mem.backing.set_limit(limit));
    }

    /// Returns the fraction of the device that this engine may hold.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a fraction of bytes")]
    pub fn memory_fraction(&self) -> f64 {
        let limit = self.shared.lock().backing.limit();
        limit.map_or(1.0, |limit| limit as f64 / self.shared.device.total as f64)
    }
}

/// Returns a fraction of the device in bytes; `None` for all of it, which is not a limit.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a fraction between 0 and 1 of a size, truncated as PyTorch does"
)]
pub(super) fn limit_of(fraction: f64, device_total: u64) -> Option<u64> {
    (fraction < 1.0).then_some((fraction * device_total as f64) as u64)
}
