//! Runs a program on the engine and the simulated device.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use cushion_core::driver::CallCounts;
use cushion_core::size::{GIB, block_size, segment_size};
use cushion_core::{
    Action, AllocError, BlockUse, Clock, DriverError, Engine, EngineConfig, Ladder, Options,
    Policy, PoolId, SegmentFigures, SimConfig, SimDriver, Stats, StreamId, VirtualClock,
};

use rustc_hash::FxHashMap;

use crate::events::Events;
use crate::pools::{Departure, DepartureKind};
use crate::program::{Program, Slot, Step};
use crate::snapshot::Action as Recorded;

/// A device that no trace fills.
const UNLIMITED: u64 = 1024 * GIB;

/// Streams of the simulator's own, for work that a pending free waits for.
const OTHER_STREAMS: u64 = 1 << 63;

/// How to run a program.
#[derive(Debug, Clone)]
pub struct ReplayConfig {
    /// The policy.
    pub policy: Policy,
    /// The ladder.
    pub ladder: Ladder,
    /// The most the allocator may hold, as PyTorch's memory fraction would limit it; `None` for as
    /// much as it wants.
    pub capacity: Option<u64>,
    /// Options in place of the recorded ones.
    pub options: Option<Options>,
}

/// What a run showed.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Outcome {
    /// Events replayed.
    pub events: u64,
    /// Requests served.
    pub allocs: u64,
    /// Peak of live bytes, as asked for.
    pub live_peak: u64,
    /// Peak of reserved bytes.
    pub reserved_peak: u64,
    /// How many requests got the address PyTorch gave them; `None` where that cannot be asked,
    /// because PyTorch ran with another policy.
    pub same_address: Option<u64>,
    /// The first request or refusal that went another way than in PyTorch.
    pub difference: Option<Difference>,
    /// Driver calls and their price.
    pub driver: CallCounts,
    /// Requests tried again after everything cached was given back.
    pub retries: u64,
    /// The first refusal.
    pub oom: Option<Refusal>,
    /// Requests that PyTorch refused and this run did not try, having no limit.
    pub refusals_passed_over: u64,
    /// The engine's figures at the end.
    pub stats: Stats,
}

impl Outcome {
    /// Peak reserved over peak live.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a ratio")]
    pub fn excess(&self) -> Option<f64> {
        (self.live_peak > 0).then(|| self.reserved_peak as f64 / self.live_peak as f64)
    }
}

/// Where memory ran out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Refusal {
    /// The event, counted from 0.
    pub event: u64,
    /// Bytes asked for.
    pub requested: u64,
    /// Live bytes at that moment.
    pub live: u64,
    /// Reserved bytes at that moment.
    pub reserved: u64,
    /// The largest free block at that moment.
    pub largest_free: u64,
    /// Whether PyTorch refused it too.
    pub recorded: bool,
}

/// Where a run left PyTorch's path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Difference {
    /// The event, counted from 0.
    pub event: u64,
    /// Bytes asked for.
    pub requested: u64,
    /// PyTorch's address; `None` if it refused.
    pub pytorch: Option<u64>,
    /// Ours; `None` if we refused.
    pub ours: Option<u64>,
}

/// Runs a program.
///
/// # Errors
///
/// Only if the simulated driver refuses a call, which means a bug in the engine.
pub fn replay(program: &Program, config: &ReplayConfig) -> Result<Outcome, DriverError> {
    let (engine, driver) = device_for(program, config);
    let mut run = Run::new(&engine, &driver, program, config);
    let events = match run.run(program) {
        Ok(()) => program.events,
        Err(Stop::OutOfMemory(event)) => u64::from(event) + 1,
        Err(Stop::Driver(error)) => return Err(error),
        Err(Stop::Departed(departure)) => unreachable!("no trial: {departure:?}"),
    };
    let Run { same, allocs, difference, oom, passed_over, follows, .. } = run;
    let stats = engine.stats();
    Ok(Outcome {
        events,
        allocs,
        live_peak: stats.requested_bytes.all.peak,
        reserved_peak: stats.reserved_bytes.all.peak,
        same_address: follows.then_some(same),
        difference: difference.filter(|_| follows),
        driver: driver.counts(),
        retries: stats.num_alloc_retries,
        oom,
        refusals_passed_over: passed_over,
        stats,
    })
}

