//! A device to allocate on: the main type of this crate.

use std::fmt;
use std::sync::Arc;

use bytemuck::{AnyBitPattern, NoUninit, Zeroable};
use cushion_core::driver::MemoryInfo;
use cushion_core::{Driver, Engine, EngineConfig, Ladder, Options, Policy, Stats, Waited};

use crate::buffer::Buffer;
use crate::clock::SystemClock;
use crate::devices::{DeviceEngine, devices};
use crate::driver::DeviceDriver;
use crate::error::Error;
use crate::stream::{AsStream, Stream};
use crate::{fork, trim};

/// A GPU, or a simulated one, with its caching allocator. A device is cheap to clone, and all
/// clones share one cache. It is `Send` and `Sync`.
///
/// ```
/// use cushion::Device;
///
/// let gpu = Device::simulated(16 << 30); // or Device::cuda(0)?
/// let stream = gpu.new_stream()?;
/// let a = gpu.alloc_zeros::<f32>(1 << 20, &stream)?;
/// let b = gpu.alloc_copy(&[1.0_f32, 2.0, 3.0], &stream)?;
/// assert_eq!(b.to_vec(&stream)?, [1.0, 2.0, 3.0]);
/// assert_eq!(gpu.memory_allocated(), (4 << 20) + 512);
/// drop(a); // back to the cache, in the order of its stream
/// assert_eq!(gpu.memory_allocated(), 512);
/// # Ok::<(), cushion::Error>(())
/// ```
#[derive(Clone)]
pub struct Device {
    engine: EngineOf,
}

#[derive(Clone)]
enum EngineOf {
    /// The engine that all users in this process share.
    Process(&'static DeviceEngine),
    /// An engine of its own. It is dropped, and its memory freed, with its last device, buffer and
    /// stream.
    Own(Arc<DeviceEngine>),
}

impl Device {
    /// Returns a GPU, by its CUDA index among the GPUs that this process can see. All callers of
    /// this function share one cache per GPU. The first call creates the device's primary context.
    /// The options come from the `CUSHION_*` variables; `CUSHION_SIMULATE=16GiB` makes the device a
    /// simulated one.
    pub fn cuda(index: u32) -> Result<Self, Error> {
        let engine = devices().get_or_make(i64::from(index))?;
        Ok(Self { engine: EngineOf::Process(engine) })
    }

    /// Returns a simulated device of `capacity` bytes, for tests, examples and experiments. It
    /// refuses the requests that a GPU would refuse, and runs no kernels.
    #[must_use]
    pub fn simulated(capacity: u64) -> Self {
        Self::builder().simulated(capacity)
    }

    /// Returns a builder for a device with its own cache and options.
    #[must_use]
    pub fn builder() -> DeviceBuilder {
        DeviceBuilder::default()
    }

    // ---- memory ----

    /// Allocates `len` elements, all zero.
    pub fn alloc_zeros<T: Zeroable>(
        &self,
        len: usize,
        stream: &(impl AsStream + ?Sized),
    ) -> Result<Buffer<T>, Error> {
        let stream = self.using(stream)?;
        let mut buffer = Buffer::alloc(self, len, stream)?;
        buffer.zero(stream)?;
        Ok(buffer)
    }

    /// Allocates a copy of `host`.
    pub fn alloc_copy<T: NoUninit>(
        &self,
        host: &[T],
        stream: &(impl AsStream + ?Sized),
    ) -> Result<Buffer<T>, Error> {
        let stream = self.using(stream)?;
        let mut buffer = Buffer::alloc(self, host.len(), stream)?;
        buffer.write(host, stream)?;
        Ok(buffer)
    }

    /// Allocates `len` elements of unspecified content. It queues no work on the device, and so is
    /// the fastest choice if the program writes all elements anyway.
    pub fn alloc_uninit<T: AnyBitPattern>(
        &self,
        len: usize,
        stream: &(impl AsStream + ?Sized),
    ) -> Result<Buffer<T>, Error> {
        Buffer::alloc(self, len, self.using(stream)?)
    }

    /// Frees a buffer, as dropping it does.
    pub fn free<T>(&self, buffer: Buffer<T>) {
        buffer.free();
    }

    /// Releases all cached memory to the device. Waits for the work that still uses some of it.
    pub fn empty_cache(&self) -> Result<(), Error> {
        Ok(self.engine().empty_cache()?)
    }

    /// Limits the reserved memory to this fraction of the device's memory, from 0 to 1.
    pub fn set_memory_fraction(&self, fraction: f64) -> Result<(), Error> {
        Ok(self.engine().set_memory_fraction(fraction)?)
    }

    // ---- streams ----

    /// Returns a new stream, or an idle one made earlier.
    pub fn new_stream(&self) -> Result<Stream, Error> {
        Stream::new(self)
    }

    /// Returns the default stream.
    #[must_use]
    pub fn default_stream(&self) -> Stream {
        Stream::default_of(self)
    }

    // ---- figures ----

    /// Returns the live bytes, in whole blocks of 512 bytes, as `torch.cuda.memory_allocated()`
    /// does.
    #[must_use]
    pub fn memory_allocated(&self) -> u64 {
        self.stats().allocated_bytes.all.current
    }

    /// Returns the peak of [`memory_allocated`](Self::memory_allocated) since the last
    /// [`reset_peak_stats`](Self::reset_peak_stats).
    #[must_use]
    pub fn max_memory_allocated(&self) -> u64 {
        self.stats().allocated_bytes.all.peak
    }

