//! A snapshot as JSON: read token by token into the same arena as a pickle, so that events are packed
//! as they come.
//!
//! As with pickles nothing recurses, however deep the nesting. What lies under a key that nobody asks
//! for is checked, but not kept. JSON has no references, so each frame of each event is written out:
//! their places in the arena are used again at once.

use crate::arena::Arena;
use crate::detect::BOM;
use crate::error::{Format, TraceError};
use crate::snapshot::Name;
use crate::source::{CHUNK, Source};
use crate::value::{StrId, Value};

/// The machine that reads a JSON text.
#[derive(Debug)]
pub(crate) struct Reader<'s, 'r> {
    source: &'s mut Source<'r>,
    arena: Arena,
    /// Values and keys of the lists and dicts that are open.
    stack: Vec<Value>,
    open: Vec<Open>,
    /// The number of open lists and dicts from which on nothing is kept.
    skip_from: usize,
    /// A string or number that does not lie in the source's buffer as it is.
    scratch: Vec<u8>,
    /// The offset from which the memory limit is due to be looked at again.
    next_check: u64,
}

/// A list or dict whose end has not come yet.
#[derive(Clone, Copy, Debug)]
struct Open {
    kind: Kind,
    /// Where its values begin on the stack.
    base: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Dict,
    List,
    /// A list of events, which has a place in the arena from its first one on.
    Events(u32),
}

/// What may come next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    Value,
    /// A list has just begun.
    ValueOrEnd,
    Key,
    /// A dict has just begun.
    KeyOrEnd,
    CommaOrEnd,
}

impl<'s, 'r> Reader<'s, 'r> {
    pub(crate) fn new(source: &'s mut Source<'r>) -> Self {
        Self {
            source,
            arena: Arena::new(Format::Json),
            stack: Vec::new(),
            open: Vec::new(),
            skip_from: usize::MAX,
            scratch: Vec::new(),
            next_check: 0,
        }
    }

    /// Reads the text to its end: the value it stands for, and the arena the value lives in.
    pub(crate) fn run(mut self) -> Result<(Value, Arena), TraceError> {
        if self.source.peek(BOM.len())? == BOM {
            self.source.used(BOM.len());
        }
        let mut next = Next::Value;
        loop {
            let byte = self.token()?;
            next = match (next, byte) {
                (Next::CommaOrEnd, Some(b',')) => match self.open.last() {
                    Some(Open { kind: Kind::Dict, .. }) => Next::Key,
                    _ => Next::Value,
                },
                (Next::KeyOrEnd | Next::Key, Some(b'"')) => self.key()?,
                (Next::KeyOrEnd, Some(b'}')) => self.close(b'}')?,
                (Next::ValueOrEnd, Some(b']')) => self.close(b']')?,
                (Next::CommaOrEnd, Some(end @ (b'}' | b']'))) => self.close(end)?,
                (Next::Value | Next::ValueOrEnd, Some(byte)) => self.value(byte)?,
                _ => return Err(self.unexpected(next, byte)),
            };
            if self.open.is_empty() {
                break;
            }
        }
        let end = self.arena.at;
        match (self.token()?, self.stack.first()) {
            (None, Some(&root)) => {
                self.arena.at = end;
                Ok((root, self.arena))
            }
            (byte, _) => Err(self.broken("the end of the file", found(byte))),
        }
    }

    /// The next byte that is not white space, now read; `None` at the end of the file.
    #[inline]
    fn token(&mut self) -> Result<Option<u8>, TraceError> {
        loop {
            let bytes = self.source.some()?;
            let space = bytes.iter().position(|byte| !matches!(byte, b' ' | b'\n' | b'\t' | b'\r'));
            let len = bytes.len();
            let token = space.map(|space| (space, bytes[space]));
            self.arena.at = self.source.offset() + space.unwrap_or(len) as u64;
            if self.arena.at >= self.next_check {
                self.check_memory()?;
            }
            match token {
                Some((space, byte)) => {
                    self.source.used(space + 1);
                    return Ok(Some(byte));
                }
                None if len == 0 => return Ok(None),
                None => self.source.used(len),
            }
        }
    }

