//! A deterministic GPU in memory: capacity, page granularity, streams whose work finishes on
//! command, other tenants, host memory, a price list, scripted failures and scripted addresses.
//!
//! The simulator refuses the calls that a real driver refuses (mapping over a mapped range,
//! releasing a mapped page, querying events during a capture). A bug in the engine therefore shows
//! as an error here, and not only under [`CheckedDriver`](super::CheckedDriver).

mod controls;
mod memory;
mod streams;

use std::sync::{Mutex, MutexGuard, PoisonError};

use self::memory::Memory;
use self::streams::Streams;
use super::script::Script;
use super::{
    Call, Capture, Driver, DriverError, DriverResult, EventId, Fault, MemoryInfo, NodeId,
    PageHandle, Properties, StreamId, price,
};
use crate::base::size::MIB;

/// The default amount of host memory: more than any test uses.
const PLENTY: u64 = u64::MAX / 2;

/// CUDA's `CUDA_ERROR_INVALID_VALUE`.
const INVALID_VALUE: Fault = Fault::Failed(1);
/// CUDA's `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED`.
const CAPTURE_UNSUPPORTED: Fault = Fault::Failed(900);

/// The device to simulate.
#[derive(Debug, Clone, Copy)]
pub struct SimConfig {
    /// Index of the device.
    pub device: u32,
    /// Physical memory in bytes, as the device reports it.
    pub total: u64,
    /// Physical memory in bytes that can be allocated; `total` may report more.
    pub capacity: u64,
    /// Smallest size of a page.
    pub granularity: u64,
    /// Whether the device supports pages.
    pub has_pages: bool,
    /// Host memory in bytes that is available for pages.
    pub host: u64,
}

impl SimConfig {
    /// Returns a device of `capacity` bytes with pages of 2 MiB and up, and practically unlimited
    /// host memory.
    #[must_use]
    pub fn with_capacity(capacity: u64) -> Self {
        Self {
            device: 0,
            total: capacity,
            capacity,
            granularity: 2 * MIB,
            has_pages: true,
            host: PLENTY,
        }
    }
}

/// The number of calls of each kind, and their total price.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CallCounts {
    counts: [u64; Call::ALL.len()],
    /// The price of all calls, in nanoseconds.
    pub nanos: u64,
}

impl CallCounts {
    /// Returns the number of calls of kind `call`.
    #[must_use]
    pub fn of(&self, call: Call) -> u64 {
        self.counts[call as usize]
    }

    /// Returns the number of calls of all kinds.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.counts.iter().sum()
    }
}

/// The simulated device.
#[derive(Debug)]
pub struct SimDriver {
    config: SimConfig,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    memory: Memory,
    streams: Streams,
    /// The last handle given to a page, an event, a node or a capture.
    last_handle: u64,
    script: Script,
    counts: CallCounts,
}

impl SimDriver {
    /// Creates a device with no allocations and no work.
    #[must_use]
    pub fn new(config: SimConfig) -> Self {
        let state = State {
            memory: Memory::new(config.device),
            streams: Streams::default(),
            last_handle: 0,
            script: Script::default(),
            counts: CallCounts::default(),
        };
        Self { config, state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts and prices a call on one allocation or page. Fails if the script says so.
    fn enter(&self, call: Call, bytes: u64) -> DriverResult<MutexGuard<'_, State>> {
        let mut state = self.enter_unpriced(call)?;
        state.counts.nanos += price(call, bytes);
        Ok(state)
    }

    /// Counts a call whose price depends on the pages in its range.
    fn enter_unpriced(&self, call: Call) -> DriverResult<MutexGuard<'_, State>> {
        let mut state = self.state();
        state.counts.counts[call as usize] += 1;
        match state.script.strike(call) {
            Some(fault) => Err(DriverError { call, fault }),
            None => Ok(state),
        }
    }

    fn free_bytes(&self, state: &State) -> u64 {
        self.config.capacity.saturating_sub(state.memory.used())
    }

