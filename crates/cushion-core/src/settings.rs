//! What of an engine may be set at any time: options, the policy, the limit, and which streams last.

use crate::block::BlockState;
use crate::driver::Driver;
use crate::engine::Engine;
use crate::error::FractionError;
use crate::locked::State;
use crate::options::{NotOurs, Options, OptionsError};
use crate::policy::Policy;
use crate::pool::PoolTable;
use crate::proof::LastingStreams;

impl<D: Driver> Engine<D> {
    /// Applies a `PYTORCH_CUDA_ALLOC_CONF` string; on error nothing changes. Returns the keys that
    /// are not ours.
    pub fn configure(&self, conf: &str) -> Result<Vec<NotOurs>, OptionsError> {
        let not_ours = {
            let mut state = self.lock();
            let mut options = state.options.clone();
            let not_ours = options.apply(conf)?;
            self.adopt(&mut state, options);
            not_ours
        };
        self.wake();
        Ok(not_ours)
    }

    /// Replaces all options.
    pub fn set_options(&self, options: Options) {
        self.adopt(&mut self.lock(), options);
        self.wake();
    }

    fn adopt(&self, state: &mut State, options: Options) {
        let before = std::mem::replace(&mut state.options, options);
        let options = &state.options;
        // A policy that was set otherwise stays, unless the options ask for another.
        if Policy::of(options) != Policy::of(&before) {
            state.policy = self.device.possible(Policy::of(options));
        }
        let most = options.max_split_size.unwrap_or(u64::MAX);
        self.counters.max_split_size.set(most);
        let oversize = |size: u64| size >= most;
        let (allocations, segments) = (
            state
                .live
                .values()
                .map(|&id| &state.blocks[id])
                .filter(|block| oversize(block.size) && block.pool != PoolTable::SPILL)
                .count(),
            state
                .blocks
                .iter()
                .filter(|(_, b)| b.prev.is_none() && b.state != BlockState::Leaving)
                .map(|(_, b)| &state.segments[b.segment])
                .filter(|s| s.is_plain() && oversize(s.size))
                .count(),
        );
        self.counters.oversize_allocations.set_current(allocations as u64);
        self.counters.oversize_segments.set_current(segments as u64);
        let fraction = options.per_process_memory_fraction;
        if fraction.to_bits() != before.per_process_memory_fraction.to_bits() {
            state.limit = limit_of(fraction, self.device.total);
        }
    }

    /// The options in force.
    #[must_use]
    pub fn options(&self) -> Options {
        self.lock().options.clone()
    }

    /// The policy in force.
    #[must_use]
    pub fn policy(&self) -> Policy {
        self.lock().policy
    }

    /// Changes the policy. Memory that another policy laid out stays as it is until it is given back. Where the device
    /// has no pages, it is `segments` whatever is asked for.
    pub fn set_policy(&self, policy: Policy) {
        self.changing(|engine| {
            let policy = engine.device.possible(policy);
            engine.state.policy = policy;
            engine.state.options.ask_for(policy);
        });
    }

    /// Says which streams the program never destroys. Free memory of one of them can serve another as soon as its work
    /// is done, without waiting.
    pub fn set_lasting_streams(&self, streams: LastingStreams) {
        self.changing(|engine| engine.state.lasting = streams);
    }

    /// Limits this engine to a fraction of the device; 1 takes the limit away.
    pub fn set_memory_fraction(&self, fraction: f64) -> Result<(), FractionError> {
        if !(0.0..=1.0).contains(&fraction) {
            return Err(FractionError(fraction));
        }
        self.set_memory_limit(limit_of(fraction, self.device.total));
        Ok(())
    }

    /// Limits this engine to so many bytes.
    pub fn set_memory_limit(&self, limit: Option<u64>) {
        self.changing(|engine| engine.state.limit = limit);
    }

    /// The fraction of the device that this engine may hold.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a fraction of bytes")]
    pub fn memory_fraction(&self) -> f64 {
        self.lock().limit.map_or(1.0, |limit| limit as f64 / self.device.total as f64)
    }
}

/// What a fraction of the device is in bytes; `None` for all of it, which is no limit.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a fraction between 0 and 1 of a size, truncated as PyTorch does"
)]
pub(crate) fn limit_of(fraction: f64, device_total: u64) -> Option<u64> {
    (fraction < 1.0).then_some((fraction * device_total as f64) as u64)
}
