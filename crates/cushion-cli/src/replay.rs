//! `cushion replay`: what a trace needs, whether it fits, and whether we do as PyTorch did.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use cushion_core::driver::Call;
use cushion_core::size::display;
use cushion_core::{Ladder, Options, Policy};
use cushion_trace::{
    Difference, Events, Frame, Origin, Outcome, Program, RecordedOom, Refusal, ReplayConfig,
    Stacks, Watch, min_capacity, replay, replay_watched,
};
use serde::Serialize;

use crate::args::{PolicyArg, ReplayArgs};
use crate::load::{Loaded, load, short};
use crate::recorded;
use crate::save;
use crate::shortages::{self, ReceiptLines};
use crate::table::{Align, Table};
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
    if args.spill.is_some() && ladder != Ladder::Graceful {
        bail!("PyTorch never uses host memory, so --spill needs --ladder graceful");
    }
    if let Some(conf) = &args.conf
        && !conf.not_ours.is_empty()
    {
        let keys = conf.not_ours.join(", ");
        streams.talk(format_args!("not options of the device allocator: {keys}"));
    }
    if let Some(path) = &args.receipts {
        let traces: Vec<&Path> = args.traces.iter().map(PathBuf::as_path).collect();
        save::check(path, &traces)?;
    }
    let mut verdict = Verdict::Fits;
    let mut told = Told { rows: Rows::new(args.min_capacity), receipts: ReceiptLines::default() };
    for path in &args.traces {
        // One bad file does not keep the others from being read.
        let found = one_trace(path, args, ladder, &mut told, streams).unwrap_or_else(|error| {
            streams.talk(format_args!("{}: {error:#}", path.display()));
            Verdict::BadInput
        });
        verdict = verdict.max(found);
    }
    for line in told.rows.lines() {
        streams.data(format_args!("{line}"));
    }
    if let Some(path) = &args.receipts {
        told.receipts.save(path)?;
    }
    Ok(verdict)
}

/// What is told once all traces are done.
struct Told {
    rows: Rows,
    receipts: ReceiptLines,
}

fn one_trace<O: Write, T: Write>(
    path: &Path,
    args: &ReplayArgs,
    ladder: Ladder,
    told: &mut Told,
    streams: &mut Streams<O, T>,
) -> anyhow::Result<Verdict> {
    let Loaded { name, snapshot, device, program } = load(path, args.device, streams)?;
    // With a limit, and on the smallest device, requests that PyTorch refused are tried again.
    let floor = program.floor_bytes(args.capacity.is_some() || args.min_capacity);
    let mut verdict = Verdict::Fits;
    let mut compared = 0;
    // What passes without a limit does not answer a run that was refused memory.
    let unanswered = program.oom.filter(|_| args.capacity.is_none());
    if let Some(oom) = &unanswered {
        verdict = Verdict::OutOfMemory;
        let lines = in_vain(oom, program.origin, args.min_capacity);
        if args.json {
            for line in &lines {
                streams.talk(format_args!("{name}: {line}"));
            }
        } else {
            told.rows.explain(&name, &lines);
        }
    }
    for &policy in args.policy.policies() {
        let config = ReplayConfig {
            policy,
            ladder,
            capacity: args.capacity,
            options: options(args, &program),
        };
        let outcome = run_one(&name, &program, &config, streams)
            .context("the simulated device refused a call")?;
        if outcome.oom.is_some() {
            verdict = verdict.max(Verdict::OutOfMemory);
        }
        if args.verify
            && let Some(same) = outcome.same_address
        {
            compared += outcome.allocs;
            for line in verify(same, &program, &outcome) {
                streams.talk(format_args!("{name}: {policy}: {line}"));
            }
            if outcome.difference.is_some() {
                verdict = verdict.max(Verdict::NotVerified);
            }
        }
        for line in caveats(&program, &outcome) {
            streams.talk(format_args!("{name}: {policy}: {line}"));
        }
        let smallest = if args.min_capacity {
            let smallest = smallest_device(&name, &program, &config, streams)
                .context("the simulated device refused a call")?;
            if smallest.is_none() {
                streams.talk(format_args!(
                    "{name}: {policy}: it needs more than 1 TiB, the largest device that is tried"
                ));
            }
            if smallest.is_some_and(|bytes| bytes < program.floor_bytes(true)) {
                streams.talk(format_args!(
                    "{name}: {policy}: the smallest device is below the floor, because on it the \
                     allocator waits for other streams earlier than PyTorch saw them done"
                ));
            }
            smallest
        } else {
            None
        };
        let stack = outcome
            .oom
            .map(|refusal| stack_of(&refusal, &snapshot.devices[device], &snapshot.stacks));
        let row = Row {
            trace: &name,
            policy,
            ladder,
            outcome: &outcome,
            floor,
            smallest,
            recorded: program.oom,
            has_limit: args.capacity.is_some(),
            stack: stack.unwrap_or_default(),
        };
        if args.receipts.is_some() {
            told.receipts.add(&name, policy, &outcome)?;
        }
        if args.json {
            streams.data(format_args!("{}", serde_json::to_string(&row.json())?));
        } else {
            told.rows.add(&row);
        }
    }
    if args.verify && compared == 0 {
        // Somebody who asks for a comparison must not take silence for agreement.
        streams.talk(format_args!("{name}: {}", nothing_compared(&program, args.policy)));
        verdict = verdict.max(Verdict::NotVerified);
    }
    Ok(verdict)
}

