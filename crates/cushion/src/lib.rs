//! Cushion for Rust programs: a caching CUDA memory allocator that keeps them alive when memory
//! runs out.
//!
//! [`Device`] is a GPU with its cache, [`Buffer`] is typed memory on it, and [`Stream`] orders its
//! work. The CUDA driver is loaded at run time: a program built with this crate starts, and its
//! tests run, on a machine without CUDA, where [`Device::simulated`] replaces the GPU.
//!
//! ```
//! # fn main() -> Result<(), cushion::Error> {
//! # let gpu = cushion::Device::simulated(1 << 30);
//! # /*
//! let gpu = cushion::Device::cuda(0)?;
//! # */
//! let stream = gpu.new_stream()?;
//! let host = [1_u32, 2, 3];
//! let a = gpu.alloc_zeros::<f32>(1 << 20, &stream)?; // dropping it frees it in stream order
//! let b = gpu.alloc_copy(&host, &stream)?;
//! assert_eq!(b.to_vec(&stream)?, host);
//! # drop(a);
//! # Ok(())
//! # }
//! ```
//!
//! # When memory runs out
//!
//! A refused allocation returns an [`Error`] with the requested bytes, the device's memory, the
//! cached bytes and the steps that were tried. [`Error::is_out_of_memory`] distinguishes it from
//! other errors. Nothing is lost, and the next allocation that fits is served.
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
//! Before it refuses a request, Cushion tries every step that may help: it rearranges cached
//! memory, asks [callbacks](Device::on_shortage), waits for other threads, and finally uses host
//! memory if that is allowed. [`Device::receipts`] returns the record of each shortage. A program
//! can set how long a request waits, and its priority:
//!
//! ```
//! use std::time::Duration;
//!
//! use cushion::{Device, Error, Task, set_budget, set_priority};
//!
//! // A request waits at most a second; 512 MiB of host memory may serve requests of 16 MiB and more.
//! let gpu = Device::builder().conf("wait_ms:1000,spill_limit_mb:512")?.simulated(1 << 30);
//! let stream = gpu.default_stream();
//! set_budget(Some(Duration::from_millis(10))); // this thread's requests, from now on
//! set_priority(7); // served before requests of lower priority
//!
//! let task = Task::new("batch 12", 0); // several threads may work for one task
//! let working = task.enter();
//! let most = gpu.alloc_zeros::<u8>(900 << 20, &stream)?;
//! let spilled = gpu.alloc_zeros::<u8>(200 << 20, &stream)?;
//! let refused = gpu.alloc_zeros::<u8>(400 << 20, &stream).unwrap_err();
//! # use cushion::AllocError;
//! assert!(matches!(refused, Error::Alloc(AllocError::Split(_)))); // no other thread or task holds memory
//! drop(working);
//! for receipt in gpu.receipts() {
//!     // shortage 1 on device 0: 200.00 MiB for task batch 12, survived by spill ...
//!     println!("{receipt}");
//! }
//! # assert_eq!(gpu.receipts().len(), 2);
//! # set_budget(None);
//! # Ok::<(), cushion::Error>(())
//! ```
//!
//! An allocation can be a future of any runtime, and memory can be prepared ahead of time:
//!
//! ```
//! # async fn serve(gpu: cushion::Device) -> Result<(), cushion::Error> {
//! let stream = gpu.new_stream()?;
//! gpu.prefetch(1 << 30, &stream)?; // ahead of time
//! let buffer = gpu.alloc_zeros_async::<f32>(1 << 20, &stream).await?; // no thread waits
//! # drop(buffer);
//! # Ok(())
//! # }
//! ```
//!
//! # Several streams
//!
//! A buffer belongs to the stream it was allocated on. Work on another stream must be recorded, so
//! that the memory is not reused too early:
//!
//! ```
//! let gpu = cushion::Device::simulated(1 << 30);
//! let (main, side) = (gpu.new_stream()?, gpu.new_stream()?);
//! let buffer = gpu.alloc_zeros::<u64>(1000, &main)?;
//! // ... a kernel on `side` that reads `buffer` ...
//! buffer.record_stream(&side)?;
//! drop(buffer); // reused once `side` is done with it
//! # Ok::<(), cushion::Error>(())
//! ```
//!
//! # Features
//!
//! - `cudarc`: accepts streams of cudarc in place of [`Stream`], and passes buffers to its kernels
//!   as arguments (`Buffer::cudarc`, `Buffer::cudarc_mut`). cudarc never frees them.
//!
//! # For bindings
//!
//! [`devices`] holds the engines that all users in a process share, one per GPU; [`core`] is the
//! engine itself. [`write_receipts`] and [`inject`] do for one engine what the methods of
//! [`Device`] do.

mod buffer;
mod clock;
#[cfg(feature = "cudarc")]
mod cudarc;
mod device;
mod devices;
mod driver;
mod error;
mod fork;
mod panics;
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
#[doc(hidden)]
pub use panics::panic_text;
pub use receipts::{LostReceipts, lost_receipts, write_receipts};
pub use shortage::{BufferFuture, inject};
pub use stream::{AsStream, Stream};

#[cfg(feature = "cudarc")]
pub use self::cudarc::{Lent, LentMut};
