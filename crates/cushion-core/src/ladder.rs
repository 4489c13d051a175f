//! Ladders: the ordered steps tried before an allocation is refused.
//!
//! A ladder is data: a list of steps, each a rung and what is tried after it. `torch` does what
//! PyTorch does on a shortage, step by step. `graceful` searches the pool again after every rung
//! that may have freed something: PyTorch does not, and refuses requests that would fit.

use std::fmt;

use crate::driver::{Driver, DriverResult};
use crate::error::{AllocError, Shortage, Tried};
use crate::history::{Action, Context};
use crate::locked::{Found, Locked};
use crate::policy::{Policy, Request};
use crate::pool::PoolId;

/// The ladders there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Ladder {
    /// What PyTorch does.
    Torch,
    /// Ours: the same rungs, each followed by a new search.
    Graceful,
}

impl Ladder {
    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Torch => "torch",
            Self::Graceful => "graceful",
        }
    }

    fn steps(self) -> &'static [Step] {
        match self {
            Self::Torch => TORCH,
            Self::Graceful => GRACEFUL,
        }
    }
}

impl fmt::Display for Ladder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// One way to win memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rung {
    /// Give back blocks that have not been used for long, if that is asked for.
    CollectGarbage,
    /// Go on to the driver.
    Driver,
    /// Search the private pools that allow it.
    BorrowFromPools,
    /// The same, but for plain segments only: PyTorch passes over pages here.
    BorrowPlain,
    /// Wait for pending frees.
    WaitForEvents,
    /// Give back just enough blocks that are too large to be split.
    GiveBackOversize,
    /// Give back everything cached.
    GiveBackCached,
}

impl Rung {
    /// What it does, to complete "Cushion ...".
    fn deed(self) -> &'static str {
        match self {
            Self::CollectGarbage => "gave back what was idle for long",
            Self::Driver => "asked for more memory",
            Self::BorrowFromPools | Self::BorrowPlain => "searched the pools that may help out",
            Self::WaitForEvents => "waited for pending frees",
            Self::GiveBackOversize => "gave back oversized cached memory",
            Self::GiveBackCached => "gave back cached memory and asked again",
        }
    }
}

/// What is tried after a rung.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Then {
    /// Search the request's own pool.
    Search,
    /// Ask the driver for memory.
    Ask,
    /// Ask the driver again, counted as a retry.
    AskAgain,
}

/// When a rung may be tried. Waiting, and giving memory back, are illegal during a capture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Legal {
    Always,
    /// Unless the request's own stream is being captured. PyTorch does not ask even that, and the
    /// driver then fails it.
    OutsideCapture,
    /// Unless allocations go to a private pool: some stream may be being captured.
    OutsidePools,
}

#[derive(Debug, Clone, Copy)]
struct Step {
    rung: Rung,
    legal: Legal,
    then: &'static [Then],
}

const fn step(rung: Rung, legal: Legal, then: &'static [Then]) -> Step {
    Step { rung, legal, then }
}

const TORCH: &[Step] = &[
    step(Rung::CollectGarbage, Legal::OutsideCapture, &[]),
    step(Rung::Driver, Legal::Always, &[Then::Ask]),
    step(Rung::BorrowPlain, Legal::Always, &[]),
    step(Rung::GiveBackOversize, Legal::OutsideCapture, &[Then::Ask]),
    step(Rung::GiveBackCached, Legal::OutsidePools, &[Then::AskAgain]),
];

const GRACEFUL: &[Step] = &[
    step(Rung::CollectGarbage, Legal::OutsidePools, &[]),
    step(Rung::Driver, Legal::Always, &[Then::Ask]),
    step(Rung::BorrowFromPools, Legal::Always, &[]),
    step(Rung::WaitForEvents, Legal::OutsidePools, &[Then::Search]),
    step(Rung::GiveBackOversize, Legal::OutsidePools, &[Then::Ask]),
    step(Rung::GiveBackCached, Legal::OutsidePools, &[Then::Search, Then::AskAgain]),
];

/// How a rung ended.
enum Outcome {
    /// It found a block itself.
    Served(Found),
    /// Something changed; what follows is worth trying.
    Changed,
    /// Nothing changed.
    Nothing,
}

