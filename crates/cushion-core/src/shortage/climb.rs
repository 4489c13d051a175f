//! One request on its way up the ladder.
//!
//! A climb is a state machine. [`Climber::advance`] goes up rung by rung and returns when the
//! request is served, refused, or has to wait. A thread that blocks and a future of any runtime
//! therefore climb in the same way, on real and on virtual time. Each rung holds the engine's lock
//! only while it looks at memory; it holds no lock while it waits, calls a callback, or lets the
//! driver wait for the device.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::Climber;
use super::end::Figures;
use super::ladder::{Step, Then};
use crate::base::clock::Bell;
use crate::core::Locked;
use crate::core::attempt::Attempt;
use crate::demand::asked::Asked;
use crate::demand::backoff::Backoff;
use crate::demand::queue::Queued;
use crate::driver::{Driver, DriverError, DriverResult};
use crate::ledger::change::Change;
use crate::options::Options;
use crate::options::inject::Injected;
use crate::options::ladder::{Ladder, Rung};
use crate::outcome::error::{AllocError, Ended, Tried};
use crate::outcome::receipt::{Answer, Outcome};

/// The total time that all requests of a process have waited.
#[derive(Debug, Clone, Default)]
pub struct Waited(Arc<AtomicU64>);

impl Waited {
    fn add(&self, duration: Duration) {
        let nanos = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        self.0.fetch_add(nanos, Ordering::Relaxed);
    }

    /// Returns the total so far.
    #[must_use]
    pub fn total(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Relaxed))
    }
}

/// A request on the ladder.
#[derive(Debug)]
pub(crate) struct Climb {
    pub(super) asked: Asked,
    pub(super) queued: Queued,
    pub(super) ladder: Ladder,
    pub(super) options: Options,
    /// The step it is at.
    pub(super) at: usize,
    pub(super) time: Time,
    pub(super) tries: Tries,
    pub(super) record: Record,
    pub(super) end: End,
    pub(super) injected: InjectedFailure,
    pub(super) bell: Arc<Bell>,
    pub(super) backoff: Backoff,
}

/// When a climb began, and how long it may wait.
#[derive(Debug)]
pub(super) struct Time {
    pub(super) started: Duration,
    /// When it may no longer wait.
    pub(super) deadline: Duration,
    /// The rung at which it waits, and since when.
    pub(super) pausing: Option<(Rung, Duration)>,
}

/// What a climb has tried so far, so that it repeats nothing that cannot succeed.
#[derive(Debug, Default)]
pub(super) struct Tries {
    /// How often it climbed again from the bottom.
    pub(super) count: u64,
    /// The rung that last made it climb again, because something had changed.
    pub(super) sent_by: Option<Rung>,
    /// Whether it climbed once more after its time was up.
    pub(super) had_last: bool,
    /// For each rung, the count of changes when it last won nothing.
    pub(super) vain: [Option<u64>; Rung::ALL.len()],
    /// The memory that could serve it when it last climbed from the bottom.
    pub(super) seen: Option<Seen>,
    /// Whether, at the latest look, work was under way that may free memory.
    pub(super) awaits_work: bool,
}

/// The parts of the receipt that the climb collects.
#[derive(Debug, Default)]
pub(super) struct Record {
    /// The figures of the moment when the request fell short.
    pub(super) figures: Option<Box<Figures>>,
    pub(super) rungs: Vec<Tried>,
    /// Bytes that callbacks won so far. They are called again only if they won something.
    pub(super) called: Option<u64>,
    /// The results of the callbacks.
    pub(super) answers: Vec<Answer>,
}

/// How a climb ends.
#[derive(Debug, Default)]
pub(super) struct End {
    /// Whether the request fell short. Before that, it is only a miss.
    pub(super) short: bool,
    /// Whether the climb has ended and was counted.
    pub(super) ended: bool,
    /// The verdict of the queue.
    pub(super) verdict: Option<Outcome>,
    /// The driver's first failure on the way.
    pub(super) fault: Option<DriverError>,
}

/// Whether the request is made to fail.
#[derive(Debug)]
pub(super) struct InjectedFailure {
    /// The failure, until the climb reaches the rung that serves the request.
    pub(super) now: Option<Injected>,
    /// Whether a failure was injected at all.
    pub(super) was: bool,
}

