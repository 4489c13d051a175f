//! Reads the log of RAPIDS Memory Manager: a CSV file with a row for each request, written by its
//! `logging_resource_adaptor`:
//!
//! ```text
//! Thread,Time,Action,Pointer,Size,Stream
//! 1979932,14:21:19:998533,allocate,0x30a000000,256,0x2
//! 1979932,14:21:32:661875,free,0x30a000000,256,0x2
//! 1979932,14:21:33:100021,allocate failure,0x0,8589934592,0x2
//! ```
//!
//! Versions write times and streams differently; the reader accepts all known forms. The log has
//! only requests, no segments.

mod time;

use self::time::{DAY_US, Time, decimal, time};
use super::detect::BOM;
use super::source::{CHUNK, Source};
use crate::model::error::{Format, Offset, TraceError};
use crate::model::event::{Action, Event};
use crate::model::events::Events;
use crate::model::settings::Settings;
use crate::model::snapshot::{Origin, Snapshot};
use crate::model::stacks::Stacks;

/// The longest line, in bytes. A row has about eighty.
const MAX_LINE: usize = 4096;
const MAX_COLUMNS: usize = 32;

/// Reads a whole log.
pub(crate) fn read(source: &mut Source<'_>) -> Result<Snapshot, TraceError> {
    if source.peek(BOM.len())? == BOM {
        source.used(BOM.len());
    }
    let mut lines = Lines { source, text: Vec::new(), number: 0, start: 0 };
    // Blank lines can come before the header.
    let columns = loop {
        if !lines.next()? {
            return Err(lines.broken(0, "the names of columns", "the end of the file"));
        }
        if !lines.text.trim_ascii().is_empty() {
            break Columns::of_header(&lines)?;
        }
    };
    let mut log = Log { columns, events: Events::default(), days: 0, last_us: 0 };
    let mut next_check = 0;
    while lines.next()? {
        if !lines.text.trim_ascii().is_empty() {
            log.row(&lines)?;
        }
        if lines.start >= next_check {
            lines.source.check_memory(log.events.held(), lines.start)?;
            next_check = lines.start + CHUNK as u64;
        }
    }
    Ok(Snapshot {
        segments: Vec::new(),
        devices: vec![log.events],
        settings: Settings::default(),
        stacks: Stacks::default(),
        origin: Origin::Rmm,
    })
}

/// Reads the file line by line.
struct Lines<'s, 'r> {
    source: &'s mut Source<'r>,
    /// The current line, without its line feed.
    text: Vec<u8>,
    /// The number of the line, from 1 on.
    number: u64,
    /// The offset of the line.
    start: u64,
}

impl Lines<'_, '_> {
    /// Reads the next line. Returns `false` at the end of the file.
    fn next(&mut self) -> Result<bool, TraceError> {
        self.text.clear();
        self.number += 1;
        self.start = self.source.offset();
        loop {
            let bytes = self.source.some()?;
            if bytes.is_empty() {
                return Ok(!self.text.is_empty());
            }
            let end = bytes.iter().position(|&byte| byte == b'\n');
            let len = end.unwrap_or(bytes.len());
            let room = MAX_LINE - self.text.len();
            if len > room {
                let expected = format!("a line of at most {MAX_LINE} bytes");
                return Err(self.broken(self.text.len() + room, &expected, "a longer one"));
            }
            self.text.extend_from_slice(&bytes[..len]);
            self.source.used(len + usize::from(end.is_some()));
            if end.is_some() {
                return Ok(true);
            }
        }
    }

    /// Returns the number of cells in the line, and the cells.
    fn cells(&self) -> Result<(usize, [Cell<'_>; MAX_COLUMNS]), TraceError> {
        let mut cells = [Cell { at: 0, text: &[] }; MAX_COLUMNS];
        let (mut count, mut at) = (0, 0);
        loop {
            let rest = &self.text[at..];
            let quoted = rest.trim_ascii_start().starts_with(b"\"");
            let len = if quoted {
                let open = rest.iter().position(|&byte| byte == b'"').unwrap_or(0) + 1;
                let close = rest[open..].iter().position(|&byte| byte == b'"');
                let Some(close) = close else {
                    return Err(self.broken(at, "a closing quote", "the end of the line"));
                };
                let after = open + close;
                rest[after..].iter().position(|&byte| byte == b',').map(|comma| after + comma)
            } else {
                rest.iter().position(|&byte| byte == b',')
            };
            let text = rest[..len.unwrap_or(rest.len())].trim_ascii();
            let text = text
                .strip_prefix(b"\"")
                .and_then(|text| text.strip_suffix(b"\""))
                .map_or(text, <[u8]>::trim_ascii);
            let Some(cell) = cells.get_mut(count) else {
                let expected = format!("at most {MAX_COLUMNS} columns");
                return Err(self.broken(at, &expected, "more"));
            };
            *cell = Cell { at, text };
            count += 1;
            match len {
                Some(len) => at += len + 1,
                None => return Ok((count, cells)),
            }
        }
    }

    #[cold]
    fn broken(&self, at: usize, expected: &str, found: impl Into<String>) -> TraceError {
        let at = at as u64;
        let offset = Offset { byte: self.start + at, line: Some((self.number, at + 1)) };
        TraceError::broken(Format::Rmm, offset, expected, found)
    }
}

/// A cell: its position in the line, and its text without quotes and white space.
#[derive(Clone, Copy, Debug)]
struct Cell<'a> {
    at: usize,
    text: &'a [u8],
}

