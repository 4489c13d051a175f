//! Opens and reads a trace: detects compression and format, and calls the reader of the format.
//!
//! Files are not trusted. Readers allocate memory for bytes that have arrived, never because a
//! header announces them, and both the unpacked length and the memory in use are limited.

use std::fs::{self, File};
use std::io::{self, Cursor, Read};
use std::path::Path;

use flate2::read::MultiGzDecoder;

use super::detect::{self, GZIP_MAGIC, Kind, LOOK, ZSTD_MAGIC};
use super::limits::Limits;
use super::pickle::Machine;
use super::python::build;
use super::source::Source;
use super::{json, own, rmm, zstd};
use crate::model::error::{Format, TraceError};
use crate::model::snapshot::Snapshot;

/// Reads the trace at `path`: a PyTorch memory snapshot (pickle or JSON), an RMM log or a Cushion
/// trace, plain or packed with gzip or zstd.
///
/// # Errors
///
/// Fails if the file cannot be read, is not a trace, is broken, or exceeds a limit.
pub fn open(path: &Path, limits: &Limits) -> Result<Snapshot, TraceError> {
    open_with(path, limits, &mut |_, _| {})
}

/// Reads the trace at `path`, as [`open`] does, and reports progress.
///
/// After each read, `progress` gets the bytes of the file read so far, before decompression, and
/// the length of the file if it is a regular file.
///
/// # Errors
///
/// Fails if the file cannot be read, is not a trace, is broken, or exceeds a limit.
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

/// Reads a trace, as [`open`] does, from any reader. The input needs no buffer of its own.
///
/// # Errors
///
/// Fails if the input cannot be read, is not a trace, is broken, or exceeds a limit.
pub fn read(input: impl Read, limits: &Limits) -> Result<Snapshot, TraceError> {
    read_with(input, limits, &mut |_| {})
}

/// Reads a trace, as [`read`] does, and reports progress: after each read, `progress` gets the
/// bytes of the input read so far, before decompression.
///
/// # Errors
///
/// Fails if the input cannot be read, is not a trace, is broken, or exceeds a limit.
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
            build::snapshot(root, arena)?
        }
        Kind::Json => {
            source.read_as(Format::Json);
            let (root, arena) = json::Reader::new(source).run()?;
            build::snapshot(root, arena)?
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
    // The checksum follows the last byte, so the decoder checks it only at the end of the input.
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

/// The most events of one device: steps and slots are numbered in 30 bits.
const MOST_EVENTS: usize = 1 << 29;

/// Counts the bytes read from an input.
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
    use crate::testing::pickle::{dict, int, snapshot, text};

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
    fn plain_and_gzip_files_are_detected() {
        let pickle = pickle();
        let plain = load(&pickle).unwrap();
        assert_eq!(plain.devices[0].len(), 1);
        assert_eq!(load(&gzip(&pickle)).unwrap(), plain);
        // A gzip file can have several members.
        let (start, end) = pickle.split_at(10);
        assert_eq!(load(&[gzip(start), gzip(end)].concat()).unwrap(), plain);
    }

    #[test]
    fn a_missing_file_is_an_io_error() {
        let path = std::env::temp_dir().join(format!("cushion-open-{}", std::process::id()));
        std::fs::write(&path, gzip(&pickle())).unwrap();
        let read = open(&path, &Limits::default());
        std::fs::remove_file(&path).unwrap();
        assert!(read.is_ok());
        let missing = open(&path, &Limits::default()).expect_err("the file is gone");
        assert!(matches!(missing, TraceError::Io { .. }), "{missing}");
    }

    #[test]
    fn the_size_of_reads_does_not_matter() {
        /// Returns one byte at a time, with interruptions.
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
        // A skippable frame lies between the two.
        let skipped = [&[0x50, 0x2a, 0x4d, 0x18, 3, 0, 0, 0][..], b"abc"].concat();
        let frames = [zstd(start), skipped.clone(), zstd(end)].concat();
        assert_eq!(load(&frames).unwrap(), plain);
        for len in 4..frames.len() {
            // A file can end after a frame; then the pickle is cut short.
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
    fn a_decompression_bomb_exceeds_the_limit() {
        // A string of 64 MiB in a file of about a hundred kilobytes.
        let bomb = gzip(&[b"\x80\x04".to_vec(), text(&"x".repeat(64 << 20))].concat());
        assert!(bomb.len() < 1 << 20);
        let limits = Limits { unpacked_bytes: 1 << 20, ..Limits::default() };
        let error = read(&bomb[..], &limits).expect_err("over the limit");
        assert!(
            matches!(error, TraceError::Limit { limit: 1_048_576, field: "unpacked_bytes", .. }),
            "{error}"
        );
        // Bytes after the pickle count too.
        let tail = gzip(&[pickle(), vec![0; 2 << 20]].concat());
        assert!(matches!(read(&tail[..], &limits), Err(TraceError::Limit { .. })));
        // The exact length is within the limit.
        let exact = Limits { unpacked_bytes: pickle().len() as u64, ..limits };
        assert!(read(&pickle()[..], &exact).is_ok());
    }

    #[test]
    fn empty_and_foreign_files_are_errors() {
        for bytes in [&b""[..], b"\x1f", b"\x1f\x8b", b"{\"segments\": []}", b"PK\x03\x04"] {
            assert!(load(bytes).is_err(), "{bytes:?}");
        }
        let empty = load(b"").expect_err("an empty file");
        assert!(empty.to_string().contains("an empty file"), "{empty}");
    }
}
