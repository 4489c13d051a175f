//! The way in: a path or any reader, gzip or plain, under limits.
//!
//! A snapshot often arrives from someone else's machine, so the file is not trusted: nothing is
//! allocated because a header says so, only because the bytes were there, and both the unpacked
//! length and the memory held have a ceiling.

use std::fmt;
use std::fs::File;
use std::io::{Cursor, ErrorKind, Read};
use std::path::Path;

use flate2::read::MultiGzDecoder;

use crate::error::TraceError;
use crate::own;
use crate::pickle::Machine;
use crate::snapshot::{self, Snapshot};

/// How much of an untrusted file the reader takes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The most bytes the file may have once unpacked; 16 GiB unless told otherwise.
    pub unpacked_bytes: u64,
    /// The most memory the reader may hold, as it estimates it itself; 8 GiB unless told
    /// otherwise. Unpacked bytes alone do not bound it: an empty list is one byte in the file.
    pub memory_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { unpacked_bytes: 16 << 30, memory_bytes: 8 << 30 }
    }
}

/// Reads the snapshot file at `path`, gzip or plain.
///
/// # Errors
///
/// When the file cannot be read, is not a pickle, is not a snapshot, or is over a limit.
pub fn open(path: &Path, limits: &Limits) -> Result<Snapshot, TraceError> {
    let file = File::open(path).map_err(|source| TraceError::Io { source })?;
    read(file, limits)
}

/// Reads a snapshot, gzip or plain, from any reader; it is buffered here.
///
/// # Errors
///
/// When the input cannot be read, is not a pickle, is not a snapshot, or is over a limit.
pub fn read(mut input: impl Read, limits: &Limits) -> Result<Snapshot, TraceError> {
    let mut start = Vec::with_capacity(GZIP_MAGIC.len());
    input
        .by_ref()
        .take(GZIP_MAGIC.len() as u64)
        .read_to_end(&mut start)
        .map_err(|source| TraceError::Io { source })?;
    if start.is_empty() {
        return Err(TraceError::Snapshot { what: "the file is empty".to_owned() });
    }
    let zipped = start == GZIP_MAGIC;
    let mut plain = Cursor::new(start).chain(input);
    if zipped {
        let mut unzipped = MultiGzDecoder::new(plain);
        let mut source = Source::new(&mut unzipped, limits);
        let snapshot = unpacked(&mut source)?;
        // The checksum lies behind the last byte: only a reader that goes on to the end sees it.
        source.drain()?;
        Ok(snapshot)
    } else {
        unpacked(&mut Source::new(&mut plain, limits))
    }
}

/// Reads what was wrapped: the first bytes tell what it is.
fn unpacked(source: &mut Source<'_>) -> Result<Snapshot, TraceError> {
    if source.starts_with(own::MAGIC)? {
        return own::read(source).map_err(|error| error.in_format(own::FORMAT));
    }
    let (root, arena) = Machine::new(source).run()?;
    snapshot::build(root, arena)
}

const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// How much is read at once; also the longest run of bytes [`Source::slice`] lends.
pub(crate) const CHUNK: usize = 64 << 10;

/// Unpacked bytes with their offset, counted against the limit as they come in.
pub(crate) struct Source<'r> {
    input: &'r mut dyn Read,
    buffer: Box<[u8]>,
    /// `buffer[next..end]` is read but not yet used.
    next: usize,
    end: usize,
    /// The offset of `buffer[0]` in the unpacked stream.
    base: u64,
    limits: Limits,
}

impl fmt::Debug for Source<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Source").field("offset", &self.offset()).finish_non_exhaustive()
    }
}

