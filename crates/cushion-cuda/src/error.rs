//! Errors of CUDA, with advice.

use crate::call::Code;
use crate::sys::Api;

/// Why a device cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// The driver library cannot be loaded.
    #[error(
        "the CUDA driver cannot be loaded ({reason}): install the NVIDIA driver, or add the folder \
         that holds libcuda.so.1 to LD_LIBRARY_PATH (in a container: start it with GPU access)"
    )]
    NoLibrary {
        /// The loader's error.
        reason: String,
    },
    /// The driver library lacks a function.
    #[error(
        "the CUDA driver has no function {function}: it is too old or not a CUDA driver; install \
         an NVIDIA driver for CUDA 11.4 or later"
    )]
    NoFunction {
        /// CUDA's name for the function.
        function: &'static str,
    },
    /// The driver is installed, but has no device.
    #[error(
        "CUDA sees no device: check that nvidia-smi lists one and that CUDA_VISIBLE_DEVICES does \
         not hide it"
    )]
    NoDevice,
    /// The process sees devices, but not this one.
    #[error(
        "there is no CUDA device {device}: this process sees {count}, numbered from 0 (see \
         CUDA_VISIBLE_DEVICES)"
    )]
    NoSuchDevice {
        /// The requested index.
        device: u32,
        /// The number of devices.
        count: u32,
    },
    /// A call to the driver failed.
    #[error("the CUDA call {function} failed with {name} (error {code}): {}", advice(*.code))]
    Failed {
        /// CUDA's name for the function.
        function: &'static str,
        /// CUDA's error code.
        code: i32,
        /// CUDA's name for the error.
        name: String,
    },
}

impl CudaError {
    pub(crate) fn of(api: &Api, function: &'static str, code: Code) -> Self {
        let name = api.error_name(code).unwrap_or_else(|| "an unknown error".to_owned());
        Self::Failed { function, code: code.0, name }
    }
}

/// Returns advice for the user.
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
            "the library found is the stub for linking; put the driver's own libcuda.so.1 before it \
             in LD_LIBRARY_PATH"
        }
        Code::DEVICE_UNAVAILABLE => "another process uses the device exclusively",
        Code::SYSTEM_DRIVER_MISMATCH => {
            "the driver in the kernel and the library differ; restart the machine after updating"
        }
        _ => "nvidia-smi and the system's log may tell more",
    }
}
