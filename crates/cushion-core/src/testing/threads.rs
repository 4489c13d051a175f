//! Random load from real threads, all short of memory. Some threads allocate, each on its own
//! stream. One thread captures graphs and releases their pools during the last replay, one returns
//! cached memory to the driver, one destroys streams, and one is the device, which finishes work. A
//! [`CheckedDriver`](crate::CheckedDriver) checks all calls.

use std::collections::BTreeSet;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::{Context as Polled, Poll, Waker};
use std::thread;

use super::gpu::Gpu;
use super::{CAPACITY, RealClock};
use crate::base::random::Random;
use crate::{
    AddressError, AllocError, Engine, EngineConfig, LastingStreams, Policy, PoolId, SimConfig,
    SimDriver, StreamId, Tag,
};

/// The number of threads that allocate, each on the stream with its own number.
const WORKERS: u64 = 4;

/// The stream that is captured.
const CAPTURED: StreamId = StreamId(6);

/// The first stream that is destroyed.
const FIRST_DESTROYED: u64 = 100;

/// The load to run.
#[derive(Debug, Clone, Copy)]
pub struct Stress {
    /// The seed of the random numbers. The order of the threads still differs between runs.
    pub seed: u64,
    /// The policy.
    pub policy: Policy,
    /// The number of operations of each thread that allocates.
    pub operations: u64,
}

/// The result of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stressed {
    /// Requests that were served.
    pub served: u64,
    /// Requests that were refused.
    pub refused: u64,
    /// Graphs that were captured.
    pub graphs: u64,
    /// Replays of graphs.
    pub replays: u64,
    /// Streams that were destroyed.
    pub destroyed: u64,
}

/// The state that all threads share.
#[derive(Debug)]
struct Shared {
    engine: Engine<Arc<Gpu>>,
    gpu: Arc<Gpu>,
    sim: Arc<SimDriver>,
    lives: AtomicU64,
    working: AtomicUsize,
    served: AtomicU64,
    refused: AtomicU64,
    graphs: AtomicU64,
    replays: AtomicU64,
    destroyed: AtomicU64,
}

/// One allocation.
#[derive(Debug)]
struct Block {
    address: u64,
    size: u64,
    stream: StreamId,
    life: u64,
}

/// Counts a thread as working until it ends or panics. The other threads continue as long as one
/// works.
struct Working<'a>(&'a AtomicUsize);

impl Drop for Working<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Runs the threads to their end, frees everything, and checks that no memory is left.
///
/// # Panics
///
/// If the engine breaks a promise.
pub fn stress(what: Stress) -> Stressed {
    let sim = Arc::new(SimDriver::new(SimConfig::with_capacity(2 * CAPACITY)));
    let gpu = Arc::new(Gpu::slow(Arc::clone(&sim), 50));
    let clock = Arc::new(RealClock::default());
    let config = EngineConfig { clock, ..EngineConfig::default() };
    let engine = Engine::with_config(Arc::clone(&gpu), config);
    engine.set_policy(what.policy);
    engine.configure("page_mb:4,trim_ms:20,wait_ms:5").expect("options are valid");
    let lasting = BTreeSet::from([StreamId(1), StreamId(2), CAPTURED]);
    engine.set_lasting_streams(LastingStreams::These(lasting));
    let zero = || AtomicU64::new(0);
    let shared = Shared {
        engine,
        gpu,
        sim,
        lives: zero(),
        working: AtomicUsize::new(usize::try_from(WORKERS).unwrap_or(0) + 1),
        served: zero(),
        refused: zero(),
        graphs: zero(),
        replays: zero(),
        destroyed: zero(),
    };
    thread::scope(|scope| {
        let (shared, seed) = (&shared, what.seed.wrapping_mul(1000));
        scope.spawn(move || shared.device(Random(seed + 1)));
        scope.spawn(move || shared.giver(Random(seed + 2)));
        scope.spawn(move || shared.capturer(Random(seed + 3)));
        scope.spawn(move || shared.destroyer(Random(seed + 4), what.operations));
        for worker in 0..WORKERS {
            let random = Random(seed + 5 + worker);
            scope.spawn(move || shared.worker(random, worker, what.operations));
        }
    });
    shared.finish()
}

impl Shared {
    fn continues(&self) -> bool {
        self.working.load(Ordering::Relaxed) > 0
    }

    fn life(&self) -> u64 {
        self.lives.fetch_add(1, Ordering::Relaxed)
    }

