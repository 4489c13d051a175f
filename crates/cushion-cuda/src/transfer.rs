//! Operations on memory and streams beside allocation. The engine does not use them.

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

    /// Creates a stream that does not synchronise with the default stream.
    pub fn stream_create(&self) -> Result<StreamId, CudaError> {
        self.transfer("cuStreamCreate", Api::stream_create)
    }

    /// Destroys a stream. Its queued work still completes.
    ///
    /// # Safety
    ///
    /// [`stream_create`](Self::stream_create) made the stream, and nobody uses it any more.
    pub unsafe fn stream_destroy(&self, stream: StreamId) -> Result<(), CudaError> {
        // SAFETY: the caller upholds this contract.
        self.transfer("cuStreamDestroy", |api| unsafe { api.stream_destroy(stream) })
    }

    /// Waits until all work queued on `stream` so far is done.
    pub fn stream_wait(&self, stream: StreamId) -> Result<(), CudaError> {
        self.transfer("cuStreamSynchronize", |api| api.stream_synchronize(stream))
    }

    /// Copies `bytes` to the address `to`, after the work queued on `stream` so far, and waits
    /// until the copy is done.
    ///
    /// # Safety
    ///
    /// Memory of this device for all of `bytes` starts at `to`, and no work on another stream uses
    /// it.
    pub unsafe fn write(&self, to: u64, bytes: &[u8], stream: StreamId) -> Result<(), CudaError> {
        self.transfer("cuMemcpyHtoDAsync", |api| {
            // SAFETY: the caller guarantees `to`; `bytes` is borrowed until the stream has
            // finished.
            unsafe { api.copy_in(to, bytes, stream) }?;
            api.stream_synchronize(stream)
        })
    }

    /// Copies from the address `from` to `bytes`, after the work queued on `stream` so far, and
    /// waits until the copy is done.
    ///
    /// # Safety
    ///
    /// As for [`write`](Self::write).
    pub unsafe fn read(
        &self,
        from: u64,
        bytes: &mut [u8],
        stream: StreamId,
    ) -> Result<(), CudaError> {
        self.transfer("cuMemcpyDtoHAsync", |api| {
            // SAFETY: the caller guarantees `from`; `bytes` is borrowed until the stream has
            // finished.
            unsafe { api.copy_out(from, bytes, stream) }?;
            api.stream_synchronize(stream)
        })
    }

    /// Copies between two addresses. The work is queued on `stream`.
    ///
    /// # Safety
    ///
    /// As for [`write`](Self::write), at both addresses.
    pub unsafe fn copy(
        &self,
        from: u64,
        to: u64,
        bytes: usize,
        stream: StreamId,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller upholds this contract.
        self.transfer("cuMemcpyDtoDAsync", |api| unsafe { api.copy(from, to, bytes, stream) })
    }

    /// Sets every byte. The work is queued on `stream`.
    ///
    /// # Safety
    ///
    /// As for [`write`](Self::write).
    pub unsafe fn fill(
        &self,
        to: u64,
        bytes: usize,
        value: u8,
        stream: StreamId,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller upholds this contract.
        self.transfer("cuMemsetD8Async", |api| unsafe { api.fill(to, bytes, value, stream) })
    }
}
