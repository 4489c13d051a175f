//! Reports to `torch.profiler(profile_memory=True)`, as PyTorch's own allocator sends them.
//!
//! [`start`] looks the functions up in libc10. If one is missing, the profiler shows no CUDA
//! memory; nothing else changes. The functions do not throw: PyTorch's allocator calls them from
//! destructors.

use std::ffi::c_void;
use std::sync::OnceLock;

use crate::process::symbols::Loaded;

/// `c10::Device`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Device {
    kind: i8,
    index: i8,
}

/// `c10::DeviceType::CUDA`.
const CUDA: i8 = 1;

type IsOn = unsafe extern "C-unwind" fn() -> bool;
type ReportUsage = unsafe extern "C-unwind" fn(*mut c_void, i64, usize, usize, Device);
type ReportOutOfMemory = unsafe extern "C-unwind" fn(i64, usize, usize, Device);

#[derive(Debug)]
struct Profiler {
    is_on: IsOn,
    report_usage: ReportUsage,
    report_out_of_memory: ReportOutOfMemory,
}

static PROFILER: OnceLock<Option<Profiler>> = OnceLock::new();

/// Looks up the functions of the profiler.
pub(crate) fn start() {
    PROFILER.get_or_init(|| {
        let c10 = Loaded::find("libc10.so")?;
        // SAFETY: the symbol is `bool c10::memoryProfilingEnabled()`.
        let is_on = unsafe { c10.function(c"_ZN3c1022memoryProfilingEnabledEv") }?;
        let usage = c"_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE";
        // SAFETY: the symbol is
        // `void c10::reportMemoryUsageToProfiler(void*, int64_t, size_t, size_t, Device)`.
        let report_usage = unsafe { c10.function(usage) }?;
        let out_of_memory = c"_ZN3c1027reportOutOfMemoryToProfilerElmmNS_6DeviceE";
        // SAFETY: the symbol is
        // `void c10::reportOutOfMemoryToProfiler(int64_t, size_t, size_t, Device)`.
        let report_out_of_memory = unsafe { c10.function(out_of_memory) }?;
        Some(Profiler { is_on, report_usage, report_out_of_memory })
    });
}

/// A profiler that records memory on this thread.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Recording(&'static Profiler);

/// Returns the profiler, if it records memory on this thread.
pub(crate) fn recording() -> Option<Recording> {
    let profiler = PROFILER.get()?.as_ref()?;
    // SAFETY: the function has no precondition.
    unsafe { (profiler.is_on)() }.then_some(Recording(profiler))
}

impl Recording {
    /// Reports an allocation (`change` above zero) or a free (below zero).
    pub(crate) fn usage(self, address: u64, change: i64, device: i64, totals: Totals) {
        let address = std::ptr::with_exposed_provenance_mut(size(address));
        let Totals { allocated, reserved } = totals;
        // SAFETY: the function records the address and does not dereference it. The other arguments
        // are plain numbers.
        unsafe {
            (self.0.report_usage)(address, change, size(allocated), size(reserved), cuda(device));
        }
    }

    /// Reports a refused request.
    pub(crate) fn out_of_memory(self, bytes: u64, device: i64, totals: Totals) {
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        let Totals { allocated, reserved } = totals;
        // SAFETY: all arguments are plain numbers.
        unsafe {
            (self.0.report_out_of_memory)(bytes, size(allocated), size(reserved), cuda(device));
        }
    }
}

/// The bytes that the allocator has allocated and reserved on a device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Totals {
    pub(crate) allocated: u64,
    pub(crate) reserved: u64,
}

fn cuda(device: i64) -> Device {
    Device { kind: CUDA, index: i8::try_from(device).unwrap_or(-1) }
}

fn size(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}
