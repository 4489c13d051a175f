//! Runs actions and checks what the engine promises.

mod check;
mod futures;
mod graphs;
mod streams;

pub use futures::Futures;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use self::streams::Streams;
use super::gpu::Gpu;
use super::{Action, CAPACITY, Setup};
use crate::base::random::Random;
use crate::driver::{Bytes, Call, FailWhen, Fault};
use crate::{
    AddressError, AllocError, Clock, Engine, EngineConfig, Ladder, LastingStreams, Policy,
    PoolError, PoolId, SimClock, SimConfig, SimDriver, StreamId, Tag,
};

/// Options that [`Action::Configure`] switches between.
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

/// Failures that [`Action::Inject`] switches between.
const INJECTIONS: [&str; 5] =
    ["", "nth=3", "fraction=0.2,seed=5,at=borrow", "every=4,at=wait", "over=20MiB,nth=2,at=spill"];

const POOLS: u8 = 3;

type SimEngine = Engine<Arc<Gpu>>;

/// Runs actions and checks what the engine promises.
#[derive(Debug)]
pub struct World {
    engine: Arc<SimEngine>,
    gpu: Arc<Gpu>,
    sim: Arc<SimDriver>,
    clock: Arc<SimClock>,
    live: BTreeMap<u64, Life>,
    /// Allocations given back, with the work on them that may be unfinished.
    past: Vec<Life>,
    lives: u64,
    streams: Streams,
    capture: Option<(PoolId, StreamId)>,
    /// The streams being captured.
    joined: Arc<Mutex<BTreeSet<StreamId>>>,
    /// The stream that is being captured without a word to the engine.
    silent: Option<StreamId>,
    /// Pools with allocations going to them, and how many uses each pool has.
    open: Vec<PoolId>,
    uses: BTreeMap<PoolId, u32>,
    /// Memory that graphs captured into a pool still use when they are replayed.
    baked: BTreeMap<PoolId, Vec<(u64, u64, Vec<Bytes>)>>,
    /// Pools that were used without a capture, or that may help others out: a program that has their memory in use may
    /// not replay what was captured into them.
    impure: BTreeSet<PoolId>,
    /// What another thread will do while an action waits for the device, and what it has done.
    armed: Option<Armed>,
    happened: Arc<Mutex<Option<Armed>>>,
    /// How many futures are kept.
    futures: usize,
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
    /// Streams that the engine was told of.
    others: BTreeSet<StreamId>,
}

/// What another thread does while the device is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Armed {
    Replay { pool: PoolId, stream: StreamId },
    Free { address: u64 },
}

impl World {
    /// A world with an empty device.
    #[must_use]
    pub fn new(policy: Policy, ladder: Ladder) -> Self {
        Self::with(Setup::new(policy, ladder))
    }

