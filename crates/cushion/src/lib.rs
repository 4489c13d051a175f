//! Cushion for programs: one engine per GPU of this process, on real time.
//!
//! `cushion-core` is the engine, `cushion-cuda` the driver; this crate puts them together. [`devices`]
//! holds the engines; [`SystemClock`] is their clock.

#![forbid(unsafe_code)]

mod clock;
mod devices;
mod driver;

pub use clock::SystemClock;
pub use cushion_core as core;
pub use cushion_cuda::{CudaDriver, CudaError, name as error_name};
pub use devices::{DeviceEngine, DeviceError, Devices, HistoryPlan, MAX_DEVICES, devices};
pub use driver::DeviceDriver;
