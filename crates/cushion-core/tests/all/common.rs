//! Helpers that several test files of the engine share.

#![allow(dead_code, reason = "no test file uses every helper")]
#![allow(clippy::unwrap_used, reason = "a helper that panics fails its test")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Wake, Waker};

use cushion_core::driver::Call;
use cushion_core::size::MIB;
use cushion_core::testing::RealClock;
use cushion_core::{
    AllocError, CheckedDriver, Clock, Driver, Ended, Engine, EngineConfig, Ladder, Options, Policy,
    PoolId, Receipt, Rung, Shortage, SimClock, SimConfig, SimDriver, StreamFilter, StreamId, Tried,
    VirtualClock,
};

pub(crate) type Gpu = Engine<Arc<SimDriver>>;
/// An engine on a driver that panics when a call breaks the driver's contract.
pub(crate) type CheckedGpu = Engine<Arc<CheckedDriver<Arc<SimDriver>>>>;

pub(crate) const S0: StreamId = StreamId(0);
pub(crate) const S1: StreamId = StreamId(1);
pub(crate) const S2: StreamId = StreamId(2);
pub(crate) const POOL: PoolId = PoolId(0, 7);
pub(crate) const SEGMENTS: &str = "paged:False";
pub(crate) const EXPANDABLE: &str = "expandable_segments:True";
pub(crate) const PAGED: &str = "paged:True";
/// A conf string for each of PyTorch's policies.
pub(crate) const POLICIES: [&str; 2] = ["", EXPANDABLE];
/// A conf string for each policy that maps pages.
pub(crate) const ON_PAGES: [&str; 2] = [PAGED, EXPANDABLE];
/// A conf string for each policy.
pub(crate) const ALL_POLICIES: [&str; 3] = [SEGMENTS, EXPANDABLE, PAGED];

// ---- engines ----

/// Returns the options of a conf string, with `segments` as the default policy: many tests assert
/// sizes and addresses of PyTorch's layout, to the byte.
pub(crate) fn options(conf: &str) -> Options {
    let mut options = Options::default();
    options.ask_for(Policy::Segments);
    options.apply(conf).unwrap();
    options
}

/// Returns an engine on a simulated device of `mib` MiB, on simulated time.
pub(crate) fn gpu(mib: u64, conf: &str) -> Gpu {
    gpu_with(mib, conf, Ladder::Graceful)
}

pub(crate) fn gpu_with(mib: u64, conf: &str, ladder: Ladder) -> Gpu {
    gpu_on(mib, conf, ladder, |sim| Arc::new(SimClock::new(Arc::clone(sim))))
}

/// Like [`gpu`], on real time, for tests with real threads.
pub(crate) fn real_gpu(mib: u64, conf: &str) -> Gpu {
    gpu_on(mib, conf, Ladder::Graceful, |_| Arc::new(RealClock::default()))
}

/// Like [`gpu`], on virtual time, which only the returned clock advances.
pub(crate) fn virtual_gpu(mib: u64, conf: &str) -> (Gpu, Arc<VirtualClock>) {
    let clock = Arc::new(VirtualClock::new());
    (gpu_on(mib, conf, Ladder::Graceful, |_| Arc::clone(&clock) as _), clock)
}

/// Like [`gpu`], with a chosen ladder, on the clock that `clock` returns for the device.
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

/// Returns an engine on a checked driver, and the simulated device behind that driver. `paged` is
/// the default policy.
pub(crate) fn checked_gpu(mib: u64, conf: &str) -> (CheckedGpu, Arc<SimDriver>) {
    let sim = Arc::new(SimDriver::new(SimConfig::with_capacity(mib * MIB)));
    (checked_engine(&sim, conf, EngineConfig::default()), sim)
}

/// Like [`checked_gpu`], on simulated time.
pub(crate) fn checked_gpu_with_clock(
    mib: u64,
    conf: &str,
) -> (CheckedGpu, Arc<SimDriver>, Arc<SimClock>) {
    let sim = Arc::new(SimDriver::new(SimConfig::with_capacity(mib * MIB)));
    let clock = Arc::new(SimClock::new(Arc::clone(&sim)));
    let of_engine: Arc<dyn Clock> = Arc::clone(&clock) as _;
    let config = EngineConfig { clock: of_engine, ..EngineConfig::default() };
    (checked_engine(&sim, conf, config), sim, clock)
}

fn checked_engine(sim: &Arc<SimDriver>, conf: &str, config: EngineConfig) -> CheckedGpu {
    let driver = Arc::new(CheckedDriver::new(Arc::clone(sim)));
    let options = Options::parse(conf).unwrap().options;
    Engine::with_config(driver, EngineConfig { options, ..config })
}

