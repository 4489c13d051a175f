//! The invariant checker: one walk over every structure, against every other.
//!
//! Tests, property tests and fuzzing call it after every step.

use std::collections::{BTreeMap, BTreeSet};

use crate::block::{Block, BlockId, BlockState};
use crate::driver::{Driver, StreamId};
use crate::locked::{Locked, State};
use crate::pages::PageUse;
use crate::pool::{Lane, PoolId, PoolIndex};
use crate::segment::{Backing, SegmentId};
use crate::stats::{StatArray, Stats};

/// An invariant that does not hold.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("broken invariant: {0}")]
pub struct Violation(pub String);

/// The blocks of each segment, in order.
type Chains = BTreeMap<SegmentId, Vec<BlockId>>;

/// Returns a [`Violation`] unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err(Violation(format!($($message)+)));
        }
    };
}

impl<D: Driver> Locked<'_, D> {
    pub(crate) fn check_invariants(&self) -> Result<(), Violation> {
        let chains = self.check_chains()?;
        self.check_segments(&chains)?;
        self.check_indexes()?;
        self.check_live_and_pending()?;
        self.check_pages(&chains)?;
        self.check_free_pages(&chains)?;
        self.check_stitches(&chains)?;
        self.check_leaving()?;
        self.check_counters()
    }

    /// Neighbours are linked both ways, tile their segment, and no two of them could merge.
    fn check_chains(&self) -> Result<Chains, Violation> {
        let blocks = &self.state.blocks;
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
                ensure!(at.pool == next.pool && at.stream == next.stream, "{next:?} strayed");
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

    /// Every segment has one chain, which covers it exactly.
    fn check_segments(&self, chains: &Chains) -> Result<(), Violation> {
        let mut held: BTreeMap<(PoolIndex, StreamId), (u32, u64)> = BTreeMap::new();
        let mut ranges = BTreeMap::new();
        for (id, segment) in self.state.segments.iter() {
            let Some(chain) = chains.get(&id) else {
                return Err(Violation(format!("{segment:?} has no blocks")));
            };
            let first = &self.state.blocks[chain[0]];
            let size: u64 = chain.iter().map(|&id| self.state.blocks[id].size).sum();
            ensure!(
                first.address == segment.address && size == segment.size,
                "the blocks of {segment:?} sum to {size}"
            );
            ensure!(
                first.pool == segment.pool && first.stream == segment.stream,
                "{segment:?} and its blocks disagree"
            );
            let (count, addresses) = held.entry((segment.pool, segment.stream)).or_default();
            *count += 1;
            let is_reserved = matches!(segment.backing, Backing::Pages { .. } | Backing::Homes);
            if is_reserved && !Self::is_spill(segment.pool) {
                *addresses += segment.size;
            }
            // What is on its way back may have been handed out again by the driver.
            if first.state != BlockState::Leaving {
                ranges.insert(segment.address, segment.end());
            }
        }
        let mut end = 0;
        for (&start, &range_end) in &ranges {
            ensure!(end <= start, "segments overlap at {start:#x}");
            end = range_end;
        }
        let segments = self.state.segments.iter().count();
        ensure!(chains.len() == segments, "a chain of blocks without a segment");
        for (index, pool) in self.state.pools.iter() {
            let mut of_pool = 0;
            for (stream, lane) in pool.lanes() {
                let (count, addresses) = held.remove(&(index, stream)).unwrap_or_default();
                ensure!(
                    (lane.segments(), lane.addresses()) == (count, addresses) && count > 0,
                    "pool {}, stream {stream:?}: {} segments and {} addresses, not {count} and {addresses}",
                    pool.id,
                    lane.segments(),
                    lane.addresses()
                );
                of_pool += count;
            }
            let segments = pool.segments();
            ensure!(segments == of_pool, "pool {}: {segments} segments, not {of_pool}", pool.id);
        }
        ensure!(held.is_empty(), "{held:?} in no lane");
        let addresses: u64 = self
            .state
            .pools
            .iter()
            .flat_map(|(_, pool)| pool.lanes())
            .map(|(_, l)| l.addresses())
            .sum();
        ensure!(
            addresses == self.state.homes.addresses,
            "{} addresses reserved, a recount gives {addresses}",
            self.state.homes.addresses
        );
        Ok(())
    }

    /// Every free and every unmapped block is in exactly one index, under its own key.
    fn check_indexes(&self) -> Result<(), Violation> {
        let mut indexed = BTreeSet::new();
        let mut active = BTreeMap::<_, u64>::new();
        for (_, block) in self.state.blocks.iter() {
            if matches!(block.state, BlockState::Live | BlockState::Pending) {
                *active.entry((block.pool, block.stream)).or_default() += block.size;
            }
        }
        for (index, pool) in self.state.pools.iter() {
            for (stream, lane) in pool.lanes() {
                let mut bytes = 0;
                let mut count = 0;
                let mut largest = 0;
                let belongs = |block: &Block| block.pool == index && block.stream == stream;
                for (size, address, id) in lane.free().iter() {
                    let block = &self.state.blocks[id];
                    ensure!(
                        block.is_free() && belongs(block),
                        "{block:?} in the free index of another state, pool or stream"
                    );
                    ensure!(
                        (block.size, block.address) == (size, address),
                        "stale key of {block:?}"
                    );
                    ensure!(indexed.insert(id), "{block:?} is indexed twice");
                    bytes += size;
                    count += 1;
                    largest = largest.max(size);
                }
                for (address, id) in lane.unmapped() {
                    let block = &self.state.blocks[id];
                    ensure!(
                        !block.is_mapped() && belongs(block) && block.address == address,
                        "{block:?} in the unmapped index of another state, pool, stream or key"
                    );
                    ensure!(indexed.insert(id), "{block:?} is indexed twice");
                }
                let active = active.get(&(index, stream)).copied().unwrap_or(0);
                let figures = lane.stats().read();
                ensure!(
                    (figures.free_bytes, figures.free_blocks, figures.largest_free)
                        == (bytes, count, largest)
                        && figures.active_bytes == active,
                    "{figures:?}, but a recount gives {bytes} free bytes in {count} blocks, the \
                     largest {largest}, and {active} active bytes"
                );
            }
        }
        let idle = self
            .state
            .blocks
            .iter()
            .filter(|(_, b)| matches!(b.state, BlockState::Free | BlockState::Unmapped));
        ensure!(idle.count() == indexed.len(), "an idle block is in no index");
        Ok(())
    }

    /// The address map holds the live blocks; the events hold the pending ones.
    fn check_live_and_pending(&self) -> Result<(), Violation> {
        let waiting = self.state.pending.waiting();
        let mut live = 0_usize;
        let mut pending = 0_usize;
        for (id, block) in self.state.blocks.iter() {
            match block.state {
                BlockState::Live => {
                    live += 1;
                    let known = self.state.live.get(&block.address);
                    ensure!(known == Some(&id), "{block:?} is not in the address map");
                    ensure!(block.events == 0, "{block:?} is live and waits for events");
                    ensure!(block.requested <= block.size, "{block:?} is too small");
                }
                BlockState::Pending => {
                    pending += 1;
                    let events = waiting.get(&id).copied();
                    ensure!(events == Some(block.events), "{block:?} waits for {events:?} events");
                }
                BlockState::Free
                | BlockState::Unmapped
                | BlockState::Leaving
                | BlockState::Lent
                | BlockState::Shadow => {
                    ensure!(
                        block.events == 0 && block.uses.is_none(),
                        "{block:?} is idle but used"
                    );
                }
            }
        }
        ensure!(live == self.state.live.len(), "an address of no live block");
        ensure!(pending == waiting.len(), "an event of no pending block");
        Ok(())
    }

    /// Behind every mapped block of a paged segment lie pages, whole and without gaps; behind
    /// unmapped ones nothing, but for mappings the driver would not undo. Every page counts once.
    fn check_pages(&self, chains: &Chains) -> Result<(), Violation> {
        let pages = &self.state.pages;
        let mut mappings: BTreeMap<u64, u64> = pages.mappings().collect();
        for (id, segment) in self.state.segments.iter() {
            let page_size = match segment.backing {
                Backing::Pages { page_size } => Some(page_size),
                Backing::Homes => None,
                Backing::Plain | Backing::Stitched(_) => continue,
            };
            for block in chains[&id].iter().map(|&id| &self.state.blocks[id]) {
                let mut at = block.address;
                while block.is_mapped() && at < block.end() {
                    let Some((first, bytes, _)) = pages.page_around(at) else {
                        return Err(Violation(format!("no page at {at:#x} behind {block:?}")));
                    };
                    ensure!(
                        page_size.is_none_or(|size| size == bytes) && !pages.is_stuck(first),
                        "a page of {bytes} bytes at {first:#x} behind {block:?}"
                    );
                    mappings.remove(&first);
                    at = first + bytes;
                }
                let range = block.address..block.end();
                let unmapped = !block.is_mapped();
                for (at, _) in mappings.extract_if(range, |_, _| unmapped) {
                    ensure!(pages.is_stuck(at), "a page at {at:#x} behind {block:?}");
                }
            }
        }
        for (_, stitch) in self.state.stitches.iter() {
            for part in &stitch.parts {
                let at = stitch.address + part.offset;
                let here = pages.page_around(at);
                ensure!(
                    here == Some((at, part.bytes, part.page)) && !pages.is_stuck(at),
                    "{part:?} is not at {at:#x} of its range: {here:?}"
                );
                let home = pages.page_around(part.home);
                ensure!(
                    home == Some((part.home, part.bytes, part.page)),
                    "{part:?} has left its home"
                );
                mappings.remove(&at);
            }
            let range = stitch.address..stitch.address + stitch.bytes;
            mappings.extract_if(range, |&at, _| pages.is_stuck(at)).for_each(drop);
        }
        let left = &self.state.left_ranges;
        let in_left_range =
            |at: u64| left.iter().any(|&(start, size)| (start..start + size).contains(&at));
        mappings.retain(|&at, _| !(pages.is_stuck(at) && in_left_range(at)));
        ensure!(mappings.is_empty(), "pages at {mappings:x?}, behind no block");
        let mut held = [0; 3];
        let mut addresses = 0;
        let mut stranded = 0;
        for (_, page) in pages.iter() {
            held[page.use_ as usize] += page.bytes;
            addresses += page.addresses;
            stranded += usize::from(page.addresses == 0);
        }
        ensure!(addresses as usize == pages.mappings().count(), "mappings and pages disagree");
        ensure!(stranded == pages.stranded(), "{stranded} pages have no address");
        ensure!(
            held == PageUse::ALL.map(|use_| pages.held(use_)) && held == self.state.pages_counted,
            "pages of {held:?} bytes, but {:?} counted",
            self.state.pages_counted
        );
        Ok(())
    }

    /// What a lane knows of how its pages are free is so, but for those that it has still to look at.
    fn check_free_pages(&self, chains: &Chains) -> Result<(), Violation> {
        let State { blocks, segments, pages, pools, .. } = &*self.state;
        let mut free: BTreeMap<(PoolIndex, StreamId), BTreeMap<u64, u64>> = BTreeMap::new();
        let homes = segments.iter().filter(|(_, segment)| segment.backing == Backing::Homes);
        for (id, segment) in homes {
            let here = free.entry((segment.pool, segment.stream)).or_default();
            let blocks = chains[&id].iter().map(|&id| &blocks[id]);
            here.extend(blocks.filter(|it| it.is_free()).map(|it| (it.address, it.end())));
        }
        for ((pool, stream), free) in free {
            let known = pools[pool].lane(stream).and_then(Lane::free_pages);
            let around = |address: u64| {
                let (&start, &end) = free.range(..=address).next_back()?;
                (address < end).then_some(start..end)
            };
            ensure!(
                known.is_some_and(|known| known.agrees(|range| pages.pages_in(range), around)),
                "of pages of stream {stream:?} in {pool:?} it is not known how they are free"
            );
        }
        Ok(())
    }

    /// What a range hands out is lent at home, byte for byte, and nothing else is.
    fn check_stitches(&self, chains: &Chains) -> Result<(), Violation> {
        let blocks = &self.state.blocks;
        let mut lent = BTreeSet::new();
        for (id, stitch) in self.state.stitches.iter() {
            let block = &blocks[stitch.block];
            let segment = &self.state.segments[block.segment];
            ensure!(segment.backing == Backing::Stitched(id), "{stitch:?} has {segment:?}");
            let in_use = matches!(block.state, BlockState::Live | BlockState::Pending);
            ensure!(in_use == stitch.is_in_use(), "{stitch:?} and {block:?} disagree");
            let others = chains[&block.segment].iter().filter(|&&id| id != stitch.block);
            for other in others.map(|&id| &blocks[id]) {
                ensure!(other.state == BlockState::Shadow, "{other:?} beside {block:?}");
            }
            ensure!(in_use || !block.is_split() && block.state == BlockState::Shadow, "{block:?}");
            if !in_use {
                continue;
            }
            let mut bytes = 0;
            for &home in &stitch.lent {
                let home_block = &blocks[home];
                ensure!(home_block.state == BlockState::Lent, "{home_block:?} is not lent");
                ensure!(lent.insert(home), "{home_block:?} is lent twice");
                let mut at = home_block.address;
                // Behind the same offset of the block is the same byte of the same page.
                while at < home_block.end() {
                    let address = block.address + bytes;
                    let (here, there) =
                        (self.state.pages.page_around(address), self.state.pages.page_around(at));
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
        let all = blocks.iter().filter(|(_, block)| block.state == BlockState::Lent).count();
        ensure!(all == lent.len(), "{all} blocks are lent, to ranges {}", lent.len());
        Ok(())
    }

    /// The counters equal a recount.
    fn check_counters(&self) -> Result<(), Violation> {
        let mut recount = BTreeMap::<(&str, bool), u64>::new();
        let mut add = |name, small, amount| *recount.entry((name, small)).or_default() += amount;
        let mut spilled = 0;
        for (_, block) in self.state.blocks.iter() {
            if Self::is_spill(block.pool) {
                spilled += u64::from(block.state == BlockState::Live);
                continue;
            }
            let small = self.state.pools[block.pool].small;
            let plain = self.state.segments[block.segment].is_plain();
            let live = block.state == BlockState::Live;
            if live {
                add("allocation", small, 1);
                add("allocated_bytes", small, block.size);
            }
            if live || block.state == BlockState::Pending {
                add("active", small, 1);
                add("active_bytes", small, block.size);
                add("requested_bytes", small, block.requested);
            }
            if block.is_free() && plain && block.is_split() {
                add("inactive_split", small, 1);
                add("inactive_split_bytes", small, block.size);
            }
        }
        let leaving: BTreeMap<SegmentId, u64> = self
            .state
            .blocks
            .iter()
            .filter(|(_, block)| {
                // Pages that leave are held until they are unmapped.
                block.state == BlockState::Leaving && self.state.segments[block.segment].is_plain()
            })
            .map(|(_, block)| (block.segment, block.size))
            .collect();
        ensure!(
            leaving.values().sum::<u64>() == self.state.leaving,
            "{} bytes leave, not {leaving:?}",
            self.state.leaving
        );
        let plain: Vec<_> = self
            .state
            .segments
            .iter()
            .filter(|(id, segment)| segment.is_plain() && !leaving.contains_key(id))
            .collect();
        for (_, segment) in &plain {
            let small = self.state.pools[segment.pool].small;
            add("segment", small, 1);
            add("reserved_bytes", small, segment.size);
        }
        for small in [true, false] {
            add("reserved_bytes", small, self.state.pages.held(PageUse::of(small)));
        }
        let stats = self.counters.read(self.lanes);
        ensure!(
            (stats.spilled_allocation.current, stats.spilled_bytes.current)
                == (spilled, self.state.pages.held(PageUse::Host)),
            "{:?} and {:?}, a recount gives {spilled} allocations",
            stats.spilled_allocation,
            stats.spilled_bytes
        );
        self.check_queue()?;
        let arrays: [(&str, &StatArray); 9] = [
            ("allocation", &stats.allocation),
            ("segment", &stats.segment),
            ("active", &stats.active),
            ("inactive_split", &stats.inactive_split),
            ("allocated_bytes", &stats.allocated_bytes),
            ("reserved_bytes", &stats.reserved_bytes),
            ("active_bytes", &stats.active_bytes),
            ("inactive_split_bytes", &stats.inactive_split_bytes),
            ("requested_bytes", &stats.requested_bytes),
        ];
        for (name, array) in arrays {
            let of = |small| recount.get(&(name, small)).copied().unwrap_or(0);
            for (pool, stat, expected) in [
                ("small_pool", array.small_pool, of(true)),
                ("large_pool", array.large_pool, of(false)),
                ("all", array.all, of(true) + of(false)),
            ] {
                ensure!(
                    stat.current == expected,
                    "{name}.{pool}.current is {}, a recount gives {expected}",
                    stat.current
                );
                ensure!(stat.peak >= stat.current, "{name}.{pool}.peak is below current");
            }
        }
        self.check_private_pools(&stats)?;
        let oversize = |size: u64| self.is_oversize(size);
        let blocks = self.state.live.values().filter(|&&id| {
            let block = &self.state.blocks[id];
            oversize(block.size) && !Self::is_spill(block.pool)
        });
        ensure!(
            stats.oversize_allocations.current == blocks.count() as u64,
            "oversize_allocations.current is {}",
            stats.oversize_allocations.current
        );
        let segments = plain.iter().filter(|(_, segment)| oversize(segment.size));
        ensure!(
            stats.oversize_segments.current == segments.count() as u64,
            "oversize_segments.current is {}",
            stats.oversize_segments.current
        );
        Ok(())
    }

    /// Those who wait, and injected failures, are seen by every allocation.
    fn check_queue(&self) -> Result<(), Violation> {
        let State { queue, attention, injection, .. } = &*self.state;
        ensure!(
            *attention == (!queue.is_idle() || injection.is_some()),
            "{} wait, but attention is {attention}",
            queue.len()
        );
        Ok(())
    }

    /// What each private pool holds equals a recount.
    fn check_private_pools(&self, stats: &Stats) -> Result<(), Violation> {
        let mut recount = BTreeMap::<(PoolId, bool), u64>::new();
        let held = |block: &Block| {
            let stitched =
                matches!(self.state.segments[block.segment].backing, Backing::Stitched(_));
            let plain = self.state.segments[block.segment].is_plain();
            block.is_mapped() && !(block.state == BlockState::Leaving && plain) && !stitched
        };
        for (_, block) in self.state.blocks.iter().filter(|(_, block)| held(block)) {
            let pool = &self.state.pools[block.pool];
            *recount.entry((pool.id, pool.small)).or_default() += block.size;
        }
        for (&pool, array) in &stats.reserved_bytes_by_private_pools {
            for (small, stat) in [(true, array.small_pool), (false, array.large_pool)] {
                let expected = recount.remove(&(pool, small)).unwrap_or(0);
                ensure!(
                    stat.current == expected,
                    "pool {pool} is said to hold {}, a recount gives {expected}",
                    stat.current
                );
            }
        }
        let uncounted = recount.keys().find(|(pool, _)| *pool != PoolId::DEFAULT);
        ensure!(uncounted.is_none(), "nobody counts what {uncounted:?} holds");
        Ok(())
    }
}
