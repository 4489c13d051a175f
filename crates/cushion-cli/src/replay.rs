//! `cushion replay`: what a trace needs, whether it fits, and whether we do as PyTorch did.

use std::io::Write;
use std::path::Path;

use anyhow::{Context as _, bail};
use cushion_core::driver::Call;
use cushion_core::size::display;
use cushion_core::{Ladder, Policy};
use cushion_trace::{
    Difference, Limits, Outcome, Program, Refusal, ReplayConfig, Snapshot, open, replay,
};
use serde::Serialize;

use crate::args::{PolicyArg, ReplayArgs};
use crate::{Streams, Verdict};

/// Runs the command.
pub(crate) fn run<O: Write, T: Write>(
    args: &ReplayArgs,
    streams: &mut Streams<O, T>,
) -> anyhow::Result<Verdict> {
    let ladder = Ladder::from(args.ladder);
    if args.verify && ladder != Ladder::Torch {
        bail!("--verify follows PyTorch step by step, so it needs --ladder torch");
    }
    if let Some(conf) = &args.conf
        && !conf.not_ours.is_empty()
    {
        let keys = conf.not_ours.join(", ");
        streams.talk(format_args!("not options of the device allocator: {keys}"));
    }
    let mut verdict = Verdict::Fits;
    let mut table = Table::default();
    for path in &args.traces {
        // One bad file does not keep the others from being read.
        let found = one_trace(path, args, ladder, &mut table, streams).unwrap_or_else(|error| {
            streams.talk(format_args!("{}: {error:#}", path.display()));
            Verdict::BadInput
        });
        verdict = verdict.max(found);
    }
    for line in table.lines() {
        streams.data(format_args!("{line}"));
    }
    Ok(verdict)
}

fn one_trace<O: Write, T: Write>(
    path: &Path,
    args: &ReplayArgs,
    ladder: Ladder,
    table: &mut Table,
    streams: &mut Streams<O, T>,
) -> anyhow::Result<Verdict> {
    let name = path.display().to_string();
    let snapshot = open(path, &Limits::default())?;
    let device = choose_device(&snapshot, args.device)?;
    let program = Program::of(&snapshot, device);
    drop(snapshot);
    if program.is_empty() {
        bail!("no allocations were recorded on device {device}");
    }
    for note in &program.notes {
        streams.talk(format_args!("{name}: {note}"));
    }
    let mut verdict = Verdict::Fits;
    for &policy in args.policy.policies() {
        let config = ReplayConfig {
            policy,
            ladder,
            capacity: args.capacity,
            options: args.conf.as_ref().map(|conf| conf.options.clone()),
        };
        let outcome = replay(&program, &config).context("the simulated device refused a call")?;
        if outcome.oom.is_some() {
            verdict = verdict.max(Verdict::OutOfMemory);
        }
        if args.verify {
            let (differs, lines) = verify(policy, &program, &outcome);
            // Nobody asked for the other policies when all are shown.
            if outcome.same_address.is_some() || args.policy != PolicyArg::All {
                for line in lines {
                    streams.talk(format_args!("{name}: {policy}: {line}"));
                }
            }
            verdict = verdict.max(if differs { Verdict::Differs } else { Verdict::Fits });
        }
        if outcome.refusals_passed_over > 0 {
            streams.talk(format_args!(
                "{name}: {policy}: {} requests that PyTorch refused are passed over; --capacity \
                 tries them",
                outcome.refusals_passed_over
            ));
        }
        let row = Row { trace: &name, policy, ladder, outcome: &outcome };
        if args.json {
            streams.data(format_args!("{}", serde_json::to_string(&row.json())?));
        } else {
            table.add(&row);
        }
    }
    Ok(verdict)
}

/// The device asked for, or the one with the most events.
fn choose_device(snapshot: &Snapshot, asked: Option<usize>) -> anyhow::Result<usize> {
    let count = snapshot.devices.len();
    match asked {
        Some(device) if device < count => Ok(device),
        Some(device) => bail!("no device {device}: the trace has {count}"),
        None => (0..count)
            .rev()
            .max_by_key(|&device| snapshot.devices[device].len())
            .context("the trace has no device"),
    }
}

/// How far a run did as PyTorch did: whether it went another way, and that in words.
fn verify(policy: Policy, program: &Program, outcome: &Outcome) -> (bool, Vec<String>) {
    let Some(same) = outcome.same_address else {
        let recorded = program.policy;
        let line = format!("not verified, the trace was recorded with {recorded}, not {policy}");
        return (false, vec![line]);
    };
    let mut lines = vec![format!("{same} of {} allocations at PyTorch's address", program.allocs)];
    if let Some(Difference { event, requested, pytorch, ours, .. }) = outcome.difference {
        let place = |address: Option<u64>| match address {
            Some(address) => format!("served it at {address:#x}"),
            None => "refused it".to_owned(),
        };
        lines.push(format!(
            "the first difference is at event {event}, a request of {requested} bytes: PyTorch {}, \
             the replay {}; from there on addresses are the simulator's own",
            place(pytorch),
            place(ours)
        ));
        let why = if program.begins_in_the_middle() {
            "the trace begins in the middle of a run: was something before it not rebuilt rightly?"
        } else {
            "were the capacity or the options other than PyTorch's?"
        };
        lines.push(why.to_owned());
    }
    (outcome.difference.is_some(), lines)
}

