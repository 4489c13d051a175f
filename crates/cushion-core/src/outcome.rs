//! The results of requests: errors with their figures, and the receipts of shortages. Plain data.

pub(crate) mod error;
pub(crate) mod receipt;
