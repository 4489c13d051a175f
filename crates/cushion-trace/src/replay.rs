//! Runs a program on the engine and the simulated device.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use cushion_core::driver::CallCounts;
use cushion_core::size::GIB;
use cushion_core::{
    Clock, DriverError, Engine, EngineConfig, Ladder, LastingStreams, Options, Policy, Receipt,
    SimClock, SimConfig, SimDriver, Snapshot, Stats,
};

use crate::events::Events;
use crate::pools::Departure;
use crate::program::Program;
use crate::receipts::Tally;
use crate::run::{Run, Seen, Stop};

/// A device that no trace fills.
pub(crate) const UNLIMITED: u64 = 1024 * GIB;

/// How many receipts of a run are kept.
const RECEIPTS: usize = 10_000;

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
    /// The event at which they were first reached.
    pub live_peak_event: u64,
    /// Peak of reserved bytes.
    pub reserved_peak: u64,
    /// The event at which they were first reached.
    pub reserved_peak_event: u64,
    /// The event after which the driver was asked for nothing any more: no memory, no address, nothing to be taken back.
    pub last_driver_event: u64,
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
    /// Frees that waited for work on another stream. That work is taken as done when PyTorch saw it.
    pub pending_frees: u64,
    /// Those of them whose work this allocator waited for itself, so that it used the memory again
    /// earlier than PyTorch did. How long it would have waited is not known.
    pub hurried_frees: u64,
    /// The engine's figures at the end.
    pub stats: Stats,
    /// The latest shortages, survived and refused, oldest first: 10,000 of them at most.
    pub receipts: Vec<Arc<Receipt>>,
    /// All shortages, counted.
    pub tally: Tally,
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
    /// Whether what was held before the first event is too much already.
    pub at_beginning: bool,
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

/// Sees a run while it goes on.
pub trait Watch {
    /// Whether it looks at all.
    const LOOKS: bool = true;

    /// Called after each step: the event of the latest request, counted from 0, and the live and
    /// reserved bytes after the step.
    fn moment(&mut self, event: u64, live: u64, reserved: u64);
}

/// Nobody watches.
impl Watch for () {
    const LOOKS: bool = false;

    fn moment(&mut self, _: u64, _: u64, _: u64) {}
}

/// What an allocator holds at one moment of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct State {
    /// Its segments and blocks.
    pub snapshot: Snapshot,
    /// The event that allocated what is at an address; `None` for memory that was there before the
    /// first event.
    pub allocated_by: BTreeMap<u64, Option<u64>>,
}

/// Runs a program.
///
/// # Errors
///
/// Only if the simulated driver refuses a call, which means a bug in the engine.
pub fn replay(program: &Program, config: &ReplayConfig) -> Result<Outcome, DriverError> {
    replay_watched(program, config, &mut ())
}

/// Runs a program while somebody watches.
///
/// # Errors
///
/// As [`replay`].
pub fn replay_watched(
    program: &Program,
    config: &ReplayConfig,
    watch: &mut impl Watch,
) -> Result<Outcome, DriverError> {
    let (engine, driver) = device_for(program, config);
    engine.keep_receipts(RECEIPTS);
    let tally = Arc::new(Mutex::new(Tally::default()));
    let counted = Arc::clone(&tally);
    engine.on_receipt(move |receipt| {
        counted.lock().unwrap_or_else(PoisonError::into_inner).add(receipt);
    });
    let mut run = Run::new(&engine, &driver, program, config, options_for(program, config), watch);
    let events = match run.run() {
        Ok(()) => program.events,
        Err(Stop::OutOfMemory(event)) => (u64::from(event) + 1).min(program.events),
        Err(Stop::Driver(error)) => return Err(error),
        Err(Stop::Departed(_) | Stop::Told) => unreachable!("no trial, and no last event"),
    };
    let Run { follows, seen, .. } = run;
    let Seen { same, allocs, difference, oom, passed_over, .. } = seen;
    let stats = engine.stats();
    Ok(Outcome {
        events,
        allocs,
        live_peak: stats.requested_bytes.all.peak,
        live_peak_event: seen.live_peak.0.into(),
        reserved_peak: stats.reserved_bytes.all.peak,
        reserved_peak_event: seen.reserved_peak.0.into(),
        last_driver_event: seen.last_change.0.into(),
        same_address: follows.then_some(same),
        difference: difference.filter(|_| follows),
        driver: driver.counts(),
        retries: stats.num_alloc_retries,
        oom,
        refusals_passed_over: passed_over,
        pending_frees: seen.waited,
        // A run that did all that PyTorch did waited where PyTorch waited.
        hurried_frees: if follows && difference.is_none() { 0 } else { seen.hurried },
        stats,
        receipts: engine.receipts(),
        tally: tally.lock().unwrap_or_else(PoisonError::into_inner).clone(),
    })
}

