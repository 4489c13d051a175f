//! The status of a call, and the message of a failure.

use cushion::core::options::{OptionsError, SettingsError};
use cushion::core::{AddressError, AllocError, DriverError, FractionError};
use cushion::{CudaError, DeviceError, Error};

/// `cushion_status`. The values are part of the ABI and never change their meaning. The header
/// declares the same nine values for C, where no generator could explain them to the reader.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// The call succeeded.
    Ok = 0,
    /// An argument is not valid.
    InvalidArgument = 1,
    /// Not enough memory.
    OutOfMemory = 2,
    /// No live allocation starts at the address.
    UnknownAddress = 3,
    /// A conf string or an environment variable is not valid.
    InvalidOption = 4,
    /// The device does not exist, or CUDA is not installed.
    NoDevice = 5,
    /// A call to the driver failed.
    DriverError = 6,
    /// A device with live memory was destroyed; the memory is freed.
    StillLive = 7,
    /// A bug in Cushion.
    Internal = 8,
}

impl Status {
    /// Every status, at the index of its value.
    pub(crate) const ALL: [Self; 9] = [
        Self::Ok,
        Self::InvalidArgument,
        Self::OutOfMemory,
        Self::UnknownAddress,
        Self::InvalidOption,
        Self::NoDevice,
        Self::DriverError,
        Self::StillLive,
        Self::Internal,
    ];

    /// Returns the status's name in the header.
    pub(crate) fn name(self) -> &'static std::ffi::CStr {
        match self {
            Self::Ok => c"CUSHION_OK",
            Self::InvalidArgument => c"CUSHION_INVALID_ARGUMENT",
            Self::OutOfMemory => c"CUSHION_OUT_OF_MEMORY",
            Self::UnknownAddress => c"CUSHION_UNKNOWN_ADDRESS",
            Self::InvalidOption => c"CUSHION_INVALID_OPTION",
            Self::NoDevice => c"CUSHION_NO_DEVICE",
            Self::DriverError => c"CUSHION_DRIVER_ERROR",
            Self::StillLive => c"CUSHION_STILL_LIVE",
            Self::Internal => c"CUSHION_INTERNAL",
        }
    }
}

/// Why a call failed.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) status: Status,
    pub(crate) text: String,
}

impl Failure {
    pub(crate) fn new(status: Status, text: impl Into<String>) -> Self {
        Self { status, text: text.into() }
    }

    pub(crate) fn null(argument: &str) -> Self {
        Self::new(Status::InvalidArgument, format!("the argument `{argument}` is NULL"))
    }
}

/// Declares the status of each error type. The message is the error's own text.
macro_rules! statuses {
    ($($error:ty: |$value:pat_param| $status:expr;)*) => {$(
        impl From<$error> for Failure {
            fn from(error: $error) -> Self {
                let $value = &error;
                Self::new($status, error.to_string())
            }
        }
    )*};
}

statuses! {
    Error: |error| of_error(error);
    AllocError: |error| of_alloc(error);
    AddressError: |error| of_address(error);
    DriverError: |_| Status::DriverError;
    FractionError: |_| Status::InvalidArgument;
    OptionsError: |_| Status::InvalidOption;
    SettingsError: |_| Status::InvalidOption;
}

fn of_error(error: &Error) -> Status {
    match error {
        Error::Alloc(error) => of_alloc(error),
        Error::Device(error) => of_device(error),
        Error::Cuda(error) => of_cuda(error),
        Error::Driver(_) => Status::DriverError,
        Error::Options(_) => Status::InvalidOption,
        Error::Fraction(_) | Error::TooLong { .. } | Error::PerThreadStream => {
            Status::InvalidArgument
        }
        _ => Status::Internal,
    }
}

fn of_alloc(error: &AllocError) -> Status {
    match error {
        error if error.shortage().is_some() => Status::OutOfMemory,
        _ => Status::DriverError,
    }
}

fn of_address(error: &AddressError) -> Status {
    match error {
        AddressError::Unknown { .. } => Status::UnknownAddress,
        _ => Status::DriverError,
    }
}

fn of_device(error: &DeviceError) -> Status {
    match error {
        DeviceError::OutOfRange(_) => Status::NoDevice,
        DeviceError::Cuda(error) => of_cuda(error),
        DeviceError::Settings(_) => Status::InvalidOption,
        _ => Status::DriverError,
    }
}

fn of_cuda(error: &CudaError) -> Status {
    match error {
        CudaError::NoLibrary { .. }
        | CudaError::NoFunction { .. }
        | CudaError::NoDevice
        | CudaError::NoSuchDevice { .. } => Status::NoDevice,
        _ => Status::DriverError,
    }
}
