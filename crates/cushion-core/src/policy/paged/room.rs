//! Room at home: the place in a lane's homes with the fewest missing bytes for a request.
//!
//! Adjacent free and unmapped blocks form runs. Room may begin with each unmapped block, or with
//! the block before it if that is free. The search moves the start and the end of the room over
//! each run once: a lane can have thousands of holes, and a request may extend over all of them.

use std::ops::Index;

use super::PagedLane;
use crate::driver::Driver;
use crate::heap::block::{Block, BlockId, BlockState};
use crate::heap::segment::Kind;
use crate::memory::{Mem, Request};

/// A place where a lane's homes can grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Room {
    /// The first block of the room: free, or unmapped.
    pub(super) start: BlockId,
    /// Bytes of it that have no pages.
    pub(super) missing: u64,
}

/// Adjacent blocks of a run, from the first to the last.
#[derive(Debug)]
struct Span<'a, B> {
    blocks: &'a B,
    first: BlockId,
    last: BlockId,
    bytes: u64,
    /// Bytes of them that have no pages.
    unmapped: u64,
    /// How many blocks it has contained so far.
    seen: u64,
}

impl<'a, B: Index<BlockId, Output = Block>> Span<'a, B> {
    fn new(blocks: &'a B, first: BlockId) -> Self {
        let mut span = Self { blocks, first, last: first, bytes: 0, unmapped: 0, seen: 0 };
        span.add(first);
        span
    }

    fn add(&mut self, last: BlockId) {
        let block = &self.blocks[last];
        self.last = last;
        self.bytes += block.size;
        self.unmapped += if block.is_mapped() { 0 } else { block.size };
        self.seen += 1;
    }

    /// Adds the next block, if the run continues.
    fn grow(&mut self) -> bool {
        let next = usable(self.blocks, self.blocks[self.last].next);
        next.inspect(|&next| self.add(next)).is_some()
    }

    /// Moves its start to the same or a later block of the run.
    fn begin_at(&mut self, first: BlockId) {
        while self.first != first && (self.first != self.last || self.grow()) {
            let block = &self.blocks[self.first];
            self.bytes -= block.size;
            self.unmapped -= if block.is_mapped() { 0 } else { block.size };
            self.first = block.next.expect("a later block of the run");
        }
    }

    /// Returns the bytes of the first `size` that have no pages.
    fn missing(&self, size: u64) -> u64 {
        let beyond = if self.blocks[self.last].is_mapped() { 0 } else { self.bytes - size };
        self.unmapped - beyond
    }
}

fn usable(blocks: &impl Index<BlockId, Output = Block>, id: Option<BlockId>) -> Option<BlockId> {
    id.filter(|&id| matches!(blocks[id].state, BlockState::Free | BlockState::Unmapped))
}

/// Returns the room for `size` bytes with the fewest missing bytes, the lowest among equals, in the
/// run whose first unmapped block is `hole`; the address up to which the run was searched; and how
/// many blocks were looked at.
fn best_in_run(
    blocks: &impl Index<BlockId, Output = Block>,
    hole: BlockId,
    size: u64,
) -> (Option<Room>, u64, u64) {
    let start_for = |hole: BlockId| usable(blocks, blocks[hole].prev).unwrap_or(hole);
    let mut span = Span::new(blocks, start_for(hole));
    let mut best: Option<Room> = None;
    let mut hole = hole;
    let mut seen = 0;
    let end = loop {
        span.begin_at(start_for(hole));
        while span.bytes < size && span.grow() {}
        if span.bytes < size {
            // Further on there is no room either.
            break blocks[span.last].end();
        }
        let room = Room { start: span.first, missing: span.missing(size) };
        if best.is_none_or(|best| room.missing < best.missing) {
            best = Some(room);
        }
        let mut next = usable(blocks, blocks[hole].next);
        while let Some(id) = next.filter(|&id| blocks[id].is_mapped()) {
            seen += 1;
            next = usable(blocks, blocks[id].next);
        }
        let Some(next) = next else { break blocks[hole].end() };
        seen += 1;
        hole = next;
    };
    (best, end, seen + span.seen)
}

