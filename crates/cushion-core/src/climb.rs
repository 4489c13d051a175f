//! One request on its way up the ladder.
//!
//! A climb is a state machine: [`Engine::advance`] goes up rung by rung, and returns when the request is
//! served, refused, or has to wait. So a thread that blocks and a future of any runtime climb alike, on
//! real time and on virtual time. Each rung takes the device's lock for as long as it looks at memory, and
//! holds none while it waits, calls out, or lets the driver wait for the device.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::backoff::Backoff;
use crate::borrow::Lend;
use crate::callbacks::{Called, Plea};
use crate::clock::Bell;
use crate::driver::{Driver, DriverError, DriverResult};
use crate::engine::{Engine, ring};
use crate::error::{AllocError, Ended, Shortage, Tried};
use crate::history::Action;
use crate::inject::Injected;
use crate::ladder::{Ladder, Legal, Rung, Step, Then};
use crate::locked::{Asked, Attempt, Found, Locked};
use crate::options::Options;
use crate::owner;
use crate::policy::{Policy, Request};
use crate::pool::PoolId;
use crate::queue::{Asker, Bells, Standstill, Verdict};
use crate::receipt::{Outcome, Receipt};
use crate::stats::LaneFigures;

/// How long all requests of a process have waited.
#[derive(Debug, Clone, Default)]
pub struct Waited(Arc<AtomicU64>);

impl Waited {
    fn add(&self, duration: Duration) {
        let nanos = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        self.0.fetch_add(nanos, Ordering::Relaxed);
    }

    /// How long it is so far.
    #[must_use]
    pub fn total(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Relaxed))
    }
}

/// A request on its way up.
#[derive(Debug)]
pub(crate) struct Climb {
    asked: Asked,
    asker: Asker,
    ladder: Ladder,
    options: Options,
    /// The step it is at.
    at: usize,
    started: Duration,
    /// When it may wait no longer.
    deadline: Duration,
    /// Whether it fell short: before that, it was only a miss.
    short: bool,
    tries: u64,
    rungs: Vec<Tried>,
    /// For each rung, the count of changes when it last won nothing.
    vain: [Option<u64>; Rung::ALL.len()],
    /// Changes, and what the device had free, when it last went up from the bottom.
    seen: Option<(u64, Option<u64>)>,
    /// Whether work was under way, when it last looked, that memory may come from.
    awaits_work: bool,
    /// What callbacks won so far; they are asked again only if they won something.
    called: Option<u64>,
    bell: Arc<Bell>,
    backoff: Backoff,
    /// The rung it waits at, and since when.
    pausing: Option<(Rung, Duration)>,
    injected: Option<Injected>,
    was_injected: bool,
    verdict: Option<Verdict>,
    fault: Option<DriverError>,
}

/// How far a climb got.
#[derive(Debug)]
pub(crate) enum Progress {
    Done(Result<u64, AllocError>),
    /// It goes on when the bell rings, or after this long.
    Wait(Duration),
}

/// How a visit to a rung ended.
#[derive(Debug)]
enum Visit {
    /// At this address, and what the rung won for it.
    Served(u64, u64),
    Left(Ended),
    /// It is not asked for.
    Pass,
    /// What follows the rung is worth trying.
    Won(u64),
    /// Something changed: up from the bottom once more.
    Again,
    Stay(Duration),
    Failed(DriverError),
}

impl From<DriverError> for Visit {
    fn from(error: DriverError) -> Self {
        Self::Failed(error)
    }
}

/// Turns the result of a rung that may fail into a visit.
fn visit(result: DriverResult<Visit>) -> Visit {
    result.unwrap_or_else(Visit::Failed)
}

impl Climb {
    pub(crate) fn bell(&self) -> &Arc<Bell> {
        &self.bell
    }

    fn left(&self, now: Duration) -> Duration {
        self.deadline.saturating_sub(now)
    }

    /// Whether it went up from the bottom: one that had to queue has not.
    fn has_climbed(&self) -> bool {
        self.rungs.iter().any(|tried| tried.rung == Rung::Grow)
    }

    fn step(&self) -> Option<Step> {
        self.ladder.steps().get(self.at).copied()
    }

    fn index_of(&self, rung: Rung) -> usize {
        self.ladder.rungs().position(|it| it == rung).unwrap_or(0)
    }

