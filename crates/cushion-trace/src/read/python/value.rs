//! Python values as the readers pass them on: small, with handles to their contents.

use crate::model::names::Name;
use crate::model::stacks::{FrameId, StackId};

/// The number of an interned string. The first numbers are those of [`Name`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct StrId(pub(crate) u32);

/// A Python value, or a handle to one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Value {
    None,
    Bool(bool),
    Int(i64),
    /// An integer beyond `i64`.
    Uint(u64),
    /// An integer beyond 64 bits. It is an error only where a number is needed.
    Huge,
    Float(f64),
    Str(StrId),
    /// Bytes. Their contents are not kept, because no known key has bytes.
    Bytes,
    /// A tuple of two integers. Every event has one for its pool, so equal pairs are stored once.
    Pair(u32),
    List(u32),
    Tuple(u32),
    Dict(u32),
    /// A list of frames that was read; `None` for an empty list.
    Stack(Option<StackId>),
    /// The dict of a frame that was read.
    Frame(FrameId),
    /// A value that was skipped.
    Spent,
}

impl Value {
    /// Returns the value's type, for messages.
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
            Self::Stack(_) => "a list of frames",
            Self::Frame(_) => "a frame",
            Self::Spent => "a value that was skipped before",
        }
    }

    /// Returns the 64 bits of an integer of either sign.
    pub(crate) fn bits(self) -> Option<u64> {
        match self {
            Self::Int(i) => Some(i.cast_unsigned()),
            Self::Uint(u) => Some(u),
            _ => None,
        }
    }

    /// Returns an integer that is not negative.
    pub(crate) fn unsigned(self) -> Option<u64> {
        match self {
            Self::Int(i) => u64::try_from(i).ok(),
            Self::Uint(u) => Some(u),
            _ => None,
        }
    }
}

/// Returns the name that a string value is, if the readers know it.
#[inline]
pub(crate) fn name_of(value: Value) -> Option<Name> {
    match value {
        Value::Str(StrId(id)) => Name::ALL.get(id as usize).copied(),
        _ => None,
    }
}
