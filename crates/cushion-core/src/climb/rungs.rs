//! What each rung does.

use std::time::Duration;

use super::{Climb, Visit};
use crate::borrow::Lend;
use crate::callbacks::{Plea, Situation};
use crate::driver::{Driver, DriverResult};
use crate::engine::{Engine, ring};
use crate::error::Ended;
use crate::give_back::Enough;
use crate::ladder::{Ladder, Legal, Rung, Then};
use crate::locked::{Asked, Locked};
use crate::policy::{Policy, Request};
use crate::pool::PoolId;
use crate::proof::Proof;
use crate::queue::{Bells, Standstill};

impl<D: Driver> Engine<D> {
    /// Runs `f`, which lets the driver wait, while no capture is under way. PyTorch gives memory back beside captures
    /// on other streams, too.
    fn outside_capture<T>(&self, climb: &Climb, f: impl FnOnce() -> T) -> Option<T> {
        let guard = match climb.ladder {
            Ladder::Torch => self.no_capture_begins(),
            Ladder::Graceful => self.outside_captures()?,
        };
        let result = f();
        drop(guard);
        Some(result)
    }

    /// As [`outside_capture`](Self::outside_capture), for what gives memory back: those who wait are woken if it did.
    fn giving_back<T>(
        &self,
        climb: &Climb,
        f: impl FnOnce() -> DriverResult<(u64, T)>,
    ) -> Option<DriverResult<(u64, T)>> {
        let result = self.outside_capture(climb, f)?;
        // Where the driver fails, some may have been given back, and others are in their pools again.
        if !matches!(result, Ok((0, _))) {
            self.wake();
        }
        Some(result)
    }

    pub(super) fn collect_garbage(&self, climb: &Climb) -> Visit {
        let given_back = self.giving_back(climb, || {
            let leaving = self.locked(|mut engine| engine.detach_garbage());
            Ok((self.release(leaving, climb.asked.tag)?, ()))
        });
        match given_back {
            None => Visit::Left(Ended::Illegal),
            Some(Ok((won, ()))) => Visit::Won(won),
            Some(Err(error)) => Visit::Failed(error),
        }
    }

    pub(super) fn grow(&self, climb: &mut Climb) -> Visit {
        match self.locked(|mut engine| engine.serve_new_to(climb)) {
            Ok(Some(address)) => Visit::Served(address, 0),
            Ok(None) => {
                if !climb.short {
                    self.fall_short(climb);
                }
                let wanted = self.locked(|engine| engine.wanted_of(&engine.request_of(climb)));
                if wanted > self.device.total {
                    // Nothing on the device could help.
                    climb.at = climb.last_before_spill();
                }
                Visit::Left(Ended::Nothing)
            }
            Err(error) => Visit::Failed(error),
        }
    }

    /// Whether the request is for more than the device, or the limit on it, could ever give.
    pub(super) fn never_fits(&self, climb: &Climb) -> bool {
        self.locked(|engine| {
            let request = engine.request_of(climb);
            let most = engine.state.limit.unwrap_or(u64::MAX).min(engine.device.total);
            engine.wanted_of(&request) > most
        })
    }

    pub(super) fn poll(&self) -> DriverResult<Visit> {
        Ok(self.complete_frees()?.map_or(Visit::Left(Ended::Illegal), Visit::Won))
    }

    pub(super) fn borrow(&self, climb: &Climb) -> DriverResult<Visit> {
        let tag = climb.asked.tag;
        self.locked(|mut engine| {
            let request = engine.request_of(climb);
            let served = match climb.ladder {
                // PyTorch passes over pages here.
                Ladder::Torch => engine.borrow_from_pools(&request, Policy::Segments, tag),
                Ladder::Graceful => {
                    let policy = engine.state.policy;
                    match engine.borrow_from_pools(&request, policy, tag) {
                        None if !engine.is_recording() => {
                            engine.borrow_from_streams(&request, Lend::Whole, Proof::NONE, tag)?
                        }
                        served => served,
                    }
                }
            };
            Ok(served.map_or(Visit::Left(Ended::Nothing), |address| Visit::Served(address, 0)))
        })
    }

