//! `expandable`: PyTorch's expandable segments, to the byte.
//!
//! A segment is a reserved range of addresses, filled with pages from its lowest addresses up.
//! PyTorch's segments have more addresses than the whole device. Those of later lanes are smaller
//! here (`memory/addresses.rs`), and have the same layout until they are full. A free block next to
//! unmapped addresses can grow, so for best fit it counts as the size to which it could grow.

use super::{Rules, is_oversized_for};
use crate::base::names::PolicyIndex;
use crate::base::size::{MIN_BLOCK, SMALL_SEGMENT, round_up};
use crate::driver::{Driver, DriverResult};
use crate::heap::Lane;
use crate::heap::block::{Block, BlockId, BlockState};
use crate::heap::segment::Kind;
use crate::memory::{Found, GiveBack, Mem, Request};
use crate::options::Policy;

#[derive(Debug)]
pub(super) struct Expandable;

impl<D: Driver> Rules<D> for Expandable {
    fn find(&self, mem: &Mem<'_, D>, request: &Request) -> Option<Found> {
        let mut candidates = mem.heap.lane(request.lane)?.free().at_least(request.size);
        let mut best = candidates.next()?;
        for next in candidates {
            let grows = !mem.heap.segment_of(best).is_plain();
            if !grows || grown_size(mem, next) >= grown_size(mem, best) {
                break;
            }
            best = next;
        }
        let is_oversized = is_oversized_for(mem, mem.heap[best].size, request.size);
        (!is_oversized).then_some(Found::Block(best))
    }

    fn splits(&self, mem: &Mem<'_, D>, id: BlockId, size: u64) -> bool {
        let block = &mem.heap[id];
        block.size - size >= MIN_BLOCK && !mem.heap.pools().is_no_split(block.lane.pool)
    }

    fn grow(&mut self, mem: &mut Mem<'_, D>, request: &Request) -> DriverResult<Option<BlockId>> {
        if mem.may_grow_by() < request.wanted {
            return Ok(None);
        }
        let lane = mem.heap.lane(request.lane);
        if let Some(block) = lane.and_then(|lane| lowest_room(mem, lane, request.size)) {
            return extend(mem, block, request);
        }
        let (room, page_size) = segment_for(mem, request);
        let bytes = mem.addresses_as_pytorch(request, room, page_size);
        let policy = PolicyIndex::from(Policy::Expandable);
        let kind = Kind::Pages { page_size };
        let Some(unmapped) = mem.reserve_segment(bytes, kind, request, policy)? else {
            return Ok(None);
        };
        let grown = extend(mem, unmapped, request);
        mem.unreserve_if_unused(unmapped);
        grown
    }

    /// Some of its pages may be mapped already.
    fn needed(&mut self, _mem: &mut Mem<'_, D>, request: &Request) -> u64 {
        request.size
    }

    fn give_back(&self, mem: &Mem<'_, D>, block: &Block) -> GiveBack {
        let segment = &mem.heap[block.segment];
        let Kind::Pages { page_size } = segment.kind else { return GiveBack::Nothing };
        // Whole pages only, counted from the start of the segment.
        let offset = |address: u64| address - segment.address;
        let start = segment.address + offset(block.address).next_multiple_of(page_size);
        let end = segment.address + offset(block.end()) / page_size * page_size;
        if start < end { GiveBack::Pages { start, end } } else { GiveBack::Nothing }
    }
}

/// Returns the addresses that PyTorch would reserve for a segment, and the size of its pages.
pub(crate) fn segment_for<D: Driver>(mem: &Mem<'_, D>, request: &Request) -> (u64, u64) {
    let page_size = if request.small { SMALL_SEGMENT } else { mem.options.large_segment_size };
    let page_size = page_size.next_multiple_of(mem.device.granularity);
    (pytorchs_room(mem, page_size).max(request.size), page_size)
}

/// Maps pages at the addresses from `start` on until there is a free block for the request.
fn extend<D: Driver>(
    mem: &mut Mem<'_, D>,
    start: BlockId,
    request: &Request,
) -> DriverResult<Option<BlockId>> {
    mem.extend(start, request.size, |mem, target, bytes| {
        let Kind::Pages { page_size } = mem.kind_of(target) else {
            unreachable!("a segment of pages of one size");
        };
        mem.map_equal_pages(target, bytes, page_size, request.tag)
    })
}

/// Returns the addresses that PyTorch reserves for a segment: more than the device, so that pages
/// unmapped at low addresses can be used again at the end.
fn pytorchs_room<D: Driver>(mem: &Mem<'_, D>, page_size: u64) -> u64 {
    let room = mem.device.total.saturating_add(mem.device.total / 8);
    round_up(room, page_size).unwrap_or(u64::MAX / 2)
}

/// Returns the size to which a free block could grow by pages in the unmapped block after it. At
/// the end of a segment with fewer addresses than PyTorch would have reserved, the missing
/// addresses count, too: the choice is then the same as PyTorch's.
fn grown_size<D: Driver>(mem: &Mem<'_, D>, id: BlockId) -> u64 {
    let block = &mem.heap[id];
    let unmapped = block.next.map(|next| &mem.heap[next]).filter(|next| !next.is_mapped());
    let size = block.size + unmapped.map_or(0, |next| next.size);
    let segment = &mem.heap[block.segment];
    match segment.kind {
        Kind::Pages { page_size } if block.address + size == segment.end() => {
            size + pytorchs_room(mem, page_size).saturating_sub(segment.size)
        }
        _ => size,
    }
}

/// Returns the block at the lowest address from which adjacent free and unmapped blocks have room
/// for `size` bytes.
fn lowest_room<D: Driver>(mem: &Mem<'_, D>, lane: &Lane, size: u64) -> Option<BlockId> {
    let usable =
        |id: &BlockId| matches!(mem.heap[*id].state, BlockState::Free | BlockState::Unmapped);
    // Homes of pages, from before this policy was in force, are not extended.
    let is_own = |&(_, id): &(u64, BlockId)| matches!(mem.kind_of(id), Kind::Pages { .. });
    lane.unmapped()
        .filter(is_own)
        .map(|(_, unmapped)| mem.heap[unmapped].prev.filter(usable).unwrap_or(unmapped))
        .find(|&start| {
            let mut room = 0;
            let mut at = Some(start);
            while let Some(id) = at.filter(usable) {
                room += mem.heap[id].size;
                if room >= size {
                    return true;
                }
                at = mem.heap[id].next;
            }
            false
        })
}
