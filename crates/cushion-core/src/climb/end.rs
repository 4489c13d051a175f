//! How a climb ends: served or refused, counted, and with a receipt.

use std::time::Duration;

use super::Climb;
use crate::driver::{Driver, DriverError};
use crate::engine::{Engine, ring};
use crate::error::{AllocError, Ended, Shortage};
use crate::history::Action;
use crate::ladder::Rung;
use crate::locked::Locked;
use crate::owner;
use crate::policy::Request;
use crate::pool::PoolId;
use crate::queue::Verdict;
use crate::receipt::{Outcome, Receipt};
use crate::stats::LaneFigures;

impl<D: Driver> Engine<D> {
    pub(super) fn survive(
        &self,
        climb: &mut Climb,
        by: Rung,
        address: u64,
    ) -> Result<u64, AllocError> {
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

    pub(super) fn refuse(&self, climb: &mut Climb) -> Result<u64, AllocError> {
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

    pub(super) fn broken(
        &self,
        climb: &mut Climb,
        at: Rung,
        error: DriverError,
    ) -> Result<u64, AllocError> {
        climb.note(at, Ended::Failed, 0, Duration::ZERO);
        if climb.short {
            self.end(climb, Outcome::Driver);
        }
        Err(error.into())
    }

    /// Leaves the queue, counts the shortage, and files its receipt.
    pub(super) fn end(&self, climb: &mut Climb, outcome: Outcome) -> Shortage {
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
    pub(super) fn count_shortage(
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

    pub(super) fn shortage(
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