    /// Creates a page, on the device or in host memory.
    fn create_page(&self, call: Call, bytes: u64, host: bool) -> DriverResult<PageHandle> {
        let mut state = self.enter(call, bytes)?;
        if bytes == 0 || !bytes.is_multiple_of(self.config.granularity) {
            return invalid(call);
        }
        let free = if host {
            self.config.host.saturating_sub(state.memory.held_host())
        } else {
            self.free_bytes(&state)
        };
        if bytes > free {
            return Err(DriverError { call, fault: Fault::OutOfMemory });
        }
        let page = PageHandle(state.fresh_handle());
        state.memory.add_page(page, bytes, host);
        Ok(page)
    }
}

impl State {
    fn fresh_handle(&mut self) -> u64 {
        self.last_handle += 1;
        self.last_handle
    }

    /// Returns the address of the next range of `bytes` bytes: the scripted address if that range
    /// is clear, otherwise a fresh one.
    fn place(&mut self, call: Call, bytes: u64, granularity: u64) -> DriverResult<u64> {
        if let Some(address) = self.script.place(call, bytes) {
            let unit = if call == Call::Alloc { 512 } else { 2 * MIB };
            if self.memory.can_place(address, bytes, unit) {
                return Ok(address);
            }
        }
        // A reserved range must be aligned for pages.
        let fresh = self.memory.fresh_range(bytes, granularity.max(2 * MIB));
        fresh.ok_or(DriverError { call, fault: Fault::OutOfMemory })
    }

    /// Refuses a handle of a destroyed stream: a real driver crashes on it.
    fn refuse_destroyed(&self, call: Call, stream: StreamId) -> DriverResult<()> {
        if self.streams.is_destroyed(stream) { invalid(call) } else { Ok(()) }
    }

    /// Refuses a wait or a query while any stream is being captured.
    fn refuse_during_capture(&self, call: Call) -> DriverResult<()> {
        if self.streams.is_capturing() {
            return Err(DriverError { call, fault: CAPTURE_UNSUPPORTED });
        }
        Ok(())
    }
}

/// Returns the price of a call over a range: the sum of the prices of its pages.
fn price_of_pages(call: Call, pages: &[(u64, u64, PageHandle)]) -> u64 {
    pages.iter().map(|&(_, bytes, _)| price(call, bytes)).sum()
}

fn invalid<T>(call: Call) -> DriverResult<T> {
    Err(DriverError { call, fault: INVALID_VALUE })
}

/// Fails a call with `INVALID_VALUE` if its argument was not found.
fn known<T>(call: Call, found: Option<T>) -> DriverResult<T> {
    found.ok_or(DriverError { call, fault: INVALID_VALUE })
}

impl Driver for SimDriver {
    fn properties(&self) -> Properties {
        let SimConfig { device, total, granularity, has_pages, .. } = self.config;
        Properties { device, total, granularity, has_pages, process_overhead: 0 }
    }

    fn memory_info(&self) -> DriverResult<MemoryInfo> {
        let state = self.enter(Call::MemoryInfo, 0)?;
        Ok(MemoryInfo { free: self.free_bytes(&state), total: self.config.total })
    }

    fn alloc(&self, bytes: u64) -> DriverResult<u64> {
        let call = Call::Alloc;
        let mut state = self.enter(call, bytes)?;
        if bytes == 0 {
            return invalid(call);
        }
        if bytes > self.free_bytes(&state) {
            return Err(DriverError { call, fault: Fault::OutOfMemory });
        }
        let address = state.place(call, bytes, self.config.granularity)?;
        state.memory.add_plain(address, bytes);
        Ok(address)
    }

    fn free(&self, address: u64) -> DriverResult<()> {
        let bytes = self.state().memory.plain_bytes(address);
        let mut state = self.enter(Call::Free, bytes)?;
        state.refuse_during_capture(Call::Free)?;
        if !state.memory.remove_plain(address) {
            return invalid(Call::Free);
        }
        state.streams.finish_all();
        Ok(())
    }

    fn reserve(&self, bytes: u64) -> DriverResult<u64> {
        let mut state = self.enter(Call::Reserve, bytes)?;
        if !self.config.has_pages || bytes == 0 || !bytes.is_multiple_of(self.config.granularity) {
            return invalid(Call::Reserve);
        }
        let address = state.place(Call::Reserve, bytes, self.config.granularity)?;
        state.memory.add_range(address, bytes);
        Ok(address)
    }

