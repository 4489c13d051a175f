//! Random programs for property tests and fuzzing: actions, a world that runs them, and a model of
//! what the engine promises.
//!
//! The world runs each [`Program`](Action) on an engine over a [`CheckedDriver`] over a
//! [`SimDriver`]. After every action the engine's own invariants are checked, and the model's: no two
//! live blocks share a byte, no memory is handed out while another stream may still be at work on it,
//! and the figures agree with what was asked for. It panics at the first that does not hold.

pub mod churn;
pub mod contract;
mod real_clock;

pub use real_clock::RealClock;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::driver::{Bytes, Call, FailWhen, Fault};
use crate::{
    AddressError, AllocError, CheckedDriver, Clock, Engine, EngineConfig, Ladder, LastingStreams,
    Policy, PoolError, PoolId, SimClock, SimConfig, SimDriver, StreamFilter, StreamId,
};

/// The device the world simulates: small, so that memory runs out often.
pub const CAPACITY: u64 = 256 << 20;

/// One thing a program, or its surroundings, may do. Numbers are taken modulo what there is.
#[derive(Debug, Clone, PartialEq)]
#[expect(missing_docs, reason = "the variants say it")]
pub enum Action {
    Alloc {
        size: u64,
        stream: u8,
    },
    Free {
        index: u16,
    },
    /// Work on another stream that uses a live block, noted with the engine.
    UseOn {
        index: u16,
        stream: u8,
    },
    Finish {
        stream: u8,
    },
    FinishAll,
    ProcessEvents,
    EmptyCache,
    EmptyPool {
        pool: u8,
    },
    BeginPool {
        pool: u8,
        stream: Option<u8>,
    },
    EndPool {
        pool: u8,
    },
    ReleasePool {
        pool: u8,
    },
    UseOnOom {
        pool: u8,
        allow: bool,
    },
    NoSplit {
        pool: u8,
    },
    /// Captures a stream into a private pool.
    BeginCapture {
        pool: u8,
        stream: u8,
    },
    /// Makes another stream follow the captured one, and so join its capture.
    JoinCapture {
        stream: u8,
    },
    /// Makes the captured stream follow another.
    FollowStream {
        stream: u8,
    },
    EndCapture,
    SetTenant {
        tenant: u8,
        bytes: u64,
    },
    SetLimit {
        bytes: Option<u64>,
    },
    Configure {
        conf: u8,
    },
    Fail {
        call: u8,
        nth: u8,
        out_of_memory: bool,
    },
    FreeUnknown {
        address: u64,
    },
    RecordUnknown {
        address: u64,
    },
    Snapshot,
    ResetStats,
    /// Makes allocations fail.
    Inject {
        rules: u8,
    },
    /// Time passes, and what is not needed is given back.
    Trim,
    /// Prepares memory ahead.
    Prefetch {
        size: u64,
        stream: u8,
    },
}

/// Options that [`Action::Configure`] switches between.
const CONFS: [&str; 15] = [
    "paged:True",
    "paged:False",
    "page_mb:16",
    "expandable_segments:False",
    "expandable_segments:True",
    "max_split_size_mb:32",
    "garbage_collection_threshold:0.5",
    "roundup_power2_divisions:4",
    "graph_capture_record_stream_reuse:True",
    "max_split_size_mb:24,garbage_collection_threshold:0.3,expandable_segments:True",
    "spill_limit_mb:96,spill_over_mb:1",
    "spill_limit_mb:off",
    "wait_ms:0",
    "wait_ms:3000",
    "skip_rungs:borrow+events",
];

/// Failures that [`Action::Inject`] switches between.
const INJECTIONS: [&str; 5] =
    ["", "nth=3", "fraction=0.2,seed=5,at=borrow", "every=4,at=wait", "over=20MiB,nth=2,at=spill"];

const STREAMS: u8 = 4;
const POOLS: u8 = 3;

type SimGpu = CheckedDriver<Arc<SimDriver>>;

