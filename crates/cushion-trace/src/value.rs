//! A Python value as the readers hand it on: small, and a handle to its contents where it has any.

use crate::stacks::{FrameId, StackId};

/// The number of an interned string; the reader's own `Name`s come first.
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
    Dict(u32),
    /// What was a list of frames; `None` for an empty one.
    Stack(Option<StackId>),
    /// What was the dict of a frame.
    Frame(FrameId),
    /// What was a value that nobody asks for.
    Spent,
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
            Self::Stack(_) => "a list of frames",
            Self::Frame(_) => "a frame",
            Self::Spent => "something of another use",
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
