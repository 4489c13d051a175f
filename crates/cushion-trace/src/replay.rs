//! Replays a program on the engine and a simulated device.

mod begin;
pub(crate) mod capacity;
pub(crate) mod outcome;
mod rare;
mod run;
pub(crate) mod trial;

use std::sync::{Arc, Mutex, PoisonError};

use cushion_core::{
    Clock, DriverError, Engine, EngineConfig, LastingStreams, Options, Policy, SimClock, SimConfig,
    SimDriver,
};

use self::outcome::{Outcome, ReplayConfig, State, Watch};
use self::run::{Goal, Run, Seen, Stop};
use crate::model::tally::Tally;
use crate::program::{Program, UNLIMITED};

/// The most receipts of a replay that are kept.
const RECEIPTS: usize = 10_000;

/// Replays a program.
///
/// # Errors
///
/// Fails only if the simulated driver refuses a call, which means a bug in the engine.
pub fn replay(program: &Program, config: &ReplayConfig) -> Result<Outcome, DriverError> {
    replay_watched(program, config, &mut ())
}

/// Replays a program and reports each step to `watch`.
///
/// # Errors
///
/// Fails like [`replay`].
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
        Err(Stop::Departed(_) | Stop::LastEvent) => {
            unreachable!("not a trial, and without a last event")
        }
    };
    let Run { goal: Goal { follows, .. }, seen, .. } = run;
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
        // A replay without differences waited where PyTorch waited.
        hurried_frees: if follows && difference.is_none() { 0 } else { seen.hurried },
        stats,
        receipts: engine.receipts(),
        tally: tally.lock().unwrap_or_else(PoisonError::into_inner).clone(),
    })
}

/// Returns the state right after the request at `event` is served, or, if that event is not a
/// request, right before the next request. If memory runs out earlier, returns the state at that
/// moment.
///
/// # Errors
///
/// Fails like [`replay`].
pub fn state_at(
    program: &Program,
    config: &ReplayConfig,
    event: u64,
) -> Result<State, DriverError> {
    let (engine, driver) = device_for(program, config);
    let mut watch = ();
    let mut run =
        Run::new(&engine, &driver, program, config, options_for(program, config), &mut watch);
    run.goal.last = Some(u32::try_from(event).unwrap_or(u32::MAX));
    if let Err(Stop::Driver(error)) = run.run() {
        return Err(error);
    }
    Ok(State { snapshot: engine.snapshot(), allocated_by: run.allocated_by() })
}

/// Makes an engine and a simulated device. The device has the recorded size if addresses depend on
/// it; otherwise it is larger than any trace.
fn device_for(
    program: &Program,
    config: &ReplayConfig,
) -> (Engine<Arc<SimDriver>>, Arc<SimDriver>) {
    let recorded = program.device_total.filter(|_| config.policy == program.policy);
    let total = recorded.unwrap_or(UNLIMITED).max(config.capacity.unwrap_or(0));
    let sim = SimConfig { total, ..SimConfig::with_capacity(UNLIMITED.max(total)) };
    let driver = Arc::new(SimDriver::new(sim));
    driver.work_outlasts_waits();
    // A trace does not tell how long work took: the device finishes it while the allocator waits.
    let clock: Arc<dyn Clock> = Arc::new(SimClock::new(Arc::clone(&driver)));
    let options = options_for(program, config);
    let config_of_engine =
        EngineConfig { options, ladder: config.ladder, clock, ..EngineConfig::default() };
    let engine = Engine::with_config(Arc::clone(&driver), config_of_engine);
    // A trace tells neither which streams were destroyed nor which were idle when another stream
    // borrowed from them. Under `paged`, a borrowed block is recorded with the lender's stream. A
    // replay of a `paged` run under `paged` must therefore not borrow again, and streams that may
    // be gone do not borrow.
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
    // The size of the recorded device is not known: the capacity is the limit.
    options.per_process_memory_fraction = 1.0;
    options
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use cushion_core::driver::{FailWhen, Fault};
    use cushion_core::{BlockUse, Ladder};

    use super::*;
    use crate::read::limits::Limits;
    use crate::read::open::open;

    /// Fails the n-th driver call for every n over a whole trace. In each case the replay continues
    /// or ends in a typed error, the invariants hold, every later free succeeds, and all memory is
    /// returned.
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
            let mut watch = ();
            let options = options_for(&program, &config);
            let mut run = Run::new(&engine, &driver, &program, &config, options, &mut watch);
            let ended = run.run();
            if let Err(Stop::Driver(error)) = ended {
                assert_eq!(error.fault, fault, "{name}, call {nth}: another fault");
            }
            engine.check_invariants().unwrap_or_else(|v| panic!("{name}, call {nth}: {v}"));
            driver.clear_failures();
            run.end_pool();
            for (pool, uses) in std::mem::take(&mut run.pools.uses) {
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
    fn any_driver_call_can_fail_under_segments() {
        fail_every_call("capped", 1 << 30, Fault::Failed(999));
        fail_every_call("garbage_max_split", 3 << 29, Fault::OutOfMemory);
        fail_every_call("graphs", 1 << 30, Fault::Failed(999));
        fail_every_call("pools_capped", 1 << 29, Fault::OutOfMemory);
    }

    #[test]
    fn any_driver_call_can_fail_under_expandable() {
        fail_every_call("capped_expandable", 1 << 30, Fault::Failed(999));
        fail_every_call("max_split_expandable", 1 << 30, Fault::OutOfMemory);
        fail_every_call("graphs_expandable", 1 << 30, Fault::Failed(999));
    }
}