    pub(super) fn borrow_pieces(&self, climb: &Climb) -> DriverResult<Visit> {
        let served = self.outside_capture(climb, || {
            let waits = self.locked(|mut engine| {
                let request = engine.request_of(climb);
                engine.lends_after_wait(&request)
            })?;
            let proof = if waits { self.wait_for_device()? } else { Proof::NONE };
            self.locked(|mut engine| {
                let request = engine.request_of(climb);
                let tag = climb.asked.tag;
                engine.borrow_from_streams(&request, Lend::Pieces, proof, tag)
            })
        });
        let Some(served) = served else { return Ok(Visit::Left(Ended::Illegal)) };
        Ok(served?.map_or(Visit::Left(Ended::Nothing), |address| Visit::Served(address, 0)))
    }

    /// Completes frees of memory that a stream used which may be gone: nothing less than the device can be waited for.
    fn finish_awaiting_device(&self, climb: &Climb) -> DriverResult<()> {
        if self.locked(|engine| engine.state.pending.awaits_device())
            && self.outside_capture(climb, || self.wait_for_device()).transpose()?.is_some()
        {
            // Others may wait for just these.
            self.wake();
        }
        Ok(())
    }

    /// Waits for just enough pending frees: until a free block serves the request, or giving memory back
    /// would make room.
    pub(super) fn wait_for_events(&self, climb: &mut Climb) -> DriverResult<Visit> {
        self.finish_awaiting_device(climb)?;
        let now = self.clock.now();
        let left = self.may_wait(climb, now);
        self.locked(|mut engine| {
            let Some(won) = engine.complete_frees()? else {
                return Ok(Visit::Left(Ended::Illegal));
            };
            if won > 0 {
                climb.note(Rung::Events, Ended::TooLittle, won, Duration::ZERO);
            }
            let in_turn = engine.may_try(&climb.asker);
            if (in_turn || engine.may_take_own(&climb.asker))
                && let Some(address) = engine.serve_free(climb)
            {
                return Ok(Visit::Served(address, 0));
            }
            if !in_turn {
                return Ok(Visit::Left(Ended::Nothing));
            }
            let request = engine.request_of(climb);
            if let Some(address) = engine.borrow_if_allowed(climb, &request)? {
                return Ok(Visit::Served(address, 0));
            }
            let seen = engine.seen(Some(engine.driver.memory_info()?.free));
            if seen.room >= engine.wanted_of(&request)
                && climb.seen.is_none_or(|it| seen.room > it.room)
            {
                // Others gave memory back to the driver meanwhile.
                climb.seen = Some(seen);
                return Ok(Visit::Again);
            }
            let helps = engine.pending_would_serve(&request)
                || !engine.giving_back_helps(&request)? && engine.events_help(&request)?;
            if !helps {
                return Ok(Visit::Left(Ended::Nothing));
            }
            if left.is_zero() {
                return Ok(Visit::Left(Ended::TimeIsUp));
            }
            engine.join(climb, now);
            Ok(Visit::Stay(climb.backoff.pause().min(left)))
        })
    }

    pub(super) fn give_back_oversize(&self, climb: &Climb) -> Visit {
        let given_back = self.giving_back(climb, || {
            let (leaving, enough) = self.locked(|mut engine| {
                let request = engine.request_of(climb);
                engine.detach_oversize(&request)
            });
            Ok((self.release(leaving, climb.asked.tag)?, enough))
        });
        match given_back {
            None => Visit::Left(Ended::Illegal),
            // PyTorch does not ask unless it is enough.
            Some(Ok((0, false))) => Visit::Left(Ended::Nothing),
            Some(Ok((_, false))) if climb.ladder == Ladder::Torch => Visit::Left(Ended::TooLittle),
            Some(Ok((won, _))) => Visit::Won(won),
            Some(Err(error)) => Visit::Failed(error),
        }
    }

