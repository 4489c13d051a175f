//! The share of `paged` in the invariant check: stitches, detached pages, and free pages.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::{Paged, PagedLane};
use crate::backing::check::Unclaimed;
use crate::base::check::{Violation, ensure};
use crate::driver::Driver;
use crate::heap::Chains;
use crate::heap::block::BlockState;
use crate::heap::pool::LaneId;
use crate::heap::segment::Kind;
use crate::memory::Mem;

/// The addresses of a lane's homes, and the free blocks there: start and end.
type Homes = (Vec<Range<u64>>, BTreeMap<u64, u64>);

impl Paged {
    /// Checks that pages of stitches are mapped there and at home, and that exactly the bytes that
    /// stitches hand out are lent at home.
    pub(super) fn check_stitches<D: Driver>(
        &self,
        mem: &Mem<'_, D>,
        chains: &Chains,
        unclaimed: &mut Unclaimed<'_>,
    ) -> Result<(), Violation> {
        let heap = &*mem.heap;
        let mut lent = BTreeSet::new();
        for (id, stitch) in self.stitches.iter() {
            for page in &stitch.pages {
                unclaimed.claim_page(stitch.address + page.offset, page.bytes, page.page)?;
                let home = mem.backing.page_around(page.home);
                ensure!(
                    home == Some((page.home, page.bytes, page.page)),
                    "{page:?} has left its home"
                );
            }
            unclaimed.claim_nothing(stitch.address, stitch.address + stitch.bytes)?;
            let block = &heap[stitch.block];
            let segment = &heap[block.segment];
            ensure!(segment.kind == Kind::Stitch(id.number()), "{stitch:?} has {segment:?}");
            let in_use = matches!(block.state, BlockState::Live | BlockState::Pending);
            ensure!(in_use == stitch.is_in_use(), "{stitch:?} and {block:?} disagree");
            let others = chains[&block.segment].iter().filter(|&&id| id != stitch.block);
            for other in others.map(|&id| &heap[id]) {
                ensure!(other.state == BlockState::Shadow, "{other:?} beside {block:?}");
            }
            ensure!(in_use || !block.is_split() && block.state == BlockState::Shadow, "{block:?}");
            if !in_use {
                continue;
            }
            let mut bytes = 0;
            for &home in &stitch.lent {
                let home_block = &heap[home];
                ensure!(home_block.state == BlockState::Lent, "{home_block:?} is not lent");
                ensure!(lent.insert(home), "{home_block:?} is lent twice");
                let mut at = home_block.address;
                // The same offset of the block must be the same byte of the same page.
                while at < home_block.end() {
                    let address = block.address + bytes;
                    let (here, there) =
                        (mem.backing.page_around(address), mem.backing.page_around(at));
                    let (Some((here, size, page)), Some((there, _, its_page))) = (here, there)
                    else {
                        return Err(Violation(format!("no page behind {block:?}")));
                    };
                    ensure!(
                        page == its_page && address - here == at - there,
                        "{address:#x} of {block:?} is not {at:#x} of {home_block:?}"
                    );
                    let more = (here + size - address).min(home_block.end() - at);
                    bytes += more;
                    at += more;
                }
            }
            ensure!(bytes == block.size, "{bytes} bytes lent for {block:?}");
        }
        let all = heap.blocks().filter(|(_, block)| block.state == BlockState::Lent).count();
        ensure!(all == lent.len(), "{all} blocks are lent, to stitches {}", lent.len());
        Ok(())
    }

    /// Checks that exactly the pages of the detached lists are out of their lanes.
    pub(super) fn check_detached<D: Driver>(&self, mem: &Mem<'_, D>) -> Result<(), Violation> {
        let mut known = BTreeSet::new();
        for detached in &self.windows.detached {
            for &page in &detached.pages {
                let block = &mem.heap[page];
                let here = mem.backing.page_around(block.address);
                let is_page = here
                    .is_some_and(|(home, bytes, _)| (home, bytes) == (block.address, block.size));
                let state = (block.state, block.lane.stream);
                ensure!(
                    is_page
                        && state == (BlockState::Detached, detached.stream)
                        && known.insert(page),
                    "{block:?} is not a detached page, or detached twice"
                );
            }
        }
        let detached = mem.heap.blocks().filter(|(_, block)| {
            block.state == BlockState::Detached && !mem.heap[block.segment].is_plain()
        });
        let detached = detached.count();
        ensure!(
            detached == known.len(),
            "{detached} pages are detached, of which {} are known",
            known.len()
        );
        Ok(())
    }

    /// Checks the entries of free pages in each lane, except those of changed pages that were not
    /// looked at yet.
    pub(super) fn check_free_pages<D: Driver>(
        &self,
        mem: &Mem<'_, D>,
        chains: &Chains,
    ) -> Result<(), Violation> {
        let heap = &*mem.heap;
        let mut homes: BTreeMap<LaneId, Homes> = BTreeMap::new();
        for (id, segment) in heap.segments().filter(|(_, segment)| segment.kind == Kind::Homes) {
            let (addresses, free) = homes.entry(segment.lane).or_default();
            addresses.push(segment.address..segment.end());
            let blocks = chains[&id].iter().map(|&id| &heap[id]);
            free.extend(blocks.filter(|it| it.is_free()).map(|it| (it.address, it.end())));
        }
        for (at, (addresses, free)) in homes {
            let lane = heap.lane(at);
            let known = lane.and_then(|lane| Some((lane.notes::<PagedLane>()?, lane.dirty()?)));
            let around = |address: u64| {
                let (&start, &end) = free.range(..=address).next_back()?;
                (address < end).then_some(start..end)
            };
            let agrees = known.is_some_and(|(notes, dirty)| {
                let pages = |range| mem.backing.pages_in(range);
                notes.free_pages().agrees(addresses.into_iter(), dirty, pages, around)
            });
            ensure!(agrees, "what is known of the free pages of {at:?} is wrong");
        }
        Ok(())
    }
}
