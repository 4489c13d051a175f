//! Streams: the order in which a device does its work.

use std::any::Any;
use std::sync::Arc;

use cushion_core::StreamId;

use crate::device::Device;
use crate::error::Error;

/// Whatever stands for a CUDA stream: [`Stream`], with the feature `cudarc` that crate's streams, and those of
/// other bindings.
///
/// # Safety
///
/// The handle is that of a stream of CUDA's, or zero for the default stream, of a device for which
/// [`is_of`](Self::is_of) is true. It stays so for as long as a device lives on which it was used, or what
/// [`owner`](Self::owner) gives: Cushion knows memory by the handles of its streams, and may ask CUDA about one long
/// after its last use.
pub unsafe trait AsStream {
    /// The raw handle.
    fn stream_id(&self) -> StreamId;

    /// Whether it may be used on this device.
    fn is_of(&self, device: &Device) -> bool;

    /// What keeps the stream from being destroyed; a device keeps it from its first use there on. `None` if nothing
    /// ever destroys it.
    fn owner(&self) -> Option<Arc<dyn Any + Send + Sync>>;
}

/// The handle that CUDA takes for the default stream of whatever thread asks.
const PER_THREAD: StreamId = StreamId(2);

impl Device {
    /// The handle of a stream that is to be used here.
    pub(crate) fn using(&self, stream: &(impl AsStream + ?Sized)) -> Result<StreamId, Error> {
        if !stream.is_of(self) {
            return Err(Error::OtherDevice);
        }
        let id = stream.stream_id();
        self.check_stream(id)?;
        self.engine().driver().keep(id, || stream.owner());
        Ok(id)
    }

    /// Refuses what stands for several streams at once: memory could not be handed out in their order.
    pub fn check_stream(&self, stream: StreamId) -> Result<(), Error> {
        if stream == PER_THREAD && !self.is_simulated() {
            Err(Error::PerThreadStream)
        } else {
            Ok(())
        }
    }
}

/// A stream of one device. When it is dropped its work goes on, and the stream is kept for the next
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

    /// A stream that somebody else made.
    ///
    /// # Safety
    ///
    /// `id` is the handle of a stream of this device, or zero, and is not destroyed before the device and all that
    /// is of it.
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
}

// SAFETY: the handle is of the driver's making, which destroys no stream before the device goes, or its maker has
// promised the same.
unsafe impl AsStream for Stream {
    fn stream_id(&self) -> StreamId {
        self.id
    }

    fn is_of(&self, device: &Device) -> bool {
        self.device.is_same(device)
    }

    fn owner(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        // The device that it is of has it.
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
