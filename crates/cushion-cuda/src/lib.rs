//! Cushion's door to CUDA: [`CudaDriver`] is a device behind [`cushion_core::Driver`], on the CUDA
//! driver API.
//!
//! The driver library is loaded at run time, so that a program built with this crate starts on any
//! machine; where CUDA is missing, or has no such device, [`CudaDriver::new`] says so in a
//! [`CudaError`].
//!
//! Reading order: `driver.rs` (what each call of the trait does), `context.rs` (what surrounds a
//! call), `call.rs` (one function for each function of CUDA, and all `unsafe` but the loading), `sys.rs`
//! (the library). Beside them, `processes.rs` tells which other processes hold memory of a device, through
//! a second library of the driver's (`nvml.rs`).
//!
//! An engine over it needs a clock of real time: on the default one, which is virtual, a request that should wait for
//! memory would be refused at once. The one below is for threads that block; the crate `cushion` puts all of this together,
//! with a clock that futures can wait on, too.
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

/// How many devices this process can see; zero where CUDA is installed and there is none.
pub fn device_count() -> Result<u32, CudaError> {
    let api = Api::load()?;
    match api.init() {
        Ok(()) => {}
        Err(Code::NO_DEVICE) => return Ok(0),
        Err(code) => return Err(CudaError::of(api, "cuInit", code)),
    }
    api.device_count().map_err(|code| CudaError::of(api, "cuDeviceGetCount", code))
}

/// The newest version of CUDA that the installed driver serves: major and minor.
pub fn driver_version() -> Result<(u32, u32), CudaError> {
    let api = Api::load()?;
    let version = api.driver_version();
    let version = version.map_err(|code| CudaError::of(api, "cuDriverGetVersion", code))?;
    Ok((version / 1000, version % 1000 / 10))
}

/// CUDA's own name of an error code, as in [`Fault::Failed`](cushion_core::driver::Fault::Failed);
/// `None` if the driver is not there or does not know it.
#[must_use]
pub fn name(code: i32) -> Option<String> {
    Api::load().ok()?.error_name(Code(code))
}