impl Cell<'_> {
    fn quote(&self) -> String {
        if self.text.is_empty() {
            return "an empty cell".to_owned();
        }
        let shown = &self.text[..self.text.len().min(40)];
        format!("`{}`", String::from_utf8_lossy(shown).escape_debug())
    }
}

/// The indices of the columns.
#[derive(Clone, Copy, Debug)]
struct Columns {
    count: usize,
    action: usize,
    pointer: usize,
    size: usize,
    time: Option<usize>,
    stream: Option<usize>,
}

impl Columns {
    fn of_header(lines: &Lines<'_, '_>) -> Result<Self, TraceError> {
        let (count, cells) = lines.cells()?;
        let find = |name: &str| {
            cells[..count].iter().position(|cell| cell.text.eq_ignore_ascii_case(name.as_bytes()))
        };
        let need = |name: &str| {
            find(name).ok_or_else(|| lines.broken(0, &format!("a column `{name}`"), "none"))
        };
        Ok(Self {
            count,
            action: need("Action")?,
            pointer: need("Pointer")?,
            size: need("Size")?,
            time: find("Time"),
            stream: find("Stream"),
        })
    }
}

struct Log {
    columns: Columns,
    events: Events,
    /// The number of midnights passed, for times without a date.
    days: u64,
    last_us: u64,
}

impl Log {
    fn row(&mut self, lines: &Lines<'_, '_>) -> Result<(), TraceError> {
        let columns = self.columns;
        let (count, cells) = lines.cells()?;
        if count != columns.count {
            let expected = format!("{} cells, as the first line has", columns.count);
            return Err(lines.broken(lines.text.len(), &expected, format!("{count}")));
        }
        let fault = |cell: Cell<'_>, expected: &str| lines.broken(cell.at, expected, cell.quote());
        let action = cells[columns.action];
        let actions: &[Action] = match action.text {
            text if text.eq_ignore_ascii_case(b"allocate") => &[Action::Alloc],
            text if is_free(text) => &[Action::FreeRequested, Action::FreeCompleted],
            text if text.eq_ignore_ascii_case(b"allocate failure") => &[Action::Oom],
            text if text.eq_ignore_ascii_case(b"action") => {
                let found = "the names of columns again: these are several logs in one file";
                return Err(lines.broken(action.at, "a row", found));
            }
            _ => return Err(fault(action, "`allocate`, `free` or `allocate failure`")),
        };
        let (pointer, size) = (cells[columns.pointer], cells[columns.size]);
        let addr = address(pointer.text)
            .ok_or_else(|| fault(pointer, "an address in hexadecimal of up to 64 bits"))?;
        let bytes = decimal(size.text).ok_or_else(|| fault(size, "a size of up to 64 bits"))?;
        let stream = match columns.stream.map(|column| cells[column]) {
            Some(cell) => stream(cell.text)
                .ok_or_else(|| fault(cell, "a stream in hexadecimal of up to 64 bits"))?,
            None => 0,
        };
        let time_us = match columns.time.map(|column| cells[column]) {
            Some(cell) if !cell.text.is_empty() => {
                let time = time(cell.text).ok_or_else(|| {
                    fault(cell, "a time such as 14:21:19:998533, or seconds since 1970")
                })?;
                self.moment(time)
            }
            _ => 0,
        };
        for &action in actions {
            // The log does not have the free bytes of the device.
            let addr = if action == Action::Oom { 0 } else { addr };
            let (pool, stack) = (None, None);
            self.events.push(Event { action, addr, size: bytes, stream, time_us, pool, stack });
        }
        Ok(())
    }

