//! Writers: a snapshot as Cushion's own trace, or as a pickle or JSON that PyTorch's tools read.
//!
//! Files for PyTorch's viewer work in all its views (see `viewer`): the first events are left out,
//! and counted, if the viewer cannot undo them.

pub(crate) mod columns;
pub(crate) mod consistency;
mod json;
mod layout;
mod own;
mod pickle;
mod sink;
mod viewer;

use std::io::{self, BufWriter, Write};

use self::consistency::Inconsistency;
use self::layout::put_snapshot;
use self::viewer::Ready;
use crate::model::snapshot::Snapshot;

/// The file formats that can be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FileFormat {
    /// Cushion's own trace, which keeps the whole snapshot, compressed with gzip.
    Cushion,
    /// A pickle of protocol 4, as `torch.cuda.memory._dump_snapshot()` writes it.
    Pickle,
    /// The same values as JSON, which PyTorch's viewer reads too.
    Json,
}

/// The result of writing a snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Written {
    /// The number of events in the file.
    pub events: u64,
    /// The number of events left out: those that PyTorch's viewer cannot undo, and all events
    /// before them.
    pub left_out: u64,
    /// The reason for each device with events left out.
    pub inconsistencies: Vec<Inconsistency>,
    /// The number of segments made up, one for each allocation, if the trace has none.
    pub segments_made_up: u64,
}

/// Writes a snapshot. Bytes are written to `out` as they are made.
///
/// [`FileFormat::Cushion`] keeps the whole snapshot. The other formats are for PyTorch's viewer and
/// tools, which undo the events from the segments backwards: events that do not fit are left out.
///
/// # Errors
///
/// Fails if writing to `out` fails.
pub fn write_snapshot(
    snapshot: &Snapshot,
    format: FileFormat,
    out: impl Write,
) -> io::Result<Written> {
    if format == FileFormat::Cushion {
        own::write(snapshot, out)?;
        let events = snapshot.devices.iter().map(|events| events.len() as u64).sum();
        return Ok(Written { events, ..Written::default() });
    }
    let ready = Ready::of(snapshot);
    let mut out = BufWriter::with_capacity(1 << 16, out);
    match format {
        FileFormat::Json => put_snapshot(&ready, &mut json::Json::new(&mut out))?,
        _ => put_snapshot(&ready, &mut pickle::Pickle::new(&mut out)?)?,
    }
    out.flush()?;
    Ok(ready.into_written())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::settings::Settings;
    use crate::model::snapshot::Origin;
    use crate::model::stacks::Stacks;

    #[test]
    fn a_full_disk_is_an_error() {
        struct Full(usize);
        impl Write for Full {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                self.0 = self.0.checked_sub(bytes.len()).ok_or(io::ErrorKind::StorageFull)?;
                Ok(bytes.len())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let snapshot = Snapshot {
            origin: Origin::Torch,
            segments: Vec::new(),
            devices: Vec::new(),
            settings: Settings::default(),
            stacks: Stacks::default(),
        };
        for format in [FileFormat::Cushion, FileFormat::Pickle, FileFormat::Json] {
            let error = write_snapshot(&snapshot, format, Full(12)).expect_err("no room");
            assert_eq!(error.kind(), io::ErrorKind::StorageFull, "{format:?}");
        }
    }
}
