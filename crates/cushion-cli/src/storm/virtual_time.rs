//! A storm on virtual time: one thread, reproducible by seed, as fast as it can be computed.
//!
//! One of the runnable tasks is chosen at random and runs until it waits. If none is runnable, the
//! clock moves to the next event: a pause ends, the device finishes some work, or a waiting request
//! checks again. If there is no such event, the storm hangs.

use std::collections::BTreeSet;
use std::future::poll_fn;
use std::mem::ManuallyDrop;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use cushion_core::{AllocError, Clock as _, StreamId, Task, VirtualClock};

use super::guard::guarded;
use super::outcome::{Ended, Ran};
use super::random::Random;
use super::script::Script;
use super::task::{Fates, Player, Surroundings};
use super::world::{Setting, World};

/// All pauses and computations are much shorter: if no task makes a step in this time, none will.
const STANDSTILL: Duration = Duration::from_secs(60);

/// All storms are much shorter: if tasks still make steps after this time, they make no progress.
const FOR_EVER: Duration = Duration::from_secs(30 * 24 * 3600);

/// A script with its limits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part<'a> {
    pub(crate) script: &'a Script,
    /// The number of restarts it may make.
    pub(crate) most_restarts: u64,
}

struct VirtualTime<'a> {
    world: &'a World,
}

impl Surroundings for VirtualTime<'_> {
    async fn allocate(&self, task: &Task, bytes: u64, stream: StreamId) -> Result<u64, AllocError> {
        let mut memory = {
            let _working = task.enter();
            self.world.engine.alloc_async(bytes, stream)
        };
        poll_fn(|polled| {
            let _working = task.enter();
            Pin::new(&mut memory).poll(polled)
        })
        .await
    }

    async fn pause(&self, until: Duration) {
        let clock = &self.world.clock;
        poll_fn(|polled| {
            if clock.now() >= until {
                return Poll::Ready(());
            }
            clock.wake_at(until, polled.waker().clone());
            Poll::Pending
        })
        .await;
    }
}

/// The runnable tasks.
#[derive(Debug, Default)]
struct Ready(Mutex<BTreeSet<usize>>);

impl Ready {
    fn set<T>(&self, f: impl FnOnce(&mut BTreeSet<usize>) -> T) -> T {
        f(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Takes a runnable task at random.
    fn take(&self, random: &mut Random) -> Option<usize> {
        self.set(|ready| {
            let count = ready.len();
            let chosen = (count > 0).then(|| random.index(count))?;
            let task = ready.iter().nth(chosen).copied()?;
            ready.remove(&task);
            Some(task)
        })
    }
}

/// Wakes one task.
#[derive(Debug)]
struct Wakes {
    ready: Arc<Ready>,
    task: usize,
}

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.ready.set(|ready| ready.insert(self.task));
    }
}