/// The memory that could serve a request. It climbs again only if there is more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Seen {
    /// Bytes that the device could still provide.
    pub(super) room: u64,
    /// Those, and cached bytes.
    pub(super) available: u64,
    pub(super) largest: u64,
}

impl Seen {
    /// Returns whether any figure has grown.
    pub(super) fn is_more_than(&self, before: &Self) -> bool {
        self.room > before.room
            || self.available > before.available
            || self.largest > before.largest
    }
}

/// A climb that leaves the queue if its thread panics.
struct OnItsWay<'a, D: Driver> {
    climber: Climber<'a, D>,
    climb: Climb,
}

impl<D: Driver> Drop for OnItsWay<'_, D> {
    fn drop(&mut self) {
        self.climber.leave(&mut self.climb);
    }
}

/// How far a climb got.
#[derive(Debug)]
pub(crate) enum Progress {
    Done(Result<u64, AllocError>),
    /// It goes on when the bell rings, or after this long.
    Wait(Duration),
}

impl Climb {
    pub(crate) fn bell(&self) -> &Arc<Bell> {
        &self.bell
    }

    pub(super) fn left(&self, now: Duration) -> Duration {
        self.time.deadline.saturating_sub(now)
    }

    /// Returns whether it has climbed from the bottom. A request that had to queue first has not.
    pub(super) fn has_climbed(&self) -> bool {
        self.record.rungs.iter().any(|tried| tried.rung == Rung::Grow)
    }

    fn step(&self) -> Option<Step> {
        self.ladder.steps().get(self.at).copied()
    }

    fn index_of(&self, rung: Rung) -> usize {
        self.ladder.rungs().position(|it| it == rung).unwrap_or(0)
    }

    /// Returns the last step before host memory is tried, or the last of all.
    pub(super) fn last_before_spill(&self) -> usize {
        let spill = self.ladder.rungs().position(|rung| rung == Rung::Spill);
        spill.unwrap_or(self.ladder.steps().len()) - 1
    }

    /// Records how a visit to a rung ended. Later visits add to its bytes and its time.
    pub(super) fn note(&mut self, rung: Rung, ended: Ended, won: u64, took: Duration) {
        if let Some(tried) = self.record.rungs.iter_mut().find(|tried| tried.rung == rung) {
            tried.won = tried.won.saturating_add(won);
            tried.took += took;
            tried.times += 1;
            if ended != Ended::Nothing || tried.won == 0 {
                tried.ended = ended;
            }
        } else {
            self.record.rungs.push(Tried { rung, ended, won, took, times: 1 });
        }
    }

    /// Climbs again from the bottom, because something changed at a rung, unless it did so too
    /// often.
    fn go_up_again(&mut self, rung: Rung, took: Duration) {
        self.note_time(rung, took);
        self.tries.sent_by = Some(rung);
        self.tries.count += 1;
        if self.tries.count > self.options.max_tries {
            self.note(rung, Ended::TimeIsUp, 0, Duration::ZERO);
            self.at += 1;
        } else {
            self.at = self.index_of(Rung::Grow);
        }
    }

    /// Records time spent at a rung without a visit.
    fn note_time(&mut self, rung: Rung, took: Duration) {
        match self.record.rungs.iter_mut().find(|tried| tried.rung == rung) {
            Some(tried) => tried.took += took,
            None => {
                let ended = Ended::Nothing;
                self.record.rungs.push(Tried { rung, ended, won: 0, took, times: 0 });
            }
        }
    }
}