    /// A world with an empty device of some kind.
    ///
    /// # Panics
    ///
    /// If the engine does not know its own options.
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
        let its_clock: Arc<dyn Clock> = Arc::clone(&clock) as _;
        let config = EngineConfig { ladder, clock: its_clock, ..EngineConfig::default() };
        let engine = Engine::with_config(Arc::clone(&gpu), config);
        engine.set_policy(policy);
        // Pages as small beside the device as they are in use.
        engine.configure("page_mb:4,trim_ms:1000").expect("an option");
        // Of the others it is not known.
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
            live: BTreeMap::new(),
            past: Vec::new(),
            lives: 0,
            streams,
            capture: None,
            joined: Arc::default(),
            silent: None,
            open: Vec::new(),
            uses: BTreeMap::new(),
            baked: BTreeMap::new(),
            impure: BTreeSet::new(),
            armed: None,
            happened: Arc::default(),
            futures: 0,
            failures_scripted: false,
            ladder,
        }
    }

    /// The engine, for [`Futures`] to borrow.
    #[must_use]
    pub(crate) fn engine(&self) -> Arc<SimEngine> {
        Arc::clone(&self.engine)
    }

    /// Does one action and checks everything. A future does not outlive it.
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

    /// Does one action and checks everything; futures that have to wait are kept.
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

    #[expect(clippy::too_many_lines, reason = "one arm for each action")]
    fn act(&mut self, action: &Action, futures: &mut Futures<'_>) {
        match *action {
            Action::Alloc { size, stream } => self.alloc(size, self.stream(stream)),
            Action::AllocAtOnce { size, stream } => self.alloc_at_once(size, self.stream(stream)),
            Action::Future { size, stream } => self.ask_future(size, self.stream(stream), futures),
            Action::PollFuture { index } => self.poll_future(index, futures),
            Action::DropFuture { index } => futures.drop_one(index),
            Action::Free { index } => {
                if let Some(address) = self.pick(index) {
                    self.free(address);
                }
            }
            Action::Repeat { kind, stream, times } => self.repeat(kind, self.stream(stream), times),
            Action::UseOn { index, stream } => self.use_on(index, self.stream(stream)),
            Action::Finish { stream } => self.sim.finish(self.stream(stream)),
            Action::FinishOldest => drop(self.sim.finish_oldest()),
            Action::FinishAll => self.sim.finish_all(),
            Action::ProcessEvents => {
                let processed = self.engine.process_events();
                self.events_recorded(processed.is_ok());
                self.may_fail(processed.err());
            }
            Action::EmptyCache => {
                let emptied = self.engine.empty_cache();
                self.events_recorded(emptied.is_ok());
                self.may_fail(emptied.err());
            }
            Action::EmptyPool { pool } => {
                let result = self.engine.empty_cache_of(pool_id(pool));
                // Asked for by name, it is done even where the driver says it is illegal.
                if self.capture.is_none() {
                    self.may_fail(result.err());
                }
            }
            Action::BeginPool { pool, stream } => {
                let only = stream.map(|stream| self.stream(stream));
                self.begin_own_pool(pool_id(pool), only);
            }
            Action::EndPool { pool } => self.end_pool(pool_id(pool)),
            Action::ReleasePool { pool } => self.release_pool(pool_id(pool)),
            Action::UseOnOom { pool, allow } => self.use_on_oom(pool_id(pool), allow),
            Action::NoSplit { pool } => {
                let result = self.engine.set_no_split(pool_id(pool));
                assert!(result.is_ok() || result == Err(PoolError::Unknown(pool_id(pool))));
            }
            Action::BeginCapture { pool, stream } => {
                self.begin_capture(pool_id(pool), self.stream(stream));
            }
            Action::JoinCapture { stream } => self.join_capture(self.stream(stream)),
            Action::FollowStream { stream } => {
                let stream = self.stream(stream);
                if let Some((_, captured)) = self.capture.filter(|_| self.silent != Some(stream)) {
                    self.sim.wait_for(captured, stream);
                }
            }
            Action::EndCapture => self.end_capture(),
            Action::Graph { pool, stream, kind } => {
                self.graph(pool_id(pool), self.stream(stream), kind);
            }
            Action::Replay { pool, stream } => {
                let (pool, stream) = (pool_id(pool), self.stream(stream));
                if self.may_replay(pool, stream) {
                    let life = self.next_life();
                    self.replay(pool, stream, life)();
                }
            }
            Action::BeginSilentCapture { stream } => self.begin_silent_capture(self.stream(stream)),
            Action::EndSilentCapture => self.end_silent_capture(),
            Action::ReplayMeanwhile { pool, stream } => {
                let (pool, stream) = (pool_id(pool), self.stream(stream));
                self.armed = Some(Armed::Replay { pool, stream });
            }
            Action::FreeMeanwhile { index } => {
                self.armed = self.pick(index).map(|address| Armed::Free { address });
            }
            Action::DestroyStream { stream } => self.destroy_stream(stream, futures),
            Action::Lasting { which } => self.set_lasting(which),
            Action::SetTenant { tenant, bytes } => {
                self.sim.set_tenant(u32::from(tenant % 2), bytes % CAPACITY);
            }
            Action::SetLimit { bytes } => {
                self.engine.set_memory_limit(bytes.map(|bytes| bytes % CAPACITY));
            }
            Action::SetFraction { percent } => {
                let fraction = f64::from(percent % 101) / 100.0;
                self.engine.set_memory_fraction(fraction).expect("a fraction");
            }
            Action::SetPolicy { policy } => {
                self.engine.set_policy(Policy::ALL[usize::from(policy) % Policy::ALL.len()]);
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
            Action::Ask { index } => self.ask(index),
            Action::Snapshot => self.check_snapshot(),
            Action::ResetStats => {
                self.engine.reset_peak_stats();
                self.engine.reset_accumulated_stats();
            }
            Action::Inject { rules } => {
                let rules = INJECTIONS[usize::from(rules) % INJECTIONS.len()];
                self.engine.inject(Some(rules.parse().expect("rules that are valid")));
            }
            Action::Trim => self.trim(Duration::from_secs(1)),
            Action::TrimAfter { ms } => self.trim(Duration::from_millis(ms.into())),
            Action::Prefetch { size, stream } => self.prefetch(size, self.stream(stream)),
        }
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
        self.step(&Action::EndSilentCapture);
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

    // ---- memory ----

    fn alloc(&mut self, size: u64, stream: StreamId) {
        if self.silent != Some(stream) {
            self.ask_for(size, stream);
        }
    }

    fn ask_for(&mut self, size: u64, stream: StreamId) -> Option<u64> {
        let before = self.engine.stats().allocation.all.current;
        let result = self.engine.alloc(size, stream);
        self.take(size, stream, before, result)
    }

    /// As PyTorch does: first what can be had at once, without giving up what it holds meanwhile.
    fn alloc_at_once(&mut self, size: u64, stream: StreamId) {
        if self.silent == Some(stream) {
            return;
        }
        let before = self.engine.stats().allocation.all.current;
        let at_once = self.engine.alloc_at_once_for(size, stream, Tag::NONE);
        let result = match at_once {
            Ok(Some(address)) => Ok(address),
            Ok(None) => self.engine.alloc_for(size, stream, Tag::NONE),
            Err(error) => Err(error),
        };
        self.take(size, stream, before, result);
    }

    /// A request has ended; `before` is how many were live when it began.
    fn take(
        &mut self,
        size: u64,
        stream: StreamId,
        before: u64,
        result: Result<u64, AllocError>,
    ) -> Option<u64> {
        let undisturbed = !self.settle();
        match result {
            Ok(0) => assert_eq!(size, 0, "null for a size that is not zero"),
            Ok(address) => {
                let (block, requested) = self.engine.size_of(address).expect("a live allocation");
                assert_eq!(requested, size);
                assert!(block >= size && block.is_multiple_of(512) && address.is_multiple_of(512));
                let mut life = Life {
                    id: self.next_life(),
                    address,
                    size: block,
                    requested: size,
                    spilled: self.engine.is_spilled(address),
                    stream,
                    memory: self.gpu.checked.behind(address, block),
                    work: Vec::new(),
                    captured: false,
                    others: BTreeSet::new(),
                };
                self.check_fresh(&life);
                self.work(&mut life, stream);
                self.bake(&life);
                self.live.insert(address, life);
                return Some(address);
            }
            Err(AllocError::Driver(error)) => self.may_fail(Some(error)),
            Err(refused) => {
                let shortage = refused.shortage().expect("a shortage");
                assert_eq!(shortage.requested, size);
                let after = self.engine.stats().allocation.all.current;
                assert!(after == before || !undisturbed, "a refusal leaks");
            }
        }
        None
    }

    fn next_life(&mut self) -> u64 {
        self.lives += 1;
        self.lives
    }

    /// Queues work that uses a block.
    fn work(&self, life: &mut Life, stream: StreamId) {
        let captured = self.joined().contains(&stream);
        let work = self.sim.launch(stream);
        if captured {
            life.captured = true;
        } else {
            self.gpu.checked.work(life.address, life.size, stream, life.id);
            life.work.push((stream, work));
        }
    }

    fn use_on(&mut self, index: u16, stream: StreamId) {
        let Some(address) = self.pick(index).filter(|_| self.silent != Some(stream)) else {
            return;
        };
        let Some(mut life) = self.live.remove(&address) else { return };
        self.engine.record_stream(address, stream).expect("a live allocation");
        // A correct program orders its own uses of one allocation, and those of graphs' outputs after the replays.
        if life.captured {
            self.gpu.checked.wait_for_all(stream);
        } else {
            self.gpu.checked.wait(stream, life.stream);
        }
        life.others.insert(stream);
        self.work(&mut life, stream);
        self.live.insert(address, life);
    }

    /// A free records an event on the streams that the program named: none of them may be captured silently.
    fn may_free(&self, address: u64) -> bool {
        let named = self.live.get(&address).map(|life| &life.others);
        self.silent.is_none_or(|silent| named.is_none_or(|named| !named.contains(&silent)))
    }

    fn free(&mut self, address: u64) {
        if !self.may_free(address) {
            return;
        }
        let freed = self.engine.free(address);
        let again = self.engine.free(address);
        assert_eq!(again, Err(AddressError::Unknown { address }), "freed twice");
        self.freed(address, &freed);
    }

    /// What a free means to the model.
    fn freed(&mut self, address: u64, freed: &Result<(), AddressError>) {
        let life = self.live.remove(&address).expect("a live allocation");
        if !self.open.is_empty() || freed.is_err() {
            // Its events are recorded later.
            self.streams.deferred.extend(life.others.iter().copied());
        }
        self.past.push(life);
        match freed {
            Ok(()) => {}
            Err(AddressError::Driver { source, .. }) => self.may_fail(Some(*source)),
            Err(error) => panic!("a live allocation is not freed: {error}"),
        }
    }

    /// A step of a training loop, several times over.
    fn repeat(&mut self, kind: u8, stream: StreamId, times: u8) {
        if self.silent == Some(stream) {
            return;
        }
        for _ in 0..=times % 4 {
            let mut random = Random(u64::from(kind % 8));
            let mut held = Vec::new();
            for index in 0..3 + kind % 5 {
                let size = (1 << 20) + random.next() % (20 << 20);
                held.extend(self.ask_for(size, stream));
                if index % 3 == 2 && held.len() > 1 {
                    self.free(held.remove(0));
                }
                self.check();
            }
            for address in held {
                self.free(address);
                self.check();
            }
        }
    }

    fn trim(&mut self, after: Duration) {
        self.clock.advance(after);
        self.may_fail(self.engine.trim().err());
    }

    fn prefetch(&mut self, size: u64, stream: StreamId) {
        if self.silent == Some(stream) {
            return;
        }
        let prefetched = self.engine.prefetch(size, stream);
        if let Err(AllocError::Driver(error)) = prefetched {
            self.may_fail(Some(error));
        }
    }

    // ---- another thread ----

    /// Whether a program may do now what another thread was told to.
    fn is_still_legal(&self, armed: Armed) -> bool {
        match armed {
            Armed::Replay { pool, stream } => {
                let is_last = self.uses.get(&pool) == Some(&1) && !self.open.contains(&pool);
                is_last && self.streams.is_there(stream) && self.may_replay(pool, stream)
            }
            Armed::Free { address } => self.live.contains_key(&address) && self.may_free(address),
        }
    }

    /// Lets another thread do what it was told to if this action waits for the device, and is one that may.
    fn arm(&mut self, action: &Action) {
        let waits = matches!(
            action,
            Action::Alloc { .. }
                | Action::AllocAtOnce { .. }
                | Action::Future { .. }
                | Action::PollFuture { .. }
                | Action::EmptyCache
                | Action::EmptyPool { .. }
                | Action::Prefetch { .. }
        );
        let Some(armed) = self.armed.filter(|_| waits) else { return };
        if !self.is_still_legal(armed) {
            self.armed = None;
            return;
        }
        let (engine, happened) = (Arc::clone(&self.engine), Arc::clone(&self.happened));
        let life = self.next_life();
        let replay = match armed {
            Armed::Replay { pool, stream } => Some(self.replay(pool, stream, life)),
            Armed::Free { .. } => None,
        };
        self.gpu.meanwhile(Some(Box::new(move || {
            match armed {
                Armed::Replay { pool, .. } => {
                    replay.into_iter().for_each(|replay| replay());
                    engine.release_pool(pool).expect("a pool in use");
                }
                // Whether its events could be recorded is the engine's business.
                Armed::Free { address } => drop(engine.free(address)),
            }
            *happened.lock().unwrap_or_else(PoisonError::into_inner) = Some(armed);
        })));
    }

    /// Takes note of what another thread has done meanwhile, if it has.
    fn settle(&mut self) -> bool {
        let happened = self.happened.lock().unwrap_or_else(PoisonError::into_inner).take();
        if happened.is_some() {
            self.armed = None;
        }
        match happened {
            None => return false,
            Some(Armed::Replay { pool, .. }) => self.released(pool),
            Some(Armed::Free { address }) => {
                let named = self.live.get(&address).map(|life| life.others.clone());
                self.streams.deferred.extend(named.into_iter().flatten());
                self.freed(address, &Ok(()));
            }
        }
        true
    }

    fn pick(&self, index: u16) -> Option<u64> {
        let count = self.live.len().max(1);
        self.live.keys().nth(usize::from(index) % count).copied()
    }
}

fn pool_id(index: u8) -> PoolId {
    PoolId(1, u64::from(index % POOLS) + 1)
}