    /// Gives back what is cached, if that would be enough. PyTorch does so in any case, and waits for all
    /// pending frees first.
    pub(super) fn give_back(&self, climb: &Climb) -> DriverResult<Visit> {
        let tag = climb.asked.tag;
        if climb.ladder == Ladder::Torch {
            let before = self.counters.reserved_bytes.current();
            self.give_back_cached(PoolId::DEFAULT, tag)?;
            let after = self.counters.reserved_bytes.current();
            return Ok(Visit::Won(before.saturating_sub(after)));
        }
        let given_back = self.giving_back(climb, || {
            let waits = self.locked(|mut engine| {
                let request = engine.request_of(climb);
                engine.waits_to_give_back(&request)
            })?;
            let Some(waits) = waits else { return Ok((0, ())) };
            let proof = if waits { self.wait_for_device()? } else { Proof::NONE };
            let Enough { segments, pages } = self.locked(|mut engine| {
                let request = engine.request_of(climb);
                engine.enough_to_give_back(&request, proof)
            })?;
            // Pages first: what is detached must not be lost to a driver that fails.
            let (unmapped, _) = self.unmap_blocks(pages, tag)?;
            let leaving = self.locked(|mut engine| engine.detach_segments(&segments));
            let released = self.release(leaving, tag)?;
            self.locked(|mut engine| engine.close_empty_pools());
            Ok((unmapped + released, ()))
        });
        match given_back {
            None => Ok(Visit::Left(Ended::Illegal)),
            Some(given_back) => match given_back? {
                (0, ()) => Ok(Visit::Left(Ended::Nothing)),
                (won, ()) => Ok(Visit::Won(won)),
            },
        }
    }

    /// Asks the program's own callbacks, highest priority first, until the request could be served.
    pub(super) fn ask_callbacks(&self, climb: &mut Climb) -> Visit {
        if climb.asked.in_callback || climb.called == Some(0) {
            return Visit::Left(Ended::Nothing);
        }
        let gives_back = !climb.options.skip_rungs.contains(Rung::Cached);
        let mut asking = Asking { engine: self, climb, gives_back, before: self.held() };
        let answers = self.callbacks.call(&mut asking);
        let won = asking.won();
        if answers.is_empty() {
            return Visit::Left(Ended::Nothing);
        }
        let failed = answers.iter().any(|answer| answer.failed.is_some());
        let room = MOST_ANSWERS.saturating_sub(climb.answers.len());
        climb.answers.extend(answers.into_iter().take(room));
        climb.called = Some(won);
        if failed && won == 0 {
            return Visit::Left(Ended::Failed);
        }
        // What was freed may lie where only the driver can lay it out anew.
        match self.then(climb, &[Then::Search]) {
            Ok(Some(address)) => Visit::Served(address, won),
            Ok(None) if won > 0 && gives_back => {
                self.give_back(climb).map_or_else(Visit::Failed, |_| Visit::Won(won))
            }
            Ok(None) => Visit::Won(won),
            Err(error) => Visit::Failed(error),
        }
    }

    /// What is live and what is reserved.
    fn held(&self) -> (u64, u64) {
        let (live, reserved) = (&self.counters.active_bytes, &self.counters.reserved_bytes);
        (live.current(), reserved.current())
    }