/// Returns the room in the lane's homes with the fewest missing bytes for the request, the lowest
/// among equals.
pub(super) fn room_at_home<D: Driver>(mem: &mut Mem<'_, D>, request: &Request) -> Option<Room> {
    let lane = mem.heap.lane(request.lane)?;
    if let Some(room) = lane.notes::<PagedLane>().and_then(|it| it.room_seen(lane, request.size)) {
        return room;
    }
    let mut best: Option<Room> = None;
    let mut done = 0;
    for (address, hole) in lane.unmapped() {
        if address < done || mem.kind_of(hole) != Kind::Homes {
            continue;
        }
        let (room, end, seen) = best_in_run(mem.heap, hole, request.size);
        mem.looks.at_blocks(seen);
        done = end;
        if let Some(room) = room
            && best.is_none_or(|best| room.missing < best.missing)
        {
            best = Some(room);
        }
    }
    PagedLane::note_room(mem.heap, request.lane, request.size, best);
    best
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::base::names::Moment;
    use crate::driver::StreamId;
    use crate::heap::block::{BlockTable, Holder, Users};
    use crate::heap::pool::{LaneId, PoolTable};
    use crate::heap::segment::SegmentId;

    /// Returns adjacent blocks of these sizes and states.
    fn chain(of: &[(u64, BlockState)]) -> (BlockTable, Vec<BlockId>) {
        let mut blocks = BlockTable::default();
        let mut ids: Vec<BlockId> = Vec::new();
        let mut address = 4096;
        for &(size, state) in of {
            let id = blocks.insert(Block {
                address,
                size,
                prev: ids.last().copied(),
                next: None,
                segment: SegmentId::new(0),
                lane: LaneId { pool: PoolTable::LARGE, stream: StreamId(0) },
                state,
                free_since: 0,
                freed: Moment::FIRST,
                users: Users::default(),
                holder: Holder::NONE,
            });
            if let Some(&before) = ids.last() {
                blocks[before].next = Some(id);
            }
            ids.push(id);
            address += size;
        }
        (blocks, ids)
    }

    /// Searches from every hole, block by block until there is room.
    fn by_trying_each_hole(blocks: &BlockTable, holes: &[BlockId], size: u64) -> Option<Room> {
        let rooms = holes.iter().filter_map(|&hole| {
            let start = usable(blocks, blocks[hole].prev).unwrap_or(hole);
            let (mut room, mut missing) = (0, 0);
            let mut at = Some(start);
            while room < size {
                let block = &blocks[usable(blocks, at)?];
                let more = block.size.min(size - room);
                room += more;
                missing += if block.is_mapped() { 0 } else { more };
                at = block.next;
            }
            Some(Room { start, missing })
        });
        rooms.min_by_key(|room| room.missing)
    }

    fn states() -> impl Strategy<Value = BlockState> {
        prop_oneof![
            8 => Just(BlockState::Free),
            8 => Just(BlockState::Unmapped),
            1 => Just(BlockState::Live),
            1 => Just(BlockState::Lent),
        ]
    }

    proptest! {
        /// It finds the same room as a search from each hole, and looks at each block at most
        /// twice.
        #[test]
        fn it_finds_the_same_room_as_a_search_from_each_hole(
            of in prop::collection::vec((1_u64..20, states()), 1..80),
            size in 1_u64..200,
        ) {
            let (blocks, ids) = chain(&of);
            let is_hole = |id: &BlockId| !blocks[*id].is_mapped();
            let holes: Vec<BlockId> = ids.into_iter().filter(is_hole).collect();
            let (mut best, mut done, mut all): (Option<Room>, u64, u64) = (None, 0, 0);
            for &hole in &holes {
                if blocks[hole].address >= done {
                    let (room, end, seen) = best_in_run(&blocks, hole, size);
                    (done, all) = (end, all + seen);
                    best = best.into_iter().chain(room).min_by_key(|room| room.missing);
                }
            }
            prop_assert_eq!(best, by_trying_each_hole(&blocks, &holes, size));
            prop_assert!(all <= 2 * of.len() as u64, "{} looks at {} blocks", all, of.len());
        }
    }
}
