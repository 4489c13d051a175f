//! One request on its way up the ladder.
//!
//! A climb is a state machine: [`Engine::advance`] goes up rung by rung, and returns when the request is
//! served, refused, or has to wait. So a thread that blocks and a future of any runtime climb alike, on
//! real time and on virtual time. Each rung takes the device's lock for as long as it looks at memory, and
//! holds none while it waits, calls out, or lets the driver wait for the device.

mod end;
mod rungs;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use self::end::Figures;
use crate::backoff::Backoff;
use crate::callbacks::Answer;
use crate::clock::Bell;
use crate::driver::{Driver, DriverError, DriverResult};
use crate::engine::Engine;
use crate::error::{AllocError, Ended, Tried};
use crate::inject::Injected;
use crate::ladder::{Ladder, Rung, Step, Then};
use crate::locked::{Asked, Attempt};
use crate::options::Options;
use crate::queue::{Asker, Verdict};
use crate::receipt::Outcome;

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
    /// The rung that last sent it up again, since something had changed.
    sent_by: Option<Rung>,
    /// What was held when it fell short.
    figures: Option<Box<Figures>>,
    rungs: Vec<Tried>,
    /// For each rung, the count of changes when it last won nothing.
    vain: [Option<u64>; Rung::ALL.len()],
    /// What there was when it last went up from the bottom.
    seen: Option<Seen>,
    /// Whether it went up once more after its time was up.
    tried_last: bool,
    /// Whether it is over, and counted.
    ended: bool,
    /// Whether work was under way, when it last looked, that memory may come from.
    awaits_work: bool,
    /// What callbacks won so far; they are asked again only if they won something.
    called: Option<u64>,
    /// What they said.
    answers: Vec<Answer>,
    bell: Arc<Bell>,
    backoff: Backoff,
    /// The rung it waits at, and since when.
    pausing: Option<(Rung, Duration)>,
    injected: Option<Injected>,
    was_injected: bool,
    verdict: Option<Verdict>,
    fault: Option<DriverError>,
}

/// What there is that a request could be served from: it goes up again only if there is more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Seen {
    /// What could still be got from the device.
    room: u64,
    /// That, and what is cached.
    available: u64,
    largest: u64,
}

impl Seen {
    /// Whether there is more of something than before.
    fn is_more_than(&self, before: &Self) -> bool {
        self.room > before.room
            || self.available > before.available
            || self.largest > before.largest
    }
}

/// A climb that leaves no trace in the queue if its thread panics.
struct OnItsWay<'a, D: Driver> {
    engine: &'a Engine<D>,
    climb: Climb,
}

impl<D: Driver> Drop for OnItsWay<'_, D> {
    fn drop(&mut self) {
        self.engine.leave(&mut self.climb);
    }
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
    fn last_before_spill(&self) -> usize {
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
        let (ladder, mut options, ticket, owner, lane) = self.locked(|mut engine| {
            let owner = engine.lead(asked.owner);
            let request = engine.request(asked.bytes, asked.stream, owner);
            let lane = (request.pool, request.stream);
            let state = engine.state;
            (state.ladder, state.options.clone(), state.queue.ticket(), owner, lane)
        });
        let wishes = asked.wishes(owner);
        let budget = wishes.budget.unwrap_or(Duration::from_millis(options.wait_ms));
        let budget = if asked.in_callback { Duration::ZERO } else { budget };
        options.skip_rungs = options.skip_rungs.and(wishes.skipped);
        let asked = Asked { owner, ..*asked };
        let injected = match attempt {
            Attempt::Injected(injected) => Some(*injected),
            _ => None,
        };
        let mut climb = Climb {
            asked,
            asker: Asker { ticket, owner, priority: wishes.priority, blocks: asked.blocks, lane },
            ladder,
            backoff: Backoff::new(&options, self.seed.wrapping_add(ticket)),
            options,
            at: 0,
            started,
            deadline: started.saturating_add(budget),
            short: false,
            tries: 0,
            sent_by: None,
            figures: None,
            rungs: Vec::new(),
            vain: [None; Rung::ALL.len()],
            seen: None,
            tried_last: false,
            ended: false,
            awaits_work: false,
            called: None,
            answers: Vec::new(),
            bell: Arc::default(),
            pausing: None,
            injected,
            was_injected: injected.is_some(),
            verdict: None,
            fault: None,
        };
        match attempt {
            // Whether it is short of memory shows when its turn has come.
            Attempt::Queue => climb.at = climb.index_of(Rung::Wait),
            Attempt::Injected(_) => self.fall_short(&mut climb),
            Attempt::Miss | Attempt::Served(_) => {}
        }
        climb
    }

    /// Climbs, on a thread that waits where it has to.
    #[cold]
    pub(crate) fn climb(&self, asked: &Asked, attempt: &Attempt) -> Result<u64, AllocError> {
        let mut on_its_way = OnItsWay { engine: self, climb: self.begin_climb(asked, attempt) };
        let climb = &mut on_its_way.climb;
        loop {
            match self.advance(climb) {
                Progress::Done(result) => return result,
                Progress::Wait(at_most) => self.clock.wait(at_most, &climb.bell),
            }
        }
    }

    /// Goes up until the request is served, refused, or has to wait.
    pub(crate) fn advance(&self, climb: &mut Climb) -> Progress {
        self.end_pause(climb);
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
                    climb.sent_by = Some(step.rung);
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
                    // A device that cannot use host memory is no broken one.
                    if step.rung != Rung::Spill {
                        climb.fault.get_or_insert(error);
                    }
                    climb.at += 1;
                }
            }
        }
        Progress::Done(self.refuse(climb))
    }

    /// Counts the pause that is over.
    fn end_pause(&self, climb: &mut Climb) {
        if let Some((rung, since)) = climb.pausing.take() {
            let paused = self.clock.now().saturating_sub(since);
            climb.note_time(rung, paused);
            self.waited.add(paused);
        }
    }

    /// The request is given up by who made it.
    pub(crate) fn abandon(&self, climb: &mut Climb) {
        self.end_pause(climb);
        if climb.short {
            self.end(climb, Outcome::GivenUp);
        } else {
            self.leave(climb);
        }
    }

    fn visit(&self, climb: &mut Climb, step: Step) -> Visit {
        let rung = step.rung;
        if climb.options.skip_rungs.contains(rung) {
            return Visit::Left(Ended::Off);
        }
        if climb.asked.ahead && matches!(rung, Rung::Borrow | Rung::Pieces | Rung::Spill) {
            return Visit::Pass;
        }
        if let Some(at) = climb.injected.and_then(|injected| injected.at) {
            // One that this ladder does not have is never reached.
            if climb.ladder.rungs().position(|rung| rung == at).is_none_or(|it| climb.at < it) {
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
                    Then::Ask => engine.serve_new_to(climb)?,
                    Then::AskAgain => {
                        engine.counters.num_alloc_retries.add(1);
                        engine.serve_new_to(climb)?
                    }
                };
                if served.is_some() {
                    return Ok(served);
                }
            }
            Ok(None)
        })
    }
}
