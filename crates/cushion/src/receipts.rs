//! Writes receipts to a file as lines of JSON.
//!
//! Each receipt is one write of a whole line to the end of the file. A killed process loses at most
//! its last line, and several processes may share a file. Receipts that cannot be written are
//! counted: a full disk must not fail an allocation, but must not pass unnoticed either.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read as _, Seek as _, SeekFrom, Write};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cushion_core::Receipt;

use crate::devices::{DeviceEngine, DeviceError};

/// Receipts that could not be written.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct LostReceipts {
    /// The number of lost receipts.
    pub count: u64,
    /// The error of the first lost receipt.
    pub first: Option<String>,
}

/// The file for the receipts of one device.
#[derive(Debug, Default)]
pub(crate) struct ReceiptLog {
    inner: Mutex<Inner<File>>,
}

#[derive(Debug)]
struct Inner<W> {
    file: Option<W>,
    /// Whether the file may end in the middle of a line.
    is_torn: bool,
    lost: LostReceipts,
    listens: bool,
}

impl<W> Default for Inner<W> {
    fn default() -> Self {
        Self { file: None, is_torn: false, lost: LostReceipts::default(), listens: false }
    }
}

impl ReceiptLog {
    fn inner(&self) -> MutexGuard<'_, Inner<File>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn lost(&self) -> LostReceipts {
        self.inner().lost.clone()
    }
}

/// Opens a file for receipts, creating it if necessary.
pub(crate) fn open_receipts(path: &Path) -> Result<File, DeviceError> {
    let failed = |source| DeviceError::Receipts { path: path.to_owned(), source: Arc::new(source) };
    File::options().append(true).create(true).open(path).map_err(failed)
}

/// Appends every receipt of an engine to a file from now on, as a line of JSON. The file replaces
/// an earlier one, and is created if necessary.
/// [`Device::write_receipts`](crate::Device::write_receipts) does this for its device.
pub fn write_receipts(engine: &DeviceEngine, path: impl AsRef<Path>) -> Result<(), DeviceError> {
    let path = path.as_ref();
    let file = open_receipts(path)?;
    let is_torn = ends_mid_line(path);
    let log = engine.driver().receipt_log();
    let listens = {
        let mut inner = log.inner();
        (inner.file, inner.is_torn) = (Some(file), is_torn);
        std::mem::replace(&mut inner.listens, true)
    };
    if !listens {
        let log = Arc::clone(log);
        engine.on_receipt(move |receipt| log.inner().write(receipt));
    }
    Ok(())
}

/// Returns the number of an engine's receipts that could not be written, and the first error.
#[must_use]
pub fn lost_receipts(engine: &DeviceEngine) -> LostReceipts {
    engine.driver().receipt_log().lost()
}

/// Stops writing the receipts of an engine.
pub(crate) fn stop_receipts(engine: &DeviceEngine) {
    engine.driver().receipt_log().inner().file = None;
}

/// Returns whether the file ends in the middle of a line, as a killed process may leave it. A pipe
/// or device has no end, and so returns false.
fn ends_mid_line(path: &Path) -> bool {
    if !fs::metadata(path).is_ok_and(|what| what.is_file() && what.len() > 0) {
        return false;
    }
    let last = File::open(path).and_then(|mut file| {
        file.seek(SeekFrom::End(-1))?;
        let mut last = [0];
        file.read_exact(&mut last).map(|()| last[0])
    });
    last.is_ok_and(|last| last != b'\n')
}

impl<W: Write> Inner<W> {
    fn write(&mut self, receipt: &Receipt) {
        let Some(file) = &mut self.file else { return };
        let mut line = if self.is_torn { b"\n".to_vec() } else { Vec::new() };
        let written = serde_json::to_writer(&mut line, receipt).map_err(io::Error::from);
        let written = written.and_then(|()| {
            line.push(b'\n');
            write_once(file, &line)
        });
        match written {
            Ok(bytes) if bytes == line.len() => self.is_torn = false,
            Ok(bytes) => {
                self.is_torn |= bytes > 0;
                self.lose(format!("{bytes} of its {} bytes could be written", line.len()));
            }
            Err(error) => self.lose(error.to_string()),
        }
    }

    fn lose(&mut self, why: String) {
        self.lost.count += 1;
        self.lost.first.get_or_insert(why);
    }
}

/// Makes one write and returns how many bytes it took. A second write for the rest could land after
/// another process's line.
fn write_once(file: &mut impl Write, line: &[u8]) -> io::Result<usize> {
    loop {
        match file.write(line) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

#[cfg(test)]
mod tests {
    use cushion_core::{Engine, SimConfig, SimDriver, StreamId};

    use super::*;

    fn receipt() -> Arc<Receipt> {
        let engine = Engine::new(SimDriver::new(SimConfig::with_capacity(1 << 20)));
        engine.alloc(1 << 30, StreamId(0)).unwrap_err();
        Arc::clone(&engine.receipts()[0])
    }

    /// A disk with limited room that counts writes.
    #[derive(Debug, Default)]
    struct Disk {
        room: usize,
        text: Vec<u8>,
        writes: u32,
    }

    impl Write for Disk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.writes += 1;
            if self.writes == 1 {
                return Err(ErrorKind::Interrupted.into());
            }
            if self.room == 0 {
                return Err(ErrorKind::StorageFull.into());
            }
            let taken = bytes.len().min(self.room);
            self.text.extend_from_slice(&bytes[..taken]);
            self.room -= taken;
            Ok(taken)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_short_write_is_counted_and_the_next_line_is_whole() {
        let receipt = receipt();
        let length = serde_json::to_string(&*receipt).unwrap().len() + 1;
        let disk = Disk { room: length + 10, ..Disk::default() };
        let mut log = Inner { file: Some(disk), ..Inner::default() };
        (0..3).for_each(|_| log.write(&receipt));
        let why = format!("10 of its {length} bytes could be written");
        assert_eq!(log.lost, LostReceipts { count: 2, first: Some(why) });
        let disk = log.file.as_mut().unwrap();
        assert_eq!(disk.writes, 1 + 3, "one write for each, and one that was interrupted");
        disk.room = usize::MAX;
        (0..2).for_each(|_| log.write(&receipt));
        let disk = log.file.unwrap();
        let read = cushion_trace::read_receipts(&disk.text[..]).unwrap();
        assert_eq!((read.latest.len(), read.torn), (3, 1));
        assert_eq!(log.lost.count, 2);
    }
}
