//! Reads JSON token by token into the same arena as pickles, so events are packed as they arrive.
//!
//! Written by hand: `serde_json` with `DeserializeSeed` takes 6.7 s of CPU for 1 GiB of events
//! against 8.4 s here (with stacks 8.6 against 8.3), but it holds a string of any length (1.1 GB of
//! memory against 0.1 GB for a string of 1 GiB) and refuses NaN and Infinity, which Python writes.
//!
//! Nothing recurses, at any depth of nesting. Values of unknown keys are checked but not kept. JSON
//! has no references, so every event repeats its frames; their slots in the arena are reused at
//! once.

mod scalar;

use super::detect::BOM;
use super::python::arena::Arena;
use super::python::value::{Value, name_of};
use super::source::{CHUNK, Source};
use crate::model::error::{Format, TraceError};
use crate::model::names::Name;

/// Reads a JSON text.
#[derive(Debug)]
pub(crate) struct Reader<'s, 'r> {
    source: &'s mut Source<'r>,
    arena: Arena,
    /// The values and keys of the open lists and dicts.
    stack: Vec<Value>,
    open: Vec<Open>,
    /// Values are skipped while at least this many lists and dicts are open.
    skip_from: usize,
    /// A string or number that has escapes or crosses the end of the source's buffer.
    scratch: Vec<u8>,
    /// The offset of the next check of the memory limit.
    next_check: u64,
}

/// A list or dict that is not closed yet.
#[derive(Clone, Copy, Debug)]
struct Open {
    kind: Kind,
    /// The start of its values on the stack.
    base: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Dict,
    List,
    /// A list of events, with its number in the arena.
    Events(u32),
}

/// The tokens that can come next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    Value,
    /// A list has just been opened.
    ValueOrEnd,
    Key,
    /// A dict has just been opened.
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

    /// Reads the text to its end. Returns its value and the arena of the value.
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

    /// Consumes white space and the byte after it. Returns the byte, `None` at the end of the file.
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
                // The key determines whether the text is kept.
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
            // Python writes these, though JSON does not allow them.
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

    /// Reads a key and its colon.
    #[inline]
    fn key(&mut self) -> Result<Next, TraceError> {
        if self.skip_from < self.open.len() {
            self.skip_text()?;
        } else {
            // The value of the previous key in this dict has ended.
            self.skip_from = usize::MAX;
            let key = self.text()?;
            self.stack.push(Value::Str(key));
            if name_of(Value::Str(key)).is_none() {
                self.skip_from = self.open.len();
            }
        }
        match self.token()? {
            Some(b':') => Ok(Next::Value),
            other => Err(self.broken("a colon after the key", found(other))),
        }
    }

    /// Adds a complete value to the innermost list or dict.
    #[inline]
    fn put(&mut self, value: Value) -> Result<Next, TraceError> {
        let depth = self.open.len();
        if depth > self.skip_from {
            return Ok(Next::CommaOrEnd);
        }
        if depth == self.skip_from {
            self.skip_from = usize::MAX;
            // Numbers are kept under any key, because some dicts have numbers as keys.
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

    /// Closes the innermost list or dict.
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

    /// Returns whether the list with its values from `base` on is a pool, which is a tuple in
    /// pickles.
    fn is_pool(&self, base: usize) -> bool {
        let in_dict = |outer: &Open| outer.kind == Kind::Dict;
        self.open.last().is_some_and(in_dict)
            && base.checked_sub(1).is_some_and(|key| {
                matches!(name_of(self.stack[key]), Some(Name::PoolId | Name::SegmentPoolId))
            })
    }

    /// Reads the rest of a word such as `true`.
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

/// Describes a byte of the file, for messages.
fn found(byte: Option<u8>) -> String {
    match byte {
        None => "the end of the file".to_owned(),
        Some(byte @ b' '..=b'~') => format!("`{}`", char::from(byte)),
        Some(byte) => format!("the byte {byte:#04x}"),
    }
}

#[cfg(test)]
mod tests;