    /// The last step before host memory is tried, or the last of all.
    fn rungs_before_spill(&self) -> usize {
        let spill = self.ladder.rungs().position(|rung| rung == Rung::Spill);
        spill.unwrap_or(self.ladder.steps().len()) - 1
    }

    /// Notes how a visit to a rung ended. Later visits add to what it won and took.
    fn note(&mut self, rung: Rung, ended: Ended, won: u64, took: Duration) {
        if let Some(tried) = self.rungs.iter_mut().find(|tried| tried.rung == rung) {
            tried.won = tried.won.saturating_add(won);
            tried.took += took;
            tried.times += 1;
            if ended != Ended::Nothing || tried.won == 0 {
                tried.ended = ended;
            }
        } else {
            self.rungs.push(Tried { rung, ended, won, took, times: 1 });
        }
    }

    /// Time that passed at a rung without a visit.
    fn note_time(&mut self, rung: Rung, took: Duration) {
        match self.rungs.iter_mut().find(|tried| tried.rung == rung) {
            Some(tried) => tried.took += took,
            None => {
                let ended = Ended::Nothing;
                self.rungs.push(Tried { rung, ended, won: 0, took, times: 0 });
            }
        }
    }
}

impl<D: Driver> Engine<D> {
    /// A request that was not served at once begins to climb.
    #[cold]
    pub(crate) fn begin_climb(&self, asked: &Asked, attempt: &Attempt) -> Climb {
        let started = self.clock.now();
        let (ladder, options, ticket) = self.locked(|engine| {
            let state = engine.state;
            (state.ladder, state.options.clone(), state.queue.ticket())
        });
        let budget = if owner::is_in_callback() {
            Duration::ZERO
        } else {
            owner::budget().unwrap_or(Duration::from_millis(options.wait_ms))
        };
        let Asked { owner, blocks, .. } = *asked;
        let injected = match attempt {
            Attempt::Injected(injected) => Some(*injected),
            _ => None,
        };
        let mut climb = Climb {
            asked: *asked,
            asker: Asker { ticket, owner, priority: owner::priority(), blocks },
            ladder,
            backoff: Backoff::new(&options, self.seed.wrapping_add(ticket)),
            options,
            at: 0,
            started,
            deadline: started.saturating_add(budget),
            short: false,
            tries: 0,
            rungs: Vec::new(),
            vain: [None; Rung::ALL.len()],
            seen: None,
            awaits_work: false,
            called: None,
            bell: Arc::default(),
            pausing: None,
            injected,
            was_injected: injected.is_some(),
            verdict: None,
            fault: None,
        };
        match attempt {
            Attempt::Queue => {
                climb.short = true;
                climb.at = climb.index_of(Rung::Wait);
            }
            Attempt::Injected(_) => climb.short = true,
            Attempt::Miss | Attempt::Served(_) => {}
        }
        climb
    }

    /// Climbs, on a thread that waits where it has to.
    #[cold]
    pub(crate) fn climb(&self, asked: &Asked, attempt: &Attempt) -> Result<u64, AllocError> {
        let mut climb = self.begin_climb(asked, attempt);
        loop {
            match self.advance(&mut climb) {
                Progress::Done(result) => return result,
                Progress::Wait(at_most) => self.clock.wait(at_most, &climb.bell),
            }
        }
    }

