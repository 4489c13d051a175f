//! Frees that wait for other streams.
//!
//! A free on the block's own stream needs no event: stream order protects it. A block that other
//! streams used gets one event per such stream when it is freed, and is free when all of them have
//! finished. Events come from a pool of their own. While allocations go to a private pool a capture
//! may be under way, in which events may not be queried: such frees are deferred until it has ended.
//!
//! Cushion itself lets a stream use memory of another: a block that is borrowed, or in host memory. The program did not
//! name such a stream for the block, so it may destroy the stream before the free. Unless the stream lasts, no event is
//! recorded on it: the block is free after the next wait for the whole device.
//!
//! How many events are asked for at a time is bounded, however many streams there are: an allocation asks a few, and goes
//! on at the next where this one stopped. One that finds no memory asks many, before anything dearer is tried.

use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;

use rustc_hash::{FxHashMap, FxHashSet};

use crate::block::{BlockId, Uses};
use crate::driver::{Driver, DriverResult, EventId, NodeId, StreamId};
use crate::error::AddressError;
use crate::history::Tag;
use crate::locked::{Locked, State};
use crate::pool::PoolId;
use crate::proof::{Moment, Proof};

/// How many blocks that wait for the end of a capture are looked at in one call.
const MOST_CAPTURED: u32 = 16;

/// How many streams that are not done an allocation asks at most. PyTorch's pools have so many streams: up to there all
/// are asked each time, as PyTorch does.
const FEW: usize = 64;

/// How many it asks where there are more streams than [`FEW`]: each query likely misses the processor's caches.
const SOME: usize = 16;

/// As [`FEW`], for a request that finds no memory. More would hold the lock for too long.
const MANY: usize = 1024;

/// How many frees an allocation completes at most.
const FINISHED: usize = 1024;

/// How many events are waited for at a time, and then seen to with the lock held.
pub(crate) const AT_ONCE: usize = 1024;

/// An event on a stream, and the block whose free waits for it.
pub(crate) type Awaited = (StreamId, EventId, BlockId);

/// Blocks that wait, and the events they wait for.
#[derive(Debug, Default)]
pub(crate) struct Pending {
    /// Events by stream, oldest first: one that is not done hides the later ones of its own stream
    /// only.
    events: BTreeMap<StreamId, VecDeque<(EventId, BlockId)>>,
    /// The last stream that was asked, where not all were.
    cursor: Option<StreamId>,
    /// Whether the last pass ended before it had asked every stream.
    more: bool,
    /// Blocks looked at so far by those who asked whether pending ones would serve a request, for tests.
    pub(crate) looks: Cell<u64>,
    /// Blocks whose events are still to be recorded.
    deferred: Vec<Deferred>,
    /// Blocks that wait for the device, because a stream that used them may be gone; when each was freed.
    awaiting_device: Vec<(Moment, BlockId)>,
    /// Events nobody waits for.
    idle: Vec<EventId>,
    /// Nodes known to come before all later work of a stream, by capture and stream.
    ordered: FxHashMap<(u64, StreamId), FxHashSet<NodeId>>,
}

/// A block whose events are still to be recorded.
#[derive(Debug)]
struct Deferred {
    block: BlockId,
    /// The last nodes that use the block in the graph being captured; empty if it must wait for the
    /// end of the capture.
    markers: Vec<NodeId>,
    /// Freed during a capture: uses recorded in that capture need no event after it.
    in_capture: bool,
}

