//! Streams, which order the work of a device.

use std::any::Any;
use std::sync::Arc;

use cushion_core::StreamId;

use crate::device::Device;
use crate::error::Error;

/// A type that stands for a CUDA stream: [`Stream`], cudarc's streams with the feature `cudarc`,
/// and streams of other bindings.
///
/// # Safety
///
/// The handle is that of a CUDA stream, or zero for the default stream, of a device for which
/// [`is_of`](Self::is_of) returns true. It stays valid as long as any device on which it was used,
/// or as long as the value of [`owner`](Self::owner): Cushion identifies memory by stream handles,
/// and may query a stream long after its last use.
pub unsafe trait AsStream {
    /// Returns the raw handle.
    fn stream_id(&self) -> StreamId;

    /// Returns whether the stream may be used on this device.
    fn is_of(&self, device: &Device) -> bool;

    /// Returns the value that keeps the stream from being destroyed. A device keeps it from the
    /// stream's first use on. Returns `None` if nothing ever destroys the stream.
    fn owner(&self) -> Option<Arc<dyn Any + Send + Sync>>;
}

/// CUDA's handle for the default stream of the calling thread.
const PER_THREAD: StreamId = StreamId(2);

impl Device {
    /// Checks a stream for use on this device and returns its handle.
    pub(crate) fn using(&self, stream: &(impl AsStream + ?Sized)) -> Result<StreamId, Error> {
        if !stream.is_of(self) {
            return Err(Error::OtherDevice);
        }
        let id = stream.stream_id();
        self.check_stream(id)?;
        self.engine().driver().keep(id, || stream.owner());
        Ok(id)
    }

    /// Refuses the per-thread default stream: it stands for several streams, so memory cannot be
    /// reused in its order.
    pub fn check_stream(&self, stream: StreamId) -> Result<(), Error> {
        if stream == PER_THREAD && !self.is_simulated() {
            Err(Error::PerThreadStream)
        } else {
            Ok(())
        }
    }
}

/// A stream of one device. Dropping it does not stop its work; the stream is reused by a later
/// [`new_stream`](Device::new_stream).
#[derive(Debug)]
pub struct Stream {
    device: Device,
    id: StreamId,
    owned: bool,
}

impl Stream {
    pub(crate) fn new(device: &Device) -> Result<Self, Error> {
        let id = device.engine().driver().stream()?;
        Ok(Self { device: device.clone(), id, owned: true })
    }

    pub(crate) fn default_of(device: &Device) -> Self {
        Self { device: device.clone(), id: StreamId(0), owned: false }
    }

    /// Wraps a stream that was made elsewhere.
    ///
    /// # Safety
    ///
    /// `id` is the handle of a stream of this device, or zero. It is not destroyed before the
    /// device, its buffers and its streams.
    #[must_use]
    pub unsafe fn from_raw(device: &Device, id: StreamId) -> Self {
        Self { device: device.clone(), id, owned: false }
    }

    /// Returns the device of the stream.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Waits until all work queued so far is done.
    pub fn synchronize(&self) -> Result<(), Error> {
        Ok(self.device.engine().driver().stream_wait(self.id)?)
    }
}

// SAFETY: the driver made the handle and destroys no stream before the device, or the caller of
// `from_raw` promised the same.
unsafe impl AsStream for Stream {
    fn stream_id(&self) -> StreamId {
        self.id
    }

    fn is_of(&self, device: &Device) -> bool {
        self.device.is_same(device)
    }

    fn owner(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        // The device itself keeps the stream.
        None
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.owned {
            self.device.engine().driver().stream_done(self.id);
        }
    }
}
