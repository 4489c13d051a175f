//! A deterministic GPU in memory: capacity, page granularity, streams and events that finish when
//! told to, other tenants, host memory, the price list, scripted failures and scripted addresses.
//!
//! It refuses what a real driver refuses (mapping over a mapped range, releasing a mapped page,
//! querying events during a capture), so that a bug in the engine shows as an error here and not
//! only under [`CheckedDriver`](super::CheckedDriver).

mod controls;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::script::Script;
use super::{
    Call, Capture, Driver, DriverError, DriverResult, EventId, Fault, MemoryInfo, NodeId,
    PageHandle, Properties, StreamId, price,
};
use crate::base::size::{MIB, round_up};

/// The simulator's own addresses start here, above every address a real driver hands out, so that
/// they never meet recorded ones,
const OWN_ADDRESSES: u64 = 1 << 48;

/// as far apart as this for devices of different numbers, so that an address tells its device,
const DEVICE_ADDRESSES: u64 = 1 << 55;
const LAST_DEVICE: u32 = 127;

/// and end here: even this device runs out of them.
const LAST_ADDRESS: u64 = 1 << 62;

/// Host memory that no test runs out of, unless it says how much there is.
const PLENTY: u64 = u64::MAX / 2;

/// CUDA's `CUDA_ERROR_INVALID_VALUE`.
const INVALID_VALUE: Fault = Fault::Failed(1);
/// CUDA's `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED`.
const CAPTURE_UNSUPPORTED: Fault = Fault::Failed(900);

/// What kind of device to simulate.
#[derive(Debug, Clone, Copy)]
pub struct SimConfig {
    /// Index of the device.
    pub device: u32,
    /// Physical memory in bytes, as the device reports it.
    pub total: u64,
    /// What there really is of it.
    pub capacity: u64,
    /// Smallest size of a page.
    pub granularity: u64,
    /// Whether it has pages.
    pub has_pages: bool,
    /// Host memory in bytes that pages may be made of.
    pub host: u64,
}

impl SimConfig {
    /// A device of `capacity` bytes with pages of 2 MiB and up, and plenty of host memory.
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

/// How often each call was made, and what they cost together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CallCounts {
    counts: [u64; Call::ALL.len()],
    /// The price of all calls, in nanoseconds.
    pub nanos: u64,
}

impl CallCounts {
    /// How often `call` was made.
    #[must_use]
    pub fn of(&self, call: Call) -> u64 {
        self.counts[call as usize]
    }

    /// How many calls were made in all.
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

#[derive(Debug, Default)]
struct State {
    plain: BTreeMap<u64, u64>,
    ranges: BTreeMap<u64, u64>,
    pages: BTreeMap<PageHandle, Page>,
    mappings: BTreeMap<u64, (u64, PageHandle)>,
    tenants: BTreeMap<u32, u64>,
    held: u64,
    held_host: u64,
    events: BTreeMap<EventId, Option<(StreamId, u64)>>,
    streams: BTreeMap<StreamId, Stream>,
    /// Streams being captured.
    capturing: BTreeSet<StreamId>,
    /// Streams that are no more.
    destroyed: BTreeSet<StreamId>,
    /// Whether work goes on although the device was waited for.
    outlasts_waits: bool,
    nodes: BTreeMap<NodeId, Vec<NodeId>>,
    handed_out: u64,
    next_address: u64,
    script: Script,
    counts: CallCounts,
}

#[derive(Debug)]
struct Page {
    bytes: u64,
    /// Whether it is in host memory.
    host: bool,
    mapped: u32,
}

#[derive(Debug, Default)]
struct Stream {
    launched: u64,
    finished: u64,
    /// What is launched and not finished: each piece's place in the order of all launches.
    unfinished: VecDeque<u64>,
    capture: Option<(u64, BTreeSet<NodeId>)>,
}

impl Stream {
    /// Finishes its work up to number `work`, as far as it was queued.
    fn finish_until(&mut self, work: u64) {
        while self.finished < work.min(self.launched) {
            self.unfinished.pop_front();
            self.finished += 1;
        }
    }

