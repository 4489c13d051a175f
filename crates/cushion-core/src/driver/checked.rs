//! Checks the driver's contract, for tests and fuzzing. [`CheckedDriver`] wraps any driver and
//! panics at the first call, or the first work, that breaks the contract; the message names the
//! rule and the address.
//!
//! A page may be mapped at several addresses. Three rules follow:
//!
//! - Two live allocations never share a byte of a page, at any address.
//! - Freed bytes go to another stream, at any address, only after the work on them is done.
//! - A page is unmapped from an address only after the work that used that address is done.
//!
//! Work counts as done only if the wrapper saw proof: an event that was recorded after the work and
//! was found finished, or a call that waits for the device. The wrapper therefore also works on a
//! real GPU and with threads: a wait does not cover work that another thread queues meanwhile.
//!
//! The program reports its work, the waits of streams for each other, destroyed streams and
//! captures to the wrapper. Its model of the device shares no code with the simulator's, so that
//! one bug cannot hide in both.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{
    Capture, Driver, DriverResult, EventId, MemoryInfo, NodeId, PageHandle, Properties, StreamId,
};

/// A driver that checks all calls to another driver. See the module's documentation.
#[derive(Debug)]
pub struct CheckedDriver<D> {
    inner: D,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Plain allocations: size by address.
    plain: BTreeMap<u64, u64>,
    /// Reserved ranges: size by address.
    ranges: BTreeMap<u64, u64>,
    /// Pages by handle: size and addresses.
    pages: BTreeMap<PageHandle, (u64, BTreeSet<u64>)>,
    /// Mapped pages by address.
    mapped: BTreeMap<u64, Mapping>,
    streams: BTreeMap<StreamId, Progress>,
    /// Streams that the program destroyed.
    destroyed: BTreeSet<StreamId>,
    /// Streams that are being captured.
    captured: BTreeSet<StreamId>,
    /// The stream and the ticket that each event marks, once it is recorded.
    events: BTreeMap<EventId, Option<(StreamId, u64)>>,
    /// Work that is not known to be done.
    unfinished: Vec<Work>,
}

#[derive(Debug)]
struct Mapping {
    bytes: u64,
    page: PageHandle,
    usable: bool,
}

#[derive(Debug, Default)]
struct Progress {
    launched: u64,
    done: u64,
    /// For each other stream, the last ticket that later work on this stream follows.
    follows: BTreeMap<StreamId, u64>,
}

#[derive(Debug, Clone, Copy)]
struct Work {
    stream: StreamId,
    ticket: u64,
    memory: Bytes,
    /// The address of the mapping that the work uses.
    mapping: u64,
    life: u64,
}

/// A range of bytes within a page or a plain allocation, independent of the addresses that the page
/// is mapped at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bytes {
    place: Place,
    start: u64,
    end: u64,
}

impl Bytes {
    /// Whether both ranges share a byte.
    #[must_use]
    pub fn overlap(&self, other: &Self) -> bool {
        self.place == other.place && self.start < other.end && other.start < self.end
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// The plain allocation at this address.
    Plain(u64),
    Page(PageHandle),
}

impl<D: Driver> CheckedDriver<D> {
    /// Wraps `inner`.
    pub fn new(inner: D) -> Self {
        Self { inner, state: Mutex::default() }
    }

    /// Returns the wrapped driver.
    pub fn inner(&self) -> &D {
        &self.inner
    }

    /// Reports that work on `stream` was queued which uses `bytes` bytes at `address`, for the
    /// allocation `life`. The program itself orders the uses of one allocation on several streams.
    /// Two allocations may share bytes only in stream order, or after the work of the first is
    /// done.
    ///
    /// # Panics
    ///
    /// If some of the memory is not mapped and accessible, or if work of another allocation on the
    /// same bytes is not known to be done and this work does not follow it.
    pub fn work(&self, address: u64, bytes: u64, stream: StreamId, life: u64) {
        let mut state = self.state();
        let progress = state.streams.entry(stream).or_default();
        progress.launched += 1;
        let ticket = progress.launched;
        let follows = progress.follows.clone();
        let follows = |work: &Work| {
            work.stream == stream || follows.get(&work.stream).is_some_and(|&t| work.ticket <= t)
        };
        for (memory, mapping) in state.resolve(address, bytes) {
            let clash = state
                .unfinished
                .iter()
                .find(|work| work.memory.overlap(&memory) && work.life != life && !follows(work));
            assert!(
                clash.is_none(),
                "memory at {address:#x} is used on {stream:?} before the work of an earlier \
                 allocation on another stream is known to be done: {clash:?}"
            );
            state.unfinished.push(Work { stream, ticket, memory, mapping, life });
        }
    }

