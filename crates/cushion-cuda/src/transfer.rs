//! What a program does with memory and streams beside allocating: the engine needs none of this.

use cushion_core::StreamId;

use crate::call::CallResult;
use crate::context::Entered;
use crate::driver::CudaDriver;
use crate::error::CudaError;
use crate::sys::Api;

impl CudaDriver {
    fn transfer<T>(
        &self,
        function: &'static str,
        calls: impl FnOnce(&'static Api) -> CallResult<T>,
    ) -> Result<T, CudaError> {
        let api = self.api();
        Entered::enter(api, self.context())
            .and_then(|_entered| calls(api))
            .map_err(|code| CudaError::of(api, function, code))
    }

    /// A stream that does not wait for the default stream, nor that for it.
    pub fn stream_create(&self) -> Result<StreamId, CudaError> {
        self.transfer("cuStreamCreate", Api::stream_create)
    }

    /// Destroys a stream. Its work is done to the end all the same.
    ///
    /// # Safety
    ///
    /// The stream is one of [`stream_create`](Self::stream_create), and nobody uses it from now on.
    pub unsafe fn stream_destroy(&self, stream: StreamId) -> Result<(), CudaError> {
        // SAFETY: as the caller promises.
        self.transfer("cuStreamDestroy", |api| unsafe { api.stream_destroy(stream) })
    }

    /// Waits until all work queued on `stream` so far is done.
    pub fn stream_wait(&self, stream: StreamId) -> Result<(), CudaError> {
        self.transfer("cuStreamSynchronize", |api| api.stream_synchronize(stream))
    }

    /// Puts `bytes` at `to`, after the work queued on `stream` so far; returns when that is done.
    ///
    /// # Safety
    ///
    /// At `to` is memory of this device for all of `bytes`, and no work on another stream uses it.
    pub unsafe fn write(&self, to: u64, bytes: &[u8], stream: StreamId) -> Result<(), CudaError> {
        self.transfer("cuMemcpyHtoDAsync", |api| {
            // SAFETY: of `to` as the caller promises; `bytes` is borrowed until the stream is done.
            unsafe { api.copy_in(to, bytes, stream) }?;
            api.stream_synchronize(stream)
        })
    }

    /// Reads what is at `from` after the work queued on `stream` so far, and returns when that is done.
    ///
    /// # Safety
    ///
    /// As of [`write`](Self::write).
    pub unsafe fn read(
        &self,
        from: u64,
        bytes: &mut [u8],
        stream: StreamId,
    ) -> Result<(), CudaError> {
        self.transfer("cuMemcpyDtoHAsync", |api| {
            // SAFETY: of `from` as the caller promises; `bytes` is borrowed until the stream is done.
            unsafe { api.copy_out(from, bytes, stream) }?;
            api.stream_synchronize(stream)
        })
    }

    /// Copies from one place to another as a piece of work on `stream`.
    ///
    /// # Safety
    ///
    /// As of [`write`](Self::write), at both places.
    pub unsafe fn copy(
        &self,
        from: u64,
        to: u64,
        bytes: usize,
        stream: StreamId,
    ) -> Result<(), CudaError> {
        // SAFETY: as the caller promises.
        self.transfer("cuMemcpyDtoDAsync", |api| unsafe { api.copy(from, to, bytes, stream) })
    }

    /// Sets every byte, as a piece of work on `stream`.
    ///
    /// # Safety
    ///
    /// As of [`write`](Self::write).
    pub unsafe fn fill(
        &self,
        to: u64,
        bytes: usize,
        value: u8,
        stream: StreamId,
    ) -> Result<(), CudaError> {
        // SAFETY: as the caller promises.
        self.transfer("cuMemsetD8Async", |api| unsafe { api.fill(to, bytes, value, stream) })
    }
}
