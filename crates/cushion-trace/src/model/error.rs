//! Errors of the trace readers. A message tells what happened, where in the unpacked stream, and
//! what the reader expected there.

use std::fmt;
use std::io;

use thiserror::Error;

/// The format of a file or of its compression.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Format {
    /// Python's pickle, as `torch.cuda.memory._dump_snapshot` writes it.
    Pickle,
    /// A snapshot as JSON.
    Json,
    /// The CSV that RMM's logging adaptor writes.
    Rmm,
    /// Cushion's own trace.
    Own,
    /// Gzip compression around any other format.
    Gzip,
    /// Zstandard compression around any other format.
    Zstd,
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pickle => "pickle",
            Self::Json => "JSON",
            Self::Rmm => "RMM log",
            Self::Own => "Cushion trace",
            Self::Gzip => "gzip wrapping",
            Self::Zstd => "zstd wrapping",
        })
    }
}

/// A position in the unpacked stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offset {
    /// The number of bytes before the position.
    pub byte: u64,
    /// The line and the column, from 1 on, for line-based formats.
    pub line: Option<(u64, u64)>,
}

impl From<u64> for Offset {
    fn from(byte: u64) -> Self {
        Self { byte, line: None }
    }
}

impl fmt::Display for Offset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some((line, column)) = self.line {
            write!(f, "line {line}, column {column}, ")?;
        }
        write!(f, "byte {} of the unpacked stream", self.byte)
    }
}

/// The reason why a trace could not be read.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The file could not be opened or read.
    #[error("could not read the file")]
    Io {
        /// The error of the operating system.
        source: io::Error,
    },

    /// The file is not in a known format.
    #[error(
        "not a trace: at byte 0, expected a PyTorch memory snapshot (pickle or JSON), an RMM log \
         or a Cushion trace, plain or packed with gzip or zstd; found {found}"
    )]
    Unknown {
        /// A description of the file.
        found: String,
    },

    /// The bytes violate their format, or the file ends too early.
    #[error("the {format} cannot be read: at {offset}, expected {expected}, found {found}")]
    Broken {
        /// The format of the file.
        format: Format,
        /// The position of the error.
        offset: Offset,
        /// What the reader expected there.
        expected: String,
        /// What the file has there.
        found: String,
    },

    /// The pickle asks its reader to load a class or run code.
    #[error(
        "refused: at byte {offset} of the unpacked stream the pickle asks to load a class or run \
         code (opcode {opcode}); a memory snapshot is plain data and never needs that"
    )]
    Code {
        /// The position, in bytes of the unpacked stream.
        offset: u64,
        /// The opcode's name in Python's `pickletools`.
        opcode: &'static str,
    },

    /// Valid pickle or JSON that is not a PyTorch memory snapshot.
    #[error("not a PyTorch memory snapshot: {what}, in the value that ends at byte {offset}")]
    Snapshot {
        /// The end of the unexpected value, in bytes of the unpacked stream.
        offset: u64,
        /// The expected key or type, and what the file has instead.
        what: String,
    },

    /// The file is larger, or needs more memory, than the limits allow.
    #[error(
        "the file is over a limit: at byte {offset} of the unpacked stream {what} passed {limit} \
         bytes (`Limits::{field}`); no recorded trace is that large"
    )]
    Limit {
        /// The position, in bytes of the unpacked stream.
        offset: u64,
        /// The quantity that exceeded the limit.
        what: &'static str,
        /// The limit, in bytes.
        limit: u64,
        /// The field of [`Limits`](crate::Limits) that sets it.
        field: &'static str,
    },
}

impl TraceError {
    /// Makes the error of a broken file.
    pub(crate) fn broken(
        format: Format,
        offset: impl Into<Offset>,
        expected: impl Into<String>,
        found: impl Into<String>,
    ) -> Self {
        let (offset, expected, found) = (offset.into(), expected.into(), found.into());
        Self::Broken { format, offset, expected, found }
    }

    /// Makes the error of a value, ending at `offset`, that is not part of a snapshot.
    pub(crate) fn snapshot(offset: u64, what: impl Into<String>) -> Self {
        Self::Snapshot { offset, what: what.into() }
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error;

    use super::*;

    #[test]
    fn messages_say_where_and_what() {
        let broken = TraceError::broken(Format::Pickle, 7, "a dict", "the end of the file");
        assert_eq!(
            broken.to_string(),
            "the pickle cannot be read: at byte 7 of the unpacked stream, expected a dict, found \
             the end of the file"
        );
        let line = Offset { byte: 60, line: Some((3, 12)) };
        let broken = TraceError::broken(Format::Rmm, line, "a size", "`x`");
        assert_eq!(
            broken.to_string(),
            "the RMM log cannot be read: at line 3, column 12, byte 60 of the unpacked stream, \
             expected a size, found `x`"
        );
        let code = TraceError::Code { offset: 3, opcode: "REDUCE" }.to_string();
        assert!(code.contains("byte 3") && code.contains("run code") && code.contains("REDUCE"));
        let limit = TraceError::Limit { offset: 9, what: "it", limit: 8, field: "unpacked_bytes" };
        assert!(limit.to_string().contains("passed 8 bytes (`Limits::unpacked_bytes`)"));
    }

    #[test]
    fn io_keeps_its_cause() {
        let error = TraceError::Io { source: io::Error::other("disk on fire") };
        assert_eq!(error.source().unwrap().to_string(), "disk on fire");
    }
}
