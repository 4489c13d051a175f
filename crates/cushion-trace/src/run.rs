//! One run of a program on an engine and a simulated device, step by step.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use cushion_core::size::{block_size, segment_size};
use cushion_core::{
    Action, AllocError, BlockUse, DriverError, Engine, HeldSegment, Options, PoolId, RestoreError,
    SegmentFigures, SimDriver, StreamId,
};
use rustc_hash::FxHashMap;

use crate::events::Events;
use crate::pools::{Departure, DepartureKind};
use crate::program::Program;
use crate::replay::{Difference, Refusal, ReplayConfig, Watch};
use crate::snapshot::{Action as Recorded, Origin};
use crate::steps::{Rare, Request, Slot, Step};

/// Streams of the simulator's own, for work that a pending free waits for.
const OTHER_STREAMS: u64 = 1 << 63;

/// Why a run ended early.
#[derive(Debug)]
pub(crate) enum Stop {
    /// It was told to go no further.
    Told,
    /// A request was refused at this event.
    OutOfMemory(u32),
    Driver(DriverError),
    /// Only in a trial.
    Departed(Departure),
}

impl From<DriverError> for Stop {
    fn from(error: DriverError) -> Self {
        Self::Driver(error)
    }
}

/// A run under way, and what it has shown so far.
pub(crate) struct Run<'a, W> {
    engine: &'a Engine<Arc<SimDriver>>,
    driver: &'a SimDriver,
    program: &'a Program,
    watch: &'a mut W,
    options: Options,
    capacity: Option<u64>,
    /// Whether the policy is the recorded one, so that addresses can be compared.
    pub(crate) follows: bool,
    /// The last event to go to.
    pub(crate) last: Option<u32>,
    /// The trace, if the run is to end at the first departure from it.
    pub(crate) trial: Option<&'a Events>,
    /// The address of each slot.
    addresses: Vec<u64>,
    /// The work that each pending slot waits for.
    pending: FxHashMap<Slot, (StreamId, u64)>,
    /// Where a request that PyTorch refused is served at this moment, and its event.
    retried: Option<(u64, u32)>,
    /// Whether a recorded place is waiting to be used.
    placed: bool,
    /// The private pool that requests go to now.
    window: Option<PoolId>,
    pub(crate) pool_uses: BTreeMap<PoolId, u32>,
    pub(crate) seen: Seen,
}

/// What a run has shown so far.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// Requests that got PyTorch's address.
    pub(crate) same: u64,
    pub(crate) allocs: u64,
    pub(crate) difference: Option<Difference>,
    pub(crate) oom: Option<Refusal>,
    pub(crate) passed_over: u64,
    /// Frees that waited for another stream.
    pub(crate) waited: u64,
    /// Those of them whose work the allocator waited for, before the trace says it was done.
    pub(crate) hurried: u64,
    /// The event and size of the highest live and reserved bytes so far.
    pub(crate) live_peak: (u32, u64),
    pub(crate) reserved_peak: (u32, u64),
    /// The event of the last change asked of the driver, and how many there were.
    pub(crate) last_change: (u32, u64),
}

