//! A line of progress on standard error, for work that takes a while, on a terminal only.

use std::io::{self, IsTerminal as _, Write};
use std::time::{Duration, Instant};

/// Work that is done sooner shows nothing.
const PATIENCE: Duration = Duration::from_millis(400);
/// The line is drawn no more often.
const PACE: Duration = Duration::from_millis(100);
/// Cells of the bar.
const CELLS: usize = 30;

/// The progress of one piece of work after the other.
#[derive(Debug)]
pub(crate) struct Progress {
    /// Whether anybody looks.
    on: bool,
    what: String,
    began: Option<Instant>,
    drawn: Option<Instant>,
}

impl Progress {
    /// For standard error, if it is a terminal that can move back in its line.
    pub(crate) fn on_terminal() -> Self {
        Self { on: io::stderr().is_terminal(), what: String::new(), began: None, drawn: None }
    }

    pub(crate) fn is_on(&self) -> bool {
        self.on
    }

    /// The next piece of work begins.
    pub(crate) fn begin(&mut self, what: impl Into<String>, talk: &mut impl Write) {
        self.clear(talk);
        if self.on {
            self.what = what.into();
            self.began = Some(now());
        }
    }

    /// So much of it is done.
    pub(crate) fn update(&mut self, done: u64, total: Option<u64>, talk: &mut impl Write) {
        let (true, Some(began)) = (self.on, self.began) else { return };
        let now = now();
        let waited = self.drawn.map_or(now - began >= PATIENCE, |drawn| now - drawn >= PACE);
        if waited {
            // If nobody can see it, nothing is lost.
            let _ = write!(talk, "\r\x1b[K{}", line(&self.what, done, total));
            let _ = talk.flush();
            self.drawn = Some(now);
        }
    }

    /// Takes the line away.
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
    fn nothing_is_drawn_where_nobody_looks_or_waits() {
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
