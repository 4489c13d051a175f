//! A pickle's memo: the value of each number.
//!
//! Python numbers every str, tuple, list and dict it writes. A gigabyte has twenty million entries
//! or more, nearly all of events that have moved into their list. An entry is a code of four bytes.
//! A chunk of old entries is packed into one byte each, or into nothing if all are equal.

use std::collections::HashMap;

use super::value::{StrId, Value};
use crate::model::stacks::{FrameId, StackId};

/// The number of entries packed together.
const CHUNK: usize = 4096;
/// Chunks this far behind the last are packed. Python fills a list in batches of a thousand, so by
/// then the entries of events do not change any more.
const BEHIND: usize = 4;

/// One entry of the memo: three bits of kind, 29 bits of number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Code(u32);

const NUMBER_BITS: u32 = 29;
const LAST: u32 = (1 << NUMBER_BITS) - 1;

mod kind {
    pub(super) const STR: u32 = 0;
    pub(super) const LIST: u32 = 1;
    pub(super) const TUPLE: u32 = 2;
    pub(super) const DICT: u32 = 3;
    pub(super) const PAIR: u32 = 4;
    pub(super) const STACK: u32 = 5;
    pub(super) const FRAME: u32 = 6;
    /// The index of a value without a code, or one of the two constants below.
    pub(super) const OTHER: u32 = 7;
}

impl Code {
    /// An event that has moved into its list.
    pub(crate) const GONE: Self = Self::new(kind::OTHER, LAST);
    /// A value that was skipped. The file can refer to it where it is skipped again.
    pub(crate) const SPENT: Self = Self::new(kind::OTHER, LAST - 1);

    const fn new(kind: u32, number: u32) -> Self {
        Self(kind << NUMBER_BITS | number)
    }

    /// Returns the code of a value, if it has one.
    #[inline]
    pub(crate) fn of(value: Value) -> Option<Self> {
        let (kind, number) = match value {
            Value::Str(StrId(id)) => (kind::STR, id),
            Value::List(id) => (kind::LIST, id),
            Value::Tuple(id) => (kind::TUPLE, id),
            Value::Dict(id) => (kind::DICT, id),
            Value::Pair(id) => (kind::PAIR, id),
            Value::Stack(id) => (kind::STACK, id.map_or(0, StackId::number)),
            Value::Frame(FrameId(id)) => (kind::FRAME, id),
            Value::Spent => return Some(Self::SPENT),
            _ => return None,
        };
        (number <= LAST).then(|| Self::new(kind, number))
    }
}

/// The memo.
#[derive(Debug, Default)]
pub(crate) struct Memo {
    /// The first [`CHUNK`] entries. The keys are here, and are read all the time.
    first: Vec<Code>,
    /// The later entries. Writers count up, so there are no gaps.
    chunks: Vec<Chunk>,
    /// The number of entries in `first` and `chunks`.
    len: usize,
    /// Values without a code: numbers, which no known writer puts into a memo.
    others: Vec<Value>,
    /// Entries with a gap before them. Only a hostile file has these, and no array is made that
    /// long.
    sparse: HashMap<u64, Value>,
    /// The bytes in `chunks`.
    held: usize,
}

/// [`CHUNK`] entries.
#[derive(Debug)]
enum Chunk {
    Wide(Box<[Code]>),
    Few { palette: Box<[Code]>, entries: Box<[u8]> },
    All(Code),
}

/// The value of an entry.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Entry {
    Value(Value),
    /// An event that has moved into its list.
    Gone,
    /// The entry was never written.
    Missing,
}

impl Memo {
    /// Returns the number that the next MEMOIZE assigns.
    #[inline]
    pub(crate) fn len(&self) -> u64 {
        (self.len + self.sparse.len()) as u64
    }

    /// Returns the string of an entry among the first ones.
    #[inline]
    pub(crate) fn get_key(&self, index: u64) -> Option<StrId> {
        let code = *self.first.get(usize::try_from(index).ok()?)?;
        (code.0 >> NUMBER_BITS == kind::STR).then_some(StrId(code.0 & LAST))
    }