impl<'a, W: Watch> Run<'a, W> {
    pub(crate) fn new(
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
            capacity: config.capacity,
            follows: config.policy == program.policy && program.origin == Origin::Torch,
            last: None,
            trial: None,
            addresses: vec![0; slots],
            pending: FxHashMap::default(),
            retried: None,
            placed: false,
            window: None,
            pool_uses: BTreeMap::new(),
            seen: Seen::default(),
        }
    }

    pub(crate) fn run(&mut self) -> Result<(), Stop> {
        self.begin()?;
        let program = self.program;
        let mut slot = program.beginning.blocks.len();
        let mut event = 0;
        for step in program.steps.iter() {
            match step {
                Step::Alloc(request) => {
                    if self.last.is_some_and(|last| request.event > last) {
                        return Err(Stop::Told);
                    }
                    event = request.event;
                    let Some(got) = self.request(&request)? else {
                        return Err(Stop::OutOfMemory(event));
                    };
                    self.addresses[slot] = got;
                    slot += 1;
                    if self.last == Some(event) {
                        return Err(Stop::Told);
                    }
                }
                Step::Free { slot } => self.free(slot)?,
                Step::Rare(rare) => self.rare(rare)?,
            }
            self.look(event);
        }
        Ok(())
    }

    /// Lets whoever watches see this moment.
    #[inline]
    fn look(&mut self, event: u32) {
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
    fn note_peaks(&mut self, event: u32) {
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

    /// Puts back what was held before the first event. Under the recorded policy that is the recorded
    /// layout; under another, the live blocks are asked for one after the other, lowest first.
    fn begin(&mut self) -> Result<(), Stop> {
        let program = self.program;
        let beginning = &program.beginning;
        if beginning.is_empty() {
            return Ok(());
        }
        let mut placed = vec![false; beginning.blocks.len()];
        if self.follows {
            let held: Vec<HeldSegment> = beginning
                .segments
                .iter()
                .zip(&program.beginning_pools)
                .map(|(segment, &pool)| beginning.held(segment, pool))
                .collect();
            let driver = self.driver;
            let bases = self.engine.restore(&held, |held| match held.range {
                Some(range) => driver.place_reserve(range),
                None => driver.place_alloc(held.size, held.address),
            });
            driver.clear_placements();
            for ((segment, held), base) in beginning.segments.iter().zip(&held).zip(bases) {
                let base = match base {
                    Ok(base) => base,
                    Err(RestoreError::Driver(error)) => return Err(error.into()),
                    // Its blocks find another place.
                    Err(_) => continue,
                };
                if held.pool != PoolId::DEFAULT {
                    self.pool_uses.insert(held.pool, 1);
                }
                let slots = segment.blocks.0..segment.blocks.1;
                placed[slots.clone()].fill(true);
                for (address, block) in
                    self.addresses[slots.clone()].iter_mut().zip(&beginning.blocks[slots])
                {
                    *address = base + (block.address - held.address);
                }
            }
        }
        let mut pools = vec![PoolId::DEFAULT; placed.len()];
        for (segment, &pool) in beginning.segments.iter().zip(&program.beginning_pools) {
            pools[segment.blocks.0..segment.blocks.1].fill(pool);
        }
        for (slot, block) in beginning.blocks.iter().enumerate().filter(|&(slot, _)| !placed[slot])
        {
            if pools[slot] != self.window.unwrap_or(PoolId::DEFAULT) {
                self.end_pool();
                if pools[slot] != PoolId::DEFAULT {
                    self.begin_pool(pools[slot]);
                }
            }
            match self.alloc(0, block.requested, StreamId(block.stream), None)? {
                Some(address) => self.addresses[slot] = address,
                None => return self.too_much_at_the_beginning(),
            }
        }
        self.end_pool();
        self.seen.difference = None;
        if let Some(capacity) = self.capacity {
            // PyTorch held what it held; under a lower limit it would have given back what it could.
            if self.engine.live_and_reserved().1 > capacity {
                self.engine.empty_cache()?;
            }
            if self.engine.live_and_reserved().1 > capacity {
                return self.too_much_at_the_beginning();
            }
        }
        self.count_from_here();
        Ok(())
    }

    /// What was there before is nobody's doing.
    fn count_from_here(&mut self) {
        self.engine.reset_accumulated_stats();
        self.engine.reset_peak_stats();
        self.driver.reset_counts();
        self.note_peaks(0);
    }

    fn too_much_at_the_beginning(&mut self) -> Result<(), Stop> {
        self.count_from_here();
        let held = self.engine.snapshot();
        let blocks = held.segments.iter().flat_map(|segment| &segment.blocks);
        let free = blocks.filter(|block| block.use_ == BlockUse::Free).map(|block| block.size);
        self.seen.difference = None;
        self.seen.oom = Some(Refusal {
            event: 0,
            requested: 0,
            live: self.program.beginning.live(),
            reserved: held.reserved,
            largest_free: free.max().unwrap_or(0),
            recorded: false,
            at_beginning: true,
        });
        Err(Stop::OutOfMemory(0))
    }

    /// Asks the engine; `None` if it refused.
    fn alloc(
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
                    unreachable!("an error this crate does not know: {refused}")
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
            if let (Some(_), Some(pytorch), Some(ours)) = (self.trial, pytorch, ours) {
                let kind = DepartureKind::Served { pytorch, ours };
                return Err(Stop::Departed(Departure { event: event as usize, kind }));
            }
            let event = u64::from(event);
            self.seen.difference = Some(Difference { event, requested: size, pytorch, ours });
        }
        Ok(ours)
    }

    fn free(&mut self, slot: Slot) -> Result<(), Stop> {
        let address = self.addresses[slot as usize];
        self.engine.free(address).map_err(|error| match error {
            cushion_core::AddressError::Driver { source, .. } => Stop::Driver(source),
            other => unreachable!("a program frees what it allocated: {other}"),
        })
    }

    #[cold]
    fn rare(&mut self, step: Rare) -> Result<(), Stop> {
        match step {
            Rare::FreeLater { slot, other } => {
                self.seen.waited += 1;
                let other = StreamId(OTHER_STREAMS + u64::from(other));
                self.pending.insert(slot, (other, self.driver.launch(other)));
                let address = self.addresses[slot as usize];
                if address != 0 {
                    self.engine.record_stream(address, other).unwrap_or_else(|error| {
                        unreachable!("a program uses what it allocated: {error}")
                    });
                }
                // In a capture its event would be recorded only at the end, after those of later frees.
                self.outside_capture(|run| run.free(slot))?;
            }
            Rare::Complete { slot } => {
                if let Some((other, work)) = self.pending.remove(&slot) {
                    self.seen.hurried += u64::from(self.driver.is_finished(other, work));
                    self.driver.finish_until(other, work);
                    // PyTorch can complete a free during a capture by the order of the graph, which a trace does not
                    // show. That it did is enough.
                    if self.window.is_some() {
                        self.outside_capture(|run| Ok(run.engine.process_events()?))?;
                    }
                }
            }
            Rare::Refused { event, size, stream, private } => {
                if self.last.is_some_and(|last| event > last) {
                    return Err(Stop::Told);
                }
                if self.capacity.is_none() {
                    self.seen.passed_over += 1;
                    return Ok(());
                }
                // With room in the default pool, it was a private one that was full: maybe one that
                // never got any memory.
                let unnamed = PoolId(u64::MAX, u64::MAX - u64::from(event));
                let private = (self.follows && self.window.is_none())
                    .then(|| private.unwrap_or(unnamed))
                    .filter(|_| self.engine.would_hit(size, stream));
                if let Some(pool) = private {
                    self.begin_pool(pool);
                }
                let got = self.alloc(event, size, stream, None)?;
                if private.is_some() {
                    self.end_pool();
                }
                if let Some(address) = got {
                    self.retried = Some((address, event));
                    self.note_peaks(event);
                    self.look(event);
                }
                if self.last == Some(event) {
                    return Err(Stop::Told);
                }
                if let Some(address) = got {
                    // It fits here. What PyTorch's program did next, it did without this memory.
                    let _ = self.engine.free(address);
                    self.retried = None;
                }
            }
            Rare::EmptyCache { plain, events, before } => {
                if !before.is_some_and(|size| self.would_be_short(size, plain)) {
                    self.give_back(PoolId::DEFAULT, events)?;
                }
            }
            Rare::EmptyPool { pool, events } => self.give_back(pool, events)?,
            Rare::PlaceSegment { bytes, address } if self.follows => {
                self.driver.place_alloc(bytes, address);
                self.placed = true;
            }
            Rare::PlaceRange { address } if self.follows => {
                if !self.placed {
                    self.driver.place_reserve(address);
                }
                self.placed = true;
            }
            Rare::PlaceSegment { .. } | Rare::PlaceRange { .. } => {}
            Rare::SetPolicy(policy) => {
                if self.follows {
                    self.engine.set_policy(policy);
                }
            }
            Rare::BeginPool(pool) => {
                // Frees complete up to here are so for the capture, in which nobody may ask.
                self.engine.process_events()?;
                self.begin_pool(pool);
            }
            Rare::EndPool => self.end_pool(),
            Rare::ReleasePool(pool) => {
                for _ in 0..self.pool_uses.remove(&pool).unwrap_or(0) {
                    let _ = self.engine.release_pool(pool);
                }
            }
        }
        Ok(())
    }

    /// The event that allocated what is at each address now; `None` for memory that was there before
    /// the first event. Addresses that were freed since are among them.
    pub(crate) fn allocated_by(&self) -> BTreeMap<u64, Option<u64>> {
        let before = self.program.beginning.blocks.iter().map(|_| None);
        let requests = self.program.steps.requests().iter().map(|r| Some(u64::from(r.event)));
        let by_slot = self.addresses.iter().copied().zip(before.chain(requests));
        let retried = self.retried.map(|(address, event)| (address, Some(u64::from(event))));
        by_slot.filter(|&(address, _)| address != 0).chain(retried).collect()
    }

    /// Gives everything cached back; a trial compares what that was with what PyTorch gave back.
    fn give_back(&mut self, pool: PoolId, (from, to): (u32, u32)) -> Result<(), Stop> {
        let Some(trace) = self.trial else { return Ok(self.engine.empty_cache_of(pool)?) };
        self.engine.record_history(1 << 20);
        self.engine.empty_cache_of(pool)?;
        let (entries, _) = self.engine.history();
        self.engine.record_history(0);
        let ours: BTreeSet<(u64, u64)> = entries
            .iter()
            .filter(|entry| matches!(entry.action, Action::SegmentFree | Action::SegmentUnmap))
            .map(|entry| (entry.address, entry.size))
            .collect();
        let pytorch: BTreeSet<(u64, u64)> = trace
            .iter_from(from as usize)
            .take((to - from) as usize)
            .filter(|event| matches!(event.action, Recorded::SegmentFree | Recorded::SegmentUnmap))
            .map(|event| (event.addr, event.size))
            .collect();
        if ours == pytorch {
            return Ok(());
        }
        let extra = ours.difference(&pytorch).map(|&(address, _)| address).collect();
        let pytorch = pytorch.into_iter().map(|(address, _)| address).collect();
        let kind = DepartureKind::GivenBack { extra, pytorch };
        Err(Stop::Departed(Departure { event: from as usize, kind }))
    }

    fn begin_pool(&mut self, pool: PoolId) {
        if self.engine.begin_allocate_to_pool(pool, Box::new(|_| true)).is_err() {
            return;
        }
        self.window = Some(pool);
        *self.pool_uses.entry(pool).or_default() += 1;
    }

    pub(crate) fn end_pool(&mut self) {
        if let Some(pool) = self.window.take() {
            let ended = self.engine.end_allocate_to_pool(pool);
            debug_assert!(ended.is_ok(), "windows open and close in turn: {ended:?}");
        }
    }

    /// Does something outside of the capture under way, if any.
    fn outside_capture(
        &mut self,
        act: impl FnOnce(&mut Self) -> Result<(), Stop>,
    ) -> Result<(), Stop> {
        let window = self.window;
        self.end_pool();
        act(self)?;
        if let Some(pool) = window {
            self.begin_pool(pool);
        }
        Ok(())
    }

    /// Whether the limit would refuse a miss of this size as things stand, or make the engine collect
    /// garbage: then the recorded release, of `plain` segments and maybe pages, was the allocator's
    /// own doing, and the engine will do the same.
    fn would_be_short(&self, size: u64, plain: u32) -> bool {
        let Some(limit) = self.capacity else { return false };
        let wanted = block_size(size, &self.options)
            .and_then(|size| segment_size(size, &self.options))
            .unwrap_or(u64::MAX);
        let (_, reserved) = self.engine.live_and_reserved();
        let threshold = self.options.garbage_collection_threshold;
        #[expect(clippy::cast_precision_loss, reason = "a threshold")]
        let over_threshold = threshold > 0.0 && reserved as f64 > threshold * limit as f64;
        reserved.saturating_add(wanted) > limit
            || over_threshold && plain > 0 && (plain as usize) < self.releasable_segments()
    }

    /// Plain segments of the default pools that nothing is in.
    fn releasable_segments(&self) -> usize {
        let is_releasable = |segment: &&SegmentFigures| {
            !segment.paged
                && segment.pool == PoolId::DEFAULT
                && matches!(&segment.blocks[..], [only] if only.use_ == BlockUse::Free)
        };
        self.engine.snapshot().segments.iter().filter(is_releasable).count()
    }
}