    /// Goes up until the request is served, refused, or has to wait.
    pub(crate) fn advance(&self, climb: &mut Climb) -> Progress {
        if let Some((rung, since)) = climb.pausing.take() {
            let paused = self.clock.now().saturating_sub(since);
            climb.note_time(rung, paused);
            self.waited.add(paused);
        }
        if climb.injected.is_some_and(|injected| injected.at.is_none()) {
            return Progress::Done(self.refuse(climb));
        }
        while let Some(step) = climb.step() {
            let began = self.clock.now();
            let visit = self.visit(climb, step);
            let now = self.clock.now();
            let took = now.saturating_sub(began);
            match visit {
                Visit::Served(address, won) => {
                    climb.note(step.rung, Ended::Served, won, took);
                    return Progress::Done(self.survive(climb, step.rung, address));
                }
                Visit::Won(won) => {
                    let served = self.then(climb, step.then);
                    let took = self.clock.now().saturating_sub(began);
                    match served {
                        Ok(Some(address)) => {
                            climb.note(step.rung, Ended::Served, won, took);
                            return Progress::Done(self.survive(climb, step.rung, address));
                        }
                        Ok(None) => {
                            let ended = if won > 0 { Ended::TooLittle } else { Ended::Nothing };
                            climb.note(step.rung, ended, won, took);
                            climb.at += 1;
                        }
                        Err(error) => return Progress::Done(self.broken(climb, step.rung, error)),
                    }
                }
                Visit::Left(ended) => {
                    climb.note(step.rung, ended, 0, took);
                    climb.at += 1;
                }
                Visit::Pass => climb.at += 1,
                Visit::Again => {
                    climb.note_time(step.rung, took);
                    climb.tries += 1;
                    if climb.tries > climb.options.max_tries {
                        climb.note(step.rung, Ended::TimeIsUp, 0, Duration::ZERO);
                        climb.at += 1;
                    } else {
                        climb.at = climb.index_of(Rung::Grow);
                    }
                }
                Visit::Stay(pause) => {
                    climb.note_time(step.rung, took);
                    climb.pausing = Some((step.rung, now));
                    return Progress::Wait(pause);
                }
                Visit::Failed(error) => {
                    // A driver that fails while it gives memory may be broken for good; one that fails on the
                    // way to more may still serve.
                    if step.rung == Rung::Grow || climb.ladder == Ladder::Torch {
                        return Progress::Done(self.broken(climb, step.rung, error));
                    }
                    climb.note(step.rung, Ended::Failed, 0, took);
                    climb.fault.get_or_insert(error);
                    climb.at += 1;
                }
            }
        }
        Progress::Done(self.refuse(climb))
    }

    /// The request is given up by who made it.
    pub(crate) fn abandon(&self, climb: &mut Climb) {
        self.end(climb, Outcome::GivenUp);
    }

    fn visit(&self, climb: &mut Climb, step: Step) -> Visit {
        let rung = step.rung;
        if climb.options.skip_rungs.contains(rung) {
            return Visit::Left(Ended::Off);
        }
        if let Some(at) = climb.injected.and_then(|injected| injected.at) {
            if climb.at < climb.index_of(at) {
                return Visit::Left(Ended::Injected);
            }
            climb.injected = None;
            return match self.then(climb, &[Then::Search, Then::Ask]) {
                Ok(Some(address)) => Visit::Served(address, 0),
                Ok(None) => Visit::Left(Ended::Nothing),
                Err(error) => Visit::Failed(error),
            };
        }
        let changes = self.locked(|engine| engine.state.queue.changes());
        if climb.vain[rung as usize] == Some(changes) {
            return Visit::Left(Ended::Nothing);
        }
        if let Some(visit) = self.is_not_for_now(climb, step) {
            return visit;
        }
        let visit = match rung {
            Rung::Garbage => self.collect_garbage(climb),
            Rung::Grow => self.grow(climb),
            Rung::Poll => visit(self.poll()),
            Rung::Borrow => visit(self.borrow(climb)),
            Rung::Pieces => visit(self.borrow_pieces(climb)),
            Rung::Events => visit(self.wait_for_events(climb)),
            Rung::Oversize => self.give_back_oversize(climb),
            Rung::Cached => visit(self.give_back(climb)),
            Rung::Callbacks => self.ask_callbacks(climb),
            Rung::Wait => self.wait_for_others(climb),
            Rung::Spill => visit(self.spill(climb)),
        };
        if matches!(visit, Visit::Left(Ended::Nothing) | Visit::Won(0)) && rung != Rung::Grow {
            climb.vain[rung as usize] = Some(changes);
        }
        visit
    }

    /// Why a rung is passed over as things stand, if it is.
    fn is_not_for_now(&self, climb: &Climb, step: Step) -> Option<Visit> {
        let options = &climb.options;
        let asked_for = match step.rung {
            Rung::Garbage => self.locked(|engine| engine.is_collecting_garbage()),
            Rung::Oversize => options.max_split_size.is_some(),
            Rung::Spill => options.spill_limit > 0,
            _ => true,
        };
        if !asked_for {
            return Some(Visit::Pass);
        }
        // A driver that failed on the way is not waited for.
        if climb.fault.is_some() && matches!(step.rung, Rung::Events | Rung::Wait) {
            return Some(Visit::Left(Ended::Nothing));
        }
        let legal = self.locked(|engine| engine.is_legal(step.legal, &climb.asked));
        match legal {
            Ok(true) => None,
            Ok(false) => Some(Visit::Left(Ended::Illegal)),
            Err(error) => Some(Visit::Failed(error)),
        }
    }

