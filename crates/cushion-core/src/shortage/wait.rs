//! The rungs that wait: for pending frees, and for other threads and processes.

use std::time::Duration;

use super::Climber;
use super::climb::Climb;
use crate::backing::Backing;
use crate::core::attempt::Attempt;
use crate::core::serve::Borrow;
use crate::core::{Locked, ring};
use crate::demand::queue::{Bells, Supply};
use crate::driver::{Driver, DriverResult};
use crate::ledger::stats::Stats;
use crate::memory::Request;
use crate::options::ladder::Rung;
use crate::outcome::error::Ended;
use crate::streams::proof::Proof;

impl<D: Driver> Climber<'_, D> {
    /// Completes frees that must wait for the whole device, because a stream that used the memory
    /// may no longer exist.
    pub(super) fn finish_awaiting_device(self, climb: &Climb) -> DriverResult<()> {
        if self.shared.locked(|core| core.mem.streams.awaits_device())
            && self.outside_capture(climb, || self.shared.wait_for_device()).transpose()?.is_some()
        {
            // Other requests may wait for these frees.
            self.shared.wake();
        }
        Ok(())
    }

    /// Waits for as many pending frees as are needed: until a free block serves the request, or
    /// giving memory back would make room.
    pub(super) fn wait_for_events(self, climb: &mut Climb) -> DriverResult<Attempt> {
        self.finish_awaiting_device(climb)?;
        let now = self.shared.clock.now();
        let left = self.time_to_wait(climb, now);
        self.shared.locked(|mut core| {
            let Some(won) = core.complete_frees()? else {
                return Ok(Attempt::Nothing(Ended::Illegal));
            };
            if won > 0 {
                climb.note(Rung::Events, Ended::TooLittle, won, Duration::ZERO);
            }
            let in_turn = core.demand.queue.may_try(core.mem.heap, &climb.queued);
            if (in_turn || core.demand.queue.may_take_own(&climb.queued))
                && let Some(address) = core.serve_free(climb)
            {
                return Ok(Attempt::Served { address, won: 0 });
            }
            if !in_turn {
                return Ok(Attempt::Nothing(Ended::Nothing));
            }
            let request = core.request_of(climb);
            if let Some(address) = core.borrow_if_allowed(climb, &request)? {
                return Ok(Attempt::Served { address, won: 0 });
            }
            let free = Backing::device_free(core.mem.driver)?;
            let seen = core.seen(&self.shared.stats(), Some(free));
            if seen.room >= core.wanted(&request)
                && climb.tries.seen.is_none_or(|it| seen.room > it.room)
            {
                // Other requests have given memory back to the driver meanwhile.
                climb.tries.seen = Some(seen);
                return Ok(Attempt::Again);
            }
            let helps = core.pending_would_serve(&request)
                || !core.giving_back_helps(&request)? && core.events_help(&request)?;
            if !helps {
                return Ok(Attempt::Nothing(Ended::Nothing));
            }
            if left.is_zero() {
                return Ok(Attempt::Nothing(Ended::TimeIsUp));
            }
            core.join_queue(climb, now);
            Ok(Attempt::Wait(climb.backoff.pause().min(left)))
        })
    }

    /// Waits for the request's turn, for other threads and for other processes.
    pub(super) fn wait_for_others(self, climb: &mut Climb) -> Attempt {
        if let Err(error) = self.finish_awaiting_device(climb) {
            return Attempt::Failed(error);
        }
        let now = self.shared.clock.now();
        let look = Look {
            now,
            left: self.time_to_wait(climb, now),
            free: Backing::device_free(&self.shared.driver).ok(),
            is_helped: self.desk.callbacks.are_running(),
        };
        let (attempt, bells) = self.shared.locked(|mut core| {
            // During a capture the driver must not be called, but other threads may still free
            // memory.
            if core.demand.queue.verdict(climb.queued.ticket).is_none()
                && !core.mem.is_recording()
                && let Err(error) = core.process_many_events()
            {
                return (Attempt::Failed(error), Bells::new());
            }
            core.look_in_queue(climb, &look, || self.shared.stats())
        });
        ring(bells);
        attempt
    }

    /// Returns how long a request may still wait: the rest of its own budget, or of the process's
    /// if that is less.
    fn time_to_wait(self, climb: &Climb, now: Duration) -> Duration {
        let left = climb.left(now);
        let total = climb.options.wait_total_ms.map(Duration::from_millis);
        total.map_or(left, |total| left.min(total.saturating_sub(self.desk.waited.total())))
    }
}

/// The state that a waiting request checks at one look.
#[derive(Debug)]
struct Look {
    now: Duration,
    /// How long it may still wait.
    left: Duration,
    /// Bytes that the device reports as free.
    free: Option<u64>,
    /// Whether a callback is running, which may free memory of any owner.
    is_helped: bool,
}

