//! One task: it follows its script, and handles refusals as a program would.
//!
//! The same code runs on virtual time and on real threads; [`Surroundings`] abstracts the
//! difference.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cushion_core::size::{MIB, display};
use cushion_core::{AllocError, Ladder, StreamId, Task};

use super::script::{Script, Step};
use super::world::{Block, World};

/// The largest number of times that a split request is halved.
const HALVINGS: u32 = 4;

/// Smaller requests are not split.
const LEAST_SPLIT: u64 = 2 * MIB;

/// A task restarts this many times at once; then it waits before each restart,
const HASTY: u64 = 32;
/// longer by this step each time,
const PAUSE_STEP: Duration = Duration::from_millis(20);
/// up to this limit.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// How a task obtains memory and lets time pass.
pub(crate) trait Surroundings {
    /// Allocates on behalf of the task.
    async fn allocate(&self, task: &Task, bytes: u64, stream: StreamId) -> Result<u64, AllocError>;

    /// Waits until the clock shows `until`.
    async fn pause(&self, until: Duration);
}

/// The state and counts of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Fate {
    pub(crate) doing: Doing,
    /// The number of restarts.
    pub(crate) restarts: u64,
    /// Refusals, by the advice given.
    pub(crate) give_way: u64,
    pub(crate) split: u64,
    pub(crate) full: u64,
}

/// The state of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Doing {
    #[default]
    NotBegun,
    /// Waits for memory at a step of its script.
    Allocating {
        bytes: u64,
        step: usize,
        of: usize,
    },
    /// Does something else.
    Working {
        step: usize,
        of: usize,
    },
    Finished,
    /// Refused memory more often than it may restart.
    Lost,
}

/// The tasks of a run, and the state of each.
#[derive(Debug)]
pub(crate) struct Fates(Vec<Mutex<Fate>>);

impl Fates {
    pub(crate) fn new(tasks: usize) -> Self {
        Self((0..tasks).map(|_| Mutex::default()).collect())
    }

    fn of(&self, task: usize) -> MutexGuard<'_, Fate> {
        self.0[task].lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn all(&self) -> Vec<Fate> {
        (0..self.0.len()).map(|task| *self.of(task)).collect()
    }

    /// Describes each task that has started and not ended.
    pub(crate) fn in_words(&self) -> String {
        let words = |(task, fate): (usize, Fate)| match fate.doing {
            Doing::Allocating { bytes, step, of } => {
                Some(format!("task {task} waits for {}, step {step} of {of}", display(bytes)))
            }
            Doing::Working { step, of } => Some(format!("task {task} is at step {step} of {of}")),
            Doing::NotBegun | Doing::Finished | Doing::Lost => None,
        };
        self.all().into_iter().enumerate().filter_map(words).collect::<Vec<_>>().join("; ")
    }
}

/// A task of a storm.
#[derive(Debug)]
pub(crate) struct Player<'a, S> {
    pub(crate) world: &'a World,
    pub(crate) surroundings: &'a S,
    pub(crate) fates: &'a Fates,
    pub(crate) script: &'a Script,
    pub(crate) number: usize,
    /// The number of restarts it may make.
    pub(crate) most_restarts: u64,
}

/// Blocks by their number in the script. A split request has several.
type Held = BTreeMap<usize, Vec<Block>>;