    /// What follows a rung that may have won something.
    fn then(&self, climb: &Climb, then: &[Then]) -> DriverResult<Option<u64>> {
        self.locked(|mut engine| {
            for then in then {
                let served = match then {
                    Then::Search => engine.serve_free(climb),
                    Then::Ask => engine.serve_new(climb)?,
                    Then::AskAgain => {
                        engine.counters.num_alloc_retries.add(1);
                        engine.serve_new(climb)?
                    }
                };
                if served.is_some() {
                    return Ok(served);
                }
            }
            Ok(None)
        })
    }

    // ---- the rungs ----

    fn collect_garbage(&self, climb: &Climb) -> Visit {
        let _no_capture_begins = self.no_capture_begins();
        let leaving = self.locked(|mut engine| engine.detach_garbage());
        match self.release(leaving, climb.asked.context) {
            Ok(won) => Visit::Won(won),
            Err(error) => Visit::Failed(error),
        }
    }

    fn grow(&self, climb: &mut Climb) -> Visit {
        match self.locked(|mut engine| engine.serve_new(climb)) {
            Ok(Some(address)) => Visit::Served(address, 0),
            Ok(None) => {
                climb.short = true;
                let is_too_large = |wanted| wanted > self.device.total;
                if is_too_large(self.locked(|engine| engine.request_of(climb).wanted)) {
                    // Nothing on the device could help.
                    climb.at = climb.rungs_before_spill();
                }
                Visit::Left(Ended::Nothing)
            }
            Err(error) => Visit::Failed(error),
        }
    }

    /// Whether the request is for more than the device, or the limit on it, could ever give.
    fn never_fits(&self, climb: &Climb) -> bool {
        self.locked(|engine| {
            let request = engine.request_of(climb);
            request.wanted > engine.state.limit.unwrap_or(u64::MAX).min(engine.device.total)
        })
    }

    fn poll(&self) -> DriverResult<Visit> {
        let won = self.locked(|mut engine| engine.complete_frees())?;
        Ok(Visit::Won(won))
    }

    fn borrow(&self, climb: &Climb) -> DriverResult<Visit> {
        let context = climb.asked.context;
        self.locked(|mut engine| {
            let request = engine.request_of(climb);
            let served = match climb.ladder {
                // PyTorch passes over pages here.
                Ladder::Torch => engine.borrow_from_pools(&request, Policy::Segments, context),
                Ladder::Graceful => {
                    let policy = engine.state.policy;
                    match engine.borrow_from_pools(&request, policy, context) {
                        None if !engine.is_recording() => {
                            engine.borrow_from_streams(&request, Lend::Whole, context)?
                        }
                        served => served,
                    }
                }
            };
            Ok(served.map_or(Visit::Left(Ended::Nothing), |address| Visit::Served(address, 0)))
        })
    }

    fn borrow_pieces(&self, climb: &Climb) -> DriverResult<Visit> {
        self.locked(|mut engine| {
            let request = engine.request_of(climb);
            let context = climb.asked.context;
            let served = engine.borrow_from_streams(&request, Lend::Pieces, context)?;
            Ok(served.map_or(Visit::Left(Ended::Nothing), |address| Visit::Served(address, 0)))
        })
    }

    /// Waits for just enough pending frees: until a free block serves the request, or giving memory back
    /// would make room.
    fn wait_for_events(&self, climb: &mut Climb) -> DriverResult<Visit> {
        let left = self.may_wait(climb);
        self.locked(|mut engine| {
            let won = engine.complete_frees()?;
            if won > 0 {
                climb.note(Rung::Events, Ended::TooLittle, won, Duration::ZERO);
            }
            if !engine.may_try(&climb.asker) {
                return Ok(Visit::Left(Ended::Nothing));
            }
            if let Some(address) = engine.serve_free(climb) {
                return Ok(Visit::Served(address, 0));
            }
            let request = engine.request_of(climb);
            if let Some(address) = engine.borrow_if_allowed(climb, &request)? {
                return Ok(Visit::Served(address, 0));
            }
            let helps = engine.pending_would_serve(&request)
                || !engine.giving_back_helps(&request)? && engine.events_help(&request)?;
            if !helps {
                return Ok(Visit::Left(Ended::Nothing));
            }
            if left.is_zero() {
                return Ok(Visit::Left(Ended::TimeIsUp));
            }
            engine.join(climb);
            Ok(Visit::Stay(climb.backoff.pause().min(left)))
        })
    }

