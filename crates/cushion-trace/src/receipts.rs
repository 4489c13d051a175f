//! Receipts of shortages, read from a file of one JSON object per line.
//!
//! A process may be killed while it writes, so that its last line ends too early; whoever writes to the
//! same file later begins a new line. Such lines are counted and passed over. Everything else about a file
//! is taken as hostile: a line has a limit, what is kept has one, and the first line that is no receipt ends
//! the reading with its number and what is wrong with it.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::io::{self, BufRead, Read as _};
use std::time::Duration;

use cushion_core::{Outcome, Receipt, Rung};
use thiserror::Error;

/// The longest line, in bytes: a receipt has a few thousand.
const LONGEST: usize = 1 << 20;
/// How many receipts are kept, the last ones.
const MOST: usize = 100_000;
/// How many bytes of lines they may come from.
const MOST_BYTES: usize = 256 << 20;
/// How much of what a line says is repeated to whoever has the file.
const REPEATED: usize = 200;

/// What a file of receipts holds.
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct Receipts {
    /// The last ones, oldest first: 100,000 of them, or fewer very long ones.
    pub latest: VecDeque<Receipt>,
    /// How many there were before those.
    pub left_out: u64,
    /// Lines that end too early, as when a process is killed.
    pub torn: u64,
    /// All of them, counted.
    pub tally: Tally,
}

/// Why receipts could not be read.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ReceiptsError {
    /// The file could not be read.
    #[error("could not read the receipts")]
    Io {
        /// What the operating system said.
        #[from]
        source: io::Error,
    },
    /// A line is longer than any receipt.
    #[error("line {line} is longer than {LONGEST} bytes, and no receipt is")]
    TooLong {
        /// Which, from 1 on.
        line: u64,
    },
    /// A line is something else.
    #[error("line {line} is no receipt: at column {column}, {why}")]
    NoReceipt {
        /// Which, from 1 on.
        line: u64,
        /// Where in it.
        column: usize,
        /// What is wrong.
        why: String,
    },
}

/// Reads receipts, one JSON object per line.
pub fn read_receipts(mut input: impl BufRead) -> Result<Receipts, ReceiptsError> {
    let mut read = Receipts::default();
    let mut lengths = VecDeque::new();
    let mut bytes = 0;
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        // With its end, or with a byte that tells that it is too long.
        let most = LONGEST as u64 + 1;
        if input.by_ref().take(most).read_until(b'\n', &mut line)? == 0 {
            break;
        }
        let has_ended = line.last() == Some(&b'\n');
        if line.len() - usize::from(has_ended) > LONGEST {
            return Err(ReceiptsError::TooLong { line: number });
        }
        let text = line.trim_ascii();
        if text.is_empty() {
            continue;
        }
        match serde_json::from_slice::<Receipt>(text) {
            Ok(receipt) => {
                read.tally.add(&receipt);
                read.latest.push_back(receipt);
                lengths.push_back(text.len());
                bytes += text.len();
            }
            Err(error) if !has_ended || error.is_eof() => read.torn += 1,
            Err(error) => return Err(no_receipt(number, &error)),
        }
        while read.latest.len() > MOST || bytes > MOST_BYTES {
            read.latest.pop_front();
            bytes -= lengths.pop_front().unwrap_or(bytes);
            read.left_out += 1;
        }
    }
    Ok(read)
}

fn no_receipt(line: u64, error: &serde_json::Error) -> ReceiptsError {
    let place = format!(" at line {} column {}", error.line(), error.column());
    let why = error.to_string();
    let why = why.strip_suffix(&place).unwrap_or(&why);
    // It may repeat what is in the file: nothing in it moves the cursor, or fills the screen.
    let plain = why.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c });
    let why = plain.take(REPEATED).collect();
    ReceiptsError::NoReceipt { line, column: error.column(), why }
}

/// Shortages, counted by how they ended.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Tally {
    /// All of them.
    pub shortages: u64,
    /// Those survived, by the rung that served the request.
    pub by_rung: BTreeMap<Rung, u64>,
    /// Those that ended in an out-of-memory error.
    pub refused: u64,
    /// The time lost by all.
    pub lost: Duration,
}

impl Tally {
    /// Counts one more.
    pub fn add(&mut self, receipt: &Receipt) {
        self.shortages += 1;
        self.lost = self.lost.saturating_add(receipt.took);
        match receipt.outcome {
            Outcome::Survived(rung) => *self.by_rung.entry(rung).or_default() += 1,
            Outcome::GivenUp | Outcome::Driver => {}
            _ => self.refused += 1,
        }
    }

    /// How many were survived.
    #[must_use]
    pub fn survived(&self) -> u64 {
        self.by_rung.values().sum()
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (all, survived) = (self.shortages, self.survived());
        write!(f, "{all} {}, ", if all == 1 { "shortage" } else { "shortages" })?;
        write!(f, "{survived} survived")?;
        for (index, (rung, count)) in self.by_rung.iter().enumerate() {
            write!(f, "{}{rung} {count}", if index == 0 { " (by " } else { ", " })?;
        }
        write!(f, "{}, {} refused", if survived > 0 { ")" } else { "" }, self.refused)?;
        let others = all.saturating_sub(survived).saturating_sub(self.refused);
        if others > 0 {
            write!(f, ", {others} given up or failed by the driver")?;
        }
        write!(f, ", {:.1} ms lost", self.lost.as_secs_f64() * 1e3)
    }
}

#[cfg(test)]
mod tests {
    use cushion_core::{Engine, SimConfig, SimDriver, StreamId};

    use super::*;

