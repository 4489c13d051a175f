//! The arguments of every command.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::builder::RangedI64ValueParser;
use clap::{Args, Parser, Subcommand, ValueEnum, value_parser};
use cushion_core::size::MIB;
use cushion_core::{Ladder, Options, Policy, parse_bytes};

/// A caching allocator for GPU memory that keeps programs alive when memory runs out.
#[derive(Debug, Parser)]
#[command(name = "cushion", version, arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Replay recorded traces on a simulated GPU: the memory they need, and whether they fit.
    ///
    /// A trace is the file of `torch.cuda.memory._dump_snapshot()` (a pickle), the same as JSON, a
    /// log of RMM, or a .cushion file; plain, gzip or zstd. The exit code is 0 if everything fits,
    /// 1 if memory ran out (in a replay, or without --capacity when it was recorded), 2 for bad
    /// input, 3 if --verify found a difference or nothing to compare; the highest over all traces.
    Replay(Box<ReplayArgs>),
    /// Write a trace in another format: to store it in a tenth of the bytes, or to open it in
    /// PyTorch's viewer.
    ///
    /// The output keeps only what a replay uses: no metadata, annotations, compile contexts or host
    /// memory. A `.cushion` file keeps all the rest. A pickle or JSON is written so that every view
    /// of PyTorch's viewer works: events that the viewer cannot step back over are left out, and
    /// counted. The output must not be the input. The exit code is 0, or 2 if the input cannot be
    /// read or the output not written; then no output is left.
    Convert(ConvertArgs),
    /// Write an HTML page about a trace: one file, no network.
    ///
    /// It shows live and reserved memory over time under each policy, the address map at the peak,
    /// the largest allocations and their origin, lifetimes, and which cards fit. The exit code is 0
    /// if the report was written, whatever it says, and 2 if not.
    Report(ReportArgs),
    /// Run a program with Cushion as the allocator of its PyTorch, with no change to it.
    ///
    /// The program is a Python file, -m and a module, or a command such as torchrun; Python
    /// processes that it starts use Cushion too. Needs the Python package `cushion`; cushion run
    /// --help shows its options.
    #[command(disable_help_flag = true)]
    Run(RunArgs),
    /// Run many tasks that together need far more memory than a simulated GPU has: which tasks are
    /// lost, and which the ladder saves.
    ///
    /// Each seed is one storm: tasks that allocate, hold, compute and free at random, each up to
    /// its own maximum. The same seed gives the same run. The exit code is 0 if nothing hung, no
    /// invariant broke, and with the ladder every task finished that can run alone; 1 if not; 2 for
    /// bad usage.
    Storm(StormArgs),
    /// Print the reference of all options, as in docs/options.md.
    Options,
}

/// The arguments of `cushion replay`.
#[derive(Debug, Args)]
pub(crate) struct ReplayArgs {
    /// Traces; `-` is standard input.
    #[arg(required = true, value_name = "TRACE")]
    pub(crate) traces: Vec<PathBuf>,

    /// How memory is laid out and obtained.
    #[arg(long, value_enum, default_value_t = PolicyArg::All)]
    pub(crate) policy: PolicyArg,

    /// The steps tried before a request is refused: PyTorch's, or Cushion's own.
    #[arg(long, value_enum, default_value_t = LadderArg::Torch)]
    pub(crate) ladder: LadderArg,

    /// The limit of reserved memory, like PyTorch's memory fraction: 24GiB, 512MiB, or a number of
    /// bytes. A number without a unit must be 1 MiB or more. The default is no limit.
    #[arg(long, value_name = "BYTES", value_parser = parse_size)]
    pub(crate) capacity: Option<u64>,

    /// Find the smallest device on which the trace passes, to 2 MiB, for each policy.
    #[arg(long)]
    pub(crate) min_capacity: bool,

    /// Compare each address with PyTorch's. Needs the ladder `torch`, and compares under the policy
    /// the trace was recorded with. If that policy is not replayed, nothing is compared, and the
    /// exit code is 3.
    #[arg(long)]
    pub(crate) verify: bool,

    /// Options in PYTORCH_CUDA_ALLOC_CONF's syntax, in place of those recorded in the trace.
    #[arg(long, value_name = "STRING", value_parser = parse_conf)]
    pub(crate) conf: Option<Conf>,

