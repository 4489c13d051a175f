//! One replay of a program, step by step.

use std::collections::BTreeMap;
use std::sync::Arc;

use cushion_core::{AllocError, DriverError, Engine, Options, PoolId, SimDriver, StreamId};
use rustc_hash::FxHashMap;

use super::outcome::{Difference, Refusal, ReplayConfig, Watch};
use super::trial::{Departure, DepartureKind};
use crate::model::events::Events;
use crate::model::snapshot::Origin;
use crate::program::Program;
use crate::program::steps::{Request, Slot, Step};

/// The reason why a replay ended early.
#[derive(Debug)]
pub(super) enum Stop {
    /// The last event to replay is reached.
    LastEvent,
    /// A request was refused at this event.
    OutOfMemory(u32),
    Driver(DriverError),
    /// A trial departed from PyTorch's path.
    Departed(Departure),
}

impl From<DriverError> for Stop {
    fn from(error: DriverError) -> Self {
        Self::Driver(error)
    }
}

/// A replay in progress.
pub(super) struct Run<'a, W> {
    pub(super) engine: &'a Engine<Arc<SimDriver>>,
    pub(super) driver: &'a SimDriver,
    pub(super) program: &'a Program,
    watch: &'a mut W,
    pub(super) options: Options,
    pub(super) goal: Goal<'a>,
    /// The address of each slot; zero if the slot has none yet.
    pub(super) addresses: Vec<u64>,
    /// The work that each pending slot waits for.
    pub(super) pending: FxHashMap<Slot, (StreamId, u64)>,
    /// The address and the event of a request that PyTorch refused, while the replay holds it.
    pub(super) retried: Option<(u64, u32)>,
    /// Whether the driver has a recorded address for the next allocation.
    pub(super) placed: bool,
    pub(super) pools: Pools,
    pub(super) seen: Seen,
}

/// What a replay compares and when it ends.
pub(super) struct Goal<'a> {
    pub(super) capacity: Option<u64>,
    /// Whether the policy is the recorded one, which makes addresses comparable.
    pub(super) follows: bool,
    /// The last event to replay.
    pub(super) last: Option<u32>,
    /// The trace, if the replay ends at the first departure from it.
    pub(super) trial: Option<&'a Events>,
}

/// The private pools of a replay.
#[derive(Default)]
pub(super) struct Pools {
    /// The private pool that requests go to now.
    pub(super) window: Option<PoolId>,
    /// How often each pool was begun and not released.
    pub(super) uses: BTreeMap<PoolId, u32>,
}

/// The results so far.
#[derive(Debug, Default)]
pub(super) struct Seen {
    /// The number of requests that got PyTorch's address.
    pub(super) same: u64,
    pub(super) allocs: u64,
    pub(super) difference: Option<Difference>,
    pub(super) oom: Option<Refusal>,
    /// The number of skipped requests that PyTorch refused.
    pub(super) passed_over: u64,
    /// The number of frees that waited for another stream.
    pub(super) waited: u64,
    /// The number of pending frees that the allocator waited for before the trace completes them.
    pub(super) hurried: u64,
    /// The event and the bytes of each peak so far.
    pub(super) live_peak: (u32, u64),
    pub(super) reserved_peak: (u32, u64),
    /// The event of the last driver call that changes memory, and the number of such calls.
    pub(super) last_change: (u32, u64),
}

impl<'a, W: Watch> Run<'a, W> {
    pub(super) fn new(
        engine: &'a Engine<Arc<SimDriver>>,
        driver: &'a SimDriver,
        program: &'a Program,
        config: &ReplayConfig,
        options: Options,
        watch: &'a mut W,
    ) -> Self {
        let slots = program.beginning.blocks.len() + program.steps.requests().len();
        Self {
            engine,
            driver,
            program,
            watch,
            options,
            goal: Goal {
                capacity: config.capacity,
                follows: config.policy == program.policy && program.origin == Origin::Torch,
                last: None,
                trial: None,
            },
            addresses: vec![0; slots],
            pending: FxHashMap::default(),
            retried: None,
            placed: false,
            pools: Pools::default(),
            seen: Seen::default(),
        }
    }

    pub(super) fn run(&mut self) -> Result<(), Stop> {
        self.begin()?;
        let program = self.program;
        let mut slot = program.beginning.blocks.len();
        let mut event = 0;
        for step in program.steps.iter() {
            match step {
                Step::Alloc(request) => {
                    if self.goal.last.is_some_and(|last| request.event > last) {
                        return Err(Stop::LastEvent);
                    }
                    event = request.event;
                    let Some(got) = self.request(&request)? else {
                        return Err(Stop::OutOfMemory(event));
                    };
                    self.addresses[slot] = got;
                    slot += 1;
                    if self.goal.last == Some(event) {
                        return Err(Stop::LastEvent);
                    }
                }
                Step::Free { slot } => self.free(slot)?,
                Step::Rare(rare) => self.rare(rare)?,
            }
            self.look(event);
        }
        Ok(())
    }

