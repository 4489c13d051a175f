//! The CUDA driver library: its types, as cudarc declares them, and the functions used here.
//!
//! cudarc's own functions are not called. They panic if the library or a function is missing, and
//! they return a Rust enum, for which an error code of a newer driver would be undefined behaviour.
//! The table below has the same functions with a plain number as result; the compiler checks their
//! parameters against cudarc's declarations.

use std::error::Error as _;
use std::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};
use std::fmt;
use std::sync::OnceLock;

use cudarc::driver::sys;
use libloading::Library;

pub(crate) use sys::{
    CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUgraph, CUgraphNode,
    CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationGranularity_flags,
    CUmemAllocationHandleType, CUmemAllocationProp, CUmemAllocationType,
    CUmemGenericAllocationHandle, CUmemLocation, CUmemLocationType, CUresult, CUstream,
    CUstreamCaptureMode, CUstreamCaptureStatus, CUuuid,
};

use crate::error::CudaError;

/// The engine never measures time with events, and events without timing are cheaper.
pub(crate) const EVENT_DISABLE_TIMING: c_uint =
    sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint;

/// A stream that does not synchronise with the default stream.
pub(crate) const STREAM_NON_BLOCKING: c_uint =
    sys::CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint;

/// The names of the driver library. Every NVIDIA driver installs the first; the second may be a
/// stub for linking.
const NAMES: &[&str] =
    if cfg!(windows) { &["nvcuda.dll"] } else { &["libcuda.so.1", "libcuda.so"] };

macro_rules! functions {
    ($(#[unchecked] $plain:ident($($plain_type:ty),*);)* $($name:ident($($type:ty),*);)*) => {
        functions!(@table $($plain($($plain_type),*);)* $($name($($type),*);)*);
        $(const _: unsafe fn($($type),*) -> CUresult = sys::$name;)*
    };
    (@table $($name:ident($($type:ty),*);)*) => {
        /// The functions of the driver library.
        #[expect(non_snake_case, reason = "CUDA's own names")]
        pub(crate) struct Api {
            $(pub(crate) $name: unsafe extern "C" fn($($type),*) -> c_int,)*
            /// Keeps the library loaded.
            _library: Library,
        }

        impl Api {
            fn find(library: Library) -> Result<Self, CudaError> {
                $(
                    // SAFETY: `get` requires that the type fit the symbol. It is the type of CUDA's
                    // header for this name, as cudarc declares it (compared above), except for the
                    // result, a C enum, which is passed like an `int`. No safe function can look up
                    // a symbol.
                    let found = unsafe {
                        library.get::<unsafe extern "C" fn($($type),*) -> c_int>(stringify!($name))
                    };
                    #[expect(non_snake_case, reason = "CUDA's own names")]
                    let $name = match found {
                        Ok(function) => *function,
                        Err(_) => return Err(CudaError::NoFunction { function: stringify!($name) }),
                    };
                )*
                Ok(Self { $($name,)* _library: library })
            }
        }
    };
}

functions! {
    // cudarc's versions take enums, and these must take any number.
    #[unchecked] cuGetErrorName(c_int, *mut *const c_char);
    #[unchecked] cuDeviceGetAttribute(*mut c_int, c_uint, CUdevice);
    cuInit(c_uint);
    cuDriverGetVersion(*mut c_int);
    cuDeviceGetCount(*mut c_int);
    cuDeviceGet(*mut CUdevice, c_int);
    cuDeviceGetName(*mut c_char, c_int, CUdevice);
    cuDeviceGetUuid_v2(*mut CUuuid, CUdevice);
    cuDeviceCanAccessPeer(*mut c_int, CUdevice, CUdevice);
    cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice);
    cuDevicePrimaryCtxRelease_v2(CUdevice);
    cuDevicePrimaryCtxGetState(CUdevice, *mut c_uint, *mut c_int);
    cuCtxGetCurrent(*mut CUcontext);
    cuCtxPushCurrent_v2(CUcontext);
    cuCtxPopCurrent_v2(*mut CUcontext);
    cuCtxSynchronize();
    cuThreadExchangeStreamCaptureMode(*mut CUstreamCaptureMode);
    cuMemGetInfo_v2(*mut usize, *mut usize);
    cuMemAlloc_v2(*mut CUdeviceptr, usize);
    cuMemFree_v2(CUdeviceptr);
    cuMemAddressReserve(*mut CUdeviceptr, usize, usize, CUdeviceptr, c_ulonglong);
    cuMemAddressFree(CUdeviceptr, usize);
    cuMemGetAllocationGranularity(
        *mut usize, *const CUmemAllocationProp, CUmemAllocationGranularity_flags
    );
    cuMemCreate(*mut CUmemGenericAllocationHandle, usize, *const CUmemAllocationProp, c_ulonglong);
    cuMemRelease(CUmemGenericAllocationHandle);
    cuMemMap(CUdeviceptr, usize, usize, CUmemGenericAllocationHandle, c_ulonglong);
    cuMemSetAccess(CUdeviceptr, usize, *const CUmemAccessDesc, usize);
    cuMemUnmap(CUdeviceptr, usize);
    cuMemcpyHtoDAsync_v2(CUdeviceptr, *const c_void, usize, CUstream);
    cuMemcpyDtoHAsync_v2(*mut c_void, CUdeviceptr, usize, CUstream);
    cuMemcpyDtoDAsync_v2(CUdeviceptr, CUdeviceptr, usize, CUstream);
    cuMemsetD8Async(CUdeviceptr, c_uchar, usize, CUstream);
    cuStreamCreate(*mut CUstream, c_uint);
    cuStreamDestroy_v2(CUstream);
    cuStreamSynchronize(CUstream);
    cuEventCreate(*mut CUevent, c_uint);
    cuEventDestroy_v2(CUevent);
    cuEventRecord(CUevent, CUstream);
    cuEventQuery(CUevent);
    cuEventSynchronize(CUevent);
    cuStreamGetCtx(CUstream, *mut CUcontext);
    cuStreamGetCaptureInfo_v2(
        CUstream, *mut CUstreamCaptureStatus, *mut u64, *mut CUgraph, *mut *const CUgraphNode,
        *mut usize
    );
    cuGraphNodeGetDependencies(CUgraphNode, *mut CUgraphNode, *mut usize);
}

impl Api {
    /// Returns the library. The first successful call loads it; it is never unloaded.
    pub(crate) fn load() -> Result<&'static Self, CudaError> {
        static API: OnceLock<Api> = OnceLock::new();
        if let Some(api) = API.get() {
            return Ok(api);
        }
        // A failure is not cached: the driver may be installed or put on the path later.
        let api = Self::find(open()?)?;
        Ok(API.get_or_init(|| api))
    }
}

fn open() -> Result<Library, CudaError> {
    let mut reason = String::new();
    for name in NAMES {
        // SAFETY: loading a library runs its initialisers, so it must be safe to load into any
        // process. Every CUDA program loads NVIDIA's driver by this name; whoever can put another
        // file there can already run any code in this process. Rust has no safe way to load a
        // library.
        match unsafe { Library::new(*name) } {
            Ok(library) => return Ok(library),
            // The loader's own message is in the source of the error.
            Err(error) if reason.is_empty() => {
                reason = error.source().map_or_else(|| error.to_string(), ToString::to_string);
            }
            Err(_) => {}
        }
    }
    Err(CudaError::NoLibrary { reason })
}

impl fmt::Debug for Api {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Api").finish_non_exhaustive()
    }
}
