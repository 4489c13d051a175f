//! Streams: which work may still use memory, and the proof that it is done.
//!
//! A free on the block's own stream needs no event: stream order protects it. A block that other streams used is
//! *pending* until an event on each of them has finished. While allocations go to a private pool a capture may be under
//! way, in which events may be neither recorded nor queried.
//!
//! Only this room records and polls events, and only [`proof`] makes the statement that memory is idle.

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

/// What is known of work on streams.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    /// Counts completed frees and released pools.
    moments: Moments,
    lasting: LastingStreams,
    /// Private pools that allocations go to now, the latest last.
    captures: Vec<Capture>,
    /// Events by stream, oldest first: one that is not done hides the later ones of its own stream only.
    events: BTreeMap<StreamId, VecDeque<(EventId, BlockId)>>,
    /// Where the next pass over `events` begins.
    pass: Pass,
    /// Blocks whose events are still to be recorded.
    deferred: Vec<Deferred>,
    /// Blocks that wait for the device, because a stream that used them may be gone; and when each was freed.
    awaiting_device: Vec<(Moment, BlockId)>,
    /// Blocks that no stream uses any more, until the caller completes their frees.
    done: VecDeque<BlockId>,
    /// Events that nobody waits for.
    idle_events: Vec<EventId>,
    /// Nodes known to come before all later work of a stream, by capture and stream.
    ordered: FxHashMap<(u64, StreamId), FxHashSet<NodeId>>,
    /// Pending blocks that were looked at so far to learn whether they would serve a request, for tests.
    looks: Cell<u64>,
}

/// How far the last pass over the streams got.
#[derive(Debug, Default)]
struct Pass {
    /// The last stream that was asked, if not all were.
    cursor: Option<StreamId>,
    /// Whether the pass ended before every stream was asked.
    more: bool,
}

impl Streams {
    /// Whether no free waits for an event.
    pub(crate) fn is_nothing_pending(&self) -> bool {
        self.events.is_empty() && self.deferred.is_empty()
    }

    /// Whether the last pass over the streams ended before every stream was asked.
    pub(crate) fn has_more(&self) -> bool {
        self.pass.more
    }

    /// Whether a wait for the device would complete frees.
    pub(crate) fn awaits_device(&self) -> bool {
        !self.awaiting_device.is_empty()
    }

    /// The blocks that wait; one that waits for several events comes several times.
    pub(crate) fn pending(&self) -> impl Iterator<Item = BlockId> {
        let events = self.events.values().flatten().map(|&(_, block)| block);
        let awaiting = self.awaiting_device.iter().map(|&(_, block)| block);
        let deferred = self.deferred.iter().map(|deferred| deferred.block);
        let pending = events.chain(deferred).chain(awaiting);
        pending.inspect(|_| self.look())
    }

    /// How many streams have frees that are not done.
    pub(crate) fn count(&self) -> usize {
        self.events.len()
    }

    /// Counts a look at a pending block, for tests.
    pub(crate) fn look(&self) {
        self.looks.update(|looks| looks + 1);
    }

    /// Looks at pending blocks so far, for tests.
    pub(crate) fn looks(&self) -> u64 {
        self.looks.get()
    }

    /// The next block that no stream uses any more: its free is to be completed.
    pub(crate) fn next_done(&mut self) -> Option<BlockId> {
        self.done.pop_front()
    }
}

#[cfg(test)]
mod tests;
