//! The `cushion` command as a library, shared by the binary and the Python wheel.
//!
//! Data goes to standard output, messages to standard error. Exit codes: 0 for success, 1 for out
//! of memory or a storm with lost tasks, 2 for bad input or usage, 3 if `--verify` found a
//! difference or nothing to compare.

#![forbid(unsafe_code)]

mod args;
mod output;
mod python;
mod replay;
mod report;
mod shortages;
mod storm;
mod trace_files;

use std::ffi::OsString;
use std::io::{self, Write};

use clap::Parser;

use args::{Cli, Command};
use output::Streams;
use trace_files::convert;

/// The result of a command. The highest over all inputs is the exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Verdict {
    Fits = 0,
    OutOfMemory = 1,
    BadInput = 2,
    /// `--verify` found a difference, or nothing to compare.
    NotVerified = 3,
}

impl Verdict {
    /// A storm hung, broke an invariant, or lost a task that the ladder should save.
    const STORM_LOST: Self = Self::OutOfMemory;
}

/// Runs the command line `args`, program name first; returns the exit code.
pub fn run(args: impl IntoIterator<Item = OsString>) -> u8 {
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are not errors, and go to standard output.
            let code = if error.use_stderr() { Verdict::BadInput } else { Verdict::Fits };
            let _ = error.print();
            return code as u8;
        }
    };
    let mut streams = Streams::new(io::stdout().lock(), io::stderr().lock());
    let done = match cli.command {
        Command::Replay(args) => replay::run(&args, &mut streams),
        Command::Convert(args) => convert::run(&args, &mut streams),
        Command::Report(args) => report::run(&args, &mut streams),
        Command::Storm(args) => storm::run(&args, &mut streams),
        Command::Run(args) => Err(python::hand_over(&args.program)),
        Command::Options => {
            streams.data(format_args!("{}", cushion_core::options::markdown().trim_end()));
            Ok(Verdict::Fits)
        }
    };
    let flushed = streams.out.flush();
    let mut verdict = done.unwrap_or_else(|error| {
        streams.talk(format_args!("{error:#}"));
        Verdict::BadInput
    });
    match streams.failed.take().or(flushed.err()) {
        // The reader closed the pipe, as `head` does: the verdict stands.
        Some(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
        Some(error) => {
            streams.talk(format_args!("standard output: {error}"));
            verdict = verdict.max(Verdict::BadInput);
        }
        None => {}
    }
    verdict as u8
}
