//! `segments`: PyTorch's classic allocator, to the byte.

use super::{Rules, is_oversized_for};
use crate::base::names::PolicyIndex;
use crate::base::size::{MIN_BLOCK, SMALL_REQUEST, SMALL_SEGMENT, round_up};
use crate::driver::{Driver, DriverResult};
use crate::heap::block::{Block, BlockId, BlockState};
use crate::heap::pool::PoolTable;
use crate::memory::{Found, GiveBack, Mem, Request};
use crate::options::Policy;

#[derive(Debug)]
pub(super) struct Segments;

impl<D: Driver> Rules<D> for Segments {
    fn find(&self, mem: &Mem<'_, D>, request: &Request) -> Option<Found> {
        let lane = mem.heap.lane(request.lane)?;
        // Skips memory in pages, from before this policy was in force.
        let is_plain = |id: &BlockId| mem.heap.segment_of(*id).is_plain();
        let id = lane.free().at_least(request.size).find(is_plain)?;
        let is_oversized = is_oversized_for(mem, mem.heap[id].size, request.size);
        (!is_oversized).then_some(Found::Block(id))
    }

    fn splits(&self, mem: &Mem<'_, D>, id: BlockId, size: u64) -> bool {
        let block = &mem.heap[id];
        let rest = block.size - size;
        let splits = if mem.heap[block.lane.pool].small {
            rest >= MIN_BLOCK
        } else {
            rest > SMALL_REQUEST && mem.options.max_split_size.is_none_or(|limit| size < limit)
        };
        splits && !mem.heap.pools().is_no_split(block.lane.pool)
    }

    fn grow(&mut self, mem: &mut Mem<'_, D>, request: &Request) -> DriverResult<Option<BlockId>> {
        if mem.may_grow_by() < request.wanted {
            return Ok(None);
        }
        mem.plain_segment(request.wanted, request, PolicyIndex::from(Policy::Segments))
    }

    fn needed(&mut self, _mem: &mut Mem<'_, D>, request: &Request) -> u64 {
        request.wanted
    }

    /// Places the live blocks of each lane on pages in a row, in their present order. Pages without
    /// a live block could then be given back.
    fn would_fit_on_pages(&self, mem: &Mem<'_, D>, request: &Request, free: u64) -> bool {
        if !mem.device.has_pages {
            return false;
        }
        let page_size = |small: bool| {
            let bytes = if small { SMALL_SEGMENT } else { mem.options.large_segment_size };
            bytes.next_multiple_of(mem.device.granularity)
        };
        let is_default =
            |block: &Block| [PoolTable::SMALL, PoolTable::LARGE].contains(&block.lane.pool);
        // The blocks of a segment are in order already: only the segments are sorted.
        let all = mem.heap.blocks().map(|(_, block)| block);
        let mut heads: Vec<&Block> =
            all.filter(|block| block.prev.is_none() && is_default(block)).collect();
        heads.sort_unstable_by_key(|block| (block.lane, block.address));
        let chain = |head| {
            let next = |block: &&Block| block.next.map(|next| &mem.heap[next]);
            std::iter::successors(Some(head), next).filter(|block| block.is_mapped())
        };
        let mut in_segments = 0;
        let mut on_pages = 0;
        for lane in heads.chunk_by(|a, b| a.lane == b.lane) {
            let page_size = page_size(mem.heap[lane[0].lane.pool].small);
            // The offset in the row, and the first page on which no live block was found.
            let (mut offset, mut next_page) = (0, 0);
            for block in lane.iter().copied().flat_map(chain) {
                in_segments += block.size;
                let end = offset + block.size;
                if block.state != BlockState::Free {
                    let pages = (offset / page_size).max(next_page)..end.div_ceil(page_size);
                    on_pages += pages.end.saturating_sub(pages.start) * page_size;
                    next_page = pages.end.max(next_page);
                }
                offset = end;
            }
        }
        // The memory of private pools stays theirs.
        let held = mem.reserved().saturating_sub(in_segments).saturating_add(on_pages);
        let on_device = free.saturating_add(mem.reserved());
        let most = on_device.min(mem.backing.limit().unwrap_or(u64::MAX));
        let wanted = round_up(request.size, page_size(request.small));
        wanted.is_some_and(|wanted| wanted <= most.saturating_sub(held))
    }

    fn give_back(&self, _mem: &Mem<'_, D>, block: &Block) -> GiveBack {
        if block.is_split() { GiveBack::Nothing } else { GiveBack::Segment }
    }
}
