//! Free memory of other pools and streams, for a request that its own pool cannot serve.
//!
//! A block that is borrowed stays in its own pool and on its own stream; that another stream uses it is
//! noted, as for any block, so that its free waits for that stream. It may be borrowed only if nobody is
//! still at work on it. Whole blocks come first: a piece cut out of one would keep the rest from the driver,
//! which could lay it out anew for everybody.

use crate::driver::{Driver, DriverResult, StreamId};
use crate::history::Tag;
use crate::homes::Found;
use crate::locked::Locked;
use crate::policy::{Policy, Request};
use crate::pool::{PoolId, PoolIndex, PoolTable};
use crate::proof::{Idle, Proof, Work};

/// How much of a block may be borrowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lend {
    /// All of it, or nothing.
    Whole,
    /// A piece, too.
    Pieces,
}

impl<D: Driver> Locked<'_, D> {
    /// Serves a request of the default pool from the private pools that may help it out.
    pub(crate) fn borrow_from_pools(
        &mut self,
        request: &Request,
        policy: Policy,
        tag: Tag,
    ) -> Option<u64> {
        if self.state.pools[request.pool].id != PoolId::DEFAULT {
            return None;
        }
        let pools: Vec<_> = self.state.pools.use_on_oom.iter().copied().collect();
        pools.into_iter().find_map(|id| {
            let private = self.state.pools.private.get(&id).filter(|pool| pool.uses > 0)?;
            let pool = if request.small { private.small } else { private.large };
            let request = Request { pool, ..*request };
            let found = self.search(&request, policy)?;
            Some(self.hand_out(found, policy, &request, tag))
        })
    }

    /// Serves a request of the default pool from free memory of other streams that are not at work, and of
    /// the pool for requests of other sizes. Must not be called during a capture.
    pub(crate) fn borrow_from_streams(
        &mut self,
        request: &Request,
        lend: Lend,
        proof: Proof,
        tag: Tag,
    ) -> DriverResult<Option<u64>> {
        if self.state.pools[request.pool].id != PoolId::DEFAULT {
            return Ok(None);
        }
        self.recall_leaving();
        let (own, other) = if request.small {
            (PoolTable::SMALL, PoolTable::LARGE)
        } else {
            (PoolTable::LARGE, PoolTable::SMALL)
        };
        // The request's own stream first: there is nothing to ask.
        let mut lanes = vec![(other, request.stream)];
        for pool in [own, other] {
            let streams = self.state.pools[pool].lanes().map(|(stream, _)| stream);
            lanes.extend(streams.filter(|&it| it != request.stream).map(|stream| (pool, stream)));
        }
        for (pool, stream) in lanes {
            if let Some(address) = self.borrow_from((pool, stream), request, lend, proof, tag)? {
                return Ok(Some(address));
            }
        }
        Ok(None)
    }

    /// Serves a request of the default pool from memory of the same class that another stream is done with, as far as
    /// that can be told without waiting. Must not be called during a capture.
    pub(crate) fn borrow_idle(&mut self, request: &Request, tag: Tag) -> Option<u64> {
        // What is borrowed is freed by an event on the stream that asks: it must be there then. The default stream does
        // not borrow: it carries the main work, and would wait for its own memory. Neither does a stream that runs
        // beside others: whether they are done is then a matter of chance, and each would grow for the other's sake.
        let pool = &self.state.pools[request.pool];
        let is_shared = pool.lane(request.stream).is_some_and(|lane| lane.is_shared);
        if pool.id != PoolId::DEFAULT
            || !self.lasts(request.stream)
            || request.stream == StreamId(0)
            || is_shared
        {
            return None;
        }
        let streams = pool.lanes().map(|(stream, _)| stream);
        let others: Vec<_> = streams.filter(|&it| it != request.stream).collect();
        // A driver that will not say whether a stream is done means growing at worst.
        others.into_iter().find_map(|stream| {
            let lane = (request.pool, stream);
            self.borrow_from(lane, request, Lend::Pieces, Proof::NONE, tag).ok().flatten()
        })
    }

    /// Whether free memory of another stream would serve the request once that stream is done with its work.
    pub(crate) fn could_borrow_later(&mut self, request: &Request) -> DriverResult<bool> {
        if self.state.pools[request.pool].id != PoolId::DEFAULT {
            return Ok(false);
        }
        let mut under_way = false;
        for lane in self.lending_lanes(request) {
            let work = self.work_on(lane, request.stream)?;
            under_way |= matches!(work, Work::UnderWay);
        }
        Ok(under_way)
    }

    /// Whether the device has to be waited for before a piece of another stream's memory can be borrowed.
    pub(crate) fn lends_after_wait(&mut self, request: &Request) -> DriverResult<bool> {
        for lane in self.lending_lanes(request) {
            if matches!(self.work_on(lane, request.stream)?, Work::Unknown) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The lanes of other streams that have a block for the request.
    fn lending_lanes(&self, request: &Request) -> Vec<(PoolIndex, StreamId)> {
        let pools = [PoolTable::SMALL, PoolTable::LARGE].into_iter();
        let lanes = pools
            .flat_map(|pool| self.state.pools[pool].lanes().map(move |(stream, _)| (pool, stream)));
        let others = lanes.filter(|&(_, stream)| stream != request.stream);
        let lends = |&(pool, stream): &(PoolIndex, StreamId)| {
            self.lendable(&Request { pool, stream, ..*request }, Lend::Pieces).is_some()
        };
        others.filter(lends).collect()
    }

    /// The block of a lane that may be borrowed for a request, if its stream is not at work.
    fn lendable(&self, there: &Request, lend: Lend) -> Option<Found> {
        let policy = self.state.policy;
        let found = self.find_best(there, policy)?;
        if let Found::Block(id) = found
            && lend == Lend::Whole
        {
            let view = self.state.view(self.device);
            let block = &view.blocks[id];
            let small = self.state.pools[there.pool].small;
            let is_whole =
                block.size == there.size || !policy.rules().splits(view, block, there.size, small);
            return is_whole.then_some(found);
        }
        Some(found)
    }

    fn borrow_from(
        &mut self,
        (pool, stream): (PoolIndex, StreamId),
        request: &Request,
        lend: Lend,
        proof: Proof,
        tag: Tag,
    ) -> DriverResult<Option<u64>> {
        let policy = self.state.policy;
        let there = Request { pool, stream, ..*request };
        let Some(found) = self.lendable(&there, lend) else { return Ok(None) };
        if stream == request.stream {
            return Ok(Some(self.hand_out(found, policy, &there, tag)));
        }
        let idle = match self.idle_found(found, there.size, proof) {
            Some(idle) => Some(idle),
            None => match self.work_on((pool, stream), request.stream)? {
                Work::Done(proof) => self.idle_found(found, there.size, proof),
                Work::UnderWay | Work::Unknown => None,
            },
        };
        Ok(idle.map(|idle| self.hand_to(request.stream, found, &idle, &there, tag)))
    }

    /// Hands memory of one stream, which nobody is at work on, to another.
    fn hand_to(
        &mut self,
        stream: StreamId,
        found: Found,
        _: &Idle<'_>,
        there: &Request,
        tag: Tag,
    ) -> u64 {
        let address = self.hand_out(found, self.state.policy, there, tag);
        let id = self.state.live[&address];
        self.note_borrowed(id, stream);
        address
    }
}
