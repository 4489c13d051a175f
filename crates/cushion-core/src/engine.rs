//! The front door: one engine per device.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, TryLockError};

use rustc_hash::FxHashMap;

use crate::block::{BlockId, BlockTable};
use crate::callbacks::Callbacks;
use crate::check::Violation;
use crate::climb::Waited;
use crate::clock::{Bell, Clock, VirtualClock};
use crate::driver::{Driver, DriverError, Properties, StreamId};
use crate::error::{AddressError, AllocError};
use crate::future::AllocFuture;
use crate::history::{Action, Entry, History, Tag};
use crate::homes::Homes;
use crate::ladder::Ladder;
use crate::layout::Layout;
use crate::locked::{Asked, Attempt, Locked, State};
use crate::looked_at::{LookedAt, Looks};
use crate::options::Options;
use crate::owner::{self, Owner};
use crate::pages::PageTable;
use crate::pending::Pending;
use crate::policy::Policy;
use crate::pool::{PoolId, PoolTable};
use crate::proof::{LastingStreams, Moments};
use crate::queue::Queue;
use crate::receipt::Receipts;
use crate::restore::{HeldSegment, RestoreError};
use crate::segment::{Backing, SegmentTable};
use crate::settings::limit_of;
use crate::size::MIN_BLOCK;
use crate::snapshot::Snapshot;
use crate::stats::{Counters, Lanes, Stats};
use crate::stitch::Stitches;
use crate::tags::ToldLater;

/// A caching allocator over one device. `Send` and `Sync`; every method may be called from any
/// thread.
///
/// ```
/// use cushion_core::{Engine, SimConfig, SimDriver, StreamId};
///
/// let gpu = Engine::new(SimDriver::new(SimConfig::with_capacity(1 << 30)));
/// let address = gpu.alloc(3 << 20, StreamId(0))?;
/// assert_eq!(gpu.stats().allocated_bytes.all.current, 3 << 20);
/// gpu.free(address)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Engine<D: Driver> {
    pub(crate) driver: D,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) device: Properties,
    pub(crate) counters: Counters,
    lanes: Lanes,
    state: Mutex<State>,
    /// How often the lock above was taken.
    times_locked: AtomicU64,
    /// Read by those who let the driver wait without the lock above, which a capture forbids; written by
    /// those after whom a capture may begin. Taken before the lock above.
    pub(crate) captures: RwLock<()>,
    pub(crate) callbacks: Callbacks,
    pub(crate) receipts: Receipts,
    pub(crate) waited: Waited,
    pub(crate) seed: u64,
}

/// What there is of pages and second addresses at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PageFigures {
    /// Physical pages.
    pub pages: usize,
    /// Stitched ranges.
    pub ranges: usize,
    /// The addresses of all stitched ranges.
    pub addresses: u64,
    /// Bytes that could be given back as they lie.
    pub free: u64,
}

/// Wakes those who wait. No lock may be held.
pub(crate) fn ring(bells: impl IntoIterator<Item = Arc<Bell>>) {
    for bell in bells {
        // What a future's waker panics with is not the business of who gave memory back.
        let _ = catch_unwind(AssertUnwindSafe(|| bell.ring()));
    }
}

/// How to build an [`Engine`] that is not the default one.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// The options, among them the policy.
    pub options: Options,
    /// The ladder.
    pub ladder: Ladder,
    /// The clock of history, budgets and backoff. By default one of virtual time, on which nothing waits: for simulated
    /// devices only.
    pub clock: Arc<dyn Clock>,
    /// How long requests have waited so far; engines of one process share it.
    pub waited: Waited,
    /// Where the chance in the pauses of those who wait begins: another one for each process, so that they do
    /// not ask in step.
    pub seed: u64,
}

impl Default for EngineConfig {
    fn default() -> Self {
        let clock = Arc::new(VirtualClock::new());
        let waited = Waited::default();
        Self { options: Options::default(), ladder: Ladder::Graceful, clock, waited, seed: 0 }
    }
}

impl<D: Driver> Engine<D> {
    /// An engine with default options, on virtual time: what would wait returns at once. For a real device give
    /// [`with_config`](Self::with_config) a clock of real time; the crate `cushion` does.
    pub fn new(driver: D) -> Self {
        Self::with_config(driver, EngineConfig::default())
    }

