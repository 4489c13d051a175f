//! Helpers of the engine's tests.

#![allow(dead_code, reason = "each test file uses its own share of the helpers")]
#![allow(clippy::unwrap_used, reason = "helpers of tests may fail a test")]

use std::sync::Arc;

use cushion_core::driver::Call;
use cushion_core::size::MIB;
use cushion_core::{
    AllocError, Engine, EngineConfig, Ladder, Options, PoolId, Shortage, SimClock, SimConfig,
    SimDriver, StreamFilter, StreamId,
};

pub(crate) type Gpu = Engine<Arc<SimDriver>>;

pub(crate) const S0: StreamId = StreamId(0);
pub(crate) const S1: StreamId = StreamId(1);
pub(crate) const S2: StreamId = StreamId(2);
pub(crate) const POOL: PoolId = PoolId(0, 7);
pub(crate) const EXPANDABLE: &str = "expandable_segments:True";
/// A conf string for each policy.
pub(crate) const POLICIES: [&str; 2] = ["", EXPANDABLE];

/// A device of so many MiB.
pub(crate) fn gpu(mib: u64, conf: &str) -> Gpu {
    gpu_with(mib, conf, Ladder::Graceful)
}

pub(crate) fn gpu_with(mib: u64, conf: &str, ladder: Ladder) -> Gpu {
    let options = Options::parse(conf).unwrap().options;
    let sim = Arc::new(SimDriver::new(SimConfig::with_capacity(mib * MIB)));
    let clock = Arc::new(SimClock::new(Arc::clone(&sim)));
    let config = EngineConfig { options, ladder, clock, ..EngineConfig::default() };
    Engine::with_config(sim, config)
}

/// Allocates what must fit.
pub(crate) fn take(gpu: &Gpu, bytes: u64, stream: StreamId) -> u64 {
    gpu.alloc(bytes, stream).unwrap()
}

pub(crate) fn calls(gpu: &Gpu, call: Call) -> u64 {
    gpu.driver().counts().of(call)
}

pub(crate) fn reserved_mib(gpu: &Gpu) -> u64 {
    gpu.check_invariants().unwrap();
    assert_eq!(gpu.stats().reserved_bytes.all.current, gpu.driver().held());
    gpu.driver().held() / MIB
}

pub(crate) fn every_stream() -> StreamFilter {
    Box::new(|_| true)
}

pub(crate) fn full_now(result: Result<u64, AllocError>) -> Shortage {
    match result {
        Err(AllocError::FullNow(shortage)) => *shortage,
        other => panic!("not full now: {other:?}"),
    }
}

pub(crate) fn never_fits(result: Result<u64, AllocError>) -> Shortage {
    match result {
        Err(AllocError::NeverFits(shortage)) => *shortage,
        other => panic!("fits: {other:?}"),
    }
}

/// Runs what must leave no trace.
pub(crate) fn unchanged<T>(gpu: &Gpu, action: impl FnOnce() -> T) -> T {
    let before = (gpu.stats(), gpu.snapshot(), gpu.driver().counts());
    let result = action();
    assert_eq!((gpu.stats(), gpu.snapshot(), gpu.driver().counts()), before);
    gpu.check_invariants().unwrap();
    result
}
