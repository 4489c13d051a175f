//! What a pickle has built so far: strings, lists and dicts in tables, and handles to them.
//!
//! Here a dict with an `action` becomes an event, and a list of frames a stack, as soon as that
//! is possible, so that a big trace is never held as Python objects.

use std::collections::HashMap;
use std::mem;
use std::sync::Arc;

use crate::error::TraceError;
use crate::events::Events;
use crate::snapshot::{Draft, Event, Name};
use crate::stacks::{FrameId, StackId, StackTable};

/// The number of an interned string; the reader's own [`Name`]s come first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct StrId(pub(crate) u32);

/// A dict's place in the arena. Places are used again, so a handle also says which of the dicts
/// that lived there it means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DictId {
    slot: u32,
    generation: u32,
}

/// A Python value, or a handle to one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Value {
    None,
    Bool(bool),
    Int(i64),
    /// An integer beyond `i64`.
    Uint(u64),
    /// An integer beyond 64 bits: let through, as long as nobody asks for it.
    Huge,
    Float(f64),
    Str(StrId),
    /// Bytes are let through, but not kept: no key of a snapshot that is read here has them.
    Bytes,
    /// A tuple of two integers. Every event has one for its pool, so equal ones share a place.
    Pair(u32),
    List(u32),
    Tuple(u32),
    Dict(DictId),
}

impl Value {
    /// The value's type, for messages.
    pub(crate) fn kind(self) -> &'static str {
        match self {
            Self::None => "None",
            Self::Bool(_) => "a bool",
            Self::Int(i) if i < 0 => "a negative int",
            Self::Int(_) | Self::Uint(_) => "an int",
            Self::Huge => "an int beyond 64 bits",
            Self::Float(_) => "a float",
            Self::Str(_) => "a str",
            Self::Bytes => "bytes",
            Self::List(_) => "a list",
            Self::Pair(_) | Self::Tuple(_) => "a tuple",
            Self::Dict(_) => "a dict",
        }
    }

    /// An integer's 64 bits, whatever its sign.
    pub(crate) fn bits(self) -> Option<u64> {
        match self {
            Self::Int(i) => Some(i.cast_unsigned()),
            Self::Uint(u) => Some(u),
            _ => None,
        }
    }

    /// An integer that is not negative.
    pub(crate) fn unsigned(self) -> Option<u64> {
        match self {
            Self::Int(i) => u64::try_from(i).ok(),
            Self::Uint(u) => Some(u),
            _ => None,
        }
    }
}