/// Follows PyTorch, with no limit, until the first departure from its path.
pub(crate) fn follow(program: &Program, events: &Events) -> Option<Departure> {
    let (policy, ladder) = (program.policy, Ladder::Torch);
    let config = ReplayConfig { policy, ladder, capacity: None, options: None };
    let (engine, driver) = device_for(program, &config);
    let mut run = Run::new(&engine, &driver, program, &config);
    run.trial = Some(events);
    match run.run(program) {
        Ok(()) => None,
        Err(Stop::Departed(departure)) => Some(departure),
        // Not a matter of pools.
        Err(Stop::OutOfMemory(_) | Stop::Driver(_)) => None,
    }
}

/// An engine over a simulated device that is as large as the recorded one where that matters for
/// addresses, and larger than any trace where it does not.
fn device_for(
    program: &Program,
    config: &ReplayConfig,
) -> (Engine<Arc<SimDriver>>, Arc<SimDriver>) {
    let recorded = program.device_total.filter(|_| config.policy == program.policy);
    let total = recorded.unwrap_or(UNLIMITED).max(config.capacity.unwrap_or(0));
    let sim = SimConfig { total, ..SimConfig::with_capacity(UNLIMITED.max(total)) };
    let driver = Arc::new(SimDriver::new(sim));
    let clock: Arc<dyn Clock> = Arc::new(VirtualClock::new());
    let engine = Engine::with_config(
        Arc::clone(&driver),
        EngineConfig { options: options_for(program, config), ladder: config.ladder, clock },
    );
    if config.capacity.is_some() {
        engine.set_memory_limit(config.capacity);
    }
    (engine, driver)
}

fn options_for(program: &Program, config: &ReplayConfig) -> Options {
    let options = config.options.as_ref().unwrap_or(&program.options);
    Options {
        expandable_segments: config.policy == Policy::Expandable,
        // A fraction of a device whose size is not known: the capacity is the limit.
        per_process_memory_fraction: 1.0,
        ..options.clone()
    }
}

enum Stop {
    OutOfMemory(u32),
    Driver(DriverError),
    /// Only in a trial.
    Departed(Departure),
}

impl From<DriverError> for Stop {
    fn from(error: DriverError) -> Self {
        Self::Driver(error)
    }
}

struct Run<'a> {
    engine: &'a Engine<Arc<SimDriver>>,
    driver: &'a SimDriver,
    options: Options,
    capacity: Option<u64>,
    /// Whether the policy is the recorded one, so that addresses can be compared.
    follows: bool,
    /// The address of each slot.
    addresses: Vec<u64>,
    /// The work that each pending slot waits for.
    pending: FxHashMap<Slot, (StreamId, u64)>,
    /// Whether a recorded place is waiting to be used.
    placed: bool,
    /// The trace, if the run is to end at the first departure from it.
    trial: Option<&'a Events>,
    /// The private pool that requests go to now.
    window: Option<PoolId>,
    pool_uses: BTreeMap<PoolId, u32>,
    same: u64,
    allocs: u64,
    difference: Option<Difference>,
    oom: Option<Refusal>,
    passed_over: u64,
}

impl<'a> Run<'a> {
    fn new(
        engine: &'a Engine<Arc<SimDriver>>,
        driver: &'a SimDriver,
        program: &Program,
        config: &ReplayConfig,
    ) -> Self {
        Self {
            engine,
            driver,
            options: options_for(program, config),
            capacity: config.capacity,
            follows: config.policy == program.policy,
            addresses: vec![0; usize::try_from(program.allocs).unwrap_or(usize::MAX)],
            pending: FxHashMap::default(),
            placed: false,
            trial: None,
            window: None,
            pool_uses: BTreeMap::new(),
            same: 0,
            allocs: 0,
            difference: None,
            oom: None,
            passed_over: 0,
        }
    }