    fn give_back_oversize(&self, climb: &Climb) -> Visit {
        let _no_capture_begins = self.no_capture_begins();
        let (leaving, enough) = self.locked(|mut engine| {
            let request = engine.request_of(climb);
            engine.detach_oversize(&request)
        });
        match self.release(leaving, climb.asked.context) {
            Ok(won) if enough => Visit::Won(won),
            Ok(0) => Visit::Left(Ended::Nothing),
            Ok(_) => Visit::Left(Ended::TooLittle),
            Err(error) => Visit::Failed(error),
        }
    }

    /// Gives back what is cached, if that would be enough. PyTorch does so in any case, and waits for all
    /// pending frees first.
    fn give_back(&self, climb: &Climb) -> DriverResult<Visit> {
        let context = climb.asked.context;
        if climb.ladder == Ladder::Torch {
            let before = self.counters.reserved_bytes.current();
            self.give_back_cached(PoolId::DEFAULT, context)?;
            let after = self.counters.reserved_bytes.current();
            return Ok(Visit::Won(before.saturating_sub(after)));
        }
        let _no_capture_begins = self.no_capture_begins();
        let (leaving, unmapped) = self.locked(|mut engine| {
            let request = engine.request_of(climb);
            engine.give_back_if_enough(&request, context)
        })?;
        match unmapped + self.release(leaving, context)? {
            0 => Ok(Visit::Left(Ended::Nothing)),
            won => Ok(Visit::Won(won)),
        }
    }

    /// Asks the program's own callbacks, highest priority first, until the request could be served.
    fn ask_callbacks(&self, climb: &mut Climb) -> Visit {
        if owner::is_in_callback() || climb.called == Some(0) {
            return Visit::Left(Ended::Nothing);
        }
        let wanted = self.locked(|engine| engine.request_of(climb).wanted);
        let held = || {
            let (live, reserved) = (&self.counters.active_bytes, &self.counters.reserved_bytes);
            live.current().saturating_add(reserved.current())
        };
        let before = held();
        let plea = || {
            let time_left = climb.left(self.clock.now());
            Plea { device: self.device.device, bytes: wanted, time_left }
        };
        let enough = || {
            self.locked(|mut engine| {
                let request = engine.request_of(climb);
                let policy = engine.state.policy;
                engine.choose(&request, policy).is_some()
                    || engine.giving_back_helps(&request).unwrap_or(false)
            })
        };
        let called = self.callbacks.call(plea, enough);
        let won = before.saturating_sub(held());
        if called != Called::Nobody {
            climb.called = Some(won);
        }
        match called {
            Called::Nobody => Visit::Left(Ended::Nothing),
            Called::Panicked if won == 0 => Visit::Left(Ended::Failed),
            Called::All | Called::Panicked => {
                // What was freed may lie where only the driver can lay it out anew.
                let served = self.then(climb, &[Then::Search]);
                match served {
                    Ok(Some(address)) => Visit::Served(address, won),
                    Ok(None) => {
                        self.give_back(climb).map_or_else(Visit::Failed, |_| Visit::Won(won))
                    }
                    Err(error) => Visit::Failed(error),
                }
            }
        }
    }