/// Runs these tasks, `at_once` at a time. The order is drawn from the seed.
pub(crate) fn run(setting: Setting, parts: &[Part<'_>], at_once: usize) -> Ran {
    let clock = Arc::new(VirtualClock::new());
    let fates = Fates::new(parts.len());
    // After a panic, dropping could panic again.
    let world = ManuallyDrop::new(World::new(setting, Arc::clone(&clock) as Arc<_>));
    let random = Random::new(setting.seed, u64::MAX);
    let ended = guarded(|| {
        let ended = drive(&world, &clock, &fates, parts, at_once, random);
        if matches!(ended, Ended::Quiet) {
            world.check_end();
        }
        ended
    });
    let ran = Ran::new(&world, &fates, ended.unwrap_or_else(Ended::Violation));
    if !matches!(ran.ended, Ended::Violation(_)) {
        drop(ManuallyDrop::into_inner(world));
    }
    ran
}

/// A task that has started and not ended. It is not dropped after a panic.
type Life<'a> = ManuallyDrop<Pin<Box<dyn Future<Output = ()> + 'a>>>;

fn drive(
    world: &World,
    clock: &VirtualClock,
    fates: &Fates,
    parts: &[Part<'_>],
    at_once: usize,
    mut random: Random,
) -> Ended {
    let surroundings = VirtualTime { world };
    let ready = Arc::new(Ready::default());
    let mut lives: Vec<Option<Life<'_>>> = Vec::new();
    let mut running = 0;
    let (mut steps, mut since) = (0, Duration::ZERO);
    loop {
        while running < at_once && lives.len() < parts.len() {
            let number = lives.len();
            let Part { script, most_restarts } = parts[number];
            let surroundings = &surroundings;
            let life = async move {
                Player { world, surroundings, fates, script, number, most_restarts }.live().await;
            };
            lives.push(Some(ManuallyDrop::new(Box::pin(life))));
            ready.set(|ready| ready.insert(number));
            running += 1;
        }
        if let Some(task) = ready.take(&mut random) {
            let Some(life) = &mut lives[task] else { continue };
            let waker = Waker::from(Arc::new(Wakes { ready: Arc::clone(&ready), task }));
            if life.as_mut().poll(&mut Context::from_waker(&waker)).is_ready() {
                drop(lives[task].take().map(ManuallyDrop::into_inner));
                running -= 1;
            }
            continue;
        }
        if running == 0 {
            return Ended::Quiet;
        }
        let now = clock.now();
        if world.steps() != steps {
            (steps, since) = (world.steps(), now);
        }
        let next = [clock.next_alarm(), world.next_done()].into_iter().flatten().min();
        let limit = (since + STANDSTILL).min(FOR_EVER);
        let Some(next) = next.filter(|&next| next <= limit) else {
            let quiet = limit.saturating_sub(since).as_secs();
            let hang = format!("no task makes a step in {quiet} s; {}", fates.in_words());
            // The tasks are dropped unfinished, like those of a program that hangs.
            lives.into_iter().flatten().for_each(|life| drop(ManuallyDrop::into_inner(life)));
            return Ended::Hang(hang);
        };
        clock.advance(next.saturating_sub(now));
        world.catch_up();
    }
}

#[cfg(test)]
mod tests {
    use cushion_core::{Ladder, Policy};

    use super::super::script::Step;
    use super::super::task::Doing;
    use super::*;

    fn alone(steps: Vec<Step>) -> Ran {
        let pauses = vec![Duration::ZERO];
        let script = Script { maximum: 8 << 20, priority: 0, steps, pauses };
        let setting = Setting {
            seed: 0,
            policy: Policy::Segments,
            ladder: Ladder::Graceful,
            device: 64 << 20,
            wait: Duration::from_secs(600),
            hurry: 1,
            alone: true,
        };
        run(setting, &[Part { script: &script, most_restarts: 3 }], 1)
    }

    fn allocate(bytes: u64) -> Step {
        Step::Allocate { bytes, stream: StreamId(0) }
    }

    #[test]
    fn a_task_finishes() {
        let takes = Duration::from_millis(3);
        let (blocks, stream) = (vec![0], StreamId(1));
        let work = Step::Compute { blocks, stream, takes, awaited: true };
        let hold = Step::Hold(Duration::from_millis(4));
        let ran = alone(vec![allocate(8 << 20), work, hold, Step::Free { block: 0 }]);
        assert_eq!(ran.ended, Ended::Quiet);
        assert!(ran.finished(0));
        assert_eq!(ran.took(), Duration::from_millis(7));
    }

    #[test]
    fn a_task_that_cannot_be_served_restarts_up_to_its_limit() {
        let ran = alone(vec![allocate(4 << 20), allocate(1 << 30)]);
        assert_eq!((ran.ended, ran.fates[0].doing), (Ended::Quiet, Doing::Lost));
        assert_eq!(ran.fates[0].restarts, 3);
    }

    #[test]
    fn a_hang_is_detected() {
        let ran = alone(vec![allocate(8 << 20), Step::Hold(Duration::from_secs(3600))]);
        let Ended::Hang(what) = ran.ended else { panic!("{:?}", ran.ended) };
        assert_eq!(what, "no task makes a step in 60 s; task 0 is at step 2 of 2");
    }

    #[test]
    fn a_broken_invariant_is_detected() {
        let (blocks, stream, takes) = (vec![7], StreamId(0), Duration::ZERO);
        let ran = alone(vec![Step::Compute { blocks, stream, takes, awaited: false }]);
        assert!(matches!(ran.ended, Ended::Violation(_)), "{:?}", ran.ended);
    }
}