    fn unreserve(&self, address: u64, bytes: u64) -> DriverResult<()> {
        let mut state = self.enter(Call::Unreserve, bytes)?;
        if state.memory.remove_range(address, bytes) { Ok(()) } else { invalid(Call::Unreserve) }
    }

    fn create(&self, bytes: u64) -> DriverResult<PageHandle> {
        self.create_page(Call::Create, bytes, false)
    }

    fn create_host(&self, bytes: u64) -> DriverResult<PageHandle> {
        self.create_page(Call::CreateHost, bytes, true)
    }

    fn release(&self, page: PageHandle) -> DriverResult<()> {
        let bytes = self.state().memory.page_bytes(page);
        let mut state = self.enter(Call::Release, bytes)?;
        if state.memory.remove_page(page) { Ok(()) } else { invalid(Call::Release) }
    }

    fn map(&self, address: u64, bytes: u64, page: PageHandle) -> DriverResult<()> {
        let mut state = self.enter(Call::Map, bytes)?;
        let aligned = address.is_multiple_of(self.config.granularity);
        if aligned && state.memory.map(address, bytes, page) { Ok(()) } else { invalid(Call::Map) }
    }

    fn set_access(&self, address: u64, bytes: u64) -> DriverResult<()> {
        let call = Call::SetAccess;
        let mut state = self.enter_unpriced(call)?;
        let pages = known(call, state.memory.pages_of(address..address.saturating_add(bytes)))?;
        state.counts.nanos += price_of_pages(call, &pages);
        Ok(())
    }

    fn unmap(&self, address: u64, bytes: u64) -> DriverResult<()> {
        let call = Call::Unmap;
        let mut state = self.enter_unpriced(call)?;
        let pages = known(call, state.memory.pages_of(address..address.saturating_add(bytes)))?;
        state.counts.nanos += price_of_pages(call, &pages);
        state.memory.unmap(&pages);
        Ok(())
    }

    fn event_create(&self) -> DriverResult<EventId> {
        let mut state = self.enter(Call::EventCreate, 0)?;
        let event = EventId(state.fresh_handle());
        state.streams.add_event(event);
        Ok(event)
    }

    fn event_destroy(&self, event: EventId) -> DriverResult<()> {
        let mut state = self.enter(Call::EventDestroy, 0)?;
        known(Call::EventDestroy, state.streams.remove_event(event))
    }

    fn event_record(&self, event: EventId, stream: StreamId) -> DriverResult<()> {
        let mut state = self.enter(Call::EventRecord, 0)?;
        state.refuse_destroyed(Call::EventRecord, stream)?;
        known(Call::EventRecord, state.streams.record(event, stream))
    }

    fn event_query(&self, event: EventId) -> DriverResult<bool> {
        let state = self.enter(Call::EventQuery, 0)?;
        state.refuse_during_capture(Call::EventQuery)?;
        known(Call::EventQuery, state.streams.is_event_done(event))
    }

    fn event_synchronize(&self, event: EventId) -> DriverResult<()> {
        let mut state = self.enter(Call::EventSynchronize, 0)?;
        state.refuse_during_capture(Call::EventSynchronize)?;
        known(Call::EventSynchronize, state.streams.finish_event(event))
    }

    /// Waits for the whole device, as the real driver does. The stream may have been destroyed.
    fn stream_synchronize(&self, _stream: StreamId) -> DriverResult<()> {
        let mut state = self.enter(Call::StreamSynchronize, 0)?;
        state.refuse_during_capture(Call::StreamSynchronize)?;
        state.streams.synchronize();
        Ok(())
    }

    fn capture(&self, stream: StreamId) -> DriverResult<Option<Capture>> {
        let state = self.enter(Call::Capture, 0)?;
        state.refuse_destroyed(Call::Capture, stream)?;
        Ok(state.streams.capture_of(stream))
    }

    fn dependencies(&self, node: NodeId) -> DriverResult<Vec<NodeId>> {
        let state = self.enter(Call::Dependencies, 0)?;
        known(Call::Dependencies, state.streams.dependencies(node))
    }
}
