//! Typed memory on a device. Dropping a buffer frees its memory.

use std::fmt;
use std::marker::PhantomData;

use bytemuck::{AnyBitPattern, NoUninit};
use cushion_core::{AddressError, StreamId};

use crate::device::Device;
use crate::error::Error;
use crate::stream::AsStream;

/// Holds `len` elements of `T` in the memory of a device.
///
/// A buffer belongs to the stream it was allocated on. Dropping it frees the memory in the order of
/// that stream: the next allocation on that stream can reuse it at once, after the work queued so
/// far. Work on another stream must be recorded with [`record_stream`](Self::record_stream). The
/// methods below that take a stream record it themselves. They do not make one stream wait for
/// another.
///
/// ```
/// let gpu = cushion::Device::simulated(1 << 30);
/// let stream = gpu.new_stream()?;
/// let mut a = gpu.alloc_zeros::<f32>(4, &stream)?;
/// a.copy_from_host(&[1.0, 2.0, 3.0, 4.0], &stream)?;
/// assert_eq!(a.to_vec(&stream)?, [1.0, 2.0, 3.0, 4.0]);
/// drop(a);
/// assert_eq!(gpu.memory_allocated(), 0);
/// # Ok::<(), cushion::Error>(())
/// ```
pub struct Buffer<T> {
    device: Device,
    address: u64,
    len: usize,
    stream: StreamId,
    /// Marks that the buffer owns elements, which lie in memory that the host cannot read.
    elements: PhantomData<T>,
}

impl<T> Buffer<T> {
    pub(crate) fn alloc(device: &Device, len: usize, stream: StreamId) -> Result<Self, Error> {
        let address = device.engine().alloc(Self::bytes_of(len)?, stream)?;
        Ok(Self::at(device, address, len, stream))
    }

    /// Returns the size of `len` elements in bytes.
    pub(crate) fn bytes_of(len: usize) -> Result<u64, Error> {
        let size = size_of::<T>();
        let bytes = len.checked_mul(size).ok_or(Error::TooLong { len, size })?;
        Ok(bytes as u64)
    }

    /// Wraps memory that is already allocated.
    pub(crate) fn at(device: &Device, address: u64, len: usize, stream: StreamId) -> Self {
        Self { device: device.clone(), address, len, stream, elements: PhantomData }
    }

    /// Returns the number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the buffer has no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the size of all elements in bytes.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        // `bytes_of` checked for overflow before the allocation.
        self.len * size_of::<T>()
    }

    /// Returns the device address of the first element; zero if the buffer is empty.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Returns the device of the buffer.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the stream the buffer was allocated on.
    #[must_use]
    pub fn stream_id(&self) -> StreamId {
        self.stream
    }

    /// Records that work on `stream` uses the buffer. After the buffer is dropped, its memory is
    /// reused only once the work queued on `stream` by then has finished.
    pub fn record_stream(&self, stream: &(impl AsStream + ?Sized)) -> Result<(), Error> {
        self.record(self.device.using(stream)?);
        Ok(())
    }

    fn record(&self, stream: StreamId) {
        if stream != self.stream && self.address != 0 {
            let recorded = self.device.engine().record_stream(self.address, stream);
            debug_assert!(!is_unknown(&recorded), "a buffer's address is live");
        }
    }

    /// Frees the memory now, as dropping the buffer does.
    pub fn free(self) {
        drop(self);
    }

    /// Returns the address and keeps the memory allocated. The caller frees it later, through
    /// [`from_raw`](Self::from_raw) or through the engine.
    #[must_use]
    pub fn into_raw(mut self) -> u64 {
        // The dropped buffer now has address zero and frees nothing.
        std::mem::take(&mut self.address)
    }

    /// Makes a buffer from an address that [`into_raw`](Self::into_raw) returned.
    ///
    /// # Safety
    ///
    /// The address is a live allocation of this device, made on `stream`, with room for at least
    /// `len` elements of `T`. Nothing else frees it.
    #[must_use]
    pub unsafe fn from_raw(device: &Device, address: u64, len: usize, stream: StreamId) -> Self {
        Self::at(device, address, len, stream)
    }

    /// Sets all bytes to zero. The work is queued on `stream`.
    pub fn fill_zero(&mut self, stream: &(impl AsStream + ?Sized)) -> Result<(), Error> {
        self.zero(self.device.using(stream)?)
    }

    pub(crate) fn zero(&mut self, stream: StreamId) -> Result<(), Error> {
        if self.size_bytes() == 0 {
            return Ok(());
        }
        self.record(stream);
        let driver = self.device.engine().driver();
        // SAFETY: the buffer owns this memory, and `record` has noted the stream.
        Ok(unsafe { driver.fill(self.address, self.size_bytes(), 0, stream) }?)
    }

    /// Copies from another buffer of the same length and device. The work is queued on `stream`.
    pub fn copy_from(
        &mut self,
        other: &Self,
        stream: &(impl AsStream + ?Sized),
    ) -> Result<(), Error> {
        self.expect_len(other.len)?;
        if !self.device.is_same(&other.device) {
            return Err(Error::OtherDevice);
        }
        let stream = self.device.using(stream)?;
        if self.size_bytes() == 0 {
            return Ok(());
        }
        self.record(stream);
        other.record(stream);
        let driver = self.device.engine().driver();
        // SAFETY: both buffers own their memory and have the same length; `record` has noted the
        // stream.
        Ok(unsafe { driver.copy(other.address, self.address, self.size_bytes(), stream) }?)
    }

    fn expect_len(&self, len: usize) -> Result<(), Error> {
        if len == self.len { Ok(()) } else { Err(Error::Lengths { one: self.len, other: len }) }
    }
}

