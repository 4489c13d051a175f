//! The values that a file has built so far: tables of strings, lists and dicts, and handles to
//! them. The pickle and the JSON reader share it.
//!
//! A dict with an `action` becomes an event, and a list of frames a stack, as early as possible, so
//! a big trace is never held as Python objects. Their slots in the tables are then reused, unless
//! the file can still refer to them.

use std::mem;
use std::sync::Arc;

use super::draft::Draft;
use super::interned::{Pairs, Strings};
use super::memo::{Code, Entry, Memo};
use super::value::{StrId, Value, name_of};
use crate::model::error::{Format, TraceError};
use crate::model::event::Event;
use crate::model::events::Events;
use crate::model::names::Name;
use crate::model::stacks::{Frame, FrameId, StackId, StackTable};

/// The contents of a list, or of a tuple that is not a [`Value::Pair`].
#[derive(Debug)]
pub(crate) enum List {
    Values(Vec<Value>),
    /// Events in their final form. A list whose first item is an event has only events.
    Events(Box<Events>),
    /// Frames, stored in the table of stacks.
    Stack(Option<StackId>),
    /// The contents have moved into the snapshot.
    Gone,
}

/// The contents of a dict.
#[derive(Debug)]
pub(crate) enum Dict {
    Items(Vec<[Value; 2]>),
    Event(Draft),
    /// A frame, stored in the table of stacks.
    Frame(FrameId),
    /// The contents have moved into the snapshot.
    Gone,
}

/// The memo entry that refers to a slot. The value on its way from the reader's stack into a list
/// or dict does not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Referrer(u32);

impl Referrer {
    const NOTHING: Self = Self(u32::MAX);
    /// Several references, or unknown ones: the slot is never reused.
    const SEVERAL: Self = Self(u32::MAX - 1);

    /// Returns the memo entry that is the only reference.
    fn entry(self) -> Option<u32> {
        (self != Self::NOTHING).then_some(self.0)
    }
}

/// A slot in a table of lists or dicts.
#[derive(Debug)]
pub(crate) struct Slot<T> {
    pub(crate) holds: T,
    referrer: Referrer,
}

/// All values that the file has built.
#[derive(Debug)]
pub(crate) struct Arena {
    /// For messages.
    format: Format,
    strings: Strings,
    pub(crate) lists: Vec<Slot<List>>,
    pub(crate) dicts: Vec<Slot<Dict>>,
    /// Slots that can be reused.
    free_lists: Vec<u32>,
    free_dicts: Vec<u32>,
    memo: Memo,
    pairs: Pairs,
    stacks: StackTable,
    /// The estimated memory in use, in bytes.
    held: usize,
    /// The offset of the value being read, for messages.
    pub(crate) at: u64,
}

impl Arena {
    pub(crate) fn new(format: Format) -> Self {
        Self {
            format,
            strings: Strings::new(),
            lists: Vec::new(),
            dicts: Vec::new(),
            free_lists: Vec::new(),
            free_dicts: Vec::new(),
            memo: Memo::default(),
            pairs: Pairs::default(),
            stacks: StackTable::default(),
            held: 0,
            at: 0,
        }
    }

    pub(crate) fn text(&self, id: StrId) -> &Arc<str> {
        self.strings.text(id)
    }

    /// Returns the number of a string.
    pub(crate) fn intern(&mut self, text: &str) -> Result<StrId, TraceError> {
        if let Some(id) = self.strings.get(text) {
            return Ok(id);
        }
        let id = self.strings.insert(text).ok_or_else(|| self.too_many())?;
        self.held += text.len() + 80;
        Ok(id)
    }

    /// Returns the next number in a table of `len` entries.
    fn number(&self, len: usize) -> Result<u32, TraceError> {
        u32::try_from(len).map_err(|_| self.too_many())
    }

