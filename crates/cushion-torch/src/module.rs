//! The functions and classes of the Python module, by subject. `lib.rs` names them.

pub(crate) mod errors;
pub(crate) mod fork;
pub(crate) mod history;
pub(crate) mod memory;
pub(crate) mod package;
pub(crate) mod requests;
pub(crate) mod settings;
pub(crate) mod statistics;
