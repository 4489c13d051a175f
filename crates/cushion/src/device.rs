//! A device to allocate on: the front door of this crate.

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

/// A GPU, or a simulated one, with its caching allocator. Cheap to clone, and every clone is the same device;
/// `Send` and `Sync`.
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
    /// The one engine that everybody in this process shares.
    Process(&'static DeviceEngine),
    /// One that goes with its last device, buffer and stream, and gives its memory back then.
    Own(Arc<DeviceEngine>),
}

impl Device {
    /// A GPU, as CUDA numbers those that this process can see. All who ask this crate for it share one cache. The first call makes the device's primary context; the options
    /// are those of the `CUSHION_*` variables; `CUSHION_SIMULATE=16GiB` makes it a simulated device.
    pub fn cuda(index: u32) -> Result<Self, Error> {
        let engine = devices().get_or_make(i64::from(index))?;
        Ok(Self { engine: EngineOf::Process(engine) })
    }

    /// A device of `capacity` bytes in memory, for tests, examples and trying things out. It refuses what a GPU
    /// refuses, and runs nothing.
    #[must_use]
    pub fn simulated(capacity: u64) -> Self {
        Self::builder().simulated(capacity)
    }

    /// A device with a cache of its own, and options of one's choice.
    #[must_use]
    pub fn builder() -> DeviceBuilder {
        DeviceBuilder::default()
    }

    // ---- memory ----

    /// `len` elements, all zero.
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

    /// A copy of what the host has.
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

    /// `len` elements of whatever is there: no work on the device, so the fastest where all is written anyway.
    pub fn alloc_uninit<T: AnyBitPattern>(
        &self,
        len: usize,
        stream: &(impl AsStream + ?Sized),
    ) -> Result<Buffer<T>, Error> {
        Buffer::alloc(self, len, self.using(stream)?)
    }

    /// Gives a buffer back, as dropping it does.
    pub fn free<T>(&self, buffer: Buffer<T>) {
        buffer.free();
    }

    /// Gives everything cached back to the device, for others to use; waits for work that still uses some of it.
    pub fn empty_cache(&self) -> Result<(), Error> {
        Ok(self.engine().empty_cache()?)
    }

    /// Refuses to hold more than this share of the device's memory, from 0 to 1.
    pub fn set_memory_fraction(&self, fraction: f64) -> Result<(), Error> {
        Ok(self.engine().set_memory_fraction(fraction)?)
    }

    // ---- streams ----

    /// A new stream.
    pub fn new_stream(&self) -> Result<Stream, Error> {
        Stream::new(self)
    }

    /// The default stream.
    #[must_use]
    pub fn default_stream(&self) -> Stream {
        Stream::default_of(self)
    }

    // ---- figures ----

    /// Bytes handed out and not given back, in whole blocks of 512 bytes, as `torch.cuda.memory_allocated()`.
    #[must_use]
    pub fn memory_allocated(&self) -> u64 {
        self.stats().allocated_bytes.all.current
    }

    /// The most there was of [`memory_allocated`](Self::memory_allocated) since the last
    /// [`reset_peak_stats`](Self::reset_peak_stats).
    #[must_use]
    pub fn max_memory_allocated(&self) -> u64 {
        self.stats().allocated_bytes.all.peak
    }

    /// Bytes handed out, as they were asked for.
    #[must_use]
    pub fn memory_requested(&self) -> u64 {
        self.stats().requested_bytes.all.current
    }

    /// Bytes held from the device, in use and cached.
    #[must_use]
    pub fn memory_reserved(&self) -> u64 {
        self.stats().reserved_bytes.all.current
    }

    /// The most there was of [`memory_reserved`](Self::memory_reserved).
    #[must_use]
    pub fn max_memory_reserved(&self) -> u64 {
        self.stats().reserved_bytes.all.peak
    }

    /// Bytes held and in nobody's use.
    #[must_use]
    pub fn cached_bytes(&self) -> u64 {
        self.stats().cached_bytes()
    }

    /// How many allocations were served from memory already held, and how many needed the device.
    #[must_use]
    pub fn cache_stats(&self) -> CacheStats {
        let stats = self.stats();
        CacheStats { hits: stats.hits, misses: stats.misses }
    }

    /// How many blocks there are, in use and free.
    #[must_use]
    pub fn block_count(&self) -> u64 {
        self.stats().blocks()
    }

    /// How many blocks are free.
    #[must_use]
    pub fn free_block_count(&self) -> u64 {
        self.stats().free_blocks()
    }

    /// Peaks start again from what is there now.
    pub fn reset_peak_stats(&self) {
        self.engine().reset_peak_stats();
    }

    /// All figures.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.engine().stats()
    }

    /// What the device has in all and has free, other processes counted.
    pub fn memory_info(&self) -> Result<MemoryInfo, Error> {
        Ok(self.engine().driver().memory_info()?)
    }

    // ---- the device itself ----

    /// The index of the device.
    #[must_use]
    pub fn index(&self) -> u32 {
        self.engine().driver().properties().device
    }

    /// Whether there is no GPU behind it.
    #[must_use]
    pub fn is_simulated(&self) -> bool {
        self.engine().driver().is_simulated()
    }

    /// The engine: raw addresses, private pools, snapshots, history. Whoever passes it a [`StreamId`](crate::StreamId) answers for that
    /// being the handle of a stream: CUDA does not check.
    #[must_use]
    pub fn engine(&self) -> &DeviceEngine {
        match &self.engine {
            EngineOf::Process(engine) => engine,
            EngineOf::Own(engine) => engine,
        }
    }

    /// Whether both have one cache.
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

/// How often the cache served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CacheStats {
    /// Allocations served from memory already held.
    pub hits: u64,
    /// Allocations that needed the device.
    pub misses: u64,
}

/// Makes a [`Device`] with a cache of its own.
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
    /// These options, in the place of all so far.
    #[must_use]
    pub fn options(mut self, options: Options) -> Self {
        self.options = options;
        self
    }

    /// Options as `key:value,key:value`, as in `CUSHION_CONF`.
    pub fn conf(mut self, conf: &str) -> Result<Self, Error> {
        self.options.apply(conf)?;
        Ok(self)
    }

    /// How memory is laid out, whatever the options say of it.
    #[must_use]
    pub fn policy(mut self, policy: Policy) -> Self {
        self.policy = Some(policy);
        self
    }

    /// A GPU. Its cache is not shared with [`Device::cuda`]'s.
    pub fn cuda(self, index: u32) -> Result<Device, Error> {
        Ok(self.over(DeviceDriver::cuda(index)?))
    }

    /// A simulated device of `capacity` bytes.
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
