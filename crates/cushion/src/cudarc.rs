//! Accepts cudarc's streams, and lends buffers to its kernels.
//!
//! cudarc frees the memory that an owned `CudaSlice` points to. So this module never hands out an
//! owned slice: it lends a buffer as views, which own nothing, and leaks the slice behind them
//! instead of dropping it.

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use ::cudarc::driver::{CudaSlice, CudaStream, CudaView, CudaViewMut};
use cushion_core::StreamId;

use crate::buffer::Buffer;
use crate::device::Device;
use crate::error::Error;
use crate::stream::AsStream;

// SAFETY: cudarc made the stream, or its maker promised cudarc that it is a stream. It is destroyed
// with its last `Arc`, and the device keeps one.
unsafe impl AsStream for Arc<CudaStream> {
    fn stream_id(&self) -> StreamId {
        StreamId(self.cu_stream().expose_provenance() as u64)
    }

    fn is_of(&self, device: &Device) -> bool {
        !device.is_simulated() && device.index() as usize == self.context().ordinal()
    }

    fn owner(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        Some(Arc::clone(self) as Arc<dyn Any + Send + Sync>)
    }
}

impl<T> Buffer<T> {
    /// Lends the buffer to cudarc work that reads it, such as a kernel on `stream`. The stream is
    /// recorded as [`record_stream`](Self::record_stream) does; if the kernel is launched on
    /// another stream, record that stream too. The returned value must be dropped, not forgotten:
    /// its `drop` makes `stream` wait for the work of other streams.
    ///
    /// # Panics
    ///
    /// If cudarc tracks the work on its slices and cannot create an event for it.
    ///
    /// ```no_run
    /// # use cudarc::driver::{CudaContext, CudaFunction, LaunchConfig, PushKernelArg};
    /// # fn example(function: CudaFunction) -> Result<(), Box<dyn std::error::Error>> {
    /// let context = CudaContext::new(0)?;
    /// let stream = context.new_stream()?;
    /// let gpu = cushion::Device::cuda(0)?;
    /// let x = gpu.alloc_copy(&[1.0_f32; 1024], &stream)?;
    /// let mut y = gpu.alloc_zeros::<f32>(1024, &stream)?;
    ///
    /// let lent_x = x.cudarc(&stream)?;
    /// let mut lent_y = y.cudarc_mut(&stream)?;
    /// let (view_x, mut view_y) = (lent_x.view(), lent_y.view_mut());
    /// let mut launch = stream.launch_builder(&function);
    /// launch.arg(&view_x).arg(&mut view_y);
    /// unsafe { launch.launch(LaunchConfig::for_num_elems(1024)) }?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn cudarc(&self, stream: &Arc<CudaStream>) -> Result<Lent<'_, T>, Error> {
        self.lend(stream)
    }

    /// Lends the buffer as [`cudarc`](Self::cudarc) does, to work that also writes it.
    pub fn cudarc_mut(&mut self, stream: &Arc<CudaStream>) -> Result<LentMut<'_, T>, Error> {
        self.lend(stream).map(LentMut)
    }

    fn lend(&self, stream: &Arc<CudaStream>) -> Result<Lent<'_, T>, Error> {
        self.record_stream(stream)?;
        // SAFETY: the address is a live allocation with room for `len` elements while the buffer is
        // borrowed. It may hold bytes that are not a valid `T`: the host never reads a view, and
        // cudarc copies out only types that are valid for all bits.
        let slice = unsafe { stream.upgrade_device_ptr::<T>(self.address(), self.len()) };
        Ok(Lent { slice: ManuallyDrop::new(slice), buffer: PhantomData })
    }
}

/// A buffer that cudarc may read.
pub struct Lent<'a, T> {
    /// Never dropped: cudarc would free the memory.
    slice: ManuallyDrop<CudaSlice<T>>,
    buffer: PhantomData<&'a Buffer<T>>,
}

impl<T> Lent<'_, T> {
    /// Returns a view, for a kernel's argument or a copy.
    #[must_use]
    pub fn view(&self) -> CudaView<'_, T> {
        self.slice.as_view()
    }
}

impl<T> Drop for Lent<'_, T> {
    fn drop(&mut self) {
        // SAFETY: the slice is not used afterwards.
        let slice = unsafe { ManuallyDrop::take(&mut self.slice) };
        // `leak` makes the slice's stream wait for the work on its views, and keeps the memory.
        let _ = slice.leak();
    }
}

impl<T> fmt::Debug for Lent<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lent").field("len", &self.slice.len()).finish_non_exhaustive()
    }
}

/// A buffer that cudarc may read and write.
#[derive(Debug)]
pub struct LentMut<'a, T>(Lent<'a, T>);

impl<T> LentMut<'_, T> {
    /// Returns a view to read, for a kernel's argument or a copy.
    #[must_use]
    pub fn view(&self) -> CudaView<'_, T> {
        self.0.view()
    }

    /// Returns a view to write, for a kernel's argument or a copy.
    #[must_use]
    pub fn view_mut(&mut self) -> CudaViewMut<'_, T> {
        self.0.slice.as_view_mut()
    }
}
