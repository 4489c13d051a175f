//! The input of every reader: unpacked bytes with their offset, under the limits.
//!
//! Memory is allocated for bytes that have arrived, never because a header announces them.

use std::fmt;
use std::io::{self, ErrorKind, Read};

use super::limits::Limits;
use crate::model::error::{Format, TraceError};

/// The longest single value, in bytes.
const LONGEST: usize = 64 << 20;
// A reader may hold `START_BYTES`, plus `BYTES_PER_BYTE` for each of the first `FIRST_BYTES` bytes
// of the file, plus one for each later byte. Events need far less; blocks of segments, which are
// few, need about seven bytes for each byte of the file.
const START_BYTES: u64 = 256 << 20;
const BYTES_PER_BYTE: u64 = 8;
const FIRST_BYTES: u64 = 128 << 20;

/// The size of the buffer, and the longest slice that [`Source::slice`] returns.
pub(crate) const CHUNK: usize = 64 << 10;

/// Unpacked bytes with their offset, counted against the limit as they arrive.
pub(crate) struct Source<'r> {
    input: &'r mut dyn Read,
    buffer: Box<[u8]>,
    /// `buffer[next..end]` is read but not consumed.
    next: usize,
    end: usize,
    /// The offset of `buffer[0]` in the unpacked stream.
    base: u64,
    limits: Limits,
    /// The format of the bytes, for messages.
    format: Format,
    /// The compression around the bytes.
    wrapping: Option<Format>,
}

impl fmt::Debug for Source<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Source").field("offset", &self.offset()).finish_non_exhaustive()
    }
}

impl<'r> Source<'r> {
    pub(crate) fn new(input: &'r mut dyn Read, limits: &Limits) -> Self {
        let buffer = vec![0; CHUNK].into_boxed_slice();
        let (limits, format) = (*limits, Format::Pickle);
        Self { input, buffer, next: 0, end: 0, base: 0, limits, format, wrapping: None }
    }

    /// Makes a source of the output of a decoder.
    pub(crate) fn wrapped(input: &'r mut dyn Read, limits: &Limits, wrapping: Format) -> Self {
        Self { wrapping: Some(wrapping), ..Self::new(input, limits) }
    }

    /// Sets the format of the bytes, for messages.
    pub(crate) fn read_as(&mut self, format: Format) {
        self.format = format;
    }

    /// Returns the offset of the next byte in the unpacked stream.
    #[inline]
    pub(crate) fn offset(&self) -> u64 {
        self.base + self.next as u64
    }

    #[inline]
    pub(crate) fn byte(&mut self) -> Result<u8, TraceError> {
        self.array().map(|[byte]| byte)
    }

    // Lengths and memo numbers have several widths in a pickle.

    #[inline]
    pub(crate) fn u8(&mut self) -> Result<u64, TraceError> {
        self.byte().map(u64::from)
    }

    #[inline]
    pub(crate) fn u32(&mut self) -> Result<u64, TraceError> {
        self.array().map(|bytes| u32::from_le_bytes(bytes).into())
    }

    #[inline]
    pub(crate) fn u64(&mut self) -> Result<u64, TraceError> {
        self.array().map(u64::from_le_bytes)
    }

    /// Reads a decimal number on a line of its own.
    pub(crate) fn decimal(&mut self) -> Result<u64, TraceError> {
        let (offset, mut line) = (self.offset(), Vec::new());
        self.line(&mut line)?;
        let number = str::from_utf8(&line).ok().and_then(|line| line.parse().ok());
        number.ok_or_else(|| TraceError::broken(self.format, offset, "a number", "other text"))
    }

