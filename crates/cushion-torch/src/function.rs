//! A C++ `std::function<bool(cudaStream_t)>`, as libstdc++ lays it out: how PyTorch says which streams
//! a private pool serves.
//!
//! By value it arrives as the address of a temporary of the caller's. It is copied, called and destroyed
//! through the two functions that it carries itself, so no C++ is needed.

use std::ffi::{c_int, c_void};

use cushion::core::{Driver as _, StreamFilter, StreamId};
use cushion::devices;

/// Where libstdc++ keeps what the function has captured, or a pointer to it.
type Captured = [u64; 2];
type Manager = unsafe extern "C-unwind" fn(*mut Captured, *const Captured, c_int) -> bool;
type Invoker = unsafe extern "C-unwind" fn(*const Captured, *const *mut c_void) -> bool;

/// What the manager is asked to do.
const CLONE: c_int = 2;
const DESTROY: c_int = 3;

/// The memory of a `std::function`.
#[repr(C)]
#[derive(Debug)]
pub struct StdFunction {
    captured: Captured,
    manager: Option<Manager>,
    invoker: Option<Invoker>,
}

/// A copy of a function of PyTorch's, ours to call and to destroy.
#[derive(Debug)]
struct OwnedFunction {
    captured: Captured,
    manager: Option<Manager>,
    invoker: Invoker,
}

// SAFETY: PyTorch keeps and calls its own copy of the same function from any thread, one at a time; the
// engine's lock does the same here.
unsafe impl Send for OwnedFunction {}

impl OwnedFunction {
    fn accepts(&self, stream: StreamId) -> bool {
        let stream: *mut c_void = std::ptr::with_exposed_provenance_mut(address_of(stream));
        // SAFETY: the invoker came with what was captured, which was cloned by the manager and is not
        // destroyed yet; the argument is a stream handle by reference, as the function's type says.
        unsafe { (self.invoker)(&raw const self.captured, &raw const stream) }
    }
}

impl Drop for OwnedFunction {
    fn drop(&mut self) {
        if let Some(manager) = self.manager {
            let captured = &raw mut self.captured;
            // SAFETY: the manager came with what was captured, which is destroyed here and only here.
            unsafe { manager(captured, captured, DESTROY) };
        }
    }
}

/// A filter for a pool of `device` that asks a copy of `function`; an empty function accepts every stream.
///
/// # Safety
///
/// `function` points to a `std::function<bool(cudaStream_t)>` of libstdc++ that nobody changes meanwhile,
/// or is null.
pub(crate) unsafe fn filter(device: i64, function: *const StdFunction) -> StreamFilter {
    // SAFETY: the caller answers for the pointer.
    let Some(function) = (unsafe { function.as_ref() }) else { return Box::new(|_| true) };
    let Some(invoker) = function.invoker else { return Box::new(|_| true) };
    let mut owned = OwnedFunction { captured: function.captured, manager: None, invoker };
    if let Some(manager) = function.manager {
        // SAFETY: the manager came with what was captured; the target is memory of the same kind that
        // holds nothing yet.
        unsafe { manager(&raw mut owned.captured, &raw const function.captured, CLONE) };
        owned.manager = Some(manager);
    }
    // Boxed at once: what is captured must not move while it is called.
    let owned = Box::new(owned);
    Box::new(move |stream| can_be_asked(device, stream) && owned.accepts(stream))
}

/// PyTorch's function asks CUDA whether the stream is being captured, and throws if CUDA fails. No exception may
/// come through here, so CUDA is asked first: a device that is broken has no captures.
fn can_be_asked(device: i64, stream: StreamId) -> bool {
    devices().get(device).is_some_and(|engine| engine.driver().capture(stream).is_ok())
}

fn address_of(stream: StreamId) -> usize {
    usize::try_from(stream.0).unwrap_or(0)
}
