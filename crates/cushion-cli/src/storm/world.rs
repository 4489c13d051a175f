//! The data shared by the tasks of a storm: an engine over a simulated device whose work takes
//! time, and a model that checks the engine.
//!
//! The model knows every live block, and the checking driver sees all work: so memory that is
//! allocated twice, or while a stream still uses it, is detected. A failed check panics; `guard.rs`
//! limits that to one run.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cushion_core::driver::EventId;
use cushion_core::{
    CheckedDriver, Clock, Driver as _, Engine, EngineConfig, Ladder, Options, Policy, SimConfig,
    SimDriver, StreamId, Waited,
};

type SimGpu = CheckedDriver<Arc<SimDriver>>;

/// The engine of a storm.
pub(crate) type Gpu = Engine<Arc<SimGpu>>;

/// The number of steps between full checks. Every shortage is checked, too.
const CHECK_EVERY: u64 = 8;

/// The longest queue of a stream before a task that adds work must wait, as on a real device.
const LONGEST_QUEUE: Duration = Duration::from_millis(60);

/// The parameters of an engine.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Setting {
    pub(crate) seed: u64,
    pub(crate) policy: Policy,
    pub(crate) ladder: Ladder,
    /// The device's memory in bytes.
    pub(crate) device: u64,
    /// The longest wait of a request.
    pub(crate) wait: Duration,
    /// Pauses and computations are shortened by this factor.
    pub(crate) hurry: u32,
    /// Whether one thread does everything, so that statistics are consistent between any two steps.
    pub(crate) alone: bool,
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) engine: Gpu,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) setting: Setting,
    checked: Arc<SimGpu>,
    sim: Arc<SimDriver>,
    work: Mutex<Work>,
    /// Live blocks: address and size.
    live: Mutex<BTreeMap<u64, u64>>,
    lives: AtomicU64,
    steps: AtomicU64,
    /// The number of shortages at the last full check.
    seen: AtomicU64,
}

/// The device's queue.
#[derive(Debug, Default)]
struct Work {
    /// The end of each piece of work: its stream and number.
    due: BTreeMap<(Duration, u64), (StreamId, u64)>,
    /// The end of each stream's last work.
    ends: BTreeMap<StreamId, Duration>,
    queued: u64,
}

/// A live allocation.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Block {
    address: u64,
    bytes: u64,
    stream: StreamId,
    life: u64,
}