/// The options in place of those recorded, if any are asked for.
fn options(args: &ReplayArgs, program: &Program) -> Option<Options> {
    let options = args.conf.as_ref().map(|conf| conf.options.clone());
    let Some(spill_limit) = args.spill else { return options };
    let options = options.unwrap_or_else(|| program.options.clone());
    Some(Options { spill_limit, ..options })
}

/// Runs a program under one policy, with progress where somebody looks.
fn run_one<O: Write, T: Write>(
    name: &str,
    program: &Program,
    config: &ReplayConfig,
    streams: &mut Streams<O, T>,
) -> Result<Outcome, cushion_core::DriverError> {
    if !streams.progress.is_on() {
        return replay(program, config);
    }
    streams.begin(format!("replaying {} under {}", short(name), config.policy));
    let outcome = replay_watched(program, config, &mut Shown { streams, program, steps: 0 });
    streams.end();
    outcome
}

/// Shows the progress of a run.
struct Shown<'a, O, T> {
    streams: &'a mut Streams<O, T>,
    program: &'a Program,
    steps: u64,
}

impl<O: Write, T: Write> Watch for Shown<'_, O, T> {
    fn moment(&mut self, event: u64, _live: u64, _reserved: u64) {
        self.steps += 1;
        if self.steps.is_multiple_of(1 << 16) {
            self.streams.update(event, Some(self.program.events));
        }
    }
}

fn smallest_device<O: Write, T: Write>(
    name: &str,
    program: &Program,
    config: &ReplayConfig,
    streams: &mut Streams<O, T>,
) -> Result<Option<u64>, cushion_core::DriverError> {
    streams.begin(format!("smallest device for {} under {}", short(name), config.policy));
    let tried = |runs, expected| streams.update(u64::from(runs), Some(u64::from(expected)));
    let smallest = min_capacity(program, config, tried);
    streams.end();
    smallest
}

/// Where in the program the refused request was made, innermost first.
fn stack_of(refusal: &Refusal, events: &Events, stacks: &Stacks) -> Vec<String> {
    let event = usize::try_from(refusal.event).ok().filter(|_| !refusal.at_beginning);
    let stack = event.and_then(|event| events.get(event)).and_then(|event| event.stack);
    // Names are anybody's: nothing in them moves the cursor or breaks a line.
    let plain = |name: &str| name.replace(char::is_control, "\u{fffd}");
    let line =
        |frame: &Frame| format!("{}:{} {}", plain(&frame.filename), frame.line, plain(&frame.name));
    stack.map(|stack| stacks.frames(stack).map(line).collect()).unwrap_or_default()
}

/// What is said of a run that was refused memory, where this replay cannot say whether it fits.
fn in_vain(oom: &RecordedOom, origin: Origin, with_smallest: bool) -> Vec<String> {
    let mut lines = vec![recorded::what_happened(oom, origin), recorded::NOTHING_SAID.to_owned()];
    lines.extend(recorded::what_to_do(oom));
    if with_smallest {
        lines.push("on the smallest device that request is served too".to_owned());
    }
    lines
}

