//! `segments`: PyTorch's classic allocator, to the byte.

use super::{GiveBack, Request, Rules, Source, View, is_oversized_for};
use crate::block::{Block, BlockId};
use crate::pool::Lane;
use crate::size::{MIN_BLOCK, SMALL_REQUEST};

#[derive(Debug)]
pub(super) struct Segments;

impl Rules for Segments {
    fn choose(&self, view: View<'_>, lane: &Lane, size: u64) -> Option<BlockId> {
        let is_plain = |id: &BlockId| view.segments[view.blocks[*id].segment].is_plain();
        // Memory that came in pages, before this policy was in force, is passed over.
        let id = lane.free().at_least(size).find(is_plain)?;
        (!is_oversized_for(view.options, view.blocks[id].size, size)).then_some(id)
    }

    fn splits(&self, view: View<'_>, block: &Block, size: u64, small: bool) -> bool {
        let rest = block.size - size;
        if small {
            rest >= MIN_BLOCK
        } else {
            rest > SMALL_REQUEST && view.options.max_split_size.is_none_or(|limit| size < limit)
        }
    }

    fn source(&self, _view: View<'_>, _lane: Option<&Lane>, request: &Request) -> Source {
        Source::Plain(request.wanted)
    }

    fn needed(&self, _size: u64, wanted: u64) -> u64 {
        wanted
    }

    fn give_back(&self, _view: View<'_>, block: &Block) -> GiveBack {
        if block.is_split() { GiveBack::Nothing } else { GiveBack::Segment }
    }
}
