//! From recorded events to a program that can be run: what a trace says, and what it leaves to be
//! inferred.
//!
//! A trace records what PyTorch's allocator did, not what it was asked. Most of it is plain:
//! `alloc` is a request, `free_requested` with its `free_completed` right behind it is a free, and a
//! `free_completed` that comes later is a free that had to wait for another stream. The rest is
//! inferred here:
//!
//! - **Private pools** come from the events themselves where they name one (newer PyTorch), from the
//!   final `segments`, and for the rest from a trial (see `pools.rs`): an allocation inside a segment
//!   of a private pool was made from that pool. Allocations in a row from one private pool are taken
//!   as one capture.
//! - **`empty_cache`** shows as a run of `segment_free` or `segment_unmap`. Directly before a miss
//!   the run may also be PyTorch's own reaction to a shortage; which of the two it was is decided
//!   when the program runs, by whether the limit would have been passed.
//! - **Pending frees that complete in such a run** were waited for by it, not polled.
//! - **Addresses** of segments are the recorded ones, so that block addresses can be compared.
//! - **A refused request** (`oom`) is tried again by a run with a limit.
//! - **What was held before the first event** is worked out in `beginning.rs`.

use std::collections::BTreeSet;

use cushion_core::size::SMALL_SEGMENT;
use cushion_core::{Options, Policy, PoolId, StreamId};
use rustc_hash::FxHashMap;

use crate::beginning::Beginning;
use crate::events::{Events, Window};
use crate::holdings::{self, HoldingId, Holdings};
use crate::pools::{self, Labels};
use crate::refused::RecordedOom;
use crate::replay::{UNLIMITED, follow};
use crate::snapshot::{Action, Event, Origin, Segment, Settings, Snapshot};
use crate::steps::{MOST, Rare, Slot, Steps};

/// What a trace asks of an allocator.
#[derive(Debug, Clone)]
pub struct Program {
    /// The steps, in order.
    pub(crate) steps: Steps,
    /// What was held before the first event.
    pub(crate) beginning: Beginning,
    /// The pool of each segment of the beginning.
    pub(crate) beginning_pools: Vec<PoolId>,
    /// Events of the trace.
    pub events: u64,
    /// Allocations of the trace.
    pub allocs: u64,
    /// The options PyTorch ran with.
    pub options: Options,
    /// The policy PyTorch ran with.
    pub policy: Policy,
    /// Who recorded the trace. Only PyTorch's has addresses that can be followed.
    pub origin: Origin,
    /// The size of the device, where the trace tells.
    pub(crate) device_total: Option<u64>,
    /// Where the recorded run itself ran out of memory, if it did.
    pub oom: Option<RecordedOom>,
    /// What could not be known, in words.
    pub notes: Vec<String>,
}

impl Program {
    /// The program of one device of a snapshot.
    #[must_use]
    pub fn of(snapshot: &Snapshot, device: usize) -> Self {
        let none = Events::default();
        let events = snapshot.devices.get(device).unwrap_or(&none);
        let segments: Vec<&Segment> = snapshot
            .segments
            .iter()
            .filter(|segment| usize::try_from(segment.device) == Ok(device))
            .collect();
        let mut notes = Vec::new();
        let options = options_of(&snapshot.settings, &mut notes);
        let beginning = Beginning::of(events, &segments, &options);
        notes.extend(beginning.notes());
        let (start, beginning_ids) = Holdings::before(&beginning);
        let recording = Recording {
            events,
            device_total: device_total(events, &start),
            start,
            beginning_ids,
            beginning,
            options,
            origin: snapshot.origin,
        };
        let mut labels = Labels::recorded(events, &segments, &recording.start);
        if !labels.is_complete() && recording.can_be_followed() {
            let effort = recording.effort();
            labels = pools::infer(events, &recording.start, labels, effort, |labels| {
                follow(&recording.program(labels), events)
            });
            if labels.inferred() > 0 {
                notes.push(format!(
                    "{} segments that were given back under way are taken as private pools' by \
                     inference",
                    labels.inferred()
                ));
            }
        }
        let mut program = recording.program(&labels);
        program.notes.splice(0..0, notes);
        program.oom = RecordedOom::of(&program, events);
        program
    }

