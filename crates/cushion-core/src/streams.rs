//! Streams: the work that may still use memory, and the proof that it is done.
//!
//! A free on the block's own stream needs no event: stream order protects it. A block that other
//! streams used is *pending* until an event on each of them has finished. While allocations go to a
//! private pool, a capture may be under way, during which events may be neither recorded nor
//! queried.
//!
//! Only this room records and polls events, and only [`proof`] states that memory is idle.

pub(crate) mod captures;
mod check;
mod deferred;
mod events;
pub(crate) mod proof;

use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};

use rustc_hash::{FxHashMap, FxHashSet};

use self::captures::Capture;
use self::deferred::Deferred;
use self::proof::LastingStreams;
use crate::base::names::{Moment, Moments};
use crate::driver::{EventId, NodeId, StreamId};
use crate::heap::block::BlockId;

pub(crate) use self::events::AT_ONCE;

/// The known work on streams.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    /// Counts completed frees and released pools.
    moments: Moments,
    lasting: LastingStreams,
    /// Private pools that allocations go to now, the latest last.
    captures: Vec<Capture>,
    /// Events by stream, oldest first. An unfinished event hides only the later ones of its own
    /// stream.
    events: BTreeMap<StreamId, VecDeque<(EventId, BlockId)>>,
    /// Where the next pass over `events` begins.
    pass: Pass,
    /// Blocks whose events are still to be recorded.
    deferred: Vec<Deferred>,
    /// Blocks that wait for the device, because a stream that used them may no longer exist; and
    /// when each was freed.
    awaiting_device: Vec<(Moment, BlockId)>,
    /// Blocks that no stream uses any more, until the caller completes their frees.
    done: VecDeque<BlockId>,
    /// Events that are not in use.
    idle_events: Vec<EventId>,
    /// Nodes known to come before all later work of a stream, by capture and stream.
    ordered: FxHashMap<(u64, StreamId), FxHashSet<NodeId>>,
    /// How many pending blocks were examined so far to tell whether they would serve a request, for
    /// tests.
    looks: Cell<u64>,
}

/// How far the last pass over the streams got.
#[derive(Debug, Default)]
struct Pass {
    /// The last stream that was queried, if not all were.
    cursor: Option<StreamId>,
    /// Whether the pass ended before every stream was queried.
    more: bool,
}

impl Streams {
    /// Returns whether no free waits for an event.
    pub(crate) fn is_nothing_pending(&self) -> bool {
        self.events.is_empty() && self.deferred.is_empty()
    }

    /// Returns whether the last pass over the streams ended before every stream was queried.
    pub(crate) fn has_more(&self) -> bool {
        self.pass.more
    }

    /// Returns whether a wait for the device would complete frees.
    pub(crate) fn awaits_device(&self) -> bool {
        !self.awaiting_device.is_empty()
    }

    /// Returns the blocks that wait. A block that waits for several events appears several times.
    pub(crate) fn pending(&self) -> impl Iterator<Item = BlockId> {
        let events = self.events.values().flatten().map(|&(_, block)| block);
        let awaiting = self.awaiting_device.iter().map(|&(_, block)| block);
        let deferred = self.deferred.iter().map(|deferred| deferred.block);
        let pending = events.chain(deferred).chain(awaiting);
        pending.inspect(|_| self.look())
    }

    /// Returns how many streams have unfinished frees.
    pub(crate) fn count(&self) -> usize {
        self.events.len()
    }

    /// Counts a look at a pending block, for tests.
    pub(crate) fn look(&self) {
        self.looks.update(|looks| looks + 1);
    }

    /// Returns the number of looks at pending blocks so far, for tests.
    pub(crate) fn looks(&self) -> u64 {
        self.looks.get()
    }

    /// Returns the next block that no stream uses any more. The caller must complete its free.
    pub(crate) fn next_done(&mut self) -> Option<BlockId> {
        self.done.pop_front()
    }
}

#[cfg(test)]
mod tests;