    /// Returns the physical memory behind `bytes` bytes at `address`.
    ///
    /// # Panics
    ///
    /// If some of the memory is not mapped and accessible.
    pub fn behind(&self, address: u64, bytes: u64) -> Vec<Bytes> {
        self.state().resolve(address, bytes).into_iter().map(|(memory, _)| memory).collect()
    }

    /// Reports that later work on `waiter` follows all work queued on `other`.
    pub fn wait(&self, waiter: StreamId, other: StreamId) {
        let mut state = self.state();
        let (launched, follows) = {
            let other = state.streams.entry(other).or_default();
            (other.launched, other.follows.clone())
        };
        let waiter = state.streams.entry(waiter).or_default();
        for (stream, ticket) in follows.into_iter().chain([(other, launched)]) {
            let until = waiter.follows.entry(stream).or_default();
            *until = ticket.max(*until);
        }
    }

    /// Reports that later work on `waiter` follows all work queued on all streams.
    pub fn wait_for_all(&self, waiter: StreamId) {
        let mut state = self.state();
        let all = state.launched();
        let follows = &mut state.streams.entry(waiter).or_default().follows;
        for (stream, ticket) in all {
            follows.insert(stream, ticket);
        }
    }

    /// Reports that the program destroyed a stream. Its handle must not be used afterwards.
    pub fn destroy_stream(&self, stream: StreamId) {
        self.state().destroyed.insert(stream);
    }

    /// Reports that a capture of `stream` began. No event may be recorded on it until the capture
    /// ends.
    pub fn begin_capture(&self, stream: StreamId) {
        self.state().captured.insert(stream);
    }

    /// Reports that the capture of `stream` ended.
    pub fn end_capture(&self, stream: StreamId) {
        self.state().captured.remove(&stream);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Creates a page with `make`, on the device or in host memory, and tracks it.
    fn make_page(
        &self,
        bytes: u64,
        make: impl FnOnce(&D, u64) -> DriverResult<PageHandle>,
    ) -> DriverResult<PageHandle> {
        let unit = self.inner.properties().granularity;
        assert!(bytes > 0 && bytes.is_multiple_of(unit), "a page of {bytes} bytes");
        let page = make(&self.inner, bytes)?;
        self.state().pages.insert(page, (bytes, BTreeSet::new()));
        Ok(page)
    }
}

impl State {
    /// Returns the physical memory behind a range, each part with the address of its mapping.
    fn resolve(&self, address: u64, bytes: u64) -> Vec<(Bytes, u64)> {
        let end = address.checked_add(bytes).expect("the range fits the address space");
        if let Some((&start, &size)) = self.plain.range(..=address).next_back()
            && address < start + size
        {
            assert!(end <= start + size, "{address:#x}+{bytes} leaves its allocation");
            let place = Place::Plain(start);
            return vec![(Bytes { place, start: address - start, end: end - start }, start)];
        }
        let mut places = Vec::new();
        let mut at = address;
        while at < end {
            let found = self.mapped.range(..=at).next_back();
            let Some((&start, mapping)) = found.filter(|(start, m)| at < *start + m.bytes) else {
                panic!("{at:#x} is used but not mapped");
            };
            assert!(mapping.usable, "{at:#x} is used without access");
            let until = end.min(start + mapping.bytes);
            let place = Place::Page(mapping.page);
            places.push((Bytes { place, start: at - start, end: until - start }, start));
            at = until;
        }
        places
    }

    fn assert_done(&self, what: &str, concerns: impl Fn(&Work) -> bool) {
        let busy = self.unfinished.iter().find(|work| concerns(work));
        assert!(busy.is_none(), "{what} while work on it is not known to be done: {busy:?}");
    }

    fn done_until(&mut self, stream: StreamId, ticket: u64) {
        let progress = self.streams.entry(stream).or_default();
        progress.done = progress.done.max(ticket);
        let done = progress.done;
        self.unfinished.retain(|work| work.stream != stream || work.ticket > done);
    }

