//! The Python interpreter, as an allocator inside the process sees it: its lock and its exceptions.

pub(crate) mod exceptions;
pub(crate) mod gil;
