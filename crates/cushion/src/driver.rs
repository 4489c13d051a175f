//! One type for every device: a GPU, or one that is simulated in memory.

use cushion_core::driver::{
    Capture, DriverResult, EventId, MemoryInfo, NodeId, PageHandle, Properties,
};
use cushion_core::{Driver, SimConfig, SimDriver, StreamId};
use cushion_cuda::CudaDriver;

/// A device behind the engine's [`Driver`]. Which one it is matters where memory is got from the device; the
/// engine serves most allocations without asking.
#[derive(Debug)]
#[non_exhaustive]
pub enum DeviceDriver {
    /// A GPU.
    Cuda(CudaDriver),
    /// A device in memory, with addresses that nobody can follow.
    Simulated(Box<SimDriver>),
}

impl DeviceDriver {
    /// A simulated device of `capacity` bytes.
    #[must_use]
    pub fn simulated(device: u32, capacity: u64) -> Self {
        let config = SimConfig { device, ..SimConfig::with_capacity(capacity) };
        Self::Simulated(Box::new(SimDriver::new(config)))
    }

    /// Whether there is no GPU behind it.
    #[must_use]
    pub fn is_simulated(&self) -> bool {
        matches!(self, Self::Simulated(_))
    }
}

/// Writes each method once for all kinds of device.
macro_rules! forward_driver {
    ($($name:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {
        impl Driver for DeviceDriver {
            $(fn $name(&self, $($argument: $type),*) -> $result {
                match self {
                    Self::Cuda(driver) => driver.$name($($argument),*),
                    Self::Simulated(driver) => driver.$name($($argument),*),
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