struct Row<'a> {
    trace: &'a str,
    policy: Policy,
    ladder: Ladder,
    outcome: &'a Outcome,
}

#[derive(Serialize)]
struct JsonRow<'a> {
    trace: &'a str,
    policy: &'static str,
    ladder: &'static str,
    events: u64,
    allocs: u64,
    live_peak_bytes: u64,
    reserved_peak_bytes: u64,
    excess: Option<f64>,
    same_address: Option<u64>,
    first_difference: Option<JsonDifference>,
    driver: JsonDriver,
    retries: u64,
    oom: Option<JsonRefusal>,
}

#[derive(Serialize)]
struct JsonDifference {
    event: u64,
    requested: u64,
    pytorch_address: Option<u64>,
    address: Option<u64>,
}

#[derive(Serialize)]
struct JsonDriver {
    malloc: u64,
    free: u64,
    create: u64,
    map: u64,
    set_access: u64,
    unmap: u64,
    release: u64,
    time_us: f64,
}

#[derive(Serialize)]
struct JsonRefusal {
    event: u64,
    requested: u64,
    live: u64,
    reserved: u64,
    largest_free: u64,
}

impl<'a> Row<'a> {
    fn json(&self) -> JsonRow<'a> {
        let outcome = self.outcome;
        let calls = |call| outcome.driver.of(call);
        JsonRow {
            trace: self.trace,
            policy: self.policy.name(),
            ladder: self.ladder.name(),
            events: outcome.events,
            allocs: outcome.allocs,
            live_peak_bytes: outcome.live_peak,
            reserved_peak_bytes: outcome.reserved_peak,
            excess: outcome.excess(),
            same_address: outcome.same_address,
            first_difference: outcome.difference.map(|difference| JsonDifference {
                event: difference.event,
                requested: difference.requested,
                pytorch_address: difference.pytorch,
                address: difference.ours,
            }),
            driver: JsonDriver {
                malloc: calls(Call::Alloc),
                free: calls(Call::Free),
                create: calls(Call::Create),
                map: calls(Call::Map),
                set_access: calls(Call::SetAccess),
                unmap: calls(Call::Unmap),
                release: calls(Call::Release),
                time_us: microseconds(outcome.driver.nanos),
            },
            retries: outcome.retries,
            oom: outcome.oom.map(|refusal| {
                let Refusal { event, requested, live, reserved, largest_free, .. } = refusal;
                JsonRefusal { event, requested, live, reserved, largest_free }
            }),
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "times are small")]
fn microseconds(nanos: u64) -> f64 {
    nanos as f64 / 1000.0
}

/// The table for people: columns as wide as their widest cell, readable without colour.
#[derive(Default)]
struct Table {
    rows: Vec<Vec<String>>,
    /// What a cell has no room for.
    details: Vec<String>,
}

impl Table {
    const HEAD: [&str; 8] =
        ["trace", "policy", "allocs", "live peak", "reserved peak", "excess", "driver", "result"];
    /// Columns of names are aligned left, of figures right.
    const LEFT: [bool; 8] = [true, true, false, false, false, false, false, true];

    fn add(&mut self, row: &Row<'_>) {
        let outcome = row.outcome;
        let file = Path::new(row.trace).file_name().unwrap_or(row.trace.as_ref());
        let file = file.to_string_lossy().into_owned();
        let result = match outcome.oom {
            None => "fits".to_owned(),
            Some(Refusal { event, requested, live, reserved, largest_free, .. }) => {
                self.details.push(format!(
                    "{file}, {}: at event {event} a request of {} was refused, with {} live and {} \
                     reserved; the largest free block was {}.",
                    row.policy,
                    display(requested),
                    display(live),
                    display(reserved),
                    display(largest_free)
                ));
                "out of memory".to_owned()
            }
        };
        self.rows.push(vec![
            file,
            row.policy.to_string(),
            outcome.allocs.to_string(),
            display(outcome.live_peak),
            display(outcome.reserved_peak),
            outcome.excess().map_or_else(|| "-".to_owned(), |excess| format!("{excess:.4}")),
            format!("{:.2} ms", microseconds(outcome.driver.nanos) / 1000.0),
            result,
        ]);
    }

    fn lines(&self) -> Vec<String> {
        if self.rows.is_empty() {
            return Vec::new();
        }
        let head: Vec<String> = Self::HEAD.iter().map(|&cell| cell.to_owned()).collect();
        let rows: Vec<&Vec<String>> = std::iter::once(&head).chain(&self.rows).collect();
        let widths: Vec<usize> = (0..Self::HEAD.len())
            .map(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0))
            .collect();
        let mut lines: Vec<String> = rows
            .iter()
            .map(|row| {
                let cells =
                    row.iter().zip(&widths).zip(Self::LEFT).map(|((cell, &width), left)| {
                        if left { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
                    });
                cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
            })
            .collect();
        lines.extend(self.details.iter().cloned());
        lines
    }
}
