//! Cushion's access to CUDA: [`CudaDriver`] implements [`cushion_core::Driver`] on the CUDA driver
//! API.
//!
//! The driver library is loaded at run time, so that a program built with this crate starts on any
//! machine. If CUDA or the device is missing, [`CudaDriver::new`] returns a [`CudaError`].
//!
//! Reading order: `driver.rs` (the calls of the trait), `context.rs` (the context and capture mode
//! around a call), `call.rs` (one function for each CUDA function, with all `unsafe` code except
//! the loading), `sys.rs` (the library). `processes.rs` lists the other processes that hold memory
//! of a device, through NVML, a second library of the driver (`nvml.rs`).
//!
//! An engine over this driver needs a real-time clock: on the default clock, which is virtual, a
//! request that should wait for memory would be refused at once. The clock below is for threads
//! that block. The crate `cushion` combines all of this, with a clock that futures can wait on,
//! too.
//!
//! ```no_run
//! use std::sync::Arc;
//!
//! use cushion_core::testing::RealClock;
//! use cushion_core::{Engine, EngineConfig, StreamId};
//! use cushion_cuda::CudaDriver;
//!
//! let clock = Arc::new(RealClock::default());
//! let config = EngineConfig { clock, ..EngineConfig::default() };
//! let gpu = Engine::with_config(CudaDriver::new(0)?, config);
//! let address = gpu.alloc(3 << 20, StreamId(0))?;
//! gpu.free(address)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod call;
mod context;
mod driver;
mod error;
mod nvml;
mod page;
mod processes;
mod sys;
mod transfer;

pub use driver::CudaDriver;
pub use error::CudaError;
pub use processes::{GpuProcess, GpuProcesses};

use call::Code;
use sys::Api;

/// Returns the number of devices that this process can see; zero if CUDA is installed without a
/// device.
pub fn device_count() -> Result<u32, CudaError> {
    let api = Api::load()?;
    match api.init() {
        Ok(()) => {}
        Err(Code::NO_DEVICE) => return Ok(0),
        Err(code) => return Err(CudaError::of(api, "cuInit", code)),
    }
    api.device_count().map_err(|code| CudaError::of(api, "cuDeviceGetCount", code))
}

/// Returns the newest CUDA version that the installed driver supports: major and minor.
pub fn driver_version() -> Result<(u32, u32), CudaError> {
    let api = Api::load()?;
    let version = api.driver_version();
    let version = version.map_err(|code| CudaError::of(api, "cuDriverGetVersion", code))?;
    Ok((version / 1000, version % 1000 / 10))
}

/// Returns CUDA's own name for an error code, as in
/// [`Fault::Failed`](cushion_core::driver::Fault::Failed); `None` if the driver is not installed or
/// does not know the code.
#[must_use]
pub fn name(code: i32) -> Option<String> {
    Api::load().ok()?.error_name(Code(code))
}