    fn run(&mut self, program: &Program) -> Result<(), Stop> {
        for &step in &program.steps {
            match step {
                Step::Alloc { event, slot, size, stream, address } => {
                    let Some(got) = self.alloc(event, size, stream, Some(address))? else {
                        return Err(Stop::OutOfMemory(event));
                    };
                    self.addresses[slot as usize] = got;
                    self.allocs += 1;
                    self.same += u64::from(got == address);
                }
                Step::Free { slot } => self.free(slot)?,
                other => self.rare(other)?,
            }
        }
        Ok(())
    }

    /// Asks the engine; `None` if it refused.
    fn alloc(
        &mut self,
        event: u32,
        size: u64,
        stream: StreamId,
        pytorch: Option<u64>,
    ) -> Result<Option<u64>, Stop> {
        let ours = match self.engine.alloc(size, stream) {
            Ok(address) => Some(address),
            Err(AllocError::FullNow(shortage) | AllocError::NeverFits(shortage)) => {
                let refusal = Refusal {
                    event: u64::from(event),
                    requested: size,
                    live: self.engine.stats().requested_bytes.all.current,
                    reserved: shortage.reserved,
                    largest_free: shortage.largest_free,
                    recorded: pytorch.is_none(),
                };
                self.oom.get_or_insert(refusal);
                None
            }
            Err(AllocError::Driver(error)) => return Err(error.into()),
            Err(other) => unreachable!("an error this crate does not know: {other}"),
        };
        if self.placed {
            self.driver.clear_placements();
            self.placed = false;
        }
        if ours != pytorch && self.difference.is_none() {
            if let (Some(_), Some(pytorch), Some(ours)) = (self.trial, pytorch, ours) {
                let kind = DepartureKind::Served { pytorch, ours };
                return Err(Stop::Departed(Departure { event: event as usize, kind }));
            }
            let event = u64::from(event);
            self.difference = Some(Difference { event, requested: size, pytorch, ours });
        }
        Ok(ours)
    }

    fn free(&mut self, slot: Slot) -> Result<(), Stop> {
        let address = self.addresses[slot as usize];
        self.engine.free(address).map_err(|error| match error {
            cushion_core::AddressError::Driver { source, .. } => Stop::Driver(source),
            other => unreachable!("a program frees what it allocated: {other}"),
        })
    }

