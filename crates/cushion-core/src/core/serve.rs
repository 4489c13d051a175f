//! Serving a request: one function, with or without waiting.

use std::time::Duration;

use super::Locked;
use super::attempt::{Attempt, Effort};
use crate::base::names::{Owner, PolicyIndex, PoolId, Tag};
use crate::demand::asked::Asked;
use crate::demand::owner::Wishes;
use crate::demand::queue::Queued;
use crate::driver::{Driver, DriverResult, StreamId};
use crate::heap::pool::LaneId;
use crate::ledger::change::Change;
use crate::memory::{Found, Request};
use crate::options::ladder::{Ladder, Rung};
use crate::outcome::error::Ended;
use crate::streams::proof::{Proof, Work};

impl<D: Driver> Locked<'_, D> {
    /// Serves a request from memory that is available at once: a free block, or, with
    /// [`Effort::AtOnce`], new memory of the driver. With other efforts the ladder asks the driver.
    pub(crate) fn serve(&mut self, asked: &Asked, effort: Effort) -> DriverResult<Attempt> {
        self.complete_finished_frees(asked.stream)?;
        let owner = self.demand.lead(asked.owner);
        if self.demand.needs_attention()
            && let Some(held_up) = self.hold_up(asked, owner, effort)
        {
            return Ok(held_up);
        }
        let request = self.mem.request(asked.bytes, asked.stream, owner, asked.tag);
        if let Some(address) = self.serve_hit(&request)? {
            return Ok(Attempt::Served { address, won: 0 });
        }
        if effort == Effort::AtOnce {
            return self.serve_miss_at_once(asked, &request);
        }
        if self.demand.needs_attention() && self.must_queue(asked, &request) {
            return Ok(Attempt::Wait(Duration::ZERO));
        }
        Ok(Attempt::Nothing(Ended::Nothing))
    }

    /// Serves a request from free memory of its own lane, even while others wait: no other request
    /// can be served from there without a rung of the ladder.
    fn serve_hit(&mut self, request: &Request) -> DriverResult<Option<u64>> {
        let policy = self.policies.in_force();
        let Some(found) = self.search_all(request, policy)? else { return Ok(None) };
        if self.demand.needs_attention() {
            self.demand.queue.passed_over(u64::MAX);
        }
        self.mem.ledger.apply(Change::Hit);
        Ok(Some(self.hand_out(found, policy, request)))
    }

    /// Asks the driver, if no request waits and no memory must be given back first.
    fn serve_miss_at_once(&mut self, asked: &Asked, request: &Request) -> DriverResult<Attempt> {
        // Requests that wait may come first, and garbage may have to be given back before the
        // driver is asked.
        let is_at_once = !self.demand.needs_attention()
            && !self.mem.is_collecting_garbage()
            && request.wanted <= self.mem.device.total;
        if !is_at_once {
            return Ok(Attempt::Nothing(Ended::Nothing));
        }
        let skipped = self.mem.options.skip_rungs.and(asked.wishes(request.owner).skipped);
        let served = self.serve_new(request, !skipped.contains(Rung::Borrow))?;
        if served.is_some() {
            self.mem.ledger.apply(Change::Miss);
        }
        Ok(Attempt::served_or_nothing(served))
    }

    // ---- requests that must wait ----

    /// Returns the injected failure of this request, or `Wait` if its task gave way to others.
    #[cold]
    fn hold_up(&mut self, asked: &Asked, owner: Owner, effort: Effort) -> Option<Attempt> {
        if effort == Effort::AtOnce {
            // An injected failure strikes once, and only a request that may wait takes it.
            let is_held_up =
                self.demand.is_injecting() || self.demand.queue.is_held_back(self.mem.heap, owner);
            return is_held_up.then_some(Attempt::Wait(Duration::ZERO));
        }
        if asked.in_callback {
            return None;
        }
        if let Some(injected) = self.demand.strike(asked.bytes) {
            return Some(Attempt::Injected(injected));
        }
        if !self.is_waiting_allowed(&asked.wishes(owner)) {
            return None;
        }
        let held_back = self.demand.queue.is_held_back(self.mem.heap, owner);
        self.demand.update_attention();
        held_back.then_some(Attempt::Wait(Duration::ZERO))
    }

    /// Returns whether a request that no free block serves must wait for others before it asks the
    /// driver.
    #[cold]
    fn must_queue(&mut self, asked: &Asked, request: &Request) -> bool {
        let &Request { lane, owner, .. } = request;
        let wishes = asked.wishes(owner);
        if asked.in_callback || !self.is_waiting_allowed(&wishes) {
            return false;
        }
        let (priority, blocks) = (wishes.priority, asked.blocks);
        let queued = Queued { ticket: u64::MAX, owner, priority, blocks, lane };
        !self.demand.queue.may_try(self.mem.heap, &queued)
    }

    /// Returns whether a request with these wishes may wait at all.
    fn is_waiting_allowed(&self, wishes: &Wishes) -> bool {
        let options = self.mem.options;
        wishes.budget.map_or(options.wait_ms > 0, |budget| !budget.is_zero())
            && self.setup.ladder == Ladder::Graceful
            && !options.skip_rungs.and(wishes.skipped).contains(Rung::Wait)
    }

    // ---- reserved memory ----

    /// Like [`search`](Self::search), after the frees that other streams are done with by now.
    fn search_all(
        &mut self,
        request: &Request,
        policy: PolicyIndex,
    ) -> DriverResult<Option<Found>> {
        match self.search(request, policy) {
            None if self.mem.streams.has_more() && !self.mem.is_recording() => {
                self.process_many_events()?;
                Ok(self.policies.rules(policy).find(&self.mem, request))
            }
            found => Ok(found),
        }
    }

    /// Returns the memory that serves a request without the driver. It stays in its lane.
    pub(crate) fn search(&mut self, request: &Request, policy: PolicyIndex) -> Option<Found> {
        self.mem.count_search(request);
        if let Some(found) = self.policies.rules_mut(policy).search(&mut self.mem, request) {
            return Some(found);
        }
        self.find_recalled(request, policy)?;
        self.policies.rules_mut(policy).search(&mut self.mem, request)
    }

    /// Returns the memory that serves a request together with the recalled detached pages.
    fn find_recalled(&mut self, request: &Request, policy: PolicyIndex) -> Option<Found> {
        let mut recalled = false;
        for rules in self.policies.all_mut() {
            recalled |= rules.recall(&mut self.mem, Some(request));
        }
        if !recalled {
            return None;
        }
        let found = self.policies.rules(policy).find(&self.mem, request)?;
        for rules in self.policies.all_mut() {
            rules.note_recalled(&self.mem, found, request.size);
        }
        Some(found)
    }

    /// Returns all detached pages to their lanes.
    pub(crate) fn recall_all(&mut self) {
        for rules in self.policies.all_mut() {
            rules.recall(&mut self.mem, None);
        }
    }

    /// Returns whether a free block would serve this request now.
    pub(crate) fn would_hit(&self, requested: u64, stream: StreamId) -> bool {
        let request = self.mem.request(requested, stream, Owner::NOBODY, Tag::NONE);
        self.would_serve(&request)
    }

    /// Returns whether free memory would serve this request now.
    pub(crate) fn would_serve(&self, request: &Request) -> bool {
        self.policies.rules(self.policies.in_force()).find(&self.mem, request).is_some()
    }

    /// Cuts the found memory to size, if the policy splits it, and hands it out.
    pub(crate) fn hand_out(&mut self, found: Found, policy: PolicyIndex, request: &Request) -> u64 {
        let rules = self.policies.rules_mut(policy);
        let (id, splits) = rules.prepare(&mut self.mem, found, request);
        self.mem.take(id, splits, request)
    }

    // ---- memory from the driver ----

    /// Serves a request from detached pages, from memory of an idle stream, or from new memory of
    /// the driver. Returns `None` if memory ran out.
    pub(crate) fn serve_new(
        &mut self,
        request: &Request,
        may_borrow: bool,
    ) -> DriverResult<Option<u64>> {
        let policy = self.policies.in_force();
        if let Some(found) = self.find_recalled(request, policy) {
            return Ok(Some(self.hand_out(found, policy, request)));
        }
        if may_borrow
            && self.policies.rules_mut(policy).prefers_borrowing(&mut self.mem, request)
            && let Some(address) = self.borrow_idle(request)
        {
            return Ok(Some(address));
        }
        if self.wanted(request) > self.mem.device.total {
            return Ok(None);
        }
        let block = self.policies.rules_mut(policy).grow(&mut self.mem, request)?;
        Ok(block.map(|id| self.hand_out(Found::Block(id), policy, request)))
    }

    /// Returns the bytes that an empty device must provide for the request.
    pub(crate) fn wanted(&self, request: &Request) -> u64 {
        self.policies.rules(self.policies.in_force()).wanted(&self.mem, request)
    }

    /// Returns the bytes that the driver must have free to serve the request, after everything
    /// cached is given back.
    pub(crate) fn needed(&mut self, request: &Request) -> u64 {
        let policy = self.policies.in_force();
        self.policies.rules_mut(policy).needed(&mut self.mem, request)
    }

    // ---- memory of other streams ----

    /// Serves a request of the default pool from memory of the same size class with which another
    /// stream is done, as far as is known without waiting. Must not be called during a capture.
    fn borrow_idle(&mut self, request: &Request) -> Option<u64> {
        // A borrowed block is freed by an event on the borrowing stream, so that stream must exist
        // then. The default stream does not borrow: it carries the main work, and would wait for
        // its own memory. Nor does a stream that runs beside others: whether they are done is then
        // a matter of chance, and each would grow because of the other.
        let LaneId { pool, stream } = request.lane;
        let is_shared = self.mem.heap.lane(request.lane).is_some_and(|lane| lane.is_shared());
        if self.mem.heap[pool].id != PoolId::DEFAULT
            || !self.mem.streams.lasts(stream)
            || stream == StreamId(0)
            || is_shared
        {
            return None;
        }
        let streams = self.mem.heap[pool].lanes().map(|(stream, _)| stream);
        let others: Vec<_> = streams.filter(|&it| it != stream).collect();
        // If the driver does not say whether a stream is done, the engine grows instead.
        others.into_iter().find_map(|stream| {
            let lane = LaneId { pool, stream };
            self.borrow_from(lane, request, Borrow::Cut, Proof::NONE).ok().flatten()
        })
    }

    /// Returns the memory that a lane can lend for a request once its stream is idle, and the
    /// request as the lane would serve it.
    pub(crate) fn lendable(
        &self,
        lane: LaneId,
        request: &Request,
        borrow: Borrow,
    ) -> Option<(Found, Request)> {
        let there = Request { lane, ..*request };
        let rules = self.policies.rules(self.policies.in_force());
        let found = rules.find_to_lend(&self.mem, &there)?;
        if let Found::Block(id) = found
            && borrow == Borrow::Whole
        {
            let size = self.mem.heap[id].size;
            let is_whole = size == there.size || !rules.splits(&self.mem, id, there.size);
            return is_whole.then_some((found, there));
        }
        Some((found, there))
    }

    /// Serves a request from a lane of another pool or stream, if no work uses the memory.
    pub(crate) fn borrow_from(
        &mut self,
        lane: LaneId,
        request: &Request,
        borrow: Borrow,
        proof: Proof,
    ) -> DriverResult<Option<u64>> {
        let policy = self.policies.in_force();
        let Some((found, there)) = self.lendable(lane, request, borrow) else { return Ok(None) };
        let stream = request.lane.stream;
        if lane.stream == stream {
            return Ok(Some(self.hand_out(found, policy, &there)));
        }
        let rules = self.policies.rules(policy);
        let idle = match rules.idle(&self.mem, found, there.size, proof) {
            Some(idle) => Some(idle),
            None => match self.mem.work_on(lane, stream)? {
                Work::Done(proof) => rules.idle(&self.mem, found, there.size, proof),
                Work::UnderWay | Work::Unknown => None,
            },
        };
        let Some(_idle) = idle else { return Ok(None) };
        let address = self.hand_out(found, policy, &there);
        let id = self.mem.heap.live_at(address).expect("handed out just now");
        self.mem.streams.note_borrowed(self.mem.heap, self.mem.driver, id, stream);
        Ok(Some(address))
    }
}

/// How much of a block may be borrowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Borrow {
    /// All of it, or nothing.
    Whole,
    /// Also a part.
    Cut,
}