    #[inline]
    fn value(&mut self, first: u8) -> Result<Next, TraceError> {
        let value = match first {
            b'{' => return Ok(self.begin(Kind::Dict)),
            b'[' => return Ok(self.begin(Kind::List)),
            b'"' => {
                // The key says whether anyone asks for the text.
                if self.skipping() {
                    self.skip_text()?;
                    Value::Spent
                } else {
                    Value::Str(self.text()?)
                }
            }
            b'-' | b'0'..=b'9' => self.number(first)?,
            b't' => self.word(b"rue", Value::Bool(true))?,
            b'f' => self.word(b"alse", Value::Bool(false))?,
            b'n' => self.word(b"ull", Value::None)?,
            // As Python writes them.
            b'N' => self.word(b"aN", Value::Float(f64::NAN))?,
            b'I' => self.word(b"nfinity", Value::Float(f64::INFINITY))?,
            _ => return Err(self.unexpected(Next::Value, Some(first))),
        };
        self.put(value)
    }

    #[inline]
    fn skipping(&self) -> bool {
        self.open.len() >= self.skip_from
    }

    fn begin(&mut self, kind: Kind) -> Next {
        self.open.push(Open { kind, base: self.stack.len() });
        if kind == Kind::Dict { Next::KeyOrEnd } else { Next::ValueOrEnd }
    }

    /// A key and its colon.
    #[inline]
    fn key(&mut self) -> Result<Next, TraceError> {
        if self.skip_from < self.open.len() {
            self.skip_text()?;
        } else {
            // What follows the key of the same dict before this one was passed over to its end.
            self.skip_from = usize::MAX;
            let key = self.text()?;
            self.stack.push(Value::Str(key));
            if Name::of(Value::Str(key)).is_none() {
                self.skip_from = self.open.len();
            }
        }
        match self.token()? {
            Some(b':') => Ok(Next::Value),
            other => Err(self.broken("a colon after the key", found(other))),
        }
    }

    /// A value is complete.
    #[inline]
    fn put(&mut self, value: Value) -> Result<Next, TraceError> {
        let depth = self.open.len();
        if depth > self.skip_from {
            return Ok(Next::CommaOrEnd);
        }
        if depth == self.skip_from {
            self.skip_from = usize::MAX;
            // Small values are kept under any key: some dicts have numbers for keys.
            if value == Value::Spent {
                self.stack.pop();
                return Ok(Next::CommaOrEnd);
            }
        }
        match self.open.last_mut() {
            Some(Open { kind: Kind::Events(list), .. }) => {
                self.arena.append(*list, &[value])?;
            }
            Some(Open { kind: kind @ Kind::List, base })
                if self.stack.len() == *base && self.arena.is_event(value) =>
            {
                let list = self.arena.new_list(Vec::new())?;
                self.arena.append(list, &[value])?;
                *kind = Kind::Events(list);
            }
            _ => self.stack.push(value),
        }
        Ok(Next::CommaOrEnd)
    }

    /// The end of the innermost list or dict.
    #[inline]
    fn close(&mut self, end: u8) -> Result<Next, TraceError> {
        let (Some(&Open { kind, base }), skipped) =
            (self.open.last(), self.open.len() > self.skip_from)
        else {
            return Err(self.broken("the end of the file", found(Some(end))));
        };
        if (kind == Kind::Dict) != (end == b'}') {
            return Err(self.unexpected(Next::CommaOrEnd, Some(end)));
        }
        self.open.pop();
        if skipped {
            return self.put(Value::Spent);
        }
        let value = match kind {
            Kind::Dict => {
                let (items, _) = self.stack[base..].as_chunks();
                let dict = self.arena.new_dict()?;
                self.arena.extend(dict, items)?;
                Value::Dict(dict)
            }
            Kind::List if self.is_pool(base) => self.arena.new_tuple(&self.stack[base..])?,
            Kind::List => Value::List(self.arena.new_list(self.stack[base..].to_vec())?),
            Kind::Events(list) => Value::List(list),
        };
        self.stack.truncate(base);
        self.put(value)
    }