    /// Whether nothing can be learned from it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// Whether any free waits for work on another stream.
    #[must_use]
    pub fn waits(&self) -> bool {
        self.steps.rare_steps().iter().any(|step| matches!(step, Rare::FreeLater { .. }))
    }

    /// Whether memory was held before the first event.
    #[must_use]
    pub fn begins_in_the_middle(&self) -> bool {
        !self.beginning.is_empty()
    }
}

/// One device's part of a snapshot.
struct Recording<'a> {
    events: &'a Events,
    /// What was held before the first event.
    start: Holdings,
    beginning: Beginning,
    /// The holding of each segment of the beginning.
    beginning_ids: Vec<HoldingId>,
    options: Options,
    origin: Origin,
    device_total: Option<u64>,
}

impl Recording<'_> {
    /// Whether a trial can follow PyTorch without knowing the limit it had, because all that it gave
    /// back was all there was.
    fn can_be_followed(&self) -> bool {
        self.options.max_split_size.is_none() && self.options.garbage_collection_threshold == 0.0
    }

    /// What a run takes, in events: what was there before is put back page by page.
    fn effort(&self) -> u64 {
        let pages = self.beginning.segments.iter().map(|segment| {
            segment.size
                / if segment.small { SMALL_SEGMENT } else { self.options.large_segment_size }
        });
        let pages = pages.fold(0, u64::saturating_add);
        (self.events.len() as u64).saturating_add(pages.saturating_mul(64))
    }

    fn program(&self, labels: &Labels) -> Program {
        let events = self.events;
        let mut seen = [self.beginning.has(false), self.beginning.has(true)];
        let mut allocs = 0;
        for event in events {
            allocs += usize::from(event.action == Action::Alloc);
            seen[0] |= event.action == Action::SegmentAlloc;
            seen[1] |= event.action == Action::SegmentMap;
        }
        let [plain, maps] = seen;
        let recorded = self.options.policy == Policy::Expandable;
        let expandable = if maps == plain { recorded } else { maps };
        let policy = if expandable { Policy::Expandable } else { Policy::Segments };
        let mut builder = Builder {
            events: Window::new(events),
            all: events,
            labels,
            start: &self.start,
            requests: None,
            holdings: self.start.clone(),
            steps: Steps::with_capacity(allocs),
            live: FxHashMap::default(),
            waiting: FxHashMap::default(),
            slots: 0,
            window: None,
            expandable,
            held_back: Vec::new(),
            run_end: 0,
            unknown_frees: 0,
            overlaps: 0,
        };
        builder.begin(&self.beginning);
        builder.run();
        let Builder { mut steps, window, unknown_frees, overlaps, .. } = builder;
        if window.is_some() {
            steps.rare(Rare::EndPool);
        }
        spread_over_streams(steps.rare_steps_mut());
        let mut notes = Vec::new();
        if unknown_frees > 0 {
            notes.push(format!("{unknown_frees} frees of memory nobody had are left out"));
        }
        if overlaps > 0 {
            notes.push(format!(
                "{overlaps} allocations begin where another is still live; the older is taken as \
                 freed"
            ));
        }
        let pools = self.beginning_ids.iter().map(|&id| labels.pool(id)).collect();
        Program {
            events: events.len() as u64,
            allocs: steps.requests().len() as u64,
            steps,
            beginning: self.beginning.clone(),
            beginning_pools: pools,
            options: self.options.clone(),
            policy,
            origin: self.origin,
            device_total: self.device_total,
            oom: None,
            notes,
        }
    }
}

struct Builder<'a> {
    all: &'a Events,
    /// The same, by number.
    events: Window<'a>,
    labels: &'a Labels,
    /// What PyTorch held before the first event.
    start: &'a Holdings,
    /// The event and pool of each request; worked out only if one was refused.
    requests: Option<Vec<(usize, PoolId)>>,
    /// What PyTorch holds at this point.
    holdings: Holdings,
    steps: Steps,
    /// Slots by address.
    live: FxHashMap<u64, Slot>,
    /// Slots whose free waits, by address.
    waiting: FxHashMap<u64, Slot>,
    slots: Slot,
    /// The private pool requests go to now.
    window: Option<PoolId>,
    /// Whether expandable segments are on at this point.
    expandable: bool,
    /// Completions that the coming release waited for.
    held_back: Vec<Slot>,
    /// The end of the run of completions last looked at.
    run_end: usize,
    unknown_frees: u64,
    overlaps: u64,
}

