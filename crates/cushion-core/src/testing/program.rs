//! Whole programs: read from bytes or from a seed, run, and shrunk if they fail.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::action::{Flavour, Reader};
use super::{Action, Futures, World};
use crate::base::random::Random;
use crate::{Ladder, Policy};

/// The most actions in a program.
const MOST_ACTIONS: usize = 400;

/// The device that a program runs on, and the engine's configuration at the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setup {
    /// The policy at the start.
    pub policy: Policy,
    /// The engine's ladder.
    pub ladder: Ladder,
    /// The smallest size of a page; `None` for a device without pages.
    pub granularity: Option<u64>,
    /// Host memory in bytes.
    pub host: u64,
    /// Bytes that the device reports but does not have.
    pub unreported: u64,
    /// The most ranges of a stream, if lower than the default: so low that programs reach it.
    pub most_ranges: Option<usize>,
}

impl Setup {
    /// Returns a device with pages of 2 MiB and up, and with limited host memory.
    #[must_use]
    pub fn new(policy: Policy, ladder: Ladder) -> Self {
        let (granularity, host, unreported, most_ranges) = (Some(2 << 20), 64 << 20, 0, None);
        Self { policy, ladder, granularity, host, unreported, most_ranges }
    }

    /// Reads a setup. Most setups use `paged` and pages of 2 MiB.
    fn read(from: &mut Reader<'_>) -> Self {
        const POLICIES: [Policy; 5] =
            [Policy::Paged, Policy::Paged, Policy::Paged, Policy::Expandable, Policy::Segments];
        const GRANULARITIES: [Option<u64>; 8] = {
            let (two, four) = (Some(2 << 20), Some(4 << 20));
            [two, two, two, two, two, four, Some(16 << 20), None]
        };
        let policy = POLICIES[usize::from(from.byte()) % POLICIES.len()];
        let ladder = if from.byte().is_multiple_of(4) { Ladder::Torch } else { Ladder::Graceful };
        let kind = from.byte();
        Self {
            granularity: GRANULARITIES[usize::from(kind) % GRANULARITIES.len()],
            host: [200 << 20, 64 << 20, 16 << 20, 0][usize::from(kind / 8) % 4],
            unreported: u64::from(kind / 32 % 2) * (4 << 20),
            most_ranges: [None, None, Some(2), Some(8)][usize::from(kind / 64) % 4],
            ..Self::new(policy, ladder)
        }
    }
}

/// Actions, and the device that they run on.
#[derive(Debug, Clone, PartialEq)]
pub struct Program {
    /// The device and the engine's configuration.
    pub setup: Setup,
    /// The actions, in order.
    pub actions: Vec<Action>,
}

impl Program {
    /// Reads a program from bytes. Any bytes are valid.
    #[must_use]
    pub fn read(bytes: &[u8]) -> Self {
        let mut from = Reader(bytes);
        let flavour = Flavour::ALL[usize::from(from.byte()) % Flavour::ALL.len()];
        let setup = Setup::read(&mut from);
        let mut actions = Vec::new();
        while !from.is_empty() && actions.len() < MOST_ACTIONS {
            actions.push(Action::read(&mut from, flavour));
        }
        Self { setup, actions }
    }

    /// Returns the program with this number.
    #[must_use]
    pub fn random(seed: u64) -> Self {
        Self::read(&Self::bytes(seed))
    }

    /// Returns the bytes of the program with this number.
    #[must_use]
    pub fn bytes(seed: u64) -> Vec<u8> {
        // Mixed first, so that consecutive numbers give unrelated programs.
        let mut random = Random(Random(seed).next());
        let length = 16 + random.next() % 160 * (1 + random.next() % 8);
        (0..length / 8).flat_map(|_| random.next().to_le_bytes()).collect()
    }

    /// Runs the program and checks everything after each action.
    ///
    /// # Panics
    ///
    /// If the engine breaks a promise.
    pub fn run(&self) {
        let mut world = World::with(self.setup);
        let engine = world.engine();
        let mut futures = Futures::of(&engine);
        for action in &self.actions {
            world.step_with(action, &mut futures);
        }
        futures.drop_all();
        world.finish();
    }

    /// Runs the program and returns the message of its panic, if it panics.
    #[must_use]
    pub fn failure(&self) -> Option<String> {
        let panic = catch_unwind(AssertUnwindSafe(|| self.run())).err()?;
        let text = panic.downcast_ref::<String>().cloned();
        Some(
            text.or_else(|| panic.downcast_ref::<&str>().map(|&it| it.to_owned()))
                .unwrap_or_default(),
        )
    }

    /// Returns a shorter program that still fails: actions are removed as long as it does.
    #[must_use]
    pub fn shrunk(&self) -> Self {
        let mut least = self.clone();
        let mut length = least.actions.len().next_power_of_two();
        while length > 0 {
            let mut at = 0;
            let before = least.actions.len();
            while at < least.actions.len() {
                let mut less = least.clone();
                less.actions.drain(at..(at + length).min(least.actions.len()));
                if less.failure().is_some() {
                    least = less;
                } else {
                    at += length;
                }
            }
            if length > 1 || least.actions.len() == before {
                length /= 2;
            }
        }
        least
    }
}

/// The result of running many programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Summary {
    /// The number of programs that ran.
    pub programs: u64,
    /// The number of their actions.
    pub actions: u64,
}

/// Runs `programs` programs whose numbers derive from `seed`, and calls `progress` after every
/// thousand.
///
/// # Panics
///
/// At the first program that fails, with the shrunk program in the message.
pub fn run_programs(seed: u64, programs: u64, mut progress: impl FnMut(Summary)) -> Summary {
    let mut run = Summary::default();
    for number in 0..programs {
        let number = seed.wrapping_mul(1 << 32).wrapping_add(number);
        let program = Program::random(number);
        if let Some(failure) = program.failure() {
            let least = program.shrunk();
            let why = least.failure().unwrap_or_default();
            panic!("program {number} of seed {seed}: {failure}\nshrunk: {why}\n{least:#?}");
        }
        run.programs += 1;
        run.actions += program.actions.len() as u64;
        if run.programs.is_multiple_of(1000) {
            progress(run);
        }
    }
    run
}