    /// Host memory that may serve requests when the device is full, as 8GiB, 512MiB, or a number of
    /// bytes. A number without a unit must be 1 MiB or more. Needs the ladder `graceful`.
    #[arg(long, value_name = "BYTES", value_parser = parse_size)]
    pub(crate) spill: Option<u64>,

    /// The device of the trace; the default is the one with the most events.
    #[arg(long, value_name = "N")]
    pub(crate) device: Option<usize>,

    /// Write the receipts of shortages, the last 10,000 of each run, to this file, one JSON object
    /// per line. It must not be one of the traces.
    #[arg(long, value_name = "FILE")]
    pub(crate) receipts: Option<PathBuf>,

    /// Print one JSON object per line, for each trace and policy.
    #[arg(long)]
    pub(crate) json: bool,
}

/// The arguments of `cushion run`, which the Python package parses.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// Options, the program and its arguments.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    pub(crate) program: Vec<OsString>,
}

/// The arguments of `cushion convert`.
#[derive(Debug, Args)]
pub(crate) struct ConvertArgs {
    /// The trace to read, in any format that `cushion replay` reads; `-` for standard input.
    pub(crate) input: PathBuf,

    /// The file to write, `-` for standard output. Its name selects the format: .cushion, .pickle,
    /// .pkl or .json, with .gz appended for gzip.
    pub(crate) output: PathBuf,

    /// The format to write, whatever the name of the output.
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub(crate) to: Option<FormatArg>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum FormatArg {
    /// Cushion's own format.
    Cushion,
    /// PyTorch's format.
    Pickle,
    /// PyTorch's format as JSON.
    Json,
}

/// The arguments of `cushion report`.
#[derive(Debug, Args)]
pub(crate) struct ReportArgs {
    /// The trace, in any format that `cushion replay` reads; `-` is standard input.
    #[arg(value_name = "TRACE")]
    pub(crate) trace: PathBuf,

    /// The page to write, or - for standard output; it must not be the trace or the receipts. The
    /// default is the trace's name with .html, in the current folder.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,

    /// The memory limit to judge against, as 24GiB, 512MiB, or a number of bytes. A number without
    /// a unit must be 1 MiB or more. By default there is no limit, and the report names common
    /// cards.
    #[arg(long, value_name = "BYTES", value_parser = parse_size)]
    pub(crate) capacity: Option<u64>,

    /// The device of the trace; the default is the one with the most events.
    #[arg(long, value_name = "N")]
    pub(crate) device: Option<usize>,

    /// The steps tried before a request is refused: PyTorch's, or Cushion's own.
    #[arg(long, value_enum, default_value_t = LadderArg::Torch)]
    pub(crate) ladder: LadderArg,

    /// Receipts of a run, one JSON object per line, to show as well.
    #[arg(long, value_name = "FILE")]
    pub(crate) receipts: Option<PathBuf>,
}

/// The arguments of `cushion storm`. Each field is one option of the command.
#[derive(Debug, Args)]
pub(crate) struct StormArgs {
    /// The number of storms.
    #[arg(
        long,
        value_name = "N",
        default_value_t = 100,
        value_parser = value_parser!(u64).range(1..)
    )]
    pub(crate) seeds: u64,

    /// The first seed; the others follow it.
    #[arg(long, value_name = "K", default_value_t = 0)]
    pub(crate) first_seed: u64,

    /// Tasks of each storm.
    #[arg(long, value_name = "N", default_value_t = 12, value_parser = positive())]
    pub(crate) tasks: u16,

    /// The number of tasks that run at the same time.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = positive())]
    pub(crate) at_once: u16,

    /// Allocations of each task.
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = positive())]
    pub(crate) allocations: u16,

    /// The largest task, as 2GiB, 512MiB, or a number of bytes. A number without a unit must be 1
    /// MiB or more. Each task draws its own maximum, down to an eighth of this.
    #[arg(long, value_name = "BYTES", default_value = "2GiB", value_parser = parse_size)]
    pub(crate) task_max: u64,

    /// The memory of the device, as a multiple of the largest task of that storm.
    #[arg(long, value_name = "F", default_value_t = 1.5)]
    pub(crate) device_ratio: f64,

    /// Streams of the device. Each task has its own stream while they last, and sometimes uses
    /// another.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = positive())]
    pub(crate) streams: u16,

    /// How memory is laid out and obtained.
    #[arg(long, value_enum, default_value_t = PolicyArg::All)]
    pub(crate) policy: PolicyArg,

    /// The steps tried before a request is refused: PyTorch's, Cushion's own, or each in turn.
    #[arg(long, value_enum, default_value_t = LaddersArg::Both)]
    pub(crate) ladder: LaddersArg,

    /// Run tasks as threads on real time, with short pauses, in place of virtual time. Such runs
    /// are not reproducible by seed.
    #[arg(long)]
    pub(crate) real_threads: bool,

    /// With --real-threads: report a hang if no task makes a step in this many seconds.
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 30,
        value_parser = value_parser!(u64).range(1..=86_400)
    )]
    pub(crate) watchdog: u64,

    /// Print one JSON object per line, for each seed, policy and ladder.
    #[arg(long)]
    pub(crate) json: bool,
}

