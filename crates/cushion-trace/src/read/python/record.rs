//! A dict of the file whose keys are looked up by name.

use std::fmt;

use super::arena::{Arena, List};
use super::value::{Value, name_of};
use crate::model::error::TraceError;
use crate::model::names::Name;
use crate::model::stacks::StackId;

/// The place of a dict in the snapshot, for messages.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Place {
    Top,
    Settings,
    Segment(usize),
    Block(usize, usize),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Top => write!(f, "the top level"),
            Self::Settings => write!(f, "`allocator_settings`"),
            Self::Segment(i) => write!(f, "`segments[{i}]`"),
            Self::Block(i, j) => write!(f, "`segments[{i}].blocks[{j}]`"),
        }
    }
}

/// The items of a dict.
pub(crate) struct Record {
    items: Vec<[Value; 2]>,
    place: Place,
    /// The end of the value in the file.
    at: u64,
}

impl Record {
    /// Takes the items of a dict out of the arena. A dict can be taken once: a file that lists the
    /// same dict a million times gets an error instead of a million copies.
    pub(crate) fn take(value: Value, place: Place, arena: &mut Arena) -> Result<Self, TraceError> {
        let found = match value {
            Value::Dict(id) => match arena.take_items(id) {
                Some(items) => return Ok(Self { items, place, at: arena.at }),
                None => "a dict that was used before",
            },
            _ => value.kind(),
        };
        Err(TraceError::snapshot(arena.at, format!("{place} is {found}, expected a dict")))
    }

    /// Returns the value of a key, unless it is `None`. If a key occurs twice, the last value
    /// counts.
    pub(crate) fn get(&self, name: Name) -> Option<Value> {
        let item = self.items.iter().rev().find(|[key, _]| name_of(*key) == Some(name));
        item.map(|&[_, value]| value).filter(|value| *value != Value::None)
    }

    pub(crate) fn bits(&self, name: Name) -> Result<Option<u64>, TraceError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        value.bits().map(Some).ok_or_else(|| self.fault(name, "an int of 64 bits"))
    }

    pub(crate) fn unsigned(&self, name: Name) -> Result<Option<u64>, TraceError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let expected = "an int of 64 bits that is not negative";
        value.unsigned().map(Some).ok_or_else(|| self.fault(name, expected))
    }

    pub(crate) fn flag(&self, name: Name) -> Option<bool> {
        match self.get(name) {
            Some(Value::Bool(flag)) => Some(flag),
            _ => None,
        }
    }

    pub(crate) fn int(&self, name: Name) -> Option<i64> {
        match self.get(name) {
            Some(Value::Int(int)) => Some(int),
            _ => None,
        }
    }

    pub(crate) fn stack(&self, arena: &mut Arena) -> Result<Option<StackId>, TraceError> {
        self.get(Name::Frames).map_or(Ok(None), |frames| arena.stack(frames))
    }

    pub(crate) fn need<T>(&self, name: Name, value: Option<T>) -> Result<T, TraceError> {
        value.ok_or_else(|| self.fault(name, "it"))
    }

    pub(crate) fn list(&self, name: Name, arena: &mut Arena) -> Result<Vec<Value>, TraceError> {
        match self.get(name) {
            Some(Value::List(id)) => match arena.take_list(id) {
                List::Values(values) => Ok(values),
                _ => Err(self.fault(name, "a list of its own")),
            },
            // An empty list that was read as frames.
            Some(Value::Stack(None)) => Ok(Vec::new()),
            _ => Err(self.fault(name, "a list")),
        }
    }

    /// Returns a dict such as `{"1": 4, "2": 8}` as pairs of numbers, in the file's order.
    pub(crate) fn steps(&self, arena: &Arena) -> Vec<(u64, u64)> {
        let number = |value| match value {
            Value::Str(id) => arena.text(id).parse().ok(),
            value => value.unsigned(),
        };
        self.items.iter().filter_map(|&[from, to]| number(from).zip(number(to))).collect()
    }

    #[cold]
    pub(crate) fn fault(&self, name: Name, expected: &str) -> TraceError {
        let (place, key) = (self.place, name.text());
        let what = match self.get(name) {
            None => format!("{place} has no `{key}`"),
            Some(found) => {
                format!("`{key}` of {place} is {}, expected {expected}", found.kind())
            }
        };
        TraceError::snapshot(self.at, what)
    }
}
