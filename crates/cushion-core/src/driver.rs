//! The [`Driver`] trait: the calls that the engine makes on a GPU, and the contract that the caller
//! and the driver keep.
//!
//! The engine reaches a device only through [`Driver`]. [`SimDriver`] is a deterministic device in
//! memory for tests and replays. [`CheckedDriver`] wraps any driver and checks this contract.
//!
//! # The contract
//!
//! *Plain allocations.* [`alloc`](Driver::alloc) returns the address of new memory, aligned to at
//! least 512 bytes. [`free`](Driver::free) frees it and may wait for the whole device.
//!
//! *Pages.* A page is one physical handle. [`create`](Driver::create) takes a multiple of
//! [`Properties::granularity`]. A page is mapped whole or not at all, at an address inside a range
//! that was [reserved](Driver::reserve), and never over another mapping. One page may be mapped at
//! several addresses at once. Memory is usable after [`set_access`](Driver::set_access) over its
//! whole range. [`unmap`](Driver::unmap) takes ranges made of whole mapped pages;
//! [`release`](Driver::release) takes a page that is not mapped;
//! [`unreserve`](Driver::unreserve) takes a whole reserved range without mappings.
//!
//! *Pages in host memory.* [`create_host`](Driver::create_host) creates a page that uses no device
//! memory. The device reaches such a page over the bus, far more slowly than its own memory. All
//! other calls treat it like any page, and it may be mapped next to device pages. Not every device
//! supports such pages.
//!
//! *Order.* Mapping calls do not wait for the device. Before the caller unmaps a page, or gives it
//! to another stream, the caller must know that the work that used the page is done: from an event
//! that was queried or waited for, from [`stream_synchronize`](Driver::stream_synchronize), or from
//! a call that waits for the device. Reuse on the same stream needs no wait.
//!
//! *Failure.* A call that fails has changed nothing. A driver returns [`Fault::OutOfMemory`] only
//! if memory certainly ran out; it returns [`Fault::Failed`] for everything else.
//!
//! *Capture.* While a stream of the device is being captured, the caller must not wait, must not
//! record or query an event on that stream, and must make only calls that are legal during a
//! capture.
//!
//! *Destroyed streams.* A program may destroy its own stream at any time; work queued on the stream
//! continues. The handle must not be passed to [`event_record`](Driver::event_record) or
//! [`capture`](Driver::capture) afterwards: a real driver crashes.
//! [`stream_synchronize`](Driver::stream_synchronize) waits for the device and does not use the
//! handle.

mod checked;
mod contents;
mod prices;
mod script;
mod sim;
mod sim_clock;

pub use checked::{Bytes, CheckedDriver};
pub use contents::SimMemory;
pub use prices::{Priced, price};
pub use script::FailWhen;
pub use sim::{CallCounts, SimConfig, SimDriver};
pub use sim_clock::SimClock;

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// A CUDA stream, by its raw handle. Zero is the default stream.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
pub struct StreamId(pub u64);

/// A physical page, by its raw handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageHandle(pub u64);

/// An event, by its raw handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EventId(pub u64);

/// A node of a graph that is being captured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u64);

/// The constant properties of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Properties {
    /// Index of the device.
    pub device: u32,
    /// Physical memory in bytes.
    pub total: u64,
    /// Smallest size of a page; page sizes are multiples of it.
    pub granularity: u64,
    /// Whether the device supports pages. Without pages, every policy behaves like `segments`.
    pub has_pages: bool,
    /// The most bytes that a process uses beyond its allocations, for its CUDA context and code.
    /// Any further used bytes that the engine does not hold belong to other processes.
    pub process_overhead: u64,
}

/// The current memory figures of the device, including other processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Bytes that no process holds.
    pub free: u64,
    /// Physical memory in bytes.
    pub total: u64,
}

/// A capture under way on a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capture {
    /// Identifies the capture; all streams that joined it have the same number.
    pub id: u64,
    /// The nodes that the next work on the stream follows.
    pub terminals: Vec<NodeId>,
}

/// The calls of [`Driver`], for counting, pricing and scripted failures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[expect(missing_docs, reason = "each variant is the driver call of that name")]
pub enum Call {
    Alloc,
    Free,
    Reserve,
    Unreserve,
    Create,
    CreateHost,
    Release,
    Map,
    SetAccess,
    Unmap,
    EventCreate,
    EventDestroy,
    EventRecord,
    EventQuery,
    EventSynchronize,
    StreamSynchronize,
    MemoryInfo,
    Capture,
    Dependencies,
}

impl Call {
    /// All calls.
    pub const ALL: [Self; 19] = [
        Self::Alloc,
        Self::Free,
        Self::Reserve,
        Self::Unreserve,
        Self::Create,
        Self::CreateHost,
        Self::Release,
        Self::Map,
        Self::SetAccess,
        Self::Unmap,
        Self::EventCreate,
        Self::EventDestroy,
        Self::EventRecord,
        Self::EventQuery,
        Self::EventSynchronize,
        Self::StreamSynchronize,
        Self::MemoryInfo,
        Self::Capture,
        Self::Dependencies,
    ];
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// Why a driver call failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Memory ran out: on the device, or on the host for [`Call::CreateHost`].
    OutOfMemory,
    /// Any other failure, with the driver's error code.
    Failed(i32),
}