    pub(crate) fn new_list(&mut self, values: Vec<Value>) -> Result<u32, TraceError> {
        self.held += values.capacity() * size_of::<Value>();
        let holds = List::Values(values);
        if let Some(id) = self.free_lists.pop() {
            self.lists[id as usize].holds = holds;
            return Ok(id);
        }
        let id = self.number(self.lists.len())?;
        self.held += size_of::<Slot<List>>();
        self.lists.push(Slot { holds, referrer: Referrer::NOTHING });
        Ok(id)
    }

    pub(crate) fn new_tuple(&mut self, values: &[Value]) -> Result<Value, TraceError> {
        if let [a, b] = values
            && let (Some(a), Some(b)) = (a.bits(), b.bits())
        {
            return self.new_pair((a, b));
        }
        self.new_list(values.to_vec()).map(Value::Tuple)
    }

    fn new_pair(&mut self, pair: (u64, u64)) -> Result<Value, TraceError> {
        if let Some(id) = self.pairs.get(pair) {
            return Ok(Value::Pair(id));
        }
        let id = self.pairs.insert(pair).ok_or_else(|| self.too_many())?;
        self.held += 64;
        Ok(Value::Pair(id))
    }

    pub(crate) fn new_dict(&mut self) -> Result<u32, TraceError> {
        if let Some(id) = self.free_dicts.pop() {
            return Ok(id);
        }
        let id = self.number(self.dicts.len())?;
        self.held += size_of::<Slot<Dict>>();
        let holds = Dict::Items(Vec::new());
        self.dicts.push(Slot { holds, referrer: Referrer::NOTHING });
        Ok(id)
    }

    /// Returns the number that the next memo entry gets.
    #[inline]
    pub(crate) fn memo_len(&self) -> u64 {
        self.memo.len()
    }

    /// Puts a value into the memo.
    #[inline]
    pub(crate) fn memoize(&mut self, index: u64, value: Value) {
        let changeable = self.memo.put(index, value);
        let referrer = match value {
            Value::Dict(id) => &mut self.dicts[id as usize].referrer,
            Value::List(id) | Value::Tuple(id) => &mut self.lists[id as usize].referrer,
            _ => return,
        };
        *referrer = match u32::try_from(index) {
            Ok(index)
                if changeable && index < Referrer::SEVERAL.0 && *referrer == Referrer::NOTHING =>
            {
                Referrer(index)
            }
            _ => Referrer::SEVERAL,
        };
    }

    /// Returns the value of a memo entry.
    #[inline]
    pub(crate) fn recall(&mut self, index: u64) -> Result<Value, TraceError> {
        match self.memo.get_key(index) {
            Some(key) => Ok(Value::Str(key)),
            None => self.recall_any(index),
        }
    }

    fn recall_any(&mut self, index: u64) -> Result<Value, TraceError> {
        match self.memo.get(index) {
            Entry::Value(value) => {
                self.share(value);
                Ok(value)
            }
            // The error names the position of the reference, not that of the use.
            Entry::Gone => Err(self.gone()),
            Entry::Missing => {
                let found = format!("number {index}, which was never written");
                Err(self.broken("a memo entry", found))
            }
        }
    }

    /// Marks a value as referred to more than once.
    #[inline]
    pub(crate) fn share(&mut self, value: Value) {
        match value {
            Value::Dict(id) => self.dicts[id as usize].referrer = Referrer::SEVERAL,
            Value::List(id) | Value::Tuple(id) => {
                self.lists[id as usize].referrer = Referrer::SEVERAL;
            }
            _ => {}
        }
    }

    /// Releases a list that was read. With at most one reference its slot is reused and its memo
    /// entry becomes `code`; with several, its contents become `after`.
    #[inline]
    fn release_list(&mut self, value: Value, after: List, code: Option<Code>) {
        let (Value::List(id) | Value::Tuple(id)) = value else { return };
        let slot = &mut self.lists[id as usize];
        match (slot.referrer, code) {
            (Referrer::SEVERAL, _) | (_, None) => slot.holds = after,
            (referrer, Some(code)) => {
                if let Some(entry) = referrer.entry() {
                    self.memo.change(entry, value, code);
                }
                slot.referrer = Referrer::NOTHING;
                slot.holds = List::Gone;
                self.free_lists.push(id);
            }
        }
    }

