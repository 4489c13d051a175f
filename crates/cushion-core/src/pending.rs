//! Frees that wait for other streams.
//!
//! A free on the block's own stream needs no event: stream order protects it. A block that other
//! streams used gets one event per such stream when it is freed, and is free when all of them have
//! finished. Events come from a pool of their own. While allocations go to a private pool a capture
//! may be under way, in which events may not be queried: such frees are deferred until it has ended.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;

use rustc_hash::{FxHashMap, FxHashSet};

use crate::block::{BlockId, Uses};
use crate::driver::{Driver, DriverResult, EventId, NodeId, StreamId};
use crate::error::AddressError;
use crate::history::Context;
use crate::locked::{Locked, State};
use crate::pool::PoolId;

/// Blocks that wait, and the events they wait for.
#[derive(Debug, Default)]
pub(crate) struct Pending {
    /// Events by stream, oldest first: one that is not done hides the later ones of its own stream
    /// only.
    events: BTreeMap<StreamId, VecDeque<(EventId, BlockId)>>,
    /// Blocks whose events are still to be recorded.
    deferred: Vec<Deferred>,
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

    /// How many events are waited for.
    pub(crate) fn count(&self) -> usize {
        self.events.values().map(VecDeque::len).sum()
    }

    /// The first stream with events beyond `from`.
    fn next_stream(&self, from: Bound<StreamId>) -> Option<StreamId> {
        self.events.range((from, Bound::Unbounded)).next().map(|(&stream, _)| stream)
    }

    /// How many events each block waits for; blocks with deferred events too.
    pub(crate) fn waiting(&self) -> BTreeMap<BlockId, u32> {
        let mut waiting = BTreeMap::new();
        for (_, block) in self.events.values().flatten() {
            *waiting.entry(*block).or_insert(0) += 1;
        }
        for deferred in &self.deferred {
            waiting.entry(deferred.block).or_insert(0);
        }
        waiting
    }