/// A driver call that failed and changed nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the driver call {call} failed: {}", match .fault {
    Fault::OutOfMemory if *.call == Call::CreateHost => "out of host memory".to_owned(),
    Fault::OutOfMemory => "out of device memory".to_owned(),
    Fault::Failed(code) => format!("error {code}"),
})]
pub struct DriverError {
    /// The call that failed.
    pub call: Call,
    /// The reason.
    pub fault: Fault,
}

impl DriverError {
    /// Whether memory ran out.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        self.fault == Fault::OutOfMemory
    }
}

/// The result of a driver call.
pub type DriverResult<T> = Result<T, DriverError>;

/// A device. The module's documentation states the contract.
pub trait Driver: fmt::Debug + Send + Sync {
    /// Returns the constant properties of the device, without a driver call.
    fn properties(&self) -> Properties;

    /// Returns the current memory figures of the device.
    fn memory_info(&self) -> DriverResult<MemoryInfo>;

    /// Allocates `bytes` bytes and returns their address.
    fn alloc(&self, bytes: u64) -> DriverResult<u64>;

    /// Frees memory that [`alloc`](Self::alloc) returned, and waits for the device.
    fn free(&self, address: u64) -> DriverResult<()>;

    /// Reserves `bytes` addresses without memory and returns the first.
    fn reserve(&self, bytes: u64) -> DriverResult<u64>;

    /// Returns a whole reserved range to the driver.
    fn unreserve(&self, address: u64, bytes: u64) -> DriverResult<()>;

    /// Creates a physical page of `bytes` bytes, not mapped yet.
    fn create(&self, bytes: u64) -> DriverResult<PageHandle>;

    /// Creates a page of `bytes` bytes in host memory, not mapped yet. It uses no device memory.
    /// Fails with [`Fault::OutOfMemory`] if host memory ran out, and with [`Fault::Failed`] if the
    /// device does not support such pages.
    fn create_host(&self, bytes: u64) -> DriverResult<PageHandle>;

    /// Returns a page that is not mapped to the driver.
    fn release(&self, page: PageHandle) -> DriverResult<()>;

    /// Maps a whole page of `bytes` bytes at `address`.
    fn map(&self, address: u64, bytes: u64, page: PageHandle) -> DriverResult<()>;

    /// Gives this device (and its peers) access to a mapped range.
    fn set_access(&self, address: u64, bytes: u64) -> DriverResult<()>;

    /// Unmaps all pages of a range.
    fn unmap(&self, address: u64, bytes: u64) -> DriverResult<()>;

    /// Creates an event.
    fn event_create(&self) -> DriverResult<EventId>;

    /// Destroys an event.
    fn event_destroy(&self, event: EventId) -> DriverResult<()>;

    /// Marks the work queued on `stream` so far. Replaces an earlier mark of the event.
    fn event_record(&self, event: EventId, stream: StreamId) -> DriverResult<()>;

    /// Whether all marked work is done. Never waits.
    fn event_query(&self, event: EventId) -> DriverResult<bool>;

    /// Waits until all marked work is done.
    fn event_synchronize(&self, event: EventId) -> DriverResult<()>;

    /// Waits until all work queued on `stream` so far is done. Graphs captured on the stream may
    /// run on any stream, so the call waits for the whole device. The stream may have been
    /// destroyed.
    fn stream_synchronize(&self, stream: StreamId) -> DriverResult<()>;

    /// Returns the capture under way on `stream`, if any.
    fn capture(&self, stream: StreamId) -> DriverResult<Option<Capture>>;

    /// Returns the nodes that `node` follows in the graph being captured.
    fn dependencies(&self, node: NodeId) -> DriverResult<Vec<NodeId>>;
}

/// Passes the signature of every method of [`Driver`] to a macro that implements all of them in the
/// same way. The types of this module must be in scope.
#[doc(hidden)]
#[macro_export]
macro_rules! driver_methods {
    ($then:ident) => {
        $then! {
            properties() -> Properties;
            memory_info() -> DriverResult<MemoryInfo>;
            alloc(bytes: u64) -> DriverResult<u64>;
            free(address: u64) -> DriverResult<()>;
            reserve(bytes: u64) -> DriverResult<u64>;
            unreserve(address: u64, bytes: u64) -> DriverResult<()>;
            create(bytes: u64) -> DriverResult<PageHandle>;
            create_host(bytes: u64) -> DriverResult<PageHandle>;
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
    };
}

/// Implements [`Driver`] for a pointer by forwarding every method.
macro_rules! forward_driver {
    ($($name:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {
        impl<D: Driver + ?Sized> Driver for Arc<D> {
            $(fn $name(&self, $($argument: $type),*) -> $result {
                (**self).$name($($argument),*)
            })*
        }
    };
}

driver_methods!(forward_driver);