/// What a list, or a tuple that is not a [`Value::Pair`], holds.
#[derive(Debug)]
pub(crate) enum List {
    Values(Vec<Value>),
    /// A list whose first item was an event holds events only, in their final form.
    Events(Box<Events>),
    /// Frames that an event asked for: kept once, in the table of stacks.
    Stack(StackId),
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

#[derive(Debug)]
pub(crate) struct Slot {
    generation: u32,
    dict: Dict,
}

/// Everything the pickle has built.
#[derive(Debug)]
pub(crate) struct Arena {
    strings: Vec<Arc<str>>,
    // The hash maps here are std's: their keys come from the file, which may be hostile.
    string_ids: HashMap<Arc<str>, StrId>,
    pub(crate) lists: Vec<List>,
    pub(crate) dicts: Vec<Slot>,
    /// Places of events that have moved into their list.
    free: Vec<u32>,
    pairs: Vec<(u64, u64)>,
    pair_ids: HashMap<(u64, u64), u32>,
    stacks: StackTable,
    /// An estimate of the bytes held, for the memory limit.
    held: usize,
    /// The offset of the opcode being run, for messages.
    pub(crate) at: u64,
}

impl Arena {
    pub(crate) fn new() -> Self {
        let mut arena = Self {
            strings: Vec::new(),
            string_ids: HashMap::new(),
            lists: Vec::new(),
            dicts: Vec::new(),
            free: Vec::new(),
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

    pub(crate) fn intern(&mut self, text: &str) -> Result<StrId, TraceError> {
        if let Some(&id) = self.string_ids.get(text) {
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
        u32::try_from(len).map_err(|_| too_many(self.at))
    }

    pub(crate) fn new_list(&mut self, values: Vec<Value>) -> Result<u32, TraceError> {
        let id = self.number(self.lists.len())?;
        self.held += size_of::<List>() + values.capacity() * size_of::<Value>();
        self.lists.push(List::Values(values));
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

    pub(crate) fn new_dict(&mut self) -> Result<DictId, TraceError> {
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None => {
                let slot = self.number(self.dicts.len())?;
                self.held += size_of::<Slot>();
                self.dicts.push(Slot { generation: 0, dict: Dict::Items(Vec::new()) });
                slot
            }
        };
        Ok(DictId { slot, generation: self.dicts[slot as usize].generation })
    }

    /// The dict itself, or an error where its place has passed to another.
    pub(crate) fn dict(&mut self, id: DictId) -> Result<&mut Dict, TraceError> {
        let slot = &mut self.dicts[id.slot as usize];
        if slot.generation == id.generation { Ok(&mut slot.dict) } else { Err(gone(self.at)) }
    }

    /// Puts items into a dict; one that has, or now gets, an `action` is an event.
    pub(crate) fn extend(&mut self, id: DictId, items: &[[Value; 2]]) -> Result<(), TraceError> {
        let at = self.at;
        let (mut draft, earlier) = match self.dict(id)? {
            Dict::Event(draft) => (*draft, Vec::new()),
            Dict::Items(all)
                if items.iter().any(|[key, _]| Name::of(*key) == Some(Name::Action)) =>
            {
                (Draft::EMPTY, mem::take(all))
            }
            Dict::Items(all) => {
                let before = all.capacity();
                all.extend_from_slice(items);
                self.held += (all.capacity() - before) * size_of::<[Value; 2]>();
                return Ok(());
            }
            Dict::Frame(_) | Dict::Gone => return Err(gone(at)),
        };
        for &[key, value] in earlier.iter().chain(items) {
            draft.set(key, value, self)?;
        }
        self.held -= earlier.capacity() * size_of::<[Value; 2]>();
        *self.dict(id)? = Dict::Event(draft);
        Ok(())
    }

    fn is_event(&mut self, value: Value) -> bool {
        matches!(value, Value::Dict(id) if matches!(self.dict(id), Ok(Dict::Event(_))))
    }

    /// Puts values at the end of a list. Events move in, and their dicts are free again.
    pub(crate) fn append(&mut self, list: u32, values: &[Value]) -> Result<(), TraceError> {
        let Some(&first) = values.first() else { return Ok(()) };
        let events_come = self.is_event(first);
        // Events move in from the arena, so their list leaves it for a moment.
        let mut events = match mem::replace(&mut self.lists[list as usize], List::Gone) {
            List::Events(events) => events,
            List::Values(all) if all.is_empty() && events_come => Box::default(),
            List::Values(mut all) => {
                let before = all.capacity();
                all.extend_from_slice(values);
                self.held += (all.capacity() - before) * size_of::<Value>();
                self.lists[list as usize] = List::Values(all);
                return Ok(());
            }
            List::Stack(_) | List::Gone => return Err(gone(self.at)),
        };
        let before = events.held();
        for &value in values {
            events.push(self.take_event(value)?);
        }
        self.held += events.held() - before;
        self.lists[list as usize] = List::Events(events);
        Ok(())
    }

    fn take_event(&mut self, value: Value) -> Result<Event, TraceError> {
        let at = self.at;
        let Value::Dict(id) = value else {
            let found = format!("{} among events", value.kind());
            return Err(TraceError::pickle(at, "a dict with an `action`", found));
        };
        let Dict::Event(draft) = self.dict(id)? else {
            let found = "a dict without one among events";
            return Err(TraceError::pickle(at, "a dict with an `action`", found));
        };
        let event = draft.finish(at)?;
        let slot = &mut self.dicts[id.slot as usize];
        slot.dict = Dict::Items(Vec::new());
        // A place whose generations have run out is left empty for good.
        match slot.generation.checked_add(1) {
            Some(next) => {
                slot.generation = next;
                self.free.push(id.slot);
            }
            None => slot.dict = Dict::Gone,
        }
        Ok(event)
    }

    /// The two integers of a tuple or a list of two.
    pub(crate) fn pair(&self, value: Value) -> Option<(u64, u64)> {
        match value {
            Value::Pair(id) => self.pairs.get(id as usize).copied(),
            Value::List(id) | Value::Tuple(id) => match self.lists.get(id as usize) {
                Some(List::Values(values)) => match values[..] {
                    [a, b] => a.bits().zip(b.bits()),
                    _ => None,
                },
                _ => None,
            },
            _ => None,
        }
    }

    /// Moves a list's contents out; the list is spent, unless it was empty.
    pub(crate) fn take_list(&mut self, id: u32) -> List {
        let list = &mut self.lists[id as usize];
        match list {
            List::Values(values) if values.is_empty() => List::Values(Vec::new()),
            _ => mem::replace(list, List::Gone),
        }
    }

    /// Moves a plain dict's items out; `None` where it is spent or something else.
    pub(crate) fn take_items(&mut self, id: DictId) -> Option<Vec<[Value; 2]>> {
        let dict = self.dict(id).ok()?;
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
        let (Value::List(list) | Value::Tuple(list)) = frames else {
            return Err(self.not_frames("`frames`", "a list", frames));
        };
        let values = match self.take_list(list) {
            List::Values(values) => values,
            List::Stack(stack) => {
                self.lists[list as usize] = List::Stack(stack);
                return Ok(Some(stack));
            }
            List::Events(_) | List::Gone => return Err(gone(self.at)),
        };
        let mut stack = None;
        // Outermost first, so that stacks with the same callers share them.
        for &value in values.iter().rev() {
            let frame = self.frame(value)?;
            stack = Some(self.stacks.push(stack, frame).ok_or_else(|| too_many(self.at))?);
        }
        self.held -= values.capacity() * size_of::<Value>();
        if let Some(stack) = stack {
            self.lists[list as usize] = List::Stack(stack);
        }
        Ok(stack)
    }

    fn frame(&mut self, value: Value) -> Result<FrameId, TraceError> {
        let Value::Dict(id) = value else {
            return Err(self.not_frames("a frame", "a dict", value));
        };
        let items = match self.dict(id)? {
            Dict::Frame(frame) => return Ok(*frame),
            Dict::Items(items) => mem::take(items),
            Dict::Event(_) | Dict::Gone => return Err(gone(self.at)),
        };
        self.held -= items.capacity() * size_of::<[Value; 2]>();
        let frame = self.stacks.frame(&items, &self.strings).ok_or_else(|| too_many(self.at))?;
        *self.dict(id)? = Dict::Frame(frame);
        Ok(frame)
    }

    fn not_frames(&self, what: &str, expected: &str, found: Value) -> TraceError {
        let (at, found) = (self.at, found.kind());
        TraceError::snapshot(format!(
            "in the event that ends at byte {at}, {what} is {found}, expected {expected}"
        ))
    }

    /// About how many bytes it holds.
    pub(crate) fn held(&self) -> usize {
        self.held + self.stacks.held()
    }

    pub(crate) fn into_stacks(self) -> StackTable {
        self.stacks
    }
}

/// A reference to something whose contents have moved on. Python never writes one in a snapshot.
#[cold]
fn gone(at: u64) -> TraceError {
    let found = "one that was already read as an event, a stack or a frame";
    TraceError::pickle(at, "a list or dict that is still open", found)
}

/// Numbers have 32 bits. The memory limit comes first, unless it was raised very far.
#[cold]
fn too_many(at: u64) -> TraceError {
    let found = "more than 2^32 of one kind of value";
    TraceError::pickle(at, "a snapshot of a practical size", found)
}