impl<S: Surroundings> Player<'_, S> {
    /// Runs the task to its end.
    pub(crate) async fn live(&self) {
        let Self { world, script, .. } = *self;
        let task = Task::new(format!("{}", self.number), script.priority);
        let mut held = Held::new();
        let mut restarts = 0;
        loop {
            let refused = self.follow(&task, &mut held).await.err();
            held.into_values().flatten().for_each(|block| world.free(block));
            held = Held::new();
            world.check();
            let Some(refused) = refused else {
                return self.set(Doing::Finished);
            };
            if let AllocError::Driver(error) = &refused {
                panic!("the simulated device failed: {error}");
            }
            // Without the ladder, a program ends here.
            if world.setting.ladder == Ladder::Torch || restarts >= self.most_restarts {
                return self.set(Doing::Lost);
            }
            restarts += 1;
            self.fates.of(self.number).restarts = restarts;
            self.begin_afresh(&refused);
            self.set(Doing::Working { step: 0, of: script.steps.len() });
            let pause = self.pause_before(restarts);
            if !pause.is_zero() {
                self.pause(pause).await;
            }
        }
    }

    /// Empties the cache for a task that cannot continue although nobody else holds memory: it
    /// would find the same layout again. Programs do this after such a failure.
    fn begin_afresh(&self, refused: &AllocError) {
        if matches!(refused, AllocError::Split(_)) {
            self.world.engine.empty_cache().expect("a driver that works");
        }
    }

    /// Returns how long the task waits before it restarts. A task that has restarted often gives
    /// the others time.
    fn pause_before(&self, restart: u64) -> Duration {
        let pauses = &self.script.pauses;
        let pause = pauses[usize::try_from(restart).unwrap_or(0) % pauses.len()];
        let longer = PAUSE_STEP
            .saturating_mul(u32::try_from(restart.saturating_sub(HASTY)).unwrap_or(u32::MAX));
        pause + longer.min(LONGEST_PAUSE)
    }

    fn set(&self, doing: Doing) {
        self.fates.of(self.number).doing = doing;
    }

    async fn pause(&self, length: Duration) {
        let length = length / self.world.setting.hurry;
        self.surroundings.pause(self.world.clock.now() + length).await;
    }

    /// Follows the script, up to a refusal.
    async fn follow(&self, task: &Task, held: &mut Held) -> Result<(), AllocError> {
        let of = self.script.steps.len();
        let mut asked = 0;
        for (index, step) in self.script.steps.iter().enumerate() {
            let at = index + 1;
            self.set(Doing::Working { step: at, of });
            match step {
                &Step::Allocate { bytes, stream } => {
                    self.set(Doing::Allocating { bytes, step: at, of });
                    self.allocate(task, bytes, stream, held.entry(asked).or_default()).await?;
                    asked += 1;
                }
                Step::Hold(length) => self.pause(*length).await,
                Step::Compute { blocks, stream, takes, awaited } => {
                    let blocks: Vec<Block> =
                        blocks.iter().flat_map(|block| &held[block]).copied().collect();
                    self.compute(&blocks, *stream, *takes, *awaited).await;
                }
                Step::Free { block } => {
                    let blocks = held.remove(block).unwrap_or_default();
                    blocks.into_iter().for_each(|block| self.world.free(block));
                }
            }
            self.world.step();
        }
        Ok(())
    }

    /// Allocates, in smaller requests if told to split.
    async fn allocate(
        &self,
        task: &Task,
        bytes: u64,
        stream: StreamId,
        got: &mut Vec<Block>,
    ) -> Result<(), AllocError> {
        let mut wanted = vec![(bytes, 0)];
        while let Some((bytes, halvings)) = wanted.pop() {
            match self.surroundings.allocate(task, bytes, stream).await {
                Ok(address) => got.push(self.world.admit(address, bytes, stream)),
                Err(refused) => {
                    self.count(&refused);
                    let splits = matches!(refused, AllocError::Split(_));
                    if !splits || halvings == HALVINGS || bytes < LEAST_SPLIT {
                        return Err(refused);
                    }
                    let half = bytes / 2;
                    wanted.extend([(half, halvings + 1), (bytes - half, halvings + 1)]);
                }
            }
        }
        Ok(())
    }

    fn count(&self, refused: &AllocError) {
        let mut fate = self.fates.of(self.number);
        match refused {
            AllocError::GiveWay(_) => fate.give_way += 1,
            AllocError::Split(_) => fate.split += 1,
            _ => fate.full += 1,
        }
    }

    async fn compute(&self, blocks: &[Block], stream: StreamId, takes: Duration, awaited: bool) {
        let Self { world, surroundings, .. } = *self;
        let ready = world.takes_more(stream);
        if ready > world.clock.now() {
            surroundings.pause(ready).await;
        }
        let queued = world.compute(blocks, stream, takes);
        if awaited {
            surroundings.pause(queued.ends).await;
            while !world.is_done(&queued) {
                self.pause(Duration::from_millis(1)).await;
            }
        }
        world.forget(&queued);
    }
}
