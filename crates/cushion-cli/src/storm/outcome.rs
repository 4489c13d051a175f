//! The results of a storm: as JSON, one object per run, and as a table, one row per policy and
//! ladder.

use std::time::Duration;

use cushion_core::{Ladder, Policy};
use serde::Serialize;

use super::task::{Doing, Fate, Fates};
use super::world::World;
use crate::output::table::{Align, Table};

/// How a run ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Ended {
    /// Every task finished or was lost.
    Quiet,
    /// Some task would never have ended.
    Hang(String),
    /// An invariant was broken.
    Violation(String),
}

/// One run of tasks on one engine.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) ended: Ended,
    pub(crate) fates: Vec<Fate>,
    survived: u64,
    refused: u64,
    lost_ms: f64,
    took: Duration,
}

impl Ran {
    pub(crate) fn new(world: &World, fates: &Fates, ended: Ended) -> Self {
        let stats = world.engine.stats();
        Self {
            ended,
            fates: fates.all(),
            survived: stats.shortages_survived,
            refused: stats.shortages_refused,
            lost_ms: stats.milliseconds_lost(),
            took: world.clock.now(),
        }
    }

    /// Returns how long the run took, on its clock.
    #[cfg(test)]
    pub(crate) fn took(&self) -> Duration {
        self.took
    }

    /// Returns whether a task finished.
    pub(crate) fn finished(&self, task: usize) -> bool {
        self.fates[task].doing == Doing::Finished
    }
}

/// The result of one seed under one policy and ladder. Each field is a key of a line of `--json`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Outcome {
    pub(crate) seed: u64,
    #[serde(serialize_with = "name")]
    pub(crate) policy: Policy,
    pub(crate) ladder: Ladder,
    pub(crate) real_threads: bool,
    pub(crate) device_bytes: u64,
    pub(crate) tasks: usize,
    /// Tasks that finished when they ran one after the other.
    pub(crate) can_run_alone: usize,
    pub(crate) finished: usize,
    /// Tasks that can run alone but did not finish here.
    pub(crate) missing: usize,
    pub(crate) survived: u64,
    pub(crate) refused: u64,
    pub(crate) give_way: u64,
    pub(crate) split: u64,
    pub(crate) full: u64,
    pub(crate) restarts: u64,
    pub(crate) lost_ms: f64,
    pub(crate) took_ms: f64,
    pub(crate) hang: Option<String>,
    pub(crate) violation: Option<String>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for a reference")]
fn name<S: serde::Serializer>(policy: &Policy, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(policy.name())
}

/// The identity of a run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Which {
    pub(crate) seed: u64,
    pub(crate) policy: Policy,
    pub(crate) ladder: Ladder,
    pub(crate) real_threads: bool,
    pub(crate) device: u64,
}

impl Outcome {
    /// Makes the outcome of a run; `alone` says for each task whether it can run alone.
    pub(crate) fn new(which: Which, ran: Ran, alone: &[bool]) -> Self {
        let Which { seed, policy, ladder, real_threads, device } = which;
        let sum = |of: fn(&Fate) -> u64| ran.fates.iter().map(of).sum();
        let tasks = 0..ran.fates.len();
        let missing = tasks.clone().filter(|&task| alone[task] && !ran.finished(task));
        let (missing, finished) = (missing.count(), tasks.filter(|&task| ran.finished(task)));
        let mut outcome = Self {
            seed,
            policy,
            ladder,
            real_threads,
            device_bytes: device,
            tasks: ran.fates.len(),
            can_run_alone: alone.iter().filter(|&&alone| alone).count(),
            finished: finished.count(),
            missing,
            survived: ran.survived,
            refused: ran.refused,
            give_way: sum(|fate| fate.give_way),
            split: sum(|fate| fate.split),
            full: sum(|fate| fate.full),
            restarts: sum(|fate| fate.restarts),
            lost_ms: ran.lost_ms,
            took_ms: ran.took.as_secs_f64() * 1e3,
            hang: None,
            violation: None,
        };
        match ran.ended {
            Ended::Violation(what) => outcome.violation = Some(what),
            Ended::Hang(what) => outcome.hang = Some(what),
            // A task that restarts for ever hangs too.
            Ended::Quiet if ladder == Ladder::Graceful && missing > 0 => {
                outcome.hang = Some(format!("{missing} of the tasks restarted for ever"));
            }
            Ended::Quiet => {}
        }
        outcome
    }

