//! Actions that change options, limits and other tenants, or make calls fail.

use super::World;
use crate::Policy;
use crate::driver::{Call, FailWhen, Fault};
use crate::testing::CAPACITY;

/// Options that [`Action::Configure`](super::Action::Configure) selects from.
const CONFS: [&str; 26] = [
    "paged:True",
    "paged:False",
    "page_mb:16",
    "page_mb:2",
    "page_mb:64",
    "page_mb:4",
    "expandable_segments:False",
    "expandable_segments:True",
    "max_split_size_mb:32",
    "garbage_collection_threshold:0.5",
    "roundup_power2_divisions:4",
    "graph_capture_record_stream_reuse:True",
    "max_split_size_mb:24,garbage_collection_threshold:0.3,expandable_segments:True",
    "spill_limit_mb:96,spill_over_mb:1",
    "spill_limit_mb:32,spill_over_mb:2",
    "spill_limit_mb:off",
    "wait_ms:0",
    "wait_ms:3000",
    "skip_rungs:borrow+events",
    "skip_rungs:cached+pieces",
    "skip_rungs:none",
    "trim_ms:0",
    "trim_ms:100",
    "trim_ms:1000",
    "per_process_memory_fraction:0.5",
    "per_process_memory_fraction:1.0",
];

/// Injected failures that [`Action::Inject`](super::Action::Inject) selects from.
const INJECTIONS: [&str; 5] =
    ["", "nth=3", "fraction=0.2,seed=5,at=borrow", "every=4,at=wait", "over=20MiB,nth=2,at=spill"];

impl World {
    pub(super) fn configure(&self, conf: u8) {
        let conf = CONFS[usize::from(conf) % CONFS.len()];
        self.engine.configure(conf).expect("options are valid");
    }

    pub(super) fn set_policy(&self, policy: u8) {
        self.engine.set_policy(Policy::ALL[usize::from(policy) % Policy::ALL.len()]);
    }

    pub(super) fn set_limit(&self, bytes: Option<u64>) {
        self.engine.set_memory_limit(bytes.map(|bytes| bytes % CAPACITY));
    }

    pub(super) fn set_fraction(&self, percent: u8) {
        let fraction = f64::from(percent % 101) / 100.0;
        self.engine.set_memory_fraction(fraction).expect("the fraction is valid");
    }

    pub(super) fn set_tenant(&self, tenant: u8, bytes: u64) {
        self.sim.set_tenant(u32::from(tenant % 2), bytes % CAPACITY);
    }

    /// Scripts the failure of a driver call.
    pub(super) fn fail(&mut self, call: u8, nth: u8, out_of_memory: bool) {
        let call = Call::ALL[usize::from(call) % Call::ALL.len()];
        let fault = if out_of_memory { Fault::OutOfMemory } else { Fault::Failed(999) };
        self.sim.fail(FailWhen::Nth(call, u64::from(nth % 8) + 1), fault);
        self.failures_scripted = true;
    }

    pub(super) fn inject(&self, rules: u8) {
        let rules = INJECTIONS[usize::from(rules) % INJECTIONS.len()];
        self.engine.inject(Some(rules.parse().expect("rules are valid")));
    }

    pub(super) fn reset_stats(&self) {
        self.engine.reset_peak_stats();
        self.engine.reset_accumulated_stats();
    }
}