impl Builder<'_> {
    /// Gives slots to what was there.
    fn begin(&mut self, beginning: &Beginning) {
        for block in &beginning.blocks {
            let slot = self.new_slot();
            if block.pending {
                self.steps.rare(Rare::FreeLater { slot, other: 0 });
                self.waiting.insert(block.address, slot);
            } else {
                self.live.insert(block.address, slot);
            }
        }
    }

    fn new_slot(&mut self) -> Slot {
        // A reader refuses half as many events.
        assert!(self.slots < MOST, "a trace of more than a billion allocations");
        self.slots += 1;
        self.slots - 1
    }

    fn run(&mut self) {
        let mut index = 0;
        while let Some(event) = self.events.get(index) {
            index = self.step(index, event);
        }
        self.let_go();
    }

    /// Takes the event at `index`, and returns the index of the next to take.
    fn step(&mut self, index: usize, event: Event) -> usize {
        let next = index + 1;
        match event.action {
            Action::Alloc => self.alloc(index, event),
            Action::FreeRequested => return self.free(index, event),
            Action::FreeCompleted => self.complete(next, event),
            Action::SegmentAlloc | Action::SegmentMap => self.miss(event),
            Action::SegmentFree | Action::SegmentUnmap => return self.release(index),
            Action::Oom => {
                let (pool, private) = self.refused_pools(index);
                self.enter_pool(pool);
                let Event { size, stream, .. } = event;
                let (event, stream) = (narrow(index), StreamId(stream));
                self.steps.rare(Rare::Refused { event, size, stream, private });
                self.let_go();
            }
            _ => {}
        }
        next
    }

    fn alloc(&mut self, index: usize, event: Event) {
        self.enter_pool(self.pool_of(&event));
        if !self.expandable && self.holdings.is_paged(event.addr) {
            // Only expandable segments reuse their own memory.
            self.switch_expandable(true);
        }
        let slot = self.new_slot();
        if let Some(old) = self.live.insert(event.addr, slot) {
            self.overlaps += 1;
            self.steps.free(old);
        }
        self.steps.alloc(narrow(index), event.size, StreamId(event.stream), event.addr);
        self.let_go();
    }

    fn free(&mut self, index: usize, event: Event) -> usize {
        let next = index + 1;
        let Some(slot) = self.live.remove(&event.addr) else {
            self.unknown_frees += 1;
            return next;
        };
        let at_once = self
            .events
            .get(next)
            .is_some_and(|e| e.action == Action::FreeCompleted && e.addr == event.addr);
        if at_once {
            self.steps.free(slot);
            return next + 1;
        }
        self.steps.rare(Rare::FreeLater { slot, other: 0 });
        self.waiting.insert(event.addr, slot);
        next
    }

    /// A free is complete; `next` is the event after.
    fn complete(&mut self, next: usize, event: Event) {
        if let Some(slot) = self.waiting.remove(&event.addr) {
            if self.release_follows(next) {
                self.held_back.push(slot);
            } else {
                self.steps.rare(Rare::Complete { slot });
            }
        } else if let Some(slot) = self.live.remove(&event.addr) {
            // PyTorch can be told not to record that it was asked for.
            self.steps.free(slot);
        }
    }

    /// A segment that PyTorch got for the allocation that follows.
    fn miss(&mut self, event: Event) {
        let plain = event.action == Action::SegmentAlloc;
        self.holdings.take(&event);
        if plain == self.expandable {
            self.switch_expandable(!plain);
        }
        self.steps.rare(if plain {
            Rare::PlaceSegment { bytes: event.size, address: event.addr }
        } else {
            Rare::PlaceRange { address: event.addr }
        });
    }

    fn switch_expandable(&mut self, on: bool) {
        self.expandable = on;
        let policy = if on { Policy::Expandable } else { Policy::Segments };
        self.steps.rare(Rare::SetPolicy(policy));
    }

    /// A run of segments given back.
    fn release(&mut self, index: usize) -> usize {
        let mut next = index;
        let mut pools = Vec::new();
        let mut plain = 0;
        while let Some(event) = self.events.get(next) {
            match event.action {
                Action::SegmentFree | Action::SegmentUnmap => {
                    plain += u32::from(event.action == Action::SegmentFree);
                    pools.push(self.pool_of(&event));
                    self.holdings.take(&event);
                }
                Action::FreeCompleted if self.release_follows(next) => {
                    self.complete(next + 1, event);
                }
                _ => break,
            }
            next += 1;
        }
        pools.sort_unstable();
        pools.dedup();
        self.enter_pool(PoolId::DEFAULT);
        let private = pools.iter().copied().filter(|&pool| pool != PoolId::DEFAULT);
        private.clone().for_each(|pool| self.steps.rare(Rare::ReleasePool(pool)));
        let events = (narrow(index), narrow(next));
        if pools.contains(&PoolId::DEFAULT) {
            let before = self.missed_request(next);
            self.steps.rare(Rare::EmptyCache { plain, events, before });
            if before.is_some() {
                return next;
            }
        } else {
            private.for_each(|pool| self.steps.rare(Rare::EmptyPool { pool, events }));
        }
        self.let_go();
        next
    }

    /// The size of the request that missed, if the next thing to happen from `index` on is a miss.
    fn missed_request(&mut self, index: usize) -> Option<u64> {
        let is_miss = |action| matches!(action, Action::SegmentAlloc | Action::SegmentMap);
        let mut next = index;
        while self.events.get(next).is_some_and(|event| is_miss(event.action)) {
            next += 1;
        }
        let event = self.events.get(next)?;
        let refused = event.action == Action::Oom;
        (refused || event.action == Action::Alloc && next > index).then_some(event.size)
    }

    /// Whether, of what follows, a release comes before the next request or free.
    fn release_follows(&mut self, index: usize) -> bool {
        // Completions come in long runs: look for the end of each once.
        if self.run_end < index {
            self.run_end = index;
            let is_completion = |event: Event| event.action == Action::FreeCompleted;
            while self.events.get(self.run_end).is_some_and(is_completion) {
                self.run_end += 1;
            }
        }
        self.events
            .get(self.run_end)
            .is_some_and(|e| matches!(e.action, Action::SegmentFree | Action::SegmentUnmap))
    }

    /// Completions held back for a release have happened by now.
    fn let_go(&mut self) {
        for slot in self.held_back.drain(..) {
            self.steps.rare(Rare::Complete { slot });
        }
    }

    fn enter_pool(&mut self, pool: PoolId) {
        let pool = Some(pool).filter(|&pool| pool != PoolId::DEFAULT);
        if pool != self.window {
            let change = self.window.map(|_| Rare::EndPool);
            self.steps.before_placements(change.into_iter().chain(pool.map(Rare::BeginPool)));
            self.window = pool;
        }
    }

    /// The pool of a refused request, which has no address: that of the requests before and after it,
    /// if they agree. Else the default, and the private one it may have been for.
    fn refused_pools(&mut self, index: usize) -> (PoolId, Option<PoolId>) {
        if let Some((a, b)) = self.events.get(index).and_then(|event| event.pool) {
            return (PoolId(a, b), None);
        }
        let requests = self.requests.get_or_insert_with(|| {
            holdings::requests(self.all, self.start)
                .map(|(event, holding)| (event, self.labels.pool(holding)))
                .collect()
        });
        let next = requests.partition_point(|&(event, _)| event < index);
        let after = requests.get(next).map(|&(_, pool)| pool).filter(|&p| p != PoolId::DEFAULT);
        match (self.window, after) {
            (Some(before), Some(after)) if before == after => (before, None),
            (before, after) => (PoolId::DEFAULT, after.or(before)),
        }
    }

    /// The pool an event names, or else that of the holding it is in: what is stitched is in none.
    fn pool_of(&self, event: &Event) -> PoolId {
        let holding = || self.holdings.at(event.addr).map(|id| self.labels.pool(id));
        let named = event.pool.map(|(a, b)| PoolId(a, b));
        named.or_else(holding).unwrap_or(PoolId::DEFAULT)
    }
}

