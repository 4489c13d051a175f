//! A C++ `std::function<bool(cudaStream_t)>` in the layout of libstdc++. PyTorch uses it to say
//! which streams a private pool serves.
//!
//! The function is passed by value, so it arrives as the address of a temporary of the caller. It
//! carries two function pointers, which copy, call and destroy it without C++ code.

use std::ffi::{c_int, c_void};

use cushion::core::{Driver as _, StreamFilter, StreamId};
use cushion::devices;

/// The captured values, or a pointer to them, as libstdc++ stores them.
type Captured = [u64; 2];
type Manager = unsafe extern "C-unwind" fn(*mut Captured, *const Captured, c_int) -> bool;
type Invoker = unsafe extern "C-unwind" fn(*const Captured, *const *mut c_void) -> bool;

/// Operations of the manager.
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

/// A copy of PyTorch's function. Dropping it destroys the copy.
#[derive(Debug)]
struct OwnedFunction {
    captured: Captured,
    manager: Option<Manager>,
    invoker: Invoker,
}

// SAFETY: PyTorch calls its own copy of the same function from any thread, one thread at a time.
// The engine's lock gives the same guarantee for this copy.
unsafe impl Send for OwnedFunction {}

impl OwnedFunction {
    fn accepts(&self, stream: StreamId) -> bool {
        let stream: *mut c_void = std::ptr::with_exposed_provenance_mut(address_of(stream));
        // SAFETY: the invoker belongs to these captured values, which the manager cloned and which
        // `drop` has not destroyed. The argument is a stream handle by reference, as the type of
        // the function requires, and lives until the call returns.
        unsafe { (self.invoker)(&raw const self.captured, &raw const stream) }
    }
}

impl Drop for OwnedFunction {
    fn drop(&mut self) {
        if let Some(manager) = self.manager {
            let captured = &raw mut self.captured;
            // SAFETY: the manager belongs to these captured values, and only `drop` destroys them.
            unsafe { manager(captured, captured, DESTROY) };
        }
    }
}

/// Returns a filter for a pool of `device` that calls a copy of `function`. An empty or null
/// function accepts every stream.
///
/// # Safety
///
/// `function` is null, or points to a `std::function<bool(cudaStream_t)>` of libstdc++ that no
/// thread changes during the call.
pub(crate) unsafe fn filter(device: i64, function: *const StdFunction) -> StreamFilter {
    // SAFETY: the caller guarantees that the pointer is null or valid, and that nothing changes the
    // function during the call. `StdFunction` has the layout of libstdc++.
    let Some(function) = (unsafe { function.as_ref() }) else { return Box::new(|_| true) };
    let Some(invoker) = function.invoker else { return Box::new(|_| true) };
    let mut owned = OwnedFunction { captured: function.captured, manager: None, invoker };
    if let Some(manager) = function.manager {
        // SAFETY: the manager belongs to the captured values of the source. The target is memory of
        // the same type that owns nothing: `owned.manager` is still none.
        unsafe { manager(&raw mut owned.captured, &raw const function.captured, CLONE) };
        owned.manager = Some(manager);
    }
    // Boxed, so that the captured values keep their address while the function is called.
    let owned = Box::new(owned);
    Box::new(move |stream| can_be_asked(device, stream) && owned.accepts(stream))
}

/// Whether CUDA can say if the stream is being captured.
///
/// PyTorch's function asks CUDA the same, and throws if CUDA fails. A C++ exception must not pass
/// through Rust frames, so the filter rejects the stream of a device that fails.
fn can_be_asked(device: i64, stream: StreamId) -> bool {
    devices().get(device).is_some_and(|engine| engine.driver().capture(stream).is_ok())
}

fn address_of(stream: StreamId) -> usize {
    usize::try_from(stream.0).unwrap_or(0)
}
