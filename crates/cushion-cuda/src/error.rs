//! Why a device cannot be had, in words that say what to do about it.

use crate::call::Code;
use crate::sys::Api;

/// A device that cannot be had.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// There is no driver library.
    #[error(
        "the CUDA driver cannot be loaded ({reason}): install the NVIDIA driver, or add the folder that \
         holds libcuda.so.1 to LD_LIBRARY_PATH (in a container: start it with GPU access)"
    )]
    NoLibrary {
        /// What the loader said.
        reason: String,
    },
    /// The driver library lacks a function.
    #[error(
        "the CUDA driver has no function {function}: it is too old or not a CUDA driver; install an \
         NVIDIA driver for CUDA 11.4 or later"
    )]
    NoFunction {
        /// CUDA's name of it.
        function: &'static str,
    },
    /// The driver is there, and no device.
    #[error(
        "CUDA sees no device: check that nvidia-smi lists one and that CUDA_VISIBLE_DEVICES does not \
         hide it"
    )]
    NoDevice,
    /// There are devices, but not this one.
    #[error(
        "there is no CUDA device {device}: this process sees {count}, numbered from 0 (see \
         CUDA_VISIBLE_DEVICES)"
    )]
    NoSuchDevice {
        /// The index asked for.
        device: u32,
        /// How many devices there are.
        count: u32,
    },
    /// A call to the driver failed.
    #[error("the CUDA call {function} failed with {name} (error {code}): {}", advice(*.code))]
    Failed {
        /// CUDA's name of the function.
        function: &'static str,
        /// CUDA's error code.
        code: i32,
        /// CUDA's name of the error.
        name: String,
    },
}

impl CudaError {
    pub(crate) fn of(api: &Api, function: &'static str, code: Code) -> Self {
        let name = api.error_name(code).unwrap_or_else(|| "an unknown error".to_owned());
        Self::Failed { function, code: code.0, name }
    }
}

/// What a person can do about an error.
fn advice(code: i32) -> &'static str {
    match Code(code) {
        Code::OUT_OF_MEMORY => {
            "the device has too little memory left for CUDA itself; stop other programs on it"
        }
        Code::NOT_INITIALIZED => {
            "CUDA cannot be used in a process forked from one that used it; start the process anew \
             (in Python: the spawn method)"
        }
        Code::DEINITIALIZED => "the process is ending, and CUDA has shut down",
        Code::STUB_LIBRARY => {
            "the library found is the stub for linking; put the driver's own libcuda.so.1 before it in \
             LD_LIBRARY_PATH"
        }
        Code::DEVICE_UNAVAILABLE => "another process has the device for itself",
        Code::SYSTEM_DRIVER_MISMATCH => {
            "the driver in the kernel and the library differ; restart the machine after updating"
        }
        _ => "nvidia-smi and the system's log may tell more",
    }
}
