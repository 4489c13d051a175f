//! Free memory of other pools and streams, for a request that its own pool cannot serve.
//!
//! A block that is borrowed stays in its own pool and on its own stream. That another stream uses it is noted, as for any
//! block, so that its free waits for that stream. It may be borrowed only if no work uses it. Whole blocks come first: a
//! part cut out of one would keep the rest from the driver, which could lay it out anew for every stream.

use crate::base::names::{PolicyIndex, PoolId};
use crate::core::Locked;
use crate::core::serve::Borrow;
use crate::driver::{Driver, DriverResult};
use crate::heap::pool::{LaneId, PoolTable};
use crate::memory::Request;
use crate::streams::proof::{Proof, Work};

impl<D: Driver> Locked<'_, D> {
    /// Serves a request of the default pool from the private pools that may help it out.
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

    /// Serves a request of the default pool from free memory of other streams that are not at work, and of the pool for
    /// requests of other sizes. Must not be called during a capture.
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
        // The request's own stream first: there is no work to ask about.
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

    /// Whether free memory of another stream would serve the request once that stream is done with its work.
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

    /// Whether the device has to be waited for before a part of another stream's memory can be borrowed.
    pub(super) fn lends_after_wait(&mut self, request: &Request) -> DriverResult<bool> {
        for lane in self.lending_lanes(request) {
            if matches!(self.mem.work_on(lane, request.lane.stream)?, Work::Unknown) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The lanes of other streams that have memory for the request.
    fn lending_lanes(&self, request: &Request) -> Vec<LaneId> {
        let lanes = self.mem.heap.lanes().map(|(lane, _)| lane);
        let is_default =
            |lane: &LaneId| lane.pool == PoolTable::SMALL || lane.pool == PoolTable::LARGE;
        let others = lanes.filter(|lane| is_default(lane) && lane.stream != request.lane.stream);
        others.filter(|&lane| self.lendable(lane, request, Borrow::Cut).is_some()).collect()
    }
}
