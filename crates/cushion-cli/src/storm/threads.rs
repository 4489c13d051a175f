//! A storm on real threads and real time, with a watchdog.
//!
//! It covers what virtual time cannot: two threads in the engine at once. Tasks run as on virtual
//! time, but block while they wait; one more thread is the device. The command's thread is the
//! watchdog. A hanging thread cannot be stopped, so after a hang no thread is joined: they end with
//! the command.

use std::io::Write;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, PoisonError, RwLock};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use cushion_core::testing::RealClock;
use cushion_core::{AllocError, Bell, Clock, StreamId, Task};

use super::guard::guarded;
use super::outcome::{Ended, Outcome, Ran, Which};
use super::script::{Script, Shape, Storm};
use super::task::{Fates, Player, Surroundings};
use super::world::{Setting, World};
use super::{Plan, Results, most_restarts, runs_alone};
use crate::output::Streams;

/// The longest wait of a request.
const WAIT: Duration = Duration::from_secs(60);

/// Pauses and computations are shorter than on virtual time by this factor: a millisecond at most.
const HURRY: u32 = 20;

/// How often the watchdog checks.
const LOOK: Duration = Duration::from_millis(100);

/// How often an idle device checks for work.
const IDLE: Duration = Duration::from_micros(200);

/// A task on its own thread: waiting blocks the thread.
struct RealTime<'a> {
    world: &'a World,
}

impl Surroundings for RealTime<'_> {
    async fn allocate(&self, task: &Task, bytes: u64, stream: StreamId) -> Result<u64, AllocError> {
        let _working = task.enter();
        self.world.engine.alloc(bytes, stream)
    }

    async fn pause(&self, until: Duration) {
        pause(&*self.world.clock, until);
    }
}

fn pause(clock: &dyn Clock, until: Duration) {
    clock.wait(until.saturating_sub(clock.now()), &Bell::default());
}

/// Runs all seeds, one after the other, and reports them. Stops after a hang, because its threads
/// still run.
pub(crate) fn run_all<O: Write, T: Write>(
    plan: &Plan,
    watchdog: Duration,
    results: &mut Results,
    streams: &mut Streams<O, T>,
) {
    streams.begin("storm");
    for index in 0..plan.seeds {
        let seed = plan.first_seed + index;
        let storm = Arc::new(Storm::draw(seed, &plan.shape));
        for &policy in plan.policies {
            let alone = runs_alone(&storm, policy, seed);
            for &ladder in plan.ladders {
                let device = storm.device;
                let setting = Setting {
                    seed,
                    policy,
                    ladder,
                    device,
                    wait: WAIT,
                    hurry: HURRY,
                    alone: false,
                };
                let ran = run(setting, &plan.shape, &storm, &alone, watchdog);
                let hangs = matches!(ran.ended, Ended::Hang(_));
                let which = Which { seed, policy, ladder, real_threads: true, device };
                results.report(&Outcome::new(which, ran, &alone), streams);
                if hangs {
                    streams
                        .talk(format_args!("stopped after the hang: its threads cannot be ended"));
                    return;
                }
            }
        }
        streams.update(index + 1, Some(plan.seeds));
    }
    streams.end();
}

/// The data shared by the threads of one run.
struct Shared {
    world: World,
    fates: Fates,
    storm: Arc<Storm>,
    most_restarts: Vec<u64>,
    /// The next task to start.
    next: AtomicUsize,
    /// The first failure; no task starts after it.
    broken: RwLock<Option<String>>,
    over: AtomicBool,
}

impl Shared {
    fn broken(&self) -> Option<String> {
        self.broken.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn is_broken(&self, what: String) {
        self.broken.write().unwrap_or_else(PoisonError::into_inner).get_or_insert(what);
    }

    /// Runs one task after the other, until none is left.
    fn work(&self) {
        while self.broken().is_none() {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(script) = self.storm.scripts.get(number) else { return };
            if let Err(what) = guarded(|| self.live(number, script)) {
                self.is_broken(what);
            }
        }
    }

    fn live(&self, number: usize, script: &Script) {
        let Self { world, fates, .. } = self;
        let surroundings = &RealTime { world };
        let most_restarts = self.most_restarts[number];
        let player = Player { world, surroundings, fates, script, number, most_restarts };
        let life = pin!(player.live());
        match life.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(()) => {}
            Poll::Pending => unreachable!("waiting blocks the thread"),
        }
    }

