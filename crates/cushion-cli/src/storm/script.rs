//! The actions of each task, drawn from the seed before the run: so every policy and ladder gets
//! the same program, and a run can be repeated.

use std::time::Duration;

use cushion_core::StreamId;
use cushion_core::size::{KIB, MIN_BLOCK, SEGMENT_ROUNDING};

use super::random::Random;

/// The dimensions of a storm.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) tasks: usize,
    pub(crate) at_once: usize,
    pub(crate) allocations: usize,
    /// The largest possible task, in bytes.
    pub(crate) task_max: u64,
    /// The device's memory, as a multiple of the largest task.
    pub(crate) device_ratio: f64,
    pub(crate) streams: u64,
}

/// All tasks of one seed, and the device they share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Storm {
    pub(crate) scripts: Vec<Script>,
    pub(crate) device: u64,
}

/// The actions of one task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Script {
    /// The most bytes it ever holds.
    pub(crate) maximum: u64,
    pub(crate) priority: i32,
    pub(crate) steps: Vec<Step>,
    /// The pauses before its restarts, in turn.
    pub(crate) pauses: Vec<Duration>,
}

/// One action of a task. Blocks are numbered in the order of their requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Step {
    Allocate {
        bytes: u64,
        stream: StreamId,
    },
    /// The task does something else.
    Hold(Duration),
    /// Work on the device that uses blocks.
    Compute {
        blocks: Vec<usize>,
        stream: StreamId,
        takes: Duration,
        /// Whether the task waits for it.
        awaited: bool,
    },
    Free {
        block: usize,
    },
}

const LONGEST_HOLD: Duration = Duration::from_millis(10);
/// The longest computation.
pub(crate) const LONGEST_COMPUTATION: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(20);

impl Storm {
    /// Draws the storm of a seed.
    pub(crate) fn draw(seed: u64, shape: &Shape) -> Self {
        let script = |task: usize| Script::draw(seed, task as u64, shape);
        let scripts: Vec<Script> = (0..shape.tasks).map(script).collect();
        let largest = scripts.iter().map(|script| script.maximum).max().unwrap_or(0);
        Self { scripts, device: times(largest, shape.device_ratio) }
    }
}

#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a size to within a few bytes, and the ratio is above zero"
)]
fn times(bytes: u64, ratio: f64) -> u64 {
    let exact = (bytes as f64 * ratio) as u64;
    exact.next_multiple_of(SEGMENT_ROUNDING).max(SEGMENT_ROUNDING)
}

impl Script {
    fn draw(seed: u64, task: u64, shape: &Shape) -> Self {
        let mut random = Random::new(seed, task);
        let maximum = random.within(shape.task_max / 8..=shape.task_max).max(MIN_BLOCK);
        let priority = match random.index(8) {
            0 => -1,
            1 => 1,
            _ => 0,
        };
        let own = StreamId(task % shape.streams);
        let mut draft = Draft { random, maximum, live: Vec::new(), held: 0, steps: Vec::new() };
        for block in 0..shape.allocations {
            draft.allocate(block, own, shape.streams);
            if !draft.random.once_in(4) {
                draft.compute(own, shape.streams);
            }
            if draft.random.once_in(3) {
                let hold = draft.time(LONGEST_HOLD);
                draft.steps.push(Step::Hold(hold));
            }
            if draft.random.once_in(4) {
                draft.free_one();
            }
        }
        while !draft.live.is_empty() {
            draft.free_one();
        }
        // Some restart at once, which is hardest on the others.
        let pauses = (0..8).map(|_| match draft.random.once_in(2) {
            true => Duration::ZERO,
            false => draft.time(LONGEST_PAUSE),
        });
        Self { maximum, priority, pauses: pauses.collect(), steps: draft.steps }
    }
}

/// A script under construction.
struct Draft {
    random: Random,
    maximum: u64,
    /// The live blocks and their sizes.
    live: Vec<(usize, u64)>,
    held: u64,
    steps: Vec<Step>,
}

impl Draft {
    fn time(&mut self, longest: Duration) -> Duration {
        let micros = u64::try_from(longest.as_micros()).unwrap_or(u64::MAX);
        Duration::from_micros(self.random.skewed(100..=micros))
    }

