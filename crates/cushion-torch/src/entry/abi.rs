//! The entry points that PyTorch calls. Each one translates its arguments, calls `plugin.rs`, and
//! turns a failure into a C++ exception.
//!
//! A panic becomes an exception too. It is thrown outside of `catch_unwind`, after every guard is
//! dropped.

use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use cushion::core::{PoolId, StreamId};

use crate::entry::plugin;
use crate::process::panic_text;
use crate::python::exceptions::pass_on_interrupt;
use crate::pytorch::function::{self, StdFunction};
use crate::pytorch::throw::{self, Failure};

/// The id of a private pool: `std::pair<unsigned long long, unsigned long long>`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Pair {
    first: u64,
    second: u64,
}

impl From<Pair> for PoolId {
    fn from(pair: Pair) -> Self {
        Self(pair.first, pair.second)
    }
}

/// Returns the names of PyTorch's setters, with the function for each.
pub(crate) fn hooks() -> [(&'static str, *const c_void); 8] {
    [
        ("set_init_fn", cushion_init as *const c_void),
        ("set_reset_fn", cushion_reset as *const c_void),
        ("set_memory_fraction_fn", cushion_memory_fraction as *const c_void),
        ("set_base_alloc_fn", cushion_base_alloc as *const c_void),
        ("set_record_stream_fn", record_stream as *const c_void),
        ("set_begin_allocate_to_pool", cushion_begin_allocate_to_pool as *const c_void),
        ("set_end_allocate_to_pool_fn", cushion_end_allocate_to_pool as *const c_void),
        ("set_release_pool", cushion_release_pool as *const c_void),
    ]
}

/// `void* (size_t size, int device, cudaStream_t stream)`
#[unsafe(no_mangle)]
pub extern "C-unwind" fn cushion_alloc(
    size: usize,
    device: c_int,
    stream: *mut c_void,
) -> *mut c_void {
    let address = guarded(|| plugin::alloc(size as u64, device.into(), stream_id(stream)));
    pass_on_interrupt();
    pointer(or_throw(address))
}

/// `void (void* pointer, size_t size, int device, cudaStream_t stream)`. Destructors call it, so it
/// never throws.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn cushion_free(
    pointer: *mut c_void,
    _size: usize,
    device: c_int,
    _stream: *mut c_void,
) {
    let _ = guarded(|| {
        plugin::free(address(pointer), device.into());
        Ok(())
    });
}

/// `void (int device_count)`
#[unsafe(no_mangle)]
pub extern "C-unwind" fn cushion_init(device_count: c_int) {
    plugin::init(device_count.into());
}

/// `void ()`: empties the cache.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn cushion_reset() {
    or_throw(guarded(plugin::empty_cache));
}

/// `void (double fraction, int device)`
#[unsafe(no_mangle)]
pub extern "C-unwind" fn cushion_memory_fraction(fraction: f64, device: c_int) {
    or_throw(guarded(|| plugin::set_memory_fraction(fraction, device.into())));
}

/// `void* (void* pointer, size_t* size)`
///
/// # Safety
///
/// `size` is null, or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn cushion_base_alloc(
    base_of: *mut c_void,
    size: *mut usize,
) -> *mut c_void {
    let found = guarded(|| Ok(plugin::base_of(address(base_of)))).ok().flatten();
    let Some((base, bytes)) = found else { return std::ptr::null_mut() };
    // SAFETY: the caller guarantees that the pointer is null or valid for a write, and no other
    // reference to the number exists during the call.
    if let Some(size) = unsafe { size.as_mut() } {
        *size = usize::try_from(bytes).unwrap_or(usize::MAX);
    }
    pointer(base)
}

/// `void (void* pointer, cudaStream_t stream)`
#[unsafe(no_mangle)]
pub extern "C-unwind" fn cushion_record_stream(pointer: *mut c_void, stream: *mut c_void) {
    record_stream(pointer, stream);
}

/// The function that [`hooks`] gives PyTorch. It is not exported: the loader would look up an
/// exported one by name. In a program that links the C library (`include/cushion.h`) it would find
/// that library's function of the same name, which takes other arguments.
#[inline(never)]
extern "C-unwind" fn record_stream(pointer: *mut c_void, stream: *mut c_void) {
    or_throw(guarded(|| plugin::record_stream(address(pointer), stream_id(stream))));
}

/// `void (int device, std::pair<…> pool, std::function<bool(cudaStream_t)> filter)`
///
/// # Safety
///
/// `filter` points to a `std::function<bool(cudaStream_t)>` of libstdc++, or is null.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn cushion_begin_allocate_to_pool(
    device: c_int,
    pool: Pair,
    filter: *const StdFunction,
) {
    or_throw(guarded(|| {
        // SAFETY: the caller guarantees that the pointer is null or a `std::function` of libstdc++,
        // which it keeps unchanged until this returns.
        let filter = unsafe { function::filter(device.into(), filter) };
        plugin::begin_pool(device.into(), pool.into(), filter)
    }));
}

/// `void (int device, std::pair<…> pool)`
#[unsafe(no_mangle)]
pub extern "C-unwind" fn cushion_end_allocate_to_pool(device: c_int, pool: Pair) {
    or_throw(guarded(|| plugin::end_pool(device.into(), pool.into())));
}

/// `void (int device, std::pair<…> pool)`. Destructors call it, so it never throws.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn cushion_release_pool(device: c_int, pool: Pair) {
    let _ = guarded(|| {
        plugin::release_pool(device.into(), pool.into());
        Ok(())
    });
}

/// Runs `f`, and turns a panic into a failure.
fn guarded<T>(f: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|panic| {
        let what = panic_text(&*panic);
        Err(Failure::Other(format!("Cushion: internal error, please report it: {what}")))
    })
}

fn or_throw<T>(result: Result<T, Failure>) -> T {
    match result {
        Ok(value) => value,
        Err(failure) => throw::raise(failure),
    }
}

fn stream_id(stream: *mut c_void) -> StreamId {
    StreamId(address(stream))
}

fn address(pointer: *mut c_void) -> u64 {
    pointer.expose_provenance() as u64
}

fn pointer(address: u64) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap_or(0))
}
