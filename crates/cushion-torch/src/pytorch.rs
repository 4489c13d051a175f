//! PyTorch's C++ side: what Cushion calls in its libraries, without C++ code.

pub(crate) mod function;
pub(crate) mod profiler;
pub(crate) mod threads;
pub(crate) mod throw;
