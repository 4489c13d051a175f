//! The way in: a path or any reader, plain or packed, under limits.
//!
//! A trace often arrives from someone else's machine, so the file is not trusted: nothing is
//! allocated because a header says so, only because the bytes were there, and both the unpacked
//! length and the memory held have a ceiling. What the file is, its first bytes say.

use std::fs::{self, File};
use std::io::{self, Cursor, Read};
use std::path::Path;

use flate2::read::MultiGzDecoder;

use crate::detect::{self, GZIP_MAGIC, Kind, LOOK, ZSTD_MAGIC};
use crate::error::{Format, TraceError};
use crate::json;
use crate::own;
use crate::pickle::Machine;
use crate::rmm;
use crate::snapshot::{self, Snapshot};
use crate::source::Source;
use crate::zstd;

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

/// Reads the trace at `path`: a PyTorch memory snapshot (pickle or JSON), an RMM log or a Cushion
/// trace, plain or packed with gzip or zstd.
///
/// # Errors
///
/// When the file cannot be read, is none of these, is broken, or is over a limit.
pub fn open(path: &Path, limits: &Limits) -> Result<Snapshot, TraceError> {
    open_with(path, limits, &mut |_, _| {})
}

/// The same; `progress` is told how many bytes of the file were read so far, packed as they are, and
/// how many it has, if it is a plain file, each time some were.
///
/// # Errors
///
/// When the file cannot be read, is no trace, is broken, or is over a limit.
pub fn open_with(
    path: &Path,
    limits: &Limits,
    progress: &mut dyn FnMut(u64, Option<u64>),
) -> Result<Snapshot, TraceError> {
    let file = File::open(path).map_err(|source| TraceError::Io { source })?;
    let metadata = file.metadata().ok();
    if metadata.as_ref().is_some_and(fs::Metadata::is_dir) {
        return Err(TraceError::Unknown { found: "a directory".to_owned() });
    }
    let length = metadata.filter(fs::Metadata::is_file).map(|metadata| metadata.len());
    read_with(file, limits, &mut |read| progress(read, length))
}

/// Reads a trace, as [`open`] does, from any reader; it is buffered here.
///
/// # Errors
///
/// When the input cannot be read, is no trace, is broken, or is over a limit.
pub fn read(input: impl Read, limits: &Limits) -> Result<Snapshot, TraceError> {
    read_with(input, limits, &mut |_| {})
}

/// The same; `progress` is told how many bytes of the input were read so far, packed as they are,
/// each time some were.
///
/// # Errors
///
/// When the input cannot be read, is no trace, is broken, or is over a limit.
pub fn read_with(
    input: impl Read,
    limits: &Limits,
    progress: &mut dyn FnMut(u64),
) -> Result<Snapshot, TraceError> {
    let mut input = Watched { input, bytes: 0, progress };
    let mut start = Vec::with_capacity(ZSTD_MAGIC.len());
    input
        .by_ref()
        .take(ZSTD_MAGIC.len() as u64)
        .read_to_end(&mut start)
        .map_err(|source| TraceError::Io { source })?;
    let (gzip, zstd) = (start.starts_with(GZIP_MAGIC), start.starts_with(ZSTD_MAGIC));
    let mut plain = Cursor::new(start).chain(input);
    if gzip {
        let mut unpacked = MultiGzDecoder::new(plain);
        read_source(&mut Source::wrapped(&mut unpacked, limits, Format::Gzip))
    } else if zstd {
        let mut unpacked = zstd::Unpacker::new(plain, limits.memory_bytes);
        read_source(&mut Source::wrapped(&mut unpacked, limits, Format::Zstd))
    } else {
        read_source(&mut Source::new(&mut plain, limits))
    }
}