// ---- allocating and freeing ----

/// Allocates; panics if the request is refused.
pub(crate) fn take(gpu: &Gpu, bytes: u64, stream: StreamId) -> u64 {
    gpu.alloc(bytes, stream).unwrap()
}

/// Allocates a block and frees it, so that the engine caches its memory; returns its address.
pub(crate) fn cache<D: Driver>(gpu: &Engine<D>, bytes: u64, stream: StreamId) -> u64 {
    let address = gpu.alloc(bytes, stream).unwrap();
    gpu.free(address).unwrap();
    address
}

/// Frees the blocks with an even index, and returns the others.
pub(crate) fn free_every_second<D: Driver>(gpu: &Engine<D>, blocks: &[u64]) -> Vec<u64> {
    blocks.iter().step_by(2).for_each(|&block| gpu.free(block).unwrap());
    blocks.iter().skip(1).step_by(2).copied().collect()
}

/// Allocates and frees until the program has freed more bytes than are live: from then on the
/// engine assumes that the program is loaded.
pub(crate) fn load<D: Driver>(gpu: &Engine<D>, bytes: u64) {
    let live = gpu.stats().active_bytes.all.current;
    for _ in 0..=live / bytes + 1 {
        cache(gpu, bytes, S0);
    }
}

// ---- waiting ----

/// Counts how often it is woken.
#[derive(Default)]
pub(crate) struct WakeCount(AtomicU64);

impl Wake for WakeCount {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl WakeCount {
    pub(crate) fn waker(self: &Arc<Self>) -> Waker {
        Waker::from(Arc::clone(self))
    }

    /// Returns how often it was woken since the last call.
    pub(crate) fn take(&self) -> u64 {
        self.0.swap(0, Ordering::Relaxed)
    }
}

/// Yields to other threads until exactly `count` requests wait.
pub(crate) fn until_waiting(gpu: &Gpu, count: usize) {
    while gpu.waiting() != count {
        std::thread::yield_now();
    }
}

// ---- figures and receipts ----

/// Returns the receipt of the latest shortage, after a check of the invariants.
pub(crate) fn last(gpu: &Gpu) -> Arc<Receipt> {
    gpu.check_invariants().unwrap();
    gpu.receipts().pop().expect("a shortage")
}

pub(crate) fn tried(receipt: &Receipt, rung: Rung) -> Tried {
    *receipt.shortage.tried.iter().find(|tried| tried.rung == rung).expect("the rung was tried")
}

/// Returns how a rung ended in the latest shortage, and the MiB that it won.
pub(crate) fn ended(gpu: &Gpu, rung: Rung) -> (Ended, u64) {
    let tried = tried(&last(gpu), rung);
    (tried.ended, tried.won / MIB)
}

/// Returns how often the engine made a driver call.
pub(crate) fn calls(gpu: &Gpu, call: Call) -> u64 {
    gpu.driver().counts().of(call)
}

/// Returns the reserved MiB, after a check of the invariants and of the statistics.
pub(crate) fn reserved_mib(gpu: &Gpu) -> u64 {
    gpu.check_invariants().unwrap();
    assert_eq!(gpu.stats().reserved_bytes.all.current, gpu.driver().held());
    gpu.driver().held() / MIB
}

/// Returns a filter that sends the allocations of every stream to a private pool.
pub(crate) fn every_stream() -> StreamFilter {
    Box::new(|_| true)
}

// ---- errors ----

pub(crate) fn full_now(result: Result<u64, AllocError>) -> Shortage {
    match result {
        Err(AllocError::FullNow(shortage)) => *shortage,
        other => panic!("expected FullNow: {other:?}"),
    }
}

pub(crate) fn never_fits(result: Result<u64, AllocError>) -> Shortage {
    match result {
        Err(AllocError::NeverFits(shortage)) => *shortage,
        other => panic!("expected NeverFits: {other:?}"),
    }
}

pub(crate) fn assert_driver_error(result: Result<u64, AllocError>) {
    assert!(matches!(result, Err(AllocError::Driver(_))), "expected Driver: {result:?}");
}

/// Runs `action` and asserts that it changes no figure, no block and makes no driver call.
pub(crate) fn unchanged<T>(gpu: &Gpu, action: impl FnOnce() -> T) -> T {
    let before = (gpu.stats(), gpu.snapshot(), gpu.driver().counts());
    let result = action();
    assert_eq!((gpu.stats(), gpu.snapshot(), gpu.driver().counts()), before);
    gpu.check_invariants().unwrap();
    result
}
