//! Helpers for the unit tests of this crate.

pub(crate) mod pickle;
mod values;

pub(crate) use values::{any_event, any_snapshot};
