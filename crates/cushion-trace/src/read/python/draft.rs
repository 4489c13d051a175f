//! An event whose dict is not complete yet.

use super::arena::Arena;
use super::value::{Value, name_of};
use crate::model::error::TraceError;
use crate::model::event::{Action, Event};
use crate::model::names::Name;

/// An event, and which of its required fields are set.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Draft {
    pub(crate) event: Event,
    addr: bool,
    size: bool,
}

impl Draft {
    pub(crate) const EMPTY: Self = Self { event: Event::EMPTY, addr: false, size: false };

    /// Adds one item of the dict. Unknown keys are skipped.
    #[inline]
    pub(crate) fn set(
        &mut self,
        key: Value,
        value: Value,
        arena: &mut Arena,
    ) -> Result<(), TraceError> {
        let Some(name) = name_of(key) else {
            arena.discard(value);
            return Ok(());
        };
        let event = &mut self.event;
        let taken = match name {
            Name::Action => {
                event.action = Action::of_name(name_of(value));
                matches!(value, Value::Str(_))
            }
            Name::Addr => {
                self.addr = true;
                value.bits().map(|addr| event.addr = addr).is_some()
            }
            Name::DeviceFree => {
                self.addr = true;
                value.unsigned().map(|free| event.addr = free).is_some()
            }
            Name::Size => {
                self.size = true;
                value.unsigned().map(|size| event.size = size).is_some()
            }
            Name::Stream => value.bits().map(|stream| event.stream = stream).is_some(),
            Name::TimeUs => value.unsigned().map(|time| event.time_us = time).is_some(),
            Name::PoolId => {
                event.pool = arena.take_pair(value)?;
                event.pool.is_some() || value == Value::None
            }
            Name::Frames if value == Value::None => true,
            Name::Frames => {
                event.stack = arena.stack(value)?;
                true
            }
            _ => {
                arena.discard(value);
                true
            }
        };
        if taken { Ok(()) } else { Err(Self::fault(name, value, arena.at)) }
    }

    /// Returns the event once its dict is complete.
    #[inline]
    pub(crate) fn finish(&self, at: u64) -> Result<Event, TraceError> {
        let bare = matches!(self.event.action, Action::Snapshot | Action::Annotate | Action::Other);
        if bare || (self.addr && self.size) {
            return Ok(self.event);
        }
        let key = match self.event.action {
            _ if self.addr => Name::Size,
            Action::Oom => Name::DeviceFree,
            _ => Name::Addr,
        };
        let (action, key) = (self.event.action.name(), key.text());
        Err(TraceError::snapshot(at, format!("an event `{action}` has no `{key}`")))
    }

    #[cold]
    fn fault(name: Name, value: Value, at: u64) -> TraceError {
        let expected = match name {
            Name::Action => "a str",
            Name::PoolId => "two ints",
            Name::Addr | Name::Stream => "an int of 64 bits",
            _ => "an int of 64 bits that is not negative",
        };
        let (key, found) = (name.text(), value.kind());
        TraceError::snapshot(at, format!("`{key}` of an event is {found}, expected {expected}"))
    }
}
