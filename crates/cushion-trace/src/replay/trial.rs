//! Trial replays, which follow PyTorch until the first departure from its path.

use std::collections::BTreeSet;

use cushion_core::{Action, Ladder, PoolId};

use super::outcome::{ReplayConfig, Watch};
use super::run::{Run, Stop};
use super::{device_for, options_for};
use crate::model::event::Action as Recorded;
use crate::model::events::Events;
use crate::program::Program;

/// A departure from PyTorch's path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Departure {
    /// The event of the departure.
    pub(crate) event: usize,
    pub(crate) kind: DepartureKind,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum DepartureKind {
    /// A request was served at another address.
    Served { pytorch: u64, ours: u64 },
    /// Other segments were released: those of the replay only, and all of PyTorch's.
    GivenBack { extra: Vec<u64>, pytorch: Vec<u64> },
}

/// Follows PyTorch without a limit. Returns the first departure from its path.
pub(crate) fn follow(program: &Program, events: &Events) -> Option<Departure> {
    let (policy, ladder) = (program.policy, Ladder::Torch);
    let config = ReplayConfig { policy, ladder, capacity: None, options: None };
    let (engine, driver) = device_for(program, &config);
    let mut watch = ();
    let mut run =
        Run::new(&engine, &driver, program, &config, options_for(program, &config), &mut watch);
    run.goal.trial = Some(events);
    match run.run() {
        Ok(()) => None,
        Err(Stop::Departed(departure)) => Some(departure),
        // Not a question of pools.
        Err(Stop::OutOfMemory(_) | Stop::Driver(_) | Stop::LastEvent) => None,
    }
}

impl<W: Watch> Run<'_, W> {
    /// Releases all cached memory. A trial compares the released segments with those of PyTorch.
    pub(super) fn release_cached(
        &mut self,
        pool: PoolId,
        (from, to): (u32, u32),
    ) -> Result<(), Stop> {
        let Some(trace) = self.goal.trial else { return Ok(self.engine.empty_cache_of(pool)?) };
        self.engine.record_history(1 << 20);
        self.engine.empty_cache_of(pool)?;
        let (entries, _) = self.engine.history();
        self.engine.record_history(0);
        let ours: BTreeSet<(u64, u64)> = entries
            .iter()
            .filter(|entry| matches!(entry.action, Action::SegmentFree | Action::SegmentUnmap))
            .map(|entry| (entry.address, entry.size))
            .collect();
        let pytorch: BTreeSet<(u64, u64)> = trace
            .iter_from(from as usize)
            .take((to - from) as usize)
            .filter(|event| matches!(event.action, Recorded::SegmentFree | Recorded::SegmentUnmap))
            .map(|event| (event.addr, event.size))
            .collect();
        if ours == pytorch {
            return Ok(());
        }
        let extra = ours.difference(&pytorch).map(|&(address, _)| address).collect();
        let pytorch = pytorch.into_iter().map(|(address, _)| address).collect();
        let kind = DepartureKind::GivenBack { extra, pytorch };
        Err(Stop::Departed(Departure { event: from as usize, kind }))
    }
}