    /// Releases a dict that was read, like [`Self::release_list`].
    #[inline]
    fn release_dict(&mut self, id: u32, after: Dict, code: Option<Code>) {
        let slot = &mut self.dicts[id as usize];
        match (slot.referrer, code) {
            (Referrer::SEVERAL, _) | (_, None) => slot.holds = after,
            (referrer, Some(code)) => {
                if let Some(entry) = referrer.entry() {
                    self.memo.change(entry, Value::Dict(id), code);
                }
                slot.referrer = Referrer::NOTHING;
                slot.holds = Dict::Items(Vec::new());
                self.free_dicts.push(id);
            }
        }
    }

    /// Releases a skipped value and all values inside it that have no other reference. Does not
    /// recurse.
    pub(crate) fn discard(&mut self, value: Value) {
        if !matches!(value, Value::List(_) | Value::Tuple(_) | Value::Dict(_)) {
            return;
        }
        let mut left = vec![value];
        while let Some(value) = left.pop() {
            match value {
                Value::List(id) | Value::Tuple(id) => {
                    let slot = &mut self.lists[id as usize];
                    if slot.referrer != Referrer::SEVERAL
                        && let List::Values(values) = &mut slot.holds
                    {
                        let values = mem::take(values);
                        self.held -= values.capacity() * size_of::<Value>();
                        left.extend(values);
                        self.release_list(value, List::Gone, Some(Code::SPENT));
                    }
                }
                Value::Dict(id) => {
                    let slot = &mut self.dicts[id as usize];
                    if slot.referrer != Referrer::SEVERAL
                        && let Dict::Items(items) = &mut slot.holds
                    {
                        let items = mem::take(items);
                        self.held -= items.capacity() * size_of::<[Value; 2]>();
                        left.extend(items.into_iter().flatten());
                        self.release_dict(id, Dict::Gone, Some(Code::SPENT));
                    }
                }
                _ => {}
            }
        }
    }

    /// Adds items to a dict. A dict with an `action` becomes an event.
    pub(crate) fn extend(&mut self, id: u32, items: &[[Value; 2]]) -> Result<(), TraceError> {
        let (mut draft, earlier) = match &mut self.dicts[id as usize].holds {
            Dict::Event(draft) => (*draft, Vec::new()),
            Dict::Items(all)
                if items.iter().any(|[key, _]| name_of(*key) == Some(Name::Action)) =>
            {
                (Draft::EMPTY, mem::take(all))
            }
            Dict::Items(_) => return self.extend_plain(id, items),
            Dict::Frame(_) | Dict::Gone => return Err(self.gone()),
        };
        for &[key, value] in earlier.iter().chain(items) {
            draft.set(key, value, self)?;
        }
        self.held -= earlier.capacity() * size_of::<[Value; 2]>();
        self.dicts[id as usize].holds = Dict::Event(draft);
        Ok(())
    }

    fn extend_plain(&mut self, id: u32, items: &[[Value; 2]]) -> Result<(), TraceError> {
        let slot = &mut self.dicts[id as usize].holds;
        let Dict::Items(mut all) = mem::replace(slot, Dict::Gone) else {
            return Err(self.gone());
        };
        let before = all.capacity();
        for &[key, value] in items {
            // A block's frames are far smaller as a stack.
            let value = match name_of(key) {
                Some(Name::Frames) if self.looks_like_frames(value) => {
                    Value::Stack(self.stack(value)?)
                }
                _ => value,
            };
            all.push([key, value]);
        }
        self.held += (all.capacity() - before) * size_of::<[Value; 2]>();
        self.dicts[id as usize].holds = Dict::Items(all);
        Ok(())
    }

    fn looks_like_frames(&self, value: Value) -> bool {
        let Value::List(id) = value else { return false };
        let List::Values(values) = &self.lists[id as usize].holds else { return false };
        values.iter().all(|value| match value {
            Value::Frame(_) => true,
            Value::Dict(id) => {
                matches!(self.dicts[*id as usize].holds, Dict::Items(_) | Dict::Frame(_))
            }
            _ => false,
        })
    }

