//! The `cushion` command as a library, so that a binary and the Python wheel share it.
//!
//! Data goes to standard output, talk to standard error. Exit codes: 0 for yes, 1 for out of memory or a
//! storm that was not weathered, 2 for bad input or usage, 3 for a difference found by `--verify`,
//! or nothing that it could compare.

#![forbid(unsafe_code)]

mod args;
mod convert;
mod load;
mod progress;
mod python;
mod recorded;
mod replay;
mod report;
mod save;
mod shortages;
mod storm;
mod table;

use std::ffi::OsString;
use std::fmt;
use std::io::{self, Write};

use clap::Parser;

use args::{Cli, Command};
use progress::Progress;

/// How a command ended. The highest over all inputs is the exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Verdict {
    Fits = 0,
    OutOfMemory = 1,
    BadInput = 2,
    /// `--verify` found a difference, or nothing that it could compare.
    NotVerified = 3,
}

impl Verdict {
    /// A storm hung, broke a promise, or lost a task that the ladder is to save.
    const STORM_LOST: Self = Self::OutOfMemory;
}

/// Runs the command line `args`, program name first; returns the exit code.
pub fn run(args: impl IntoIterator<Item = OsString>) -> u8 {
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are no errors, and go to standard output.
            let code = if error.use_stderr() { Verdict::BadInput } else { Verdict::Fits };
            let _ = error.print();
            return code as u8;
        }
    };
    let mut streams = Streams {
        out: io::stdout().lock(),
        talk: io::stderr().lock(),
        failed: None,
        progress: Progress::on_terminal(),
    };
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
        // The reader of our output went away, as `head` does: the verdict stands.
        Some(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
        Some(error) => {
            streams.talk(format_args!("standard output: {error}"));
            verdict = verdict.max(Verdict::BadInput);
        }
        None => {}
    }
    verdict as u8
}

/// Where a command writes.
struct Streams<O, T> {
    out: O,
    talk: T,
    /// The first failure to write data; nothing is written after it.
    failed: Option<io::Error>,
    progress: Progress,
}

impl<O: Write, T: Write> Streams<O, T> {
    /// A line of data.
    fn data(&mut self, line: fmt::Arguments<'_>) {
        self.progress.clear(&mut self.talk);
        if self.failed.is_none() {
            self.failed = writeln!(self.out, "{line}").err();
        }
    }

    /// A line for people. If nobody listens, the exit code still tells.
    fn talk(&mut self, line: fmt::Arguments<'_>) {
        self.progress.clear(&mut self.talk);
        let _ = writeln!(self.talk, "cushion: {line}");
    }

    /// A piece of work begins that may take a while.
    fn begin(&mut self, what: impl Into<String>) {
        self.progress.begin(what, &mut self.talk);
    }

    /// So much of it is done, of so much if that is known.
    fn update(&mut self, done: u64, total: Option<u64>) {
        self.progress.update(done, total, &mut self.talk);
    }

    /// It is done.
    fn end(&mut self) {
        self.progress.clear(&mut self.talk);
    }
}