    /// Whether the list whose values begin at `base` is a pool, which pickles have as a tuple.
    fn is_pool(&self, base: usize) -> bool {
        let in_dict = |outer: &Open| outer.kind == Kind::Dict;
        self.open.last().is_some_and(in_dict)
            && base.checked_sub(1).is_some_and(|key| {
                matches!(Name::of(self.stack[key]), Some(Name::PoolId | Name::SegmentPoolId))
            })
    }

    /// The rest of a word that began well.
    fn word(&mut self, rest: &'static [u8], value: Value) -> Result<Value, TraceError> {
        for &letter in rest {
            let byte = self.source.some()?.first().copied();
            if byte != Some(letter) {
                self.arena.at = self.source.offset();
                return Err(self.broken("true, false, null, NaN or Infinity", found(byte)));
            }
            self.source.used(1);
        }
        Ok(value)
    }

    /// A string, from behind its opening quote on.
    #[inline]
    fn text(&mut self) -> Result<StrId, TraceError> {
        let bytes = self.source.some()?;
        let end = bytes.iter().position(|&byte| byte == b'"' || byte == b'\\' || byte < b' ');
        if let Some(len) = end.filter(|&end| bytes[end] == b'"') {
            // Broken UTF-8 in a file's name is no reason not to read the trace.
            let id = self.arena.intern(&String::from_utf8_lossy(&bytes[..len]))?;
            self.source.used(len + 1);
            return Ok(id);
        }
        self.scratch.clear();
        self.pieces(true)?;
        self.arena.intern(&String::from_utf8_lossy(&self.scratch))
    }

    #[inline]
    fn skip_text(&mut self) -> Result<(), TraceError> {
        self.pieces(false)
    }

    /// The pieces of a string, to its closing quote: into `scratch`, if they are to be kept.
    fn pieces(&mut self, keep: bool) -> Result<(), TraceError> {
        loop {
            let bytes = self.source.some()?;
            let end = bytes.iter().position(|&byte| byte == b'"' || byte == b'\\' || byte < b' ');
            let len = end.unwrap_or(bytes.len());
            let stop = bytes.get(len).copied();
            let at_end = bytes.is_empty();
            if keep {
                self.scratch.extend_from_slice(&bytes[..len]);
            }
            self.source.used(len);
            self.arena.at = self.source.offset();
            self.within(self.scratch.len())?;
            match stop {
                Some(b'"') => {
                    self.source.used(1);
                    return Ok(());
                }
                Some(b'\\') => {
                    self.source.used(1);
                    self.escape(keep)?;
                }
                None if !at_end => {}
                other => {
                    let expected = "more of a string and its closing quote";
                    return Err(self.broken(expected, found(other)));
                }
            }
        }
    }

    /// What follows a backslash.
    fn escape(&mut self, keep: bool) -> Result<(), TraceError> {
        let byte = self.source.some()?.first().copied();
        let char = match byte {
            Some(b'u') => {
                self.source.used(1);
                let char = self.code_point()?;
                if keep {
                    self.scratch.extend_from_slice(char.encode_utf8(&mut [0; 4]).as_bytes());
                }
                return Ok(());
            }
            Some(plain @ (b'"' | b'\\' | b'/')) => plain,
            Some(b'b') => 8,
            Some(b'f') => 12,
            Some(b'n') => b'\n',
            Some(b'r') => b'\r',
            Some(b't') => b'\t',
            other => return Err(self.broken("an escape that JSON knows", found(other))),
        };
        self.source.used(1);
        if keep {
            self.scratch.push(char);
        }
        Ok(())
    }