    /// Runs the device: finishes each piece of work when it is due.
    fn run_device(&self) {
        while !self.over.load(Ordering::Relaxed) {
            self.world.catch_up();
            let now = self.world.clock.now();
            let next = self.world.next_done().unwrap_or(now + IDLE);
            pause(&*self.world.clock, next.min(now + IDLE));
        }
    }
}

fn run(
    setting: Setting,
    shape: &Shape,
    storm: &Arc<Storm>,
    alone: &[bool],
    watchdog: Duration,
) -> Ran {
    let shared = Arc::new(Shared {
        world: World::new(setting, Arc::new(RealClock::default())),
        fates: Fates::new(storm.scripts.len()),
        storm: Arc::clone(storm),
        most_restarts: alone.iter().map(|&alone| most_restarts(alone, shape)).collect(),
        next: AtomicUsize::new(0),
        broken: RwLock::new(None),
        over: AtomicBool::new(false),
    });
    let device = Arc::clone(&shared);
    let device = std::thread::spawn(move || device.run_device());
    let (ends, ended) = mpsc::channel();
    let workers: Vec<_> = (0..shape.at_once.min(shape.tasks))
        .map(|_| {
            let (shared, ends) = (Arc::clone(&shared), ends.clone());
            std::thread::spawn(move || {
                shared.work();
                drop(ends);
            })
        })
        .collect();
    drop(ends);
    let hang = watch(&shared, &ended, watchdog);
    shared.over.store(true, Ordering::Relaxed);
    let ended = match (hang, shared.broken()) {
        (_, Some(what)) => Ended::Violation(what),
        (Some(what), None) => Ended::Hang(what),
        (None, None) => {
            // These threads have signalled their end.
            for thread in workers.into_iter().chain([device]) {
                let _ = thread.join();
            }
            guarded(|| shared.world.check_end()).map_or_else(Ended::Violation, |()| Ended::Quiet)
        }
    };
    let ran = Ran::new(&shared.world, &shared.fates, ended);
    if matches!(ran.ended, Ended::Violation(_)) {
        // After a panic, dropping could panic again.
        std::mem::forget(shared);
    }
    ran
}

/// Waits until all threads have ended. If no task makes a step for too long, returns what each task
/// is doing.
fn watch(shared: &Shared, ended: &mpsc::Receiver<()>, patience: Duration) -> Option<String> {
    let clock = &shared.world.clock;
    let (mut steps, mut since) = (0, clock.now());
    while let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(LOOK) {
        let now = clock.now();
        if shared.world.steps() != steps {
            (steps, since) = (shared.world.steps(), now);
        }
        if now.saturating_sub(since) >= patience {
            let quiet = patience.as_secs();
            let doing = shared.fates.in_words();
            return Some(format!("no task makes a step in {quiet} s; {doing}"));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use cushion_core::{Ladder, Policy};

    use super::super::script::Step;
    use super::*;

    #[test]
    fn the_watchdog_reports_a_hang_with_the_state_of_each_task() {
        let steps = vec![Step::Hold(Duration::from_secs(7200))];
        let script = Script { maximum: 0, priority: 0, steps, pauses: vec![Duration::ZERO] };
        let storm = Arc::new(Storm { scripts: vec![script], device: 64 << 20 });
        let shape = Shape {
            tasks: 1,
            at_once: 1,
            allocations: 1,
            task_max: 8 << 20,
            device_ratio: 8.0,
            streams: 1,
        };
        let (policy, ladder) = (Policy::Segments, Ladder::Graceful);
        let setting = Setting {
            seed: 0,
            policy,
            ladder,
            device: storm.device,
            wait: WAIT,
            hurry: HURRY,
            alone: false,
        };
        let ran = run(setting, &shape, &storm, &[true], Duration::from_secs(1));
        let hang = "no task makes a step in 1 s; task 0 is at step 1 of 1";
        assert_eq!(ran.ended, Ended::Hang(hang.to_owned()));
    }
}
