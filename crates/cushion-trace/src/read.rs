//! Readers: from a file to a [`Snapshot`](crate::Snapshot), and from a file to receipts.
//!
//! `open` detects the compression (`zstd`, gzip) and the format (`detect`) and calls one of the
//! readers `pickle`, `json`, `rmm` and `own`. All of them read from a `source`, under `limits`.

pub(crate) mod columns;
pub(crate) mod detect;
pub(crate) mod json;
pub(crate) mod limits;
pub(crate) mod open;
pub(crate) mod own;
pub(crate) mod pickle;
pub(crate) mod python;
pub(crate) mod receipts;
pub(crate) mod rmm;
pub(crate) mod source;
pub(crate) mod zstd;