    pub(crate) fn get(&self, index: u64) -> Entry {
        match usize::try_from(index) {
            Ok(index) if index < self.len => self.decode(self.code(index)),
            _ => self.sparse.get(&index).map_or(Entry::Missing, |&value| Entry::Value(value)),
        }
    }

    /// Stores a value. Returns whether [`Self::change`] can change the entry later: it cannot if
    /// the value has no code or the entry is in `sparse`.
    #[inline]
    pub(crate) fn put(&mut self, index: u64, value: Value) -> bool {
        let place = usize::try_from(index).unwrap_or(usize::MAX);
        if place > self.len || (place == self.len && !self.sparse.is_empty()) {
            self.sparse.insert(index, value);
            return false;
        }
        let code = Code::of(value);
        let entry = code.unwrap_or_else(|| self.other(value));
        if place == self.len {
            self.push(entry);
        } else {
            self.set(place, entry);
        }
        code.is_some()
    }

    /// Changes an entry to `after`, if its value is still `before`.
    #[inline]
    pub(crate) fn change(&mut self, index: u32, before: Value, after: Code) {
        let index = index as usize;
        if index < self.len && Some(self.code(index)) == Code::of(before) {
            self.set(index, after);
        }
    }

    /// Estimates the memory in use, in bytes.
    pub(crate) fn held(&self) -> usize {
        let first = self.first.len() * size_of::<Code>();
        self.held + first + size_of::<Value>() * (self.others.len() + 3 * self.sparse.len())
    }

    fn other(&mut self, value: Value) -> Code {
        // A table that long exceeds any memory limit. Values that do not fit are dropped.
        let number = u32::try_from(self.others.len()).unwrap_or(LAST).min(LAST - 1);
        if number < LAST - 1 {
            self.others.push(value);
        }
        Code::new(kind::OTHER, number)
    }

    #[inline]
    fn decode(&self, code: Code) -> Entry {
        let number = code.0 & LAST;
        Entry::Value(match code.0 >> NUMBER_BITS {
            kind::STR => Value::Str(StrId(number)),
            kind::LIST => Value::List(number),
            kind::TUPLE => Value::Tuple(number),
            kind::DICT => Value::Dict(number),
            kind::PAIR => Value::Pair(number),
            kind::STACK => Value::Stack(StackId::of_number(number)),
            kind::FRAME => Value::Frame(FrameId(number)),
            _ if code == Code::GONE => return Entry::Gone,
            _ => self.others.get(number as usize).copied().unwrap_or(Value::Spent),
        })
    }

    #[inline]
    fn code(&self, index: usize) -> Code {
        let Some(later) = index.checked_sub(CHUNK) else { return self.first[index] };
        let place = later % CHUNK;
        match &self.chunks[later / CHUNK] {
            Chunk::Wide(entries) => entries[place],
            Chunk::Few { palette, entries } => palette[usize::from(entries[place])],
            Chunk::All(code) => *code,
        }
    }

    #[inline]
    fn push(&mut self, code: Code) {
        if self.len < CHUNK {
            self.first.push(code);
        } else {
            if self.len.is_multiple_of(CHUNK) {
                self.start_chunk();
            }
            if let Some(Chunk::Wide(entries)) = self.chunks.last_mut() {
                entries[self.len % CHUNK] = code;
            }
        }
        self.len += 1;
    }

    fn start_chunk(&mut self) {
        if let Some(old) = self.chunks.len().checked_sub(BEHIND) {
            self.held -= self.chunks[old].held();
            self.chunks[old].pack();
            self.held += self.chunks[old].held();
        }
        self.chunks.push(Chunk::Wide(vec![Code::SPENT; CHUNK].into_boxed_slice()));
        self.held += self.chunks.last().map_or(0, Chunk::held);
    }

    #[inline]
    fn set(&mut self, index: usize, code: Code) {
        let Some(later) = index.checked_sub(CHUNK) else {
            self.first[index] = code;
            return;
        };
        let (chunk, place) = (&mut self.chunks[later / CHUNK], later % CHUNK);
        match chunk {
            Chunk::Wide(entries) => entries[place] = code,
            Chunk::All(all) if *all == code => {}
            _ => {
                self.held -= chunk.held();
                chunk.set_packed(place, code);
                self.held += chunk.held();
            }
        }
    }
}