    #[cold]
    fn rare(&mut self, step: Step) -> Result<(), Stop> {
        match step {
            Step::Alloc { .. } | Step::Free { .. } => unreachable!("handled by the loop"),
            Step::FreeLater { slot, other } => {
                let other = StreamId(OTHER_STREAMS + u64::from(other));
                self.pending.insert(slot, (other, self.driver.launch(other)));
                let address = self.addresses[slot as usize];
                if address != 0 {
                    self.engine.record_stream(address, other).unwrap_or_else(|error| {
                        unreachable!("a program uses what it allocated: {error}")
                    });
                }
                self.free(slot)?;
            }
            Step::Complete { slot } => {
                if let Some((other, work)) = self.pending.remove(&slot) {
                    self.driver.finish_until(other, work);
                    self.complete_in_capture()?;
                }
            }
            Step::Refused { event, size, stream, private } => {
                if self.capacity.is_none() {
                    self.passed_over += 1;
                    return Ok(());
                }
                // With room in the default pool, it was a private one that was full: maybe one that
                // never got any memory.
                let unnamed = PoolId(u64::MAX, u64::MAX - u64::from(event));
                let private = (self.follows && self.window.is_none())
                    .then(|| private.unwrap_or(unnamed))
                    .filter(|_| self.engine.would_hit(size, stream));
                if let Some(pool) = private {
                    self.begin_pool(pool);
                }
                let got = self.alloc(event, size, stream, None)?;
                if private.is_some() {
                    self.end_pool();
                }
                if let Some(address) = got {
                    // It fits here. What PyTorch's program did next, it did without this memory.
                    let _ = self.engine.free(address);
                }
            }
            Step::EmptyCache { plain, events, before } => {
                if !before.is_some_and(|size| self.would_be_short(size, plain)) {
                    self.give_back(PoolId::DEFAULT, events)?;
                }
            }
            Step::EmptyPool { pool, events } => self.give_back(pool, events)?,
            Step::PlaceSegment { bytes, address } if self.follows => {
                self.driver.place_alloc(bytes, address);
                self.placed = true;
            }
            Step::PlaceRange { address } if self.follows => {
                if !self.placed {
                    self.driver.place_reserve(address);
                }
                self.placed = true;
            }
            Step::PlaceSegment { .. } | Step::PlaceRange { .. } => {}
            Step::SetPolicy(policy) => {
                if self.follows {
                    self.engine.set_policy(policy);
                }
            }
            Step::BeginPool(pool) => self.begin_pool(pool),
            Step::EndPool => self.end_pool(),
            Step::ReleasePool(pool) => {
                for _ in 0..self.pool_uses.remove(&pool).unwrap_or(0) {
                    let _ = self.engine.release_pool(pool);
                }
            }
        }
        Ok(())
    }

    /// Gives everything cached back; a trial compares what that was with what PyTorch gave back.
    fn give_back(&mut self, pool: PoolId, (from, to): (u32, u32)) -> Result<(), Stop> {
        let Some(trace) = self.trial else { return Ok(self.engine.empty_cache_of(pool)?) };
        self.engine.record_history(1 << 20);
        self.engine.empty_cache_of(pool)?;
        let (entries, _) = self.engine.history();
        self.engine.record_history(0);
        let ours: BTreeSet<(u64, u64)> = entries
            .iter()
            .filter(|entry| matches!(entry.action, Action::SegmentFree | Action::SegmentUnmap))
            .map(|entry| (entry.address, entry.size))
            .collect();
        let pytorch: BTreeSet<(u64, u64)> = trace
            .iter_from(from as usize)
            .take((to - from) as usize)
            .filter(|event| matches!(event.action, Recorded::SegmentFree | Recorded::SegmentUnmap))
            .map(|event| (event.addr, event.size))
            .collect();
        if ours == pytorch {
            return Ok(());
        }
        let extra = ours.difference(&pytorch).map(|&(address, _)| address).collect();
        let pytorch = pytorch.into_iter().map(|(address, _)| address).collect();
        let kind = DepartureKind::GivenBack { extra, pytorch };
        Err(Stop::Departed(Departure { event: from as usize, kind }))
    }

    fn begin_pool(&mut self, pool: PoolId) {
        if self.engine.begin_allocate_to_pool(pool, Box::new(|_| true)).is_err() {
            return;
        }
        self.window = Some(pool);
        *self.pool_uses.entry(pool).or_default() += 1;
    }

    fn end_pool(&mut self) {
        if let Some(pool) = self.window.take() {
            let ended = self.engine.end_allocate_to_pool(pool);
            debug_assert!(ended.is_ok(), "windows open and close in turn: {ended:?}");
        }
    }

    /// PyTorch can complete a free during a capture by the order of the graph, which a trace does not
    /// show. That it did is enough: step out of the capture for a moment.
    fn complete_in_capture(&mut self) -> Result<(), Stop> {
        if let Some(pool) = self.window {
            self.end_pool();
            self.engine.process_events()?;
            self.begin_pool(pool);
        }
        Ok(())
    }