    /// An engine as configured. The device is not touched.
    pub fn with_config(driver: D, config: EngineConfig) -> Self {
        let EngineConfig { options, ladder, clock, waited, seed } = config;
        let mut device = driver.properties();
        // Without pages there is nothing that it could be of, and nobody divides by it.
        device.granularity = device.granularity.max(MIN_BLOCK);
        let counters = Counters::default();
        counters.max_split_size.set(options.max_split_size.unwrap_or(u64::MAX));
        let limit = limit_of(options.per_process_memory_fraction, device.total);
        let state = State {
            policy: device.possible(Policy::of(&options)),
            options,
            ladder,
            blocks: BlockTable::default(),
            segments: SegmentTable::default(),
            pools: PoolTable::new(),
            pages: PageTable::default(),
            stitches: Stitches::default(),
            homes: Homes::default(),
            layout: Layout::default(),
            live: FxHashMap::default(),
            moments: Moments::default(),
            pending: Pending::default(),
            recording: Vec::new(),
            limit,
            history: History::default(),
            told_later: ToldLater::default(),
            pages_counted: [0; 3],
            leaving: 0,
            left_ranges: Vec::new(),
            queue: Queue::default(),
            lasting: LastingStreams::default(),
            leader: Owner::NOBODY,
            injection: None,
            attention: false,
            looks: Looks::default(),
        };
        Self {
            driver,
            clock,
            device,
            counters,
            lanes: Lanes::default(),
            state: Mutex::new(state),
            times_locked: AtomicU64::new(0),
            captures: RwLock::new(()),
            callbacks: Callbacks::default(),
            receipts: Receipts::default(),
            waited,
            seed,
        }
    }

    /// Runs `f` with the lock held. If another thread panicked while it held the lock, what it was
    /// doing may be half done; later calls go on all the same, rather than lose every allocation.
    pub(crate) fn locked<T>(&self, f: impl FnOnce(Locked<'_, D>) -> T) -> T {
        let mut state = self.lock();
        f(Locked {
            state: &mut state,
            driver: &self.driver,
            clock: &*self.clock,
            counters: &self.counters,
            lanes: &self.lanes,
            device: self.device,
        })
    }

    /// The lock. It is kept for less time than it takes to put a thread to sleep and to wake it, unless
    /// the driver is being asked: so look again for a moment before waiting.
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        const LOOKS: u32 = 60;
        const PAUSES: u32 = 10;
        let look = |_| match self.state.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => {
                (0..PAUSES).for_each(|_| std::hint::spin_loop());
                None
            }
        };
        let guard = (0..LOOKS).find_map(look);
        let guard =
            guard.unwrap_or_else(|| self.state.lock().unwrap_or_else(PoisonError::into_inner));
        // Under the lock nobody else counts.
        self.times_locked.store(self.times_locked.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        guard
    }

    /// How often the lock was taken so far: for tests of what is done in one hold. Takes no lock.
    #[doc(hidden)]
    pub fn times_locked(&self) -> u64 {
        self.times_locked.load(Ordering::Relaxed)
    }

