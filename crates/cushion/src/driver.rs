//! One type for every device: a GPU, or one that is simulated in memory.

use std::sync::atomic::{AtomicU64, Ordering};

use cushion_core::driver::{
    Capture, DriverResult, EventId, MemoryInfo, NodeId, PageHandle, Properties, SimMemory,
};
use cushion_core::{Driver, SimConfig, SimDriver, StreamId};
use cushion_cuda::{CudaDriver, CudaError};

/// A device behind the engine's [`Driver`]. Which one it is matters where memory is got from the device; the
/// engine serves most allocations without asking.
#[derive(Debug)]
#[non_exhaustive]
pub enum DeviceDriver {
    /// A GPU.
    Cuda(CudaDriver),
    /// A device in memory.
    Simulated(Box<SimulatedDevice>),
}

/// A device in memory. Nobody can follow its addresses, but what a buffer holds can be written and read.
#[derive(Debug)]
pub struct SimulatedDevice {
    driver: SimDriver,
    memory: SimMemory,
    streams: AtomicU64,
}

impl SimulatedDevice {
    /// The simulator itself, to queue and finish work and to make calls fail.
    #[must_use]
    pub fn simulator(&self) -> &SimDriver {
        &self.driver
    }
}

impl DeviceDriver {
    /// A simulated device of `capacity` bytes.
    #[must_use]
    pub fn simulated(device: u32, capacity: u64) -> Self {
        let config = SimConfig { device, ..SimConfig::with_capacity(capacity) };
        Self::Simulated(Box::new(SimulatedDevice {
            driver: SimDriver::new(config),
            memory: SimMemory::default(),
            streams: AtomicU64::new(0),
        }))
    }

    /// Whether there is no GPU behind it.
    #[must_use]
    pub fn is_simulated(&self) -> bool {
        matches!(self, Self::Simulated(_))
    }

    pub(crate) fn stream_create(&self) -> Result<StreamId, CudaError> {
        match self {
            Self::Cuda(driver) => driver.stream_create(),
            Self::Simulated(device) => {
                Ok(StreamId(device.streams.fetch_add(1, Ordering::Relaxed) + 1))
            }
        }
    }

    pub(crate) fn stream_wait(&self, stream: StreamId) -> Result<(), CudaError> {
        match self {
            Self::Cuda(driver) => driver.stream_wait(stream),
            Self::Simulated(device) => {
                device.driver.finish(stream);
                Ok(())
            }
        }
    }

    /// The memory is about to be nobody's.
    pub(crate) fn forget(&self, address: u64, bytes: usize) {
        if let Self::Simulated(device) = self {
            device.memory.forget(address, bytes);
        }
    }

    // Each of these passes on what it asks of its caller.

    /// # Safety
    ///
    /// As [`CudaDriver::stream_destroy`] asks.
    pub(crate) unsafe fn stream_destroy(&self, stream: StreamId) -> Result<(), CudaError> {
        match self {
            // SAFETY: as the caller promises.
            Self::Cuda(driver) => unsafe { driver.stream_destroy(stream) },
            Self::Simulated(_) => Ok(()),
        }
    }

    /// # Safety
    ///
    /// As [`CudaDriver::write`] asks.
    pub(crate) unsafe fn write(
        &self,
        to: u64,
        bytes: &[u8],
        stream: StreamId,
    ) -> Result<(), CudaError> {
        match self {
            // SAFETY: as the caller promises.
            Self::Cuda(driver) => unsafe { driver.write(to, bytes, stream) },
            Self::Simulated(device) => {
                device.memory.write(to, bytes);
                Ok(())
            }
        }
    }

    /// # Safety
    ///
    /// As [`CudaDriver::read`] asks.
    pub(crate) unsafe fn read(
        &self,
        from: u64,
        bytes: &mut [u8],
        stream: StreamId,
    ) -> Result<(), CudaError> {
        match self {
            // SAFETY: as the caller promises.
            Self::Cuda(driver) => unsafe { driver.read(from, bytes, stream) },
            Self::Simulated(device) => {
                device.memory.read(from, bytes);
                Ok(())
            }
        }
    }

    /// # Safety
    ///
    /// As [`CudaDriver::copy`] asks.
    pub(crate) unsafe fn copy(
        &self,
        from: u64,
        to: u64,
        bytes: usize,
        stream: StreamId,
    ) -> Result<(), CudaError> {
        match self {
            // SAFETY: as the caller promises.
            Self::Cuda(driver) => unsafe { driver.copy(from, to, bytes, stream) },
            Self::Simulated(device) => {
                let mut found = vec![0; bytes];
                device.memory.read(from, &mut found);
                device.memory.write(to, &found);
                Ok(())
            }
        }
    }

    /// # Safety
    ///
    /// As [`CudaDriver::fill`] asks.
    pub(crate) unsafe fn fill(
        &self,
        to: u64,
        bytes: usize,
        value: u8,
        stream: StreamId,
    ) -> Result<(), CudaError> {
        match self {
            // SAFETY: as the caller promises.
            Self::Cuda(driver) => unsafe { driver.fill(to, bytes, value, stream) },
            Self::Simulated(device) => {
                device.memory.fill(to, bytes, value);
                Ok(())
            }
        }
    }
}

/// Writes each method once for all kinds of device.
macro_rules! forward_driver {
    ($($name:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {
        impl Driver for DeviceDriver {
            $(fn $name(&self, $($argument: $type),*) -> $result {
                match self {
                    Self::Cuda(driver) => driver.$name($($argument),*),
                    Self::Simulated(device) => device.driver.$name($($argument),*),
                }
            })*
        }
    };
}

forward_driver! {
    properties() -> Properties;
    memory_info() -> DriverResult<MemoryInfo>;
    alloc(bytes: u64) -> DriverResult<u64>;
    free(address: u64) -> DriverResult<()>;
    reserve(bytes: u64) -> DriverResult<u64>;
    unreserve(address: u64, bytes: u64) -> DriverResult<()>;
    create(bytes: u64) -> DriverResult<PageHandle>;
    release(page: PageHandle) -> DriverResult<()>;
    map(address: u64, bytes: u64, page: PageHandle) -> DriverResult<()>;
    set_access(address: u64, bytes: u64) -> DriverResult<()>;
    unmap(address: u64, bytes: u64) -> DriverResult<()>;
    event_create() -> DriverResult<EventId>;
    event_destroy(event: EventId) -> DriverResult<()>;
    event_record(event: EventId, stream: StreamId) -> DriverResult<()>;
    event_query(event: EventId) -> DriverResult<bool>;
    event_synchronize(event: EventId) -> DriverResult<()>;
    stream_synchronize(stream: StreamId) -> DriverResult<()>;
    capture(stream: StreamId) -> DriverResult<Option<Capture>>;
    dependencies(node: NodeId) -> DriverResult<Vec<NodeId>>;
}