impl Pending {
    /// Whether nothing waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.events.is_empty() && self.deferred.is_empty()
    }

    /// How often [`Locked::process_many_events`] has to be called to ask all streams.
    pub(crate) fn rounds(&self) -> usize {
        self.events.len().div_ceil(MANY)
    }

    /// Whether the last pass ended before it had asked every stream.
    pub(crate) fn has_more(&self) -> bool {
        self.more
    }

    /// The blocks that wait; one that waits for several events comes several times.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = BlockId> {
        let events = self.events.values().flatten().map(|&(_, block)| block);
        let awaiting = self.awaiting_device.iter().map(|&(_, block)| block);
        events.chain(self.deferred.iter().map(|deferred| deferred.block)).chain(awaiting)
    }

    /// How many streams have events.
    pub(crate) fn streams(&self) -> usize {
        self.events.len()
    }

    /// How many events each block waits for; blocks with deferred events too.
    pub(crate) fn waiting(&self) -> BTreeMap<BlockId, u32> {
        let mut waiting = BTreeMap::new();
        for (_, block) in self.events.values().flatten() {
            *waiting.entry(*block).or_insert(0) += 1;
        }
        for (_, block) in &self.awaiting_device {
            *waiting.entry(*block).or_insert(0) += 1;
        }
        for deferred in &self.deferred {
            waiting.entry(deferred.block).or_insert(0);
        }
        waiting
    }

    /// Whether a wait for the device would complete frees.
    pub(crate) fn awaits_device(&self) -> bool {
        !self.awaiting_device.is_empty()
    }

    /// Keeps an event that nobody waits for any more.
    pub(crate) fn keep_event(&mut self, event: EventId) {
        self.idle.push(event);
    }

    /// Keeps the events that nobody waits for any more.
    pub(crate) fn keep_events(&mut self, events: impl IntoIterator<Item = EventId>) {
        self.idle.extend(events);
    }

    /// Events nobody waits for, for the engine to destroy at its end.
    pub(crate) fn take_idle(&mut self) -> Vec<EventId> {
        std::mem::take(&mut self.idle)
    }

    /// A capture has ended: what was known of its graph is forgotten.
    pub(crate) fn forget_order(&mut self) {
        self.ordered.clear();
    }
}

