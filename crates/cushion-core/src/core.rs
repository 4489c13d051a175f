//! The core: everything that the engine's lock protects, and the lock.
//!
//! [`Shared`] is shared by all threads: the driver, the clock, the figures and the lock. [`Locked`]
//! is the core while the lock is held; `serve.rs` serves requests with it, and `free.rs` frees.

pub(crate) mod attempt;
mod check;
mod free;
pub(crate) mod serve;
pub(crate) mod told;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, TryLockError};

use self::told::ToldLater;
use crate::backing::Backing;
use crate::base::clock::{Bell, Clock};
use crate::base::looks::Looks;
use crate::demand::Demand;
use crate::driver::{Driver, DriverResult, Properties};
use crate::heap::Heap;
use crate::ledger::Ledger;
use crate::ledger::history::History;
use crate::ledger::lanes::Lanes;
use crate::ledger::stats::{Counters, Stats};
use crate::memory::Mem;
use crate::options::ladder::Ladder;
use crate::options::{Options, Policy};
use crate::policy::Policies;
use crate::streams::Streams;
use crate::streams::proof::Proof;

/// Everything that the lock protects.
#[derive(Debug)]
pub(crate) struct Core<D> {
    pub(crate) heap: Heap,
    pub(crate) backing: Backing,
    pub(crate) streams: Streams,
    pub(crate) policies: Policies<D>,
    pub(crate) demand: Demand,
    pub(crate) history: History,
    pub(crate) options: Options,
    pub(crate) setup: Setup,
    looks: Looks,
}

/// State that hits and frees do not read.
#[derive(Debug)]
pub(crate) struct Setup {
    /// The policy in force.
    pub(crate) policy: Policy,
    pub(crate) ladder: Ladder,
    /// Tags of unfinished receipts.
    pub(crate) told_later: ToldLater,
}

/// The core while the lock is held.
#[derive(Debug)]
pub(crate) struct Locked<'lock, D> {
    pub(crate) mem: Mem<'lock, D>,
    pub(crate) policies: &'lock mut Policies<D>,
    pub(crate) demand: &'lock mut Demand,
    pub(crate) setup: &'lock mut Setup,
}

/// The state that all threads share.
#[derive(Debug)]
pub(crate) struct Shared<D> {
    pub(crate) driver: D,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) device: Properties,
    pub(crate) counters: Counters,
    lanes: Arc<Lanes>,
    core: Mutex<Core<D>>,
    /// How often the lock was taken.
    times_locked: AtomicU64,
    /// Held for reading by threads that let the driver wait without the engine's lock, which a
    /// capture forbids. Held for writing by threads after which a capture may begin. Taken before
    /// the engine's lock.
    captures: RwLock<()>,
}

/// Rings bells. No lock may be held.
pub(crate) fn ring(bells: impl IntoIterator<Item = Arc<Bell>>) {
    for bell in bells {
        // A panic of a future's waker must not reach the thread that freed memory.
        let ring = std::panic::AssertUnwindSafe(|| bell.ring());
        let _ = std::panic::catch_unwind(ring);
    }
}

impl<D: Driver> Shared<D> {
    pub(crate) fn new(
        driver: D,
        device: Properties,
        clock: Arc<dyn Clock>,
        options: Options,
        policy: Policy,
        ladder: Ladder,
        limit: Option<u64>,
    ) -> Self {
        let counters = Counters::new(options.max_split_size);
        let lanes = Arc::new(Lanes::default());
        let core = Core {
            heap: Heap::new(Arc::clone(&lanes)),
            backing: Backing::new(limit),
            streams: Streams::default(),
            policies: Policies::new(policy),
            demand: Demand::default(),
            history: History::default(),
            options,
            setup: Setup { policy, ladder, told_later: ToldLater::default() },
            looks: Looks::default(),
        };
        Self {
            driver,
            clock,
            device,
            counters,
            lanes,
            core: Mutex::new(core),
            times_locked: AtomicU64::new(0),
            captures: RwLock::new(()),
        }
    }

    // ---- the lock ----