    /// Waits for its turn, for other threads and for other processes.
    pub(super) fn wait_for_others(&self, climb: &mut Climb) -> Visit {
        if let Err(error) = self.finish_awaiting_device(climb) {
            return Visit::Failed(error);
        }
        let now = self.clock.now();
        let left = self.may_wait(climb, now);
        let free = self.driver.memory_info().ok().map(|info| info.free);
        let is_helped = self.callbacks.are_running();
        let (visit, bells) = self.locked(|mut engine| {
            if let Some(verdict) = engine.state.queue.verdict(climb.asker.ticket) {
                climb.verdict = Some(verdict);
                return (Visit::Left(Ended::Nothing), Bells::new());
            }
            // During a capture nothing may be asked, but others may still give memory back.
            if !engine.is_recording()
                && let Err(error) = engine.process_many_events()
            {
                return (Visit::Failed(error), Bells::new());
            }
            engine.state.queue.look(now);
            if !left.is_zero() {
                engine.join(climb, now);
            }
            let request = engine.request_of(climb);
            let mut sources = engine.sources(&climb.asker, &request, free, is_helped);
            // One that gave way is let in when its time is up, rather than refused.
            let held_back = !left.is_zero() && engine.is_held_back(climb.asker.owner);
            engine.state.queue.hold_back(climb.asker.ticket, held_back);
            sources.turn |= held_back;
            let urged = engine.state.queue.is_urged(climb.asker.ticket);
            let in_turn = !held_back && engine.may_try(&climb.asker);
            let tries = in_turn || urged || left.is_zero() || !sources.any();
            // Its own lane serves nobody who is ahead of it and waits for another.
            if (tries || !held_back && engine.may_take_own(&climb.asker))
                && let Some(address) = engine.serve_free(climb)
            {
                return (Visit::Served(address, 0), Bells::new());
            }
            if tries {
                let work_ended =
                    std::mem::replace(&mut climb.awaits_work, sources.events) && !sources.events;
                if engine.is_worth_climbing(climb, &request, work_ended, free, left) {
                    // That work has ended may help others, too.
                    let bells = work_ended.then(|| engine.state.queue.changed());
                    return (Visit::Again, bells.unwrap_or_default());
                }
                engine.state.queue.tried(climb.asker.ticket);
                sources = engine.sources(&climb.asker, &request, free, is_helped);
                sources.turn |= held_back;
            }
            if left.is_zero() {
                return (Visit::Left(Ended::TimeIsUp), Bells::new());
            }
            let stay = Visit::Stay(climb.backoff.pause().min(left));
            match engine.standstill(sources) {
                Standstill::Refuse(ticket, verdict) if ticket == climb.asker.ticket => {
                    climb.verdict = Some(verdict);
                    (Visit::Left(Ended::Nothing), Bells::new())
                }
                Standstill::Refuse(ticket, verdict) => {
                    (stay, engine.state.queue.decide(ticket, verdict).into_iter().collect())
                }
                Standstill::TryAgain(bells) => (stay, bells),
                Standstill::None if sources.any() => (stay, Bells::new()),
                Standstill::None => (Visit::Left(Ended::Nothing), Bells::new()),
            }
        });
        ring(bells);
        visit
    }

    pub(super) fn spill(&self, climb: &Climb) -> DriverResult<Visit> {
        self.finish_awaiting_device(climb)?;
        self.locked(|mut engine| {
            if engine.is_recording() {
                return Ok(Visit::Left(Ended::Illegal));
            }
            let request = engine.request_of(climb);
            let served = engine.spill(&request, climb.asked.tag)?;
            Ok(served.map_or(Visit::Left(Ended::Nothing), |address| Visit::Served(address, 0)))
        })
    }

    /// How long a request may still wait: what is left of its own budget, and of the process's.
    pub(super) fn may_wait(&self, climb: &Climb, now: Duration) -> Duration {
        let left = climb.left(now);
        let total = climb.options.wait_total_ms.map(Duration::from_millis);
        total.map_or(left, |total| left.min(total.saturating_sub(self.waited.total())))
    }
}

/// How many answers of callbacks a receipt has at most.
const MOST_ANSWERS: usize = 16;

/// A request that asks callbacks.
struct Asking<'a, D: Driver> {
    engine: &'a Engine<D>,
    climb: &'a Climb,
    gives_back: bool,
    /// What was held before.
    before: (u64, u64),
}

impl<D: Driver> Situation for Asking<'_, D> {
    fn plea(&mut self, budget: Option<Duration>) -> Plea {
        let least = Duration::from_millis(self.climb.options.callback_ms);
        let time_left = budget.unwrap_or_else(|| self.climb.left(self.now()).max(least));
        let bytes = self.engine.locked(|engine| engine.wanted_of(&engine.request_of(self.climb)));
        Plea { device: self.engine.device.device, bytes, time_left }
    }

    fn now(&mut self) -> Duration {
        self.engine.clock.now()
    }

    /// What is freed is given back, or it is not: the larger of both is what was won.
    fn won(&mut self) -> u64 {
        let after = self.engine.held();
        self.before.0.saturating_sub(after.0).max(self.before.1.saturating_sub(after.1))
    }

    fn enough(&mut self) -> bool {
        self.engine.locked(|mut engine| {
            let request = engine.request_of(self.climb);
            let policy = engine.state.policy;
            let helps = |engine: &mut Locked<'_, D>| {
                !engine.is_recording()
                    && self.gives_back
                    && engine.giving_back_helps(&request).unwrap_or(false)
            };
            engine.find(&request, policy).is_some() || helps(&mut engine)
        })
    }
}