    /// Returns the last ticket of each stream.
    fn launched(&self) -> Vec<(StreamId, u64)> {
        self.streams.iter().map(|(&stream, progress)| (stream, progress.launched)).collect()
    }

    /// Notes that a call waited for the device; `launched` is what was queued when the call began.
    fn all_done(&mut self, launched: &[(StreamId, u64)]) {
        let Self { streams, unfinished, destroyed, .. } = self;
        for (stream, ticket) in launched {
            if let Some(progress) = streams.get_mut(stream) {
                progress.done = progress.done.max(*ticket);
            }
        }
        unfinished.retain(|work| streams.get(&work.stream).is_none_or(|s| work.ticket > s.done));
        // No call names a destroyed stream again: it can be dropped once its work is done.
        streams.retain(|stream, s| s.done < s.launched || !destroyed.contains(stream));
    }

    fn assert_not_destroyed(&self, stream: StreamId, what: &str) {
        let gone = self.destroyed.contains(&stream);
        assert!(!gone, "{what} on {stream:?}, which was destroyed");
    }

    /// Returns the work that an event marks. The caller reads this before it waits, because another
    /// thread may record the event again meanwhile.
    fn marked(&self, event: EventId) -> Option<(StreamId, u64)> {
        self.events.get(&event).copied().flatten()
    }

    fn mark_done(&mut self, marked: Option<(StreamId, u64)>) {
        if let Some((stream, ticket)) = marked {
            self.done_until(stream, ticket);
        }
    }

    /// Returns the addresses of the mappings that make up a range exactly.
    fn mappings_of(&self, address: u64, bytes: u64, what: &str) -> Vec<u64> {
        let mut at = address;
        let mut found = Vec::new();
        for (&start, mapping) in self.mapped.range(address..address + bytes) {
            assert_eq!(start, at, "{what} of {address:#x}+{bytes}: not all of it is mapped");
            found.push(start);
            at += mapping.bytes;
        }
        assert_eq!(at, address + bytes, "{what} of {address:#x}+{bytes}: not whole mapped pages");
        found
    }
}

impl<D: Driver> Driver for CheckedDriver<D> {
    fn properties(&self) -> Properties {
        self.inner.properties()
    }

    fn memory_info(&self) -> DriverResult<MemoryInfo> {
        self.inner.memory_info()
    }

    fn alloc(&self, bytes: u64) -> DriverResult<u64> {
        let address = self.inner.alloc(bytes)?;
        self.state().plain.insert(address, bytes);
        Ok(address)
    }

    fn free(&self, address: u64) -> DriverResult<()> {
        let launched = {
            let state = self.state();
            let known = state.plain.contains_key(&address);
            assert!(known, "free of {address:#x}, which is not allocated");
            state.launched()
        };
        self.inner.free(address)?;
        let mut state = self.state();
        state.plain.remove(&address);
        // `free` waits for the whole device.
        state.all_done(&launched);
        Ok(())
    }

    fn reserve(&self, bytes: u64) -> DriverResult<u64> {
        let address = self.inner.reserve(bytes)?;
        self.state().ranges.insert(address, bytes);
        Ok(address)
    }

    fn unreserve(&self, address: u64, bytes: u64) -> DriverResult<()> {
        {
            let state = self.state();
            let known = state.ranges.get(&address);
            assert_eq!(known, Some(&bytes), "unreserve of {address:#x}: not a reserved range");
            let mapped = state.mapped.range(address..address + bytes).next();
            assert!(mapped.is_none(), "unreserve of a range with a page in it: {mapped:?}");
        }
        self.inner.unreserve(address, bytes)?;
        self.state().ranges.remove(&address);
        Ok(())
    }

    fn create(&self, bytes: u64) -> DriverResult<PageHandle> {
        self.make_page(bytes, D::create)
    }

    fn create_host(&self, bytes: u64) -> DriverResult<PageHandle> {
        self.make_page(bytes, D::create_host)
    }

    fn release(&self, page: PageHandle) -> DriverResult<()> {
        {
            let state = self.state();
            let (_, addresses) = state.pages.get(&page).expect("release of an unknown page");
            assert!(addresses.is_empty(), "release of {page:?}, still mapped at {addresses:x?}");
            let place = Place::Page(page);
            state.assert_done("a page is released", |work| work.memory.place == place);
        }
        self.inner.release(page)?;
        self.state().pages.remove(&page);
        Ok(())
    }

