//! The front door: one engine per device.

mod configure;
mod future;
mod inspect;
mod kept;
mod pools;
mod restore;
mod shortages;
mod snapshot;
mod tags;

pub use self::future::AllocFuture;
pub use self::inspect::PageFigures;
pub use self::kept::Kept;
pub use self::restore::{HeldBlock, HeldSegment, RestoreError};
pub use self::snapshot::{BlockFigures, BlockUse, SegmentFigures, Snapshot};

use std::sync::Arc;

use self::configure::limit_of;
use crate::base::clock::{Clock, VirtualClock};
use crate::base::names::{PoolId, Tag};
use crate::base::size::MIN_BLOCK;
use crate::core::Shared;
use crate::core::attempt::{Attempt, Effort};
use crate::demand::asked::Asked;
use crate::demand::owner;
use crate::driver::{Driver, DriverError, DriverResult, StreamId};
use crate::options::ladder::Ladder;
use crate::options::{Options, Policy};
use crate::outcome::error::{AddressError, AllocError};
use crate::policy::possible;
use crate::shortage::callbacks::Callbacks;
use crate::shortage::climb::{Climb, Waited};
use crate::shortage::receipts::Receipts;
use crate::shortage::{Climber, Desk};

/// A caching allocator for one device. It is `Send` and `Sync`; every method may be called from any
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
    shared: Shared<D>,
    desk: Desk,
}

/// The configuration of an [`Engine`].
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// The options, including the policy.
    pub options: Options,
    /// The ladder.
    pub ladder: Ladder,
    /// The clock of history, budgets and backoff. The default is virtual time, on which waiting
    /// returns at once: for simulated devices only.
    pub clock: Arc<dyn Clock>,
    /// How long requests have waited so far. Engines of one process share it.
    pub waited: Waited,
    /// The seed of the random part of pauses. Each process has a different one, so that processes
    /// do not retry in step.
    pub seed: u64,
}

impl Default for EngineConfig {
    fn default() -> Self {
        let clock = Arc::new(VirtualClock::new());
        let waited = Waited::default();
        Self { options: Options::default(), ladder: Ladder::Graceful, clock, waited, seed: 0 }
    }
}

/// How far a request got.
#[derive(Debug)]
enum Served {
    At(u64),
    /// It cannot be served at once.
    NotAtOnce,
    /// It goes on with [`Climber::advance`].
    Later(Box<Climb>),
}

impl<D: Driver> Engine<D> {
    /// Creates an engine with default options, on virtual time, on which waiting returns at once.
    /// For a real device, give [`with_config`](Self::with_config) a real clock, as the crate
    /// `cushion` does.
    pub fn new(driver: D) -> Self {
        Self::with_config(driver, EngineConfig::default())
    }

    /// Creates an engine. Does not touch the device.
    pub fn with_config(driver: D, config: EngineConfig) -> Self {
        let EngineConfig { options, ladder, clock, waited, seed } = config;
        let mut device = driver.properties();
        // A device without pages reports no granularity. Later code divides by it.
        device.granularity = device.granularity.max(MIN_BLOCK);
        let limit = limit_of(options.per_process_memory_fraction, device.total);
        let policy = possible(&device, Policy::of(&options));
        let shared = Shared::new(driver, device, clock, options, policy, ladder, limit);
        let (callbacks, receipts) = (Callbacks::default(), Receipts::default());
        Self { shared, desk: Desk { callbacks, receipts, waited, seed } }
    }

    /// Serves a request: the one way in. A thread that waits, a thread that takes what can be had
    /// at once, and a future differ only in their effort.
    fn serve(&self, asked: &Asked, effort: Effort) -> Result<Served, AllocError> {
        let attempt = self.shared.locked(|mut core| core.serve(asked, effort))?;
        if let Attempt::Served { address, .. } = attempt {
            return Ok(Served::At(address));
        }
        match effort {
            Effort::AtOnce => Ok(Served::NotAtOnce),
            Effort::Wait => self.climber().climb(asked, &attempt).map(Served::At),
            Effort::Poll => Ok(Served::Later(Box::new(self.climber().begin(asked, &attempt)))),
        }
    }

