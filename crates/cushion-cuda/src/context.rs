//! The surroundings of a call: the device's primary context, and the capture mode in which memory
//! calls are legal. Both belong to the thread, and are restored afterwards.

use std::marker::PhantomData;

use crate::call::{CallResult, ContextId, Mode};
use crate::sys::{Api, CUdevice};

/// A device's primary context, retained as long as this value lives. CUDA's runtime, and so
/// PyTorch, uses the same context.
#[derive(Debug)]
pub(crate) struct Primary {
    api: &'static Api,
    device: CUdevice,
    pub(crate) context: ContextId,
}

impl Primary {
    pub(crate) fn retain(api: &'static Api, device: CUdevice) -> CallResult<Self> {
        let context = api.primary_retain(device)?;
        Ok(Self { api, device, context })
    }
}

impl Drop for Primary {
    fn drop(&mut self) {
        // When a process ends, CUDA may have shut down already, and then nothing is left to
        // release.
        let _ = self.api.primary_release(self.device);
    }
}

/// Puts this thread into a context, in relaxed capture mode. In that mode, calls outside a capture
/// are legal while this or another thread captures a graph, and do not invalidate the capture.
#[derive(Debug)]
pub(crate) struct Entered<'a> {
    api: &'a Api,
    pushed: bool,
    mode_before: Option<Mode>,
    /// The context and the mode belong to the thread, so this value is not `Send`.
    _stays: PhantomData<*const ()>,
}

impl<'a> Entered<'a> {
    pub(crate) fn enter(api: &'a Api, context: ContextId) -> CallResult<Self> {
        let pushed = api.current()? != context;
        if pushed {
            api.push(context)?;
        }
        // From here on, an early return restores the context through `drop`.
        let mut entered = Self { api, pushed, mode_before: None, _stays: PhantomData };
        entered.mode_before = Some(api.exchange_capture_mode(Mode::RELAXED)?);
        Ok(entered)
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        // If restoring fails, CUDA is broken or has shut down, and the next call will report it.
        if let Some(mode) = self.mode_before {
            let _ = self.api.exchange_capture_mode(mode);
        }
        if self.pushed {
            let _ = self.api.pop();
        }
    }
}
