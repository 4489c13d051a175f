//! Files: reading traces, writing results, and converting one into the other.

pub(crate) mod convert;
pub(crate) mod load;
pub(crate) mod recorded;
pub(crate) mod save;