    /// Finishes work, at a varying speed.
    fn device(&self, mut random: Random) {
        while self.continues() {
            for _ in 0..random.next() % 40 {
                self.sim.finish_oldest();
            }
            pause(random.next() % 4);
        }
    }

    /// Returns memory to the driver, and changes options.
    fn giver(&self, mut random: Random) {
        const CONFS: [&str; 4] =
            ["page_mb:4", "page_mb:16", "spill_limit_mb:64,spill_over_mb:1", "spill_limit_mb:off"];
        let engine = &self.engine;
        while self.continues() {
            let chance = random.next();
            match random.next() % 40 {
                0 | 1 => engine.empty_cache().expect("the driver works"),
                2 => engine.process_events().expect("the driver works"),
                3 => engine.set_memory_limit(Some((200 + chance % 300) << 20)),
                4 => engine.set_memory_limit(None),
                5 => drop(
                    engine.configure(CONFS[index(chance, CONFS.len())]).expect("options are valid"),
                ),
                6 => {
                    let _ = engine.prefetch(chance % (30 << 20), StreamId(chance % WORKERS));
                }
                7 => engine.check_invariants().expect("the invariants hold"),
                8 => drop(engine.snapshot()),
                _ => drop(engine.trim().expect("the driver works")),
            }
            pause(random.next() % 100);
        }
    }

    /// Captures graphs, replays them on other streams, and releases their pools right after.
    fn capturer(&self, mut random: Random) {
        for number in 1.. {
            if !self.continues() {
                return;
            }
            let pool = PoolId(0, number);
            let baked = self.capture(&mut random, pool);
            let mut before = None;
            for _ in 0..random.next() % 4 {
                pause(random.next() % 50);
                let stream = StreamId(random.next() % WORKERS);
                // A correct program orders the replays of one graph.
                if let Some(before) = before.replace(stream) {
                    self.gpu.checked.wait(stream, before);
                }
                let life = self.life();
                self.sim.launch(stream);
                for &(address, size) in &baked {
                    self.gpu.checked.work(address, size, stream, life);
                }
                self.replays.fetch_add(1, Ordering::Relaxed);
            }
            self.engine.release_pool(pool).expect("the pool is in use");
            pause(random.next() % 60);
        }
    }

    fn capture(&self, random: &mut Random, pool: PoolId) -> Vec<(u64, u64)> {
        let begun = self.engine.begin_allocate_to_pool(pool, Box::new(|stream| stream == CAPTURED));
        begun.expect("the pool is new");
        self.sim.begin_capture(CAPTURED);
        self.gpu.checked.begin_capture(CAPTURED);
        let mut live = Vec::new();
        let mut baked = Vec::new();
        for _ in 0..random.next() % 10 {
            if let Ok(address) = self.engine.alloc(1 + random.next() % (20 << 20), CAPTURED) {
                let (size, _) = self.engine.size_of(address).expect("a live allocation");
                self.sim.launch(CAPTURED);
                let behind = self.gpu.checked.behind(address, size);
                baked.push((address, size, behind));
                live.push(address);
            }
            if random.next().is_multiple_of(2) && !live.is_empty() {
                let address = live.swap_remove(index(random.next(), live.len()));
                self.engine.free(address).expect("a live allocation");
            }
        }
        self.gpu.checked.end_capture(CAPTURED);
        self.sim.end_capture(CAPTURED);
        self.engine.end_allocate_to_pool(pool).expect("the pool is open");
        for address in live {
            self.engine.free(address).expect("a live allocation");
        }
        self.graphs.fetch_add(1, Ordering::Relaxed);
        let is_there = |&(address, size, ref behind): &(u64, u64, _)| {
            assert_eq!(
                &self.gpu.checked.behind(address, size),
                behind,
                "the memory of a graph changed"
            );
            (address, size)
        };
        baked.iter().map(is_there).collect()
    }

    fn worker(&self, mut random: Random, number: u64, operations: u64) {
        let _working = Working(&self.working);
        let mut live: Vec<Block> = Vec::new();
        for _ in 0..operations {
            if random.next() % 100 < 52 {
                let shares = random.next().is_multiple_of(5);
                let stream = StreamId(if shares { 0 } else { number });
                live.extend(self.alloc(&mut random, stream));
            }
            if live.len() > 12 || random.next() % 100 < 45 && !live.is_empty() {
                let block = live.swap_remove(index(random.next(), live.len()));
                if random.next().is_multiple_of(4) {
                    self.use_on(&block, StreamId(random.next() % WORKERS));
                }
                self.free(&block);
            }
        }
        live.iter().for_each(|block| self.free(block));
    }

