//! Reads a trace from a path on the command line and builds its program.

use std::io::{self, Write};
use std::path::Path;

use anyhow::{Context as _, bail};
use cushion_trace::{Limits, Origin, Program, Snapshot, open_with, read_with};

use crate::output::Streams;

/// A trace, and the program of one of its devices.
pub(crate) struct Loaded {
    /// The path as given.
    pub(crate) name: String,
    pub(crate) snapshot: Snapshot,
    pub(crate) device: usize,
    pub(crate) program: Program,
}

/// Reads the trace at `path` (`-` is standard input) and builds the program of the given device, or
/// of the one with the most events.
pub(crate) fn load<O: Write, T: Write>(
    path: &Path,
    device: Option<usize>,
    streams: &mut Streams<O, T>,
) -> anyhow::Result<Loaded> {
    let name = path.display().to_string();
    let (snapshot, _) = read_trace(path, streams)?;
    let count = snapshot.devices.len();
    let device = match device {
        Some(device) if device < count => device,
        Some(device) => bail!("no device {device}: the trace has {count}, counted from 0"),
        None => {
            let most = (0..count).rev().max_by_key(|&device| snapshot.devices[device].len());
            most.context("the trace has no device")?
        }
    };
    let busy = snapshot.devices.iter().filter(|events| !events.is_empty()).count();
    streams.begin(format!("following {}", short(&name)));
    let program = Program::of(&snapshot, device);
    streams.end();
    if program.is_empty() {
        if program.origin == Origin::Torch {
            bail!(
                "no allocations were recorded on device {device}: was \
                 torch.cuda.memory._record_memory_history() called before the run?"
            );
        }
        bail!("no allocations were recorded");
    }
    if busy > 1 {
        streams.talk(format_args!(
            "{name}: events of {busy} devices; this is device {device}, --device picks another"
        ));
    }
    for note in &program.notes {
        streams.talk(format_args!("{name}: {note}"));
    }
    Ok(Loaded { name, snapshot, device, program })
}

/// Reads the trace at `path` (`-` is standard input), and counts its bytes.
pub(crate) fn read_trace<O: Write, T: Write>(
    path: &Path,
    streams: &mut Streams<O, T>,
) -> anyhow::Result<(Snapshot, u64)> {
    let limits = Limits::default();
    let mut bytes = 0;
    let snapshot = if path == Path::new("-") {
        streams.begin("reading standard input");
        read_with(io::stdin().lock(), &limits, &mut |read| {
            bytes = read;
            streams.update(read, None);
        })
    } else {
        streams.begin(format!("reading {}", short(&path.display().to_string())));
        open_with(path, &limits, &mut |read, length| {
            bytes = read;
            streams.update(read, length);
        })
    };
    streams.end();
    Ok((snapshot?, bytes))
}

/// Returns the file name of a path, for tables and progress.
pub(crate) fn short(name: &str) -> String {
    let file = Path::new(name).file_name().unwrap_or(name.as_ref());
    file.to_string_lossy().into_owned()
}