    fn finish(&mut self) {
        self.unfinished.clear();
        self.finished = self.launched;
    }
}

impl SimDriver {
    /// A device with nothing on it.
    #[must_use]
    pub fn new(config: SimConfig) -> Self {
        let apart = u64::from(config.device.min(LAST_DEVICE)) * DEVICE_ADDRESSES;
        let state = State { next_address: OWN_ADDRESSES + apart, ..State::default() };
        Self { config, state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts and prices a call on one allocation or page, and fails it if the script says so.
    fn enter(&self, call: Call, bytes: u64) -> DriverResult<MutexGuard<'_, State>> {
        let mut state = self.enter_unpriced(call)?;
        state.counts.nanos += price(call, bytes);
        Ok(state)
    }

    /// Counts a call whose price depends on the pages it finds.
    fn enter_unpriced(&self, call: Call) -> DriverResult<MutexGuard<'_, State>> {
        let mut state = self.state();
        state.counts.counts[call as usize] += 1;
        match state.script.strike(call) {
            Some(fault) => Err(DriverError { call, fault }),
            None => Ok(state),
        }
    }

    fn free_bytes(&self, state: &State) -> u64 {
        let tenants: u64 = state.tenants.values().sum();
        self.config.capacity.saturating_sub(state.held).saturating_sub(tenants)
    }

    /// Makes a page, on the device or in host memory.
    fn make_page(&self, call: Call, bytes: u64, host: bool) -> DriverResult<PageHandle> {
        let mut state = self.enter(call, bytes)?;
        if bytes == 0 || !bytes.is_multiple_of(self.config.granularity) {
            return invalid(call);
        }
        let free = if host {
            self.config.host.saturating_sub(state.held_host)
        } else {
            self.free_bytes(&state)
        };
        if bytes > free {
            return Err(DriverError { call, fault: Fault::OutOfMemory });
        }
        let page = PageHandle(state.fresh_handle());
        state.pages.insert(page, Page { bytes, host, mapped: 0 });
        *state.held_in(host) += bytes;
        Ok(page)
    }
}

impl State {
    fn fresh_handle(&mut self) -> u64 {
        self.handed_out += 1;
        self.handed_out
    }

    /// What is held of host memory, or of the device.
    fn held_in(&mut self, host: bool) -> &mut u64 {
        if host { &mut self.held_host } else { &mut self.held }
    }

    /// Where the next range of `bytes` goes: the scripted place if it is clear, else a fresh one.
    fn place(&mut self, call: Call, bytes: u64, granularity: u64) -> DriverResult<u64> {
        if let Some(address) = self.script.place(call, bytes) {
            let end = address.saturating_add(bytes);
            let unit = if call == Call::Alloc { 512 } else { 2 * MIB };
            if address > 0
                && address.is_multiple_of(unit)
                && end <= OWN_ADDRESSES
                && self.is_clear(address..end)
            {
                return Ok(address);
            }
        }
        // What is reserved is a place for pages.
        let unit = granularity.max(2 * MIB);
        let place = || {
            let address = round_up(self.next_address, unit)?;
            let end = address.checked_add(round_up(bytes, unit)?)?;
            (end <= LAST_ADDRESS).then_some((address, end))
        };
        let (address, end) = place().ok_or(DriverError { call, fault: Fault::OutOfMemory })?;
        self.next_address = end;
        Ok(address)
    }

    fn is_clear(&self, range: Range<u64>) -> bool {
        let clear_in = |map: &BTreeMap<u64, u64>| {
            map.range(..range.end)
                .next_back()
                .is_none_or(|(&start, &bytes)| start.saturating_add(bytes) <= range.start)
        };
        clear_in(&self.plain) && clear_in(&self.ranges)
    }

    /// The reserved range that holds all of `range`.
    fn is_reserved(&self, range: &Range<u64>) -> bool {
        self.ranges
            .range(..=range.start)
            .next_back()
            .is_some_and(|(&start, &bytes)| range.end <= start.saturating_add(bytes))
    }

    /// The mappings that make up `range` exactly, in order; `None` if they do not.
    fn pages_of(&self, range: Range<u64>) -> Option<Vec<(u64, u64, PageHandle)>> {
        let mut at = range.start;
        let mut found = Vec::new();
        for (&address, &(bytes, page)) in self.mappings.range(range.clone()) {
            if address != at {
                return None;
            }
            found.push((address, bytes, page));
            at += bytes;
        }
        (at == range.end && !found.is_empty()).then_some(found)
    }

