//! What every room stands on: identifiers, tables, sizes and time. Nothing here knows of memory.

pub(crate) mod bytes;
pub(crate) mod check;
pub(crate) mod clock;
pub(crate) mod looks;
pub(crate) mod names;
pub mod random;
pub(crate) mod size;
pub(crate) mod table;