/// Runs actions and checks what the engine promises.
#[derive(Debug)]
pub struct World {
    engine: Engine<Arc<SimGpu>>,
    checked: Arc<SimGpu>,
    sim: Arc<SimDriver>,
    clock: Arc<SimClock>,
    live: BTreeMap<u64, Life>,
    /// Allocations given back, with the work on them that may be unfinished.
    past: Vec<Life>,
    lives: u64,
    capture: Option<(PoolId, StreamId)>,
    /// The streams being captured.
    joined: Arc<Mutex<BTreeSet<StreamId>>>,
    /// Pools with allocations going to them, and how many uses each pool has.
    open: Vec<PoolId>,
    uses: BTreeMap<PoolId, u32>,
    /// Memory that graphs captured into a pool still use when they are replayed.
    baked: BTreeMap<PoolId, Vec<(u64, u64, Vec<Bytes>)>>,
    /// Failures that may still strike, or have struck in the action under way.
    failures_scripted: bool,
    ladder: Ladder,
}

/// One allocation.
#[derive(Debug, Clone)]
struct Life {
    id: u64,
    address: u64,
    size: u64,
    requested: u64,
    spilled: bool,
    stream: StreamId,
    /// What is behind it: the same bytes may be at another address later.
    memory: Vec<Bytes>,
    /// Work on it: stream and number.
    work: Vec<(StreamId, u64)>,
    /// Used in a capture.
    captured: bool,
}

impl World {
    /// A world with an empty device.
    #[must_use]
    pub fn new(policy: Policy, ladder: Ladder) -> Self {
        let sim = Arc::new(SimDriver::new(SimConfig::with_capacity(CAPACITY)));
        let checked = Arc::new(CheckedDriver::new(Arc::clone(&sim)));
        let clock = Arc::new(SimClock::new(Arc::clone(&sim)));
        let its_clock: Arc<dyn Clock> = Arc::clone(&clock) as _;
        let config = EngineConfig { ladder, clock: its_clock, ..EngineConfig::default() };
        let engine = Engine::with_config(Arc::clone(&checked), config);
        engine.set_policy(policy);
        // Pages as small beside the device as they are in use.
        engine.configure("page_mb:4,trim_ms:1000").expect("an option");
        // Of the others it is not known.
        let lasting = LastingStreams::These(BTreeSet::from([StreamId(1)]));
        engine.set_lasting_streams(lasting);
        engine.record_history(64);
        Self {
            engine,
            checked,
            sim,
            clock,
            live: BTreeMap::new(),
            past: Vec::new(),
            lives: 0,
            capture: None,
            joined: Arc::default(),
            open: Vec::new(),
            uses: BTreeMap::new(),
            baked: BTreeMap::new(),
            failures_scripted: false,
            ladder,
        }
    }

