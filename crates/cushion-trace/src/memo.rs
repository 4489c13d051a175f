//! A pickle's memo: the value that each number stands for.
//!
//! Python numbers every str, tuple, list and dict it writes, so a gigabyte has twenty million
//! entries or more, nearly all of events that have long moved into their list. An entry is a code
//! of four bytes, and a run of entries that are old enough is packed into one byte each, or into
//! nothing where all are the same.

use std::collections::HashMap;

use crate::stacks::{FrameId, StackId};
use crate::value::{StrId, Value};

/// Entries packed together.
const RUN: usize = 4096;
/// Runs this far behind are packed: Python fills a list in batches of a thousand, so by then an
/// event's entry has had its last change.
const BEHIND: usize = 4;

/// What one entry of the memo stands for: three bits of kind, 29 bits of number.
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
    /// One of the table of values that have no code, or one of the two below.
    pub(super) const OTHER: u32 = 7;
}

impl Code {
    /// An event that has moved into its list.
    pub(crate) const GONE: Self = Self::new(kind::OTHER, LAST);
    /// Something that was passed over, and may be named again wherever it is passed over again.
    pub(crate) const SPENT: Self = Self::new(kind::OTHER, LAST - 1);

    const fn new(kind: u32, number: u32) -> Self {
        Self(kind << NUMBER_BITS | number)
    }

    /// The code of a value, if it has one.
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
    /// The first [`RUN`] entries, in which the keys are: they are asked for all the time.
    first: Vec<Code>,
    /// The entries from there on: writers count up, so these are all of them.
    runs: Vec<Run>,
    /// How many entries `first` and `runs` have.
    len: usize,
    /// Values that have no code: numbers, which no writer puts into a memo.
    others: Vec<Value>,
    /// Entries far ahead, which only a hostile file has: no array is made that long.
    sparse: HashMap<u64, Value>,
    /// Bytes that `runs` holds.
    held: usize,
}

/// [`RUN`] entries.
#[derive(Debug)]
enum Run {
    Wide(Box<[Code]>),
    Few { palette: Box<[Code]>, entries: Box<[u8]> },
    All(Code),
}

/// What an entry holds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Entry {
    Value(Value),
    /// An event that has moved into its list.
    Gone,
    /// Nothing was ever put there.
    Missing,
}

impl Memo {
    /// The number MEMOIZE gives next.
    #[inline]
    pub(crate) fn len(&self) -> u64 {
        (self.len + self.sparse.len()) as u64
    }

    /// The string of an entry among the first ones.
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

    /// Puts a value in. `false` if its entry cannot be changed later on: it has no code, or lies
    /// outside of the array.
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

    /// Lets an entry stand for something else, if it still stands for `before`.
    #[inline]
    pub(crate) fn change(&mut self, index: u32, before: Value, after: Code) {
        let index = index as usize;
        if index < self.len && Some(self.code(index)) == Code::of(before) {
            self.set(index, after);
        }
    }

    /// About how many bytes it holds.
    pub(crate) fn held(&self) -> usize {
        let first = self.first.len() * size_of::<Code>();
        self.held + first + size_of::<Value>() * (self.others.len() + 3 * self.sparse.len())
    }

    fn other(&mut self, value: Value) -> Code {
        // A table that long is far over any memory limit; what does not fit is passed over.
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
        let Some(later) = index.checked_sub(RUN) else { return self.first[index] };
        let place = later % RUN;
        match &self.runs[later / RUN] {
            Run::Wide(entries) => entries[place],
            Run::Few { palette, entries } => palette[usize::from(entries[place])],
            Run::All(code) => *code,
        }
    }

    #[inline]
    fn push(&mut self, code: Code) {
        if self.len < RUN {
            self.first.push(code);
        } else {
            if self.len.is_multiple_of(RUN) {
                self.start_run();
            }
            if let Some(Run::Wide(entries)) = self.runs.last_mut() {
                entries[self.len % RUN] = code;
            }
        }
        self.len += 1;
    }

    fn start_run(&mut self) {
        if let Some(old) = self.runs.len().checked_sub(BEHIND) {
            self.held -= self.runs[old].held();
            self.runs[old].pack();
            self.held += self.runs[old].held();
        }
        self.runs.push(Run::Wide(vec![Code::SPENT; RUN].into_boxed_slice()));
        self.held += self.runs.last().map_or(0, Run::held);
    }

    #[inline]
    fn set(&mut self, index: usize, code: Code) {
        let Some(later) = index.checked_sub(RUN) else {
            self.first[index] = code;
            return;
        };
        let (run, place) = (&mut self.runs[later / RUN], later % RUN);
        match run {
            Run::Wide(entries) => entries[place] = code,
            Run::All(all) if *all == code => {}
            _ => {
                self.held -= run.held();
                run.set_packed(place, code);
                self.held += run.held();
            }
        }
    }
}

impl Run {
    fn held(&self) -> usize {
        size_of::<Self>()
            + match self {
                Self::Wide(_) => RUN * size_of::<Code>(),
                Self::Few { palette, .. } => RUN + size_of_val(&palette[..]),
                Self::All(_) => 0,
            }
    }

    /// As few bytes as its variety allows.
    fn pack(&mut self) {
        let Self::Wide(codes) = self else { return };
        if codes.iter().all(|code| *code == codes[0]) {
            *self = Self::All(codes[0]);
            return;
        }
        // A small hash table of the codes met. At most 256 are in it, so a search has an end
        // however they were chosen.
        let mut slots = [None::<(Code, u8)>; 1024];
        let mut palette = Vec::new();
        let mut entries = Vec::with_capacity(RUN);
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

    /// A change this late is rare.
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
            Self::All(all) => vec![*all; RUN].into(),
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
    fn entries_come_back_however_old() {
        // Runs of one value, of a few, and of many; then changes in each of them.
        let mut memo = Memo::default();
        let of = |index: usize| match index / RUN % 3 {
            0 => 7,
            1 => index % 5,
            _ => index,
        };
        let count = 12 * RUN;
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
    fn an_entry_changes_only_while_it_stands_for_the_same() {
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
    fn values_without_a_code_are_kept_too() {
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
