//! The recorded trace as Rust values. The readers produce these values; all other folders use them.

pub(crate) mod error;
pub(crate) mod event;
pub(crate) mod events;
pub(crate) mod flags;
pub(crate) mod names;
pub(crate) mod number;
pub(crate) mod pack;
pub(crate) mod settings;
pub(crate) mod snapshot;
pub(crate) mod stacks;
pub(crate) mod tally;