    /// Does one action and checks everything.
    ///
    /// # Panics
    ///
    /// If the engine breaks a promise.
    pub fn step(&mut self, action: &Action) {
        match *action {
            Action::Alloc { size, stream } => self.alloc(size, stream_id(stream)),
            Action::Free { index } => {
                if let Some(address) = self.pick(index) {
                    self.free(address);
                }
            }
            Action::UseOn { index, stream } => self.use_on(index, stream_id(stream)),
            Action::Finish { stream } => self.sim.finish(stream_id(stream)),
            Action::FinishAll => self.sim.finish_all(),
            Action::ProcessEvents => self.may_fail(self.engine.process_events().err()),
            Action::EmptyCache => self.may_fail(self.engine.empty_cache().err()),
            Action::EmptyPool { pool } => {
                let result = self.engine.empty_cache_of(pool_id(pool));
                // Asked for by name, it is done even where the driver says it is illegal.
                if self.capture.is_none() {
                    self.may_fail(result.err());
                }
            }
            Action::BeginPool { pool, stream } => {
                let only = stream.map(stream_id);
                let filter = move |stream| only.is_none_or(|only| only == stream);
                self.begin_pool(pool_id(pool), Box::new(filter));
            }
            Action::EndPool { pool } => self.end_pool(pool_id(pool)),
            Action::ReleasePool { pool } => self.release_pool(pool_id(pool)),
            Action::UseOnOom { pool, allow } => {
                let result = self.engine.set_use_on_oom(pool_id(pool), allow);
                assert!(result.is_ok() || result == Err(PoolError::Unknown(pool_id(pool))));
            }
            Action::NoSplit { pool } => {
                let result = self.engine.set_no_split(pool_id(pool));
                assert!(result.is_ok() || result == Err(PoolError::Unknown(pool_id(pool))));
            }
            Action::BeginCapture { pool, stream } => {
                let (pool, stream) = (pool_id(pool), stream_id(stream));
                let joined = Arc::clone(&self.joined);
                let filter = move |stream| joined.lock().is_ok_and(|all| all.contains(&stream));
                if self.capture.is_none() && self.begin_pool(pool, Box::new(filter)) {
                    self.sim.begin_capture(stream);
                    self.capture = Some((pool, stream));
                    self.joined().insert(stream);
                }
            }
            Action::JoinCapture { stream } => {
                if let Some((_, captured)) = self.capture {
                    self.sim.wait_for(stream_id(stream), captured);
                    self.joined().insert(stream_id(stream));
                }
            }
            Action::FollowStream { stream } => {
                if let Some((_, captured)) = self.capture {
                    self.sim.wait_for(captured, stream_id(stream));
                }
            }
            Action::EndCapture => {
                if let Some((pool, stream)) = self.capture.take() {
                    self.joined().clear();
                    self.sim.end_capture(stream);
                    self.end_pool(pool);
                }
            }
            Action::SetTenant { tenant, bytes } => {
                self.sim.set_tenant(u32::from(tenant % 2), bytes % CAPACITY);
            }
            Action::SetLimit { bytes } => {
                self.engine.set_memory_limit(bytes.map(|bytes| bytes % CAPACITY));
            }
            Action::Configure { conf } => {
                let conf = CONFS[usize::from(conf) % CONFS.len()];
                self.engine.configure(conf).expect("options that are valid");
            }
            Action::Fail { call, nth, out_of_memory } => {
                let call = Call::ALL[usize::from(call) % Call::ALL.len()];
                let fault = if out_of_memory { Fault::OutOfMemory } else { Fault::Failed(999) };
                self.sim.fail(FailWhen::Nth(call, u64::from(nth % 8) + 1), fault);
                self.failures_scripted = true;
            }
            Action::FreeUnknown { address } => {
                if address != 0 && !self.live.contains_key(&address) {
                    let unknown = Err(AddressError::Unknown { address });
                    assert_eq!(self.engine.free(address), unknown);
                }
            }
            Action::RecordUnknown { address } => {
                if !self.live.contains_key(&address) {
                    let unknown = Err(AddressError::Unknown { address });
                    assert_eq!(self.engine.record_stream(address, StreamId(1)), unknown);
                }
            }
            Action::Snapshot => self.check_snapshot(),
            Action::ResetStats => {
                self.engine.reset_peak_stats();
                self.engine.reset_accumulated_stats();
            }
            Action::Inject { rules } => {
                let rules = INJECTIONS[usize::from(rules) % INJECTIONS.len()];
                self.engine.inject(Some(rules.parse().expect("rules that are valid")));
            }
            Action::Trim => {
                self.clock.advance(Duration::from_secs(1));
                self.may_fail(self.engine.trim().err());
            }
            Action::Prefetch { size, stream } => {
                let prefetched = self.engine.prefetch(size, stream_id(stream));
                if let Err(AllocError::Driver(error)) = prefetched {
                    self.may_fail(Some(error));
                }
            }
        }
        self.check();
    }

    /// Ends every capture, gives everything back, and checks that nothing is left.
    ///
    /// # Panics
    ///
    /// If something is.
    pub fn finish(mut self) {
        self.sim.clear_failures();
        self.failures_scripted = false;
        self.engine.inject(None);
        self.step(&Action::EndCapture);
        for pool in self.open.clone() {
            self.end_pool(pool);
        }
        let addresses: Vec<u64> = self.live.keys().copied().collect();
        for address in addresses {
            self.engine.free(address).expect("every later free succeeds");
            self.live.remove(&address);
            self.check();
        }
        self.baked.clear();
        for (pool, uses) in std::mem::take(&mut self.uses) {
            for _ in 0..uses {
                self.engine.release_pool(pool).expect("a pool in use");
            }
        }
        self.sim.finish_all();
        self.engine.empty_cache().expect("a driver that works");
        self.check();
        let stats = self.engine.stats();
        assert_eq!(stats.reserved_bytes.all.current, 0, "memory is left: {stats:#?}");
        assert_eq!(self.sim.held(), 0, "the device thinks memory is left");
        assert_eq!(self.sim.held_host(), 0, "the host thinks memory is left");
    }