    fn map(&self, address: u64, bytes: u64, page: PageHandle) -> DriverResult<()> {
        {
            let state = self.state();
            let (size, _) = state.pages.get(&page).expect("map of an unknown page");
            assert_eq!(*size, bytes, "a page is mapped whole");
            let range = state.ranges.range(..=address).next_back();
            assert!(
                range.is_some_and(|(&start, &size)| address + bytes <= start + size),
                "map at {address:#x}+{bytes}, outside every reserved range"
            );
            let below = state.mapped.range(..address + bytes).next_back();
            assert!(
                below.is_none_or(|(&start, mapping)| start + mapping.bytes <= address),
                "map at {address:#x}+{bytes} over a mapped range: {below:?}"
            );
        }
        self.inner.map(address, bytes, page)?;
        let mut state = self.state();
        state.mapped.insert(address, Mapping { bytes, page, usable: false });
        if let Some((_, addresses)) = state.pages.get_mut(&page) {
            addresses.insert(address);
        }
        Ok(())
    }

    fn set_access(&self, address: u64, bytes: u64) -> DriverResult<()> {
        let mappings = self.state().mappings_of(address, bytes, "set_access");
        self.inner.set_access(address, bytes)?;
        let mut state = self.state();
        for mapping in mappings {
            if let Some(mapping) = state.mapped.get_mut(&mapping) {
                mapping.usable = true;
            }
        }
        Ok(())
    }

    fn unmap(&self, address: u64, bytes: u64) -> DriverResult<()> {
        let mappings = {
            let state = self.state();
            let mappings = state.mappings_of(address, bytes, "unmap");
            for &start in &mappings {
                let place = Place::Page(state.mapped[&start].page);
                state.assert_done("a page is unmapped", |work| {
                    work.mapping == start && work.memory.place == place
                });
            }
            mappings
        };
        self.inner.unmap(address, bytes)?;
        let mut state = self.state();
        for start in mappings {
            if let Some(mapping) = state.mapped.remove(&start)
                && let Some((_, addresses)) = state.pages.get_mut(&mapping.page)
            {
                addresses.remove(&start);
            }
        }
        Ok(())
    }

    fn event_create(&self) -> DriverResult<EventId> {
        let event = self.inner.event_create()?;
        self.state().events.insert(event, None);
        Ok(event)
    }

    fn event_destroy(&self, event: EventId) -> DriverResult<()> {
        assert!(self.state().events.contains_key(&event), "destroy of an unknown event");
        self.inner.event_destroy(event)?;
        self.state().events.remove(&event);
        Ok(())
    }

    fn event_record(&self, event: EventId, stream: StreamId) -> DriverResult<()> {
        let launched = {
            let mut state = self.state();
            assert!(state.events.contains_key(&event), "record of an unknown event");
            state.assert_not_destroyed(stream, "an event is recorded");
            let captured = state.captured.contains(&stream);
            assert!(!captured, "an event is recorded on {stream:?}, which is being captured");
            state.streams.entry(stream).or_default().launched
        };
        self.inner.event_record(event, stream)?;
        self.state().events.insert(event, Some((stream, launched)));
        Ok(())
    }

    fn event_query(&self, event: EventId) -> DriverResult<bool> {
        let marked = self.state().marked(event);
        let done = self.inner.event_query(event)?;
        if done {
            self.state().mark_done(marked);
        }
        Ok(done)
    }

    fn event_synchronize(&self, event: EventId) -> DriverResult<()> {
        let marked = self.state().marked(event);
        self.inner.event_synchronize(event)?;
        self.state().mark_done(marked);
        Ok(())
    }

    fn stream_synchronize(&self, stream: StreamId) -> DriverResult<()> {
        // A wait for the whole device: the stream may have been destroyed.
        let launched = self.state().launched();
        self.inner.stream_synchronize(stream)?;
        self.state().all_done(&launched);
        Ok(())
    }

    fn capture(&self, stream: StreamId) -> DriverResult<Option<Capture>> {
        self.state().assert_not_destroyed(stream, "a capture is asked for");
        self.inner.capture(stream)
    }

    fn dependencies(&self, node: NodeId) -> DriverResult<Vec<NodeId>> {
        self.inner.dependencies(node)
    }
}
