//! The streams of a simulated device: queued work, events, and captures into graphs.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::{Capture, EventId, NodeId, StreamId};

#[derive(Debug, Default)]
pub(super) struct Streams {
    /// The streams that were used. All work of any other stream counts as finished.
    streams: BTreeMap<StreamId, Stream>,
    /// The stream and the work number that each event marks, once it is recorded.
    events: BTreeMap<EventId, Option<(StreamId, u64)>>,
    /// Streams that are being captured.
    capturing: BTreeSet<StreamId>,
    /// Streams that the program destroyed.
    destroyed: BTreeSet<StreamId>,
    /// Whether a wait for the device leaves work unfinished.
    outlasts_waits: bool,
    /// The nodes of the graphs being captured, each with the nodes that it follows.
    nodes: BTreeMap<NodeId, Vec<NodeId>>,
}

#[derive(Debug, Default)]
struct Stream {
    /// The number of the last work that was queued; the first is 1.
    launched: u64,
    /// The number of the last work that finished.
    finished: u64,
    /// For each unfinished work, its place in the order of launches on all streams.
    unfinished: VecDeque<u64>,
    /// The capture under way: its number, and the nodes that the next work follows.
    capture: Option<(u64, BTreeSet<NodeId>)>,
}

impl Stream {
    /// Finishes the work up to number `work`, as far as it was queued.
    fn finish_until(&mut self, work: u64) {
        while self.finished < work.min(self.launched) {
            self.unfinished.pop_front();
            self.finished += 1;
        }
    }

    fn finish(&mut self) {
        self.unfinished.clear();
        self.finished = self.launched;
    }
}

/// Work.
impl Streams {
    /// Queues work on a stream and returns its number there. On a stream that is being captured,
    /// the work becomes the graph node `node` instead.
    pub(super) fn launch(&mut self, stream: StreamId, node: NodeId) -> u64 {
        let stream = self.streams.entry(stream).or_default();
        match &mut stream.capture {
            None => {
                stream.launched += 1;
                stream.unfinished.push_back(node.0);
            }
            Some((_, terminals)) => {
                let follows = std::mem::replace(terminals, BTreeSet::from([node]));
                self.nodes.insert(node, follows.into_iter().collect());
            }
        }
        stream.launched
    }

    pub(super) fn finish(&mut self, stream: StreamId) {
        if let Some(stream) = self.streams.get_mut(&stream) {
            stream.finish();
        }
    }

    pub(super) fn finish_oldest(&mut self) -> bool {
        let queued = self.streams.values_mut().filter(|stream| !stream.unfinished.is_empty());
        let Some(stream) = queued.min_by_key(|stream| stream.unfinished.front().copied()) else {
            return false;
        };
        stream.finish_until(stream.finished + 1);
        true
    }

    pub(super) fn finish_until(&mut self, stream: StreamId, work: u64) {
        if let Some(stream) = self.streams.get_mut(&stream) {
            stream.finish_until(work);
        }
    }

    pub(super) fn is_finished(&self, stream: StreamId, work: u64) -> bool {
        self.streams.get(&stream).is_none_or(|stream| stream.finished >= work)
    }

    pub(super) fn finish_all(&mut self) {
        self.streams.values_mut().for_each(Stream::finish);
        // The work of an unknown stream counts as finished: destroyed streams can be dropped.
        self.streams.retain(|stream, _| !self.destroyed.contains(stream));
    }

    /// Waits for the device.
    pub(super) fn synchronize(&mut self) {
        if !self.outlasts_waits {
            self.finish_all();
        }
    }

    pub(super) fn set_outlasts_waits(&mut self) {
        self.outlasts_waits = true;
    }

    pub(super) fn destroy(&mut self, stream: StreamId) {
        self.destroyed.insert(stream);
    }

    pub(super) fn is_destroyed(&self, stream: StreamId) -> bool {
        self.destroyed.contains(&stream)
    }
}

/// Events. Each method returns `None` for an unknown event.
impl Streams {
    pub(super) fn add_event(&mut self, event: EventId) {
        self.events.insert(event, None);
    }

    pub(super) fn remove_event(&mut self, event: EventId) -> Option<()> {
        self.events.remove(&event).map(|_| ())
    }

    /// Marks the work queued on `stream` so far.
    pub(super) fn record(&mut self, event: EventId, stream: StreamId) -> Option<()> {
        let launched = self.streams.entry(stream).or_default().launched;
        *self.events.get_mut(&event)? = Some((stream, launched));
        Some(())
    }

    /// Whether the marked work is finished. An event that was never recorded is done.
    pub(super) fn is_event_done(&self, event: EventId) -> Option<bool> {
        let mark = self.events.get(&event)?;
        Some(mark.is_none_or(|(stream, launched)| self.is_finished(stream, launched)))
    }

    /// Finishes the marked work.
    pub(super) fn finish_event(&mut self, event: EventId) -> Option<()> {
        if let Some((stream, launched)) = *self.events.get(&event)? {
            self.finish_until(stream, launched);
        }
        Some(())
    }
}

/// Captures.
impl Streams {
    pub(super) fn is_capturing(&self) -> bool {
        !self.capturing.is_empty()
    }

    /// Starts the capture number `id` on a stream.
    pub(super) fn begin_capture(&mut self, stream: StreamId, id: u64) {
        self.streams.entry(stream).or_default().capture = Some((id, BTreeSet::new()));
        self.capturing.insert(stream);
    }

    pub(super) fn wait_for(&mut self, waiter: StreamId, other: StreamId) {
        let joined = self.streams.get(&other).and_then(|stream| stream.capture.clone());
        if let Some((id, nodes)) = joined {
            self.capturing.insert(waiter);
            let waiter = self.streams.entry(waiter).or_default();
            waiter.capture.get_or_insert((id, BTreeSet::new())).1.extend(nodes);
        }
    }

    pub(super) fn end_capture(&mut self, stream: StreamId) {
        let Some((id, _)) = self.streams.get(&stream).and_then(|stream| stream.capture.clone())
        else {
            return;
        };
        let Self { streams, capturing, nodes, .. } = self;
        capturing.retain(|stream| {
            let capture = streams.get_mut(stream).map(|stream| &mut stream.capture);
            capture.and_then(|capture| capture.take_if(|(capture, _)| *capture == id)).is_none()
        });
        // Nodes may belong to another capture, which still asks for their dependencies.
        if capturing.is_empty() {
            nodes.clear();
        }
    }

    pub(super) fn capture_of(&self, stream: StreamId) -> Option<Capture> {
        let (id, terminals) = self.streams.get(&stream)?.capture.as_ref()?;
        Some(Capture { id: *id, terminals: terminals.iter().copied().collect() })
    }

    pub(super) fn dependencies(&self, node: NodeId) -> Option<Vec<NodeId>> {
        self.nodes.get(&node).cloned()
    }
}
