//! The heap's share of the invariant check.

use std::collections::{BTreeMap, BTreeSet};

use super::Heap;
use super::block::{Block, BlockId, BlockState};
use super::pool::LaneId;
use super::segment::SegmentId;
use crate::base::check::{Violation, ensure};

/// The blocks of each segment, in order.
pub(crate) type Chains = BTreeMap<SegmentId, Vec<BlockId>>;

impl Heap {
    /// Checks blocks, segments, lanes and live addresses against each other. Returns the blocks of
    /// each segment.
    pub(crate) fn check(&self) -> Result<Chains, Violation> {
        let chains = self.check_chains()?;
        self.check_segments(&chains)?;
        self.check_indexes()?;
        self.check_live()?;
        Ok(chains)
    }

    /// Neighbours are linked both ways, tile their segment, and no two of them could merge.
    fn check_chains(&self) -> Result<Chains, Violation> {
        let blocks = &self.blocks;
        let mut chains = BTreeMap::new();
        let mut seen = 0_usize;
        for (id, block) in blocks.iter().filter(|(_, block)| block.prev.is_none()) {
            let mut chain = vec![id];
            let mut at = block;
            while let Some(next_id) = at.next {
                let next = &blocks[next_id];
                let last = chain.last().copied();
                ensure!(next.prev == last, "{next:?} does not link back to {at:?}");
                ensure!(at.end() == next.address, "a gap between {at:?} and {next:?}");
                ensure!(at.segment == next.segment, "{at:?} and {next:?} in two segments");
                ensure!(at.lane == next.lane, "{next:?} is in another lane than {at:?}");
                let mergeable = at.state == next.state
                    && matches!(at.state, BlockState::Free | BlockState::Unmapped);
                ensure!(!mergeable, "{at:?} and {next:?} should have merged");
                chain.push(next_id);
                at = next;
            }
            seen += chain.len();
            let before = chains.insert(block.segment, chain);
            ensure!(before.is_none(), "two chains in {:?}", block.segment);
        }
        ensure!(seen == blocks.iter().count(), "a block is in no chain");
        Ok(chains)
    }

    /// Every segment has one chain, which covers it exactly. Lanes count their segments and
    /// addresses.
    fn check_segments(&self, chains: &Chains) -> Result<(), Violation> {
        let mut held: BTreeMap<LaneId, (u32, u64)> = BTreeMap::new();
        let mut ranges = BTreeMap::new();
        for (id, segment) in self.segments.iter() {
            let Some(chain) = chains.get(&id) else {
                return Err(Violation(format!("{segment:?} has no blocks")));
            };
            let first = &self.blocks[chain[0]];
            let size: u64 = chain.iter().map(|&id| self.blocks[id].size).sum();
            ensure!(
                first.address == segment.address && size == segment.size,
                "the blocks of {segment:?} sum to {size}"
            );
            ensure!(first.lane == segment.lane, "{segment:?} and its blocks disagree");
            let (count, addresses) = held.entry(segment.lane).or_default();
            *count += 1;
            if segment.is_reserved() {
                *addresses += segment.size;
            }
            // The driver may have handed out the addresses of a detached segment again.
            if first.state != BlockState::Detached {
                ranges.insert(segment.address, segment.end());
            }
        }
        let mut end = 0;
        for (&start, &range_end) in &ranges {
            ensure!(end <= start, "segments overlap at {start:#x}");
            end = range_end;
        }
        let segments = self.segments.iter().count();
        ensure!(chains.len() == segments, "a chain of blocks without a segment");
        let mut by_pool = BTreeMap::new();
        for (id, lane) in self.lanes() {
            let (count, addresses) = held.remove(&id).unwrap_or_default();
            ensure!(
                (lane.segments(), lane.addresses()) == (count, addresses) && count > 0,
                "{id:?}: {} segments and {} addresses, not {count} and {addresses}",
                lane.segments(),
                lane.addresses()
            );
            *by_pool.entry(id.pool).or_default() += count;
        }
        ensure!(held.is_empty(), "{held:?} in no lane");
        for (index, pool) in self.pools.iter() {
            let (segments, counted) = (pool.segments(), by_pool.get(&index).copied().unwrap_or(0));
            ensure!(segments == counted, "pool {}: {segments} segments, not {counted}", pool.id);
        }
        Ok(())
    }

    /// Every free and every unmapped block is in exactly one index, under its own key.
    fn check_indexes(&self) -> Result<(), Violation> {
        let mut indexed = BTreeSet::new();
        let mut active = BTreeMap::<_, u64>::new();
        for (_, block) in self.blocks.iter() {
            if matches!(block.state, BlockState::Live | BlockState::Pending) {
                *active.entry(block.lane).or_default() += block.size;
            }
        }
        for (at, lane) in self.lanes() {
            let (mut bytes, mut count, mut largest) = (0, 0, 0);
            for (size, address, id) in lane.free().iter() {
                let block = &self.blocks[id];
                ensure!(
                    block.is_free() && block.lane == at,
                    "{block:?} in the free index of another state or lane"
                );
                ensure!((block.size, block.address) == (size, address), "stale key of {block:?}");
                ensure!(indexed.insert(id), "{block:?} is indexed twice");
                bytes += size;
                count += 1;
                largest = largest.max(size);
            }
            for (address, id) in lane.unmapped() {
                let block = &self.blocks[id];
                ensure!(
                    !block.is_mapped() && block.lane == at && block.address == address,
                    "{block:?} in the unmapped index of another state, lane or key"
                );
                ensure!(indexed.insert(id), "{block:?} is indexed twice");
            }
            let active = active.get(&at).copied().unwrap_or(0);
            let figures = lane.stats().read();
            ensure!(
                (figures.free_bytes, figures.free_blocks, figures.largest_free)
                    == (bytes, count, largest)
                    && figures.active_bytes == active,
                "{figures:?}, but a recount gives {bytes} free bytes in {count} blocks, the \
                 largest {largest}, and {active} active bytes"
            );
        }
        let is_idle =
            |block: &Block| matches!(block.state, BlockState::Free | BlockState::Unmapped);
        let idle = self.blocks.iter().filter(|(_, block)| is_idle(block)).count();
        ensure!(idle == indexed.len(), "an idle block is in no index");
        Ok(())
    }

    /// The address map holds exactly the live blocks, and blocks without an owner have no users.
    fn check_live(&self) -> Result<(), Violation> {
        let mut live = 0_usize;
        for (id, block) in self.blocks.iter() {
            match block.state {
                BlockState::Live => {
                    live += 1;
                    let known = self.live.get(&block.address);
                    ensure!(known == Some(&id), "{block:?} is not in the address map");
                    ensure!(block.users.events == 0, "{block:?} is live and waits for events");
                    ensure!(block.holder.requested <= block.size, "{block:?} is too small");
                }
                BlockState::Pending => {}
                BlockState::Free
                | BlockState::Unmapped
                | BlockState::Detached
                | BlockState::Lent
                | BlockState::Shadow => {
                    ensure!(block.users.are_none(), "{block:?} is idle but used");
                }
            }
        }
        ensure!(live == self.live.len(), "an address of no live block");
        Ok(())
    }
}
