//! What surrounds a call: the device's primary context, and the capture mode in which memory calls
//! are legal. Both belong to the thread, and are put back as they were.

use std::marker::PhantomData;

use crate::call::{CallResult, ContextId, Mode};
use crate::sys::{Api, CUdevice};

/// A device's primary context, held for as long as this lives: the one that CUDA's runtime, and so
/// PyTorch, uses.
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
        // At the end of a process CUDA may be gone already; there is nothing left to release then.
        let _ = self.api.primary_release(self.device);
    }
}

/// This thread is inside a context, in relaxed capture mode: calls that are not part of a capture are
/// legal while this or another thread captures a graph, and do not break it.
#[derive(Debug)]
pub(crate) struct Entered<'a> {
    api: &'a Api,
    pushed: bool,
    mode_before: Option<Mode>,
    /// Both belong to the thread, so this stays on it.
    _stays: PhantomData<*const ()>,
}

impl<'a> Entered<'a> {
    pub(crate) fn enter(api: &'a Api, context: ContextId) -> CallResult<Self> {
        let pushed = api.current()? != context;
        if pushed {
            api.push(context)?;
        }
        // From here on, leaving early puts back what was done.
        let mut entered = Self { api, pushed, mode_before: None, _stays: PhantomData };
        entered.mode_before = Some(api.exchange_capture_mode(Mode::RELAXED)?);
        Ok(entered)
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        // If putting back fails, CUDA is broken or gone, and the next call will say so.
        if let Some(mode) = self.mode_before {
            let _ = self.api.exchange_capture_mode(mode);
        }
        if self.pushed {
            let _ = self.api.pop();
        }
    }
}
