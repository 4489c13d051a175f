//! Integers and texts as pickles write them.

use crate::format::pickle::op;
use crate::read::python::value::Value;

/// Decodes a little-endian two's complement integer of any length.
#[inline]
pub(super) fn long(bytes: &[u8]) -> Value {
    let negative = bytes.last().is_some_and(|&top| top >= 0x80);
    let sign = if negative { 0xff } else { 0 };
    let (low, high) = bytes.split_at(bytes.len().min(8));
    let mut word = [sign; 8];
    word[..low.len()].copy_from_slice(low);
    let int = i64::from_le_bytes(word);
    match high.iter().all(|&byte| byte == sign) {
        true if (int < 0) == negative => Value::Int(int),
        true if !negative => Value::Uint(int.cast_unsigned()),
        _ => Value::Huge,
    }
}

/// Parses the line of an INT, LONG or FLOAT, which protocol 0 writes as text.
pub(super) fn number(opcode: u8, line: &[u8]) -> Option<Value> {
    let line = str::from_utf8(line).ok()?;
    match (opcode, line) {
        (op::INT, "00") => return Some(Value::Bool(false)),
        (op::INT, "01") => return Some(Value::Bool(true)),
        (op::FLOAT, _) => return line.parse().ok().map(Value::Float),
        _ => {}
    }
    let digits = line.strip_suffix('L').unwrap_or(line);
    let plain = digits.strip_prefix('-').unwrap_or(digits);
    if plain.is_empty() || !plain.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let int = digits.parse().map(Value::Int).or_else(|_| digits.parse().map(Value::Uint));
    Some(int.unwrap_or(Value::Huge))
}

/// Decodes the line of a UNICODE: Latin-1, and `\uXXXX` or `\UXXXXXXXX` for other characters.
pub(super) fn unescape(line: &[u8]) -> String {
    let mut text = String::with_capacity(line.len());
    let mut rest = line;
    while let [byte, tail @ ..] = rest {
        let escaped = match tail {
            [b'u', digits @ ..] if *byte == b'\\' => hex(digits, 4),
            [b'U', digits @ ..] if *byte == b'\\' => hex(digits, 8),
            _ => None,
        };
        let (char, tail) = escaped.unwrap_or((char::from(*byte), tail));
        text.push(char);
        rest = tail;
    }
    text
}

fn hex(digits: &[u8], len: usize) -> Option<(char, &[u8])> {
    let (digits, rest) = digits.split_at_checked(len)?;
    let code = u32::from_str_radix(str::from_utf8(digits).ok()?, 16).ok()?;
    Some((char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER), rest))
}