impl<T: NoUninit> Buffer<T> {
    /// Copies all elements from the host after the work queued on `stream` so far, and waits until
    /// the copy is done.
    pub fn copy_from_host(
        &mut self,
        host: &[T],
        stream: &(impl AsStream + ?Sized),
    ) -> Result<(), Error> {
        self.write(host, self.device.using(stream)?)
    }

    pub(crate) fn write(&mut self, host: &[T], stream: StreamId) -> Result<(), Error> {
        self.expect_len(host.len())?;
        if self.size_bytes() == 0 {
            return Ok(());
        }
        self.record(stream);
        let driver = self.device.engine().driver();
        // SAFETY: the buffer owns this memory, which is as long as `host`; `record` has noted the
        // stream.
        Ok(unsafe { driver.write(self.address, bytemuck::cast_slice(host), stream) }?)
    }
}

impl<T: AnyBitPattern + NoUninit> Buffer<T> {
    /// Copies all elements to the host after the work queued on `stream` so far, and waits until
    /// the copy is done.
    pub fn copy_to_host(
        &self,
        host: &mut [T],
        stream: &(impl AsStream + ?Sized),
    ) -> Result<(), Error> {
        self.expect_len(host.len())?;
        let stream = self.device.using(stream)?;
        if self.size_bytes() == 0 {
            return Ok(());
        }
        self.record(stream);
        let driver = self.device.engine().driver();
        // SAFETY: the buffer owns this memory, which is as long as `host`; `record` has noted the
        // stream.
        Ok(unsafe { driver.read(self.address, bytemuck::cast_slice_mut(host), stream) }?)
    }

    /// Returns all elements, copied with [`copy_to_host`](Self::copy_to_host).
    pub fn to_vec(&self, stream: &(impl AsStream + ?Sized)) -> Result<Vec<T>, Error> {
        let mut host = vec![T::zeroed(); self.len];
        self.copy_to_host(&mut host, stream)?;
        Ok(host)
    }
}

fn is_unknown(result: &Result<(), AddressError>) -> bool {
    matches!(result, Err(AddressError::Unknown { .. }))
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        if self.address != 0 {
            let engine = self.device.engine();
            engine.driver().forget(self.address, self.size_bytes());
            let freed = engine.free(self.address);
            // If the driver fails, the block stays pending. `drop` cannot report or repair that.
            debug_assert!(!is_unknown(&freed), "a buffer's address is live");
        }
    }
}

impl<T> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer")
            .field("address", &format_args!("{:#x}", self.address))
            .field("len", &self.len)
            .field("of", &std::any::type_name::<T>())
            .field("stream", &self.stream)
            .finish_non_exhaustive()
    }
}
