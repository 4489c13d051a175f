//! Reads receipts of shortages from a file with one JSON object per line.
//!
//! A process can be killed while it writes, which cuts its last line short; the next process that
//! writes to the file begins a new line. The reader counts and skips cut lines. It does not trust
//! the rest of the file: lines and kept bytes are limited, and the first line that is not a receipt
//! is an error with its line number.

use std::collections::VecDeque;
use std::io::{self, BufRead, Read as _};

use cushion_core::Receipt;
use thiserror::Error;

use crate::model::tally::Tally;

/// The longest line, in bytes. A receipt has a few thousand.
const LONGEST: usize = 1 << 20;
/// The most receipts kept; older ones are dropped.
const MOST: usize = 100_000;
/// The most bytes of lines behind the kept receipts.
const MOST_BYTES: usize = 256 << 20;
/// The most characters of a parse error, which can quote the file.
const REPEATED: usize = 200;

/// The receipts of a file.
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct Receipts {
    /// The latest receipts, oldest first: up to 100,000, fewer if they are very long.
    pub latest: VecDeque<Receipt>,
    /// The number of receipts before the latest ones.
    pub left_out: u64,
    /// The number of lines cut short, for example by a killed process.
    pub torn: u64,
    /// Counts of all receipts.
    pub tally: Tally,
}

/// The reason why receipts could not be read.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ReceiptsError {
    /// The file could not be read.
    #[error("could not read the receipts")]
    Io {
        /// The error of the operating system.
        #[from]
        source: io::Error,
    },
    /// A line is longer than any receipt.
    #[error("line {line} is longer than {LONGEST} bytes, more than any receipt has")]
    TooLong {
        /// The line, from 1 on.
        line: u64,
    },
    /// A line is not a receipt.
    #[error("line {line} is not a receipt: at column {column}, {why}")]
    NoReceipt {
        /// The line, from 1 on.
        line: u64,
        /// The column.
        column: usize,
        /// The reason.
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
        // One byte more than the limit: the line end, or a sign that the line is too long.
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
    // The reason can quote the file. Control characters must not reach the terminal.
    let plain = why.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c });
    let why = plain.take(REPEATED).collect();
    ReceiptsError::NoReceipt { line, column: error.column(), why }
}

#[cfg(test)]
mod tests {
    use cushion_core::{Engine, SimConfig, SimDriver, StreamId};

    use super::*;

    /// Returns the lines of one survived and two refused shortages of an engine.
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
    fn written_receipts_are_read_and_counted() {
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
        // Blank lines and CRLF line ends.
        let loose = all.replace('\n', "\r\n\r\n \n");
        assert_eq!(read(loose).unwrap(), receipts);
        // A writer can add fields.
        let more = all.replace(r#"{"number""#, r#"{"trace":"a.pickle","policy":"best","number""#);
        assert_eq!(read(more).unwrap(), receipts);
    }

    #[test]
    fn a_cut_last_line_is_skipped_and_counted() {
        let lines = lines();
        let whole = lines[..2].concat();
        for cut in 0..=lines[2].len() {
            let text = [whole.as_bytes(), &lines[2].as_bytes()[..cut]].concat();
            let receipts = read(&text).unwrap_or_else(|error| panic!("cut at {cut}: {error}"));
            let has_all = cut + 1 >= lines[2].len();
            assert_eq!(receipts.latest.len(), if has_all { 3 } else { 2 }, "cut at {cut}");
            assert_eq!(receipts.torn, u64::from(cut > 0 && !has_all), "cut at {cut}");
            // Another process begins a new line and continues.
            let on = [&text[..], b"\n", lines[0].as_bytes()].concat();
            let receipts = read(on).unwrap_or_else(|error| panic!("cut at {cut}: {error}"));
            assert_eq!(receipts.latest.len(), if has_all { 4 } else { 3 }, "cut at {cut}");
        }
    }

    #[test]
    fn a_line_that_is_not_a_receipt_is_an_error_with_its_number() {
        let lines = lines();
        let with = |bad: &str| read([&lines[0], "\n", bad, "\n", &lines[1]].concat()).unwrap_err();
        let text = with("{\"number\": nonsense}").to_string();
        assert_eq!(text, "line 3 is not a receipt: at column 13, expected ident");
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
    fn line_length_and_kept_receipts_are_limited() {
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
