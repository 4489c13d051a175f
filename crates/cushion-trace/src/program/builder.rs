//! Translates recorded events into steps.

use cushion_core::{Policy, PoolId, StreamId};
use rustc_hash::FxHashMap;

use super::beginning::Beginning;
use super::holdings::{self, Holdings};
use super::labels::Labels;
use super::narrow;
use super::steps::{MOST, Rare, Slot, Steps};
use crate::model::event::{Action, Event};
use crate::model::events::{Events, Window};

/// Builds the steps of a program.
pub(super) struct Builder<'a> {
    all: &'a Events,
    /// The same events, for access by index.
    events: Window<'a>,
    labels: &'a Labels,
    /// The holdings before the first event.
    start: &'a Holdings,
    /// The event and the pool of each request. Computed only if a request was refused.
    requests: Option<Vec<(usize, PoolId)>>,
    /// The holdings at the current event.
    holdings: Holdings,
    steps: Steps,
    slots: Slots,
    /// The private pool that requests go to at the current event.
    window: Option<PoolId>,
    /// Whether expandable segments are on at the current event.
    expandable: bool,
    /// The end of the sequence of completions that was examined last.
    completions_end: usize,
    skipped: Skipped,
}

/// The slots at the current event.
#[derive(Default)]
struct Slots {
    /// By address.
    live: FxHashMap<u64, Slot>,
    /// Slots with a pending free, by address.
    waiting: FxHashMap<u64, Slot>,
    /// Completions that the next release waits for.
    held_back: Vec<Slot>,
    count: Slot,
}

/// The numbers of events that the program leaves out or reinterprets.
#[derive(Default)]
pub(super) struct Skipped {
    pub(super) unknown_frees: u64,
    /// Allocations at the address of a live block.
    pub(super) overlaps: u64,
}

impl<'a> Builder<'a> {
    pub(super) fn new(
        events: &'a Events,
        labels: &'a Labels,
        start: &'a Holdings,
        expandable: bool,
        allocs: usize,
    ) -> Self {
        Self {
            all: events,
            events: Window::new(events),
            labels,
            start,
            requests: None,
            holdings: start.clone(),
            steps: Steps::with_capacity(allocs),
            slots: Slots::default(),
            window: None,
            expandable,
            completions_end: 0,
            skipped: Skipped::default(),
        }
    }

    /// Returns the steps.
    pub(super) fn finish(mut self) -> (Steps, Skipped) {
        if self.window.is_some() {
            self.steps.rare(Rare::EndPool);
        }
        (self.steps, self.skipped)
    }

    /// Assigns slots to the blocks of the beginning.
    pub(super) fn begin(&mut self, beginning: &Beginning) {
        for block in &beginning.blocks {
            let slot = self.new_slot();
            if block.pending {
                self.steps.rare(Rare::FreeLater { slot, other: 0 });
                self.slots.waiting.insert(block.address, slot);
            } else {
                self.slots.live.insert(block.address, slot);
            }
        }
    }

    fn new_slot(&mut self) -> Slot {
        // Readers refuse traces with half as many events.
        assert!(self.slots.count < MOST, "a trace of more than a billion allocations");
        self.slots.count += 1;
        self.slots.count - 1
    }

    pub(super) fn run(&mut self) {
        let mut index = 0;
        while let Some(event) = self.events.get(index) {
            index = self.step(index, event);
        }
        self.complete_held_back();
    }

    /// Translates the event at `index`. Returns the index of the next event to translate.
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
                self.complete_held_back();
            }
            _ => {}
        }
        next
    }

    fn alloc(&mut self, index: usize, event: Event) {
        self.enter_pool(self.pool_of(&event));
        if !self.expandable && self.holdings.is_paged(event.addr) {
            // PyTorch serves a request from an expandable segment only if the option is on.
            self.switch_expandable(true);
        }
        let slot = self.new_slot();
        if let Some(old) = self.slots.live.insert(event.addr, slot) {
            self.skipped.overlaps += 1;
            self.steps.free(old);
        }
        self.steps.alloc(narrow(index), event.size, StreamId(event.stream), event.addr);
        self.complete_held_back();
    }

    fn free(&mut self, index: usize, event: Event) -> usize {
        let next = index + 1;
        let Some(slot) = self.slots.live.remove(&event.addr) else {
            self.skipped.unknown_frees += 1;
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
        self.slots.waiting.insert(event.addr, slot);
        next
    }

    /// Translates a completed free. `next` is the index of the event after.
    fn complete(&mut self, next: usize, event: Event) {
        if let Some(slot) = self.slots.waiting.remove(&event.addr) {
            if self.release_follows(next) {
                self.slots.held_back.push(slot);
            } else {
                self.steps.rare(Rare::Complete { slot });
            }
        } else if let Some(slot) = self.slots.live.remove(&event.addr) {
            // PyTorch can be configured not to record the request of a free.
            self.steps.free(slot);
        }
    }

    /// Translates a segment that PyTorch got for the next allocation.
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

    /// Translates a sequence of released segments. Returns the index of the event after it.
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
        self.complete_held_back();
        next
    }

    /// Returns the size of the request that missed, if a miss comes next at `index`.
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

    /// Returns whether a release comes after the completions at `index`.
    fn release_follows(&mut self, index: usize) -> bool {
        // Sequences of completions are long: find the end of each once.
        if self.completions_end < index {
            self.completions_end = index;
            let is_completion = |event: Event| event.action == Action::FreeCompleted;
            while self.events.get(self.completions_end).is_some_and(is_completion) {
                self.completions_end += 1;
            }
        }
        self.events
            .get(self.completions_end)
            .is_some_and(|e| matches!(e.action, Action::SegmentFree | Action::SegmentUnmap))
    }

    /// Adds the completions that were held back for a release.
    fn complete_held_back(&mut self) {
        for slot in self.slots.held_back.drain(..) {
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

    /// Returns the pool of a refused request. It has no address, so the pool is that of the
    /// requests before and after it, if they agree; otherwise the default pool, and the private
    /// pool that the request may have been for.
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

    /// Returns the pool that an event names, or that of its holding. A stitch has no holding and
    /// counts as the default pool.
    fn pool_of(&self, event: &Event) -> PoolId {
        let holding = || self.holdings.at(event.addr).map(|id| self.labels.pool(id));
        let named = event.pool.map(|(a, b)| PoolId(a, b));
        named.or_else(holding).unwrap_or(PoolId::DEFAULT)
    }
}