impl<'a, D: Driver> Climber<'a, D> {
    /// Starts the climb of a request that was not served at once.
    #[cold]
    pub(crate) fn begin(self, asked: &Asked, attempt: &Attempt) -> Climb {
        let started = self.shared.clock.now();
        let (ladder, mut options, ticket, owner, lane) = self.shared.locked(|core| {
            let owner = core.demand.lead(asked.owner);
            let request = core.mem.request(asked.bytes, asked.stream, owner, asked.tag);
            let (options, ticket) = (core.mem.options.clone(), core.demand.queue.ticket());
            (core.setup.ladder, options, ticket, owner, request.lane)
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
        let deadline = started.saturating_add(budget);
        let mut climb = Climb {
            asked,
            queued: Queued { ticket, owner, priority: wishes.priority, blocks: asked.blocks, lane },
            ladder,
            backoff: Backoff::new(&options, self.desk.seed.wrapping_add(ticket)),
            options,
            at: 0,
            time: Time { started, deadline, pausing: None },
            tries: Tries::default(),
            record: Record::default(),
            end: End::default(),
            injected: InjectedFailure { now: injected, was: injected.is_some() },
            bell: Arc::default(),
        };
        match attempt {
            // Only when its turn has come is it known whether it is short of memory.
            Attempt::Wait(_) => climb.at = climb.index_of(Rung::Wait),
            Attempt::Injected(_) => self.fall_short(&mut climb),
            _ => {}
        }
        climb
    }

    /// Climbs on the calling thread, which waits where it must.
    #[cold]
    pub(crate) fn climb(self, asked: &Asked, attempt: &Attempt) -> Result<u64, AllocError> {
        let mut on_its_way = OnItsWay { climber: self, climb: self.begin(asked, attempt) };
        let climb = &mut on_its_way.climb;
        loop {
            match self.advance(climb) {
                Progress::Done(result) => return result,
                Progress::Wait(at_most) => self.shared.clock.wait(at_most, &climb.bell),
            }
        }
    }

    /// Climbs until the request is served, refused, or has to wait.
    pub(crate) fn advance(self, climb: &mut Climb) -> Progress {
        self.end_pause(climb);
        if climb.injected.now.is_some_and(|injected| injected.at.is_none()) {
            return Progress::Done(self.refuse(climb));
        }
        while let Some(step) = climb.step() {
            let began = self.shared.clock.now();
            let attempt = self.visit(climb, step);
            let now = self.shared.clock.now();
            let took = now.saturating_sub(began);
            match attempt {
                Attempt::Served { address, won } => {
                    climb.note(step.rung, Ended::Served, won, took);
                    return Progress::Done(self.survive(climb, step.rung, address));
                }
                Attempt::Won(won) => {
                    if let Some(done) = self.follow(climb, step, won, began) {
                        return Progress::Done(done);
                    }
                }
                Attempt::Nothing(ended) => {
                    climb.note(step.rung, ended, 0, took);
                    climb.at += 1;
                }
                Attempt::Skipped => climb.at += 1,
                Attempt::Again => climb.go_up_again(step.rung, took),
                Attempt::Wait(pause) => {
                    climb.note_time(step.rung, took);
                    climb.time.pausing = Some((step.rung, now));
                    return Progress::Wait(pause);
                }
                Attempt::Failed(error) => {
                    // A driver that fails while it provides memory may be broken for good. One that
                    // fails on another rung may still serve.
                    if step.rung == Rung::Grow || climb.ladder == Ladder::Torch {
                        return Progress::Done(self.broken(climb, step.rung, error));
                    }
                    climb.note(step.rung, Ended::Failed, 0, took);
                    // A device that cannot use host memory is not broken.
                    if step.rung != Rung::Spill {
                        climb.end.fault.get_or_insert(error);
                    }
                    climb.at += 1;
                }
                Attempt::Injected(_) => unreachable!("failures are injected before the first rung"),
            }
        }
        Progress::Done(self.refuse(climb))
    }

    /// Makes the attempts that follow a rung that won memory. Returns the result of the request, if
    /// it has ended.
    fn follow(
        self,
        climb: &mut Climb,
        step: Step,
        won: u64,
        began: Duration,
    ) -> Option<Result<u64, AllocError>> {
        let served = self.then(climb, step.then);
        let took = self.shared.clock.now().saturating_sub(began);
        match served {
            Ok(Some(address)) => {
                climb.note(step.rung, Ended::Served, won, took);
                Some(self.survive(climb, step.rung, address))
            }
            Ok(None) => {
                let ended = if won > 0 { Ended::TooLittle } else { Ended::Nothing };
                climb.note(step.rung, ended, won, took);
                climb.at += 1;
                None
            }
            Err(error) => Some(self.broken(climb, step.rung, error)),
        }
    }

    /// Counts the pause that has ended.
    fn end_pause(self, climb: &mut Climb) {
        if let Some((rung, since)) = climb.time.pausing.take() {
            let paused = self.shared.clock.now().saturating_sub(since);
            climb.note_time(rung, paused);
            self.desk.waited.add(paused);
        }
    }

    /// Ends the climb of a request that its caller abandoned.
    pub(crate) fn abandon(self, climb: &mut Climb) {
        self.end_pause(climb);
        if climb.end.short {
            self.end(climb, Outcome::GivenUp);
        } else {
            self.leave(climb);
        }
    }

    fn visit(self, climb: &mut Climb, step: Step) -> Attempt {
        let rung = step.rung;
        if climb.options.skip_rungs.contains(rung) {
            return Attempt::Nothing(Ended::Off);
        }
        if climb.asked.ahead && matches!(rung, Rung::Borrow | Rung::Pieces | Rung::Spill) {
            return Attempt::Skipped;
        }
        if let Some(at) = climb.injected.now.and_then(|injected| injected.at) {
            // A rung that this ladder does not have is never reached.
            if climb.ladder.rungs().position(|rung| rung == at).is_none_or(|it| climb.at < it) {
                return Attempt::Nothing(Ended::Injected);
            }
            climb.injected.now = None;
            let served = self.then(climb, &[Then::Search, Then::Ask]);
            return served.map(Attempt::served_or_nothing).into();
        }
        let (changes, not_now) = self.shared.locked(|core| {
            let changes = core.demand.queue.changes();
            (changes, core.is_not_for_now(climb, step, changes))
        });
        if let Some(attempt) = not_now {
            return attempt;
        }
        let attempt = match rung {
            Rung::Garbage => self.collect_garbage(climb),
            Rung::Grow => self.grow(climb),
            Rung::Poll => self.poll().into(),
            Rung::Borrow => self.borrow(climb).into(),
            Rung::Pieces => self.borrow_parts(climb).into(),
            Rung::Events => self.wait_for_events(climb).into(),
            Rung::Oversize => self.give_back_oversize(climb),
            Rung::Cached => self.give_back(climb).into(),
            Rung::Callbacks => self.ask_callbacks(climb),
            Rung::Wait => self.wait_for_others(climb),
            Rung::Spill => self.spill(climb).into(),
        };
        let is_vain = matches!(attempt, Attempt::Nothing(Ended::Nothing) | Attempt::Won(0));
        if is_vain && rung != Rung::Grow {
            climb.tries.vain[rung as usize] = Some(changes);
        }
        attempt
    }

    /// Makes the attempts that follow a rung which may have won memory.
    pub(super) fn then(self, climb: &Climb, then: &[Then]) -> DriverResult<Option<u64>> {
        self.shared.locked(|mut core| {
            for then in then {
                let served = match then {
                    Then::Search => core.serve_free(climb),
                    Then::Ask => core.serve_new_to(climb)?,
                    Then::AskAgain => {
                        core.mem.ledger.apply(Change::Retried);
                        core.serve_new_to(climb)?
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

impl<D: Driver> Locked<'_, D> {
    /// Returns why a rung is skipped now, if it is: it won nothing since the last of so many
    /// changes, nobody asked for it, the driver failed before, or it is illegal during a capture.
    fn is_not_for_now(&self, climb: &Climb, step: Step, changes: u64) -> Option<Attempt> {
        let (rung, options) = (step.rung, &climb.options);
        if climb.tries.vain[rung as usize] == Some(changes) {
            return Some(Attempt::Nothing(Ended::Nothing));
        }
        let asked_for = match rung {
            Rung::Garbage => self.mem.is_collecting_garbage(),
            Rung::Oversize => options.max_split_size.is_some(),
            Rung::Spill => options.spill_limit > 0,
            _ => true,
        };
        if !asked_for {
            return Some(Attempt::Skipped);
        }
        // After a driver failure, no rung waits for the driver.
        if climb.end.fault.is_some() && matches!(rung, Rung::Events | Rung::Wait) {
            return Some(Attempt::Nothing(Ended::Nothing));
        }
        match self.is_legal(step.legal, &climb.asked) {
            Ok(true) => None,
            Ok(false) => Some(Attempt::Nothing(Ended::Illegal)),
            Err(error) => Some(Attempt::Failed(error)),
        }
    }
}