impl<D: Driver> Locked<'_, D> {
    /// A program says that `stream` uses the block at `address`.
    pub(crate) fn record_stream(
        &mut self,
        address: u64,
        stream: StreamId,
    ) -> Result<(), AddressError> {
        let id = *self.state.live.get(&address).ok_or(AddressError::Unknown { address })?;
        let block = &self.state.blocks[id];
        if block.stream != stream {
            // One that only borrowed it is no other.
            if !block.uses_without_event().contains(&stream) {
                self.state.pools[block.pool].lane_mut(block.stream).is_shared = true;
            }
            self.note_use(id, stream);
            // From now on it is the program's own word that the stream is there at the free.
            if let Some(uses) = &mut self.state.blocks[id].uses {
                uses.ours.retain(|&noted| noted != stream);
            }
        }
        Ok(())
    }

    /// Notes that Cushion lets `stream` use a block of another stream, of which the program knows nothing.
    pub(crate) fn note_borrowed(&mut self, id: BlockId, stream: StreamId) {
        self.note_use(id, stream);
        let uses = self.state.blocks[id].uses.get_or_insert_default();
        if !uses.ours.contains(&stream) {
            uses.ours.push(stream);
        }
    }

    /// Notes that `stream` uses a block of another stream.
    fn note_use(&mut self, id: BlockId, stream: StreamId) {
        // PyTorch takes every use while allocations go to a private pool for one in a capture. In a
        // pool of the user's own it is not, and the work would go unwaited for: ask the driver. A
        // driver that will not say means a wait too many at worst.
        let captured =
            self.is_recording() && self.driver.capture(stream).is_ok_and(|found| found.is_some());
        let block = &mut self.state.blocks[id];
        let Uses { streams, in_capture, .. } = &mut **block.uses.get_or_insert_default();
        let known = streams.contains(&stream);
        if !known {
            streams.push(stream);
        }
        if !captured {
            in_capture.retain(|&noted| noted != stream);
        } else if !known {
            // A use from before the capture keeps its event.
            in_capture.push(stream);
        }
    }

    /// Frees a block that other streams used, once they are done with it.
    pub(crate) fn free_when_done(&mut self, id: BlockId) -> DriverResult<()> {
        if self.is_recording() {
            let reuse = self.state.options.graph_capture_record_stream_reuse;
            let markers = if reuse { self.free_markers(id) } else { Ok(Vec::new()) };
            let (markers, result) = match markers {
                Ok(markers) => (markers, Ok(())),
                Err(error) => (Vec::new(), Err(error)),
            };
            let deferred = Deferred { block: id, markers, in_capture: true };
            self.state.pending.deferred.push(deferred);
            return result;
        }
        let recorded = self.record_events(id);
        if !matches!(recorded, Ok(true)) {
            let deferred = Deferred { block: id, markers: Vec::new(), in_capture: false };
            self.state.pending.deferred.push(deferred);
        }
        recorded.map(drop)
    }

    /// Records an event on each stream that used the block; false if one of them is being captured. Then, and on
    /// failure, the streams without an event are still noted in the block.
    fn record_events(&mut self, id: BlockId) -> DriverResult<bool> {
        while let Some(uses) = &self.state.blocks[id].uses
            && let Some(&stream) = uses.streams.last()
        {
            if uses.ours.contains(&stream) && !self.lasts(stream) {
                let freed = self.state.moments.next();
                self.state.pending.awaiting_device.push((freed, id));
            } else {
                if !self.is_uncaptured(stream) {
                    return Ok(false);
                }
                let event = self.event_now(stream)?;
                self.state.pending.events.entry(stream).or_default().push_back((event, id));
            }
            let block = &mut self.state.blocks[id];
            block.events += 1;
            if let Some(uses) = &mut block.uses {
                uses.streams.pop();
            }
        }
        self.state.blocks[id].uses = None;
        Ok(true)
    }

    /// The device was waited for: completes the frees that waited for it.
    pub(crate) fn complete_awaiting_device(&mut self, proof: Proof) {
        let awaiting = &mut self.state.pending.awaiting_device;
        let is_done = |&mut (freed, _): &mut (Moment, BlockId)| proof.covers_device_until(freed);
        let done: Vec<_> = awaiting.extract_if(.., is_done).collect();
        for (_, id) in done {
            self.use_ended(id);
        }
    }

    /// Frees blocks whose events have finished, as many as an allocation has the time for. Never waits.
    pub(crate) fn process_events(&mut self) -> DriverResult<()> {
        let most = if self.state.pending.streams() <= FEW { FEW } else { SOME };
        self.process_up_to(most, FINISHED)
    }

    /// As [`process_events`](Self::process_events), for a request that finds no memory.
    pub(crate) fn process_many_events(&mut self) -> DriverResult<()> {
        self.process_up_to(MANY, usize::MAX)
    }

    /// Asks for the first event of each stream, until so many were not done or so many were. Where there are more
    /// streams than that, the next call goes on from there.
    fn process_up_to(&mut self, most_unfinished: usize, most_finished: usize) -> DriverResult<()> {
        self.record_deferred_events()?;
        let all = self.state.pending.events.len() <= most_unfinished;
        let first = self.state.pending.cursor.filter(|_| !all);
        let (mut at, mut unfinished, mut finished) = (first, 0, 0);
        self.state.pending.more = false;
        let mut has_turned = first.is_none();
        loop {
            let Pending { events, .. } = &self.state.pending;
            let from = at.map_or(Bound::Unbounded, Bound::Excluded);
            // Once round, and not beyond where it began.
            let to = first.filter(|_| has_turned).map_or(Bound::Unbounded, Bound::Included);
            let mut done = None;
            for (&stream, queue) in events.range((from, to)) {
                if unfinished == most_unfinished || finished == most_finished {
                    self.state.pending.more = true;
                    self.state.pending.cursor = at;
                    return Ok(());
                }
                let Some(&(event, block)) = queue.front() else { continue };
                if self.driver.event_query(event)? {
                    done = Some((stream, event, block));
                    break;
                }
                unfinished += 1;
                at = Some(stream);
            }
            match done {
                // The same stream is asked once more: `at` is the one before it.
                Some((stream, event, block)) => {
                    finished += 1;
                    self.pop_event(stream);
                    self.event_finished(event, block);
                }
                None if has_turned => return Ok(()),
                None => (at, has_turned) = (None, true),
            }
        }
    }

    /// The pending events (of one private pool, if given), for somebody who will wait for them without the lock.
    pub(crate) fn awaited(&mut self, only: Option<PoolId>) -> DriverResult<Vec<Awaited>> {
        self.record_deferred_events()?;
        let State { pending, pools, blocks, .. } = &*self.state;
        let is_asked_for =
            |block: BlockId| only.is_none_or(|only| only == pools[blocks[block].pool].id);
        let of_stream = |(&stream, queue): (&StreamId, &VecDeque<_>)| {
            let asked_for = queue.iter().filter(|&&(_, block)| is_asked_for(block));
            asked_for.map(|&(event, block)| (stream, event, block)).collect::<Vec<_>>()
        };
        Ok(pending.events.iter().flat_map(of_stream).collect())
    }

    /// Events were waited for. Another thread may have seen some finished before, and even recorded them anew for the
    /// same blocks: so they are asked for once more.
    pub(crate) fn waited_for(&mut self, awaited: &[Awaited]) -> DriverResult<()> {
        for of_stream in awaited.chunk_by(|a, b| a.0 == b.0) {
            let mut finished = Vec::with_capacity(of_stream.len());
            let asked = self.take_finished(of_stream, &mut finished);
            for (event, block) in finished {
                self.event_finished(event, block);
            }
            asked?;
        }
        Ok(())
    }

    /// Takes those of one stream's events that are finished out of its queue, in one walk over it.
    fn take_finished(
        &mut self,
        awaited: &[Awaited],
        finished: &mut Vec<(EventId, BlockId)>,
    ) -> DriverResult<()> {
        let Some(&(stream, ..)) = awaited.first() else { return Ok(()) };
        let Some(queue) = self.state.pending.events.get_mut(&stream) else { return Ok(()) };
        let mut left: FxHashSet<_> =
            awaited.iter().map(|&(_, event, block)| (event, block)).collect();
        let mut stay = Vec::new();
        let mut asked = Ok(());
        while !left.is_empty()
            && asked.is_ok()
            && let Some(it) = queue.pop_front()
        {
            let is_finished =
                if left.remove(&it) { self.driver.event_query(it.0) } else { Ok(false) };
            match is_finished {
                Ok(true) => finished.push(it),
                Ok(false) => stay.push(it),
                Err(error) => {
                    stay.push(it);
                    asked = Err(error);
                }
            }
        }
        stay.into_iter().rev().for_each(|it| queue.push_front(it));
        if queue.is_empty() {
            self.state.pending.events.remove(&stream);
        }
        asked
    }

    /// An event after all work that is queued on a stream now. The stream must be there, and must not be captured.
    pub(crate) fn event_now(&mut self, stream: StreamId) -> DriverResult<EventId> {
        let event = match self.state.pending.idle.pop() {
            Some(event) => event,
            None => self.driver.event_create()?,
        };
        match self.driver.event_record(event, stream) {
            Ok(()) => Ok(event),
            Err(error) => {
                self.state.pending.keep_event(event);
                Err(error)
            }
        }
    }

    /// Records the events that had to wait: for the end of a capture, or for a driver that failed.
    fn record_deferred_events(&mut self) -> DriverResult<()> {
        let mut index = self.state.pending.deferred.len();
        let mut captured = 0;
        while let Some(at) = index.checked_sub(1).filter(|_| captured < MOST_CAPTURED) {
            index = at;
            let deferred = &mut self.state.pending.deferred[at];
            let id = deferred.block;
            if let Some(uses) = &mut self.state.blocks[id].uses {
                let Uses { streams, in_capture, ours } = &mut **uses;
                // Work recorded in a capture is ordered before all that follows its end.
                if std::mem::take(&mut deferred.in_capture) {
                    streams.retain(|stream| !in_capture.contains(stream));
                    in_capture.clear();
                }
                // Since the free, the program may have destroyed the streams it named.
                ours.clone_from(streams);
            }
            if !self.record_events(id)? {
                // Somebody captures one of its streams: it is tried again later.
                captured += 1;
                continue;
            }
            self.state.pending.deferred.remove(at);
            if self.state.blocks[id].events == 0 {
                self.complete_free(id, Tag::NONE);
            }
        }
        Ok(())
    }

    /// Takes the first event out of its stream's queue.
    fn pop_event(&mut self, stream: StreamId) {
        if let Some(queue) = self.state.pending.events.get_mut(&stream) {
            queue.pop_front();
            if queue.is_empty() {
                self.state.pending.events.remove(&stream);
            }
        }
    }

    fn event_finished(&mut self, event: EventId, id: BlockId) {
        self.state.pending.idle.push(event);
        self.use_ended(id);
    }

    /// One of the uses that a pending block waits for has ended.
    fn use_ended(&mut self, id: BlockId) {
        let block = &mut self.state.blocks[id];
        block.events -= 1;
        if block.events == 0 && block.uses.is_none() {
            self.complete_free(id, Tag::NONE);
        }
    }

    // ---- reuse during a capture, by the order of the graph ----

    /// The last nodes, on every stream that used the block, of the graph being captured; empty if
    /// the block must wait for more than the graph.
    fn free_markers(&self, id: BlockId) -> DriverResult<Vec<NodeId>> {
        let block = &self.state.blocks[id];
        let mut markers = Vec::new();
        // Work from before the capture is not in its graph: it needs an event. A stream that the program did not name
        // may be gone.
        let before = |uses: &Uses| {
            !uses.ours.is_empty() || uses.streams.iter().any(|s| !uses.in_capture.contains(s))
        };
        // So may the block's own stream, unless it lasts.
        if !self.lasts(block.stream) || block.uses.as_deref().is_some_and(before) {
            return Ok(markers);
        }
        for &stream in [&block.stream].into_iter().chain(block.uses_without_event()) {
            let Some(capture) = self.driver.capture(stream)? else { return Ok(Vec::new()) };
            markers.extend(capture.terminals);
        }
        markers.sort_unstable();
        markers.dedup();
        Ok(markers)
    }

    /// Frees deferred blocks of `stream` whose last uses come, in the graph being captured, before
    /// all that the stream will do from now on.
    pub(crate) fn free_captured_blocks(&mut self, stream: StreamId) -> DriverResult<()> {
        let may_be_free = |deferred: &Deferred| {
            !deferred.markers.is_empty() && self.state.blocks[deferred.block].stream == stream
        };
        if !self.state.pending.deferred.iter().any(may_be_free) {
            return Ok(());
        }
        let Some(capture) = self.driver.capture(stream)? else { return Ok(()) };
        let mut ordered =
            self.state.pending.ordered.remove(&(capture.id, stream)).unwrap_or_default();
        let mut unseen = capture.terminals;
        while let Some(node) = unseen.pop() {
            if ordered.insert(node) {
                unseen.extend(self.driver.dependencies(node)?);
            }
        }
        let mut free = Vec::new();
        let Pending { deferred, .. } = &mut self.state.pending;
        let blocks = &self.state.blocks;
        deferred.retain(|deferred| {
            let done = !deferred.markers.is_empty()
                && blocks[deferred.block].stream == stream
                && deferred.markers.iter().all(|marker| ordered.contains(marker));
            if done {
                free.push(deferred.block);
            }
            !done
        });
        self.state.pending.ordered.insert((capture.id, stream), ordered);
        for id in free {
            self.state.blocks[id].uses = None;
            self.complete_free(id, Tag::NONE);
        }
        Ok(())
    }
}