    pub(crate) fn is_event(&self, value: Value) -> bool {
        matches!(value, Value::Dict(id) if matches!(self.dicts[id as usize].holds, Dict::Event(_)))
    }

    /// Appends values to a list. Events move into the list, and their dicts are released.
    pub(crate) fn append(&mut self, list: u32, values: &[Value]) -> Result<(), TraceError> {
        let Some(&first) = values.first() else { return Ok(()) };
        let events_come = self.is_event(first);
        // The list leaves the arena while events move from the arena into it.
        let mut events = match mem::replace(&mut self.lists[list as usize].holds, List::Gone) {
            List::Events(events) => events,
            List::Values(all) if all.is_empty() && events_come => Box::default(),
            List::Values(mut all) => {
                let before = all.capacity();
                all.extend_from_slice(values);
                self.held += (all.capacity() - before) * size_of::<Value>();
                self.lists[list as usize].holds = List::Values(all);
                return Ok(());
            }
            List::Stack(_) | List::Gone => return Err(self.gone()),
        };
        let before = events.held();
        for &value in values {
            events.push(self.take_event(value)?);
        }
        self.held += events.held() - before;
        self.lists[list as usize].holds = List::Events(events);
        Ok(())
    }

    fn take_event(&mut self, value: Value) -> Result<Event, TraceError> {
        let Value::Dict(id) = value else {
            let found = format!("{} among events", value.kind());
            return Err(self.broken("a dict with an `action`", found));
        };
        let event = match &self.dicts[id as usize].holds {
            Dict::Event(draft) => draft.finish(self.at)?,
            Dict::Gone => return Err(self.gone()),
            _ => {
                let found = "a dict without one among events";
                return Err(self.broken("a dict with an `action`", found));
            }
        };
        self.release_dict(id, Dict::Gone, Some(Code::GONE));
        Ok(event)
    }

    /// Returns the two integers of a tuple or list of two.
    pub(crate) fn pair(&self, value: Value) -> Option<(u64, u64)> {
        match value {
            Value::Pair(id) => self.pairs.pair(id),
            Value::List(id) | Value::Tuple(id) => match self.lists.get(id as usize)?.holds {
                List::Values(ref values) => match values[..] {
                    [a, b] => a.bits().zip(b.bits()),
                    _ => None,
                },
                _ => None,
            },
            _ => None,
        }
    }

    /// Like [`Self::pair`], and releases a list.
    pub(crate) fn take_pair(&mut self, value: Value) -> Result<Option<(u64, u64)>, TraceError> {
        let Some(pair) = self.pair(value) else { return Ok(None) };
        if let Value::List(id) = value
            && self.lists[id as usize].referrer != Referrer::SEVERAL
        {
            let list = self.take_list(id);
            if let List::Values(values) = &list {
                self.held -= values.capacity() * size_of::<Value>();
            }
            let code = Code::of(self.new_pair(pair)?);
            self.release_list(value, list, code);
        }
        Ok(Some(pair))
    }

    /// Moves a list's contents out. The list is gone afterwards, unless it was empty.
    pub(crate) fn take_list(&mut self, id: u32) -> List {
        let list = &mut self.lists[id as usize].holds;
        match list {
            List::Values(values) if values.is_empty() => List::Values(Vec::new()),
            _ => mem::replace(list, List::Gone),
        }
    }

    /// Moves a plain dict's items out; `None` if they are gone or the dict is an event or a frame.
    pub(crate) fn take_items(&mut self, id: u32) -> Option<Vec<[Value; 2]>> {
        let dict = &mut self.dicts[id as usize].holds;
        match mem::replace(dict, Dict::Gone) {
            Dict::Items(items) => Some(items),
            other => {
                *dict = other;
                None
            }
        }
    }

