//! What a file has built so far: strings, lists and dicts in tables, and handles to them. Pickle and
//! JSON share it.
//!
//! Here a dict with an `action` becomes an event, and a list of frames a stack, as soon as that
//! is possible, so that a big trace is never held as Python objects. Their places in the tables are
//! then used again, unless something else in the file may still refer to them.

use std::collections::HashMap;
use std::mem;
use std::sync::Arc;

use crate::error::{Format, TraceError};
use crate::events::Events;
use crate::memo::{Code, Entry, Memo};
use crate::snapshot::{Draft, Event, Name};
use crate::stacks::{FrameId, StackId, StackTable};
use crate::value::{StrId, Value};

/// What a list, or a tuple that is not a [`Value::Pair`], holds.
#[derive(Debug)]
pub(crate) enum List {
    Values(Vec<Value>),
    /// A list whose first item was an event holds events only, in their final form.
    Events(Box<Events>),
    /// Frames that an event asked for: kept once, in the table of stacks.
    Stack(Option<StackId>),
    /// Its contents have moved into the snapshot.
    Gone,
}

/// What a dict holds.
#[derive(Debug)]
pub(crate) enum Dict {
    Items(Vec<[Value; 2]>),
    Event(Draft),
    /// A frame of some stack: kept once, in the table of stacks.
    Frame(FrameId),
    /// Its contents have moved into the snapshot.
    Gone,
}

/// What refers to a place, beside the one value that is handed from the reader's stack to a list or
/// a dict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Referrer(u32);

impl Referrer {
    const NOTHING: Self = Self(u32::MAX);
    /// More than can be told: the place is never used again.
    const SEVERAL: Self = Self(u32::MAX - 1);

    /// The only entry of the memo that does.
    fn entry(self) -> Option<u32> {
        (self != Self::NOTHING).then_some(self.0)
    }
}

/// A place in a table of lists or dicts.
#[derive(Debug)]
pub(crate) struct Place<T> {
    pub(crate) holds: T,
    referrer: Referrer,
}

/// Everything the file has built.
#[derive(Debug)]
pub(crate) struct Arena {
    /// For messages.
    format: Format,
    strings: Vec<Arc<str>>,
    // The hash maps here are std's: their keys come from the file, which may be hostile.
    string_ids: HashMap<Arc<str>, StrId>,
    pub(crate) lists: Vec<Place<List>>,
    pub(crate) dicts: Vec<Place<Dict>>,
    /// Places that may be used again.
    free_lists: Vec<u32>,
    free_dicts: Vec<u32>,
    memo: Memo,
    pairs: Vec<(u64, u64)>,
    pair_ids: HashMap<(u64, u64), u32>,
    stacks: StackTable,
    /// An estimate of the bytes held, for the memory limit.
    held: usize,
    /// The offset of what is being read, for messages.
    pub(crate) at: u64,
}

impl Arena {
    pub(crate) fn new(format: Format) -> Self {
        let mut arena = Self {
            format,
            strings: Vec::new(),
            string_ids: HashMap::new(),
            lists: Vec::new(),
            dicts: Vec::new(),
            free_lists: Vec::new(),
            free_dicts: Vec::new(),
            memo: Memo::default(),
            pairs: Vec::new(),
            pair_ids: HashMap::new(),
            stacks: StackTable::default(),
            held: 0,
            at: 0,
        };
        for (id, name) in (0..).zip(Name::ALL) {
            arena.strings.push(name.text().into());
            arena.string_ids.insert(name.text().into(), StrId(id));
        }
        arena
    }

    pub(crate) fn text(&self, id: StrId) -> &Arc<str> {
        &self.strings[id.0 as usize]
    }

    /// The string's number, if it has one.
    #[inline]
    pub(crate) fn known(&self, text: &str) -> Option<StrId> {
        self.string_ids.get(text).copied()
    }

