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
    /// Completes frees of memory that a stream used which may be gone: nothing less than the device can be waited for.
    pub(super) fn finish_awaiting_device(self, climb: &Climb) -> DriverResult<()> {
        if self.shared.locked(|core| core.mem.streams.awaits_device())
            && self.outside_capture(climb, || self.shared.wait_for_device()).transpose()?.is_some()
        {
            // Other requests may wait for just these.
            self.shared.wake();
        }
        Ok(())
    }

    /// Waits for just enough pending frees: until a free block serves the request, or giving memory back would make room.
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
            let in_turn = core.demand.queue.may_try(core.mem.heap, &climb.asker);
            if (in_turn || core.demand.queue.may_take_own(&climb.asker))
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
                // Others gave memory back to the driver meanwhile.
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

    /// Waits for its turn, for other threads and for other processes.
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
            // During a capture nothing may be asked, but others may still give memory back.
            if core.demand.queue.verdict(climb.asker.ticket).is_none()
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

    /// How long a request may still wait: what is left of its own budget, and of the process's.
    fn time_to_wait(self, climb: &Climb, now: Duration) -> Duration {
        let left = climb.left(now);
        let total = climb.options.wait_total_ms.map(Duration::from_millis);
        total.map_or(left, |total| left.min(total.saturating_sub(self.desk.waited.total())))
    }
}

/// What a request that waits looks at.
#[derive(Debug)]
struct Look {
    now: Duration,
    /// How long it may still wait.
    left: Duration,
    /// What the device reports as free.
    free: Option<u64>,
    /// Whether a callback is under way, which may free memory of any owner.
    is_helped: bool,
}

impl<D: Driver> Locked<'_, D> {
    /// One look of a request that waits for others: takes memory if it is its turn, or waits on. Also returns the bells to
    /// ring once the lock is free.
    fn look_in_queue(
        &mut self,
        climb: &mut Climb,
        look: &Look,
        stats: impl Fn() -> Stats,
    ) -> (Attempt, Bells) {
        let ticket = climb.asker.ticket;
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
        // A task that gave way is let in when its time is up, rather than refused.
        let held_back =
            !left.is_zero() && self.demand.queue.is_held_back(self.mem.heap, climb.asker.owner);
        self.demand.queue.hold_back(ticket, held_back);
        sources.turn |= held_back;
        let urged = self.demand.queue.is_urged(ticket);
        let in_turn = !held_back && self.demand.queue.may_try(self.mem.heap, &climb.asker);
        let tries = in_turn || urged || left.is_zero() || !sources.any();
        // Its own lane serves no request that is ahead of it and waits for another lane.
        if (tries || !held_back && self.demand.queue.may_take_own(&climb.asker))
            && let Some(address) = self.serve_free(climb)
        {
            return (Attempt::Served { address, won: 0 }, Bells::new());
        }
        if tries {
            let work_ended =
                std::mem::replace(&mut climb.tries.awaits_work, sources.events) && !sources.events;
            let seen = self.seen(&stats(), look.free);
            if self.is_worth_climbing(climb, &request, work_ended, seen, left) {
                // That work has ended may help others, too.
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

    /// What may still come for a request that waits.
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
        queue.sources(self.mem.heap, &climb.asker, request, supply, look.is_helped)
    }

    /// Whether the memory that other processes hold would be enough, and the limit allows it.
    fn others_may_help(&self, request: &Request, free: Option<u64>) -> bool {
        let Some(free) = free else { return false };
        let others = self.held_by_others(free);
        // What is cached would be given back first.
        let cached = self.mem.ledger.cached();
        let in_use = self.mem.reserved().saturating_sub(cached);
        let limit = self.mem.backing.limit();
        let allowed = limit.map_or(u64::MAX, |limit| limit.saturating_sub(in_use));
        let wanted = self.wanted(request);
        others > 0
            && wanted <= allowed
            && wanted <= free.saturating_add(others).saturating_add(cached)
    }

    /// Whether a request that waits should go up once more: it has not yet, or there is more than before, and together that
    /// may be enough; or work has ended that memory was waited for. When its time is up, once.
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

    /// The request waits in the queue from now on, if it did not already.
    fn join_queue(&mut self, climb: &Climb, now: Duration) {
        let pause = Duration::from_millis(climb.options.wait_ceiling_ms);
        let looks_by = climb.time.deadline.min(now.saturating_add(pause));
        self.demand.queue.look(now);
        self.demand.queue.join(climb.asker, &climb.bell, looks_by);
        self.demand.update_attention();
    }

    /// Borrows a whole block, unless that rung is switched off, or borrowed memory would not help.
    fn borrow_if_allowed(&mut self, climb: &Climb, request: &Request) -> DriverResult<Option<u64>> {
        if climb.asked.ahead || climb.options.skip_rungs.contains(Rung::Borrow) {
            return Ok(None);
        }
        self.borrow_from_streams(request, Borrow::Whole, Proof::NONE)
    }
}
