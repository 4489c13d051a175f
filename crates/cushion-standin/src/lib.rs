//! A stand-in for `libcuda.so.1`, for tests on machines without a GPU: the functions of the driver
//! API that Cushion uses, with CUDA's names and parameters, over simulated devices.
//!
//! Link the shared library as `libcuda.so.1` in a folder, and put that folder in `LD_LIBRARY_PATH`.
//! It also stands in for NVML (`nvml.rs`): link it there as `libnvidia-ml.so.1` too. Use links, not
//! copies: each copy would simulate its own machine. Environment variables configure the machine:
//!
//! | variable | meaning | default |
//! |---|---|---|
//! | `STANDIN_DEVICES` | the number of devices; with 0, `cuInit` fails like CUDA's | 1 |
//! | `STANDIN_CAPACITY` | memory of each device, in bytes | 1 GiB |
//! | `STANDIN_HOST` | host memory for pages of each device, in bytes | plenty |
//! | `STANDIN_NUMA` | the NUMA node next to each device; -1 for a host without nodes | 0 |
//! | `STANDIN_PEERS` | `all`, or pairs: `1>0` lets device 1 access memory of 0 | none |
//! | `STANDIN_WITHOUT` | missing features: `fabric,file,rdma,pages,host`; `host@1`: on 1 | nothing |
//! | `STANDIN_LENIENT` | 1 allows calls on pages during a capture in any mode, as CUDA does | 0 |
//!
//! It refuses what CUDA refuses, and more: a call without a current context or with the context of
//! another device, and a call outside relaxed mode while anything is captured. Any number is a
//! stream of the current device, unless `cuStreamCreate` made it. Nothing runs: tests control work
//! on streams, captures and failures through the functions of `hooks.rs`, named `standin_*`.

mod contexts;
mod gate;
mod hooks;
mod memory;
mod nvml;
mod out;
mod streams;
mod world;

use std::ffi::c_int;

use cudarc::driver::sys::CUresult;

/// The result of a function: CUDA's code, where zero is `Ok`.
type Answer = Result<(), c_int>;

/// Declares functions of the driver API or of NVML. Each call is counted, may be made to fail, and
/// runs with the world locked.
macro_rules! driver_calls {
    ($(fn $name:ident($($argument:ident: $type:ty),* $(,)?) |$world:ident| $body:block)*) => {$(
        /// CUDA's function of this name.
        ///
        /// # Safety
        ///
        /// As for CUDA: every pointer is null, or points to memory for its parameter that stays
        /// valid during the call.
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($argument: $type),*) -> ::std::ffi::c_int {
            $crate::world::answer(stringify!($name), |$world| $body)
        }
    )*};
}
use driver_calls;

const fn code(result: CUresult) -> c_int {
    // The codes are small positive numbers, so the cast keeps them.
    #[expect(clippy::cast_possible_wrap, reason = "codes are below 1000")]
    let code = result as u32 as c_int;
    code
}

const INVALID_VALUE: c_int = code(CUresult::CUDA_ERROR_INVALID_VALUE);
const OUT_OF_MEMORY: c_int = code(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
const NOT_INITIALIZED: c_int = code(CUresult::CUDA_ERROR_NOT_INITIALIZED);
const DEINITIALIZED: c_int = code(CUresult::CUDA_ERROR_DEINITIALIZED);
const NO_DEVICE: c_int = code(CUresult::CUDA_ERROR_NO_DEVICE);
const INVALID_DEVICE: c_int = code(CUresult::CUDA_ERROR_INVALID_DEVICE);
const INVALID_CONTEXT: c_int = code(CUresult::CUDA_ERROR_INVALID_CONTEXT);
const INVALID_HANDLE: c_int = code(CUresult::CUDA_ERROR_INVALID_HANDLE);
const NOT_READY: c_int = code(CUresult::CUDA_ERROR_NOT_READY);
const CONTEXT_IS_DESTROYED: c_int = code(CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED);
const NOT_SUPPORTED: c_int = code(CUresult::CUDA_ERROR_NOT_SUPPORTED);
const CAPTURE_UNSUPPORTED: c_int = code(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
const CAPTURE_IMPLICIT: c_int = code(CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
const UNKNOWN: c_int = code(CUresult::CUDA_ERROR_UNKNOWN);
