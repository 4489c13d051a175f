//! Streams: the order in which a device does its work.

use cushion_core::StreamId;

use crate::device::Device;
use crate::error::Error;

/// Whatever stands for a CUDA stream: [`Stream`], with the feature `cudarc` that crate's streams, and those of
/// other bindings.
///
/// Memory that was freed on a stream is handed out again on that stream, by its handle. So that CUDA does not
/// give the handle of a destroyed stream to a new one while work of the old one still runs, wait for the work of
/// a stream before it is destroyed; [`Stream`] does.
///
/// # Safety
///
/// The handle is that of a stream of CUDA's, or zero for the default stream, and stays so for as long as the
/// value lives.
pub unsafe trait AsStream {
    /// The raw handle.
    fn stream_id(&self) -> StreamId;
}

/// A stream of one device. Dropping it waits for its work and destroys it, unless it is the default stream.
#[derive(Debug)]
pub struct Stream {
    device: Device,
    id: StreamId,
    owned: bool,
}

impl Stream {
    pub(crate) fn new(device: &Device) -> Result<Self, Error> {
        let id = device.engine().driver().stream_create()?;
        Ok(Self { device: device.clone(), id, owned: true })
    }

    pub(crate) fn default_of(device: &Device) -> Self {
        Self { device: device.clone(), id: StreamId(0), owned: false }
    }

    /// A stream that somebody else made and will destroy.
    ///
    /// # Safety
    ///
    /// `id` is the handle of a stream of this device, or zero, and stays so for as long as the value lives.
    #[must_use]
    pub unsafe fn from_raw(device: &Device, id: StreamId) -> Self {
        Self { device: device.clone(), id, owned: false }
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Waits until all work queued so far is done.
    pub fn synchronize(&self) -> Result<(), Error> {
        Ok(self.device.engine().driver().stream_wait(self.id)?)
    }

    /// Gives the handle away: the stream is not destroyed any more.
    #[must_use]
    pub fn into_raw(mut self) -> StreamId {
        self.owned = false;
        self.id
    }
}

// SAFETY: the handle is of the driver's making and destroyed when the stream is dropped, or the maker has
// promised the same.
unsafe impl AsStream for Stream {
    fn stream_id(&self) -> StreamId {
        self.id
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.owned {
            let driver = self.device.engine().driver();
            // Where CUDA is broken or shut down there is nothing left to wait for.
            let _ = driver.stream_wait(self.id);
            // SAFETY: made by `stream_create`, and this was its only owner.
            let _ = unsafe { driver.stream_destroy(self.id) };
        }
    }
}