    /// Returns the microseconds of a time. Threads log slightly out of order; a jump back by more
    /// than half a day means the next day.
    fn moment(&mut self, time: Time) -> u64 {
        let us = match time {
            Time::Moment(us) => us,
            Time::OfDay(us) => {
                let today = (self.days * DAY_US).saturating_add(us);
                if today.saturating_add(DAY_US / 2) < self.last_us {
                    self.days += 1;
                    today.saturating_add(DAY_US)
                } else if self.days > 0 && today > self.last_us.saturating_add(DAY_US / 2) {
                    // A late row of the day before.
                    return today - DAY_US;
                } else {
                    today
                }
            }
        };
        self.last_us = us;
        us
    }
}

fn is_free(text: &[u8]) -> bool {
    text.eq_ignore_ascii_case(b"free") || text.eq_ignore_ascii_case(b"deallocate")
}

fn hexadecimal(text: &[u8]) -> Option<u64> {
    let digits = !text.is_empty() && text.iter().all(u8::is_ascii_hexdigit);
    if digits { u64::from_str_radix(str::from_utf8(text).ok()?, 16).ok() } else { None }
}

fn prefixed(text: &[u8]) -> Option<&[u8]> {
    text.strip_prefix(b"0x").or(text.strip_prefix(b"0X"))
}

/// Parses an address as C's `%p` writes it: with or without `0x`, or a word for null.
fn address(text: &[u8]) -> Option<u64> {
    match text {
        b"(nil)" | b"(null)" | b"nullptr" => Some(0),
        _ => hexadecimal(prefixed(text).unwrap_or(text)),
    }
}