/// What the allocator holds right after the request at `event` is served, or, if that event is
/// something else, right before the next request. If memory runs out before, what it held then.
///
/// # Errors
///
/// As [`replay`].
pub fn state_at(
    program: &Program,
    config: &ReplayConfig,
    event: u64,
) -> Result<State, DriverError> {
    let (engine, driver) = device_for(program, config);
    let mut nobody = ();
    let mut run =
        Run::new(&engine, &driver, program, config, options_for(program, config), &mut nobody);
    run.last = Some(u32::try_from(event).unwrap_or(u32::MAX));
    if let Err(Stop::Driver(error)) = run.run() {
        return Err(error);
    }
    Ok(State { snapshot: engine.snapshot(), allocated_by: run.allocated_by() })
}

/// Follows PyTorch, with no limit, until the first departure from its path.
pub(crate) fn follow(program: &Program, events: &Events) -> Option<Departure> {
    let (policy, ladder) = (program.policy, Ladder::Torch);
    let config = ReplayConfig { policy, ladder, capacity: None, options: None };
    let (engine, driver) = device_for(program, &config);
    let mut nobody = ();
    let mut run =
        Run::new(&engine, &driver, program, &config, options_for(program, &config), &mut nobody);
    run.trial = Some(events);
    match run.run() {
        Ok(()) => None,
        Err(Stop::Departed(departure)) => Some(departure),
        // Not a matter of pools.
        Err(Stop::OutOfMemory(_) | Stop::Driver(_) | Stop::Told) => None,
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
    driver.work_outlasts_waits();
    // How long work took is not in a trace: the device finishes it while the allocator waits.
    let clock: Arc<dyn Clock> = Arc::new(SimClock::new(Arc::clone(&driver)));
    let options = options_for(program, config);
    let config_of_engine =
        EngineConfig { options, ladder: config.ladder, clock, ..EngineConfig::default() };
    let engine = Engine::with_config(Arc::clone(&driver), config_of_engine);
    // A trace does not say that a stream was destroyed. Nor does it say which were idle, when one could have borrowed
    // from another; but what was borrowed under `paged` is recorded as the lender's. So a run that is repeated as it was
    // has nobody borrow again: streams that may be gone do not.
    let repeats = Policy::of(&program.options) == Policy::Paged && config.policy == Policy::Paged;
    if !repeats || config.capacity.is_some() {
        engine.set_lasting_streams(LastingStreams::All);
    }
    if config.capacity.is_some() {
        engine.set_memory_limit(config.capacity);
    }
    (engine, driver)
}

fn options_for(program: &Program, config: &ReplayConfig) -> Options {
    let options = config.options.as_ref().unwrap_or(&program.options);
    let mut options = options.clone();
    options.ask_for(config.policy);
    // A fraction of a device whose size is not known: the capacity is the limit.
    options.per_process_memory_fraction = 1.0;
    options
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use cushion_core::BlockUse;
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
            let mut nobody = ();
            let options = options_for(&program, &config);
            let mut run = Run::new(&engine, &driver, &program, &config, options, &mut nobody);
            let ended = run.run();
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