    /// Until this is dropped, allocations do not begin to go to a private pool, so that no capture begins.
    pub(crate) fn no_capture_begins(&self) -> RwLockReadGuard<'_, ()> {
        self.captures.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// As [`no_capture_begins`](Self::no_capture_begins), unless one may be under way.
    pub(crate) fn outside_captures(&self) -> Option<RwLockReadGuard<'_, ()>> {
        let guard = self.no_capture_begins();
        (!self.locked(|engine| engine.is_recording())).then_some(guard)
    }

    /// Changes something that may help those who wait for memory, and wakes them.
    pub(crate) fn changing<T>(&self, f: impl FnOnce(Locked<'_, D>) -> T) -> T {
        let result = self.locked(f);
        self.wake();
        result
    }

    // ---- memory ----

    /// Memory for `bytes` bytes, ready to use on `stream`. Zero bytes give the null address, which
    /// need not be freed.
    pub fn alloc(&self, bytes: u64, stream: StreamId) -> Result<u64, AllocError> {
        self.alloc_for(bytes, stream, Tag::NONE)
    }

    /// As [`alloc`](Self::alloc), with a tag for history and snapshots.
    pub fn alloc_for(&self, bytes: u64, stream: StreamId, tag: Tag) -> Result<u64, AllocError> {
        if bytes == 0 {
            return Ok(0);
        }
        let asked = Asked::by_thread(bytes, stream, tag);
        match self.locked(|mut engine| engine.alloc(&asked))? {
            Attempt::Served(address) => Ok(address),
            attempt => self.climb(&asked, &attempt),
        }
    }

    /// As [`alloc_for`](Self::alloc_for), but `None` where it would have to wait for other work or give
    /// memory back first: for a caller that holds something others need meanwhile.
    pub fn alloc_at_once_for(
        &self,
        bytes: u64,
        stream: StreamId,
        tag: Tag,
    ) -> Result<Option<u64>, AllocError> {
        if bytes == 0 {
            return Ok(Some(0));
        }
        let asked = Asked::by_thread(bytes, stream, tag);
        self.locked(|mut engine| engine.alloc_at_once(&asked))
    }

    /// Memory as a future of any runtime. It completes when memory is there, in the order of asking, or
    /// with an error once its budget is used up. Dropped before that, it gives its place back.
    pub fn alloc_async(&self, bytes: u64, stream: StreamId) -> AllocFuture<'_, D> {
        self.alloc_async_for(bytes, stream, Tag::NONE)
    }

    /// As [`alloc_async`](Self::alloc_async), with a tag for history and snapshots.
    pub fn alloc_async_for(&self, bytes: u64, stream: StreamId, tag: Tag) -> AllocFuture<'_, D> {
        AllocFuture::new(self, bytes, stream, tag)
    }

    /// Prepares memory ahead: afterwards a request of `bytes` bytes on `stream` needs nothing from the driver. Climbs
    /// the ladder as a request does.
    pub fn prefetch(&self, bytes: u64, stream: StreamId) -> Result<(), AllocError> {
        if bytes == 0 || self.would_hit(bytes, stream) {
            return Ok(());
        }
        let asked = Asked { ahead: true, ..Asked::by_thread(bytes, stream, Tag::NONE) };
        let address = match self.locked(|mut engine| engine.alloc(&asked))? {
            Attempt::Served(address) => address,
            attempt => self.climb(&asked, &attempt)?,
        };
        // A free whose event could not be recorded is completed later.
        let _ = self.free(address);
        Ok(())
    }

    /// Gives back what [`alloc`](Self::alloc) gave. The memory is reused on its own stream at once,
    /// and not before every stream noted by [`record_stream`](Self::record_stream) is done with it.
    pub fn free(&self, address: u64) -> Result<(), AddressError> {
        self.free_for(address, Tag::NONE)
    }

    /// As [`free`](Self::free), with a tag for history.
    pub fn free_for(&self, address: u64, tag: Tag) -> Result<(), AddressError> {
        if address == 0 {
            return Ok(());
        }
        let by = owner::current();
        let (freed, waits) = self.locked(|mut engine| {
            let freed = engine.free(address, by, tag);
            (freed, engine.state.attention)
        });
        if waits {
            self.wake();
        }
        freed
    }

    /// Something was given back: wakes those who wait for it.
    #[cold]
    pub(crate) fn wake(&self) {
        ring(self.locked(|engine| engine.state.queue.changed()));
    }

    /// Notes that work on `stream` uses the allocation at `address`.
    pub fn record_stream(&self, address: u64, stream: StreamId) -> Result<(), AddressError> {
        self.locked(|mut engine| engine.record_stream(address, stream))
    }

    /// The size of the block behind a live allocation, and what was asked for.
    #[must_use]
    pub fn size_of(&self, address: u64) -> Option<(u64, u64)> {
        let state = self.lock();
        let block = &state.blocks[*state.live.get(&address)?];
        Some((block.size, block.requested))
    }

    /// The stream that a live allocation is for.
    #[must_use]
    pub fn stream_of(&self, address: u64) -> Option<StreamId> {
        let state = self.lock();
        state.live.get(&address).map(|&id| state.blocks[id].stream)
    }

    /// Whether a live allocation is in host memory.
    #[must_use]
    pub fn is_spilled(&self, address: u64) -> bool {
        let state = self.lock();
        state.live.get(&address).is_some_and(|&id| state.blocks[id].pool == PoolTable::SPILL)
    }

    /// The tag given to a live allocation.
    #[must_use]
    pub fn tag_of(&self, address: u64) -> Option<Tag> {
        let state = self.lock();
        state.live.get(&address).map(|&id| state.blocks[id].tag)
    }

    /// Where the memory that a live allocation was cut from begins, and its size: a plain segment, or
    /// the run of mapped addresses around it.
    #[must_use]
    pub fn base_of(&self, address: u64) -> Option<(u64, u64)> {
        let state = self.lock();
        let blocks = &state.blocks;
        let mapped = |id: &BlockId| blocks[*id].is_mapped();
        let mut first = *state.live.get(&address)?;
        let segment = &state.segments[blocks[first].segment];
        if matches!(segment.backing, Backing::Stitched(_)) {
            // Pages may have left the range, but for those behind the allocation.
            let around = |at| state.pages.page_around(at).filter(|&(at, ..)| at >= segment.address);
            let (mut start, mut end) = (address, address);
            while let Some((before, ..)) = start.checked_sub(1).and_then(around) {
                start = before;
            }
            while end < segment.end()
                && let Some((page, bytes, _)) = around(end)
            {
                end = page + bytes;
            }
            return Some((start, end - start));
        }
        while let Some(before) = blocks[first].prev.filter(mapped) {
            first = before;
        }
        let run = std::iter::successors(Some(first), |&id| blocks[id].next.filter(mapped));
        Some((blocks[first].address, run.map(|id| blocks[id].size).sum()))
    }

    /// Whether an address lies in a segment of this engine's, live or not.
    #[must_use]
    pub fn holds(&self, address: u64) -> bool {
        let state = self.lock();
        state
            .segments
            .iter()
            .any(|(_, segment)| (segment.address..segment.end()).contains(&address))
    }

    /// Whether a free block would serve this request as things stand: no driver call, no wait.
    #[must_use]
    pub fn would_hit(&self, bytes: u64, stream: StreamId) -> bool {
        self.locked(|engine| engine.would_hit(bytes, stream))
    }

    /// Frees what other streams are done with. Allocations do this themselves.
    pub fn process_events(&self) -> Result<(), DriverError> {
        let completed = self.complete_frees();
        self.wake();
        completed.map(drop)
    }

    /// Completes the frees that other streams are done with, all of them, some at a time; returns their bytes, or
    /// `None` while a capture may be under way.
    pub(crate) fn complete_frees(&self) -> Result<Option<u64>, DriverError> {
        let mut won = 0;
        for _ in 0..self.locked(|engine| engine.state.pending.rounds()).max(1) {
            match self.locked(|mut engine| engine.complete_frees())? {
                Some(more) => won += more,
                None => return Ok(None),
            }
        }
        Ok(Some(won))
    }

    /// Gives everything cached back to the driver; waits for pending frees first.
    pub fn empty_cache(&self) -> Result<(), DriverError> {
        self.empty_cache_of(PoolId::DEFAULT)
    }

    /// As [`empty_cache`](Self::empty_cache), for one private pool that nobody uses any more.
    pub fn empty_cache_of(&self, pool: PoolId) -> Result<(), DriverError> {
        self.give_back_cached(pool, Tag::NONE)
    }

    /// Puts back what an allocator held at some moment: its segments, the live blocks in them, and
    /// free memory between. `placing` is called before each segment that takes addresses from the
    /// driver, with where it was; returned is where each is now, or why it could not be put back.
    pub fn restore(
        &self,
        segments: &[HeldSegment],
        mut placing: impl FnMut(&HeldSegment),
    ) -> Vec<Result<u64, RestoreError>> {
        let mut ranges_at: FxHashMap<u64, u64> = FxHashMap::default();
        let ranges = self.locked(|engine| engine.held_ranges(segments));
        let mut put_back = |held: &HeldSegment| {
            let range_at = held.range.and_then(|range| ranges_at.get(&range).copied());
            if range_at.is_none() {
                placing(held);
            }
            let range = held.range.and_then(|range| ranges.get(&range).copied());
            let range = range.unwrap_or_default();
            let base = self.locked(|mut engine| engine.restore(held, range, range_at))?;
            if let Some(range) = held.range {
                ranges_at.insert(range, base - (held.address - range));
            }
            Ok(base)
        };
        segments.iter().map(&mut put_back).collect()
    }

    // ---- figures ----

    /// The figures now. Does not take the engine's lock; the list of lanes has one of its own, held for a moment.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.counters.read(&self.lanes)
    }

    /// Live bytes, as asked for, and reserved bytes now. Takes no lock.
    #[must_use]
    pub fn live_and_reserved(&self) -> (u64, u64) {
        (self.counters.requested_bytes.current(), self.counters.reserved_bytes.current())
    }

    /// How often the driver was asked for memory, for a second address, or to take either back. Takes no lock.
    #[must_use]
    pub fn driver_changes(&self) -> u64 {
        self.counters.num_device_alloc.read() + self.counters.num_device_free.read()
    }

    /// What there is of pages and second addresses now.
    #[must_use]
    pub fn page_figures(&self) -> PageFigures {
        self.locked(|engine| {
            let (ranges, addresses) = engine.state.stitches.size();
            let free = engine.reserved().saturating_sub(engine.stuck());
            PageFigures { pages: engine.state.pages.iter().count(), ranges, addresses, free }
        })
    }

    /// How much was looked at so far with the lock held, for tests.
    #[doc(hidden)]
    #[must_use]
    pub fn looked_at(&self) -> LookedAt {
        self.lock().looks.so_far()
    }

    /// Peaks start again from now.
    pub fn reset_peak_stats(&self) {
        let _lock = self.lock();
        self.counters.reset_peak();
    }

    /// Totals start again from zero.
    pub fn reset_accumulated_stats(&self) {
        let mut state = self.lock();
        state.homes.freed_before += self.counters.active_bytes.freed();
        self.counters.reset_accumulated();
    }

    /// Keeps the last `entries` events from now on; zero turns history off. Forgets what was kept.
    pub fn record_history(&self, entries: usize) {
        self.lock().history.restart(entries);
    }

    /// Keeps the last `entries` events from now on, those kept so far among them.
    pub fn resize_history(&self, entries: usize) {
        self.lock().history.resize(entries);
    }

    /// Leaves these actions out of the history from now on, until it is told to start again.
    pub fn skip_in_history(&self, actions: &[Action]) {
        self.lock().history.skip(actions);
    }

    /// The events kept, oldest first, and how many were forgotten before them.
    #[must_use]
    pub fn history(&self) -> (Vec<Entry>, u64) {
        self.lock().history.read()
    }

    /// All segments and blocks now. Each page counts once.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        self.locked(|mut engine| engine.snapshot())
    }

    /// A snapshot and the events kept before it, as of one moment. That it was taken is in the next one's
    /// events, as with PyTorch.
    #[must_use]
    pub fn snapshot_and_history(&self) -> (Snapshot, Vec<Entry>) {
        self.locked(|mut engine| {
            let history = engine.state.history.read().0;
            (engine.snapshot(), history)
        })
    }

    /// Checks every structure against every other.
    pub fn check_invariants(&self) -> Result<(), Violation> {
        self.locked(|engine| engine.check_invariants())
    }

    /// The driver underneath.
    pub fn driver(&self) -> &D {
        &self.driver
    }
}

impl<D: Driver> Drop for Engine<D> {
    /// Gives back what is cached, of private pools too, and the events nobody waits for. Live allocations stay: their
    /// owners may still use them.
    fn drop(&mut self) {
        // A second panic during the first would abort the program.
        if std::thread::panicking() {
            return;
        }
        {
            let mut state = self.lock();
            let recording = std::mem::take(&mut state.recording);
            let released = state.moments.next();
            state.pools.private.values_mut().for_each(|pool| pool.release_all(released));
            drop(state);
            // Filters are the caller's: they go with no lock held.
            drop(recording);
        }
        // Nobody is left to tell of a failure, and nothing depends on it.
        let _ = self.empty_cache();
        let mut state = self.lock();
        let mut events = state.pending.take_idle();
        events.extend(state.stitches.take_events());
        drop(state);
        for event in events {
            let _ = self.driver.event_destroy(event);
        }
    }
}
