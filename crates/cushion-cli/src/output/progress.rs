//! A progress line on standard error, if that is a terminal.

use std::io::{self, IsTerminal as _, Write};
use std::time::{Duration, Instant};

/// Work that ends sooner shows no progress line.
const PATIENCE: Duration = Duration::from_millis(400);
/// The shortest time between two updates.
const PACE: Duration = Duration::from_millis(100);
/// Cells of the bar.
const CELLS: usize = 30;

/// The progress of one task after the other.
#[derive(Debug)]
pub(crate) struct Progress {
    /// Whether the line is shown.
    on: bool,
    what: String,
    began: Option<Instant>,
    drawn: Option<Instant>,
}

impl Progress {
    /// Shows progress on standard error if it is a terminal that can rewrite a line.
    pub(crate) fn on_terminal() -> Self {
        Self { on: io::stderr().is_terminal(), what: String::new(), began: None, drawn: None }
    }

    pub(crate) fn is_on(&self) -> bool {
        self.on
    }

    /// Starts the next task.
    pub(crate) fn begin(&mut self, what: impl Into<String>, talk: &mut impl Write) {
        self.clear(talk);
        if self.on {
            self.what = what.into();
            self.began = Some(now());
        }
    }

    /// Updates the line.
    pub(crate) fn update(&mut self, done: u64, total: Option<u64>, talk: &mut impl Write) {
        let (true, Some(began)) = (self.on, self.began) else { return };
        let now = now();
        let waited = self.drawn.map_or(now - began >= PATIENCE, |drawn| now - drawn >= PACE);
        if waited {
            // A failed write loses nothing.
            let _ = write!(talk, "\r\x1b[K{}", line(&self.what, done, total));
            let _ = talk.flush();
            self.drawn = Some(now);
        }
    }

    /// Removes the line.
    pub(crate) fn clear(&mut self, talk: &mut impl Write) {
        if self.drawn.take().is_some() {
            let _ = write!(talk, "\r\x1b[K");
            let _ = talk.flush();
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "a person is waiting; nothing depends on it")]
fn now() -> Instant {
    Instant::now()
}

fn line(what: &str, done: u64, total: Option<u64>) -> String {
    let Some(total) = total.filter(|&total| total > 0) else {
        return format!("{what}  {} MB", done / 1_000_000);
    };
    let done = u128::from(done.min(total));
    let part = |of: u64| u64::try_from(done * u128::from(of) / u128::from(total)).unwrap_or(of);
    let filled = usize::try_from(part(CELLS as u64)).unwrap_or(0);
    let bar = format!("{}{}", "#".repeat(filled), ".".repeat(CELLS - filled));
    format!("{what}  [{bar}] {:3} %", part(100))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_fills_up() {
        assert_eq!(line("x", 0, Some(7)), format!("x  [{}]   0 %", ".".repeat(30)));
        assert_eq!(line("x", 7, Some(7)), format!("x  [{}] 100 %", "#".repeat(30)));
        assert_eq!(line("x", 9, Some(7)), line("x", 7, Some(7)));
        assert!(line("x", u64::MAX / 2, Some(u64::MAX)).ends_with("49 %"));
        assert_eq!(line("x", 3_500_000, None), "x  3 MB");
    }

    #[test]
    fn nothing_is_drawn_without_a_terminal_or_for_short_work() {
        let mut talk = Vec::new();
        for on in [false, true] {
            let mut progress = Progress { on, what: String::new(), began: None, drawn: None };
            progress.begin("x", &mut talk);
            progress.update(1, Some(2), &mut talk);
            progress.clear(&mut talk);
            assert!(talk.is_empty(), "{on}");
        }
    }
}