    /// Returns the live bytes as requested, without rounding.
    #[must_use]
    pub fn memory_requested(&self) -> u64 {
        self.stats().requested_bytes.all.current
    }

    /// Returns the reserved bytes: live and cached.
    #[must_use]
    pub fn memory_reserved(&self) -> u64 {
        self.stats().reserved_bytes.all.current
    }

    /// Returns the peak of [`memory_reserved`](Self::memory_reserved) since the last
    /// [`reset_peak_stats`](Self::reset_peak_stats).
    #[must_use]
    pub fn max_memory_reserved(&self) -> u64 {
        self.stats().reserved_bytes.all.peak
    }

    /// Returns the reserved bytes that are not in use.
    #[must_use]
    pub fn cached_bytes(&self) -> u64 {
        self.stats().cached_bytes()
    }

    /// Returns how many allocations were served from reserved memory, and how many needed the
    /// device.
    #[must_use]
    pub fn cache_stats(&self) -> CacheStats {
        let stats = self.stats();
        CacheStats { hits: stats.hits, misses: stats.misses }
    }

    /// Returns the number of blocks, in use and free.
    #[must_use]
    pub fn block_count(&self) -> u64 {
        self.stats().blocks()
    }

    /// Returns the number of free blocks.
    #[must_use]
    pub fn free_block_count(&self) -> u64 {
        self.stats().free_blocks()
    }

    /// Sets all peaks to the current values.
    pub fn reset_peak_stats(&self) {
        self.engine().reset_peak_stats();
    }

    /// Returns all statistics.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.engine().stats()
    }

    /// Returns the device's total and free memory, counting other processes.
    pub fn memory_info(&self) -> Result<MemoryInfo, Error> {
        Ok(self.engine().driver().memory_info()?)
    }

    // ---- the device itself ----

    /// Returns the index of the device.
    #[must_use]
    pub fn index(&self) -> u32 {
        self.engine().driver().properties().device
    }

    /// Returns whether the device is simulated.
    #[must_use]
    pub fn is_simulated(&self) -> bool {
        self.engine().driver().is_simulated()
    }

    /// Returns the engine: raw addresses, private pools, snapshots, history. A caller that passes
    /// it a [`StreamId`](crate::StreamId) must make sure that it is the handle of a stream: CUDA
    /// does not check.
    #[must_use]
    pub fn engine(&self) -> &DeviceEngine {
        match &self.engine {
            EngineOf::Process(engine) => engine,
            EngineOf::Own(engine) => engine,
        }
    }

    /// Returns whether both devices share one cache.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        std::ptr::eq(self.engine(), other.engine())
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device")
            .field("index", &self.index())
            .field("simulated", &self.is_simulated())
            .field("memory_allocated", &self.memory_allocated())
            .field("memory_reserved", &self.memory_reserved())
            .finish_non_exhaustive()
    }
}

/// Hits and misses of the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CacheStats {
    /// Allocations served from reserved memory.
    pub hits: u64,
    /// Allocations that needed the device.
    pub misses: u64,
}

/// Makes a [`Device`] with its own cache.
///
/// ```
/// use cushion::{Device, Policy};
///
/// let gpu = Device::builder()
///     .policy(Policy::Expandable)
///     .conf("per_process_memory_fraction:0.5")?
///     .simulated(8 << 30);
/// let stream = gpu.default_stream();
/// let refused = gpu.alloc_zeros::<u8>(5 << 30, &stream).unwrap_err();
/// assert!(refused.is_out_of_memory());
/// # Ok::<(), cushion::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct DeviceBuilder {
    options: Options,
    policy: Option<Policy>,
}

impl DeviceBuilder {
    /// Sets all options, replacing those set before.
    #[must_use]
    pub fn options(mut self, options: Options) -> Self {
        self.options = options;
        self
    }

    /// Applies options written as `key:value,key:value`, as in `CUSHION_CONF`.
    pub fn conf(mut self, conf: &str) -> Result<Self, Error> {
        self.options.apply(conf)?;
        Ok(self)
    }

    /// Sets the policy, overriding the options.
    #[must_use]
    pub fn policy(mut self, policy: Policy) -> Self {
        self.policy = Some(policy);
        self
    }

    /// Makes the device on a GPU. Its cache is separate from that of [`Device::cuda`].
    pub fn cuda(self, index: u32) -> Result<Device, Error> {
        Ok(self.over(DeviceDriver::cuda(index)?))
    }

    /// Makes a simulated device of `capacity` bytes.
    #[must_use]
    pub fn simulated(self, capacity: u64) -> Device {
        self.over(DeviceDriver::simulated(0, capacity))
    }

    fn over(self, driver: DeviceDriver) -> Device {
        fork::watch();
        let config = EngineConfig {
            options: self.options,
            ladder: Ladder::Graceful,
            clock: Arc::new(SystemClock::new()),
            waited: Waited::default(),
            seed: u64::from(std::process::id()),
        };
        let engine = Engine::with_config(driver, config);
        if let Some(policy) = self.policy {
            engine.set_policy(policy);
        }
        let engine = Arc::new(engine);
        if !engine.driver().is_simulated() {
            trim::begin_with(&engine);
        }
        Device { engine: EngineOf::Own(engine) }
    }
}
