//! The log of RAPIDS Memory Manager: a CSV with a row for each request, as its
//! `logging_resource_adaptor` writes it:
//!
//! ```text
//! Thread,Time,Action,Pointer,Size,Stream
//! 1979932,14:21:19:998533,allocate,0x30a000000,256,0x2
//! 1979932,14:21:32:661875,free,0x30a000000,256,0x2
//! 1979932,14:21:33:100021,allocate failure,0x0,8589934592,0x2
//! ```
//!
//! Versions differ in how they write times and streams; all known ones are read. The log has requests
//! only: nothing tells where memory came from.

use crate::detect::BOM;
use crate::error::{Format, Offset, TraceError};
use crate::events::Events;
use crate::snapshot::{Action, Event, Origin, Settings, Snapshot};
use crate::source::{CHUNK, Source};
use crate::stacks::Stacks;

/// A row is about eighty bytes.
const MAX_LINE: usize = 4096;
const MAX_COLUMNS: usize = 32;
const DAY_US: u64 = 24 * 60 * 60 * 1_000_000;

/// Reads a whole log.
pub(crate) fn read(source: &mut Source<'_>) -> Result<Snapshot, TraceError> {
    if source.peek(BOM.len())? == BOM {
        source.used(BOM.len());
    }
    let mut lines = Lines { source, text: Vec::new(), number: 0, start: 0 };
    // White space may come before the header.
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

/// The file line by line.
struct Lines<'s, 'r> {
    source: &'s mut Source<'r>,
    /// The line, without its end.
    text: Vec<u8>,
    /// Counted from 1.
    number: u64,
    /// Where it starts.
    start: u64,
}

impl Lines<'_, '_> {
    /// Goes to the next line; `false` at the end of the file.
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

    /// Its cells: where each begins, and its text without quotes and white space.
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

/// Which column has what.
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
    /// Days that have begun, for times that say the hour only.
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
            // What was free on the device when a request failed, the log does not say.
            let addr = if action == Action::Oom { 0 } else { addr };
            let (pool, stack) = (None, None);
            self.events.push(Event { action, addr, size: bytes, stream, time_us, pool, stack });
        }
        Ok(())
    }

    /// Threads log a little out of order; a jump back by half a day is the next day.
    fn moment(&mut self, time: Time) -> u64 {
        let us = match time {
            Time::Moment(us) => us,
            Time::OfDay(us) => {
                let today = (self.days * DAY_US).saturating_add(us);
                if today.saturating_add(DAY_US / 2) < self.last_us {
                    self.days += 1;
                    today.saturating_add(DAY_US)
                } else if self.days > 0 && today > self.last_us.saturating_add(DAY_US / 2) {
                    // A straggler of the evening before.
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

/// Digits and nothing else.
fn decimal(text: &[u8]) -> Option<u64> {
    let digits = !text.is_empty() && text.iter().all(u8::is_ascii_digit);
    if digits { str::from_utf8(text).ok()?.parse().ok() } else { None }
}

fn hexadecimal(text: &[u8]) -> Option<u64> {
    let digits = !text.is_empty() && text.iter().all(u8::is_ascii_hexdigit);
    if digits { u64::from_str_radix(str::from_utf8(text).ok()?, 16).ok() } else { None }
}

fn prefixed(text: &[u8]) -> Option<&[u8]> {
    text.strip_prefix(b"0x").or(text.strip_prefix(b"0X"))
}

/// As C's `%p` writes it: with or without `0x`, and null in words.
fn address(text: &[u8]) -> Option<u64> {
    match text {
        b"(nil)" | b"(null)" | b"nullptr" => Some(0),
        _ => hexadecimal(prefixed(text).unwrap_or(text)),
    }
}

/// Hexadecimal with `0x`; some versions write small ones without, and those are decimal.
fn stream(text: &[u8]) -> Option<u64> {
    match prefixed(text) {
        Some(digits) => hexadecimal(digits),
        None => decimal(text).or_else(|| address(text)),
    }
}

/// A time in a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Time {
    /// Microseconds since midnight.
    OfDay(u64),
    /// Microseconds since 1970.
    Moment(u64),
}

/// `HH:MM:SS`, then `:` or `.` and a fraction, with or without a date before it; or seconds since
/// 1970.
fn time(text: &[u8]) -> Option<Time> {
    if !text.contains(&b':') {
        let (whole, part) = split_once(text, b'.').unwrap_or((text, b"0"));
        let us = decimal(whole)?.checked_mul(1_000_000)?.checked_add(fraction(part)?)?;
        return Some(Time::Moment(us));
    }
    if let [y0, y1, y2, y3, b'-', m0, m1, b'-', d0, d1, b' ' | b'T', clock @ ..] = text {
        let year = decimal(&[*y0, *y1, *y2, *y3])?;
        let (month, day) = (decimal(&[*m0, *m1])?, decimal(&[*d0, *d1])?);
        let days = days_since_1970(year, month, day)?;
        return Some(Time::Moment(days * DAY_US + time_of_day(clock)?));
    }
    time_of_day(text).map(Time::OfDay)
}

fn time_of_day(text: &[u8]) -> Option<u64> {
    let (hours, rest) = split_once(text, b':')?;
    let (minutes, rest) = split_once(rest, b':')?;
    let parts = split_once(rest, b':').or_else(|| split_once(rest, b'.'));
    let (seconds, part) = parts.unwrap_or((rest, b"0"));
    let (hours, minutes, seconds) = (decimal(hours)?, decimal(minutes)?, decimal(seconds)?);
    // A leap second is the sixtieth.
    if hours > 23 || minutes > 59 || seconds > 60 {
        return None;
    }
    Some(((hours * 60 + minutes) * 60 + seconds) * 1_000_000 + fraction(part)?)
}

/// The digits behind the point, as microseconds.
fn fraction(digits: &[u8]) -> Option<u64> {
    decimal(digits.get(..18).unwrap_or(digits))?;
    let mut micros = *b"000000";
    let len = digits.len().min(micros.len());
    micros[..len].copy_from_slice(&digits[..len]);
    decimal(&micros)
}

fn split_once(text: &[u8], at: u8) -> Option<(&[u8], &[u8])> {
    let place = text.iter().position(|&byte| byte == at)?;
    Some((&text[..place], &text[place + 1..]))
}

/// Days from 1970-01-01 to a day of the Gregorian calendar.
fn days_since_1970(year: u64, month: u64, day: u64) -> Option<u64> {
    if !(1..=12).contains(&month) || !(1..=31).contains(&day) {
        return None;
    }
    // Years begin in March here, so that a leap day is the last of its year.
    let (year, month) =
        if month > 2 { (year, month - 3) } else { (year.checked_sub(1)?, month + 9) };
    let leap_days = year / 4 - year / 100 + year / 400;
    let before_month = (153 * month + 2) / 5;
    (365 * year + leap_days + before_month + day).checked_sub(719_469)
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::open::{self, Limits};

    const HEADER: &str = "Thread,Time,Action,Pointer,Size,Stream\n";

    fn load(text: impl AsRef<[u8]>) -> Result<Snapshot, TraceError> {
        open::read(text.as_ref(), &Limits::default())
    }

    fn events(text: impl AsRef<[u8]>) -> Vec<Event> {
        load(text).unwrap().devices[0].iter().collect()
    }

    /// The message for a row.
    fn told(row: &str) -> String {
        load(format!("{HEADER}1,10:00:00:000001,allocate,0x10,1,0x0\n{row}\n"))
            .expect_err("a broken row")
            .to_string()
    }

    #[test]
    fn a_log_gives_its_events() {
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
    fn columns_come_in_any_order_and_dress() {
        let plain = events(format!("{HEADER}1,10:00:00:000001,allocate,0x10,7,0x2\n"));
        let others = [
            "\u{feff}Thread,Time,Action,Pointer,Size,Stream\r\n1,10:00:00.000001,allocate,0x10,7,2\r\n",
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
    fn times_of_every_version() {
        let noon = 12 * 3600 * 1_000_000;
        assert_eq!(time(b"12:00:00:000007"), Some(Time::OfDay(noon + 7)));
        assert_eq!(time(b"12:00:00.5"), Some(Time::OfDay(noon + 500_000)));
        assert_eq!(time(b"12:00:00"), Some(Time::OfDay(noon)));
        assert_eq!(time(b"1634567890.123456"), Some(Time::Moment(1_634_567_890_123_456)));
        assert_eq!(time(b"1634567890.123456789"), Some(Time::Moment(1_634_567_890_123_456)));
        assert_eq!(time(b"1970-01-02 12:00:00.25"), Some(Time::Moment(DAY_US + noon + 250_000)));
        // What `date -d 2024-02-29T00:00:00Z +%s` says.
        assert_eq!(time(b"2024-02-29T00:00:00"), Some(Time::Moment(1_709_164_800_000_000)));
        for odd in ["", "12", "x", "12:00", "24:00:00", "12:60:00", "12:00:00:", "1:2:3:4:5", "-1"]
        {
            let odd_time = time(odd.as_bytes());
            assert!(odd_time.is_none() || odd == "12", "{odd}: {odd_time:?}");
        }
    }

    #[test]
    fn midnight_is_passed() {
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
    fn a_bad_row_is_told_with_its_place() {
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
    fn memory_has_a_limit() {
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
            let row = "1,23:59:59:999999,allocate failure,0xffffffffffffffff,18446744073709551615,0x2\n";
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