    pub(crate) fn intern(&mut self, text: &str) -> Result<StrId, TraceError> {
        if let Some(id) = self.known(text) {
            return Ok(id);
        }
        let id = StrId(self.number(self.strings.len())?);
        let shared: Arc<str> = text.into();
        self.strings.push(Arc::clone(&shared));
        self.string_ids.insert(shared, id);
        self.held += text.len() + 80;
        Ok(id)
    }

    /// The next number in a table of `len` entries.
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
        self.held += size_of::<Place<List>>();
        self.lists.push(Place { holds, referrer: Referrer::NOTHING });
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
        // Nearly always the default pool.
        if self.pairs.first() == Some(&pair) {
            return Ok(Value::Pair(0));
        }
        if let Some(&id) = self.pair_ids.get(&pair) {
            return Ok(Value::Pair(id));
        }
        let id = self.number(self.pairs.len())?;
        self.pairs.push(pair);
        self.pair_ids.insert(pair, id);
        self.held += 64;
        Ok(Value::Pair(id))
    }

    pub(crate) fn new_dict(&mut self) -> Result<u32, TraceError> {
        if let Some(id) = self.free_dicts.pop() {
            return Ok(id);
        }
        let id = self.number(self.dicts.len())?;
        self.held += size_of::<Place<Dict>>();
        let holds = Dict::Items(Vec::new());
        self.dicts.push(Place { holds, referrer: Referrer::NOTHING });
        Ok(id)
    }

    /// The number the memo gives next.
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

    /// The value of an entry of the memo.
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
            // Said here, where the reference is, rather than where the value is used.
            Entry::Gone => Err(self.gone()),
            Entry::Missing => {
                let found = format!("number {index}, which was never written");
                Err(self.broken("a memo entry", found))
            }
        }
    }

    /// From here on the value is in more than one hand.
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

    /// The list has been read: its place is used again and the memo has `code` for it, or, if it is
    /// in several hands, it holds `after`.
    #[inline]
    fn let_go_list(&mut self, value: Value, after: List, code: Option<Code>) {
        let (Value::List(id) | Value::Tuple(id)) = value else { return };
        let place = &mut self.lists[id as usize];
        match (place.referrer, code) {
            (Referrer::SEVERAL, _) | (_, None) => place.holds = after,
            (referrer, Some(code)) => {
                if let Some(entry) = referrer.entry() {
                    self.memo.change(entry, value, code);
                }
                place.referrer = Referrer::NOTHING;
                place.holds = List::Gone;
                self.free_lists.push(id);
            }
        }
    }

    /// The same for a dict.
    #[inline]
    fn let_go_dict(&mut self, id: u32, after: Dict, code: Option<Code>) {
        let place = &mut self.dicts[id as usize];
        match (place.referrer, code) {
            (Referrer::SEVERAL, _) | (_, None) => place.holds = after,
            (referrer, Some(code)) => {
                if let Some(entry) = referrer.entry() {
                    self.memo.change(entry, Value::Dict(id), code);
                }
                place.referrer = Referrer::NOTHING;
                place.holds = Dict::Items(Vec::new());
                self.free_dicts.push(id);
            }
        }
    }

    /// Lets go of a value that nobody asks for, and of what is in it. Without recursion, and of
    /// nothing that something else may refer to.
    pub(crate) fn discard(&mut self, value: Value) {
        if !matches!(value, Value::List(_) | Value::Tuple(_) | Value::Dict(_)) {
            return;
        }
        let mut left = vec![value];
        while let Some(value) = left.pop() {
            match value {
                Value::List(id) | Value::Tuple(id) => {
                    let place = &mut self.lists[id as usize];
                    if place.referrer != Referrer::SEVERAL
                        && let List::Values(values) = &mut place.holds
                    {
                        let values = mem::take(values);
                        self.held -= values.capacity() * size_of::<Value>();
                        left.extend(values);
                        self.let_go_list(value, List::Gone, Some(Code::SPENT));
                    }
                }
                Value::Dict(id) => {
                    let place = &mut self.dicts[id as usize];
                    if place.referrer != Referrer::SEVERAL
                        && let Dict::Items(items) = &mut place.holds
                    {
                        let items = mem::take(items);
                        self.held -= items.capacity() * size_of::<[Value; 2]>();
                        left.extend(items.into_iter().flatten());
                        self.let_go_dict(id, Dict::Gone, Some(Code::SPENT));
                    }
                }
                _ => {}
            }
        }
    }

    /// Puts items into a dict; one that has, or now gets, an `action` is an event.
    pub(crate) fn extend(&mut self, id: u32, items: &[[Value; 2]]) -> Result<(), TraceError> {
        let (mut draft, earlier) = match &mut self.dicts[id as usize].holds {
            Dict::Event(draft) => (*draft, Vec::new()),
            Dict::Items(all)
                if items.iter().any(|[key, _]| Name::of(*key) == Some(Name::Action)) =>
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
        let place = &mut self.dicts[id as usize].holds;
        let Dict::Items(mut all) = mem::replace(place, Dict::Gone) else {
            return Err(self.gone());
        };
        let before = all.capacity();
        for &[key, value] in items {
            // The frames of a block: far smaller as a stack.
            let value = match Name::of(key) {
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

    /// Puts values at the end of a list. Events move in, and their dicts are free again.
    pub(crate) fn append(&mut self, list: u32, values: &[Value]) -> Result<(), TraceError> {
        let Some(&first) = values.first() else { return Ok(()) };
        let events_come = self.is_event(first);
        // Events move in from the arena, so their list leaves it for a moment.
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
        self.let_go_dict(id, Dict::Gone, Some(Code::GONE));
        Ok(event)
    }

    /// The two integers of a tuple or a list of two.
    pub(crate) fn pair(&self, value: Value) -> Option<(u64, u64)> {
        match value {
            Value::Pair(id) => self.pairs.get(id as usize).copied(),
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

    /// The same, and a list is let go.
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
            self.let_go_list(value, list, code);
        }
        Ok(Some(pair))
    }

    /// Moves a list's contents out; the list is spent, unless it was empty.
    pub(crate) fn take_list(&mut self, id: u32) -> List {
        let list = &mut self.lists[id as usize].holds;
        match list {
            List::Values(values) if values.is_empty() => List::Values(Vec::new()),
            _ => mem::replace(list, List::Gone),
        }
    }

    /// Moves a plain dict's items out; `None` where it is spent or something else.
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

    /// The stack that a list of frame dicts stands for; the list's own storage is let go.
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
        // Outermost first, so that stacks with the same callers share them.
        for (depth, &value) in values.iter().rev().enumerate() {
            let frame = self.frame(value)?;
            let found = self.stacks.push(depth, stack, frame);
            stack = Some(found.ok_or_else(|| self.too_many())?);
        }
        self.held -= values.capacity() * size_of::<Value>();
        // An empty list may still be filled, if anything refers to it.
        let after = if stack.is_none() { List::Values(values) } else { List::Stack(stack) };
        self.let_go_list(frames, after, Code::of(Value::Stack(stack)));
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
        let frame = self.stacks.frame(&items, &self.strings).ok_or_else(|| self.too_many())?;
        for [_, value] in items {
            self.discard(value);
        }
        self.let_go_dict(id, Dict::Frame(frame), Code::of(Value::Frame(frame)));
        Ok(frame)
    }

    fn not_frames(&self, what: &str, expected: &str, found: Value) -> TraceError {
        let found = found.kind();
        TraceError::snapshot(self.at, format!("{what} is {found}, expected {expected}"))
    }

    /// About how many bytes it holds.
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

    /// A reference to something whose contents have moved on. Python never writes one in a snapshot.
    #[cold]
    fn gone(&self) -> TraceError {
        let found = "one that was already read as an event, a stack or a frame";
        self.broken("a list or dict that is still open", found)
    }

    /// Numbers have 32 bits. The memory limit comes first, unless it was raised very far.
    #[cold]
    fn too_many(&self) -> TraceError {
        self.broken("a snapshot of a practical size", "more than 2^32 of one kind of value")
    }
}
