//! Definitions that the readers and the writers of a file format share.

pub(crate) mod columns;
pub(crate) mod own;
pub(crate) mod pickle;
