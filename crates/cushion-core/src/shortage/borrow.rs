//! Free memory of other pools and streams, for a request that its own pool cannot serve.
//!
//! A borrowed block stays in its own lane. The engine notes that another stream uses it, as for any
//! block, so that its free waits for that stream. A block may be borrowed only if no work uses it.
//! Whole blocks come first: a block cut out of a larger one would keep the rest from the driver,
//! which could lay it out anew for every stream.

use crate::base::names::{PolicyIndex, PoolId};
use crate::core::Locked;
use crate::core::serve::Borrow;
use crate::driver::{Driver, DriverResult};
use crate::heap::pool::{LaneId, PoolTable};
use crate::memory::Request;
use crate::streams::proof::{Proof, Work};

impl<D: Driver> Locked<'_, D> {
    /// Serves a request of the default pool from the private pools that allow it.
    pub(super) fn borrow_from_pools(
        &mut self,
        request: &Request,
        policy: PolicyIndex,
    ) -> Option<u64> {
        if self.mem.heap[request.lane.pool].id != PoolId::DEFAULT {
            return None;
        }
        let pools: Vec<_> = self.mem.heap.pools().use_on_oom().collect();
        pools.into_iter().find_map(|id| {
            let private = self.mem.heap.pools().private(id).filter(|pool| pool.uses > 0)?;
            let lane = LaneId { pool: private.half(request.small), ..request.lane };
            let request = Request { lane, ..*request };
            let found = self.search(&request, policy)?;
            Some(self.hand_out(found, policy, &request))
        })
    }

    /// Serves a request of the default pool from free memory of other streams that are idle, and of
    /// the pool for requests of the other size class. Must not be called during a capture.
    pub(super) fn borrow_from_streams(
        &mut self,
        request: &Request,
        borrow: Borrow,
        proof: Proof,
    ) -> DriverResult<Option<u64>> {
        if self.mem.heap[request.lane.pool].id != PoolId::DEFAULT {
            return Ok(None);
        }
        self.recall_all();
        let (own, other) =
            (PoolTable::default_half(request.small), PoolTable::default_half(!request.small));
        // The request's own stream first: no other work has to be checked.
        let stream = request.lane.stream;
        let mut lanes = vec![LaneId { pool: other, stream }];
        for pool in [own, other] {
            let streams = self.mem.heap[pool].lanes().map(|(stream, _)| stream);
            let others = streams.filter(|&it| it != stream);
            lanes.extend(others.map(|stream| LaneId { pool, stream }));
        }
        for lane in lanes {
            if let Some(address) = self.borrow_from(lane, request, borrow, proof)? {
                return Ok(Some(address));
            }
        }
        Ok(None)
    }

    /// Returns whether free memory of another stream would serve the request once that stream's
    /// work is done.
    pub(super) fn could_borrow_later(&mut self, request: &Request) -> DriverResult<bool> {
        if self.mem.heap[request.lane.pool].id != PoolId::DEFAULT {
            return Ok(false);
        }
        let mut under_way = false;
        for lane in self.lending_lanes(request) {
            let work = self.mem.work_on(lane, request.lane.stream)?;
            under_way |= matches!(work, Work::UnderWay);
        }
        Ok(under_way)
    }

    /// Returns whether the engine must wait for the device before it can cut a block from another
    /// stream's memory.
    pub(super) fn lends_after_wait(&mut self, request: &Request) -> DriverResult<bool> {
        for lane in self.lending_lanes(request) {
            if matches!(self.mem.work_on(lane, request.lane.stream)?, Work::Unknown) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Returns the lanes of other streams that have memory for the request.
    fn lending_lanes(&self, request: &Request) -> Vec<LaneId> {
        let lanes = self.mem.heap.lanes().map(|(lane, _)| lane);
        let is_default =
            |lane: &LaneId| lane.pool == PoolTable::SMALL || lane.pool == PoolTable::LARGE;
        let others = lanes.filter(|lane| is_default(lane) && lane.stream != request.lane.stream);
        others.filter(|&lane| self.lendable(lane, request, Borrow::Cut).is_some()).collect()
    }
}