    fn finish_all(&mut self) {
        self.streams.values_mut().for_each(Stream::finish);
        // What is not known of is finished.
        self.streams.retain(|stream, _| !self.destroyed.contains(stream));
    }

    /// The handle of a stream that is no more is not to be used: a real driver crashes.
    fn refuse_destroyed(&self, call: Call, stream: StreamId) -> DriverResult<()> {
        if self.destroyed.contains(&stream) { invalid(call) } else { Ok(()) }
    }

    /// Waiting and querying are illegal while anything is being captured.
    fn refuse_during_capture(&self, call: Call) -> DriverResult<()> {
        if !self.capturing.is_empty() {
            return Err(DriverError { call, fault: CAPTURE_UNSUPPORTED });
        }
        Ok(())
    }
}

/// A call over a range costs each page's own price.
fn price_of_pages(call: Call, pages: &[(u64, u64, PageHandle)]) -> u64 {
    pages.iter().map(|&(_, bytes, _)| price(call, bytes)).sum()
}

fn invalid<T>(call: Call) -> DriverResult<T> {
    Err(DriverError { call, fault: INVALID_VALUE })
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
        state.plain.insert(address, bytes);
        state.held += bytes;
        Ok(address)
    }

    fn free(&self, address: u64) -> DriverResult<()> {
        let bytes = self.state().plain.get(&address).copied().unwrap_or(0);
        let mut state = self.enter(Call::Free, bytes)?;
        state.refuse_during_capture(Call::Free)?;
        let Some(bytes) = state.plain.remove(&address) else {
            return invalid(Call::Free);
        };
        state.held -= bytes;
        state.finish_all();
        Ok(())
    }

    fn reserve(&self, bytes: u64) -> DriverResult<u64> {
        let mut state = self.enter(Call::Reserve, bytes)?;
        if !self.config.has_pages || bytes == 0 || !bytes.is_multiple_of(self.config.granularity) {
            return invalid(Call::Reserve);
        }
        let address = state.place(Call::Reserve, bytes, self.config.granularity)?;
        state.ranges.insert(address, bytes);
        Ok(address)
    }

    fn unreserve(&self, address: u64, bytes: u64) -> DriverResult<()> {
        let mut state = self.enter(Call::Unreserve, bytes)?;
        let empty = state.mappings.range(address..address.saturating_add(bytes)).next().is_none();
        if !empty || state.ranges.get(&address) != Some(&bytes) {
            return invalid(Call::Unreserve);
        }
        state.ranges.remove(&address);
        Ok(())
    }

    fn create(&self, bytes: u64) -> DriverResult<PageHandle> {
        self.make_page(Call::Create, bytes, false)
    }

    fn create_host(&self, bytes: u64) -> DriverResult<PageHandle> {
        self.make_page(Call::CreateHost, bytes, true)
    }

    fn release(&self, page: PageHandle) -> DriverResult<()> {
        let bytes = self.state().pages.get(&page).map_or(0, |page| page.bytes);
        let mut state = self.enter(Call::Release, bytes)?;
        match state.pages.get(&page) {
            Some(&Page { mapped: 0, host, .. }) => {
                state.pages.remove(&page);
                *state.held_in(host) -= bytes;
                Ok(())
            }
            _ => invalid(Call::Release),
        }
    }

    fn map(&self, address: u64, bytes: u64, page: PageHandle) -> DriverResult<()> {
        let mut state = self.enter(Call::Map, bytes)?;
        let range = address..address.saturating_add(bytes);
        let overlaps = state
            .mappings
            .range(..range.end)
            .next_back()
            .is_some_and(|(&start, &(bytes, _))| start + bytes > range.start);
        let aligned = address.is_multiple_of(self.config.granularity);
        if overlaps || !aligned || !state.is_reserved(&range) {
            return invalid(Call::Map);
        }
        match state.pages.get_mut(&page) {
            Some(known) if known.bytes == bytes => known.mapped += 1,
            _ => return invalid(Call::Map),
        }
        state.mappings.insert(address, (bytes, page));
        Ok(())
    }

