//! Frees whose events cannot be recorded yet: during a capture, or because the driver failed.
//!
//! During a capture, the order of the captured graph may prove that a block is free for its own
//! stream, without an event.

use super::Streams;
use crate::driver::{Driver, DriverResult, NodeId, StreamId};
use crate::heap::Heap;
use crate::heap::block::{BlockId, Uses};

/// How many blocks that wait for the end of a capture are checked in one call.
const MOST_CAPTURED: u32 = 16;

/// A block whose events are still to be recorded.
#[derive(Debug)]
pub(super) struct Deferred {
    pub(super) block: BlockId,
    /// The last nodes of the captured graph that use the block; empty if it must wait for the end
    /// of the capture.
    pub(super) markers: Vec<NodeId>,
    /// Whether it was freed during a capture. Uses recorded in that capture need no event after it.
    pub(super) in_capture: bool,
}

impl Streams {
    /// Records the events that had to wait for the end of a capture, or because the driver failed.
    pub(super) fn record_deferred(
        &mut self,
        heap: &mut Heap,
        driver: &impl Driver,
    ) -> DriverResult<()> {
        let mut index = self.deferred.len();
        let mut captured = 0;
        while let Some(at) = index.checked_sub(1).filter(|_| captured < MOST_CAPTURED) {
            index = at;
            let deferred = &mut self.deferred[at];
            let id = deferred.block;
            if let Some(uses) = &mut heap.users_mut(id).uses {
                let Uses { streams, in_capture, ours } = &mut **uses;
                // Work recorded in a capture is ordered before everything that follows its end.
                if std::mem::take(&mut deferred.in_capture) {
                    streams.retain(|stream| !in_capture.contains(stream));
                    in_capture.clear();
                }
                // Since the free, the program may have destroyed the streams that it named.
                ours.clone_from(streams);
            }
            if !self.record_events(heap, driver, id)? {
                // One of its streams is being captured: it is tried again later.
                captured += 1;
                continue;
            }
            self.deferred.remove(at);
            if heap[id].users.are_none() {
                self.done.push_back(id);
            }
        }
        Ok(())
    }

    /// Returns the last nodes of the captured graph, on every stream that used the block; empty if
    /// the block must wait for more than the graph.
    pub(super) fn free_markers(
        &self,
        heap: &Heap,
        driver: &impl Driver,
        id: BlockId,
    ) -> DriverResult<Vec<NodeId>> {
        let block = &heap[id];
        let mut markers = Vec::new();
        // Work from before the capture is not in its graph and needs an event. A stream that the
        // program did not name may no longer exist.
        let before = |uses: &Uses| {
            !uses.ours.is_empty() || uses.streams.iter().any(|s| !uses.in_capture.contains(s))
        };
        // The block's own stream may no longer exist either, unless it lasts.
        if !self.lasts(block.lane.stream) || block.users.uses.as_deref().is_some_and(before) {
            return Ok(markers);
        }
        for &stream in [&block.lane.stream].into_iter().chain(block.users.without_event()) {
            let Some(capture) = driver.capture(stream)? else { return Ok(Vec::new()) };
            markers.extend(capture.terminals);
        }
        markers.sort_unstable();
        markers.dedup();
        Ok(markers)
    }

    /// Finds deferred blocks of `stream` whose last uses come, in the captured graph, before all
    /// later work of the stream: they are done.
    pub(crate) fn process_capture(
        &mut self,
        heap: &mut Heap,
        driver: &impl Driver,
        stream: StreamId,
    ) -> DriverResult<()> {
        let may_be_free = |deferred: &Deferred| {
            !deferred.markers.is_empty() && heap[deferred.block].lane.stream == stream
        };
        if !self.deferred.iter().any(may_be_free) {
            return Ok(());
        }
        let Some(capture) = driver.capture(stream)? else { return Ok(()) };
        let mut ordered = self.ordered.remove(&(capture.id, stream)).unwrap_or_default();
        let mut unseen = capture.terminals;
        while let Some(node) = unseen.pop() {
            if ordered.insert(node) {
                unseen.extend(driver.dependencies(node)?);
            }
        }
        let done = &mut self.done;
        self.deferred.retain(|deferred| {
            let is_done = !deferred.markers.is_empty()
                && heap[deferred.block].lane.stream == stream
                && deferred.markers.iter().all(|marker| ordered.contains(marker));
            if is_done {
                heap.users_mut(deferred.block).uses = None;
                done.push_back(deferred.block);
            }
            !is_done
        });
        self.ordered.insert((capture.id, stream), ordered);
        Ok(())
    }
}
