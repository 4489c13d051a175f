//! Frees that wait for other streams, by events.
//!
//! A block that other streams used gets one event per such stream when it is freed. It is free when
//! all of them have finished. Finished events are reused.
//!
//! The engine itself lets a stream use memory of another: a block that is borrowed, or in host
//! memory. The program did not name such a stream for the block, so it may destroy the stream
//! before the free. Unless the stream lasts, no event is recorded on it: the block is free after
//! the next wait for the whole device.
//!
//! The number of events queried at a time is bounded, however many streams there are. An allocation
//! queries a few, and the next one continues where it stopped. A request that finds no memory
//! queries many before it tries costlier steps.

use std::collections::VecDeque;
use std::ops::Bound;

use rustc_hash::FxHashSet;

use super::Streams;
use super::deferred::Deferred;
use super::proof::{Proof, is_uncaptured};
use crate::base::names::{Moment, PoolId};
use crate::driver::{Driver, DriverResult, EventId, StreamId};
use crate::heap::Heap;
use crate::heap::block::{BlockId, Uses};

/// How many unfinished streams an allocation queries at most. PyTorch's pools have this many
/// streams: up to here all are queried each time, as in PyTorch.
const FEW: usize = 64;

/// How many it queries if there are more streams than [`FEW`]: each query is likely to miss the
/// processor's caches.
const SOME: usize = 16;

/// Like [`FEW`], for a request that finds no memory. More would hold the lock for too long.
const MANY: usize = 1024;

/// How many frees an allocation completes at most.
const FINISHED: usize = 1024;

/// How many events are waited for without the lock before their frees are completed with the lock.
pub(crate) const AT_ONCE: usize = 1024;

/// An event on a stream, and the block whose free waits for it.
pub(crate) type Awaited = (StreamId, EventId, BlockId);

impl Streams {
    // ---- which streams use a block ----

    /// Notes that the program uses a block on `stream`.
    pub(crate) fn record_use(
        &mut self,
        heap: &mut Heap,
        driver: &impl Driver,
        id: BlockId,
        stream: StreamId,
    ) {
        let block = &heap[id];
        if block.lane.stream == stream {
            return;
        }
        // A stream that only borrowed the block does not mark the lane as shared.
        if !block.users.without_event().contains(&stream) {
            heap.set_shared(block.lane);
        }
        self.note_use(heap, driver, id, stream);
        // From now on the program itself vouches that the stream exists at the free.
        if let Some(uses) = &mut heap.users_mut(id).uses {
            uses.ours.retain(|&noted| noted != stream);
        }
    }

    /// Notes that the engine lets `stream` use a block of another stream, without the program's
    /// knowledge.
    pub(crate) fn note_borrowed(
        &mut self,
        heap: &mut Heap,
        driver: &impl Driver,
        id: BlockId,
        stream: StreamId,
    ) {
        self.note_use(heap, driver, id, stream);
        let uses = heap.users_mut(id).uses.get_or_insert_default();
        if !uses.ours.contains(&stream) {
            uses.ours.push(stream);
        }
    }

    /// Notes that a block in host memory is released only after its own stream, too, is done with
    /// it.
    pub(crate) fn note_own_stream(&mut self, heap: &mut Heap, id: BlockId) {
        let stream = heap[id].lane.stream;
        let uses = heap.users_mut(id).uses.get_or_insert_default();
        if !uses.streams.contains(&stream) {
            uses.streams.push(stream);
            uses.ours.push(stream);
        }
    }

