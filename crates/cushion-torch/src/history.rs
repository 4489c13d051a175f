//! The recorded history: Python stacks and metadata beside each allocation, and snapshots of it.

mod kept;
pub(crate) mod recorder;
pub(crate) mod snapshot;
pub(crate) mod stacks;