/// The trace does not tell which streams a pending free waits for. PyTorch asks after the oldest free
/// of a stream first, so any set of frees that completed in the order they were made may have waited
/// for the same stream: use as few streams as that allows.
fn spread_over_streams(steps: &mut [Rare]) {
    let mut completed: FxHashMap<Slot, usize> = FxHashMap::default();
    for (index, step) in steps.iter().enumerate() {
        if let Rare::Complete { slot } = step {
            completed.insert(*slot, index);
        }
    }
    // The streams so far, by when the last free of each is complete.
    let mut latest: BTreeSet<(usize, u32)> = BTreeSet::new();
    for step in steps {
        if let Rare::FreeLater { slot, other } = step {
            let done = completed.get(slot).copied().unwrap_or(usize::MAX);
            let before = latest.range(..=(done, u32::MAX)).next_back().copied();
            *other = match before {
                Some(stream) => {
                    latest.remove(&stream);
                    stream.1
                }
                None => narrow(latest.len()),
            };
            latest.insert((done, *other));
        }
    }
}

/// The options the trace was recorded with: its conf string, corrected by the settings in force.
fn options_of(settings: &Settings, notes: &mut Vec<String>) -> Options {
    let mut options = Options::default();
    // What PyTorch does when it is told nothing.
    options.ask_for(Policy::Segments);
    if let Some(conf) = &settings.conf
        && let Err(error) = options.apply(conf)
    {
        notes.push(format!("the recorded options are not all understood: {error}"));
    }
    if options.per_process_memory_fraction < 1.0 {
        notes.push(format!(
            "the run was limited to {} of its device, whose size is not recorded: --capacity sets a \
             limit",
            options.per_process_memory_fraction
        ));
    }
    if let Some(bytes) = settings.max_split_size {
        options.max_split_size = u64::try_from(bytes).ok();
    }
    if let Some(threshold) = settings.garbage_collection_threshold {
        options.garbage_collection_threshold = threshold;
    }
    match settings.expandable_segments {
        Some(true) => options.policy = Policy::Expandable,
        Some(false) if options.policy == Policy::Expandable => options.policy = Policy::Segments,
        _ => {}
    }
    if let Some(reuse) = settings.graph_capture_record_stream_reuse {
        options.graph_capture_record_stream_reuse = reuse;
    }
    for &(interval, divisions) in settings.roundup_power2_divisions.iter().flatten() {
        let index = interval.checked_ilog2().map_or(0, |index| index as usize);
        if let Some(slot) = options.roundup_power2_divisions.get_mut(index) {
            *slot = divisions;
        }
    }
    options
}

/// The size of the device, as far as the distance between reserved ranges tells: PyTorch makes each
/// of them 9/8 of it.
fn device_total(events: &Events, start: &Holdings) -> Option<u64> {
    // Ranges of small and large pools differ by less than a page, and one can take the place of
    // another that is gone: starts closer together than this are of ranges at different times.
    let apart = cushion_core::size::GIB;
    let mut holdings = start.clone();
    let between: Vec<u64> = start.paged_starts().collect();
    let apart_from = |start: u64| holdings.gaps(start).filter(|&gap| gap > apart).min();
    let mut nearest: Option<u64> = between.into_iter().filter_map(apart_from).min();
    for event in events {
        let before = holdings.count();
        holdings.take(&event);
        if holdings.count() > before && event.action == Action::SegmentMap {
            let gaps = holdings.gaps(event.addr);
            nearest = gaps.filter(|&gap| gap > apart).chain(nearest).min();
        }
    }
    // No device is that large: the events are not PyTorch's.
    Some((nearest? - apart / 4) / 9 * 8).filter(|&total| total <= UNLIMITED)
}

fn narrow(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(u32::MAX)
}
