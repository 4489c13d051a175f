//! `expandable`: PyTorch's expandable segments, to the byte.
//!
//! A segment is a reserved range, filled with pages from its lowest addresses up. PyTorch's have room for more than the
//! whole device. Those of later lanes are smaller here (`addresses_as_pytorch`), and laid out the same until they are full.
//! A free block that borders on unmapped addresses can grow, so for best fit it counts as the size it could grow to.

use super::{GiveBack, Request, Rules, Source, View, is_oversized_for};
use crate::block::{Block, BlockId, BlockState};
use crate::pool::Lane;
use crate::segment::Backing;
use crate::size::{MIN_BLOCK, SMALL_SEGMENT, round_up};

#[derive(Debug)]
pub(super) struct Expandable;

impl Rules for Expandable {
    fn choose(&self, view: View<'_>, lane: &Lane, size: u64) -> Option<BlockId> {
        let mut candidates = lane.free().at_least(size);
        let mut best = candidates.next()?;
        for next in candidates {
            let grows = !view.segments[view.blocks[best].segment].is_plain();
            if !grows || grown_size(view, next) >= grown_size(view, best) {
                break;
            }
            best = next;
        }
        (!is_oversized_for(view.options, view.blocks[best].size, size)).then_some(best)
    }

    fn splits(&self, _view: View<'_>, block: &Block, size: u64, _small: bool) -> bool {
        block.size - size >= MIN_BLOCK
    }

    fn source(&self, view: View<'_>, lane: Option<&Lane>, request: &Request) -> Source {
        if let Some(block) = lane.and_then(|lane| lowest_room(view, lane, request.size)) {
            return Source::Extend(block);
        }
        let page_size = if request.small { SMALL_SEGMENT } else { view.options.large_segment_size };
        let page_size = page_size.next_multiple_of(view.device.granularity);
        Source::Reserve { bytes: pytorchs_room(view, page_size).max(request.size), page_size }
    }

    /// Some of the pages may be there.
    fn needed(&self, size: u64, _wanted: u64) -> u64 {
        size
    }

    fn give_back(&self, view: View<'_>, block: &Block) -> GiveBack {
        let segment = &view.segments[block.segment];
        let Backing::Pages { page_size } = segment.backing else { return GiveBack::Nothing };
        // Whole pages only, counted from the start of the segment.
        let offset = |address: u64| address - segment.address;
        let start = segment.address + offset(block.address).next_multiple_of(page_size);
        let end = segment.address + offset(block.end()) / page_size * page_size;
        if start < end { GiveBack::Pages { start, end } } else { GiveBack::Nothing }
    }
}

/// The addresses that PyTorch reserves for a segment: more than the device, so that pages unmapped low down can be used
/// again at the end.
fn pytorchs_room(view: View<'_>, page_size: u64) -> u64 {
    let room = view.device.total.saturating_add(view.device.total / 8);
    round_up(room, page_size).unwrap_or(u64::MAX / 2)
}

/// The size a free block could grow to by pages behind the unmapped block after it. At the end of a segment with fewer
/// addresses than PyTorch would have reserved, the rest of them count too: the same block is chosen as in PyTorch.
fn grown_size(view: View<'_>, id: BlockId) -> u64 {
    let block = &view.blocks[id];
    let unmapped = block.next.map(|next| &view.blocks[next]).filter(|next| !next.is_mapped());
    let size = block.size + unmapped.map_or(0, |next| next.size);
    let segment = &view.segments[block.segment];
    match segment.backing {
        Backing::Pages { page_size } if block.address + size == segment.end() => {
            size + pytorchs_room(view, page_size).saturating_sub(segment.size)
        }
        _ => size,
    }
}

/// The lowest address from which free and unmapped blocks in a row have room for `size` bytes.
fn lowest_room(view: View<'_>, lane: &Lane, size: u64) -> Option<BlockId> {
    let usable =
        |id: &BlockId| matches!(view.blocks[*id].state, BlockState::Free | BlockState::Unmapped);
    lane.unmapped()
        .map(|(_, unmapped)| view.blocks[unmapped].prev.filter(usable).unwrap_or(unmapped))
        .find(|&start| {
            let mut room = 0;
            let mut at = Some(start);
            while let Some(id) = at.filter(usable) {
                room += view.blocks[id].size;
                if room >= size {
                    return true;
                }
                at = view.blocks[id].next;
            }
            false
        })
}
