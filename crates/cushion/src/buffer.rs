//! Typed memory on a device, given back when it is dropped.

use std::fmt;
use std::marker::PhantomData;

use bytemuck::{AnyBitPattern, NoUninit};
use cushion_core::{AddressError, StreamId};

use crate::device::Device;
use crate::error::Error;
use crate::stream::AsStream;

/// `len` elements of `T` in the memory of a device.
///
/// It belongs to the stream it was allocated on. Dropping it gives the memory back in the order of that stream: it
/// is handed out there again at once, after the work queued so far. What else uses it has to be told with
/// [`record_stream`](Self::record_stream); the methods here that take a stream do so themselves. They do not make
/// one stream wait for another.
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
    /// It owns elements, though not in memory that Rust could reach.
    elements: PhantomData<T>,
}

impl<T> Buffer<T> {
    pub(crate) fn alloc(device: &Device, len: usize, stream: StreamId) -> Result<Self, Error> {
        let address = device.engine().alloc(Self::bytes_of(len)?, stream)?;
        Ok(Self::at(device, address, len, stream))
    }

    /// How many bytes so many elements take.
    pub(crate) fn bytes_of(len: usize) -> Result<u64, Error> {
        let size = size_of::<T>();
        let bytes = len.checked_mul(size).ok_or(Error::TooLong { len, size })?;
        Ok(bytes as u64)
    }

    /// The buffer of memory that was allocated for it.
    pub(crate) fn at(device: &Device, address: u64, len: usize, stream: StreamId) -> Self {
        Self { device: device.clone(), address, len, stream, elements: PhantomData }
    }

    /// How many elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// How many bytes the elements take.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        // It did not overflow when the buffer was made.
        self.len * size_of::<T>()
    }

    /// Where it begins in the device's memory; zero if it is empty.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The stream it was allocated on.
    #[must_use]
    pub fn stream_id(&self) -> StreamId {
        self.stream
    }

    /// Notes that work on `stream` uses the buffer: once dropped, its memory is not handed out again before the
    /// work queued there by then is done.
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

    /// Gives the memory back now, as dropping does.
    pub fn free(self) {
        drop(self);
    }

    /// Gives the address away: somebody else gives it back, with [`from_raw`](Self::from_raw) or to the engine.
    #[must_use]
    pub fn into_raw(mut self) -> u64 {
        // What is dropped is a buffer of nothing.
        std::mem::take(&mut self.address)
    }

    /// The buffer of an address that [`into_raw`](Self::into_raw) gave.
    ///
    /// # Safety
    ///
    /// The address is that of a live allocation of this device's, of `len` elements of `T` at least, made on
    /// `stream`; nobody else gives it back.
    #[must_use]
    pub unsafe fn from_raw(device: &Device, address: u64, len: usize, stream: StreamId) -> Self {
        Self::at(device, address, len, stream)
    }

    /// Sets all bytes to zero, as a piece of work on `stream`.
    pub fn fill_zero(&mut self, stream: &(impl AsStream + ?Sized)) -> Result<(), Error> {
        self.zero(self.device.using(stream)?)
    }

    pub(crate) fn zero(&mut self, stream: StreamId) -> Result<(), Error> {
        if self.size_bytes() == 0 {
            return Ok(());
        }
        self.record(stream);
        let driver = self.device.engine().driver();
        // SAFETY: the buffer has this memory for itself, and the stream is noted.
        Ok(unsafe { driver.fill(self.address, self.size_bytes(), 0, stream) }?)
    }

    /// Copies from another buffer of the same length and device, as a piece of work on `stream`.
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
        // SAFETY: both have their memory for themselves, of the same length, and the stream is noted.
        Ok(unsafe { driver.copy(other.address, self.address, self.size_bytes(), stream) }?)
    }

    fn expect_len(&self, len: usize) -> Result<(), Error> {
        if len == self.len { Ok(()) } else { Err(Error::Lengths { one: self.len, other: len }) }
    }
}

impl<T: NoUninit> Buffer<T> {
    /// Copies all elements from the host, after the work queued on `stream` so far, and waits for that.
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
        // SAFETY: the buffer has this memory for itself, of the same length, and the stream is noted.
        Ok(unsafe { driver.write(self.address, bytemuck::cast_slice(host), stream) }?)
    }
}

impl<T: AnyBitPattern + NoUninit> Buffer<T> {
    /// Copies all elements to the host, after the work queued on `stream` so far, and waits for that.
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
        // SAFETY: the buffer has this memory for itself, of the same length, and the stream is noted.
        Ok(unsafe { driver.read(self.address, bytemuck::cast_slice_mut(host), stream) }?)
    }

    /// All elements, as [`copy_to_host`](Self::copy_to_host) gives them.
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
            // Where the driver is broken the block stays pending, and nobody could do anything about it here.
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