    /// Reports this moment to the observer.
    #[inline]
    pub(super) fn look(&mut self, event: u32) {
        if W::LOOKS {
            let (live, reserved) = self.engine.live_and_reserved();
            self.watch.moment(u64::from(event), live, reserved);
        }
    }

    #[inline]
    fn request(&mut self, request: &Request) -> Result<Option<u64>, Stop> {
        let &Request { size, address, event, .. } = request;
        let stream = self.program.steps.stream(request);
        let got = self.alloc(event, size, stream, Some(address))?;
        if let Some(got) = got {
            self.seen.allocs += 1;
            self.seen.same += u64::from(got == address);
            self.note_peaks(event);
        }
        Ok(got)
    }

    #[inline]
    pub(super) fn note_peaks(&mut self, event: u32) {
        let changes = self.engine.driver_changes();
        if changes != self.seen.last_change.1 {
            self.seen.last_change = (event, changes);
        }
        let (live, reserved) = self.engine.live_and_reserved();
        if live > self.seen.live_peak.1 {
            self.seen.live_peak = (event, live);
        }
        if reserved > self.seen.reserved_peak.1 {
            self.seen.reserved_peak = (event, reserved);
        }
    }

    /// Allocates from the engine; `None` if it refused.
    pub(super) fn alloc(
        &mut self,
        event: u32,
        size: u64,
        stream: StreamId,
        pytorch: Option<u64>,
    ) -> Result<Option<u64>, Stop> {
        let ours = match self.engine.alloc(size, stream) {
            Ok(address) => Some(address),
            Err(AllocError::Driver(error)) => return Err(error.into()),
            Err(refused) => {
                let Some(shortage) = refused.shortage() else {
                    unreachable!("an unknown error: {refused}")
                };
                let refusal = Refusal {
                    event: u64::from(event),
                    requested: size,
                    live: self.engine.live_and_reserved().0,
                    reserved: shortage.reserved,
                    largest_free: shortage.largest_free,
                    recorded: pytorch.is_none(),
                    at_beginning: false,
                };
                self.seen.oom.get_or_insert(refusal);
                None
            }
        };
        if self.placed {
            self.driver.clear_placements();
            self.placed = false;
        }
        if ours != pytorch && self.seen.difference.is_none() {
            if let (Some(_), Some(pytorch), Some(ours)) = (self.goal.trial, pytorch, ours) {
                let kind = DepartureKind::Served { pytorch, ours };
                return Err(Stop::Departed(Departure { event: event as usize, kind }));
            }
            let event = u64::from(event);
            self.seen.difference = Some(Difference { event, requested: size, pytorch, ours });
        }
        Ok(ours)
    }

    pub(super) fn free(&mut self, slot: Slot) -> Result<(), Stop> {
        let address = self.addresses[slot as usize];
        self.engine.free(address).map_err(|error| match error {
            cushion_core::AddressError::Driver { source, .. } => Stop::Driver(source),
            other => unreachable!("a program frees only what it allocated: {other}"),
        })
    }

    /// Returns the event that allocated each address; `None` for memory from before the first
    /// event. Addresses that were freed since are included.
    pub(super) fn allocated_by(&self) -> BTreeMap<u64, Option<u64>> {
        let before = self.program.beginning.blocks.iter().map(|_| None);
        let requests = self.program.steps.requests().iter().map(|r| Some(u64::from(r.event)));
        let by_slot = self.addresses.iter().copied().zip(before.chain(requests));
        let retried = self.retried.map(|(address, event)| (address, Some(u64::from(event))));
        by_slot.filter(|&(address, _)| address != 0).chain(retried).collect()
    }

    pub(super) fn begin_pool(&mut self, pool: PoolId) {
        if self.engine.begin_allocate_to_pool(pool, Box::new(|_| true)).is_err() {
            return;
        }
        self.pools.window = Some(pool);
        *self.pools.uses.entry(pool).or_default() += 1;
    }

    pub(super) fn end_pool(&mut self) {
        if let Some(pool) = self.pools.window.take() {
            let ended = self.engine.end_allocate_to_pool(pool);
            debug_assert!(ended.is_ok(), "pools begin and end in turn: {ended:?}");
        }
    }

    /// Runs `act` outside of the current capture, if there is one.
    pub(super) fn outside_capture(
        &mut self,
        act: impl FnOnce(&mut Self) -> Result<(), Stop>,
    ) -> Result<(), Stop> {
        let window = self.pools.window;
        self.end_pool();
        act(self)?;
        if let Some(pool) = window {
            self.begin_pool(pool);
        }
        Ok(())
    }
}
