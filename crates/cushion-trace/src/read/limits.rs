//! Limits on what an untrusted file can make its reader do.

/// Limits on the size of an untrusted file and on the reader's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The most bytes of the file once unpacked. The default is 16 GiB.
    pub unpacked_bytes: u64,
    /// The most memory that the reader may hold, by its own estimate. The default is 8 GiB.
    /// Unpacked bytes alone do not bound memory: an empty list is one byte in a file.
    pub memory_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { unpacked_bytes: 16 << 30, memory_bytes: 8 << 30 }
    }
}