/// One ladder, or both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LaddersArg {
    /// PyTorch's steps.
    Torch,
    /// Cushion's own.
    Graceful,
    /// Each in turn.
    Both,
}

impl LaddersArg {
    pub(crate) fn ladders(self) -> &'static [Ladder] {
        match self {
            Self::Torch => &[Ladder::Torch],
            Self::Graceful => &[Ladder::Graceful],
            Self::Both => &[Ladder::Torch, Ladder::Graceful],
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum PolicyArg {
    /// PyTorch's classic allocator.
    Segments,
    /// PyTorch's expandable segments.
    Expandable,
    /// Cushion's own: pages that can have second addresses.
    Paged,
    /// Each in turn.
    All,
}

impl PolicyArg {
    pub(crate) fn policies(self) -> &'static [Policy] {
        match self {
            Self::Segments => &[Policy::Segments],
            Self::Expandable => &[Policy::Expandable],
            Self::Paged => &[Policy::Paged],
            Self::All => &Policy::ALL,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LadderArg {
    /// PyTorch's steps.
    Torch,
    /// Cushion's own.
    Graceful,
}

impl From<LadderArg> for Ladder {
    fn from(arg: LadderArg) -> Self {
        match arg {
            LadderArg::Torch => Self::Torch,
            LadderArg::Graceful => Self::Graceful,
        }
    }
}

/// Options as given, and the keys that are not options of Cushion.
#[derive(Debug, Clone)]
pub(crate) struct Conf {
    pub(crate) options: Options,
    pub(crate) not_ours: Vec<String>,
}

/// Parses a count of at least one.
fn positive() -> RangedI64ValueParser<u16> {
    value_parser!(u16).range(1..)
}

/// Parses a size. A small number without a unit is hardly meant as bytes, so it is refused.
fn parse_size(text: &str) -> Result<u64, String> {
    let bytes = parse_bytes(text)?;
    let number = text.trim();
    if bytes < MIB && number.chars().all(|c| c.is_ascii_digit() || c == '.') {
        // No device has a thousand GiB.
        let unit = if bytes < 1000 { "GiB" } else { "MiB" };
        return Err(format!(
            "{number} has no unit. {number} bytes? write {number}B; {number} {unit}? write \
             {number}{unit}"
        ));
    }
    Ok(bytes)
}

fn parse_conf(text: &str) -> Result<Conf, String> {
    let parsed = Options::parse(text).map_err(|error| error.to_string())?;
    let not_ours = parsed.not_ours.into_iter().map(|entry| entry.key).collect();
    Ok(Conf { options: parsed.options, not_ours })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_number_without_a_unit_is_refused() {
        for (number, unit) in
            [("24", "GiB"), ("4.5", "GiB"), (" 1 ", "GiB"), ("24576", "MiB"), ("1048575", "MiB")]
        {
            let told = parse_size(number).expect_err(number);
            let number = number.trim();
            let expected =
                format!("{number} bytes? write {number}B; {number} {unit}? write {number}{unit}");
            assert!(told.ends_with(&expected), "{told}");
        }
        assert_eq!(parse_size("24B"), Ok(24));
        assert_eq!(parse_size("8KiB"), Ok(8192));
        assert_eq!(parse_size("0.5GiB"), Ok(512 * MIB));
        assert_eq!(parse_size("1048576"), Ok(MIB));
        assert_eq!(parse_size("25769803776"), Ok(24 << 30));
        // Other texts have their own message.
        assert!(parse_size("0").is_err_and(|told| told.contains("0 is no size")));
        assert!(parse_size("lots").is_err_and(|told| told.contains("is no size")));
    }
}