    fn set_access(&self, address: u64, bytes: u64) -> DriverResult<()> {
        let mut state = self.enter_unpriced(Call::SetAccess)?;
        let Some(pages) = state.pages_of(address..address.saturating_add(bytes)) else {
            return invalid(Call::SetAccess);
        };
        state.counts.nanos += price_of_pages(Call::SetAccess, &pages);
        Ok(())
    }

    fn unmap(&self, address: u64, bytes: u64) -> DriverResult<()> {
        let mut state = self.enter_unpriced(Call::Unmap)?;
        let Some(pages) = state.pages_of(address..address.saturating_add(bytes)) else {
            return invalid(Call::Unmap);
        };
        state.counts.nanos += price_of_pages(Call::Unmap, &pages);
        for (address, _, page) in pages {
            state.mappings.remove(&address);
            if let Some(page) = state.pages.get_mut(&page) {
                page.mapped -= 1;
            }
        }
        Ok(())
    }

    fn event_create(&self) -> DriverResult<EventId> {
        let mut state = self.enter(Call::EventCreate, 0)?;
        let event = EventId(state.fresh_handle());
        state.events.insert(event, None);
        Ok(event)
    }

    fn event_destroy(&self, event: EventId) -> DriverResult<()> {
        let mut state = self.enter(Call::EventDestroy, 0)?;
        match state.events.remove(&event) {
            Some(_) => Ok(()),
            None => invalid(Call::EventDestroy),
        }
    }

    fn event_record(&self, event: EventId, stream: StreamId) -> DriverResult<()> {
        let mut state = self.enter(Call::EventRecord, 0)?;
        state.refuse_destroyed(Call::EventRecord, stream)?;
        let launched = state.streams.entry(stream).or_default().launched;
        match state.events.get_mut(&event) {
            Some(mark) => {
                *mark = Some((stream, launched));
                Ok(())
            }
            None => invalid(Call::EventRecord),
        }
    }

    fn event_query(&self, event: EventId) -> DriverResult<bool> {
        let state = self.enter(Call::EventQuery, 0)?;
        state.refuse_during_capture(Call::EventQuery)?;
        match state.events.get(&event) {
            Some(None) => Ok(true),
            Some(Some((stream, launched))) => {
                Ok(state.streams.get(stream).is_none_or(|stream| stream.finished >= *launched))
            }
            None => invalid(Call::EventQuery),
        }
    }

    fn event_synchronize(&self, event: EventId) -> DriverResult<()> {
        let mut state = self.enter(Call::EventSynchronize, 0)?;
        state.refuse_during_capture(Call::EventSynchronize)?;
        match state.events.get(&event).copied() {
            Some(mark) => {
                if let Some((stream, launched)) = mark
                    && let Some(stream) = state.streams.get_mut(&stream)
                {
                    stream.finish_until(launched);
                }
                Ok(())
            }
            None => invalid(Call::EventSynchronize),
        }
    }

    /// Waits for the whole device, as the real driver does: the stream may be no more.
    fn stream_synchronize(&self, _stream: StreamId) -> DriverResult<()> {
        let mut state = self.enter(Call::StreamSynchronize, 0)?;
        state.refuse_during_capture(Call::StreamSynchronize)?;
        if !state.outlasts_waits {
            state.finish_all();
        }
        Ok(())
    }

    fn capture(&self, stream: StreamId) -> DriverResult<Option<Capture>> {
        let state = self.enter(Call::Capture, 0)?;
        state.refuse_destroyed(Call::Capture, stream)?;
        Ok(state.streams.get(&stream).and_then(|stream| {
            let (id, terminals) = stream.capture.as_ref()?;
            Some(Capture { id: *id, terminals: terminals.iter().copied().collect() })
        }))
    }

    fn dependencies(&self, node: NodeId) -> DriverResult<Vec<NodeId>> {
        let state = self.enter(Call::Dependencies, 0)?;
        match state.nodes.get(&node) {
            Some(follows) => Ok(follows.clone()),
            None => invalid(Call::Dependencies),
        }
    }
}
