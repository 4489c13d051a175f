//! Strings and numbers of a JSON text.

use super::{Reader, found};
use crate::model::error::TraceError;
use crate::read::python::value::{StrId, Value};

impl Reader<'_, '_> {
    /// Reads a string after its opening quote.
    #[inline]
    pub(super) fn text(&mut self) -> Result<StrId, TraceError> {
        let bytes = self.source.some()?;
        let end = bytes.iter().position(|&byte| byte == b'"' || byte == b'\\' || byte < b' ');
        if let Some(len) = end.filter(|&end| bytes[end] == b'"') {
            // Invalid UTF-8, for example in a file name, does not make the trace unreadable.
            let id = self.arena.intern(&String::from_utf8_lossy(&bytes[..len]))?;
            self.source.used(len + 1);
            return Ok(id);
        }
        self.scratch.clear();
        self.rest_of_text(true)?;
        self.arena.intern(&String::from_utf8_lossy(&self.scratch))
    }

    #[inline]
    pub(super) fn skip_text(&mut self) -> Result<(), TraceError> {
        self.rest_of_text(false)
    }

    /// Reads a string to its closing quote, into `scratch` if `keep` is set.
    fn rest_of_text(&mut self, keep: bool) -> Result<(), TraceError> {
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

    /// Reads an escape after its backslash.
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

    /// Reads the digits of `\uXXXX`, and the second escape of a surrogate pair. Python writes lone
    /// surrogates for bytes that are not text; they become replacement characters.
    fn code_point(&mut self) -> Result<char, TraceError> {
        let high = self.hex()?;
        if (0xd800..0xdc00).contains(&high) && self.source.peek(2)? == b"\\u" {
            // If the other half does not follow, the caller reads the next escape on its own.
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

    /// Reads a number after its first character.
    #[inline]
    pub(super) fn number(&mut self, first: u8) -> Result<Value, TraceError> {
        let bytes = self.source.some()?;
        // Nearly all numbers are short integers inside the buffer.
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
}

fn hex_number(digits: &[u8]) -> Option<u32> {
    let digits: &[u8; 4] = digits.try_into().ok()?;
    digits.iter().try_fold(0, |number, &digit| Some(number << 4 | char::from(digit).to_digit(16)?))
}

/// Parses a number, if JSON or Python allows the text.
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