    /// Returns a size: half are small, half are a large part of the task's maximum, and a few are
    /// huge.
    fn bytes(&mut self) -> u64 {
        let most = self.maximum;
        let bytes = match self.random.index(16) {
            0 => self.random.within(most / 4..=most / 2),
            1..8 => self.random.within(most / 32..=most / 4),
            _ => self.random.skewed(4 * KIB..=(most / 64).max(8 * KIB)),
        };
        bytes.next_multiple_of(MIN_BLOCK).clamp(MIN_BLOCK, most / MIN_BLOCK * MIN_BLOCK)
    }

    /// Returns the task's own stream, or once in `other` times another one.
    fn stream(&mut self, own: StreamId, streams: u64, other: u64) -> StreamId {
        if self.random.once_in(other) { StreamId(self.random.within(0..=streams - 1)) } else { own }
    }

    fn allocate(&mut self, block: usize, own: StreamId, streams: u64) {
        let bytes = self.bytes();
        while self.held + bytes > self.maximum {
            self.free_one();
        }
        let stream = self.stream(own, streams, 16);
        self.steps.push(Step::Allocate { bytes, stream });
        self.live.push((block, bytes));
        self.held += bytes;
    }

    fn compute(&mut self, own: StreamId, streams: u64) {
        let Some(&(latest, _)) = self.live.last() else { return };
        let mut blocks = vec![latest];
        for _ in 0..self.random.index(3) {
            let (block, _) = self.live[self.random.index(self.live.len())];
            if !blocks.contains(&block) {
                blocks.push(block);
            }
        }
        let stream = self.stream(own, streams, 6);
        let takes = self.time(LONGEST_COMPUTATION);
        let awaited = self.random.once_in(3);
        self.steps.push(Step::Compute { blocks, stream, takes, awaited });
        // Free a block while another stream still uses it.
        if stream != own && self.random.once_in(2) {
            self.free(latest);
        }
    }

    fn free_one(&mut self) {
        if !self.live.is_empty() {
            let (block, _) = self.live[self.random.index(self.live.len())];
            self.free(block);
        }
    }

    fn free(&mut self, block: usize) {
        if let Some(at) = self.live.iter().position(|&(live, _)| live == block) {
            let (_, bytes) = self.live.remove(at);
            self.held -= bytes;
            self.steps.push(Step::Free { block });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    const SHAPE: Shape = Shape {
        tasks: 12,
        at_once: 4,
        allocations: 50,
        task_max: 2 << 30,
        device_ratio: 1.5,
        streams: 4,
    };

    #[test]
    fn a_task_stays_within_its_maximum_and_frees_everything() {
        for task_max in [1 << 20, 2 << 30] {
            for seed in 0..50 {
                for script in Storm::draw(seed, &Shape { task_max, ..SHAPE }).scripts {
                    follow(&script, task_max);
                }
            }
        }
    }

    fn follow(script: &Script, task_max: u64) {
        assert!(script.maximum <= task_max);
        let mut live = BTreeMap::new();
        let (mut asked, mut most) = (0, 0);
        for step in &script.steps {
            match step {
                Step::Allocate { bytes, stream } => {
                    assert!(*bytes > 0 && bytes.is_multiple_of(MIN_BLOCK) && stream.0 < 4);
                    live.insert(asked, *bytes);
                    asked += 1;
                    let held: u64 = live.values().sum();
                    assert!(held <= script.maximum, "{held} of {}", script.maximum);
                    most = most.max(held);
                }
                Step::Compute { blocks, takes, .. } => {
                    assert!(!blocks.is_empty() && *takes <= LONGEST_COMPUTATION);
                    assert!(blocks.iter().all(|block| live.contains_key(block)), "{step:?}");
                }
                Step::Free { block } => assert!(live.remove(block).is_some(), "{step:?}"),
                Step::Hold(time) => assert!(*time <= LONGEST_HOLD),
            }
        }
        assert_eq!((asked, live.len()), (50, 0));
        assert!(
            most >= script.maximum / 4,
            "{most} of {}: too little memory is used",
            script.maximum
        );
    }

    #[test]
    fn a_storm_depends_only_on_its_seed() {
        let draw = |seed| Storm::draw(seed, &SHAPE);
        assert_eq!(draw(5), draw(5));
        assert_ne!(draw(5), draw(6));
        let Storm { scripts, device } = draw(5);
        let largest = scripts.iter().map(|script| script.maximum).max().unwrap();
        assert!((largest * 3 / 2..=largest * 3 / 2 + SEGMENT_ROUNDING).contains(&device));
    }
}