/// Parses a stream: hexadecimal with `0x`, or decimal without, as some versions write small
/// handles.
fn stream(text: &[u8]) -> Option<u64> {
    match prefixed(text) {
        Some(digits) => hexadecimal(digits),
        None => decimal(text).or_else(|| address(text)),
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::read::limits::Limits;
    use crate::read::open;

    const HEADER: &str = "Thread,Time,Action,Pointer,Size,Stream\n";

    fn load(text: impl AsRef<[u8]>) -> Result<Snapshot, TraceError> {
        open::read(text.as_ref(), &Limits::default())
    }

    fn events(text: impl AsRef<[u8]>) -> Vec<Event> {
        load(text).unwrap().devices[0].iter().collect()
    }

    /// Returns the message for a broken row.
    fn told(row: &str) -> String {
        load(format!("{HEADER}1,10:00:00:000001,allocate,0x10,1,0x0\n{row}\n"))
            .expect_err("a broken row")
            .to_string()
    }

    #[test]
    fn a_log_is_read() {
        let snapshot = load(format!(
            "{HEADER}\
             1979932,14:21:19:998533,allocate,0x30a000000,256,0x2\n\
             1979932,14:21:32:661875,free,0x30a000000,256,0x7f8a38001020\n\
             1979932,14:21:33:100021,allocate failure,(nil),8589934592,0x2\n"
        ))
        .unwrap();
        assert_eq!(snapshot.origin, Origin::Rmm);
        assert!(snapshot.segments.is_empty() && snapshot.stacks.is_empty());
        let event = |action, addr, size, stream, time_us| Event {
            action,
            addr,
            size,
            stream,
            time_us,
            pool: None,
            stack: None,
        };
        let second = |h: u64, m: u64, s: u64| ((h * 60 + m) * 60 + s) * 1_000_000;
        let (a, b, c) = (
            second(14, 21, 19) + 998_533,
            second(14, 21, 32) + 661_875,
            second(14, 21, 33) + 100_021,
        );
        let stream = 0x7f8a_3800_1020;
        assert_eq!(
            snapshot.devices[0].iter().collect::<Vec<_>>(),
            [
                event(Action::Alloc, 0x3_0a00_0000, 256, 2, a),
                event(Action::FreeRequested, 0x3_0a00_0000, 256, stream, b),
                event(Action::FreeCompleted, 0x3_0a00_0000, 256, stream, b),
                event(Action::Oom, 0, 8 << 30, 2, c),
            ]
        );
    }

    #[test]
    fn columns_can_have_any_order_quotes_and_case() {
        let plain = events(format!("{HEADER}1,10:00:00:000001,allocate,0x10,7,0x2\n"));
        let others = [
            "\u{feff}Thread,Time,Action,Pointer,Size,Stream\r\n\
             1,10:00:00.000001,allocate,0x10,7,2\r\n",
            "\n\nStream,Size,Pointer,Action,Time\n0x2,7,10,allocate,10:00:00.000001",
            "\"Time\",\"Action\",\"Pointer\",\"Size\",\"Stream\",\"Note\"\n\
             \"10:00:00:000001\",\"allocate\",\"0x10\",\"7\",\"0x2\",\"a, b\"\n\n",
            "time, action, pointer, size, stream\n 10:00:00:000001 , Allocate , 0X10 , 7 , 0x2 \n",
        ];
        for text in others {
            assert_eq!(events(text), plain, "{text}");
        }
        // No time, no stream.
        let bare = events("Action,Pointer,Size\nallocate,0x10,7\n");
        assert_eq!(bare, [Event { stream: 0, time_us: 0, ..plain[0] }]);
        assert!(events(HEADER).is_empty());
    }

    #[test]
    fn times_after_midnight_are_of_the_next_day() {
        let row = |time: &str| format!("1,{time},allocate,0x10,1,0\n");
        let rows: String =
            ["23:59:59:000000", "00:00:01:000000", "23:59:59:500000", "00:00:02:000000"]
                .map(row)
                .concat();
        let times: Vec<u64> = events(format!("{HEADER}{rows}")).iter().map(|e| e.time_us).collect();
        let midnight = DAY_US;
        let second = 1_000_000;
        assert_eq!(
            times,
            [midnight - second, midnight + second, midnight - second / 2, midnight + 2 * second]
        );
    }

    #[test]
    fn a_broken_row_is_an_error_with_line_and_column() {
        let cases = [
            ("1,10:00:00:000001,allocate,0x10,1", "line 3, column 34", "6 cells", "found 5"),
            ("1,10:00:00:000001,allocate,0x10,1,0,0", "line 3", "6 cells", "found 7"),
            ("1,10:00:00:000001,alocate,0x10,1,0", "column 19", "`allocate failure`", "`alocate`"),
            ("1,10:00:00:000001,free,0xzz,1,0", "column 24", "an address", "`0xzz`"),
            ("1,10:00:00:000001,free,,1,0", "column 24", "an address", "an empty cell"),
            ("1,10:00:00:000001,free,0x10,-1,0", "column 29", "a size", "`-1`"),
            ("1,10:00:00:000001,free,0x10,NaN,0", "column 29", "a size", "`NaN`"),
            ("1,10:00:00:000001,free,0x10,99999999999999999999,0", "column 29", "64 bits", "999"),
            ("1,10:00:00:000001,free,0x10,1,0xg", "column 31", "a stream", "`0xg`"),
            ("1,25:00:00:000001,free,0x10,1,0", "column 3", "a time", "`25:00:00:000001`"),
            (
                "1,10:00:00:000001,\"free,0x10,1,0",
                "column 19",
                "a closing quote",
                "end of the line",
            ),
            ("Thread,Time,Action,Pointer,Size,Stream", "line 3", "a row", "several logs"),
            ("\x00\x01,,,,,", "column 5", "`free`", "an empty cell"),
        ];
        for (row, place, expected, found) in cases {
            let told = told(row);
            for part in ["the RMM log cannot be read", place, expected, found, "byte "] {
                assert!(told.contains(part), "{row:?}: no {part:?} in {told:?}");
            }
        }
        let first = HEADER.len() + 38;
        assert!(told("x").contains(&format!("byte {}", first + 1)), "{}", told("x"));
    }

    #[test]
    fn memory_is_limited() {
        let long = format!("{HEADER}{}", "1".repeat(1 << 20));
        let error = load(long).expect_err("a long line");
        assert!(error.to_string().contains("at most 4096 bytes"), "{error}");
        let wide = format!("action,pointer,size{}\n", ",x".repeat(40));
        assert!(load(wide).expect_err("many columns").to_string().contains("32 columns"));
        let limits = Limits { memory_bytes: 100_000, ..Limits::default() };
        let rows = HEADER.to_owned() + &"1,10:00:00:000001,allocate,0x10,1,0\n".repeat(100_000);
        let error = open::read(rows.as_bytes(), &limits).expect_err("over the limit");
        assert!(matches!(error, TraceError::Limit { field: "memory_bytes", .. }), "{error}");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        #[test]
        fn damage_never_panics(
            flips in vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
            cells in vec(prop::sample::select(br#"",0x19:.- free"#.to_vec()), 0..40),
        ) {
            let row = "1,23:59:59:999999,allocate failure,0xffffffffffffffff,\
                       18446744073709551615,0x2\n";
            let mut text = [HEADER, row, row].concat().into_bytes();
            for (place, byte) in flips {
                let place = place.index(text.len());
                text[place] = byte;
            }
            let _ = load(&text);
            let _ = load([HEADER.as_bytes(), &cells].concat());
            let _ = time(&cells);
        }
    }
}
