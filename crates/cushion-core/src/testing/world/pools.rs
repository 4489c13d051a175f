//! Private pools.

use std::collections::{BTreeMap, BTreeSet};

use super::World;
use crate::driver::Bytes;
use crate::{PoolError, PoolId, StreamFilter, StreamId};

const POOLS: u8 = 3;

/// The model of the private pools.
#[derive(Debug, Default)]
pub(super) struct Pools {
    /// Pools that allocations go to at the moment, in the order of their begin.
    pub(super) open: Vec<PoolId>,
    /// The number of uses of each pool that the program has not released.
    pub(super) uses: BTreeMap<PoolId, u32>,
    /// Memory (address, size, physical bytes) that the graphs captured into a pool use in replays.
    pub(super) baked: BTreeMap<PoolId, Vec<(u64, u64, Vec<Bytes>)>>,
    /// Pools that were used without a capture, or that may serve other requests when memory runs
    /// out. The program may use their memory itself, so it may not replay their graphs.
    pub(super) impure: BTreeSet<PoolId>,
}

pub(super) fn pool_id(index: u8) -> PoolId {
    PoolId(1, u64::from(index % POOLS) + 1)
}

impl World {
    /// Begins a pool without a capture, unless graphs use the pool.
    pub(super) fn begin_own_pool(&mut self, pool: PoolId, only: Option<StreamId>) {
        if !self.pools.baked.contains_key(&pool) {
            let filter = move |stream| only.is_none_or(|only| only == stream);
            self.begin_pool(pool, Box::new(filter));
            self.pools.impure.insert(pool);
        }
    }

    /// Begins a pool. Returns false if the pool is already open or was released.
    pub(super) fn begin_pool(&mut self, pool: PoolId, filter: StreamFilter) -> bool {
        match self.engine.begin_allocate_to_pool(pool, filter) {
            Ok(()) => {
                assert!(!self.pools.open.contains(&pool));
                self.pools.open.push(pool);
                if !self.pools.uses.contains_key(&pool) {
                    // The pool is new and empty.
                    self.pools.impure.remove(&pool);
                }
                *self.pools.uses.entry(pool).or_default() += 1;
                true
            }
            Err(PoolError::AlreadyRecording(_)) => {
                assert!(self.pools.open.contains(&pool));
                false
            }
            Err(PoolError::Released(_)) => {
                assert!(!self.pools.uses.contains_key(&pool));
                false
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// Ends a pool, unless the current capture uses it.
    pub(super) fn end_pool(&mut self, pool: PoolId) {
        if self.captures.current.is_some_and(|(captured, _)| captured == pool) {
            return;
        }
        let was_open = self.pools.open.contains(&pool);
        let ended = self.engine.end_allocate_to_pool(pool);
        assert_eq!(ended.is_ok(), was_open, "{ended:?}");
        self.pools.open.retain(|&open| open != pool);
    }

    pub(super) fn release_pool(&mut self, pool: PoolId) {
        match self.engine.release_pool(pool) {
            Ok(()) => self.released(pool),
            Err(PoolError::Unknown(_) | PoolError::Released(_)) => {
                assert!(!self.pools.uses.contains_key(&pool));
            }
            Err(PoolError::StillRecording(_)) => assert!(self.pools.open.contains(&pool)),
            Err(error) => panic!("{error}"),
        }
    }

    /// Notes that one use of a pool has ended. Replays that were launched earlier still run.
    pub(super) fn released(&mut self, pool: PoolId) {
        let uses = self.pools.uses.get_mut(&pool).expect("the pool is in use");
        *uses -= 1;
        if *uses == 0 {
            self.pools.uses.remove(&pool);
            self.pools.baked.remove(&pool);
        }
    }

    /// Sets whether a pool may serve other requests when memory runs out. A pool that graphs use
    /// may not: a replay would overwrite the memory that it handed out.
    pub(super) fn use_on_oom(&mut self, pool: PoolId, allow: bool) {
        if self.pools.baked.contains_key(&pool) {
            return;
        }
        let result = self.engine.set_use_on_oom(pool, allow);
        assert!(result.is_ok() || result == Err(PoolError::Unknown(pool)));
        if result.is_ok() && allow {
            self.pools.impure.insert(pool);
        }
    }

    pub(super) fn set_no_split(&self, pool: PoolId) {
        let result = self.engine.set_no_split(pool);
        assert!(result.is_ok() || result == Err(PoolError::Unknown(pool)));
    }

    pub(super) fn empty_pool(&mut self, pool: PoolId) {
        let result = self.engine.empty_cache_of(pool);
        // The engine empties a pool that is named even where the driver refuses it in a capture.
        if self.captures.current.is_none() {
            self.may_fail(result.err());
        }
    }
}
