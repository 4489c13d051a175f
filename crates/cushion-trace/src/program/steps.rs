//! The steps of a program. Nearly all are requests and frees, which take a few bytes each; the
//! others are stored separately.

use cushion_core::{Policy, PoolId, StreamId};
use rustc_hash::FxHashMap;

/// The number of an allocation, from its request to its free. Blocks from before the trace have the
/// first slots; each request takes the next.
pub(crate) type Slot = u32;

/// One step of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// A request.
    Alloc(Request),
    /// A free that completes at once.
    Free { slot: Slot },
    /// Any other step.
    Rare(Rare),
}

/// A request, and the address that PyTorch returned for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) size: u64,
    pub(crate) address: u64,
    pub(crate) event: u32,
    /// The stream's index in [`Steps::streams`].
    stream: u32,
}

/// A step that is rare in most programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rare {
    /// A free that waits for work on another stream.
    FreeLater { slot: Slot, other: u32 },
    /// The work that a free waits for is done.
    Complete { slot: Slot },
    /// A request that PyTorch refused, possibly for the pool `private`.
    Refused { event: u32, size: u64, stream: StreamId, private: Option<PoolId> },
    /// All cached memory was released, including `plain` segments. If `before` is the size of a
    /// request that missed right after, PyTorch itself may have released it for that request.
    EmptyCache { plain: u32, events: (u32, u32), before: Option<u64> },
    /// All cached memory of one private pool was released.
    EmptyPool { pool: PoolId, events: (u32, u32) },
    /// PyTorch's next segment has this size and address.
    PlaceSegment { bytes: u64, address: u64 },
    /// PyTorch's next reserved range, if there is one, begins here.
    PlaceRange { address: u64 },
    /// PyTorch's expandable segments were switched on or off.
    SetPolicy(Policy),
    /// From here on, requests go to a private pool.
    BeginPool(PoolId),
    /// From here on, requests go to the default pool.
    EndPool,
    /// The private pool is not used any more.
    ReleasePool(PoolId),
}

/// The steps, in order.
#[derive(Debug, Clone, Default)]
pub(crate) struct Steps {
    /// For each step: a marker for the next request, the slot to free, or the index of a rare step.
    order: Vec<u32>,
    requests: Vec<Request>,
    rare: Vec<Rare>,
    streams: Vec<StreamId>,
    stream_numbers: FxHashMap<StreamId, u32>,
}

// The two highest bits of an entry of `order` are its kind; a slot to free has neither bit.
const REQUEST: u32 = 1 << 31;
const RARE: u32 = 1 << 30;

/// The most slots, and the most rare steps.
pub(crate) const MOST: u32 = RARE;

impl Steps {
    /// Makes room for this many requests and their frees.
    pub(crate) fn with_capacity(requests: usize) -> Self {
        Self {
            order: Vec::with_capacity(2 * requests),
            requests: Vec::with_capacity(requests),
            ..Self::default()
        }
    }

    pub(crate) fn alloc(&mut self, event: u32, size: u64, stream: StreamId, address: u64) {
        let stream = match self.requests.last() {
            Some(last) if self.streams[last.stream as usize] == stream => last.stream,
            _ => self.stream_number(stream),
        };
        self.order.push(REQUEST);
        self.requests.push(Request { size, address, event, stream });
    }

    fn stream_number(&mut self, stream: StreamId) -> u32 {
        #[expect(clippy::cast_possible_truncation, reason = "no more streams than requests")]
        let next = self.streams.len() as u32;
        *self.stream_numbers.entry(stream).or_insert_with(|| {
            self.streams.push(stream);
            next
        })
    }

    pub(crate) fn free(&mut self, slot: Slot) {
        debug_assert!(slot < MOST, "checked where slots are made");
        self.order.push(slot);
    }

    pub(crate) fn rare(&mut self, step: Rare) {
        let number = self.new_rare(step);
        self.order.push(number);
    }

    #[expect(clippy::cast_possible_truncation, reason = "no more rare steps than events")]
    fn new_rare(&mut self, step: Rare) -> u32 {
        self.rare.push(step);
        RARE | (self.rare.len() - 1) as u32
    }

    /// Inserts rare steps before the placements at the end, because a placement belongs to the
    /// request after it.
    pub(crate) fn before_placements(&mut self, steps: impl Iterator<Item = Rare>) {
        let is_placement = |&entry: &u32| {
            entry & (REQUEST | RARE) == RARE
                && matches!(
                    self.rare[(entry & !RARE) as usize],
                    Rare::PlaceSegment { .. } | Rare::PlaceRange { .. }
                )
        };
        let placements = self.order.iter().rev().take_while(|entry| is_placement(entry)).count();
        for (at, step) in (self.order.len() - placements..).zip(steps) {
            let number = self.new_rare(step);
            self.order.insert(at, number);
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    pub(crate) fn requests(&self) -> &[Request] {
        &self.requests
    }

    /// Returns the rare steps, in order except for those of [`Self::before_placements`].
    pub(crate) fn rare_steps(&self) -> &[Rare] {
        &self.rare
    }

    /// Returns the rare steps for changes.
    pub(crate) fn rare_steps_mut(&mut self) -> &mut [Rare] {
        &mut self.rare
    }

    pub(crate) fn stream(&self, request: &Request) -> StreamId {
        self.streams[request.stream as usize]
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Step> {
        let mut requests = self.requests.iter();
        self.order.iter().map(move |&entry| {
            if entry & REQUEST != 0 {
                Step::Alloc(*requests.next().expect("each entry has a request"))
            } else if entry & RARE != 0 {
                Step::Rare(self.rare[(entry & !RARE) as usize])
            } else {
                Step::Free { slot: entry }
            }
        })
    }
}