    /// Creates streams, and destroys them while they have unfinished work and live blocks.
    fn destroyer(&self, mut random: Random, operations: u64) {
        let _working = Working(&self.working);
        let mut live: Vec<Block> = Vec::new();
        let mut stream = StreamId(FIRST_DESTROYED);
        for _ in 0..operations {
            match random.next() % 10 {
                0..5 => live.extend(self.alloc(&mut random, stream)),
                5..9 if !live.is_empty() => {
                    let block = live.swap_remove(index(random.next(), live.len()));
                    self.free(&block);
                }
                9 => {
                    self.sim.destroy_stream(stream);
                    self.gpu.checked.destroy_stream(stream);
                    stream = StreamId(stream.0 + 1);
                    self.destroyed.fetch_add(1, Ordering::Relaxed);
                }
                _ => {}
            }
            if live.len() > 6 {
                self.free(&live.remove(0));
            }
        }
        live.iter().for_each(|block| self.free(block));
    }

    fn alloc(&self, random: &mut Random, stream: StreamId) -> Option<Block> {
        let most = [1 << 20, 4 << 20, 40 << 20, 40 << 20][index(random.next(), 4)];
        let size = 1 + random.next() % most;
        let asked = match random.next() % 8 {
            0 | 1 => match self.engine.alloc_at_once_for(size, stream, Tag::NONE) {
                Ok(None) => self.engine.alloc_for(size, stream, Tag::NONE),
                at_once => at_once.map(Option::unwrap_or_default),
            },
            2 => self.poll(random, size, stream)?,
            _ => self.engine.alloc(size, stream),
        };
        match asked {
            Ok(address) => {
                self.served.fetch_add(1, Ordering::Relaxed);
                let (size, _) = self.engine.size_of(address).expect("a live allocation");
                let block = Block { address, size, stream, life: self.life() };
                self.sim.launch(stream);
                self.gpu.checked.work(address, size, stream, block.life);
                Some(block)
            }
            Err(AllocError::Driver(error)) => panic!("{error}"),
            Err(_) => {
                self.refused.fetch_add(1, Ordering::Relaxed);
                None
            }
        }
    }

    /// Requests memory by a future. Drops the future if it waits too long.
    fn poll(
        &self,
        random: &mut Random,
        size: u64,
        stream: StreamId,
    ) -> Option<Result<u64, AllocError>> {
        let mut future = pin!(self.engine.alloc_async(size, stream));
        for _ in 0..=random.next() % 8 {
            if let Poll::Ready(result) =
                future.as_mut().poll(&mut Polled::from_waker(Waker::noop()))
            {
                return Some(result);
            }
            pause(random.next() % 20);
        }
        None
    }

    fn use_on(&self, block: &Block, stream: StreamId) {
        self.engine.record_stream(block.address, stream).expect("a live allocation");
        self.gpu.checked.wait(stream, block.stream);
        self.sim.launch(stream);
        self.gpu.checked.work(block.address, block.size, stream, block.life);
    }

    fn free(&self, block: &Block) {
        match self.engine.free(block.address) {
            Ok(()) => {}
            Err(AddressError::Driver { source, .. }) => panic!("{source}"),
            Err(error) => panic!("a live allocation is not freed: {error}"),
        }
    }

    fn finish(self) -> Stressed {
        self.engine.check_invariants().expect("the invariants hold");
        self.sim.finish_all();
        self.engine.set_memory_limit(None);
        self.engine.empty_cache().expect("the driver works");
        self.engine.check_invariants().expect("the invariants hold");
        let stats = self.engine.stats();
        assert_eq!(stats.reserved_bytes.all.current, 0, "memory is left: {stats:#?}");
        assert_eq!(stats.active_bytes.all.current, 0, "memory is in use: {stats:#?}");
        assert_eq!(
            (self.sim.held(), self.sim.held_host()),
            (0, 0),
            "the device reports that memory is left"
        );
        assert_eq!(self.engine.waiting(), 0, "a request still waits");
        Stressed {
            served: self.served.into_inner(),
            refused: self.refused.into_inner(),
            graphs: self.graphs.into_inner(),
            replays: self.replays.into_inner(),
            destroyed: self.destroyed.into_inner(),
        }
    }
}

/// Returns an index below `count` from a random number.
fn index(chance: u64, count: usize) -> usize {
    usize::try_from(chance % count.max(1) as u64).unwrap_or(0)
}

/// Yields to other threads.
fn pause(times: u64) {
    (0..times).for_each(|_| thread::yield_now());
}
