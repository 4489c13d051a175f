//! The floor: the fewest bytes that any allocator could reserve for a program.
//!
//! Blocks are multiples of 512 bytes, so live bytes are rounded to that. A private pool belongs to
//! a CUDA graph with fixed addresses, so it keeps its peak until it is released.

use std::collections::BTreeMap;

use cushion_core::PoolId;
use cushion_core::size::MIN_BLOCK;
use rustc_hash::FxHashMap;

use super::Program;
use super::steps::{Rare, Slot, Step};

impl Program {
    /// Returns the fewest bytes that any allocator could reserve to serve every request that
    /// PyTorch served, and, `with_refused`, those that PyTorch refused.
    #[must_use]
    pub fn floor_bytes(&self, with_refused: bool) -> u64 {
        let mut tally = Tally::default();
        let blocks = &self.beginning.blocks;
        for (segment, &pool) in self.beginning.segments.iter().zip(&self.beginning_pools) {
            if pool != PoolId::DEFAULT {
                let (from, to) = segment.blocks;
                tally.private.extend((from..to).map(|slot| (narrow(slot), pool)));
            }
        }
        let mut sizes: Vec<u64> = blocks.iter().map(|block| rounded(block.requested)).collect();
        sizes.extend(self.steps.requests().iter().map(|request| rounded(request.size)));
        for (slot, &size) in sizes[..blocks.len()].iter().enumerate() {
            tally.add(narrow(slot), size);
        }
        let mut next = blocks.len();
        let mut window = None;
        for step in self.steps.iter() {
            match step {
                Step::Alloc(_) => {
                    if let Some(pool) = window {
                        tally.private.insert(narrow(next), pool);
                    }
                    tally.add(narrow(next), sizes[next]);
                    next += 1;
                }
                Step::Free { slot } | Step::Rare(Rare::Complete { slot }) => {
                    tally.remove(slot, sizes[slot as usize]);
                }
                Step::Rare(Rare::BeginPool(pool)) => {
                    tally.pools.entry(pool).or_default().released = false;
                    window = Some(pool);
                }
                Step::Rare(Rare::EndPool) => window = None,
                Step::Rare(Rare::ReleasePool(pool)) => tally.release(pool),
                Step::Rare(Rare::Refused { size, .. }) if with_refused => {
                    // The recorded program continued without this memory, so it counts for a moment
                    // only. A request to a private pool can use the pool's spare bytes.
                    let held = window.map_or(0, |pool| tally.spare(pool));
                    tally.momentarily(rounded(size).saturating_sub(held));
                }
                Step::Rare(_) => {}
            }
        }
        tally.most
    }
}

#[derive(Debug, Default)]
struct Tally {
    /// Live bytes of the default pool.
    live: u64,
    pools: BTreeMap<PoolId, Pool>,
    /// The bytes that all private pools hold.
    pooled: u64,
    /// The slots in private pools.
    private: FxHashMap<Slot, PoolId>,
    most: u64,
}

#[derive(Debug, Default)]
struct Pool {
    live: u64,
    held: u64,
    released: bool,
}

impl Tally {
    fn add(&mut self, slot: Slot, bytes: u64) {
        match self.private.get(&slot) {
            None => self.live = self.live.saturating_add(bytes),
            Some(pool) => {
                let pool = self.pools.entry(*pool).or_default();
                pool.live = pool.live.saturating_add(bytes);
                let more = pool.live.saturating_sub(pool.held);
                pool.held += more;
                self.pooled = self.pooled.saturating_add(more);
            }
        }
        self.momentarily(0);
    }

    fn remove(&mut self, slot: Slot, bytes: u64) {
        let Some(id) = self.private.remove(&slot) else {
            self.live = self.live.saturating_sub(bytes);
            return;
        };
        let pool = self.pools.entry(id).or_default();
        pool.live = pool.live.saturating_sub(bytes);
        if pool.released {
            self.shrink(id);
        }
    }

    /// Notes the peak, with `bytes` more held for a moment.
    fn momentarily(&mut self, bytes: u64) {
        let held = self.live.saturating_add(self.pooled);
        self.most = self.most.max(held.saturating_add(bytes));
    }

    /// Returns the bytes of a pool that are not live.
    fn spare(&self, pool: PoolId) -> u64 {
        self.pools.get(&pool).map_or(0, |pool| pool.held - pool.live)
    }

    /// Releases a pool: from now on it holds only its live bytes.
    fn release(&mut self, id: PoolId) {
        self.pools.entry(id).or_default().released = true;
        self.shrink(id);
    }

    fn shrink(&mut self, id: PoolId) {
        let pool = self.pools.entry(id).or_default();
        self.pooled = self.pooled.saturating_sub(pool.held - pool.live.min(pool.held));
        pool.held = pool.held.min(pool.live);
    }
}

fn rounded(bytes: u64) -> u64 {
    bytes.max(1).checked_next_multiple_of(MIN_BLOCK).unwrap_or(bytes)
}

fn narrow(slot: usize) -> Slot {
    Slot::try_from(slot).expect("slots have 32 bits")
}