impl<'r> Source<'r> {
    pub(crate) fn new(input: &'r mut dyn Read, limits: &Limits) -> Self {
        let buffer = vec![0; CHUNK].into_boxed_slice();
        Self { input, buffer, next: 0, end: 0, base: 0, limits: *limits }
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The offset of the next byte in the unpacked stream.
    #[inline]
    pub(crate) fn offset(&self) -> u64 {
        self.base + self.next as u64
    }

    /// Whether these bytes come next; they stay to be read.
    pub(crate) fn starts_with(&mut self, start: &[u8]) -> Result<bool, TraceError> {
        debug_assert!(self.next == 0, "only asked at the start, where the buffer has room");
        while self.end - self.next < start.len() && self.pull()? > 0 {}
        Ok(self.buffer[self.next..self.end].starts_with(start))
    }

    #[inline]
    pub(crate) fn byte(&mut self) -> Result<u8, TraceError> {
        self.array().map(|[byte]| byte)
    }

    // Lengths and memo numbers come in several widths, and mean the same in each.

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

    /// A number written out as a line of text.
    pub(crate) fn decimal(&mut self) -> Result<u64, TraceError> {
        let (offset, mut line) = (self.offset(), Vec::new());
        self.line(&mut line)?;
        let number = str::from_utf8(&line).ok().and_then(|line| line.parse().ok());
        number.ok_or_else(|| TraceError::pickle(offset, "a number", "other text"))
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

    /// The next `len` bytes, lent from the buffer; `len` is at most [`CHUNK`].
    #[inline]
    pub(crate) fn slice(&mut self, len: usize) -> Result<&[u8], TraceError> {
        debug_assert!(len <= CHUNK, "a longer run does not fit the buffer: use `copy`");
        if self.end - self.next < len {
            self.fill(len)?;
        }
        let start = self.next;
        self.next += len;
        Ok(&self.buffer[start..self.next])
    }

    /// Puts the next `len` bytes into `into`, which grows only as they arrive.
    pub(crate) fn copy(&mut self, len: u64, into: &mut Vec<u8>) -> Result<(), TraceError> {
        into.clear();
        let limit = self.limits.memory_bytes;
        self.pieces(len, |offset, piece| {
            into.extend_from_slice(piece);
            within(limit, into.len(), offset)
        })
    }

    /// Passes over the next `len` bytes.
    pub(crate) fn skip(&mut self, len: u64) -> Result<(), TraceError> {
        self.pieces(len, |_, _| Ok(()))
    }

    /// Puts the bytes up to the next line feed, without it, into `into`.
    pub(crate) fn line(&mut self, into: &mut Vec<u8>) -> Result<(), TraceError> {
        into.clear();
        loop {
            let byte = self.byte()?;
            if byte == b'\n' {
                return Ok(());
            }
            into.push(byte);
            within(self.limits.memory_bytes, into.len(), self.offset())?;
        }
    }

    /// Reads on to the end of the input, for the checks that only happen there.
    pub(crate) fn drain(&mut self) -> Result<(), TraceError> {
        loop {
            self.base += self.end as u64;
            (self.next, self.end) = (0, 0);
            if self.pull()? == 0 {
                return Ok(());
            }
        }
    }

    fn pieces(
        &mut self,
        len: u64,
        mut each: impl FnMut(u64, &[u8]) -> Result<(), TraceError>,
    ) -> Result<(), TraceError> {
        let mut left = len;
        while left > 0 {
            if self.next == self.end {
                self.base += self.end as u64;
                (self.next, self.end) = (0, 0);
                if self.pull()? == 0 {
                    return Err(self.cut_short(left));
                }
            }
            let here = self.end - self.next;
            let take = usize::try_from(left).map_or(here, |left| left.min(here));
            let offset = self.offset();
            each(offset, &self.buffer[self.next..self.next + take])?;
            self.next += take;
            left -= take as u64;
        }
        Ok(())
    }

    /// Makes at least `want` unused bytes lie in the buffer.
    #[cold]
    fn fill(&mut self, want: usize) -> Result<(), TraceError> {
        self.buffer.copy_within(self.next..self.end, 0);
        self.base += self.next as u64;
        self.end -= self.next;
        self.next = 0;
        while self.end < want {
            if self.pull()? == 0 {
                return Err(self.cut_short((want - self.end) as u64));
            }
        }
        Ok(())
    }

    /// One read into the free end of the buffer: the count of bytes, zero at the end.
    fn pull(&mut self) -> Result<usize, TraceError> {
        let got = loop {
            match self.input.read(&mut self.buffer[self.end..]) {
                Ok(got) => break got,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // The gzip decoder's word for a file that stops in the middle.
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                    let offset = self.base + self.end as u64;
                    let expected = "the rest of the gzip stream";
                    return Err(TraceError::pickle(offset, expected, "the end of the file"));
                }
                Err(source) => return Err(TraceError::Io { source }),
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

    fn cut_short(&self, missing: u64) -> TraceError {
        let expected = match missing {
            1 => "one more byte".to_owned(),
            _ => format!("{missing} more bytes"),
        };
        TraceError::pickle(self.base + self.end as u64, expected, "the end of the file")
    }
}

/// A single value counts against the memory limit while it is still being put together.
fn within(limit: u64, len: usize, offset: u64) -> Result<(), TraceError> {
    if len as u64 <= limit {
        return Ok(());
    }
    Err(TraceError::Limit { offset, what: "one long value", limit, field: "memory_bytes" })
}

#[cfg(test)]
mod tests {
    use std::io::{self, Write};

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;
    use crate::pickle::write::{dict, int, snapshot, text};

    fn pickle() -> Vec<u8> {
        let event = dict(&[("action", text("alloc")), ("addr", int(512)), ("size", int(100))]);
        snapshot(&[event])
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    fn load(bytes: &[u8]) -> Result<Snapshot, TraceError> {
        read(bytes, &Limits::default())
    }

    #[test]
    fn plain_and_gzip_are_told_apart() {
        let pickle = pickle();
        let plain = load(&pickle).unwrap();
        assert_eq!(plain.devices[0].len(), 1);
        assert_eq!(load(&gzip(&pickle)).unwrap(), plain);
        // A gzip file may be several, one after the other.
        let (start, end) = pickle.split_at(10);
        assert_eq!(load(&[gzip(start), gzip(end)].concat()).unwrap(), plain);
    }

    #[test]
    fn a_file_is_opened_and_a_missing_one_is_an_io_error() {
        let path = std::env::temp_dir().join(format!("cushion-open-{}", std::process::id()));
        std::fs::write(&path, gzip(&pickle())).unwrap();
        let read = open(&path, &Limits::default());
        std::fs::remove_file(&path).unwrap();
        assert!(read.is_ok());
        let missing = open(&path, &Limits::default()).expect_err("the file is gone");
        assert!(matches!(missing, TraceError::Io { .. }), "{missing}");
    }

    #[test]
    fn reads_of_any_size_give_the_same() {
        /// Hands out one byte at a time, with interruptions.
        struct Slow<'a>(&'a [u8], bool);

        impl Read for Slow<'_> {
            fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
                self.1 = !self.1;
                if self.1 {
                    return Err(ErrorKind::Interrupted.into());
                }
                let len = buffer.len().min(1);
                self.0.read(&mut buffer[..len])
            }
        }

        let pickle = pickle();
        let slow = read(Slow(&pickle, false), &Limits::default()).unwrap();
        assert_eq!(slow, load(&pickle).unwrap());
    }

    #[test]
    fn every_cut_of_a_gzip_file_is_an_error() {
        let zipped = gzip(&pickle());
        for len in 0..zipped.len() {
            assert!(load(&zipped[..len]).is_err(), "cut to {len}");
        }
        let cut = load(&zipped[..zipped.len() - 4]).expect_err("cut in the checksum");
        assert!(cut.to_string().contains("the rest of the gzip stream"), "{cut}");
        let mut flipped = zipped;
        let checksum = flipped.len() - 8;
        flipped[checksum] ^= 1;
        assert!(matches!(load(&flipped), Err(TraceError::Io { .. })));
    }

    #[test]
    fn a_bomb_meets_the_limit() {
        // A string of 64 MiB in a file of some hundred kilobytes.
        let bomb = gzip(&text(&"x".repeat(64 << 20)));
        assert!(bomb.len() < 1 << 20);
        let limits = Limits { unpacked_bytes: 1 << 20, ..Limits::default() };
        let error = read(&bomb[..], &limits).expect_err("over the limit");
        assert!(
            matches!(error, TraceError::Limit { limit: 1_048_576, field: "unpacked_bytes", .. }),
            "{error}"
        );
        // What comes after the pickle counts too.
        let tail = gzip(&[pickle(), vec![0; 2 << 20]].concat());
        assert!(matches!(read(&tail[..], &limits), Err(TraceError::Limit { .. })));
        // A limit that is just enough is enough.
        let exact = Limits { unpacked_bytes: pickle().len() as u64, ..limits };
        assert!(read(&pickle()[..], &exact).is_ok());
    }

    #[test]
    fn nothing_is_not_a_snapshot() {
        for bytes in [&b""[..], b"\x1f", b"\x1f\x8b", b"{\"segments\": []}", b"PK\x03\x04"] {
            assert!(load(bytes).is_err(), "{bytes:?}");
        }
        let empty = load(b"").expect_err("an empty file");
        assert!(empty.to_string().contains("the file is empty"), "{empty}");
    }
}
