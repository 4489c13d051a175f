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

use crate::Verdict;
use crate::args::{PolicyArg, ReplayArgs};

/// Runs the command.
pub(crate) fn run(
    args: &ReplayArgs,
    out: &mut impl Write,
    talk: &mut impl Write,
) -> anyhow::Result<Verdict> {
    let ladder = Ladder::from(args.ladder);
    if args.verify && ladder != Ladder::Torch {
        bail!("--verify follows PyTorch step by step, so it needs --ladder torch");
    }
    if let Some(conf) = &args.conf
        && !conf.not_ours.is_empty()
    {
        writeln!(
            talk,
            "cushion: not options of the device allocator: {}",
            conf.not_ours.join(", ")
        )?;
    }
    let mut verdict = Verdict::Fits;
    let mut table = Table::default();
    for path in &args.traces {
        let found = match one_trace(path, args, ladder, &mut table, out, talk) {
            Ok(found) => found,
            // One bad file does not keep the others from being read.
            Err(error) if error.downcast_ref::<std::io::Error>().is_none() => {
                writeln!(talk, "cushion: {}: {error:#}", path.display())?;
                Verdict::BadInput
            }
            Err(error) => return Err(error),
        };
        verdict = verdict.max(found);
    }
    if !args.json {
        table.print(out)?;
    }
    Ok(verdict)
}

fn one_trace(
    path: &Path,
    args: &ReplayArgs,
    ladder: Ladder,
    table: &mut Table,
    out: &mut impl Write,
    talk: &mut impl Write,
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
        writeln!(talk, "cushion: {name}: {note}")?;
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
            // Nobody asked for the other policies when all are shown.
            let asked = args.policy != PolicyArg::All;
            let differs = verify(&name, policy, &program, &outcome, asked, talk)?;
            verdict = verdict.max(if differs { Verdict::Differs } else { Verdict::Fits });
        }
        if outcome.refusals_passed_over > 0 {
            writeln!(
                talk,
                "cushion: {name}: {} requests that PyTorch refused are passed over; \
                 --capacity tries them",
                outcome.refusals_passed_over
            )?;
        }
        let row = Row { trace: &name, policy, ladder, outcome: &outcome };
        if args.json {
            writeln!(out, "{}", serde_json::to_string(&row.json())?)?;
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

/// Says how far a run did as PyTorch did; true if it did not.
fn verify(
    name: &str,
    policy: Policy,
    program: &Program,
    outcome: &Outcome,
    asked: bool,
    talk: &mut impl Write,
) -> anyhow::Result<bool> {
    let Some(same) = outcome.same_address else {
        if asked {
            writeln!(
                talk,
                "cushion: {name}: {policy}: not verified, the trace was recorded with {}",
                program.policy
            )?;
        }
        return Ok(false);
    };
    writeln!(
        talk,
        "cushion: {name}: {policy}: {same} of {} allocations at PyTorch's address",
        program.allocs
    )?;
    let Some(difference) = outcome.difference else { return Ok(false) };
    let Difference { event, requested, pytorch, ours, .. } = difference;
    let place = |address: Option<u64>| match address {
        Some(address) => format!("served it at {address:#x}"),
        None => "refused it".to_owned(),
    };
    writeln!(
        talk,
        "cushion: {name}: {policy}: the first difference is at event {event}, a request of \
         {requested} bytes: PyTorch {}, the replay {}. From there on addresses are the simulator's \
         own; is the capacity or conf another than PyTorch had?",
        place(pytorch),
        place(ours)
    )?;
    Ok(true)
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

    fn print(&self, out: &mut impl Write) -> std::io::Result<()> {
        if self.rows.is_empty() {
            return Ok(());
        }
        let head: Vec<String> = Self::HEAD.iter().map(|&cell| cell.to_owned()).collect();
        let lines: Vec<&Vec<String>> = std::iter::once(&head).chain(&self.rows).collect();
        let widths: Vec<usize> = (0..Self::HEAD.len())
            .map(|column| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0))
            .collect();
        for line in lines {
            let mut text = String::new();
            for ((cell, &width), left) in line.iter().zip(&widths).zip(Self::LEFT) {
                if left {
                    text.push_str(&format!("{cell:<width$}  "));
                } else {
                    text.push_str(&format!("{cell:>width$}  "));
                }
            }
            writeln!(out, "{}", text.trim_end())?;
        }
        for detail in &self.details {
            writeln!(out, "{detail}")?;
        }
        Ok(())
    }
}
