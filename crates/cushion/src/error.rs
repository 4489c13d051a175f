//! What can go wrong for a program, each kind apart.

use cushion_core::options::OptionsError;
use cushion_core::{AllocError, DriverError, FractionError};
use cushion_cuda::CudaError;

use crate::devices::DeviceError;

/// Why something could not be done. Nothing was handed out and nothing is lost.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no memory for it, now or ever; the text has the figures.
    #[error(transparent)]
    Alloc(#[from] AllocError),
    /// The device cannot be used.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A copy, or a call on a stream, failed.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// A call to the driver failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// An option is no good.
    #[error(transparent)]
    Options(#[from] OptionsError),
    /// A fraction of the device's memory is no good.
    #[error(transparent)]
    Fraction(#[from] FractionError),
    /// More than can be addressed.
    #[error("{len} elements of {size} bytes each are more than can be addressed")]
    TooLong {
        /// How many were asked for.
        len: usize,
        /// The size of each.
        size: usize,
    },
    /// Two sides of a copy differ.
    #[error("a copy between {one} and {other} elements: both sides must have as many")]
    Lengths {
        /// The buffer's.
        one: usize,
        /// The other side's.
        other: usize,
    },
    /// A stream, or the other side of a copy, is of another device.
    #[error(
        "a stream or a buffer of another device: what is done with memory needs those of the device, and of the \
         cache, that it is from"
    )]
    OtherDevice,
    /// CUDA's per-thread default stream.
    #[error(
        "the per-thread default stream is another stream on every thread, so that memory cannot be handed out in its \
         order: make a stream, or use the default stream"
    )]
    PerThreadStream,
}

impl Error {
    /// Whether memory ran out, as opposed to everything else: free some, or wait, and try again.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::Alloc(error) if error.shortage().is_some())
    }
}
