//! Python values, as the pickle and the JSON reader build them, and the snapshot made of them.

pub(crate) mod arena;
pub(crate) mod build;
pub(crate) mod draft;
mod interned;
pub(crate) mod memo;
pub(crate) mod record;
pub(crate) mod value;
