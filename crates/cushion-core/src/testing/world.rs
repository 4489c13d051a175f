//! Runs the actions of a program on an engine and checks the engine's promises after each one.

mod act;
mod check;
mod futures;
mod graphs;
mod memory;
mod options;
mod other_thread;
mod pools;
mod streams;

pub use futures::Futures;

use std::sync::Arc;

use self::graphs::Captures;
use self::memory::Memory;
use self::other_thread::OtherThread;
use self::pools::Pools;
use self::streams::Streams;
use super::gpu::Gpu;
use super::{Action, CAPACITY, Setup};
use crate::{
    Clock, Engine, EngineConfig, Ladder, LastingStreams, Policy, SimClock, SimConfig, SimDriver,
};

type SimEngine = Engine<Arc<Gpu>>;

/// Runs actions on an engine and checks the engine's promises. It keeps a model of the program's
/// allocations, streams, captures and pools, and compares the engine with it.
#[derive(Debug)]
pub struct World {
    engine: Arc<SimEngine>,
    gpu: Arc<Gpu>,
    sim: Arc<SimDriver>,
    clock: Arc<SimClock>,
    memory: Memory,
    streams: Streams,
    captures: Captures,
    pools: Pools,
    other_thread: OtherThread,
    /// The number of futures that wait.
    futures: usize,
    /// Whether scripted driver failures may still occur, or have occurred in the current action.
    failures_scripted: bool,
    ladder: Ladder,
}

impl World {
    /// Creates a world with an empty device.
    #[must_use]
    pub fn new(policy: Policy, ladder: Ladder) -> Self {
        Self::with(Setup::new(policy, ladder))
    }

    /// Creates a world with the empty device that `setup` describes.
    ///
    /// # Panics
    ///
    /// If the engine refuses its own options.
    #[must_use]
    pub fn with(setup: Setup) -> Self {
        let Setup { policy, ladder, granularity, host, unreported, most_ranges } = setup;
        let sim = Arc::new(SimDriver::new(SimConfig {
            granularity: granularity.unwrap_or(2 << 20),
            has_pages: granularity.is_some(),
            host,
            total: CAPACITY + unreported,
            ..SimConfig::with_capacity(CAPACITY)
        }));
        let gpu = Arc::new(Gpu::new(Arc::clone(&sim)));
        let clock = Arc::new(SimClock::new(Arc::clone(&sim)));
        let engine_clock: Arc<dyn Clock> = Arc::clone(&clock) as _;
        let config = EngineConfig { ladder, clock: engine_clock, ..EngineConfig::default() };
        let engine = Engine::with_config(Arc::clone(&gpu), config);
        engine.set_policy(policy);
        // The device is small. These pages have the usual size in relation to it.
        engine.configure("page_mb:4,trim_ms:1000").expect("options are valid");
        let streams = Streams::default();
        engine.set_lasting_streams(LastingStreams::These(streams.promised.clone()));
        engine.record_history(64);
        if let Some(most) = most_ranges {
            engine.set_most_ranges(most);
        }
        Self {
            engine: Arc::new(engine),
            gpu,
            sim,
            clock,
            memory: Memory::default(),
            streams,
            captures: Captures::default(),
            pools: Pools::default(),
            other_thread: OtherThread::default(),
            futures: 0,
            failures_scripted: false,
            ladder,
        }
    }

    /// Returns the engine, for [`Futures`] to borrow.
    #[must_use]
    pub(crate) fn engine(&self) -> Arc<SimEngine> {
        Arc::clone(&self.engine)
    }

    /// Runs one action and checks everything. Drops futures that have to wait.
    ///
    /// # Panics
    ///
    /// If the engine breaks a promise.
    pub fn step(&mut self, action: &Action) {
        let engine = self.engine();
        let mut futures = Futures::of(&engine);
        self.step_with(action, &mut futures);
        futures.drop_all();
        self.futures = 0;
    }

    /// Runs one action and checks everything. Keeps futures that have to wait in `futures`.
    ///
    /// # Panics
    ///
    /// If the engine breaks a promise.
    pub fn step_with(&mut self, action: &Action, futures: &mut Futures<'_>) {
        self.arm(action);
        self.act(action, futures);
        self.settle();
        self.gpu.meanwhile(None);
        self.futures = futures.len();
        self.check();
    }

    /// Ends every capture, frees everything, and checks that no memory is left.
    ///
    /// # Panics
    ///
    /// If memory is left, or the engine breaks a promise.
    pub fn finish(mut self) {
        self.sim.clear_failures();
        self.failures_scripted = false;
        self.engine.inject(None);
        self.step(&Action::EndSilentCapture);
        self.step(&Action::EndCapture);
        for pool in self.pools.open.clone() {
            self.end_pool(pool);
        }
        let addresses: Vec<u64> = self.memory.live.keys().copied().collect();
        for address in addresses {
            self.engine.free(address).expect("every later free succeeds");
            self.memory.live.remove(&address);
            self.check();
        }
        self.pools.baked.clear();
        for (pool, uses) in std::mem::take(&mut self.pools.uses) {
            for _ in 0..uses {
                self.engine.release_pool(pool).expect("the pool is in use");
            }
        }
        self.sim.finish_all();
        self.engine.empty_cache().expect("the driver works");
        self.check();
        let stats = self.engine.stats();
        assert_eq!(stats.reserved_bytes.all.current, 0, "memory is left: {stats:#?}");
        assert_eq!(self.sim.held(), 0, "the device reports that memory is left");
        assert_eq!(self.sim.held_host(), 0, "the host reports that memory is left");
    }
}
