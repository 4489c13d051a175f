//! Shortages as a program sees them: callbacks, receipts, prefetching, futures, and injected
//! failures to test it all.

use std::fmt;
use std::marker::PhantomData;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytemuck::{AnyBitPattern, Zeroable};
use cushion_core::{AllocFuture, CallbackId, Driver, Injection, Plea, Receipt};

use crate::buffer::Buffer;
use crate::device::Device;
use crate::devices::DeviceEngine;
use crate::driver::DeviceDriver;
use crate::error::Error;
use crate::receipts::{LostReceipts, lost_receipts, write_receipts};
use crate::stream::AsStream;

impl Device {
    /// Registers a callback for when memory runs out and nothing else has helped. Callbacks are
    /// called by descending priority until the request can be served. A callback may free, and even
    /// allocate: no lock is held. It is never re-entered, and its panics are caught.
    ///
    /// The callback, with all that it captures, is kept until
    /// [`remove_callback`](Self::remove_callback). If it captures a clone of a device with its own
    /// cache, or a buffer of it, that device lives as long.
    ///
    /// ```
    /// use std::sync::{Arc, Mutex};
    ///
    /// let gpu = cushion::Device::simulated(1 << 30);
    /// let stream = gpu.default_stream();
    /// let spare = Arc::new(Mutex::new(Some(gpu.alloc_zeros::<u8>(600 << 20, &stream)?)));
    /// let held = Arc::clone(&spare);
    /// let callback = gpu.on_shortage(0, move |plea| {
    ///     println!("{} bytes would help", plea.bytes);
    ///     held.lock().unwrap().take();
    /// });
    /// gpu.alloc_zeros::<u8>(800 << 20, &stream)?; // served, as the callback gave up the spare
    /// assert!(spare.lock().unwrap().is_none());
    /// gpu.remove_callback(callback);
    /// # Ok::<(), cushion::Error>(())
    /// ```
    pub fn on_shortage(
        &self,
        priority: i32,
        callback: impl Fn(&Plea) + Send + Sync + 'static,
    ) -> CallbackId {
        self.engine().on_shortage(priority, callback)
    }

    /// Removes a callback; returns false if it has been removed already. A running callback is not
    /// interrupted.
    pub fn remove_callback(&self, callback: CallbackId) -> bool {
        self.engine().remove_callback(callback)
    }

    // ---- receipts ----

    /// Returns the latest shortages, survived and refused, oldest first; 256 are kept.
    #[must_use]
    pub fn receipts(&self) -> Vec<Arc<Receipt>> {
        self.engine().receipts()
    }

    /// Appends every receipt to a file from now on, one JSON object per line. The file replaces an
    /// earlier one. It is opened now, and created if necessary. A killed process loses at most its
    /// last line. A receipt that cannot be written later does not fail an allocation;
    /// [`lost_receipts`](Self::lost_receipts) counts it.
    pub fn write_receipts(&self, path: impl AsRef<Path>) -> Result<(), Error> {
        Ok(write_receipts(self.engine(), path)?)
    }

    /// Returns the number of receipts that could not be written, and the first error.
    #[must_use]
    pub fn lost_receipts(&self) -> LostReceipts {
        lost_receipts(self.engine())
    }

    // ---- ahead of time, and as a future ----

    /// Prepares memory: afterwards a request of `bytes` bytes on `stream` needs nothing from the
    /// device. If the device has no room, the call tries the same steps as an allocation, and fails
    /// like one.
    pub fn prefetch(&self, bytes: u64, stream: &(impl AsStream + ?Sized)) -> Result<(), Error> {
        Ok(self.engine().prefetch(bytes, self.using(stream)?)?)
    }