    /// Returns the stack of a list of frame dicts, and releases the list.
    pub(crate) fn stack(&mut self, frames: Value) -> Result<Option<StackId>, TraceError> {
        let list = match frames {
            Value::Stack(stack) => return Ok(stack),
            Value::List(list) | Value::Tuple(list) => list,
            _ => return Err(self.not_frames("`frames`", "a list", frames)),
        };
        let values = match mem::replace(&mut self.lists[list as usize].holds, List::Gone) {
            List::Values(values) => values,
            List::Stack(stack) => {
                self.lists[list as usize].holds = List::Stack(stack);
                return Ok(stack);
            }
            List::Events(_) | List::Gone => return Err(self.gone()),
        };
        let mut stack = None;
        // Outermost first: stacks with the same callers share them.
        for (depth, &value) in values.iter().rev().enumerate() {
            let frame = self.frame(value)?;
            let found = self.stacks.push(depth, stack, frame);
            stack = Some(found.ok_or_else(|| self.too_many())?);
        }
        self.held -= values.capacity() * size_of::<Value>();
        // The file can still fill an empty list that has references.
        let after = if stack.is_none() { List::Values(values) } else { List::Stack(stack) };
        self.release_list(frames, after, Code::of(Value::Stack(stack)));
        Ok(stack)
    }

    fn frame(&mut self, value: Value) -> Result<FrameId, TraceError> {
        let id = match value {
            Value::Frame(frame) => return Ok(frame),
            Value::Dict(id) => id,
            _ => return Err(self.not_frames("a frame", "a dict", value)),
        };
        let items = match &mut self.dicts[id as usize].holds {
            Dict::Frame(frame) => return Ok(*frame),
            Dict::Items(items) => mem::take(items),
            Dict::Event(_) | Dict::Gone => return Err(self.gone()),
        };
        self.held -= items.capacity() * size_of::<[Value; 2]>();
        let frame = self.frame_of(&items);
        let frame = self.stacks.intern(frame).ok_or_else(|| self.too_many())?;
        for [_, value] in items {
            self.discard(value);
        }
        self.release_dict(id, Dict::Frame(frame), Code::of(Value::Frame(frame)));
        Ok(frame)
    }

    fn frame_of(&self, items: &[[Value; 2]]) -> Frame {
        let mut frame = Frame { name: Arc::from(""), filename: Arc::from(""), line: 0 };
        for &[key, value] in items {
            match (name_of(key), value) {
                (Some(Name::Function), Value::Str(id)) => frame.name = self.text(id).clone(),
                (Some(Name::Filename), Value::Str(id)) => frame.filename = self.text(id).clone(),
                (Some(Name::Line), Value::Int(line)) => {
                    frame.line = u32::try_from(line).unwrap_or(0);
                }
                _ => {}
            }
        }
        frame
    }

    fn not_frames(&self, what: &str, expected: &str, found: Value) -> TraceError {
        let found = found.kind();
        TraceError::snapshot(self.at, format!("{what} is {found}, expected {expected}"))
    }

    /// Estimates the memory in use, in bytes.
    pub(crate) fn held(&self) -> usize {
        let free = (self.free_lists.len() + self.free_dicts.len()) * size_of::<u32>();
        self.held + free + self.memo.held() + self.stacks.held()
    }

    pub(crate) fn into_stacks(self) -> StackTable {
        self.stacks
    }

    #[cold]
    pub(crate) fn broken(&self, expected: &str, found: impl Into<String>) -> TraceError {
        TraceError::broken(self.format, self.at, expected, found)
    }

    /// Makes the error of a reference to a value that has moved into the snapshot. Python never
    /// writes such a reference in a snapshot.
    #[cold]
    fn gone(&self) -> TraceError {
        let found = "one that was already read as an event, a stack or a frame";
        self.broken("a list or dict that is still open", found)
    }

    /// Makes the error of a table with more than 2^32 entries. The default memory limit is exceeded
    /// earlier.
    #[cold]
    fn too_many(&self) -> TraceError {
        self.broken("a snapshot of a practical size", "more than 2^32 of one kind of value")
    }
}
