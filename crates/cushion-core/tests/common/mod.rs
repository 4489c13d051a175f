//! Helpers of the engine's tests.

#![allow(dead_code, reason = "each test file uses its own share of the helpers")]
#![allow(clippy::unwrap_used, reason = "helpers of tests may fail a test")]

use std::sync::Arc;

use cushion_core::driver::Call;
use cushion_core::size::MIB;
use cushion_core::testing::RealClock;
use cushion_core::{
    AllocError, Clock, Ended, Engine, EngineConfig, Ladder, Options, Policy, PoolId, Receipt, Rung,
    Shortage, SimClock, SimConfig, SimDriver, StreamFilter, StreamId, Tried,
};

pub(crate) type Gpu = Engine<Arc<SimDriver>>;

pub(crate) const S0: StreamId = StreamId(0);
pub(crate) const S1: StreamId = StreamId(1);
pub(crate) const S2: StreamId = StreamId(2);
pub(crate) const POOL: PoolId = PoolId(0, 7);
pub(crate) const EXPANDABLE: &str = "expandable_segments:True";
pub(crate) const PAGED: &str = "paged:True";
/// A conf string for each of PyTorch's policies.
pub(crate) const POLICIES: [&str; 2] = ["", EXPANDABLE];

/// The options of a conf string to which segments are the default: what these tests say of sizes and addresses is
/// PyTorch's layout, to the byte.
pub(crate) fn options(conf: &str) -> Options {
    let mut options = Options::default();
    options.ask_for(Policy::Segments);
    options.apply(conf).unwrap();
    options
}

/// A device of so many MiB.
pub(crate) fn gpu(mib: u64, conf: &str) -> Gpu {
    gpu_with(mib, conf, Ladder::Graceful)
}

pub(crate) fn gpu_with(mib: u64, conf: &str, ladder: Ladder) -> Gpu {
    gpu_on(mib, conf, ladder, |sim| Arc::new(SimClock::new(Arc::clone(sim))))
}

/// On real time, for real threads.
pub(crate) fn real_gpu(mib: u64, conf: &str) -> Gpu {
    gpu_on(mib, conf, Ladder::Graceful, |_| Arc::new(RealClock::default()))
}

/// On the clock that is made for the device.
pub(crate) fn gpu_on(
    mib: u64,
    conf: &str,
    ladder: Ladder,
    clock: impl FnOnce(&Arc<SimDriver>) -> Arc<dyn Clock>,
) -> Gpu {
    let options = options(conf);
    let sim = Arc::new(SimDriver::new(SimConfig::with_capacity(mib * MIB)));
    let config = EngineConfig { options, ladder, clock: clock(&sim), ..EngineConfig::default() };
    Engine::with_config(sim, config)
}

/// Lets other threads run until so many requests wait.
pub(crate) fn until_waiting(gpu: &Gpu, count: usize) {
    while gpu.waiting() != count {
        std::thread::yield_now();
    }
}

/// The latest shortage.
pub(crate) fn last(gpu: &Gpu) -> Arc<Receipt> {
    gpu.check_invariants().unwrap();
    gpu.receipts().pop().expect("a shortage")
}

pub(crate) fn tried(receipt: &Receipt, rung: Rung) -> Tried {
    *receipt.shortage.tried.iter().find(|tried| tried.rung == rung).expect("it was tried")
}

/// How a rung ended in the latest shortage, and what it won in MiB.
pub(crate) fn ended(gpu: &Gpu, rung: Rung) -> (Ended, u64) {
    let tried = tried(&last(gpu), rung);
    (tried.ended, tried.won / MIB)
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