    fn climber(&self) -> Climber<'_, D> {
        Climber { shared: &self.shared, desk: &self.desk }
    }

    // ---- allocating ----

    /// Allocates `bytes` bytes, ready to use on `stream`. Zero bytes give the null address, which
    /// need not be freed.
    pub fn alloc(&self, bytes: u64, stream: StreamId) -> Result<u64, AllocError> {
        self.alloc_for(bytes, stream, Tag::NONE)
    }

    /// Like [`alloc`](Self::alloc), with a tag for history and snapshots.
    pub fn alloc_for(&self, bytes: u64, stream: StreamId, tag: Tag) -> Result<u64, AllocError> {
        self.wait_for(&Asked::by_thread(bytes, stream, tag))
    }

    /// Like [`alloc_for`](Self::alloc_for), but returns `None` if the request would have to wait or
    /// give memory back first: for a caller that holds a lock which other threads need.
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
        Ok(match self.serve(&asked, Effort::AtOnce)? {
            Served::At(address) => Some(address),
            Served::NotAtOnce | Served::Later(_) => None,
        })
    }

    /// Allocates as a future of any runtime. It completes when its turn has come and memory is
    /// available, or with an error once its budget is used up. If it is dropped before that, it
    /// leaves the queue.
    pub fn alloc_async(&self, bytes: u64, stream: StreamId) -> AllocFuture<'_, D> {
        self.alloc_async_for(bytes, stream, Tag::NONE)
    }

    /// Like [`alloc_async`](Self::alloc_async), with a tag for history and snapshots.
    pub fn alloc_async_for(&self, bytes: u64, stream: StreamId, tag: Tag) -> AllocFuture<'_, D> {
        AllocFuture::new(self, Asked::by_future(bytes, stream, tag))
    }

    /// Obtains memory in advance: afterwards a request of `bytes` bytes on `stream` needs nothing
    /// from the driver. Climbs the ladder like a request.
    pub fn prefetch(&self, bytes: u64, stream: StreamId) -> Result<(), AllocError> {
        if bytes == 0 || self.would_hit(bytes, stream) {
            return Ok(());
        }
        let asked = Asked { ahead: true, ..Asked::by_thread(bytes, stream, Tag::NONE) };
        let address = self.wait_for(&asked)?;
        // A free whose event could not be recorded is completed later.
        let _ = self.free(address);
        Ok(())
    }

    /// Serves a request on the calling thread, which waits if necessary.
    fn wait_for(&self, asked: &Asked) -> Result<u64, AllocError> {
        if asked.bytes == 0 {
            return Ok(0);
        }
        match self.serve(asked, Effort::Wait)? {
            Served::At(address) => Ok(address),
            Served::NotAtOnce | Served::Later(_) => unreachable!("a thread waits until the end"),
        }
    }

    /// Returns whether a free block would serve this request now. Makes no driver call and does not
    /// wait.
    #[must_use]
    pub fn would_hit(&self, bytes: u64, stream: StreamId) -> bool {
        self.shared.locked(|core| core.would_hit(bytes, stream))
    }

    // ---- freeing ----

    /// Frees an allocation. Its memory can be reused at once on its own stream, and on other
    /// streams after every stream noted by [`record_stream`](Self::record_stream) is done with it.
    pub fn free(&self, address: u64) -> Result<(), AddressError> {
        self.free_for(address, Tag::NONE)
    }

    /// Like [`free`](Self::free), with a tag for history.
    pub fn free_for(&self, address: u64, tag: Tag) -> Result<(), AddressError> {
        if address == 0 {
            return Ok(());
        }
        let by = owner::current();
        let (freed, waits) = self.shared.locked(|mut core| {
            let freed = core.free(address, by, tag);
            (freed, core.demand.needs_attention())
        });
        if waits {
            self.shared.wake();
        }
        freed
    }

    /// Notes that work on `stream` uses the allocation at `address`.
    pub fn record_stream(&self, address: u64, stream: StreamId) -> Result<(), AddressError> {
        self.shared.locked(|mut core| core.record_stream(address, stream))
    }

    /// Completes frees that other streams are done with. Allocations do this, too.
    pub fn process_events(&self) -> Result<(), DriverError> {
        let completed = self.shared.complete_frees();
        self.shared.wake();
        completed.map(drop)
    }

    // ---- giving back ----

    /// Gives everything cached back to the driver. Waits for pending frees first.
    pub fn empty_cache(&self) -> Result<(), DriverError> {
        self.empty_cache_of(PoolId::DEFAULT)
    }

    /// Like [`empty_cache`](Self::empty_cache), for one private pool that is no longer in use.
    pub fn empty_cache_of(&self, pool: PoolId) -> Result<(), DriverError> {
        self.shared.give_back_cached(pool, Tag::NONE)
    }

    /// Looks for memory that has not been needed for a while, as the option `trim_ms` says, and
    /// gives back memory found at an earlier look that the device no longer uses. Returns the bytes
    /// given back. Call it every two seconds or so. Never waits.
    pub fn trim(&self) -> DriverResult<u64> {
        let now = self.shared.clock.now();
        self.shared.locked(|mut core| {
            let mut polled = Ok(());
            for rules in core.policies.all_mut() {
                polled = polled.and(rules.poll_detached(&mut core.mem));
            }
            polled
        })?;
        let mut given_back = 0;
        while let Some(bytes) = self.shared.locked(|mut core| {
            let mut released = None;
            for rules in core.policies.all_mut() {
                released = released.or_else(|| rules.release_detached(&mut core.mem));
            }
            if released.is_some() {
                core.close_empty_pools();
            }
            released
        }) {
            given_back += bytes;
        }
        if given_back > 0 {
            self.shared.wake();
        }
        self.shared.locked(|mut core| {
            core.shrink();
            let may_take = core.demand.queue.is_idle();
            let mut looked = Ok(());
            for rules in core.policies.all_mut() {
                looked = looked.and(rules.trim(&mut core.mem, now, may_take));
            }
            looked
        })?;
        Ok(given_back)
    }

    /// Returns the driver.
    pub fn driver(&self) -> &D {
        &self.shared.driver
    }
}

impl<D: Driver> Drop for Engine<D> {
    /// Gives back cached memory, including that of private pools, and destroys unused events. Live
    /// allocations stay: their owners may still use them.
    fn drop(&mut self) {
        // A panic during a panic would abort the program.
        if std::thread::panicking() {
            return;
        }
        let captures = self.shared.locked(|core| {
            let released = core.mem.streams.next_moment();
            core.mem.heap.release_all_private(released);
            core.mem.streams.end_all_recording()
        });
        // The filters are dropped with no lock held: they are the caller's code.
        drop(captures);
        // A failure cannot be reported here, and nothing depends on it.
        let _ = self.empty_cache();
        let events = self.shared.locked(|core| {
            let mut events = core.mem.streams.take_idle_events();
            events.extend(core.policies.all_mut().flat_map(|rules| rules.take_events()));
            events
        });
        for event in events {
            let _ = self.shared.driver.event_destroy(event);
        }
    }
}