fn read_source(source: &mut Source<'_>) -> Result<Snapshot, TraceError> {
    let snapshot = match detect::kind(source.peek(LOOK)?) {
        Kind::Pickle => {
            source.read_as(Format::Pickle);
            let (root, arena) = Machine::new(source).run()?;
            snapshot::build(root, arena)?
        }
        Kind::Json => {
            source.read_as(Format::Json);
            let (root, arena) = json::Reader::new(source).run()?;
            snapshot::build(root, arena)?
        }
        Kind::Rmm => {
            source.read_as(Format::Rmm);
            rmm::read(source)?
        }
        Kind::Own => {
            source.read_as(Format::Own);
            own::read(source)?
        }
        Kind::Other(found) => return Err(TraceError::Unknown { found }),
    };
    // A checksum lies behind the last byte: only a reader that goes on to the end sees it.
    source.finish_wrapping()?;
    if let Some(events) = snapshot.devices.iter().find(|events| events.len() > MOST_EVENTS) {
        let what = format!(
            "one device has {} events, expected at most {MOST_EVENTS}: cut the trace",
            events.len()
        );
        return Err(TraceError::snapshot(source.offset(), what));
    }
    Ok(snapshot)
}

/// Events of one device: half a billion, so that steps and slots can be numbered in 30 bits.
const MOST_EVENTS: usize = 1 << 29;

/// Counts what is read.
struct Watched<'p, R> {
    input: R,
    bytes: u64,
    progress: &'p mut dyn FnMut(u64),
}

impl<R: Read> Read for Watched<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let got = self.input.read(buffer)?;
        self.bytes += got as u64;
        (self.progress)(self.bytes);
        Ok(got)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{self, ErrorKind, Write};

    use flate2::Compression;
    use flate2::write::GzEncoder;
    use ruzstd::encoding::{CompressionLevel, compress_to_vec};

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
        assert!(cut.to_string().contains("the rest of the gzip wrapping"), "{cut}");
        let mut flipped = zipped;
        let checksum = flipped.len() - 8;
        flipped[checksum] ^= 1;
        let flipped = load(&flipped).expect_err("a wrong checksum");
        assert!(matches!(flipped, TraceError::Broken { format: Format::Gzip, .. }), "{flipped}");
    }

    #[test]
    fn zstd_is_read_frame_by_frame() {
        let (pickle, plain) = (pickle(), load(&pickle()).unwrap());
        let zstd = |bytes: &[u8]| compress_to_vec(bytes, CompressionLevel::Fastest);
        assert_eq!(load(&zstd(&pickle)).unwrap(), plain);
        let (start, end) = pickle.split_at(10);
        // A frame that readers are to skip lies between the two.
        let skipped = [&[0x50, 0x2a, 0x4d, 0x18, 3, 0, 0, 0][..], b"abc"].concat();
        let frames = [zstd(start), skipped.clone(), zstd(end)].concat();
        assert_eq!(load(&frames).unwrap(), plain);
        for len in 4..frames.len() {
            // At the end of a frame there may be no other: the pickle is cut short then.
            assert!(load(&frames[..len]).is_err(), "cut to {len}");
        }
        let mut flipped = zstd(&pickle);
        let last = flipped.len() - 1;
        flipped[last] ^= 1;
        let error = load(&flipped).expect_err("damage");
        assert!(matches!(error, TraceError::Broken { format: Format::Zstd, .. }), "{error}");
        // A window of 2 TiB.
        let absurd = [ZSTD_MAGIC, &[0x00, 0xf8, 1, 0, 0]].concat();
        let error = load(&absurd).expect_err("an absurd window");
        assert!(error.to_string().contains("its window is"), "{error}");
    }

    #[test]
    fn progress_counts_the_packed_bytes() {
        let packed = gzip(&pickle());
        let mut told = Vec::new();
        read_with(&packed[..], &Limits::default(), &mut |bytes| told.push(bytes)).unwrap();
        assert!(told.is_sorted());
        assert_eq!(told.last(), Some(&(packed.len() as u64)));
    }

    #[test]
    fn a_bomb_meets_the_limit() {
        // A string of 64 MiB in a file of some hundred kilobytes.
        let bomb = gzip(&[b"\x80\x04".to_vec(), text(&"x".repeat(64 << 20))].concat());
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
        assert!(empty.to_string().contains("an empty file"), "{empty}");
    }
}
