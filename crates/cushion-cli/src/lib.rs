//! The `cushion` command as a library, so that a binary and the Python wheel share it.
//!
//! Data goes to standard output, talk to standard error. Exit codes: 0 for yes, 1 for out of memory,
//! 2 for bad input or usage, 3 for a difference found by `--verify`.

#![forbid(unsafe_code)]

mod args;
mod bytes;
mod replay;

use std::ffi::OsString;
use std::io::{self, Write};
use std::process::ExitCode;

use clap::Parser;

use args::{Cli, Command};

/// How a command ended. The highest over all inputs is the exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Verdict {
    Fits = 0,
    OutOfMemory = 1,
    BadInput = 2,
    Differs = 3,
}

/// Runs the command line `args`, program name first.
pub fn run(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are no errors, and go to standard output.
            let code = if error.use_stderr() { Verdict::BadInput } else { Verdict::Fits };
            let _ = error.print();
            return ExitCode::from(code as u8);
        }
    };
    let (mut out, mut talk) = (io::stdout().lock(), io::stderr().lock());
    let done = match cli.command {
        Command::Replay(args) => replay::run(&args, &mut out, &mut talk),
        Command::Options => write!(out, "{}", cushion_core::options::markdown())
            .map(|()| Verdict::Fits)
            .map_err(Into::into),
    };
    let flushed = out.flush();
    match (done, flushed) {
        (Ok(verdict), Ok(())) => ExitCode::from(verdict as u8),
        // The reader of our output went away, as `head` does: nothing is wrong.
        (_, Err(error)) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        (Err(error), _) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        (Err(error), _) => {
            let _ = writeln!(talk, "cushion: {error:#}");
            ExitCode::from(Verdict::BadInput as u8)
        }
        (_, Err(error)) => {
            let _ = writeln!(talk, "cushion: {error}");
            ExitCode::from(Verdict::BadInput as u8)
        }
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}
