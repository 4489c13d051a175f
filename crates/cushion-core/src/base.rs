//! Basic types for all rooms: identifiers, tables, sizes, time and random numbers. Nothing here
//! knows about device memory.

pub(crate) mod bytes;
pub(crate) mod check;
pub(crate) mod clock;
pub(crate) mod looks;
pub(crate) mod names;
pub mod random;
pub(crate) mod size;
pub(crate) mod table;