/// What a run cannot know, in words.
fn caveats(program: &Program, outcome: &Outcome) -> Vec<String> {
    let mut lines = Vec::new();
    if outcome.hurried_frees > 0 {
        lines.push(format!(
            "of {} frees that waited for another stream, {} were waited for and used again earlier \
             than in PyTorch; how long that takes is not known",
            outcome.pending_frees, outcome.hurried_frees
        ));
    }
    if program.begins_in_the_middle() && outcome.same_address.is_none() {
        lines.push(
            "what this policy would have held before the trace begins is not known: its run starts \
             from the live blocks alone"
                .to_owned(),
        );
    }
    lines
}

/// Why `--verify` compared nothing, and what to give for it to compare something.
fn nothing_compared(program: &Program, asked: PolicyArg) -> String {
    let recorded = program.policy;
    let why = if program.origin != Origin::Torch {
        "the trace is not PyTorch's, and does not tell how memory was laid out".to_owned()
    } else if program.allocs == 0 {
        "the trace has no allocation".to_owned()
    } else if !asked.policies().contains(&recorded) {
        format!(
            "the trace was recorded with {recorded}, and addresses can be compared under that policy \
             alone; give --policy {recorded}"
        )
    } else {
        "memory ran out before the first allocation; give a larger --capacity, or none".to_owned()
    };
    format!("not verified: 0 of {} allocations were compared: {why}", program.allocs)
}

/// How far a run did as PyTorch did, in words.
fn verify(same: u64, program: &Program, outcome: &Outcome) -> Vec<String> {
    let mut lines = vec![format!("{same} of {} allocations at PyTorch's address", program.allocs)];
    let left = program.allocs.saturating_sub(outcome.allocs);
    if left > 0 {
        lines.push(format!(
            "verified in part: {left} allocations after the end of the replay, where memory ran out, \
             were not compared"
        ));
    }
    match outcome.refusals_passed_over {
        0 => {}
        1 => lines.push(
            "verified in part: a request that PyTorch refused was not compared, which --capacity does"
                .to_owned(),
        ),
        refused => lines.push(format!(
            "verified in part: {refused} requests that PyTorch refused were not compared, which \
             --capacity does"
        )),
    }
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
    lines
}

struct Row<'a> {
    trace: &'a str,
    policy: Policy,
    ladder: Ladder,
    outcome: &'a Outcome,
    floor: u64,
    /// The smallest device, if it was asked for and there is one.
    smallest: Option<u64>,
    /// Where the recorded run itself ran out of memory.
    recorded: Option<RecordedOom>,
    has_limit: bool,
    /// Where in the program memory ran out, if that was recorded.
    stack: Vec<String>,
}

/// What a row says in the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    Fits,
    OutOfMemory,
    /// The recorded run ran out of memory, and this one had no limit.
    RecordedOutOfMemory,
}

impl Answer {
    fn in_words(self) -> &'static str {
        match self {
            Self::Fits => "fits",
            Self::OutOfMemory => "out of memory",
            Self::RecordedOutOfMemory => "ran out when recorded",
        }
    }
}

#[derive(Serialize)]
struct JsonRow<'a> {
    trace: &'a str,
    policy: &'static str,
    ladder: &'static str,
    events: u64,
    allocs: u64,
    live_peak_bytes: u64,
    floor_bytes: u64,
    reserved_peak_bytes: u64,
    excess: Option<f64>,
    min_capacity_bytes: Option<u64>,
    same_address: Option<u64>,
    first_difference: Option<JsonDifference>,
    driver: JsonDriver,
    retries: u64,
    pending_frees: u64,
    hurried_frees: u64,
    shortages: u64,
    survived: u64,
    refused: u64,
    milliseconds_lost: f64,
    spilled_peak_bytes: u64,
    result: Answer,
    oom: Option<JsonRefusal>,
    recorded_oom: Option<JsonRecorded>,
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
    /// As `num_device_alloc` of PyTorch's statistics counts them.
    allocations: u64,
    /// The event after which nothing is asked of the driver any more.
    last_event: u64,
    time_us: f64,
}

#[derive(Serialize)]
struct JsonRefusal {
    event: u64,
    requested: u64,
    live: u64,
    reserved: u64,
    largest_free: u64,
    at_beginning: bool,
    stack: Vec<String>,
}

#[derive(Serialize)]
struct JsonRecorded {
    event: u64,
    requested: u64,
    refusals: u64,
    live: u64,
    reserved: Option<u64>,
    device_free: Option<u64>,
    /// The capacity that stands for the memory the run had.
    capacity: Option<u64>,
}

