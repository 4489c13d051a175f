//! What the engine needs of a GPU, and the contract both sides keep.
//!
//! [`Driver`] is the only door to a device. [`SimDriver`] is a deterministic device in memory for
//! tests and replays; [`CheckedDriver`] wraps any driver and polices this contract.
//!
//! # The contract
//!
//! *Plain allocations.* [`alloc`](Driver::alloc) gives the address of fresh memory, aligned to
//! 512 bytes at least; [`free`](Driver::free) gives it back and may wait for the whole device.
//!
//! *Pages.* A page is one physical handle. [`create`](Driver::create) takes a multiple of
//! [`Properties::granularity`]. A page is mapped whole or not at all, at an address inside a range
//! that was [reserved](Driver::reserve), and nothing may be mapped over a mapped range. One page may
//! be mapped at several addresses at once. Memory is usable after [`set_access`](Driver::set_access)
//! over its whole range. [`unmap`](Driver::unmap) takes ranges made of whole mapped pages;
//! [`release`](Driver::release) takes a page that is mapped nowhere; [`unreserve`](Driver::unreserve)
//! takes a whole reserved range with nothing mapped in it.
//!
//! *Pages in host memory.* [`create_host`](Driver::create_host) makes a page that takes nothing of the
//! device's memory: the device reaches it over the bus, far more slowly than its own. From then on it is
//! a page like any other, and may be mapped beside them. Not every device can use such pages.
//!
//! *Order.* Mapping calls do not wait for the device. Before a page is unmapped, or handed to
//! another stream, the caller must know that the work that used it is done: by an event that was
//! queried or waited for, by [`stream_synchronize`](Driver::stream_synchronize), or by a call that
//! waits for the device. Reuse on the same stream is ordered by itself.
//!
//! *Failure.* A call that fails has changed nothing. [`Fault::OutOfMemory`] says so only when it is
//! certain that memory ran out; everything else is [`Fault::Failed`].
//!
//! *Capture.* While a stream of the device is being captured, nothing may be waited for, no event may be recorded or
//! queried on that stream, and the caller keeps to calls that are legal then.
//!
//! *Streams that are no more.* A program may destroy a stream of its own at any time; what is queued on it goes on. Its
//! handle must not be passed to [`event_record`](Driver::event_record) or [`capture`](Driver::capture) afterwards: a real
//! driver crashes. [`stream_synchronize`](Driver::stream_synchronize) waits for the device and needs no handle.

mod checked;
mod memory;
mod prices;
mod script;
mod sim;
mod sim_clock;

pub use checked::{Bytes, CheckedDriver};
pub use memory::SimMemory;
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

/// What does not change about a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Properties {
    /// Index of the device.
    pub device: u32,
    /// Physical memory in bytes.
    pub total: u64,
    /// Smallest size of a page; page sizes are multiples of it.
    pub granularity: u64,
    /// Whether pages can be mapped at all; where they cannot, every policy is `segments`.
    pub has_pages: bool,
    /// What a process takes of the device beside the memory it asks for, at most: its context and its
    /// code. What is used beyond that, and is not the engine's, other processes hold.
    pub process_overhead: u64,
}

/// What the device reports of its memory now, other processes included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Bytes nobody holds.
    pub free: u64,
    /// Physical memory in bytes.
    pub total: u64,
}

/// A capture under way on a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capture {
    /// Tells captures apart; the same for every stream that joined this one.
    pub id: u64,
    /// The nodes that the next work on the stream will follow.
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
    /// Every call there is.
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
    /// There is no memory left for this call: on the device, or in the host for [`Call::CreateHost`].
    OutOfMemory,
    /// Anything else: the driver's own error code.
    Failed(i32),
}

/// A driver call that failed, and so changed nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the driver call {call} failed: {}", match .fault {
    Fault::OutOfMemory if *.call == Call::CreateHost => "out of host memory".to_owned(),
    Fault::OutOfMemory => "out of device memory".to_owned(),
    Fault::Failed(code) => format!("error {code}"),
})]
pub struct DriverError {
    /// The call that failed.
    pub call: Call,
    /// Why.
    pub fault: Fault,
}

impl DriverError {
    /// Whether memory ran out, as opposed to a broken driver.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        self.fault == Fault::OutOfMemory
    }
}

/// What driver calls return.
pub type DriverResult<T> = Result<T, DriverError>;

/// A device. The module's documentation states the contract.
pub trait Driver: fmt::Debug + Send + Sync {
    /// What does not change about the device. No driver call.
    fn properties(&self) -> Properties;

    /// What the device reports of its memory now.
    fn memory_info(&self) -> DriverResult<MemoryInfo>;

    /// Fresh memory of `bytes` bytes.
    fn alloc(&self, bytes: u64) -> DriverResult<u64>;

    /// Gives back what [`alloc`](Self::alloc) gave; waits for the device.
    fn free(&self, address: u64) -> DriverResult<()>;

    /// A range of addresses with nothing behind them.
    fn reserve(&self, bytes: u64) -> DriverResult<u64>;

    /// Gives a reserved range back.
    fn unreserve(&self, address: u64, bytes: u64) -> DriverResult<()>;

    /// A physical page of `bytes` bytes, mapped nowhere.
    fn create(&self, bytes: u64) -> DriverResult<PageHandle>;

    /// A page of `bytes` bytes in host memory, mapped nowhere; it takes nothing of the device's memory.
    /// [`Fault::OutOfMemory`] if the host has none left; [`Fault::Failed`] where the device cannot use
    /// such pages.
    fn create_host(&self, bytes: u64) -> DriverResult<PageHandle>;

    /// Gives a page back.
    fn release(&self, page: PageHandle) -> DriverResult<()>;

    /// Puts the whole page of `bytes` bytes at `address`.
    fn map(&self, address: u64, bytes: u64, page: PageHandle) -> DriverResult<()>;

    /// Lets this device (and its peers) use a mapped range.
    fn set_access(&self, address: u64, bytes: u64) -> DriverResult<()>;

    /// Takes the pages of a range away from their addresses.
    fn unmap(&self, address: u64, bytes: u64) -> DriverResult<()>;

    /// A new event.
    fn event_create(&self) -> DriverResult<EventId>;

    /// Destroys an event.
    fn event_destroy(&self, event: EventId) -> DriverResult<()>;

    /// Marks the work queued on `stream` so far; an earlier mark is forgotten.
    fn event_record(&self, event: EventId, stream: StreamId) -> DriverResult<()>;

    /// Whether all marked work is done. Never waits.
    fn event_query(&self, event: EventId) -> DriverResult<bool>;

    /// Waits until all marked work is done.
    fn event_synchronize(&self, event: EventId) -> DriverResult<()>;

    /// Waits until all work queued on `stream` so far is done, and what graphs captured on it do wherever they run: for
    /// the whole device. The stream may have been destroyed.
    fn stream_synchronize(&self, stream: StreamId) -> DriverResult<()>;

    /// The capture under way on `stream`, if any.
    fn capture(&self, stream: StreamId) -> DriverResult<Option<Capture>>;

    /// The nodes that `node` follows in the graph being captured.
    fn dependencies(&self, node: NodeId) -> DriverResult<Vec<NodeId>>;
}

/// Passes every method of [`Driver`] to a macro, for those who write all of them alike. The types of this module have
/// to be in scope.
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

/// Writes each method once for a pointer-like wrapper.
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
