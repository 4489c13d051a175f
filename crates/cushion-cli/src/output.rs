//! What a command prints: data, messages, tables and progress.

pub(crate) mod progress;
pub(crate) mod table;

use std::fmt;
use std::io::{self, Write};

use progress::Progress;

/// Where a command writes.
pub(crate) struct Streams<O, T> {
    pub(crate) out: O,
    pub(crate) talk: T,
    /// The first failure to write data; nothing is written after it.
    pub(crate) failed: Option<io::Error>,
    pub(crate) progress: Progress,
}

impl<O: Write, T: Write> Streams<O, T> {
    pub(crate) fn new(out: O, talk: T) -> Self {
        Self { out, talk, failed: None, progress: Progress::on_terminal() }
    }

    /// A line of data.
    pub(crate) fn data(&mut self, line: fmt::Arguments<'_>) {
        self.progress.clear(&mut self.talk);
        if self.failed.is_none() {
            self.failed = writeln!(self.out, "{line}").err();
        }
    }

    /// A line for people. If nobody listens, the exit code still tells.
    pub(crate) fn talk(&mut self, line: fmt::Arguments<'_>) {
        self.progress.clear(&mut self.talk);
        let _ = writeln!(self.talk, "cushion: {line}");
    }

    /// A piece of work begins that may take a while.
    pub(crate) fn begin(&mut self, what: impl Into<String>) {
        self.progress.begin(what, &mut self.talk);
    }

    /// So much of it is done, of so much if that is known.
    pub(crate) fn update(&mut self, done: u64, total: Option<u64>) {
        self.progress.update(done, total, &mut self.talk);
    }

    /// It is done.
    pub(crate) fn end(&mut self) {
        self.progress.clear(&mut self.talk);
    }
}
