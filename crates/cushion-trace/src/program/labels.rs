//! The pool of each recorded segment.

use cushion_core::PoolId;

use super::holdings::{HoldingId, Holdings};
use crate::model::events::Events;
use crate::model::snapshot::Segment;

/// The first number of inferred pools, which no recorded pool has.
const INFERRED: u64 = u64::MAX;

/// The pool of each holding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Labels {
    pools: Vec<PoolId>,
    /// Whether the trace itself tells the pool.
    known: Vec<bool>,
    inferred_pools: u64,
}

impl Labels {
    /// Returns the pools that the events and the final segments name.
    pub(crate) fn recorded(events: &Events, segments: &[&Segment], start: &Holdings) -> Self {
        let mut holdings = start.clone();
        let mut pools = vec![PoolId::DEFAULT; start.count()];
        let mut known = vec![false; start.count()];
        for event in events {
            holdings.take(&event);
            pools.resize(holdings.count(), PoolId::DEFAULT);
            known.resize(holdings.count(), false);
            if let (Some((a, b)), Some(id)) = (event.pool, holdings.at(event.addr)) {
                pools[id] = PoolId(a, b);
                known[id] = true;
            }
        }
        for segment in segments {
            if let Some(id) = holdings.at(segment.address) {
                pools[id] = PoolId(segment.pool.0, segment.pool.1);
                known[id] = true;
            }
        }
        Self { pools, known, inferred_pools: 0 }
    }

    /// Returns the pool of a holding.
    pub(crate) fn pool(&self, id: HoldingId) -> PoolId {
        self.pools.get(id).copied().unwrap_or(PoolId::DEFAULT)
    }

    /// Returns whether the trace tells the pool of every holding.
    pub(crate) fn is_complete(&self) -> bool {
        self.known.iter().all(|&known| known)
    }

    /// Returns the number of holdings that are private by inference.
    pub(crate) fn inferred(&self) -> usize {
        let is_inferred = |&(pool, &known): &(&PoolId, &bool)| !known && *pool != PoolId::DEFAULT;
        self.pools.iter().zip(&self.known).filter(is_inferred).count()
    }

    /// Returns a new inferred pool.
    pub(crate) fn fresh_pool(&mut self) -> PoolId {
        self.inferred_pools += 1;
        PoolId(INFERRED, self.inferred_pools)
    }

    /// Returns whether the trace itself tells the pool of a holding.
    pub(crate) fn is_known(&self, id: HoldingId) -> bool {
        self.known[id]
    }

    pub(crate) fn set_pool(&mut self, id: HoldingId, pool: PoolId) {
        self.pools[id] = pool;
    }

    pub(crate) fn has_same_pools(&self, other: &Self) -> bool {
        self.pools == other.pools
    }
}