    /// Waits for its turn, for other threads and for other processes.
    fn wait_for_others(&self, climb: &mut Climb) -> Visit {
        let left = self.may_wait(climb);
        let free = self.driver.memory_info().ok().map(|info| info.free);
        let (visit, bells) = self.locked(|mut engine| {
            if let Some(verdict) = engine.state.queue.verdict(climb.asker.ticket) {
                climb.verdict = Some(verdict);
                return (Visit::Left(Ended::Nothing), Bells::new());
            }
            if let Err(error) = engine.process_events() {
                return (Visit::Failed(error), Bells::new());
            }
            engine.join(climb);
            let request = engine.request_of(climb);
            let mut sources = engine.sources(&climb.asker, &request, free);
            // One that gave way is let in when its time is up, rather than refused.
            let held_back = !left.is_zero() && engine.is_held_back(climb.asker.owner);
            engine.state.queue.hold_back(climb.asker.ticket, held_back);
            sources.turn |= held_back;
            let urged = engine.state.queue.is_urged(climb.asker.ticket);
            let in_turn = !held_back && engine.may_try(&climb.asker);
            if in_turn || urged || !sources.any() {
                if let Some(address) = engine.serve_free(climb) {
                    return (Visit::Served(address, 0), Bells::new());
                }
                let work_ended = std::mem::replace(&mut climb.awaits_work, sources.events);
                if work_ended && !sources.events {
                    // Memory that a stream was at work on can be borrowed, or given back, now.
                    let bells = engine.state.queue.changed();
                    climb.seen = Some((engine.state.queue.changes(), free));
                    return (Visit::Again, bells);
                }
                let now = (engine.state.queue.changes(), free);
                let before = climb.seen.replace(now);
                // Before it joined the queue, nobody counted what changed.
                let is_new =
                    before.map_or(sources.any() || !climb.has_climbed(), |before| before != now);
                if is_new {
                    return (Visit::Again, Bells::new());
                }
                engine.state.queue.tried(climb.asker.ticket);
                sources = engine.sources(&climb.asker, &request, free);
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

    fn spill(&self, climb: &Climb) -> DriverResult<Visit> {
        self.locked(|mut engine| {
            let request = engine.request_of(climb);
            let served = engine.spill(&request, climb.asked.context)?;
            Ok(served.map_or(Visit::Left(Ended::Nothing), |address| Visit::Served(address, 0)))
        })
    }

    /// How long a request may still wait: what is left of its own budget, and of the process's.
    fn may_wait(&self, climb: &Climb) -> Duration {
        let left = climb.left(self.clock.now());
        let total = climb.options.wait_total_ms.map(Duration::from_millis);
        total.map_or(left, |total| left.min(total.saturating_sub(self.waited.total())))
    }

    // ---- how it ends ----

    fn survive(&self, climb: &mut Climb, by: Rung, address: u64) -> Result<u64, AllocError> {
        if climb.short {
            self.end(climb, Outcome::Survived(by));
        } else {
            // The driver had more: a miss, and no shortage.
            self.locked(|engine| {
                engine.counters.misses.add(1);
                engine.state.queue.passed_over(climb.asker.ticket);
            });
        }
        Ok(address)
    }

    fn refuse(&self, climb: &mut Climb) -> Result<u64, AllocError> {
        if let Some(error) = climb.fault {
            self.end(climb, Outcome::Driver);
            return Err(error.into());
        }
        let outcome = match climb.verdict {
            _ if self.never_fits(climb) => Outcome::NeverFits,
            Some(Verdict::GiveWay) => Outcome::GiveWay,
            Some(Verdict::Split) => Outcome::Split,
            Some(Verdict::InVain) | None => Outcome::Full,
        };
        let shortage = Box::new(self.end(climb, outcome));
        Err(match outcome {
            Outcome::NeverFits => AllocError::NeverFits(shortage),
            Outcome::GiveWay => AllocError::GiveWay(shortage),
            Outcome::Split => AllocError::Split(shortage),
            _ => AllocError::FullNow(shortage),
        })
    }

    fn broken(&self, climb: &mut Climb, at: Rung, error: DriverError) -> Result<u64, AllocError> {
        climb.note(at, Ended::Failed, 0, Duration::ZERO);
        if climb.short {
            self.end(climb, Outcome::Driver);
        }
        Err(error.into())
    }

    /// Leaves the queue, counts the shortage, and files its receipt.
    fn end(&self, climb: &mut Climb, outcome: Outcome) -> Shortage {
        let took = self.clock.now().saturating_sub(climb.started);
        let number = self.receipts.number();
        let (shortage, (groups, holders), bells) = self.locked(|mut engine| {
            if outcome.is_survived() {
                engine.counters.misses.add(1);
                engine.state.queue.passed_over(climb.asker.ticket);
            }
            let bells = engine.state.queue.leave(climb.asker.ticket);
            if outcome == Outcome::GiveWay {
                engine.gave_way(climb.asker.owner);
            }
            engine.state.pay_attention();
            let request = engine.request_of(climb);
            let free = engine.driver.memory_info().ok().map(|info| info.free);
            engine.count_shortage(&request, climb, outcome, free, took);
            let shortage = engine.shortage(&request, climb, number, free);
            (shortage, engine.who_holds_what(), bells)
        });
        ring(bells);
        self.receipts.file(Receipt {
            number,
            device: self.device.device,
            at: climb.started,
            took,
            ladder: climb.ladder,
            who: owner::name_of(climb.asked.owner),
            context: climb.asked.context,
            outcome,
            shortage: shortage.clone(),
            groups,
            holders,
        });
        shortage
    }
}

impl<D: Driver> Locked<'_, D> {
    fn request_of(&self, climb: &Climb) -> Request {
        self.request(climb.asked.bytes, climb.asked.stream, climb.asked.owner)
    }

    /// Completes the frees that other streams are done with; returns their bytes.
    fn complete_frees(&mut self) -> DriverResult<u64> {
        let before = self.counters.active_bytes.current();
        self.process_events()?;
        Ok(before.saturating_sub(self.counters.active_bytes.current()))
    }

    fn join(&mut self, climb: &Climb) {
        self.state.queue.join(climb.asker, &climb.bell);
        self.state.pay_attention();
    }

    /// Serves the request from a free block of its pool.
    fn serve_free(&mut self, climb: &Climb) -> Option<u64> {
        let request = self.request_of(climb);
        let policy = self.state.policy;
        let block = self.search(&request, policy)?;
        Some(self.hand_out(Found { block, policy }, &request, climb.asked.context))
    }

    /// Serves the request from memory that the driver gives now.
    fn serve_new(&mut self, climb: &Climb) -> DriverResult<Option<u64>> {
        let request = self.request_of(climb);
        let policy = self.state.policy;
        let context = climb.asked.context;
        let block = self.ask_driver(&request, policy, context)?;
        Ok(block.map(|block| self.hand_out(Found { block, policy }, &request, context)))
    }

    /// Borrows, unless that rung is switched off.
    fn borrow_if_allowed(&mut self, climb: &Climb, request: &Request) -> DriverResult<Option<u64>> {
        if climb.options.skip_rungs.contains(Rung::Borrow) {
            return Ok(None);
        }
        self.borrow_from_streams(request, Lend::Whole, climb.asked.context)
    }

    fn is_legal(&self, legal: Legal, asked: &Asked) -> DriverResult<bool> {
        Ok(match legal {
            Legal::Always => true,
            Legal::OutsidePools => !self.is_recording(),
            Legal::OutsideCapture => {
                !self.is_recording() || self.driver.capture(asked.stream)?.is_none()
            }
        })
    }

    fn count_shortage(
        &mut self,
        request: &Request,
        climb: &Climb,
        outcome: Outcome,
        free: Option<u64>,
        took: Duration,
    ) {
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.counters.shortages.add(1);
        self.counters.shortage_nanos.add(nanos);
        if outcome.is_survived() {
            self.counters.shortages_survived.add(1);
        } else if matches!(outcome, Outcome::GivenUp | Outcome::Driver) {
            self.counters.shortages_broken.add(1);
        } else {
            self.counters.shortages_refused.add(1);
            self.counters.num_ooms.add(1);
            let place = (request.stream, request.pool);
            let context = climb.asked.context;
            self.record(Action::OutOfMemory, free.unwrap_or(0), request.size, place, context);
        }
    }

    fn shortage(
        &self,
        request: &Request,
        climb: &Climb,
        receipt: u64,
        device_free: Option<u64>,
    ) -> Shortage {
        let stats = self.counters.read(self.lanes);
        let private = |lane: &&LaneFigures| lane.pool != PoolId::DEFAULT;
        Shortage {
            receipt,
            requested: request.requested,
            size: request.size,
            wanted: request.wanted,
            stream: request.stream,
            pool: self.state.pools[request.pool].id,
            policy: self.state.policy,
            device_total: self.device.total,
            device_free,
            allowed: self.state.limit,
            reserved: stats.reserved_bytes.all.current,
            allocated: stats.allocated_bytes.all.current,
            pending: stats.active_bytes.all.current - stats.allocated_bytes.all.current,
            spilled: stats.spilled_bytes.current,
            private_free: stats.lanes.iter().filter(private).map(|lane| lane.free_bytes).sum(),
            largest_free: stats.largest_free_block(),
            recording: self.is_recording(),
            injected: climb.was_injected,
            tried: climb.rungs.clone(),
        }
    }
}
