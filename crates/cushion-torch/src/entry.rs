//! How requests reach the engine: from PyTorch through C functions, and from Python as futures.

pub(crate) mod abi;
pub(crate) mod futures;
pub(crate) mod plugin;