    /// Keeps an event that nobody waits for any more.
    pub(crate) fn keep_event(&mut self, event: EventId) {
        self.idle.push(event);
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
        }
        Ok(())
    }

    /// Notes that `stream` uses a block of another stream.
    pub(crate) fn note_use(&mut self, id: BlockId, stream: StreamId) {
        // PyTorch takes every use while allocations go to a private pool for one in a capture. In a
        // pool of the user's own it is not, and the work would go unwaited for: ask the driver. A
        // driver that will not say means a wait too many at worst.
        let captured =
            self.is_recording() && self.driver.capture(stream).is_ok_and(|found| found.is_some());
        let block = &mut self.state.blocks[id];
        let Uses { streams, in_capture } = &mut **block.uses.get_or_insert_default();
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
        self.record_events(id).inspect_err(|_| {
            let deferred = Deferred { block: id, markers: Vec::new(), in_capture: false };
            self.state.pending.deferred.push(deferred);
        })
    }

    /// Records an event on each stream that used the block. On failure the streams without an event
    /// are still noted in the block.
    fn record_events(&mut self, id: BlockId) -> DriverResult<()> {
        while let Some(&stream) = self.state.blocks[id].uses_without_event().last() {
            let event = self.event_now(stream)?;
            let block = &mut self.state.blocks[id];
            block.events += 1;
            if let Some(uses) = &mut block.uses {
                uses.streams.pop();
            }
            self.state.pending.events.entry(stream).or_default().push_back((event, id));
        }
        self.state.blocks[id].uses = None;
        Ok(())
    }

    /// Frees blocks whose events have finished. Never waits.
    pub(crate) fn process_events(&mut self) -> DriverResult<()> {
        self.record_deferred_events()?;
        let mut next = self.state.pending.next_stream(Bound::Unbounded);
        while let Some(stream) = next {
            while let Some(&(event, block)) = self.front_event(stream) {
                if !self.driver.event_query(event)? {
                    break;
                }
                self.pop_event(stream, 0);
                self.event_finished(event, block);
            }
            next = self.state.pending.next_stream(Bound::Excluded(stream));
        }
        Ok(())
    }

    /// The first pending event (of one private pool, if given), for somebody who will wait for it without
    /// the lock.
    pub(crate) fn first_event(
        &mut self,
        only: Option<PoolId>,
    ) -> DriverResult<Option<(StreamId, EventId, BlockId)>> {
        self.record_deferred_events()?;
        let State { pending, pools, blocks, .. } = &*self.state;
        let is_asked_for =
            |block: BlockId| only.is_none_or(|only| only == pools[blocks[block].pool].id);
        Ok(pending.events.iter().find_map(|(&stream, queue)| {
            let &(event, block) = queue.iter().find(|&&(_, block)| is_asked_for(block))?;
            Some((stream, event, block))
        }))
    }

    /// An event was waited for. Another thread may have seen it finished before, and even recorded it anew for the
    /// same block: so it is asked for once more.
    pub(crate) fn waited_for(
        &mut self,
        (stream, event, block): (StreamId, EventId, BlockId),
    ) -> DriverResult<()> {
        let queue = self.state.pending.events.get(&stream);
        let index = queue.and_then(|queue| queue.iter().position(|&it| it == (event, block)));
        if let Some(index) = index
            && self.driver.event_query(event)?
        {
            self.pop_event(stream, index);
            self.event_finished(event, block);
        }
        Ok(())
    }

    /// Whether all work queued on a stream is done. Never waits, and must not be asked during a capture.
    pub(crate) fn is_idle(&mut self, stream: StreamId) -> DriverResult<bool> {
        let event = self.event_now(stream)?;
        let done = self.driver.event_query(event);
        self.state.pending.keep_event(event);
        done
    }

    /// An event after all work that is queued on a stream now. Must not be asked for during a capture.
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
        while let Some(deferred) = self.state.pending.deferred.last_mut() {
            let id = deferred.block;
            // Work recorded in a capture is ordered before all that follows its end.
            if std::mem::take(&mut deferred.in_capture)
                && let Some(uses) = &mut self.state.blocks[id].uses
            {
                let Uses { streams, in_capture } = &mut **uses;
                streams.retain(|stream| !in_capture.contains(stream));
                in_capture.clear();
            }
            self.record_events(id)?;
            self.state.pending.deferred.pop();
            if self.state.blocks[id].events == 0 {
                self.complete_free(id, Context::NONE);
            }
        }
        Ok(())
    }

    fn front_event(&self, stream: StreamId) -> Option<&(EventId, BlockId)> {
        self.state.pending.events.get(&stream)?.front()
    }

    /// Takes an event out of its stream's queue.
    fn pop_event(&mut self, stream: StreamId, index: usize) {
        if let Some(queue) = self.state.pending.events.get_mut(&stream) {
            queue.remove(index);
            if queue.is_empty() {
                self.state.pending.events.remove(&stream);
            }
        }
    }

    fn event_finished(&mut self, event: EventId, id: BlockId) {
        self.state.pending.idle.push(event);
        let block = &mut self.state.blocks[id];
        block.events -= 1;
        if block.events == 0 && block.uses.is_none() {
            self.complete_free(id, Context::NONE);
        }
    }

    // ---- reuse during a capture, by the order of the graph ----

    /// The last nodes, on every stream that used the block, of the graph being captured; empty if
    /// the block must wait for more than the graph.
    fn free_markers(&self, id: BlockId) -> DriverResult<Vec<NodeId>> {
        let block = &self.state.blocks[id];
        let mut markers = Vec::new();
        // Work from before the capture is not in its graph: it needs an event.
        let before = |uses: &Uses| uses.streams.iter().any(|s| !uses.in_capture.contains(s));
        if block.uses.as_deref().is_some_and(before) {
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
            self.complete_free(id, Context::NONE);
        }
        Ok(())
    }
}