    fn alloc(&mut self, size: u64, stream: StreamId) {
        let before = self.engine.stats();
        match self.engine.alloc(size, stream) {
            Ok(0) => assert_eq!(size, 0, "null for a size that is not zero"),
            Ok(address) => {
                let (block, requested) = self.engine.size_of(address).expect("a live allocation");
                assert_eq!(requested, size);
                assert!(block >= size && block.is_multiple_of(512) && address.is_multiple_of(512));
                self.lives += 1;
                let mut life = Life {
                    id: self.lives,
                    address,
                    size: block,
                    requested: size,
                    spilled: self.engine.is_spilled(address),
                    stream,
                    memory: self.checked.behind(address, block),
                    work: Vec::new(),
                    captured: false,
                };
                self.check_fresh(&life);
                self.work(&mut life, stream);
                // A pool begun later takes the request instead; its owner keeps it as long as needed.
                if let Some((pool, _)) = self.capture.filter(|_| life.captured)
                    && self.open.last() == Some(&pool)
                {
                    let memory = life.memory.clone();
                    self.baked.entry(pool).or_default().push((address, block, memory));
                }
                self.live.insert(address, life);
            }
            Err(AllocError::Driver(error)) => self.may_fail(Some(error)),
            Err(refused) => {
                let shortage = refused.shortage().expect("a shortage");
                assert_eq!(shortage.requested, size);
                assert_eq!(self.engine.stats().allocation, before.allocation, "a refusal leaks");
            }
        }
    }

    /// The oracle: memory handed out is nobody else's, and nobody is still at work on it.
    fn check_fresh(&mut self, life: &Life) {
        let overlaps = |other: &Life| {
            life.memory.iter().any(|bytes| other.memory.iter().any(|other| other.overlap(bytes)))
        };
        let taken = self.live.values().find(|other| overlaps(other));
        assert!(taken.is_none(), "{life:?} overlaps the live {taken:?}");
        let sim = &self.sim;
        self.past.retain(|old| old.work.iter().any(|&(s, work)| !sim.is_finished(s, work)));
        for old in self.past.iter().filter(|old| overlaps(old)) {
            let busy = old.work.iter().find(|&&(stream, work)| {
                stream != life.stream && !self.sim.is_finished(stream, work)
            });
            assert!(busy.is_none(), "{life:?} is handed out while {busy:?} uses it as {old:?}");
        }
    }

    /// Queues work that uses a block.
    fn work(&self, life: &mut Life, stream: StreamId) {
        let captured = self.joined().contains(&stream);
        let work = self.sim.launch(stream);
        if captured {
            life.captured = true;
        } else {
            self.checked.work(life.address, life.size, stream, life.id);
            life.work.push((stream, work));
        }
    }

    fn use_on(&mut self, index: u16, stream: StreamId) {
        let Some(address) = self.pick(index) else { return };
        let Some(mut life) = self.live.remove(&address) else { return };
        self.engine.record_stream(address, stream).expect("a live allocation");
        // A correct program orders its own uses of one allocation.
        self.checked.wait(stream, life.stream);
        self.work(&mut life, stream);
        self.live.insert(address, life);
    }

    fn free(&mut self, address: u64) {
        match self.engine.free(address) {
            Ok(()) => {}
            Err(AddressError::Driver { source, .. }) => self.may_fail(Some(source)),
            Err(error) => panic!("a live allocation is not freed: {error}"),
        }
        let again = self.engine.free(address);
        assert_eq!(again, Err(AddressError::Unknown { address }), "freed twice");
        self.past.extend(self.live.remove(&address));
    }