    /// Runs `f` with the lock held. If another thread panicked while it held the lock, its change
    /// may be half done. Later calls go on nevertheless, because otherwise every allocation would
    /// be lost.
    pub(crate) fn locked<T>(&self, f: impl FnOnce(Locked<'_, D>) -> T) -> T {
        f(self.open(&mut self.lock()))
    }

    /// Returns the core behind a lock that is held.
    #[inline]
    pub(crate) fn open<'lock>(&'lock self, core: &'lock mut Core<D>) -> Locked<'lock, D> {
        let Core { heap, backing, streams, policies, demand, history, .. } = core;
        let ledger = Ledger::new(&self.counters, history, &*self.clock);
        let mem = Mem {
            heap,
            backing,
            streams,
            ledger,
            options: &core.options,
            driver: &self.driver,
            device: &self.device,
            looks: &core.looks,
        };
        Locked { mem, policies, demand, setup: &mut core.setup }
    }

    /// Takes the lock. It is usually held for less time than it takes to put a thread to sleep and
    /// wake it, so this spins for a moment before it waits. With two threads a pair takes 467 ns so,
    /// 581 ns with a plain `std` lock and 493 ns with `parking_lot`'s
    /// (docs/results/2026-11-17-rooms.md).
    pub(crate) fn lock(&self) -> MutexGuard<'_, Core<D>> {
        const LOOKS: u32 = 60;
        const PAUSES: u32 = 10;
        let look = |_| match self.core.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => {
                (0..PAUSES).for_each(|_| std::hint::spin_loop());
                None
            }
        };
        let guard = (0..LOOKS).find_map(look);
        let guard =
            guard.unwrap_or_else(|| self.core.lock().unwrap_or_else(PoisonError::into_inner));
        // Only the holder of the lock writes this count.
        self.times_locked.store(self.times_locked.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        guard
    }

    /// Returns how often the lock was taken so far. Takes no lock.
    pub(crate) fn times_locked(&self) -> u64 {
        self.times_locked.load(Ordering::Relaxed)
    }

    /// Runs `f`, which may help requests that wait, and wakes them.
    pub(crate) fn changing<T>(&self, f: impl FnOnce(Locked<'_, D>) -> T) -> T {
        let result = self.locked(f);
        self.wake();
        result
    }

    /// Wakes requests that wait for memory, after memory was freed.
    #[cold]
    pub(crate) fn wake(&self) {
        ring(self.locked(|core| core.demand.queue.changed()));
    }

    // ---- captures ----

    /// Prevents allocations from starting to go to a private pool, and so captures from starting,
    /// until the guard is dropped.
    pub(crate) fn no_capture_begins(&self) -> RwLockReadGuard<'_, ()> {
        self.captures.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Like [`no_capture_begins`](Self::no_capture_begins). Returns `None` if a capture may be
    /// under way.
    pub(crate) fn outside_captures(&self) -> Option<RwLockReadGuard<'_, ()>> {
        let guard = self.no_capture_begins();
        (!self.is_recording()).then_some(guard)
    }

    /// Runs `f`, after which a capture may begin, while no thread lets the driver wait.
    pub(crate) fn beginning_capture<T>(&self, f: impl FnOnce(Locked<'_, D>) -> T) -> T {
        let _no_driver_waits = self.captures.write().unwrap_or_else(PoisonError::into_inner);
        self.locked(f)
    }

    /// Returns whether allocations go to a private pool, so that a capture may be under way.
    pub(crate) fn is_recording(&self) -> bool {
        self.locked(|core| core.mem.is_recording())
    }

    // ---- waiting for the device ----

    /// Waits for all work on the device, with no lock held, and completes the frees that waited for
    /// it. No capture may be under way or begin.
    pub(crate) fn wait_for_device(&self) -> DriverResult<Proof> {
        let until = self.locked(|core| core.mem.streams.now());
        Streams::wait_for_device(&self.driver)?;
        let proof = Proof::of_device(until);
        self.locked(|mut core| {
            core.mem.streams.device_waited_for(core.mem.heap, proof);
            core.complete_done();
        });
        Ok(proof)
    }

    /// Completes all frees that other streams are done with, some at a time. Returns their bytes,
    /// or `None` while a capture may be under way.
    pub(crate) fn complete_frees(&self) -> DriverResult<Option<u64>> {
        let mut won = 0;
        for _ in 0..self.locked(|core| core.mem.streams.rounds()).max(1) {
            match self.locked(|mut core| core.complete_frees())? {
                Some(more) => won += more,
                None => return Ok(None),
            }
        }
        Ok(Some(won))
    }

    // ---- figures, without the lock ----

    /// Returns all figures. The list of lanes has its own lock, held for a moment.
    pub(crate) fn stats(&self) -> Stats {
        self.counters.read(&self.lanes)
    }

    pub(crate) fn lanes(&self) -> &Lanes {
        &self.lanes
    }

    /// Returns the live and pending bytes, and the reserved bytes.
    pub(crate) fn active_and_reserved(&self) -> (u64, u64) {
        self.counters.active_and_reserved()
    }
}

impl<D> Core<D> {
    pub(crate) fn looks(&self) -> &Looks {
        &self.looks
    }
}