    /// The digits of `\uXXXX`, and of a second one where two make a character. Python writes half of
    /// a pair for what is no text: it is shown as a replacement character.
    fn code_point(&mut self) -> Result<char, TraceError> {
        let high = self.hex()?;
        if (0xd800..0xdc00).contains(&high) && self.source.peek(2)? == b"\\u" {
            // Only if the other half follows: otherwise it is read again as a string's next escape.
            let ahead = self.source.peek(6)?;
            let low = ahead.get(2..).and_then(hex_number);
            if let Some(low @ 0xdc00..0xe000) = low {
                self.source.used(6);
                let code = 0x1_0000 + ((high - 0xd800) << 10) + (low - 0xdc00);
                return Ok(char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER));
            }
        }
        Ok(char::from_u32(high).unwrap_or(char::REPLACEMENT_CHARACTER))
    }

    fn hex(&mut self) -> Result<u32, TraceError> {
        let digits = self.source.peek(4)?;
        match hex_number(digits) {
            Some(number) => {
                self.source.used(4);
                Ok(number)
            }
            None => {
                let digits = format!("`{}`", String::from_utf8_lossy(digits).escape_debug());
                Err(self.broken("four hexadecimal digits", digits))
            }
        }
    }

    /// A number, from behind its first character on.
    #[inline]
    fn number(&mut self, first: u8) -> Result<Value, TraceError> {
        let bytes = self.source.some()?;
        // Nearly all are whole, short, and lie in the buffer.
        let len = bytes.iter().take(18).position(|byte| !byte.is_ascii_digit());
        if let Some(len) = len
            && (b'1'..=b'9').contains(&first)
            && !matches!(bytes[len], b'.' | b'e' | b'E')
        {
            let int = bytes[..len]
                .iter()
                .fold(i64::from(first - b'0'), |int, digit| int * 10 + i64::from(digit - b'0'));
            self.source.used(len);
            return Ok(Value::Int(int));
        }
        self.any_number(first)
    }

    fn any_number(&mut self, first: u8) -> Result<Value, TraceError> {
        self.scratch.clear();
        self.scratch.push(first);
        loop {
            let bytes = self.source.some()?;
            let end = bytes.iter().position(|byte| {
                !matches!(byte, b'0'..=b'9' | b'+' | b'-' | b'.' | b'a'..=b'z' | b'A'..=b'Z')
            });
            let len = end.unwrap_or(bytes.len());
            self.scratch.extend_from_slice(&bytes[..len]);
            let done = end.is_some() || bytes.is_empty();
            self.source.used(len);
            self.within(self.scratch.len())?;
            if done {
                break;
            }
        }
        number(&self.scratch).ok_or_else(|| {
            let shown = &self.scratch[..self.scratch.len().min(40)];
            self.broken("a number", format!("`{}`", String::from_utf8_lossy(shown)))
        })
    }

    fn within(&self, len: usize) -> Result<(), TraceError> {
        self.source.within(len, self.arena.at)
    }

    fn check_memory(&mut self) -> Result<(), TraceError> {
        let values = self.stack.len() * size_of::<Value>() + self.open.len() * size_of::<Open>();
        self.source.check_memory(self.arena.held() + values, self.arena.at)?;
        self.next_check = self.arena.at + CHUNK as u64;
        Ok(())
    }

    #[cold]
    fn unexpected(&self, next: Next, byte: Option<u8>) -> TraceError {
        let in_dict = matches!(self.open.last(), Some(Open { kind: Kind::Dict, .. }));
        let expected = match next {
            Next::Value => "a value",
            Next::ValueOrEnd => "a value or `]`",
            Next::Key => "a key in quotes",
            Next::KeyOrEnd => "a key in quotes or `}`",
            Next::CommaOrEnd if in_dict => "a comma or `}`",
            Next::CommaOrEnd => "a comma or `]`",
        };
        self.broken(expected, found(byte))
    }

    #[cold]
    fn broken(&self, expected: &str, found: impl Into<String>) -> TraceError {
        self.arena.broken(expected, found)
    }
}

/// A byte of the file, for messages.
fn found(byte: Option<u8>) -> String {
    match byte {
        None => "the end of the file".to_owned(),
        Some(byte @ b' '..=b'~') => format!("`{}`", char::from(byte)),
        Some(byte) => format!("the byte {byte:#04x}"),
    }
}

fn hex_number(digits: &[u8]) -> Option<u32> {
    let digits: &[u8; 4] = digits.try_into().ok()?;
    digits.iter().try_fold(0, |number, &digit| Some(number << 4 | char::from(digit).to_digit(16)?))
}

