//! Free memory that nobody can use: it lies between live blocks, and cannot be given back as it lies. Worked out for
//! those whose request was refused, so that what they are told would help does.

use crate::block::{Block, BlockState};
use crate::driver::Driver;
use crate::locked::Locked;
use crate::policy::{GiveBack, Policy, Request};
use crate::pool::PoolTable;
use crate::size::{SMALL_SEGMENT, round_up};

impl<D: Driver> Locked<'_, D> {
    /// Bytes held that cannot be given back as things lie.
    pub(crate) fn stuck(&self) -> u64 {
        let free = self.halves_to_give_back().into_iter();
        let free = free.flat_map(|half| self.state.pools[half].free_blocks());
        let could_go: u64 = free
            .map(|id| match self.may_give_back(id) {
                GiveBack::Nothing => 0,
                GiveBack::Segment => self.state.blocks[id].size,
                GiveBack::Pages { start, end } => end - start,
            })
            .sum();
        self.reserved().saturating_sub(could_go).saturating_sub(self.leaving_bytes())
    }

    /// Whether a request would fit if the live blocks of plain segments lay on pages, those of each lane in a row as
    /// they lie now: pages between them could then be given back.
    pub(crate) fn fits_on_pages(&self, request: &Request, free: u64) -> bool {
        if self.state.policy != Policy::Segments || !self.device.has_pages {
            return false;
        }
        let page_size = |small: bool| {
            let bytes = if small { SMALL_SEGMENT } else { self.state.options.large_segment_size };
            bytes.next_multiple_of(self.device.granularity)
        };
        let is_default = |block: &Block| [PoolTable::SMALL, PoolTable::LARGE].contains(&block.pool);
        // The blocks of a segment are in order already: only the segments are sorted.
        let all = self.state.blocks.iter().map(|(_, block)| block);
        let mut heads: Vec<&Block> =
            all.filter(|block| block.prev.is_none() && is_default(block)).collect();
        heads.sort_unstable_by_key(|block| (block.pool, block.stream, block.address));
        let chain = |head| {
            let next = |block: &&Block| block.next.map(|next| &self.state.blocks[next]);
            std::iter::successors(Some(head), next).filter(|block| block.is_mapped())
        };
        let mut in_segments = 0;
        let mut on_pages = 0;
        for lane in heads.chunk_by(|a, b| (a.pool, a.stream) == (b.pool, b.stream)) {
            let page_size = page_size(self.state.pools[lane[0].pool].small);
            // The offset in the row, and the first page that no live block has been seen on.
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
        // What private pools hold stays theirs.
        let held = self.reserved().saturating_sub(in_segments).saturating_add(on_pages);
        let on_device = free.saturating_add(self.reserved());
        let most = on_device.min(self.state.limit.unwrap_or(u64::MAX));
        let wanted = round_up(request.size, page_size(request.small));
        wanted.is_some_and(|wanted| wanted <= most.saturating_sub(held))
    }
}