/// A computation that was queued.
#[derive(Debug)]
pub(crate) struct Queued {
    pub(crate) ends: Duration,
    event: EventId,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl World {
    pub(crate) fn new(setting: Setting, clock: Arc<dyn Clock>) -> Self {
        let sim = Arc::new(SimDriver::new(SimConfig::with_capacity(setting.device)));
        let checked = Arc::new(CheckedDriver::new(Arc::clone(&sim)));
        let mut options = Options {
            wait_ms: u64::try_from(setting.wait.as_millis()).unwrap_or(u64::MAX),
            ..Options::default()
        };
        options.ask_for(setting.policy);
        let config = EngineConfig {
            options,
            ladder: setting.ladder,
            clock: Arc::clone(&clock),
            waited: Waited::default(),
            seed: setting.seed,
        };
        Self {
            engine: Engine::with_config(Arc::clone(&checked), config),
            clock,
            setting,
            checked,
            sim,
            work: Mutex::default(),
            live: Mutex::default(),
            lives: AtomicU64::new(0),
            steps: AtomicU64::new(0),
            seen: AtomicU64::new(0),
        }
    }

    // ---- blocks ----

    /// Checks that a new allocation overlaps no live block, and notes it.
    pub(crate) fn admit(&self, address: u64, requested: u64, stream: StreamId) -> Block {
        let (bytes, asked) = self.engine.size_of(address).expect("a live allocation");
        assert!(asked == requested && bytes >= requested, "{bytes} bytes for {requested}");
        let mut live = lock(&self.live);
        let below = live.range(..address + bytes).next_back();
        let overlaps = below.filter(|&(&start, &size)| start + size > address);
        assert!(overlaps.is_none(), "{address:#x}+{bytes} overlaps the live {overlaps:x?}");
        live.insert(address, bytes);
        drop(live);
        let life = self.lives.fetch_add(1, Ordering::Relaxed);
        Block { address, bytes, stream, life }
    }

    pub(crate) fn free(&self, block: Block) {
        lock(&self.live).remove(&block.address);
        if let Err(error) = self.engine.free(block.address) {
            panic!("a live allocation is not freed: {error}");
        }
    }

    // ---- work of the device ----

    /// Returns when a stream accepts more work.
    pub(crate) fn takes_more(&self, stream: StreamId) -> Duration {
        let ends = lock(&self.work).ends.get(&stream).copied().unwrap_or_default();
        ends.saturating_sub(LONGEST_QUEUE / self.setting.hurry)
    }

    /// Queues work on `stream` that uses these blocks, after the pending work of their own streams.
    pub(crate) fn compute(&self, blocks: &[Block], stream: StreamId, takes: Duration) -> Queued {
        let now = self.clock.now();
        let mut work = lock(&self.work);
        let mut starts = now.max(work.ends.get(&stream).copied().unwrap_or_default());
        for block in blocks.iter().filter(|block| block.stream != stream) {
            let noted = self.engine.record_stream(block.address, stream);
            noted.expect("a live allocation");
            self.checked.wait(stream, block.stream);
            starts = starts.max(work.ends.get(&block.stream).copied().unwrap_or_default());
        }
        let number = self.sim.launch(stream);
        for block in blocks {
            self.checked.work(block.address, block.bytes, stream, block.life);
        }
        let event = self.checked.event_create().expect("an event");
        self.checked.event_record(event, stream).expect("a recorded event");
        let ends = starts + takes / self.setting.hurry;
        work.ends.insert(stream, ends);
        work.queued += 1;
        let key = (ends, work.queued);
        work.due.insert(key, (stream, number));
        Queued { ends, event }
    }

    /// Returns whether a computation is done.
    pub(crate) fn is_done(&self, queued: &Queued) -> bool {
        self.checked.event_query(queued.event).expect("an event that was recorded")
    }

    /// Drops a computation's event.
    pub(crate) fn forget(&self, queued: &Queued) {
        self.checked.event_destroy(queued.event).expect("an event that was recorded");
    }

    /// Returns when the device finishes its next work.
    pub(crate) fn next_done(&self) -> Option<Duration> {
        lock(&self.work).due.keys().next().map(|&(at, _)| at)
    }

    /// Finishes the work that is due by now.
    pub(crate) fn catch_up(&self) {
        let now = self.clock.now();
        let mut work = lock(&self.work);
        let later = work.due.split_off(&(now, u64::MAX));
        for (stream, number) in std::mem::replace(&mut work.due, later).into_values() {
            self.sim.finish_until(stream, number);
        }
    }

    // ---- checks ----

    /// Counts a step of a task, and checks now and then.
    pub(crate) fn step(&self) {
        let steps = self.steps.fetch_add(1, Ordering::Relaxed) + 1;
        if steps.is_multiple_of(CHECK_EVERY) || self.fell_short() {
            self.check();
        }
    }

    /// Returns the number of steps. A storm whose number stays the same is at a standstill.
    pub(crate) fn steps(&self) -> u64 {
        self.steps.load(Ordering::Relaxed)
    }

    fn fell_short(&self) -> bool {
        let shortages = self.engine.stats().shortages;
        self.seen.swap(shortages, Ordering::Relaxed) != shortages
    }

    /// Checks the engine's own invariants, and the model's.
    pub(crate) fn check(&self) {
        if let Err(violation) = self.engine.check_invariants() {
            panic!("{violation}");
        }
        if self.setting.alone {
            self.check_figures();
        }
    }

    fn check_figures(&self) {
        let stats = self.engine.stats();
        let live = lock(&self.live);
        assert_eq!(stats.reserved_bytes.all.current, self.sim.held(), "reserved and held differ");
        assert_eq!(stats.allocation.all.current, live.len() as u64, "live allocations");
        assert_eq!(stats.allocated_bytes.all.current, live.values().sum::<u64>(), "live bytes");
    }

    /// Checks after the last task that nothing is left.
    pub(crate) fn check_end(&self) {
        self.check();
        self.check_figures();
        assert!(lock(&self.live).is_empty(), "a task left a live block");
        assert_eq!(self.engine.waiting(), 0, "a request waits though every task has ended");
        self.sim.finish_all();
        self.engine.empty_cache().expect("a driver that works");
        self.check();
        assert_eq!(self.sim.held(), 0, "the device still holds memory");
    }
}
