//! `cushion convert`: writes a trace in another format.
//!
//! The output appears whole or not at all.

use std::io::{self, Write};
use std::path::Path;

use anyhow::{Context as _, bail};
use cushion_core::size::display;
use cushion_trace::{FileFormat, Snapshot, Written, write_snapshot};
use flate2::Compression;
use flate2::write::GzEncoder;

use crate::Verdict;
use crate::args::{ConvertArgs, FormatArg};
use crate::output::Streams;
use crate::trace_files::load::read_trace;
use crate::trace_files::save::{self, STANDARD, save};

/// Runs the command.
pub(crate) fn run<O: Write, T: Write>(
    args: &ConvertArgs,
    streams: &mut Streams<O, T>,
) -> anyhow::Result<Verdict> {
    let target = Target::of(args)?;
    if !is_standard(&args.output) {
        save::check(&args.output, &[&args.input])?;
    }
    let (snapshot, size_read) = read_trace(&args.input, streams).with_context(|| {
        if is_standard(&args.input) { "standard input".to_owned() } else { name(&args.input) }
    })?;
    let (written, size_written) = if is_standard(&args.output) {
        match target.write(&snapshot, &mut streams.out) {
            Ok(done) => done,
            Err(error) => {
                // `run` in lib.rs reports the error, or ignores it for a closed pipe.
                streams.failed = Some(error);
                return Ok(Verdict::Fits);
            }
        }
    } else {
        save(&args.output, |out| target.write(&snapshot, out))?
    };
    tell(args, &written, size_read, size_written, streams);
    Ok(Verdict::Fits)
}

fn is_standard(path: &Path) -> bool {
    path == Path::new(STANDARD)
}

fn name(path: &Path) -> String {
    path.display().to_string()
}

/// The format of the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Target {
    format: FileFormat,
    gzip: bool,
}

impl Target {
    /// Returns the format that the arguments or the name of the output select.
    fn of(args: &ConvertArgs) -> anyhow::Result<Self> {
        let lower = name(&args.output).to_ascii_lowercase();
        let (stem, gzip) = match lower.strip_suffix(".gz") {
            Some(stem) => (stem, true),
            None => (lower.as_str(), false),
        };
        let format = match args.to {
            Some(FormatArg::Cushion) => FileFormat::Cushion,
            Some(FormatArg::Pickle) => FileFormat::Pickle,
            Some(FormatArg::Json) => FileFormat::Json,
            None if stem.ends_with(".cushion") => FileFormat::Cushion,
            None if stem.ends_with(".pickle") || stem.ends_with(".pkl") => FileFormat::Pickle,
            None if stem.ends_with(".json") => FileFormat::Json,
            None => bail!(
                "unknown output format: the name ends in none of .cushion, .pickle, .pkl and \
                 .json; give --to cushion, pickle or json"
            ),
        };
        // Cushion's own format is compressed already.
        Ok(Self { format, gzip: gzip && format != FileFormat::Cushion })
    }

    /// Writes the trace, and returns the number of bytes written.
    fn write(self, snapshot: &Snapshot, out: impl Write) -> io::Result<(Written, u64)> {
        let mut out = Counted { inner: out, bytes: 0 };
        let written = if self.gzip {
            let mut encoder = GzEncoder::new(&mut out, Compression::default());
            let written = write_snapshot(snapshot, self.format, &mut encoder)?;
            encoder.finish()?;
            written
        } else {
            write_snapshot(snapshot, self.format, &mut out)?
        };
        out.flush()?;
        Ok((written, out.bytes))
    }
}

fn tell<O: Write, T: Write>(
    args: &ConvertArgs,
    written: &Written,
    size_read: u64,
    size_written: u64,
    streams: &mut Streams<O, T>,
) {
    streams.talk(format_args!(
        "{} ({}) -> {} ({}), {} events",
        args.input.display(),
        display(size_read),
        args.output.display(),
        display(size_written),
        written.events
    ));
    if written.segments_made_up > 0 {
        streams.talk(format_args!(
            "the trace has no segments: each of {} allocations got its own segment",
            written.segments_made_up
        ));
    }
    if written.left_out > 0 {
        streams.talk(format_args!(
            "left out {} events that PyTorch's viewer cannot step back over; a .cushion file \
             keeps them",
            written.left_out
        ));
    }
    for found in &written.inconsistencies {
        streams.talk(format_args!("the last of them: {found}"));
    }
}

/// Counts the bytes written.
struct Counted<I> {
    inner: I,
    bytes: u64,
}

impl<I: Write> Write for Counted<I> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let put = self.inner.write(buffer)?;
        self.bytes += put as u64;
        Ok(put)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}