impl Chunk {
    fn held(&self) -> usize {
        size_of::<Self>()
            + match self {
                Self::Wide(_) => CHUNK * size_of::<Code>(),
                Self::Few { palette, .. } => CHUNK + size_of_val(&palette[..]),
                Self::All(_) => 0,
            }
    }

    /// Packs the entries into as few bytes as their variety allows.
    fn pack(&mut self) {
        let Self::Wide(codes) = self else { return };
        if codes.iter().all(|code| *code == codes[0]) {
            *self = Self::All(codes[0]);
            return;
        }
        // A small hash table of the codes so far. It has at most 256 entries, so every search ends,
        // even with hostile codes.
        let mut slots = [None::<(Code, u8)>; 1024];
        let mut palette = Vec::new();
        let mut entries = Vec::with_capacity(CHUNK);
        for &code in codes.iter() {
            let mut slot = (code.0.wrapping_mul(0x9e37_79b1) >> 22) as usize;
            let entry = loop {
                match slots[slot] {
                    Some((known, entry)) if known == code => break entry,
                    Some(_) => slot = (slot + 1) % slots.len(),
                    None => {
                        let Ok(entry) = u8::try_from(palette.len()) else { return };
                        palette.push(code);
                        slots[slot] = Some((code, entry));
                        break entry;
                    }
                }
            };
            entries.push(entry);
        }
        *self = Self::Few { palette: palette.into(), entries: entries.into() };
    }

    /// Changes an entry of a packed chunk, which is rare.
    #[cold]
    fn set_packed(&mut self, place: usize, code: Code) {
        let mut wide: Box<[Code]> = match self {
            Self::Few { palette, entries } => {
                if let Some(entry) = palette.iter().position(|known| *known == code)
                    && let Ok(entry) = u8::try_from(entry)
                {
                    entries[place] = entry;
                    return;
                }
                entries.iter().map(|&entry| palette[usize::from(entry)]).collect()
            }
            Self::All(all) => vec![*all; CHUNK].into(),
            Self::Wide(codes) => std::mem::take(codes),
        };
        wide[place] = code;
        *self = Self::Wide(wide);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(n: u32) -> Value {
        Value::Str(StrId(n))
    }

    #[test]
    fn entries_of_any_age_are_read_back() {
        // Chunks of one value, of a few, and of many; then changes in each of them.
        let mut memo = Memo::default();
        let of = |index: usize| match index / CHUNK % 3 {
            0 => 7,
            1 => index % 5,
            _ => index,
        };
        let count = 12 * CHUNK;
        for index in 0..count {
            let n = u32::try_from(of(index)).unwrap();
            assert!(memo.put(memo.len(), value(n)), "{index}");
        }
        assert!(memo.held() < count * 3, "{}", memo.held());
        let check = |memo: &Memo, index: usize, n: usize| {
            let n = u32::try_from(n).unwrap();
            assert_eq!(memo.get(index as u64), Entry::Value(value(n)), "{index}");
        };
        (0..count).for_each(|index| check(&memo, index, of(index)));
        for index in (0..count).step_by(1111) {
            assert!(memo.put(index as u64, value(500)));
        }
        for index in 0..count {
            check(&memo, index, if index % 1111 == 0 { 500 } else { of(index) });
        }
    }

    #[test]
    fn an_entry_changes_only_if_its_value_is_the_expected_one() {
        let mut memo = Memo::default();
        memo.put(0, Value::Dict(3));
        memo.change(0, Value::Dict(4), Code::GONE);
        assert_eq!(memo.get(0), Entry::Value(Value::Dict(3)));
        memo.change(0, Value::Dict(3), Code::GONE);
        assert_eq!(memo.get(0), Entry::Gone);
        memo.change(9, Value::Dict(3), Code::GONE);
        assert_eq!(memo.get(9), Entry::Missing);
    }

    #[test]
    fn values_without_a_code_are_stored() {
        let mut memo = Memo::default();
        let odd = [Value::Int(-5), Value::Float(0.5), Value::None, Value::Dict(u32::MAX)];
        for (index, value) in (0..).zip(odd) {
            assert!(!memo.put(index, value));
        }
        for (index, value) in (0..).zip(odd) {
            assert_eq!(memo.get(index), Entry::Value(value));
        }
    }
}