    #[inline]
    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], TraceError> {
        loop {
            if let Some(bytes) = self.buffer[self.next..self.end].first_chunk::<N>() {
                self.next += N;
                return Ok(*bytes);
            }
            self.fill(N)?;
        }
    }

    /// Consumes the next `len` bytes and returns them from the buffer. `len` is at most [`CHUNK`].
    #[inline]
    pub(crate) fn slice(&mut self, len: usize) -> Result<&[u8], TraceError> {
        debug_assert!(len <= CHUNK, "a longer slice does not fit the buffer: use `copy`");
        if self.end - self.next < len {
            self.fill(len)?;
        }
        let start = self.next;
        self.next += len;
        Ok(&self.buffer[start..self.next])
    }

    /// Returns the next `len` bytes, fewer only at the end of the file, without consuming them.
    pub(crate) fn peek(&mut self, len: usize) -> Result<&[u8], TraceError> {
        debug_assert!(len <= CHUNK, "a longer slice does not fit the buffer");
        if self.end - self.next < len {
            self.make_room();
            while self.end < len && self.pull()? > 0 {}
        }
        Ok(&self.buffer[self.next..self.end.min(self.next + len)])
    }

    /// Returns the bytes in the buffer, empty only at the end of the file, without consuming them.
    /// [`Self::used`] consumes them.
    #[inline]
    pub(crate) fn some(&mut self) -> Result<&[u8], TraceError> {
        if self.next == self.end {
            self.make_room();
            self.pull()?;
        }
        Ok(&self.buffer[self.next..self.end])
    }

    /// Consumes bytes that [`Self::some`] or [`Self::peek`] returned.
    #[inline]
    pub(crate) fn used(&mut self, len: usize) {
        self.next = (self.next + len).min(self.end);
    }

    /// Reads the next `len` bytes into `into`, which grows only as bytes arrive.
    pub(crate) fn copy(&mut self, len: u64, into: &mut Vec<u8>) -> Result<(), TraceError> {
        into.clear();
        let mut left = len;
        while left > 0 {
            let bytes = self.some()?;
            let take = usize::try_from(left).map_or(bytes.len(), |left| left.min(bytes.len()));
            if take == 0 {
                return Err(self.cut_short(left));
            }
            into.extend_from_slice(&bytes[..take]);
            self.used(take);
            left -= take as u64;
            self.within(into.len(), self.offset())?;
        }
        Ok(())
    }

    /// Skips the next `len` bytes.
    pub(crate) fn skip(&mut self, len: u64) -> Result<(), TraceError> {
        let mut left = len;
        while left > 0 {
            let here = self.some()?.len();
            if here == 0 {
                return Err(self.cut_short(left));
            }
            let take = usize::try_from(left).map_or(here, |left| left.min(here));
            self.used(take);
            left -= take as u64;
        }
        Ok(())
    }

    /// Reads a line into `into`, without its line feed.
    pub(crate) fn line(&mut self, into: &mut Vec<u8>) -> Result<(), TraceError> {
        into.clear();
        loop {
            let byte = self.byte()?;
            if byte == b'\n' {
                return Ok(());
            }
            into.push(byte);
            self.within(into.len(), self.offset())?;
        }
    }

    /// Reads a decoder to its end, because some checks happen only there.
    pub(crate) fn finish_wrapping(&mut self) -> Result<(), TraceError> {
        while self.wrapping.is_some() {
            self.base += self.end as u64;
            (self.next, self.end) = (0, 0);
            if self.pull()? == 0 {
                break;
            }
        }
        Ok(())
    }

    /// Fills the buffer with at least `want` unconsumed bytes.
    #[cold]
    fn fill(&mut self, want: usize) -> Result<(), TraceError> {
        self.make_room();
        while self.end < want {
            if self.pull()? == 0 {
                return Err(self.cut_short((want - self.end) as u64));
            }
        }
        Ok(())
    }

    /// Moves unconsumed bytes to the start of the buffer.
    fn make_room(&mut self) {
        self.buffer.copy_within(self.next..self.end, 0);
        self.base += self.next as u64;
        self.end -= self.next;
        self.next = 0;
    }

    /// Reads once into the free end of the buffer. Returns the number of bytes, zero at the end.
    fn pull(&mut self) -> Result<usize, TraceError> {
        let got = loop {
            match self.input.read(&mut self.buffer[self.end..]) {
                Ok(got) => break got,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(self.failed(error)),
            }
        };
        self.end += got;
        let limit = self.limits.unpacked_bytes;
        if self.base + self.end as u64 > limit {
            let what = "the unpacked length";
            return Err(TraceError::Limit { offset: limit, what, limit, field: "unpacked_bytes" });
        }
        Ok(got)
    }

    /// Makes the error of a failed read: of the operating system, or of a decoder.
    #[cold]
    fn failed(&self, error: io::Error) -> TraceError {
        let Some(wrapping) = self.wrapping.filter(|_| error.raw_os_error().is_none()) else {
            return TraceError::Io { source: error };
        };
        let offset = self.base + self.end as u64;
        // A decoder reports a cut file in this way.
        if error.kind() == ErrorKind::UnexpectedEof {
            let expected = format!("the rest of the {wrapping}");
            return TraceError::broken(wrapping, offset, expected, "the end of the file");
        }
        TraceError::broken(wrapping, offset, "sound packed data", format!("damage: {error}"))
    }

    /// Checks the length of a single value while it is read. No trace has a value much longer than
    /// a file name.
    #[inline]
    pub(crate) fn within(&self, len: usize, offset: u64) -> Result<(), TraceError> {
        if len > LONGEST {
            let expected = format!("values of at most {LONGEST} bytes");
            return Err(TraceError::broken(self.format, offset, expected, "a longer one"));
        }
        let (what, limit) = ("one long value", self.limits.memory_bytes);
        if len as u64 > limit {
            return Err(TraceError::Limit { offset, what, limit, field: "memory_bytes" });
        }
        Ok(())
    }

    /// Checks the memory that a reader holds, by its own estimate. Beside the fixed limit, a limit
    /// grows with the bytes read: a small file that needs gigabytes is not a trace.
    pub(crate) fn check_memory(&self, held: usize, offset: u64) -> Result<(), TraceError> {
        let first = offset.min(FIRST_BYTES) * BYTES_PER_BYTE;
        let allowed = offset.saturating_add(START_BYTES + first);
        let (limit, what) = match self.limits.memory_bytes {
            limit if limit <= allowed => (limit, "the memory needed"),
            _ => (allowed, "the memory needed, far more than was read of the file,"),
        };
        if held as u64 > limit {
            return Err(TraceError::Limit { offset, what, limit, field: "memory_bytes" });
        }
        Ok(())
    }

    #[cold]
    fn cut_short(&self, missing: u64) -> TraceError {
        let expected = match missing {
            1 => "one more byte".to_owned(),
            _ => format!("{missing} more bytes"),
        };
        let offset = self.base + self.end as u64;
        TraceError::broken(self.format, offset, expected, "the end of the file")
    }
}