impl<D: Driver> Locked<'_, D> {
    /// One look of a request that waits for others: it takes memory if it is its turn, or goes on
    /// waiting. Also returns the bells to ring once the lock is free.
    fn look_in_queue(
        &mut self,
        climb: &mut Climb,
        look: &Look,
        stats: impl Fn() -> Stats,
    ) -> (Attempt, Bells) {
        let ticket = climb.queued.ticket;
        if let Some(verdict) = self.demand.queue.verdict(ticket) {
            climb.end.verdict = Some(verdict);
            return (Attempt::Nothing(Ended::Nothing), Bells::new());
        }
        let left = look.left;
        self.demand.queue.look(look.now);
        if !left.is_zero() {
            self.join_queue(climb, look.now);
        }
        let request = self.request_of(climb);
        let mut sources = self.sources(climb, &request, look);
        // A task that gave way tries when its time is up, before it is refused.
        let held_back =
            !left.is_zero() && self.demand.queue.is_held_back(self.mem.heap, climb.queued.owner);
        self.demand.queue.hold_back(ticket, held_back);
        sources.turn |= held_back;
        let urged = self.demand.queue.is_urged(ticket);
        let in_turn = !held_back && self.demand.queue.may_try(self.mem.heap, &climb.queued);
        let tries = in_turn || urged || left.is_zero() || !sources.any();
        // Free blocks of its own lane do not help the requests ahead that wait for other lanes.
        if (tries || !held_back && self.demand.queue.may_take_own(&climb.queued))
            && let Some(address) = self.serve_free(climb)
        {
            return (Attempt::Served { address, won: 0 }, Bells::new());
        }
        if tries {
            let work_ended =
                std::mem::replace(&mut climb.tries.awaits_work, sources.events) && !sources.events;
            let seen = self.seen(&stats(), look.free);
            if self.is_worth_climbing(climb, &request, work_ended, seen, left) {
                // The end of that work may help other requests, too.
                let bells = work_ended.then(|| self.demand.queue.changed());
                return (Attempt::Again, bells.unwrap_or_default());
            }
            self.demand.queue.tried(ticket);
            sources = self.sources(climb, &request, look);
            sources.turn |= held_back;
        }
        if left.is_zero() {
            return (Attempt::Nothing(Ended::TimeIsUp), Bells::new());
        }
        let wait = Attempt::Wait(climb.backoff.pause().min(left));
        let standstill = self.demand.queue.standstill(self.mem.heap, sources);
        match standstill.refused {
            Some((refused, verdict)) if refused == ticket => {
                climb.end.verdict = Some(verdict);
                (Attempt::Nothing(Ended::Nothing), Bells::new())
            }
            Some((refused, verdict)) => {
                (wait, self.demand.queue.decide(refused, verdict).into_iter().collect())
            }
            None if sources.any() || !standstill.bells.is_empty() => (wait, standstill.bells),
            None => (Attempt::Nothing(Ended::Nothing), Bells::new()),
        }
    }

    /// Returns the sources from which memory may still come for a request that waits.
    fn sources(
        &mut self,
        climb: &Climb,
        request: &Request,
        look: &Look,
    ) -> crate::demand::queue::Sources {
        let work = !self.mem.is_recording()
            && (!self.mem.streams.is_nothing_pending()
                || self.events_help(request).unwrap_or(false));
        let needed = self.needed(request);
        let room = self.mem.room_of(look.free.unwrap_or(0));
        let by_itself = [self.mem.ledger.cached(), self.mem.ledger.pending()];
        let by_itself = by_itself.into_iter().fold(room, u64::saturating_add);
        let processes = self.others_may_help(request, look.free);
        let supply = Supply { needed, by_itself, work, processes };
        let queue = &self.demand.queue;
        queue.sources(self.mem.heap, &climb.queued, request, supply, look.is_helped)
    }

    /// Returns whether the memory of other processes would be enough, and the limit allows it.
    fn others_may_help(&self, request: &Request, free: Option<u64>) -> bool {
        let Some(free) = free else { return false };
        let others = self.held_by_others(free);
        // Cached memory would be given back first.
        let cached = self.mem.ledger.cached();
        let in_use = self.mem.reserved().saturating_sub(cached);
        let limit = self.mem.backing.limit();
        let allowed = limit.map_or(u64::MAX, |limit| limit.saturating_sub(in_use));
        let wanted = self.wanted(request);
        others > 0
            && wanted <= allowed
            && wanted <= free.saturating_add(others).saturating_add(cached)
    }

    /// Returns whether a request that waits should climb again: it has not climbed yet; or there is
    /// more memory than before, which may be enough; or work that it waited for has ended. After
    /// its time is up, at most once.
    fn is_worth_climbing(
        &mut self,
        climb: &mut Climb,
        request: &Request,
        work_ended: bool,
        now: super::climb::Seen,
        left: Duration,
    ) -> bool {
        let before = climb.tries.seen.replace(now);
        let is_more = before.is_none_or(|before| now.is_more_than(&before));
        let needed = self.needed(request);
        let may_do = now.available >= needed || now.largest >= request.size;
        let is_worth = !climb.has_climbed() || work_ended || is_more && may_do;
        if left.is_zero() && std::mem::replace(&mut climb.tries.had_last, true) {
            return false;
        }
        is_worth
    }

    /// Adds the request to the queue, if it is not there yet.
    fn join_queue(&mut self, climb: &Climb, now: Duration) {
        let pause = Duration::from_millis(climb.options.wait_ceiling_ms);
        let looks_by = climb.time.deadline.min(now.saturating_add(pause));
        self.demand.queue.look(now);
        self.demand.queue.join(climb.queued, &climb.bell, looks_by);
        self.demand.update_attention();
    }

    /// Borrows a whole block, unless that rung is switched off or the request is a prefetch.
    fn borrow_if_allowed(&mut self, climb: &Climb, request: &Request) -> DriverResult<Option<u64>> {
        if climb.asked.ahead || climb.options.skip_rungs.contains(Rung::Borrow) {
            return Ok(None);
        }
        self.borrow_from_streams(request, Borrow::Whole, Proof::NONE)
    }
}