impl<'a> Row<'a> {
    fn answer(&self) -> Answer {
        if self.outcome.oom.is_some() {
            Answer::OutOfMemory
        } else if self.recorded.is_some() && !self.has_limit {
            Answer::RecordedOutOfMemory
        } else {
            Answer::Fits
        }
    }

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
            floor_bytes: self.floor,
            reserved_peak_bytes: outcome.reserved_peak,
            excess: outcome.excess(),
            min_capacity_bytes: self.smallest,
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
                allocations: outcome.stats.num_device_alloc,
                last_event: outcome.last_driver_event,
                time_us: microseconds(outcome.driver.nanos),
            },
            retries: outcome.retries,
            pending_frees: outcome.pending_frees,
            hurried_frees: outcome.hurried_frees,
            shortages: outcome.stats.shortages,
            survived: outcome.stats.shortages_survived,
            refused: outcome.stats.shortages_refused,
            milliseconds_lost: outcome.stats.milliseconds_lost(),
            spilled_peak_bytes: outcome.stats.spilled_bytes.peak,
            result: self.answer(),
            recorded_oom: self.recorded.map(|oom| JsonRecorded {
                event: oom.event,
                requested: oom.requested,
                refusals: oom.count,
                live: oom.live,
                reserved: oom.reserved,
                device_free: oom.device_free,
                capacity: oom.room.capacity(),
            }),
            oom: outcome.oom.map(|refusal| {
                let Refusal {
                    event, requested, live, reserved, largest_free, at_beginning, ..
                } = refusal;
                let stack = self.stack.clone();
                JsonRefusal { event, requested, live, reserved, largest_free, at_beginning, stack }
            }),
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "times are small")]
pub(crate) fn microseconds(nanos: u64) -> f64 {
    nanos as f64 / 1000.0
}

/// The rows of the table for people, and under it what a cell has no room for.
struct Rows {
    table: Table,
    with_smallest: bool,
    details: Vec<String>,
}

impl Rows {
    fn new(with_smallest: bool) -> Self {
        let mut columns = vec![
            ("trace", Align::Left),
            ("policy", Align::Left),
            ("allocs", Align::Right),
            ("live peak", Align::Right),
            ("floor", Align::Right),
            ("reserved peak", Align::Right),
            ("excess", Align::Right),
        ];
        if with_smallest {
            columns.push(("smallest device", Align::Right));
        }
        columns.extend([("driver", Align::Right), ("result", Align::Left)]);
        Self { table: Table::new(columns), with_smallest, details: Vec::new() }
    }

    fn add(&mut self, row: &Row<'_>) {
        let outcome = row.outcome;
        let file = short(row.trace);
        let none = || "-".to_owned();
        let mut cells = vec![
            file.clone(),
            row.policy.to_string(),
            outcome.allocs.to_string(),
            display(outcome.live_peak),
            display(row.floor),
            display(outcome.reserved_peak),
            outcome.excess().map_or_else(none, |excess| format!("{excess:.4}")),
        ];
        if self.with_smallest {
            cells.push(row.smallest.map_or_else(none, display));
        }
        cells.push(format!("{:.2} ms", microseconds(outcome.driver.nanos) / 1000.0));
        cells.push(row.answer().in_words().to_owned());
        self.table.add(cells);
        if let Some(refusal) = &outcome.oom {
            self.details.push(format!("{file}, {}: {}", row.policy, in_words(refusal)));
            self.details.extend(row.stack.iter().map(|line| format!("    {line}")));
        }
        self.details.extend(shortages::in_words(&format!("{file}, {}", row.policy), outcome));
    }

    /// Says something of a trace below the table.
    fn explain(&mut self, trace: &str, lines: &[String]) {
        let mut lines = lines.iter();
        self.details.extend(lines.next().map(|line| format!("{}: {line}.", short(trace))));
        self.details.extend(lines.map(|line| format!("    {line}")));
    }

    fn lines(&self) -> Vec<String> {
        let mut lines = self.table.lines();
        if !self.details.is_empty() {
            lines.push(String::new());
            lines.extend(self.details.iter().cloned());
        }
        lines
    }
}

fn in_words(refusal: &Refusal) -> String {
    let &Refusal { event, requested, live, reserved, largest_free, .. } = refusal;
    let held = format!("{} live and {} reserved", display(live), display(reserved));
    if refusal.at_beginning {
        return format!("before the first event there were {held}, which does not fit.");
    }
    format!(
        "at event {event} a request of {} was refused, with {held}; the largest free range was {}.",
        display(requested),
        display(largest_free)
    )
}
