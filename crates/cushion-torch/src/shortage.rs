//! Shortages, as a Python program sees them: its callbacks, its receipts, and the error at the end.

pub(crate) mod callbacks;
pub(crate) mod last_calls;
mod message;
pub(crate) mod receipts;
pub(crate) mod refusal;
mod refusals;
mod remedies;
