//! Streams that come and go.

use std::collections::BTreeSet;

use super::{Futures, World};
use crate::{LastingStreams, StreamId};

const STREAMS: u8 = 4;

/// The streams of a program.
#[derive(Debug)]
pub(super) struct Streams {
    /// The handle that each has now.
    handles: [StreamId; STREAMS as usize],
    /// How many there have been.
    made: u64,
    /// Those the program said it never destroys. What was said once holds.
    pub(super) promised: BTreeSet<StreamId>,
    /// Those that the program named for blocks whose events may still be to be recorded.
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
    pub(super) fn is_there(&self, stream: StreamId) -> bool {
        self.handles.contains(&stream)
    }
}

impl World {
    pub(super) fn stream(&self, index: u8) -> StreamId {
        self.streams.handles[usize::from(index % STREAMS)]
    }

    /// All events that had to be recorded have been, unless a capture kept them back.
    pub(super) fn events_recorded(&mut self, all_went_well: bool) {
        if all_went_well && self.open.is_empty() {
            self.streams.deferred.clear();
        }
    }

    /// Destroys a stream that the program may destroy. A block that it named the stream for has to go first: that is so
    /// with PyTorch too.
    pub(super) fn destroy_stream(&mut self, index: u8, futures: &mut Futures<'_>) {
        let stream = self.stream(index);
        let kept = stream == StreamId(0)
            || self.streams.promised.contains(&stream)
            || self.streams.deferred.contains(&stream)
            || self.silent == Some(stream)
            || self.joined().contains(&stream)
            || self.live.values().any(|life| life.others.contains(&stream));
        if kept {
            return;
        }
        futures.drop_of(stream);
        self.sim.destroy_stream(stream);
        self.gpu.checked.destroy_stream(stream);
        self.streams.handles[usize::from(index % STREAMS)] = StreamId(self.streams.made);
        self.streams.made += 1;
    }

    /// Says which streams last. That all do can be said only while none has been destroyed.
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