    /// Whether the limit would refuse a miss of this size as things stand, or make the engine collect
    /// garbage: then the recorded release, of `plain` segments and maybe pages, was the allocator's
    /// own doing, and the engine will do the same.
    fn would_be_short(&self, size: u64, plain: u32) -> bool {
        let Some(limit) = self.capacity else { return false };
        let wanted = block_size(size, &self.options)
            .and_then(|size| segment_size(size, &self.options))
            .unwrap_or(u64::MAX);
        let reserved = self.engine.stats().reserved_bytes.all.current;
        let threshold = self.options.garbage_collection_threshold;
        #[expect(clippy::cast_precision_loss, reason = "a threshold")]
        let over_threshold = threshold > 0.0 && reserved as f64 > threshold * limit as f64;
        reserved.saturating_add(wanted) > limit
            || over_threshold && plain > 0 && (plain as usize) < self.releasable_segments()
    }

    /// Plain segments of the default pools that nothing is in.
    fn releasable_segments(&self) -> usize {
        let is_releasable = |segment: &&SegmentFigures| {
            !segment.paged
                && segment.pool == PoolId::DEFAULT
                && matches!(&segment.blocks[..], [only] if only.use_ == BlockUse::Free)
        };
        self.engine.snapshot().segments.iter().filter(is_releasable).count()
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use cushion_core::driver::{FailWhen, Fault};

    use super::*;
    use crate::{Limits, open};

    /// Fails the n-th driver call for every n over a whole trace. Whatever the call was, the run ends
    /// in a typed error or goes on, nothing is inconsistent, every later free succeeds, and all
    /// memory comes back.
    fn fail_every_call(name: &str, capacity: u64, fault: Fault) {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/traces/corners");
        let path = PathBuf::from(folder).join(format!("{name}.pickle.gz"));
        let program = Program::of(&open(&path, &Limits::default()).unwrap(), 0);
        let config = ReplayConfig {
            policy: program.policy,
            ladder: Ladder::Torch,
            capacity: Some(capacity),
            options: None,
        };
        let calls = replay(&program, &config).unwrap().driver.total();
        assert!(calls > 100, "{name} makes {calls} driver calls");
        for nth in 1..=calls {
            let (engine, driver) = device_for(&program, &config);
            driver.fail(FailWhen::NthOfAny(nth), fault);
            let mut run = Run::new(&engine, &driver, &program, &config);
            let ended = run.run(&program);
            if let Err(Stop::Driver(error)) = ended {
                assert_eq!(error.fault, fault, "{name}, call {nth}: another fault");
            }
            engine.check_invariants().unwrap_or_else(|v| panic!("{name}, call {nth}: {v}"));
            driver.clear_failures();
            run.end_pool();
            for (pool, uses) in std::mem::take(&mut run.pool_uses) {
                for _ in 0..uses {
                    engine.release_pool(pool).expect("a pool in use");
                }
            }
            for segment in engine.snapshot().segments {
                for block in segment.blocks.iter().filter(|block| block.use_ == BlockUse::Live) {
                    engine.free(block.address).expect("every later free succeeds");
                }
            }
            driver.finish_all();
            engine.empty_cache().expect("the driver works again");
            engine.check_invariants().unwrap_or_else(|v| panic!("{name}, call {nth}, end: {v}"));
            assert_eq!(driver.held(), 0, "{name}, call {nth}: memory is lost");
        }
    }

    #[test]
    fn any_driver_call_may_fail_under_segments() {
        fail_every_call("capped", 1 << 30, Fault::Failed(999));
        fail_every_call("garbage_max_split", 3 << 29, Fault::OutOfMemory);
        fail_every_call("graphs", 1 << 30, Fault::Failed(999));
        fail_every_call("pools_capped", 1 << 29, Fault::OutOfMemory);
    }

    #[test]
    fn any_driver_call_may_fail_under_expandable() {
        fail_every_call("capped_expandable", 1 << 30, Fault::Failed(999));
        fail_every_call("max_split_expandable", 1 << 30, Fault::OutOfMemory);
        fail_every_call("graphs_expandable", 1 << 30, Fault::Failed(999));
    }
}
