//! What a program has to do with shortages: callbacks, receipts, memory ahead of time or as a future, and
//! failures made up to test it all.

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
    /// Calls `callback` when memory runs out and nothing else has helped, those of higher priority first,
    /// until the request can be served. It may free, and even allocate: no lock is held. It is never
    /// re-entered, and what it panics with ends there.
    ///
    /// It is kept, with all that it holds, until [`remove_callback`](Self::remove_callback). A device with a
    /// cache of its own lives as long as a callback that holds a clone of it, or a buffer.
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

    /// Takes a callback away; false if it is gone already. One that runs now runs on.
    pub fn remove_callback(&self, callback: CallbackId) -> bool {
        self.engine().remove_callback(callback)
    }

    // ---- receipts ----

    /// The latest shortages, survived and refused, oldest first; 256 are kept.
    #[must_use]
    pub fn receipts(&self) -> Vec<Arc<Receipt>> {
        self.engine().receipts()
    }

    /// Writes every receipt to the end of a file from now on, one JSON object per line; to this file in the
    /// place of the one before. A process that is killed loses its last line at most. The file is opened, and
    /// made if need be, now; what cannot be written later is no error of an allocation, and is counted by
    /// [`lost_receipts`](Self::lost_receipts).
    pub fn write_receipts(&self, path: impl AsRef<Path>) -> Result<(), Error> {
        Ok(write_receipts(self.engine(), path)?)
    }

    /// Receipts that could not be written, and why the first could not.
    #[must_use]
    pub fn lost_receipts(&self) -> LostReceipts {
        lost_receipts(self.engine())
    }

    // ---- ahead of time, and as a future ----

    /// Prepares memory: afterwards a request of `bytes` bytes on `stream` needs nothing from the device.
    /// What the device has no room for is won as for an allocation, or refused as one is.
    pub fn prefetch(&self, bytes: u64, stream: &(impl AsStream + ?Sized)) -> Result<(), Error> {
        Ok(self.engine().prefetch(bytes, self.using(stream)?)?)
    }

    /// As [`alloc_zeros`](Self::alloc_zeros), as a future of any runtime: no thread waits. Futures are served
    /// in the order in which they were first polled. Dropped before it is ready, one gives its place back.
    pub fn alloc_zeros_async<T: Zeroable>(
        &self,
        len: usize,
        stream: &(impl AsStream + ?Sized),
    ) -> BufferFuture<'_, T> {
        BufferFuture::new(self, len, stream, true)
    }

    /// As [`alloc_uninit`](Self::alloc_uninit), as a future: see
    /// [`alloc_zeros_async`](Self::alloc_zeros_async).
    pub fn alloc_uninit_async<T: AnyBitPattern>(
        &self,
        len: usize,
        stream: &(impl AsStream + ?Sized),
    ) -> BufferFuture<'_, T> {
        BufferFuture::new(self, len, stream, false)
    }

    // ---- made-up failures ----

    /// Makes allocations, and calls of the driver, fail from now on as the rules say, to test how a program
    /// takes it; says so on standard error. Rules given before are forgotten.
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

    /// Nothing is made to fail any more.
    pub fn stop_injecting(&self) {
        inject(self.engine(), None);
    }
}

/// Makes allocations of an engine, and calls of its driver, fail from now on as the rules say, and says so on
/// standard error; `None` ends it. What [`Device::inject`] and [`Device::stop_injecting`] do.
#[expect(
    clippy::print_stderr,
    reason = "nobody is to take a failure that was asked for, and forgotten, for a real one"
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

/// A buffer to come: see [`Device::alloc_zeros_async`].
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
    /// It was wrong from the beginning.
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
    /// If it is polled after it was ready.
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