impl<D: Driver> Locked<'_, D> {
    /// Gets memory for a request that no free block serves, or refuses it.
    #[cold]
    pub(crate) fn climb(
        &mut self,
        request: &Request,
        policy: Policy,
        context: Context,
    ) -> Result<Found, AllocError> {
        let mut tried = Vec::new();
        for step in self.state.ladder.steps() {
            if !self.is_asked_for(step.rung) || !self.is_legal(step.legal, request)? {
                continue;
            }
            let before = self.reserved();
            match self.try_rung(step.rung, request, policy, context)? {
                Outcome::Served(found) => return Ok(found),
                Outcome::Nothing => continue,
                Outcome::Changed => {}
            }
            let given_back = before.saturating_sub(self.reserved());
            tried.push(Tried { what: step.rung.deed(), given_back });
            for then in step.then {
                let block = match then {
                    Then::Search => self.search(request, policy),
                    Then::Ask => self.ask_driver(request, policy, context)?,
                    Then::AskAgain => {
                        self.counters.num_alloc_retries.add(1);
                        self.ask_driver(request, policy, context)?
                    }
                };
                if let Some(block) = block {
                    return Ok(Found { block, policy });
                }
            }
        }
        Err(self.refuse(request, context, tried))
    }

    fn try_rung(
        &mut self,
        rung: Rung,
        request: &Request,
        policy: Policy,
        context: Context,
    ) -> DriverResult<Outcome> {
        let changed = |changed| if changed { Outcome::Changed } else { Outcome::Nothing };
        let served = |found: Option<Found>| found.map_or(Outcome::Nothing, Outcome::Served);
        Ok(match rung {
            Rung::CollectGarbage => {
                self.collect_garbage(context)?;
                Outcome::Changed
            }
            Rung::Driver => Outcome::Changed,
            Rung::BorrowFromPools => served(self.borrow_from_pools(request, policy)),
            Rung::BorrowPlain => served(self.borrow_from_pools(request, Policy::Segments)),
            Rung::WaitForEvents => changed(self.synchronize_events(None)?),
            Rung::GiveBackOversize => changed(self.give_back_oversize(request, context)?),
            Rung::GiveBackCached => {
                self.give_back_cached(PoolId::DEFAULT, context)?;
                Outcome::Changed
            }
        })
    }

    /// Whether the options ask for a rung; without a question to the driver.
    fn is_asked_for(&self, rung: Rung) -> bool {
        match rung {
            Rung::CollectGarbage => self.is_collecting_garbage(),
            Rung::GiveBackOversize => self.state.options.max_split_size.is_some(),
            _ => true,
        }
    }

    fn is_legal(&self, legal: Legal, request: &Request) -> DriverResult<bool> {
        Ok(match legal {
            Legal::Always => true,
            Legal::OutsidePools => !self.is_recording(),
            Legal::OutsideCapture => {
                !self.is_recording() || self.driver.capture(request.stream)?.is_none()
            }
        })
    }

    /// Searches the private pools that may help out the default one.
    fn borrow_from_pools(&mut self, request: &Request, policy: Policy) -> Option<Found> {
        if self.state.pools[request.pool].id != PoolId::DEFAULT {
            return None;
        }
        let pools: Vec<_> = self.state.pools.use_on_oom.iter().copied().collect();
        pools.into_iter().find_map(|id| {
            let private = self.state.pools.private.get(&id).filter(|pool| pool.uses > 0)?;
            let pool = if request.small { private.small } else { private.large };
            let block = self.search(&Request { pool, ..*request }, policy)?;
            Some(Found { block, policy })
        })
    }

    /// Refuses a request: counts it, notes it, and says why.
    #[cold]
    pub(crate) fn refuse(
        &mut self,
        request: &Request,
        context: Context,
        tried: Vec<Tried>,
    ) -> AllocError {
        let device_free = self.driver.memory_info().ok().map(|info| info.free);
        self.counters.num_ooms.add(1);
        let place = (request.stream, request.pool);
        let free = device_free.unwrap_or(0);
        self.record(Action::OutOfMemory, free, request.size, place, context);
        let shortage = self.shortage(request, device_free, tried);
        let most = shortage.allowed.unwrap_or(u64::MAX).min(shortage.device_total);
        if shortage.wanted > most {
            AllocError::NeverFits(shortage)
        } else {
            AllocError::FullNow(shortage)
        }
    }

    fn shortage(
        &self,
        request: &Request,
        device_free: Option<u64>,
        tried: Vec<Tried>,
    ) -> Box<Shortage> {
        let stats = self.counters.read(self.lanes);
        let private = |lane: &&crate::stats::LaneFigures| lane.pool != PoolId::DEFAULT;
        Box::new(Shortage {
            requested: request.requested,
            wanted: request.wanted,
            stream: request.stream,
            pool: self.state.pools[request.pool].id,
            device_total: self.device.total,
            device_free,
            allowed: self.state.limit,
            reserved: stats.reserved_bytes.all.current,
            allocated: stats.allocated_bytes.all.current,
            pending: stats.active_bytes.all.current - stats.allocated_bytes.all.current,
            private_free: stats.lanes.iter().filter(private).map(|lane| lane.free_bytes).sum(),
            largest_free: stats.largest_free_block(),
            recording: self.is_recording(),
            tried,
        })
    }
}