    /// Returns whether the run passed all checks.
    pub(crate) fn is_good(&self) -> bool {
        let all = self.ladder == Ladder::Torch || self.missing == 0;
        all && self.hang.is_none() && self.violation.is_none()
    }

    /// Says what went wrong and how to reproduce it.
    pub(crate) fn complaints(&self) -> Vec<String> {
        let Self { seed, policy, ladder, real_threads, hang, violation, .. } = self;
        let kinds = [("a violation", violation), ("a hang", hang)];
        let told = kinds.into_iter().filter_map(|(kind, what)| Some((kind, what.as_ref()?)));
        told.map(|(kind, what)| {
            let threads = if *real_threads { " --real-threads" } else { "" };
            format!(
                "{kind} with --first-seed {seed} --seeds 1 --policy {policy} --ladder \
                 {ladder}{threads} and this shape: {what}"
            )
        })
        .collect()
    }
}

/// The sums over all seeds, for one policy and ladder. Each field is a column of the table.
#[derive(Debug)]
struct Row {
    policy: Policy,
    ladder: Ladder,
    runs: u64,
    lost_some: u64,
    finished: usize,
    tasks: usize,
    alone: usize,
    survived: u64,
    give_way: u64,
    split: u64,
    full: u64,
    restarts: u64,
    lost_ms: f64,
    hangs: u64,
    violations: u64,
}

/// The table.
#[derive(Debug, Default)]
pub(crate) struct Rows(Vec<Row>);

impl Rows {
    pub(crate) fn add(&mut self, outcome: &Outcome) {
        let Outcome { policy, ladder, .. } = *outcome;
        let known = self.0.iter().position(|row| (row.policy, row.ladder) == (policy, ladder));
        let at = known.unwrap_or(self.0.len());
        if known.is_none() {
            self.0.push(Row {
                policy,
                ladder,
                runs: 0,
                lost_some: 0,
                finished: 0,
                tasks: 0,
                alone: 0,
                survived: 0,
                give_way: 0,
                split: 0,
                full: 0,
                restarts: 0,
                lost_ms: 0.0,
                hangs: 0,
                violations: 0,
            });
        }
        let row = &mut self.0[at];
        row.runs += 1;
        row.lost_some += u64::from(outcome.finished < outcome.tasks);
        row.finished += outcome.finished;
        row.tasks += outcome.tasks;
        row.alone += outcome.can_run_alone;
        row.survived += outcome.survived;
        row.give_way += outcome.give_way;
        row.split += outcome.split;
        row.full += outcome.full;
        row.restarts += outcome.restarts;
        row.lost_ms += outcome.lost_ms;
        row.hangs += u64::from(outcome.hang.is_some());
        row.violations += u64::from(outcome.violation.is_some());
    }

    pub(crate) fn lines(&self) -> Vec<String> {
        let mut table = Table::new(vec![
            ("policy", Align::Left),
            ("ladder", Align::Left),
            ("runs", Align::Right),
            ("lost tasks", Align::Right),
            ("finished", Align::Right),
            ("of", Align::Right),
            ("could alone", Align::Right),
            ("survived", Align::Right),
            ("give way", Align::Right),
            ("split", Align::Right),
            ("full", Align::Right),
            ("restarts", Align::Right),
            ("time lost", Align::Right),
            ("hangs", Align::Right),
            ("violations", Align::Right),
        ]);
        for row in &self.0 {
            table.add(vec![
                row.policy.to_string(),
                row.ladder.to_string(),
                row.runs.to_string(),
                row.lost_some.to_string(),
                row.finished.to_string(),
                row.tasks.to_string(),
                row.alone.to_string(),
                row.survived.to_string(),
                row.give_way.to_string(),
                row.split.to_string(),
                row.full.to_string(),
                row.restarts.to_string(),
                format!("{:.1} s", row.lost_ms / 1e3),
                row.hangs.to_string(),
                row.violations.to_string(),
            ]);
        }
        table.lines()
    }
}