    /// Allocates as [`alloc_zeros`](Self::alloc_zeros) does, as a future of any runtime: no thread
    /// waits. Futures are served in the order of their first polls. A future that is dropped before
    /// it is ready gives up its place in the queue.
    pub fn alloc_zeros_async<T: Zeroable>(
        &self,
        len: usize,
        stream: &(impl AsStream + ?Sized),
    ) -> BufferFuture<'_, T> {
        BufferFuture::new(self, len, stream, true)
    }

    /// Allocates as [`alloc_uninit`](Self::alloc_uninit) does, as a future: see
    /// [`alloc_zeros_async`](Self::alloc_zeros_async).
    pub fn alloc_uninit_async<T: AnyBitPattern>(
        &self,
        len: usize,
        stream: &(impl AsStream + ?Sized),
    ) -> BufferFuture<'_, T> {
        BufferFuture::new(self, len, stream, false)
    }

    // ---- injected failures ----

    /// Makes allocations and driver calls fail by the given rules from now on, to test how a
    /// program copes. Prints a warning on standard error. The rules replace earlier ones.
    ///
    /// ```
    /// let gpu = cushion::Device::simulated(1 << 30);
    /// let stream = gpu.default_stream();
    /// gpu.inject(&"nth=2".parse()?);
    /// assert!(gpu.alloc_zeros::<u8>(100, &stream).is_ok());
    /// assert!(gpu.alloc_zeros::<u8>(100, &stream).unwrap_err().is_out_of_memory());
    /// gpu.stop_injecting();
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn inject(&self, injection: &Injection) {
        inject(self.engine(), Some(injection));
    }

    /// Stops injecting failures.
    pub fn stop_injecting(&self) {
        inject(self.engine(), None);
    }
}

/// Makes an engine's allocations and driver calls fail by the given rules from now on, and prints a
/// warning on standard error; `None` stops it. [`Device::inject`] and [`Device::stop_injecting`] do
/// this for their device.
#[expect(
    clippy::print_stderr,
    reason = "a forgotten injected failure must not be taken for a real one"
)]
pub fn inject(engine: &DeviceEngine, injection: Option<&Injection>) {
    let driver = engine.driver();
    if let Some(injection) = injection {
        let device = driver.properties().device;
        eprintln!(
            "cushion: WARNING: failures are INJECTED on device {device}, for a test, by the rules: \
             {injection}"
        );
    }
    driver.inject(injection);
    engine.inject(injection.cloned());
}

/// The future of a buffer: see [`Device::alloc_zeros_async`].
#[must_use = "a future does nothing unless it is polled"]
pub struct BufferFuture<'a, T> {
    device: &'a Device,
    stage: Stage<'a>,
    len: usize,
    zeroed: bool,
    elements: PhantomData<fn() -> T>,
}

enum Stage<'a> {
    Asked(AllocFuture<'a, DeviceDriver>, cushion_core::StreamId),
    /// The arguments were not valid; the first poll returns the error.
    Wrong(Error),
    Done,
}

impl<'a, T> BufferFuture<'a, T> {
    fn new(
        device: &'a Device,
        len: usize,
        stream: &(impl AsStream + ?Sized),
        zeroed: bool,
    ) -> Self {
        let asked = device.using(stream).and_then(|stream| {
            let bytes = Buffer::<T>::bytes_of(len)?;
            Ok(Stage::Asked(device.engine().alloc_async(bytes, stream), stream))
        });
        let stage = asked.unwrap_or_else(Stage::Wrong);
        Self { device, stage, len, zeroed, elements: PhantomData }
    }
}

impl<T> Future for BufferFuture<'_, T> {
    type Output = Result<Buffer<T>, Error>;

    /// # Panics
    ///
    /// If the future is polled after it was ready.
    fn poll(mut self: Pin<&mut Self>, polled: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        if let Stage::Asked(asked, stream) = &mut this.stage {
            let stream = *stream;
            let Poll::Ready(address) = Pin::new(asked).poll(polled) else { return Poll::Pending };
            this.stage = Stage::Done;
            let mut buffer = Buffer::at(this.device, address?, this.len, stream);
            if this.zeroed {
                buffer.zero(stream)?;
            }
            return Poll::Ready(Ok(buffer));
        }
        match std::mem::replace(&mut this.stage, Stage::Done) {
            Stage::Wrong(error) => Poll::Ready(Err(error)),
            _ => panic!("polled after it was ready"),
        }
    }
}

impl<T> fmt::Debug for BufferFuture<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BufferFuture")
            .field("len", &self.len)
            .field("of", &std::any::type_name::<T>())
            .finish_non_exhaustive()
    }
}
