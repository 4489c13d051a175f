//! `cushion storm`: many tasks that together need far more than the device has, by seed, with and
//! without the ladder.
//!
//! `script.rs` draws what each task does; `task.rs` runs a task and handles refusals; `world.rs`
//! has the engine, the device and the checks; `virtual_time.rs` and `threads.rs` schedule the
//! tasks; `outcome.rs` has the results.

mod guard;
mod outcome;
mod random;
mod script;
mod task;
mod threads;
mod virtual_time;
mod world;

use std::collections::BTreeMap;
use std::io::Write;
use std::num::NonZero;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use anyhow::bail;
use cushion_core::size::MIN_BLOCK;
use cushion_core::{Ladder, Policy};

use crate::Verdict;
use crate::args::StormArgs;
use crate::output::Streams;
use outcome::{Outcome, Rows, Which};
use script::{Shape, Storm};
use virtual_time::Part;
use world::Setting;

/// The least number of restarts granted to a task that can run alone; a task that needs more makes
/// no progress.
const MOST_RESTARTS: u64 = 200;

/// The restarts granted to a task that cannot run alone: it will not finish, and hinders the
/// others.
const HOPELESS_RESTARTS: u64 = 10;

/// The number of failed runs that are described one by one.
const COMPLAINTS: u64 = 10;

/// The longest wait of a request, on virtual time.
const VIRTUAL_WAIT: Duration = Duration::from_secs(600);

/// Runs the command.
pub(crate) fn run<O: Write, T: Write>(
    args: &StormArgs,
    streams: &mut Streams<O, T>,
) -> anyhow::Result<Verdict> {
    let plan = Plan::new(args)?;
    let mut results = Results { rows: Rows::default(), json: args.json, bad: 0 };
    if args.real_threads {
        threads::run_all(&plan, Duration::from_secs(args.watchdog), &mut results, streams);
    } else {
        run_all(&plan, &mut results, streams);
    }
    if !args.json {
        for line in results.rows.lines() {
            streams.data(format_args!("{line}"));
        }
    }
    if results.bad > COMPLAINTS {
        let more = results.bad - COMPLAINTS;
        streams.talk(format_args!("and {more} more runs; --json shows all of them"));
    }
    Ok(if results.bad == 0 { Verdict::Fits } else { Verdict::STORM_LOST })
}

/// What to run.
#[derive(Debug)]
struct Plan {
    shape: Shape,
    first_seed: u64,
    seeds: u64,
    policies: &'static [Policy],
    ladders: &'static [Ladder],
}

impl Plan {
    fn new(args: &StormArgs) -> anyhow::Result<Self> {
        if args.first_seed.checked_add(args.seeds - 1).is_none() {
            bail!("--first-seed {} leaves no room for {} seeds", args.first_seed, args.seeds);
        }
        let ratio = args.device_ratio;
        if !(ratio > 0.0 && ratio <= 1000.0) {
            bail!("--device-ratio {ratio}: it must be above 0, and 1000 at most");
        }
        if !(16 * MIN_BLOCK..=1 << 40).contains(&args.task_max) {
            bail!("--task-max {}: it must lie between 8KiB and 1TiB", args.task_max);
        }
        Ok(Self {
            shape: Shape {
                tasks: args.tasks.into(),
                at_once: args.at_once.into(),
                allocations: args.allocations.into(),
                task_max: args.task_max,
                device_ratio: ratio,
                streams: args.streams.into(),
            },
            first_seed: args.first_seed,
            seeds: args.seeds,
            policies: args.policy.policies(),
            ladders: args.ladder.ladders(),
        })
    }
}

/// The results so far.
#[derive(Debug)]
struct Results {
    rows: Rows,
    json: bool,
    /// Runs that failed a check.
    bad: u64,
}

impl Results {
    fn report<O: Write, T: Write>(&mut self, outcome: &Outcome, streams: &mut Streams<O, T>) {
        self.rows.add(outcome);
        if !outcome.is_good() {
            self.bad += 1;
            for complaint in outcome.complaints().iter().filter(|_| self.bad <= COMPLAINTS) {
                streams.talk(format_args!("{complaint}"));
            }
        }
        if self.json {
            match serde_json::to_string(outcome) {
                Ok(line) => streams.data(format_args!("{line}")),
                Err(error) => streams.talk(format_args!("{error}")),
            }
        }
    }
}

/// Runs all seeds on virtual time, on all cores, and reports them in order.
fn run_all<O: Write, T: Write>(plan: &Plan, results: &mut Results, streams: &mut Streams<O, T>) {
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    let next = AtomicU64::new(0);
    let (to, from) = mpsc::channel();
    streams.begin("storm");
    std::thread::scope(|scope| {
        for _ in 0..cores {
            let (to, next) = (to.clone(), &next);
            scope.spawn(move || {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    // A closed channel means that the command is ending.
                    if index >= plan.seeds || to.send((index, run_seed(plan, index))).is_err() {
                        return;
                    }
                }
            });
        }
        drop(to);
        let mut early = BTreeMap::new();
        let mut due = 0;
        for (index, outcomes) in from {
            early.insert(index, outcomes);
            while let Some(outcomes) = early.remove(&due) {
                outcomes.iter().for_each(|outcome| results.report(outcome, streams));
                due += 1;
            }
            streams.update(due, Some(plan.seeds));
        }
    });
    streams.end();
}

/// Runs one seed on virtual time, under each policy and ladder.
fn run_seed(plan: &Plan, index: u64) -> Vec<Outcome> {
    let seed = plan.first_seed + index;
    let shape = &plan.shape;
    let storm = Storm::draw(seed, shape);
    let mut outcomes = Vec::new();
    for &policy in plan.policies {
        let alone = runs_alone(&storm, policy, seed);
        for &ladder in plan.ladders {
            let setting = virtual_setting(seed, policy, ladder, storm.device);
            let parts = parts(&storm, &alone, shape);
            let ran = virtual_time::run(setting, &parts, shape.at_once);
            let which = Which { seed, policy, ladder, real_threads: false, device: storm.device };
            outcomes.push(Outcome::new(which, ran, &alone));
        }
    }
    outcomes
}

fn virtual_setting(seed: u64, policy: Policy, ladder: Ladder, device: u64) -> Setting {
    Setting { seed, policy, ladder, device, wait: VIRTUAL_WAIT, hurry: 1, alone: true }
}

/// Returns the tasks, each with the number of restarts it may make.
fn parts<'a>(storm: &'a Storm, alone: &[bool], shape: &Shape) -> Vec<Part<'a>> {
    let tasks = storm.scripts.iter().zip(alone);
    let limit = |alone| most_restarts(alone, shape);
    tasks.map(|(script, &alone)| Part { script, most_restarts: limit(alone) }).collect()
}

/// Returns how often a task may restart. A task gives way so that another one gets at least one
/// allocation further, which may be needed as often as there are allocations.
fn most_restarts(alone: bool, shape: &Shape) -> u64 {
    let allocations = (shape.tasks * shape.allocations) as u64;
    if alone { allocations.max(MOST_RESTARTS) } else { HOPELESS_RESTARTS }
}

/// Returns for each task whether it finishes when it has the device to itself. Such a task can
/// always finish after the others.
fn runs_alone(storm: &Storm, policy: Policy, seed: u64) -> Vec<bool> {
    let setting = virtual_setting(seed, policy, Ladder::Graceful, storm.device);
    let alone =
        |script| virtual_time::run(setting, &[Part { script, most_restarts: 0 }], 1).finished(0);
    storm.scripts.iter().map(alone).collect()
}
