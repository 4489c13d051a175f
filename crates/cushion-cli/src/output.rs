//! What a command prints: data, messages, tables and progress.

pub(crate) mod progress;
pub(crate) mod table;

use std::fmt;
use std::io::{self, Write};

use progress::Progress;

/// The streams a command writes to.
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

    /// Writes a line of data.
    pub(crate) fn data(&mut self, line: fmt::Arguments<'_>) {
        self.progress.clear(&mut self.talk);
        if self.failed.is_none() {
            self.failed = writeln!(self.out, "{line}").err();
        }
    }

    /// Writes a message. If standard error is closed, the exit code still has the result.
    pub(crate) fn talk(&mut self, line: fmt::Arguments<'_>) {
        self.progress.clear(&mut self.talk);
        let _ = writeln!(self.talk, "cushion: {line}");
    }

    /// Starts the progress line of a task that may take a while.
    pub(crate) fn begin(&mut self, what: impl Into<String>) {
        self.progress.begin(what, &mut self.talk);
    }

    /// Updates the progress; `total` is `None` if it is not known.
    pub(crate) fn update(&mut self, done: u64, total: Option<u64>) {
        self.progress.update(done, total, &mut self.talk);
    }

    /// Removes the progress line.
    pub(crate) fn end(&mut self) {
        self.progress.clear(&mut self.talk);
    }
}