    fn note_use(&mut self, heap: &mut Heap, driver: &impl Driver, id: BlockId, stream: StreamId) {
        // While allocations go to a private pool, PyTorch treats every use as part of a capture. In
        // a user's own pool it is not, and the work would not be waited for: ask the driver. If the
        // driver does not answer, the cost is at worst one wait too many.
        let captured =
            self.is_recording() && driver.capture(stream).is_ok_and(|found| found.is_some());
        let Uses { streams, in_capture, .. } =
            &mut **heap.users_mut(id).uses.get_or_insert_default();
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

    // ---- freeing ----

    /// Frees a block that other streams used, once they are done with it. With `reuse`, the order
    /// of a captured graph may prove that.
    pub(crate) fn free_when_done(
        &mut self,
        heap: &mut Heap,
        driver: &impl Driver,
        id: BlockId,
        reuse: bool,
    ) -> DriverResult<()> {
        if self.is_recording() {
            let markers = if reuse { self.free_markers(heap, driver, id) } else { Ok(Vec::new()) };
            let (markers, result) = match markers {
                Ok(markers) => (markers, Ok(())),
                Err(error) => (Vec::new(), Err(error)),
            };
            self.deferred.push(Deferred { block: id, markers, in_capture: true });
            return result;
        }
        let recorded = self.record_events(heap, driver, id);
        if !matches!(recorded, Ok(true)) {
            self.deferred.push(Deferred { block: id, markers: Vec::new(), in_capture: false });
        }
        recorded.map(drop)
    }

    /// Records an event on each stream that used the block. Returns false if one of them is being
    /// captured. Then, and on failure, the streams without an event stay noted in the block.
    pub(super) fn record_events(
        &mut self,
        heap: &mut Heap,
        driver: &impl Driver,
        id: BlockId,
    ) -> DriverResult<bool> {
        while let Some(uses) = &heap[id].users.uses
            && let Some(&stream) = uses.streams.last()
        {
            if uses.ours.contains(&stream) && !self.lasts(stream) {
                let freed = self.next_moment();
                self.awaiting_device.push((freed, id));
            } else {
                if !is_uncaptured(driver, stream) {
                    return Ok(false);
                }
                let event = self.event_now(driver, stream)?;
                self.events.entry(stream).or_default().push_back((event, id));
            }
            let users = heap.users_mut(id);
            users.events += 1;
            if let Some(uses) = &mut users.uses {
                uses.streams.pop();
            }
        }
        heap.users_mut(id).uses = None;
        Ok(true)
    }

    // ---- finding out what is done ----

    /// Finds blocks that no stream uses any more, as many as an allocation has time for. Never
    /// waits.
    pub(crate) fn process(&mut self, heap: &mut Heap, driver: &impl Driver) -> DriverResult<()> {
        let most = if self.events.len() <= FEW { FEW } else { SOME };
        self.process_up_to(heap, driver, most, FINISHED)
    }

    /// Like [`process`](Self::process), for a request that finds no memory.
    pub(crate) fn process_many(
        &mut self,
        heap: &mut Heap,
        driver: &impl Driver,
    ) -> DriverResult<()> {
        self.process_up_to(heap, driver, MANY, usize::MAX)
    }

    /// Returns how often [`process_many`](Self::process_many) must be called to query all streams.
    pub(crate) fn rounds(&self) -> usize {
        self.events.len().div_ceil(MANY)
    }

    /// Queries the first event of each stream, until `most_unfinished` were not done or
    /// `most_finished` were. If there are more streams, the next call continues from there.
    fn process_up_to(
        &mut self,
        heap: &mut Heap,
        driver: &impl Driver,
        most_unfinished: usize,
        most_finished: usize,
    ) -> DriverResult<()> {
        self.record_deferred(heap, driver)?;
        let all = self.events.len() <= most_unfinished;
        let first = self.pass.cursor.filter(|_| !all);
        let (mut at, mut unfinished, mut finished) = (first, 0, 0);
        self.pass.more = false;
        let mut has_turned = first.is_none();
        loop {
            let from = at.map_or(Bound::Unbounded, Bound::Excluded);
            // Once around, and not beyond the start.
            let to = first.filter(|_| has_turned).map_or(Bound::Unbounded, Bound::Included);
            let mut done = None;
            for (&stream, queue) in self.events.range((from, to)) {
                if unfinished == most_unfinished || finished == most_finished {
                    self.pass.more = true;
                    self.pass.cursor = at;
                    return Ok(());
                }
                let Some(&(event, block)) = queue.front() else { continue };
                if driver.event_query(event)? {
                    done = Some((stream, event, block));
                    break;
                }
                unfinished += 1;
                at = Some(stream);
            }
            match done {
                // The same stream is queried once more: `at` is the one before it.
                Some((stream, event, block)) => {
                    finished += 1;
                    self.pop_event(stream);
                    self.event_finished(heap, event, block);
                }
                None if has_turned => return Ok(()),
                None => (at, has_turned) = (None, true),
            }
        }
    }

    /// Finds the blocks that waited for the device, after a wait for it.
    pub(crate) fn device_waited_for(&mut self, heap: &mut Heap, proof: Proof) {
        let is_done = |&mut (freed, _): &mut (Moment, BlockId)| proof.covers_device_until(freed);
        let done: Vec<_> = self.awaiting_device.extract_if(.., is_done).collect();
        for (_, id) in done {
            self.use_ended(heap, id);
        }
    }

    /// Returns the pending events (of one private pool, if given), for a caller that will wait for
    /// them without the lock.
    pub(crate) fn awaited(
        &mut self,
        heap: &mut Heap,
        driver: &impl Driver,
        only: Option<PoolId>,
    ) -> DriverResult<Vec<Awaited>> {
        self.record_deferred(heap, driver)?;
        let is_asked_for =
            |block: BlockId| only.is_none_or(|only| only == heap[heap[block].lane.pool].id);
        let of_stream = |(&stream, queue): (&StreamId, &VecDeque<_>)| {
            let asked_for = queue.iter().filter(|&&(_, block)| is_asked_for(block));
            asked_for.map(|&(event, block)| (stream, event, block)).collect::<Vec<_>>()
        };
        Ok(self.events.iter().flat_map(of_stream).collect())
    }

    /// Takes note of events that were waited for. Another thread may have seen some of them
    /// finished before, and even recorded them again for the same blocks: so they are queried once
    /// more.
    pub(crate) fn events_waited_for(
        &mut self,
        heap: &mut Heap,
        driver: &impl Driver,
        awaited: &[Awaited],
    ) -> DriverResult<()> {
        for of_stream in awaited.chunk_by(|a, b| a.0 == b.0) {
            let mut finished = Vec::with_capacity(of_stream.len());
            let asked = self.take_finished(driver, of_stream, &mut finished);
            for (event, block) in finished {
                self.event_finished(heap, event, block);
            }
            asked?;
        }
        Ok(())
    }

    /// Removes the finished events of one stream from its queue, in one walk over it.
    fn take_finished(
        &mut self,
        driver: &impl Driver,
        awaited: &[Awaited],
        finished: &mut Vec<(EventId, BlockId)>,
    ) -> DriverResult<()> {
        let Some(&(stream, ..)) = awaited.first() else { return Ok(()) };
        let Some(queue) = self.events.get_mut(&stream) else { return Ok(()) };
        let mut left: FxHashSet<_> =
            awaited.iter().map(|&(_, event, block)| (event, block)).collect();
        let mut stay = Vec::new();
        let mut asked = Ok(());
        while !left.is_empty()
            && asked.is_ok()
            && let Some(it) = queue.pop_front()
        {
            let is_finished = if left.remove(&it) { driver.event_query(it.0) } else { Ok(false) };
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
            self.events.remove(&stream);
        }
        asked
    }

    /// Removes the first event from its stream's queue.
    fn pop_event(&mut self, stream: StreamId) {
        if let Some(queue) = self.events.get_mut(&stream) {
            queue.pop_front();
            if queue.is_empty() {
                self.events.remove(&stream);
            }
        }
    }

    fn event_finished(&mut self, heap: &mut Heap, event: EventId, id: BlockId) {
        self.idle_events.push(event);
        self.use_ended(heap, id);
    }

    /// Notes that one of the uses that a pending block waits for has ended.
    fn use_ended(&mut self, heap: &mut Heap, id: BlockId) {
        let users = heap.users_mut(id);
        users.events -= 1;
        if users.are_none() {
            self.done.push_back(id);
        }
    }

    // ---- events ----

    /// Records an event after all work that is queued on a stream now. The stream must exist, and
    /// must not be captured.
    pub(super) fn event_now(
        &mut self,
        driver: &impl Driver,
        stream: StreamId,
    ) -> DriverResult<EventId> {
        let event = match self.idle_events.pop() {
            Some(event) => event,
            None => driver.event_create()?,
        };
        match driver.event_record(event, stream) {
            Ok(()) => Ok(event),
            Err(error) => {
                self.keep_event(event);
                Err(error)
            }
        }
    }

    /// Keeps an event for reuse.
    pub(super) fn keep_event(&mut self, event: EventId) {
        self.idle_events.push(event);
    }

    /// Keeps events for reuse.
    pub(crate) fn keep_events(&mut self, events: impl IntoIterator<Item = EventId>) {
        self.idle_events.extend(events);
    }

    /// Waits, without the lock, until an event has finished.
    pub(crate) fn wait_for_event(driver: &impl Driver, event: EventId) -> DriverResult<()> {
        driver.event_synchronize(event)
    }

    /// Waits, without the lock, for all work on the device.
    pub(crate) fn wait_for_device(driver: &impl Driver) -> DriverResult<()> {
        // Any stream will do: the driver waits for all of them.
        driver.stream_synchronize(StreamId(0))
    }

    /// Returns the events that are not in use, for the engine to destroy at its end.
    pub(crate) fn take_idle_events(&mut self) -> Vec<EventId> {
        std::mem::take(&mut self.idle_events)
    }
}
