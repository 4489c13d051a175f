//! Cushion for C and C++: the functions of `include/cushion.h`, which documents them.
//!
//! Each function checks its arguments, looks up the device of its handle (`handles.rs`), calls the
//! crate `cushion`, and turns the result into a status and a message (`status.rs`,
//! `last_error.rs`).

mod handles;
mod last_error;
mod pointers;
mod statistics;
mod status;

use std::ffi::{CStr, c_char, c_int, c_void};

use cushion::Device;
use cushion::core::{AddressError, BlockUse};

pub use handles::Handle;
pub use pointers::{Out, Text};
pub use statistics::Statistics;
pub use status::Status;

use handles::Held;
use last_error::status_of;
use pointers::{address, pointer, size, stream_id};
use status::Failure;

const VERSION: &CStr =
    match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
        Ok(version) => version,
        Err(_) => panic!("the version contains a zero byte"),
    };

/// Declares functions of the header, all with the same safety section.
macro_rules! functions {
    ($($(#[doc = $doc:literal])* fn $name:ident($($argument:ident: $type:ty),*) $body:block)*) => {$(
        $(#[doc = $doc])*
        ///
        /// # Safety
        ///
        /// As the header says: every result pointer is null or points to writable memory for its
        /// result; every text is null or ends in a zero byte; both stay valid, and nobody else
        /// writes there, during the call. On a GPU, a stream is a CUDA stream. A device handle and
        /// a memory address may have any value: they are looked up.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> Status {
            status_of(|| $body)
        }
    )*};
}

functions! {
    // ---- memory ----

    /// Allocates `bytes` bytes.
    fn cushion_alloc(device: Handle, bytes: usize, stream: *mut c_void, out: Out<*mut c_void>) {
        let out = out.begin("out", std::ptr::null_mut())?;
        let found = device.with(|device| {
            device.check_stream(stream_id(stream))?;
            Ok(device.engine().alloc(bytes as u64, stream_id(stream))?)
        })?;
        out.give(pointer(found));
        Ok(())
    }

    /// Frees memory.
    fn cushion_free(device: Handle, pointer: *mut c_void) {
        device.with(|device| Ok(device.engine().free(address(pointer))?))
    }

    /// Records that work on a stream uses the memory.
    fn cushion_record_stream(device: Handle, pointer: *mut c_void, stream: *mut c_void) {
        device.with(|device| match address(pointer) {
            0 => Ok(()),
            address => {
                device.check_stream(stream_id(stream))?;
                Ok(device.engine().record_stream(address, stream_id(stream))?)
            }
        })
    }

    /// Returns the size of the block behind an allocation.
    fn cushion_size_of(device: Handle, pointer: *mut c_void, out: Out<usize>) {
        let out = out.begin("out", 0)?;
        out.give(device.with(|device| match address(pointer) {
            0 => Ok(0),
            address => device.engine().size_of(address).map(|(block, _)| size(block)).ok_or_else(|| {
                AddressError::Unknown { address }.into()
            }),
        })?);
        Ok(())
    }

    /// Releases all cached memory to the device.
    fn cushion_empty_cache(device: Handle) {
        device.with(|device| Ok(device.empty_cache()?))
    }

    /// Limits the reserved memory to a fraction of the device's memory.
    fn cushion_set_memory_fraction(device: Handle, fraction: f64) {
        device.with(|device| Ok(device.set_memory_fraction(fraction)?))
    }

    // ---- figures ----

    /// Returns the device's free and total memory.
    fn cushion_memory_info(device: Handle, free_bytes: Out<usize>, total_bytes: Out<usize>) {
        let free_bytes = free_bytes.begin("free_bytes", 0)?;
        let total_bytes = total_bytes.begin("total_bytes", 0)?;
        let info = device.with(|device| Ok(device.memory_info()?))?;
        free_bytes.give(size(info.free));
        total_bytes.give(size(info.total));
        Ok(())
    }

    /// Returns all statistics.
    fn cushion_stats(device: Handle, out: Out<Statistics>) {
        let asked = out.asked()?;
        let stats = device.with(|device| Ok(device.stats()))?;
        asked.fill(&stats);
        Ok(())
    }

    /// Sets all peaks to the current values.
    fn cushion_reset_peak_stats(device: Handle) {
        device.with(|device| {
            device.reset_peak_stats();
            Ok(())
        })
    }

    // ---- devices ----

    /// Opens a GPU.
    fn cushion_device_cuda(index: c_int, conf: Text, out: Out<Handle>) {
        let out = out.begin("out", Handle::NULL)?;
        let conf = conf.get("conf")?;
        let Ok(index) = u32::try_from(index) else {
            let text = format!("no device {index}: devices are numbered from 0");
            return Err(Failure::new(Status::NoDevice, text));
        };
        let held = match conf {
            None => Held { device: Device::cuda(index)?, own: false },
            Some(conf) => Held { device: Device::builder().conf(&conf)?.cuda(index)?, own: true },
        };
        out.give(Handle::open(held)?);
        Ok(())
    }

    /// Makes a simulated device.
    fn cushion_device_simulated(capacity: usize, conf: Text, out: Out<Handle>) {
        let out = out.begin("out", Handle::NULL)?;
        let conf = conf.get("conf")?.unwrap_or_default();
        let device = Device::builder().conf(&conf)?.simulated(capacity as u64);
        out.give(Handle::open(Held { device, own: true })?);
        Ok(())
    }

    /// Destroys a device handle.
    fn cushion_device_destroy(device: Handle) {
        if device.is_null() {
            return Ok(());
        }
        let held = device.close()?;
        if held.own { free_all(&held.device) } else { Ok(()) }
    }
}

/// Frees all memory of a device with its own cache, live memory included, because no caller could
/// free it any more. The engine is dropped with the device even if this fails.
fn free_all(device: &Device) -> Result<(), Failure> {
    let engine = device.engine();
    let segments = engine.snapshot().segments;
    let blocks = segments.iter().flat_map(|segment| &segment.blocks);
    let live: Vec<_> = blocks.filter(|block| block.use_ == BlockUse::Live).collect();
    let mut freed = Ok(());
    for block in &live {
        freed = freed.and(engine.free(block.address));
    }
    engine.empty_cache()?;
    freed?;
    if live.is_empty() {
        return Ok(());
    }
    let (count, bytes) = (live.len(), live.iter().map(|block| block.requested).sum::<u64>());
    let text =
        format!("the device is destroyed with live memory: {count} allocations, {bytes} bytes");
    Err(Failure::new(Status::StillLive, text))
}

/// Returns the message of this thread's last failure.
#[unsafe(no_mangle)]
pub extern "C" fn cushion_last_error() -> *const c_char {
    last_error::last()
}

/// Returns a status's name in the header.
#[unsafe(no_mangle)]
pub extern "C" fn cushion_status_name(status: c_int) -> *const c_char {
    let known = usize::try_from(status).ok().and_then(|status| Status::ALL.get(status));
    known.map_or(c"unknown status", |status| status.name()).as_ptr()
}

/// Returns the version of this library.
#[unsafe(no_mangle)]
pub extern "C" fn cushion_version() -> *const c_char {
    VERSION.as_ptr()
}
