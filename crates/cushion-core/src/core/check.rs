//! The invariant check: each room checks its own structures, and the figures are compared with a
//! recount.
//!
//! Tests, property tests and fuzzing call it after every step.

use std::collections::BTreeMap;

use super::Locked;
use crate::backing::PageUse;
use crate::backing::check::Unclaimed;
use crate::base::check::{Violation, ensure};
use crate::base::names::PoolId;
use crate::driver::Driver;
use crate::heap::Chains;
use crate::heap::block::{Block, BlockState};
use crate::heap::segment::{Kind, Segment};
use crate::ledger::stats::{StatArray, Stats};

/// Figures by name and size class.
type Recount = BTreeMap<(&'static str, bool), u64>;

impl<D: Driver> Locked<'_, D> {
    /// Checks all structures against each other. `stats` are the figures now.
    pub(crate) fn check_invariants(&self, stats: &Stats) -> Result<(), Violation> {
        let chains = self.mem.heap.check()?;
        self.mem.streams.check(self.mem.heap)?;
        let mut unclaimed = self.mem.backing.check()?;
        self.check_pages(&chains, &mut unclaimed)?;
        for rules in self.policies.all() {
            rules.check(&self.mem, &chains, &mut unclaimed)?;
        }
        unclaimed.check_rest()?;
        self.check_backing()?;
        self.demand.check()?;
        self.check_counters(stats)?;
        self.check_oversize(stats)?;
        self.check_private_pools(stats)
    }

    /// Checks that whole pages without gaps are mapped behind every mapped block of a paged
    /// segment, and nothing behind unmapped blocks.
    fn check_pages(&self, chains: &Chains, unclaimed: &mut Unclaimed<'_>) -> Result<(), Violation> {
        for (id, segment) in self.mem.heap.segments() {
            let page_size = match segment.kind {
                Kind::Pages { page_size } => Some(page_size),
                Kind::Host => Some(segment.size),
                Kind::Homes => None,
                Kind::Plain | Kind::Stitch(_) => continue,
            };
            for block in chains[&id].iter().map(|&id| &self.mem.heap[id]) {
                if block.is_mapped() {
                    unclaimed.claim(block.address, block.end(), page_size)?;
                } else {
                    unclaimed.claim_nothing(block.address, block.end())?;
                }
            }
        }
        Ok(())
    }

    fn is_detached_segment(&self, block: &Block) -> bool {
        block.state == BlockState::Detached && self.mem.heap[block.segment].is_plain()
    }

    fn check_backing(&self) -> Result<(), Violation> {
        let blocks = self.mem.heap.blocks().map(|(_, block)| block);
        let detached = blocks.filter(|block| self.is_detached_segment(block));
        let addresses = self.mem.heap.lanes().map(|(_, lane)| lane.addresses()).sum();
        self.mem.backing.check_figures(addresses, detached.map(|block| block.size).sum())
    }

    /// Returns the plain segments that are held and not detached.
    fn plain_segments(&self) -> impl Iterator<Item = &Segment> {
        let heads = self.mem.heap.blocks().filter(|(_, block)| block.prev.is_none());
        let held = heads.filter(|(_, block)| !self.is_detached_segment(block));
        let segments = held.map(|(_, block)| &self.mem.heap[block.segment]);
        segments.filter(|segment| segment.is_plain())
    }

    /// Checks that the counters equal a recount.
    fn check_counters(&self, stats: &Stats) -> Result<(), Violation> {
        let (recount, spilled) = self.recount();
        ensure!(
            (stats.spilled_allocation.current, stats.spilled_bytes.current)
                == (spilled, self.mem.backing.held(PageUse::Host)),
            "{:?} and {:?}, a recount gives {spilled} allocations",
            stats.spilled_allocation,
            stats.spilled_bytes
        );
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
        Ok(())
    }

    /// Returns the figures by a walk over all blocks, segments and pages; and the allocations in
    /// host memory.
    fn recount(&self) -> (Recount, u64) {
        let mut recount = Recount::new();
        let mut add = |name, small, amount| *recount.entry((name, small)).or_default() += amount;
        let mut spilled = 0;
        for (id, block) in self.mem.heap.blocks() {
            if self.mem.is_spilled(id) {
                spilled += u64::from(block.state == BlockState::Live);
                continue;
            }
            let small = self.mem.heap[block.lane.pool].small;
            let live = block.state == BlockState::Live;
            if live {
                add("allocation", small, 1);
                add("allocated_bytes", small, block.size);
            }
            if live || block.state == BlockState::Pending {
                add("active", small, 1);
                add("active_bytes", small, block.size);
                add("requested_bytes", small, block.holder.requested);
            }
            if block.is_free() && self.mem.heap[block.segment].is_plain() && block.is_split() {
                add("inactive_split", small, 1);
                add("inactive_split_bytes", small, block.size);
            }
        }
        for segment in self.plain_segments() {
            let small = self.mem.heap[segment.lane.pool].small;
            add("segment", small, 1);
            add("reserved_bytes", small, segment.size);
        }
        for small in [true, false] {
            add("reserved_bytes", small, self.mem.backing.held(PageUse::of(small)));
        }
        (recount, spilled)
    }

    /// Checks that the numbers of allocations and segments too large to be split equal a recount.
    fn check_oversize(&self, stats: &Stats) -> Result<(), Violation> {
        let most = self.mem.options.max_split_size.unwrap_or(u64::MAX);
        let blocks = self.mem.heap.blocks().filter(|(id, block)| {
            block.state == BlockState::Live && block.size >= most && !self.mem.is_spilled(*id)
        });
        ensure!(
            stats.oversize_allocations.current == blocks.count() as u64,
            "oversize_allocations.current is {}",
            stats.oversize_allocations.current
        );
        let segments = self.plain_segments().filter(|segment| segment.size >= most);
        ensure!(
            stats.oversize_segments.current == segments.count() as u64,
            "oversize_segments.current is {}",
            stats.oversize_segments.current
        );
        Ok(())
    }

    /// Checks that the bytes of each private pool equal a recount.
    fn check_private_pools(&self, stats: &Stats) -> Result<(), Violation> {
        let mut recount = BTreeMap::<(PoolId, bool), u64>::new();
        let held = |block: &Block| {
            let is_stitch = matches!(self.mem.heap[block.segment].kind, Kind::Stitch(_));
            block.is_mapped() && !self.is_detached_segment(block) && !is_stitch
        };
        for (_, block) in self.mem.heap.blocks().filter(|(_, block)| held(block)) {
            let pool = &self.mem.heap[block.lane.pool];
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
        ensure!(uncounted.is_none(), "no figure counts what {uncounted:?} holds");
        Ok(())
    }
}
