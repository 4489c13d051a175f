//! What can go wrong between a snapshot file and the events in it, told to the person who has
//! the file: what happened, where in the unpacked stream, and what was expected there.

use std::io;

use thiserror::Error;

/// Why a snapshot could not be read.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The file could not be opened or read, or its gzip wrapping is damaged.
    #[error("could not read the snapshot file")]
    Io {
        /// What the operating system or the gzip decoder said.
        source: io::Error,
    },

    /// The bytes are not what their format asks for, or the file ends too early.
    #[error(
        "the {format} cannot be read: at byte {offset} of the unpacked stream, expected \
         {expected}, found {found}"
    )]
    Broken {
        /// What the file is: a pickle, a Cushion trace.
        format: &'static str,
        /// Where, in bytes of the unpacked stream.
        offset: u64,
        /// What a sound file would have had there.
        expected: String,
        /// What this file has there.
        found: String,
    },

    /// The pickle asks its reader to load a class or to run code.
    #[error(
        "refused: at byte {offset} of the unpacked stream the pickle wants to load a class or run \
         code (opcode {opcode}); a memory snapshot is plain data and never needs that"
    )]
    Code {
        /// Where, in bytes of the unpacked stream.
        offset: u64,
        /// The opcode's name in Python's `pickletools`.
        opcode: &'static str,
    },

    /// A sound pickle that is not a PyTorch memory snapshot.
    #[error("not a PyTorch memory snapshot: {what}")]
    Snapshot {
        /// Which key or type was expected, and what was there.
        what: String,
    },

    /// The file is larger, or needs more memory, than the caller allows.
    #[error(
        "the snapshot is over a limit: at byte {offset} of the unpacked stream {what} passed \
         {limit} bytes; if the file is trusted, raise `Limits::{field}`"
    )]
    Limit {
        /// Where, in bytes of the unpacked stream.
        offset: u64,
        /// What grew too large.
        what: &'static str,
        /// The limit in force, in bytes.
        limit: u64,
        /// The field of [`Limits`](crate::Limits) that sets it.
        field: &'static str,
    },
}

impl TraceError {
    /// A broken pickle: the one error the machine builds in many places.
    pub(crate) fn pickle(
        offset: u64,
        expected: impl Into<String>,
        found: impl Into<String>,
    ) -> Self {
        let format = "pickle";
        Self::Broken { format, offset, expected: expected.into(), found: found.into() }
    }

    /// The same error, in a file of this format.
    pub(crate) fn in_format(mut self, name: &'static str) -> Self {
        if let Self::Broken { format, .. } = &mut self {
            *format = name;
        }
        self
    }

    /// A pickle that is something else than a snapshot.
    pub(crate) fn snapshot(what: impl Into<String>) -> Self {
        Self::Snapshot { what: what.into() }
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error;

    use super::*;

    #[test]
    fn messages_say_where_and_what() {
        let broken = TraceError::pickle(7, "a dict", "the end of the file");
        assert_eq!(
            broken.to_string(),
            "the pickle cannot be read: at byte 7 of the unpacked stream, expected a dict, found \
             the end of the file"
        );
        let code = TraceError::Code { offset: 3, opcode: "REDUCE" }.to_string();
        assert!(code.contains("byte 3") && code.contains("run code") && code.contains("REDUCE"));
        let limit = TraceError::Limit { offset: 9, what: "it", limit: 8, field: "unpacked_bytes" };
        assert!(limit.to_string().contains("raise `Limits::unpacked_bytes`"));
    }

    #[test]
    fn io_keeps_its_cause() {
        let error = TraceError::Io { source: io::Error::other("disk on fire") };
        assert_eq!(error.source().unwrap().to_string(), "disk on fire");
    }
}