    fn joined(&self) -> MutexGuard<'_, BTreeSet<StreamId>> {
        self.joined.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin_pool(&mut self, pool: PoolId, filter: StreamFilter) -> bool {
        match self.engine.begin_allocate_to_pool(pool, filter) {
            Ok(()) => {
                assert!(!self.open.contains(&pool));
                self.open.push(pool);
                *self.uses.entry(pool).or_default() += 1;
                true
            }
            Err(PoolError::AlreadyRecording(_)) => {
                assert!(self.open.contains(&pool));
                false
            }
            Err(PoolError::Released(_)) => {
                assert!(!self.uses.contains_key(&pool));
                false
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn end_pool(&mut self, pool: PoolId) {
        if self.capture.is_some_and(|(captured, _)| captured == pool) {
            return;
        }
        let was_open = self.open.contains(&pool);
        let ended = self.engine.end_allocate_to_pool(pool);
        assert_eq!(ended.is_ok(), was_open, "{ended:?}");
        self.open.retain(|&open| open != pool);
    }

    fn release_pool(&mut self, pool: PoolId) {
        match self.engine.release_pool(pool) {
            Ok(()) => {
                let uses = self.uses.get_mut(&pool).expect("a pool in use");
                *uses -= 1;
                if *uses == 0 {
                    self.uses.remove(&pool);
                    self.baked.remove(&pool);
                }
            }
            Err(PoolError::Unknown(_) | PoolError::Released(_)) => {
                assert!(!self.uses.contains_key(&pool));
            }
            Err(PoolError::StillRecording(_)) => assert!(self.open.contains(&pool)),
            Err(error) => panic!("{error}"),
        }
    }

    /// A driver error is in order only where one was scripted, or where PyTorch's ladder gives memory
    /// back beside a capture on another stream, as PyTorch does.
    fn may_fail(&self, error: Option<crate::DriverError>) {
        if let Some(error) = error {
            let beside_capture = self.ladder == Ladder::Torch && self.capture.is_some();
            assert!(self.failures_scripted || beside_capture, "{error}");
        }
    }

    fn pick(&self, index: u16) -> Option<u64> {
        let count = self.live.len().max(1);
        self.live.keys().nth(usize::from(index) % count).copied()
    }

    fn check(&self) {
        if let Err(violation) = self.engine.check_invariants() {
            panic!("{violation}");
        }
        let stats = self.engine.stats();
        assert_eq!(stats.reserved_bytes.all.current, self.sim.held(), "reserved and held differ");
        let (spilled, on_device): (Vec<&Life>, Vec<&Life>) =
            self.live.values().partition(|life| life.spilled);
        assert_eq!(stats.allocation.all.current, on_device.len() as u64);
        let bytes: u64 = on_device.iter().map(|life| life.size).sum();
        assert_eq!(stats.allocated_bytes.all.current, bytes);
        let requested: u64 = on_device.iter().map(|life| life.requested).sum();
        assert!(stats.requested_bytes.all.current >= requested);
        assert_eq!(stats.spilled_allocation.current, spilled.len() as u64);
        assert_eq!(stats.spilled_bytes.current, self.sim.held_host(), "host memory astray");
        assert!(stats.spilled_bytes.current >= spilled.iter().map(|life| life.size).sum());
        assert_eq!(
            stats.shortages,
            stats.shortages_survived + stats.shortages_refused + stats.shortages_broken,
            "a shortage without an end"
        );
        assert_eq!(self.engine.waiting(), 0, "somebody waits for ever");
        if !self.baked.is_empty() {
            for (start, size, memory) in self.baked.values().flatten() {
                let now = self.checked.behind(*start, *size);
                assert_eq!(&now, memory, "{start:#x} is another memory, but a graph uses it");
            }
        }
    }

    fn check_snapshot(&self) {
        let snapshot = self.engine.snapshot();
        let mut end = 0;
        let mut live = 0;
        for segment in &snapshot.segments {
            assert!(segment.address >= end, "segments overlap or are out of order");
            end = segment.address;
            for block in &segment.blocks {
                assert_eq!(block.address, end, "a gap in a segment");
                end += block.size;
                live += usize::from(block.use_ == crate::BlockUse::Live);
            }
            assert_eq!(end, segment.address + segment.size);
        }
        assert_eq!(live, self.live.len());
        let on_device = snapshot.segments.iter().filter(|segment| !segment.spilled);
        let total: u64 = on_device.map(|segment| segment.size).sum();
        // Pages that the driver would not take back are behind no block.
        assert!(total <= snapshot.reserved, "a page counted twice");
        assert!(total == snapshot.reserved || self.failures_scripted, "a page not shown");
    }
}

fn stream_id(index: u8) -> StreamId {
    StreamId(u64::from(index % STREAMS))
}

fn pool_id(index: u8) -> PoolId {
    PoolId(1, u64::from(index % POOLS) + 1)
}
