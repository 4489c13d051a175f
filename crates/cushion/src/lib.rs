//! Cushion for Rust programs: a caching CUDA memory allocator that keeps them alive when memory runs out.
//!
//! [`Device`] is a GPU with its cache, [`Buffer`] typed memory on it, [`Stream`] the order of its work. The driver
//! is loaded at run time: a program built with this crate starts, and its tests run, on a machine without CUDA,
//! where [`Device::simulated`] takes the place of a GPU.
//!
//! ```
//! # fn main() -> Result<(), cushion::Error> {
//! # let gpu = cushion::Device::simulated(1 << 30);
//! # /*
//! let gpu = cushion::Device::cuda(0)?;
//! # */
//! let stream = gpu.new_stream()?;
//! let host = [1_u32, 2, 3];
//! let a = gpu.alloc_zeros::<f32>(1 << 20, &stream)?; // typed; dropping it gives it back in stream order
//! let b = gpu.alloc_copy(&host, &stream)?;
//! assert_eq!(b.to_vec(&stream)?, host);
//! # drop(a);
//! # Ok(())
//! # }
//! ```
//!
//! # When memory runs out
//!
//! An allocation is refused with an [`Error`] that says what was asked for, what the device has, what is cached and
//! what was tried; [`Error::is_out_of_memory`] tells it from the others. Nothing is lost, and the next allocation
//! that fits is served.
//!
//! ```
//! let gpu = cushion::Device::simulated(1 << 30);
//! let stream = gpu.default_stream();
//! let half = gpu.alloc_zeros::<u8>(600 << 20, &stream)?;
//! let refused = gpu.alloc_zeros::<u8>(600 << 20, &stream).unwrap_err();
//! assert!(refused.is_out_of_memory());
//! drop(half);
//! gpu.alloc_zeros::<u8>(600 << 20, &stream)?;
//! # Ok::<(), cushion::Error>(())
//! ```
//!
//! Before that, everything is tried that may help: what is cached is laid out anew, [callbacks](Device::on_shortage)
//! are asked, other threads are waited for, and at last host memory serves, if it may. [`Device::receipts`] has what
//! became of each shortage. How long a request waits, and from whom, can be said:
//!
//! ```
//! use std::time::Duration;
//!
//! use cushion::{Device, Error, Task, set_budget, set_priority};
//!
//! // A request waits a second at most; 512 MiB of host memory may serve those of 16 MiB and over.
//! let gpu = Device::builder().conf("wait_ms:1000,spill_limit_mb:512")?.simulated(1 << 30);
//! let stream = gpu.default_stream();
//! set_budget(Some(Duration::from_millis(10))); // this thread's requests, from now on
//! set_priority(7); // served before those of lower priority
//!
//! let task = Task::new("batch 12", 0); // several threads may work for it
//! let working = task.enter();
//! let most = gpu.alloc_zeros::<u8>(900 << 20, &stream)?;
//! let spilled = gpu.alloc_zeros::<u8>(200 << 20, &stream)?;
//! let refused = gpu.alloc_zeros::<u8>(400 << 20, &stream).unwrap_err();
//! # use cushion::AllocError;
//! assert!(matches!(refused, Error::Alloc(AllocError::Split(_)))); // nobody else holds any
//! drop(working);
//! for receipt in gpu.receipts() {
//!     println!("{receipt}"); // shortage 1 on device 0: 200.00 MiB for task batch 12, survived by spill ...
//! }
//! # assert_eq!(gpu.receipts().len(), 2);
//! # set_budget(None);
//! # Ok::<(), cushion::Error>(())
//! ```
//!
//! Memory can be a future of any runtime, and can be made ready before it is needed:
//!
//! ```
//! # async fn serve(gpu: cushion::Device) -> Result<(), cushion::Error> {
//! let stream = gpu.new_stream()?;
//! gpu.prefetch(1 << 30, &stream)?; // now, rather than in the middle of something
//! let buffer = gpu.alloc_zeros_async::<f32>(1 << 20, &stream).await?; // no thread waits
//! # drop(buffer);
//! # Ok(())
//! # }
//! ```
//!
//! # Several streams
//!
//! A buffer belongs to the stream it was allocated on. Work on another stream that uses it has to be noted, so that
//! its memory is not handed out again too early:
//!
//! ```
//! let gpu = cushion::Device::simulated(1 << 30);
//! let (main, side) = (gpu.new_stream()?, gpu.new_stream()?);
//! let buffer = gpu.alloc_zeros::<u64>(1000, &main)?;
//! // ... a kernel on `side` that reads `buffer` ...
//! buffer.record_stream(&side)?;
//! drop(buffer); // handed out again once `side` is done with it
//! # Ok::<(), cushion::Error>(())
//! ```
//!
//! # Features
//!
//! - `cudarc`: streams of that crate's in the place of [`Stream`], and buffers as arguments of its kernels
//!   (`Buffer::cudarc`, `Buffer::cudarc_mut`), without its ever freeing them.
//!
//! # For bindings
//!
//! [`devices`] holds the engines that everybody in a process shares, one per GPU; [`core`] is the engine itself.
//! [`write_receipts`] and [`inject`] are for one engine what the methods of [`Device`] are.

mod buffer;
mod clock;
#[cfg(feature = "cudarc")]
mod cudarc;
mod device;
mod devices;
mod driver;
mod error;
mod fork;
mod receipts;
mod shortage;
mod stream;
mod trim;

pub use buffer::Buffer;
pub use clock::SystemClock;
pub use cushion_core as core;
pub use cushion_core::{
    AllocError, Answer, Callback, CallbackId, Ended, Injection, InjectionError, Options, Outcome,
    Plea, Policy, Receipt, Remedy, Reply, Rung, RungSet, Shortage, Stats, StreamId, Task, Tried,
    Working, set_budget, set_priority, set_skipped_rungs,
};
pub use cushion_cuda::{CudaDriver, CudaError, GpuProcess, GpuProcesses, name as error_name};
pub use device::{CacheStats, Device, DeviceBuilder};
pub use devices::{DeviceEngine, DeviceError, Devices, HistoryPlan, MAX_DEVICES, devices};
pub use driver::DeviceDriver;
pub use error::Error;
#[doc(hidden)]
pub use fork::hold_in_forks;
pub use receipts::{LostReceipts, lost_receipts, write_receipts};
pub use shortage::{BufferFuture, inject};
pub use stream::{AsStream, Stream};

#[cfg(feature = "cudarc")]
pub use self::cudarc::{Lent, LentMut};
