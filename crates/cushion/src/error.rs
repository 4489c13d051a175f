//! The errors of this crate.

use cushion_core::options::OptionsError;
use cushion_core::{AllocError, DriverError, FractionError};
use cushion_cuda::CudaError;

use crate::devices::DeviceError;

/// Why a call failed. A failed call allocates nothing and loses nothing.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The request does not fit, now or ever; the message has the figures.
    #[error(transparent)]
    Alloc(#[from] AllocError),
    /// The device cannot be used.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A copy or a stream call failed.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// A call to the driver failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// An option is not valid.
    #[error(transparent)]
    Options(#[from] OptionsError),
    /// A memory fraction is not between 0 and 1.
    #[error(transparent)]
    Fraction(#[from] FractionError),
    /// The size overflows the address space.
    #[error("{len} elements of {size} bytes each are more than can be addressed")]
    TooLong {
        /// The number of elements requested.
        len: usize,
        /// The size of one element.
        size: usize,
    },
    /// The two sides of a copy differ in length.
    #[error("a copy between {one} and {other} elements: both sides must have the same length")]
    Lengths {
        /// The length of the buffer.
        one: usize,
        /// The length of the other side.
        other: usize,
    },
    /// A stream, or the other side of a copy, belongs to another device.
    #[error(
        "the stream or buffer belongs to another device or cache than the memory it is used with"
    )]
    OtherDevice,
    /// CUDA's per-thread default stream.
    #[error(
        "the per-thread default stream differs between threads, so memory cannot be reused in its \
         order: make a stream, or use the default stream"
    )]
    PerThreadStream,
}

impl Error {
    /// Returns whether the request failed because memory ran out: free some, or wait, and try
    /// again.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::Alloc(error) if error.shortage().is_some())
    }
}
