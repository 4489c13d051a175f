//! Streams that the program creates and destroys.

use std::collections::BTreeSet;

use super::{Futures, World};
use crate::{LastingStreams, StreamId};

const STREAMS: u8 = 4;

/// The streams of a program.
#[derive(Debug)]
pub(super) struct Streams {
    /// The current handle of each stream.
    handles: [StreamId; STREAMS as usize],
    /// The number of streams created so far.
    made: u64,
    /// Streams that the program promised never to destroy. A promise is never withdrawn.
    pub(super) promised: BTreeSet<StreamId>,
    /// Streams on which the engine may still have to record an event for a freed block.
    pub(super) deferred: BTreeSet<StreamId>,
}

impl Default for Streams {
    fn default() -> Self {
        Self {
            handles: [0, 1, 2, 3].map(StreamId),
            made: STREAMS.into(),
            promised: BTreeSet::from([StreamId(1)]),
            deferred: BTreeSet::new(),
        }
    }
}

impl Streams {
    pub(super) fn exists(&self, stream: StreamId) -> bool {
        self.handles.contains(&stream)
    }
}

impl World {
    pub(super) fn stream(&self, index: u8) -> StreamId {
        self.streams.handles[usize::from(index % STREAMS)]
    }

    pub(super) fn process_events(&mut self) {
        let processed = self.engine.process_events();
        self.events_recorded(processed.is_ok());
        self.may_fail(processed.err());
    }

    /// Notes that the engine recorded all deferred events, unless it failed or an open pool still
    /// defers them.
    pub(super) fn events_recorded(&mut self, succeeded: bool) {
        if succeeded && self.pools.open.is_empty() {
            self.streams.deferred.clear();
        }
    }

    /// Destroys a stream if the program may do so. As with PyTorch, the program must first free all
    /// blocks that it recorded the stream for.
    pub(super) fn destroy_stream(&mut self, index: u8, futures: &mut Futures<'_>) {
        let stream = self.stream(index);
        let kept = stream == StreamId(0)
            || self.streams.promised.contains(&stream)
            || self.streams.deferred.contains(&stream)
            || self.captures.silent == Some(stream)
            || self.captures.joined().contains(&stream)
            || self.memory.live.values().any(|life| life.others.contains(&stream));
        if kept {
            return;
        }
        futures.drop_of(stream);
        self.sim.destroy_stream(stream);
        self.gpu.checked.destroy_stream(stream);
        self.streams.handles[usize::from(index % STREAMS)] = StreamId(self.streams.made);
        self.streams.made += 1;
    }

    /// Promises that some streams are never destroyed. The program can promise that for all streams
    /// only if it has destroyed none.
    pub(super) fn set_lasting(&mut self, which: u8) {
        let lasting = match which % 8 {
            0 | 1 => LastingStreams::Unknown,
            2 if self.streams.made == u64::from(STREAMS) => {
                self.streams.promised.extend(self.streams.handles);
                LastingStreams::All
            }
            _ => {
                if which & 0x80 != 0 {
                    self.streams.promised.insert(self.stream(which / 8));
                }
                LastingStreams::These(self.streams.promised.clone())
            }
        };
        self.engine.set_lasting_streams(lasting);
    }
}
