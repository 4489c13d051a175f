//! `cushion replay`: what a trace needs, whether it fits, and whether the replay matches PyTorch.

mod rows;
mod words;

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use cushion_core::{Ladder, Options};
use cushion_trace::{
    Events, Frame, Outcome, Program, Refusal, ReplayConfig, Stacks, Watch, min_capacity, replay,
    replay_watched,
};

use crate::Verdict;
use crate::args::ReplayArgs;
use crate::output::Streams;
use crate::shortages::ReceiptLines;
use crate::trace_files::load::{Loaded, load, short};
use crate::trace_files::save;
use rows::{Row, Rows};

pub(crate) use rows::microseconds;

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
    let mut results =
        Results { rows: Rows::new(args.min_capacity), receipts: ReceiptLines::default() };
    for path in &args.traces {
        // A bad file does not stop the others.
        let found = one_trace(path, args, ladder, &mut results, streams).unwrap_or_else(|error| {
            streams.talk(format_args!("{}: {error:#}", path.display()));
            Verdict::BadInput
        });
        verdict = verdict.max(found);
    }
    for line in results.rows.lines() {
        streams.data(format_args!("{line}"));
    }
    if let Some(path) = &args.receipts {
        results.receipts.save(path)?;
    }
    Ok(verdict)
}

/// Output that is written after all traces.
struct Results {
    rows: Rows,
    receipts: ReceiptLines,
}

fn one_trace<O: Write, T: Write>(
    path: &Path,
    args: &ReplayArgs,
    ladder: Ladder,
    results: &mut Results,
    streams: &mut Streams<O, T>,
) -> anyhow::Result<Verdict> {
    let loaded = load(path, args.device, streams)?;
    let Loaded { name, program, .. } = &loaded;
    let mut verdict = Verdict::Fits;
    // A replay without a limit does not show whether the refused request would have fitted.
    if let Some(oom) = program.oom.filter(|_| args.capacity.is_none()) {
        verdict = Verdict::OutOfMemory;
        let lines = words::unanswered(&oom, program.origin, args.min_capacity);
        if args.json {
            for line in &lines {
                streams.talk(format_args!("{name}: {line}"));
            }
        } else {
            results.rows.explain(name, &lines);
        }
    }
    let mut compared = 0;
    for &policy in args.policy.policies() {
        let config = ReplayConfig {
            policy,
            ladder,
            capacity: args.capacity,
            options: options(args, program),
        };
        let (found, allocs) = one_policy(&loaded, args, &config, results, streams)?;
        verdict = verdict.max(found);
        compared += allocs;
    }
    if args.verify && compared == 0 {
        // Without this line, silence could be taken for agreement.
        streams.talk(format_args!("{name}: {}", words::nothing_compared(program, args.policy)));
        verdict = verdict.max(Verdict::NotVerified);
    }
    Ok(verdict)
}

/// Replays a trace under one policy. Returns the verdict, and how many allocations `--verify`
/// compared.
fn one_policy<O: Write, T: Write>(
    loaded: &Loaded,
    args: &ReplayArgs,
    config: &ReplayConfig,
    results: &mut Results,
    streams: &mut Streams<O, T>,
) -> anyhow::Result<(Verdict, u64)> {
    let Loaded { name, snapshot, device, program } = loaded;
    let policy = config.policy;
    let outcome = run_one(name, program, config, streams).context(REFUSED_CALL)?;
    let mut verdict = if outcome.oom.is_some() { Verdict::OutOfMemory } else { Verdict::Fits };
    let mut compared = 0;
    if args.verify
        && let Some(same) = outcome.same_address
    {
        compared = outcome.allocs;
        for line in words::verify(same, program, &outcome) {
            streams.talk(format_args!("{name}: {policy}: {line}"));
        }
        if outcome.difference.is_some() {
            verdict = verdict.max(Verdict::NotVerified);
        }
    }
    for line in words::caveats(program, &outcome) {
        streams.talk(format_args!("{name}: {policy}: {line}"));
    }
    let smallest =
        if args.min_capacity { smallest_device(name, program, config, streams)? } else { None };
    let stack =
        outcome.oom.map(|refusal| stack_of(&refusal, &snapshot.devices[*device], &snapshot.stacks));
    let row = Row {
        trace: name,
        policy,
        ladder: config.ladder,
        outcome: &outcome,
        // With a limit, and on the smallest device, requests that PyTorch refused are retried.
        floor: program.floor_bytes(args.capacity.is_some() || args.min_capacity),
        smallest,
        recorded: program.oom,
        has_limit: args.capacity.is_some(),
        stack: stack.unwrap_or_default(),
    };
    if args.receipts.is_some() {
        results.receipts.add(name, policy, &outcome)?;
    }
    if args.json {
        streams.data(format_args!("{}", serde_json::to_string(&row.json())?));
    } else {
        results.rows.add(&row);
    }
    Ok((verdict, compared))
}

const REFUSED_CALL: &str = "the simulated device refused a call";

/// Returns the options that replace the recorded ones, if any are given.
fn options(args: &ReplayArgs, program: &Program) -> Option<Options> {
    let options = args.conf.as_ref().map(|conf| conf.options.clone());
    let Some(spill_limit) = args.spill else { return options };
    let options = options.unwrap_or_else(|| program.options.clone());
    Some(Options { spill_limit, ..options })
}

/// Replays a program under one policy, with progress on a terminal.
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

/// Shows the progress of a replay.
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

/// Finds the smallest device on which the program passes, and explains an unexpected result.
fn smallest_device<O: Write, T: Write>(
    name: &str,
    program: &Program,
    config: &ReplayConfig,
    streams: &mut Streams<O, T>,
) -> anyhow::Result<Option<u64>> {
    let policy = config.policy;
    streams.begin(format!("smallest device for {} under {policy}", short(name)));
    let tried = |runs, expected| streams.update(u64::from(runs), Some(u64::from(expected)));
    let smallest = min_capacity(program, config, tried);
    streams.end();
    let smallest = smallest.context(REFUSED_CALL)?;
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
    Ok(smallest)
}

/// Returns the stack of the refused request, innermost first.
fn stack_of(refusal: &Refusal, events: &Events, stacks: &Stacks) -> Vec<String> {
    let event = usize::try_from(refusal.event).ok().filter(|_| !refusal.at_beginning);
    let stack = event.and_then(|event| events.get(event)).and_then(|event| event.stack);
    // A trace may contain any names: control characters could move the cursor or break a line.
    let plain = |name: &str| name.replace(char::is_control, "\u{fffd}");
    let line =
        |frame: &Frame| format!("{}:{} {}", plain(&frame.filename), frame.line, plain(&frame.name));
    stack.map(|stack| stacks.frames(stack).map(line).collect()).unwrap_or_default()
}
