//! Segments: the ranges of device addresses that blocks are cut from, and what is behind them.

use std::ops::{Index, IndexMut};

use crate::driver::StreamId;
use crate::history::Context;
use crate::policy::Policy;
use crate::pool::PoolIndex;

/// A segment, by its place in the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct SegmentId(u32);

/// What is behind the addresses of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Backing {
    /// One plain allocation of the driver, whole.
    Plain,
    /// A reserved range; pages of this size come and go behind it.
    Pages { page_size: u64 },
}

/// One range of device addresses.
#[derive(Debug)]
pub(crate) struct Segment {
    pub(crate) address: u64,
    pub(crate) size: u64,
    pub(crate) pool: PoolIndex,
    pub(crate) stream: StreamId,
    pub(crate) backing: Backing,
    /// The policy that made it, and that says what of it may be given back.
    pub(crate) policy: Policy,
    /// Who asked for it, when history is on.
    pub(crate) context: Context,
}

impl Segment {
    pub(crate) fn end(&self) -> u64 {
        self.address + self.size
    }

    pub(crate) fn is_plain(&self) -> bool {
        self.backing == Backing::Plain
    }
}

/// All segments.
#[derive(Debug, Default)]
pub(crate) struct SegmentTable {
    slots: Vec<Option<Segment>>,
    vacant: Vec<SegmentId>,
}

impl SegmentTable {
    /// Takes the place of the next segment, so that its first block can name it.
    pub(crate) fn next_id(&self) -> SegmentId {
        self.vacant.last().copied().unwrap_or_else(|| {
            SegmentId(u32::try_from(self.slots.len()).expect("fewer than 2^32 segments"))
        })
    }

    /// Inserts at the place [`next_id`](Self::next_id) told.
    pub(crate) fn insert(&mut self, segment: Segment) -> SegmentId {
        let id = self.next_id();
        if self.vacant.pop().is_some() {
            self.slots[id.0 as usize] = Some(segment);
        } else {
            self.slots.push(Some(segment));
        }
        id
    }

    pub(crate) fn remove(&mut self, id: SegmentId) -> Segment {
        let segment = self.slots[id.0 as usize].take().expect("removal of a known segment");
        self.vacant.push(id);
        segment
    }

    /// Every segment, in no meaningful order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (SegmentId, &Segment)> {
        (0_u32..).zip(&self.slots).filter_map(|(id, slot)| Some((SegmentId(id), slot.as_ref()?)))
    }
}

impl Index<SegmentId> for SegmentTable {
    type Output = Segment;

    fn index(&self, id: SegmentId) -> &Segment {
        self.slots[id.0 as usize].as_ref().expect("use of a known segment")
    }
}

impl IndexMut<SegmentId> for SegmentTable {
    fn index_mut(&mut self, id: SegmentId) -> &mut Segment {
        self.slots[id.0 as usize].as_mut().expect("use of a known segment")
    }
}