/// The number that a text stands for, if JSON or Python's idea of it allows that text.
fn number(text: &[u8]) -> Option<Value> {
    let digits = text.strip_prefix(b"-").unwrap_or(text);
    if digits == b"Infinity" {
        return Some(Value::Float(f64::NEG_INFINITY));
    }
    let text = str::from_utf8(text).ok()?;
    let whole = digits.iter().take_while(|byte| byte.is_ascii_digit()).count();
    if whole == 0 || (whole > 1 && digits[0] == b'0') {
        return None;
    }
    if whole == digits.len() {
        let int = text.parse().map(Value::Int).or_else(|_| text.parse().map(Value::Uint));
        return Some(int.unwrap_or(Value::Huge));
    }
    let (part, power) = match digits[whole..].iter().position(|byte| matches!(byte, b'e' | b'E')) {
        Some(place) => (&digits[whole..whole + place], Some(&digits[whole + place + 1..])),
        None => (&digits[whole..], None),
    };
    let all_digits = |digits: &[u8]| !digits.is_empty() && digits.iter().all(u8::is_ascii_digit);
    let part_good = part.is_empty() || part.strip_prefix(b".").is_some_and(all_digits);
    let unsigned = |power: &[u8]| {
        all_digits(power.strip_prefix(b"+").or(power.strip_prefix(b"-")).unwrap_or(power))
    };
    if !part_good || !power.is_none_or(unsigned) {
        return None;
    }
    text.parse().ok().map(Value::Float)
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::open::{Limits, read};
    use crate::pickle::tests::PROTOCOL_4;
    use crate::snapshot::{Action, Snapshot};

    /// The snapshot of the pickle tests, as Python's `json.dumps` writes it.
    const SNAPSHOT: &str = include_str!("json/snapshot.json");

    fn load(text: impl AsRef<[u8]>) -> Result<Snapshot, TraceError> {
        read(text.as_ref(), &Limits::default())
    }

    /// Where a text is broken, what was expected and what was there.
    fn broken(text: impl AsRef<[u8]>) -> (u64, String, String) {
        match load(text) {
            Err(TraceError::Broken { format: Format::Json, offset, expected, found }) => {
                (offset.byte, expected, found)
            }
            other => panic!("{other:?}"),
        }
    }

    fn value(text: &str) -> Result<(Value, Arena), TraceError> {
        let mut input = text.as_bytes();
        Reader::new(&mut Source::new(&mut input, &Limits::default())).run()
    }

    fn with_events(events: &str) -> String {
        format!(r#"{{"segments": [], "device_traces": [[{events}]]}}"#)
    }

    #[test]
    fn json_and_pickle_give_the_same_snapshot() {
        let pickle = load(PROTOCOL_4).unwrap();
        assert_eq!(load(SNAPSHOT).unwrap(), pickle);
        let value: serde_json::Value = serde_json::from_str(SNAPSHOT).unwrap_or_default();
        let pretty = serde_json::to_string_pretty(&value).unwrap();
        let dense = serde_json::to_string(&value).unwrap();
        let marked = format!("\u{feff}\r\n\t {dense} \n");
        for text in [pretty, dense, marked] {
            // serde_json sorts keys, so stacks are numbered in another order.
            let read = load(&text).unwrap();
            assert_eq!(read.segments.len(), pickle.segments.len());
            let facts = |snapshot: &Snapshot| -> Vec<_> {
                snapshot.devices[0].iter().map(|e| (e.action, e.addr, e.size, e.pool)).collect()
            };
            assert_eq!(facts(&read), facts(&pickle));
        }
    }

    #[test]
    fn reads_of_any_size_give_the_same() {
        struct Bits<'a>(&'a [u8], usize);
        impl std::io::Read for Bits<'_> {
            fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
                let len = buffer.len().min(self.1);
                self.0.read(&mut buffer[..len])
            }
        }
        let whole = load(SNAPSHOT).unwrap();
        for size in [1, 2, 3, 7, 100] {
            let read = read(Bits(SNAPSHOT.as_bytes(), size), &Limits::default()).unwrap();
            assert_eq!(read, whole, "{size} bytes at a time");
        }
    }

    #[test]
    fn values_of_every_kind() {
        let cases = [
            ("0", Value::Int(0)),
            ("-0", Value::Int(0)),
            ("123456789012345678901234567890", Value::Huge),
            ("18446744073709551615", Value::Uint(u64::MAX)),
            ("-9223372036854775808", Value::Int(i64::MIN)),
            ("99999999999999999999", Value::Huge),
            ("999999999999999999", Value::Int(999_999_999_999_999_999)),
            ("9999999999999999999", Value::Uint(9_999_999_999_999_999_999)),
            ("1.5e3", Value::Float(1500.0)),
            ("1E-2", Value::Float(0.01)),
            ("-Infinity", Value::Float(f64::NEG_INFINITY)),
            ("Infinity", Value::Float(f64::INFINITY)),
            ("true", Value::Bool(true)),
            ("false", Value::Bool(false)),
            ("null", Value::None),
        ];
        for (text, expected) in cases {
            assert_eq!(value(text).unwrap().0, expected, "{text}");
        }
        assert!(matches!(value("NaN").unwrap().0, Value::Float(nan) if nan.is_nan()));
        for text in ["01", "-", "1.", ".5", "1e", "1e+", "+1", "1.5.2", "--1", "0x10", "-Inf", "1a"]
        {
            assert!(value(text).is_err(), "{text}");
        }
    }

    #[test]
    fn text_with_escapes() {
        let text = |json: &str| {
            let (value, arena) = value(json).unwrap();
            let Value::Str(id) = value else { panic!("{value:?}") };
            arena.text(id).to_string()
        };
        assert_eq!(text(r#""a\"\\\/\b\f\n\r\t\u00e9""#), "a\"\\/\u{8}\u{c}\n\r\té");
        assert_eq!(text(r#""\ud83d\ude00""#), "😀");
        assert_eq!(text(r#""\ud83dx\ude00\ud83d\ud83d\ude00""#), "\u{fffd}x\u{fffd}\u{fffd}😀");
        let long = "é".repeat(CHUNK);
        assert_eq!(text(&format!("\"{long}\"")), long);
        assert!(load(b"{\"\xff\": 1, \"segments\": [], \"device_traces\": []}").is_ok());
    }

    #[test]
    fn a_key_given_twice_has_its_last_value() {
        let twice = r#"{"action": "oom", "size": 1, "addr": 2, "size": 3, "action": "alloc"}"#;
        let event = load(with_events(twice)).unwrap().devices[0].get(0).unwrap();
        assert_eq!((event.action, event.size), (Action::Alloc, 3));
    }

    #[test]
    fn what_nobody_asks_for_is_not_kept() {
        // Nested, long, with keys that would mean something elsewhere.
        let novelty = r#"{"action": [1, {"frames": "x"}], "text": "\u0041\n", "n": null}"#;
        let event = |n: usize| {
            format!(
                r#"{{"action": "alloc", "addr": {n}, "user_metadata": "number {n}", "size": 1,
                "novelty": {novelty}, "pool_id": [0, 0], "frames": [{{"name": "f", "line": 1}}]}}"#
            )
        };
        let events: Vec<String> = (0..1000).map(event).collect();
        let text = with_events(&events.join(","));
        let (_, arena) = value(&text).unwrap();
        assert!(arena.dicts.len() < 10 && arena.lists.len() < 10);
        assert!(arena.held() < 60_000, "{}", arena.held());
        let read = load(&text).unwrap();
        assert!((0..).zip(&read.devices[0]).all(|(n, event)| event.addr == n));
        assert!(read.devices[0].iter().all(|e| e.stack.is_some() && e.pool == Some((0, 0))));
    }

    #[test]
    fn faults_are_told_with_their_place() {
        let case = |text: &str, offset: u64, expected: &str, found: &str| {
            let told = broken(text);
            assert!(told.1.contains(expected) && told.2.contains(found), "{text}: {told:?}");
            assert_eq!(told.0, offset, "{text}");
        };
        case("{", 1, "a key in quotes or `}`", "the end of the file");
        case("{\"a\"", 4, "a colon", "the end of the file");
        case("{\"a\" 1}", 5, "a colon", "`1`");
        case("{\"a\": 1,}", 8, "a key in quotes", "`}`");
        case("{a: 1}", 1, "a key in quotes", "`a`");
        case("[1, ]", 4, "a value", "`]`");
        case("[1 2]", 3, "a comma or `]`", "`2`");
        case("[1}", 2, "a comma or `]`", "`}`");
        case("{\"a\": 1]", 7, "a comma or `}`", "`]`");
        case("[1, 2", 5, "a comma or `]`", "the end of the file");
        case("[\"ab", 4, "closing quote", "the end of the file");
        case("[\"a\nb\"]", 3, "closing quote", "0x0a");
        case("[\"\\x\"]", 2, "an escape", "`x`");
        case("[\"\\u12g4\"]", 2, "hexadecimal", "12g4");
        case("[trux]", 4, "true", "`x`");
        case("[01]", 1, "a number", "`01`");
        case("[nul", 4, "null", "the end of the file");
        case("[] x", 3, "the end of the file", "`x`");
        case("{}}", 2, "the end of the file", "`}`");
        case("[\u{e9}]", 1, "a value", "0xc3");
    }

    #[test]
    fn a_million_deep_is_not_too_deep() {
        let deep = 1_000_000;
        let lists = "[".repeat(deep) + &"]".repeat(deep);
        let dicts = "{\"blocks\":".repeat(deep) + "1" + &"}".repeat(deep);
        let skipped = "{\"x\":".repeat(deep) + "1" + &"}".repeat(deep);
        for text in [lists, dicts, skipped] {
            assert!(value(&text).is_ok());
            assert!(matches!(load(&text), Err(TraceError::Snapshot { .. })));
            let cut = &text[..text.len() - 1];
            assert!(load(cut).is_err());
        }
    }

    #[test]
    fn memory_has_a_limit() {
        let limits = Limits { memory_bytes: 1 << 20, ..Limits::default() };
        let over = |text: String| {
            let error = read(text.as_bytes(), &limits).expect_err("over the limit");
            assert!(matches!(error, TraceError::Limit { field: "memory_bytes", .. }), "{error}");
        };
        over("[".repeat(200_000));
        over("{\"blocks\":".repeat(100_000));
        over("[".to_owned() + &"[],".repeat(100_000));
        over("[".to_owned() + &"{},".repeat(100_000));
        over(format!("[\"{}\"]", "x".repeat(2 << 20)));
        over(format!("[{}]", "1".repeat(2 << 20)));
        over("{".to_owned() + &(0..50_000).map(|n| format!("\"k{n}\":1,")).collect::<String>());
        // What is passed over may be of any length.
        let long =
            format!(r#"{{"segments": [], "device_traces": [], "x": "{}"}}"#, "y".repeat(2 << 20));
        assert!(read(long.as_bytes(), &limits).is_ok());
    }

    #[test]
    fn every_cut_is_an_error() {
        let text = SNAPSHOT.trim_end();
        for len in 0..text.len() {
            assert!(load(&text.as_bytes()[..len]).is_err(), "cut to {len}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        #[test]
        fn damage_never_panics(
            flips in vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
            tokens in vec(prop::sample::select(br#"[]{},:"\u1e-0x"#.to_vec()), 0..60),
            at in any::<prop::sample::Index>(),
        ) {
            let mut text = SNAPSHOT.as_bytes().to_vec();
            for (place, byte) in flips {
                let place = place.index(text.len());
                text[place] = byte;
            }
            let _ = load(&text);
            let at = at.index(text.len());
            text.splice(at..at, tokens.clone());
            let _ = load(&text);
            let _ = load([b"{".to_vec(), tokens].concat());
        }

        /// What we accept, an established reader accepts, and the other way round, but for what
        /// Python allows beyond JSON.
        #[test]
        fn agrees_with_an_established_reader(
            tokens in vec(
                prop::sample::select(vec!["[", "]", "{", "}", ",", ":", "\"a\"", "1", "-2.5e1", "null", " "]),
                0..12,
            ),
        ) {
            let text = format!("[{}", tokens.concat());
            let theirs = serde_json::from_str::<serde_json::Value>(&text).is_ok();
            prop_assert_eq!(value(&text).is_ok(), theirs, "{}", text);
        }
    }
}