    /// Receipts as an engine makes them, each as a line: one survived, two refused.
    fn lines() -> Vec<String> {
        let engine = Engine::new(SimDriver::new(SimConfig::with_capacity(100 << 20)));
        let (one, other) = (StreamId(0), StreamId(16));
        let freed = engine.alloc(60 << 20, one).unwrap();
        engine.free(freed).unwrap();
        engine.alloc(50 << 20, other).unwrap();
        engine.alloc(60 << 20, one).unwrap_err();
        engine.alloc(1 << 40, one).unwrap_err();
        let receipts = engine.receipts();
        assert_eq!(receipts.len(), 3);
        receipts.iter().map(|receipt| serde_json::to_string(&**receipt).unwrap() + "\n").collect()
    }

    fn read(text: impl AsRef<[u8]>) -> Result<Receipts, ReceiptsError> {
        read_receipts(text.as_ref())
    }

    #[test]
    fn what_was_written_is_read_and_counted() {
        let all = lines().concat();
        let receipts = read(&all).unwrap();
        let numbers: Vec<u64> = receipts.latest.iter().map(|receipt| receipt.number).collect();
        assert_eq!((numbers.as_slice(), receipts.left_out, receipts.torn), (&[1, 2, 3][..], 0, 0));
        let tally = &receipts.tally;
        assert_eq!((tally.shortages, tally.survived(), tally.refused), (3, 1, 2));
        let text = tally.to_string();
        assert!(text.starts_with("3 shortages, 1 survived (by "), "{text}");
        assert!(text.ends_with(", 2 refused, 0.0 ms lost"), "{text}");
        assert_eq!(read("").unwrap(), Receipts::default());
        // Blank lines, and the ends of lines of other systems.
        let loose = all.replace('\n', "\r\n\r\n \n");
        assert_eq!(read(loose).unwrap(), receipts);
        // Who writes for somebody else may add to it.
        let more = all.replace(r#"{"number""#, r#"{"trace":"a.pickle","policy":"best","number""#);
        assert_eq!(read(more).unwrap(), receipts);
    }

    #[test]
    fn a_killed_process_loses_its_last_line_and_no_other() {
        let lines = lines();
        let whole = lines[..2].concat();
        for cut in 0..=lines[2].len() {
            let text = [whole.as_bytes(), &lines[2].as_bytes()[..cut]].concat();
            let receipts = read(&text).unwrap_or_else(|error| panic!("cut at {cut}: {error}"));
            let has_all = cut + 1 >= lines[2].len();
            assert_eq!(receipts.latest.len(), if has_all { 3 } else { 2 }, "cut at {cut}");
            assert_eq!(receipts.torn, u64::from(cut > 0 && !has_all), "cut at {cut}");
            // Somebody else begins a new line after it, and writes on.
            let on = [&text[..], b"\n", lines[0].as_bytes()].concat();
            let receipts = read(on).unwrap_or_else(|error| panic!("cut at {cut}: {error}"));
            assert_eq!(receipts.latest.len(), if has_all { 4 } else { 3 }, "cut at {cut}");
        }
    }

    #[test]
    fn a_line_that_is_no_receipt_is_an_error_with_its_number() {
        let lines = lines();
        let with = |bad: &str| read([&lines[0], "\n", bad, "\n", &lines[1]].concat()).unwrap_err();
        let text = with("{\"number\": nonsense}").to_string();
        assert_eq!(text, "line 3 is no receipt: at column 13, expected ident");
        for bad in ["[]", "7", "{}", "\u{feff}", "{\"number\":-1}", "{\"number\":1}{}", "\"x\""] {
            let error = with(bad);
            assert!(matches!(error, ReceiptsError::NoReceipt { line: 3, .. }), "{bad}: {error}");
        }
        let negative = lines[2].replace("\"took\":0.0", "\"took\":-1.0");
        assert!(with(&negative).to_string().contains("negative"), "{}", with(&negative));
        let hostile = lines[2].replace("graceful", &format!("\\u001b[2J{}", "x".repeat(9999)));
        let text = with(&hostile).to_string();
        assert!(text.len() < 400 && !text.contains(char::is_control), "{text}");
        let deep = "[".repeat(100_000);
        let with_deep = lines[2].replace("{\"number\"", &format!("{{\"more\":{deep},\"number\""));
        assert!(matches!(with(&with_deep), ReceiptsError::NoReceipt { line: 3, .. }));
    }

    #[test]
    fn lines_and_what_is_kept_are_bounded() {
        let line = &lines()[0];
        let padded = |to: usize| format!("{}{line}", " ".repeat(to + 1 - line.len()));
        assert_eq!(read(padded(LONGEST)).unwrap().latest.len(), 1);
        let error = read([line, &padded(LONGEST + 1)].map(String::as_str).concat()).unwrap_err();
        assert!(matches!(error, ReceiptsError::TooLong { line: 2 }), "{error}");
        let endless = read_receipts(io::BufReader::new(io::repeat(b'{')));
        assert!(matches!(endless, Err(ReceiptsError::TooLong { line: 1 })), "{endless:?}");
        let many = read(line.repeat(MOST + 7)).unwrap();
        assert_eq!((many.latest.len(), many.left_out), (MOST, 7));
        assert_eq!(many.tally.shortages, MOST as u64 + 7);
        let name = format!("\"who\":\"{}", "x".repeat(LONGEST / 2));
        let large = read(line.replacen("\"who\":\"", &name, 1).repeat(600)).unwrap();
        assert!((400..512).contains(&large.latest.len()), "{}", large.latest.len());
        assert_eq!(large.latest.len() as u64 + large.left_out, 600);
    }
}