impl<D: Driver> Locked<'_, D> {
    pub(super) fn request_of(&self, climb: &Climb) -> Request {
        self.request(climb.asked.bytes, climb.asked.stream, climb.asked.owner)
    }

    /// Whether a request that waits should go up once more: it has not yet, or there is more than before, and together
    /// that may be enough; or work has ended that memory was waited for. When its time is up, once.
    fn is_worth_climbing(
        &mut self,
        climb: &mut Climb,
        request: &Request,
        work_ended: bool,
        free: Option<u64>,
        left: Duration,
    ) -> bool {
        let now = self.seen(free);
        let before = climb.seen.replace(now);
        let is_more = before.is_none_or(|before| now.is_more_than(&before));
        let needed = self.needed(request);
        let may_do = now.available >= needed || now.largest >= request.size;
        let is_worth = !climb.has_climbed() || work_ended || is_more && may_do;
        if left.is_zero() && std::mem::replace(&mut climb.tried_last, true) {
            return false;
        }
        is_worth
    }

    /// Completes many of the frees that other streams are done with; returns their bytes, or `None` while a capture may
    /// be under way.
    pub(crate) fn complete_frees(&mut self) -> DriverResult<Option<u64>> {
        if self.is_recording() {
            return Ok(None);
        }
        let before = self.counters.active_bytes.current();
        self.process_many_events()?;
        Ok(Some(before.saturating_sub(self.counters.active_bytes.current())))
    }

    pub(super) fn join(&mut self, climb: &Climb, now: Duration) {
        let pause = Duration::from_millis(climb.options.wait_ceiling_ms);
        let looks_by = climb.deadline.min(now.saturating_add(pause));
        self.state.queue.look(now);
        self.state.queue.join(climb.asker, &climb.bell, looks_by);
        self.state.pay_attention();
    }

    /// Serves the request from a free block of its pool.
    pub(super) fn serve_free(&mut self, climb: &Climb) -> Option<u64> {
        let request = self.request_of(climb);
        let policy = self.state.policy;
        let found = self.search(&request, policy)?;
        Some(self.hand_out(found, policy, &request, climb.asked.tag))
    }

    /// Serves the request from memory that the driver gives now.
    pub(super) fn serve_new_to(&mut self, climb: &Climb) -> DriverResult<Option<u64>> {
        let request = self.request_of(climb);
        // What is asked for ahead has to be the stream's own.
        let may_borrow = !climb.asked.ahead && !climb.options.skip_rungs.contains(Rung::Borrow);
        self.serve_new(&request, self.state.policy, may_borrow, climb.asked.tag)
    }

    /// Borrows, unless that rung is switched off, or what is borrowed would not help.
    pub(super) fn borrow_if_allowed(
        &mut self,
        climb: &Climb,
        request: &Request,
    ) -> DriverResult<Option<u64>> {
        if climb.asked.ahead || climb.options.skip_rungs.contains(Rung::Borrow) {
            return Ok(None);
        }
        self.borrow_from_streams(request, Lend::Whole, Proof::NONE, climb.asked.tag)
    }

    pub(super) fn is_legal(&self, legal: Legal, asked: &Asked) -> DriverResult<bool> {
        Ok(match legal {
            Legal::Always => true,
            Legal::OutsidePools => !self.is_recording(),
            Legal::OfDefaultPool => {
                let request = self.request(asked.bytes, asked.stream, asked.owner);
                self.state.pools[request.pool].id == PoolId::DEFAULT
            }
            Legal::OutsideCapture => {
                !self.is_recording() || self.driver.capture(asked.stream)?.is_none()
            }
        })
    }
}
