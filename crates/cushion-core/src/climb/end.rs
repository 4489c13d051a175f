//! How a climb ends: served or refused, counted, and with a receipt.

use std::sync::Arc;
use std::time::Duration;

use super::{Climb, Seen};
use crate::driver::{Driver, DriverError};
use crate::engine::{Engine, ring};
use crate::error::{AllocError, Ended, Shortage};
use crate::history::{Action, Tag};
use crate::ladder::Rung;
use crate::locked::Locked;
use crate::owner;
use crate::pool::PoolId;
use crate::queue::Verdict;
use crate::receipt::{Group, Holder, Outcome, Receipt};
use crate::stats::LaneFigures;

/// What was held at one moment of a shortage.
#[derive(Debug)]
pub(super) struct Figures {
    shortage: Shortage,
    held: Held,
}

/// Who holds what.
#[derive(Debug)]
struct Held {
    groups: Vec<Group>,
    holders: Vec<Holder>,
    /// The tags of the groups, which count as referred to until the receipt is filed.
    tags: Arc<[Tag]>,
    /// All that had been allocated and freed so far: as long as that is the same, so is this.
    as_of: [u64; 3],
}

impl<D: Driver> Engine<D> {
    /// The request falls short from now on: neither a free block nor the driver serves it.
    pub(super) fn fall_short(&self, climb: &mut Climb) {
        climb.short = true;
        let figures = self.locked(|mut engine| {
            engine.state.queue.begin_climb();
            engine.state.pay_attention();
            let figures = engine.figures(climb, None);
            climb.seen = Some(engine.seen(figures.shortage.device_free));
            figures
        });
        climb.figures = Some(Box::new(figures));
    }

    /// Whatever became of the request, nobody waits for it any more.
    pub(super) fn leave(&self, climb: &mut Climb) {
        if std::mem::replace(&mut climb.ended, true) {
            return;
        }
        ring(self.locked(|engine| {
            if climb.short {
                engine.state.queue.end_climb();
            }
            let bells = engine.state.queue.leave(climb.asker.ticket);
            engine.state.pay_attention();
            bells
        }));
    }

    pub(super) fn survive(
        &self,
        climb: &mut Climb,
        by: Rung,
        address: u64,
    ) -> Result<u64, AllocError> {
        if climb.short {
            // What it waited for is what saved it, and not the driver that then had it.
            let by = climb.sent_by.filter(|_| by == Rung::Grow).unwrap_or(by);
            self.end(climb, Outcome::Survived(by));
        } else {
            // The driver had more: a miss, and no shortage.
            self.locked(|engine| {
                engine.counters.misses.add(1);
                engine.state.queue.served(&climb.asker);
            });
            self.leave(climb);
        }
        Ok(address)
    }

    pub(super) fn refuse(&self, climb: &mut Climb) -> Result<u64, AllocError> {
        if !climb.short {
            self.fall_short(climb);
        }
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
        } else {
            self.leave(climb);
        }
        Err(error.into())
    }

    /// Leaves the queue, counts the shortage, and files its receipt.
    pub(super) fn end(&self, climb: &mut Climb, outcome: Outcome) -> Shortage {
        let took = self.clock.now().saturating_sub(climb.started);
        let number = self.receipts.number();
        let (figures, bells) = self.locked(|mut engine| {
            if outcome.is_survived() {
                engine.counters.misses.add(1);
                engine.state.queue.served(&climb.asker);
            }
            climb.ended = true;
            engine.state.queue.end_climb();
            let bells = engine.state.queue.leave(climb.asker.ticket);
            if outcome == Outcome::GiveWay {
                engine.gave_way(climb.asker.owner);
            }
            engine.state.pay_attention();
            // What was held when it fell short, if it was served; else what is held now.
            let before = climb.figures.take();
            let mut figures = match before {
                Some(before) if outcome.is_survived() => *before,
                before => engine.figures(climb, before.map(|before| before.held)),
            };
            if !outcome.is_survived() {
                engine.tell_what_helps(climb, &mut figures.shortage);
            }
            figures.shortage.receipt = number;
            figures.shortage.tried = climb.rungs.clone();
            engine.count_shortage(&figures.shortage, climb, outcome, took);
            (figures, bells)
        });
        ring(bells);
        let Figures { shortage, held: Held { groups, holders, tags, .. } } = figures;
        self.receipts.file(Receipt {
            number,
            device: self.device.device,
            at: climb.started,
            took,
            ladder: climb.ladder,
            who: owner::name_of(climb.asked.owner),
            owner: climb.asked.owner,
            tag: climb.asked.tag,
            stack: Vec::new(),
            outcome,
            shortage: shortage.clone(),
            groups,
            holders,
            answers: std::mem::take(&mut climb.answers),
        });
        drop(tags);
        shortage
    }
}

impl<D: Driver> Locked<'_, D> {
    fn count_shortage(
        &mut self,
        shortage: &Shortage,
        climb: &Climb,
        outcome: Outcome,
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
            let request = self.request_of(climb);
            let (place, free) = ((request.stream, request.pool), shortage.device_free.unwrap_or(0));
            self.record(Action::OutOfMemory, free, request.size, place, climb.asked.tag);
        }
    }

    /// Adds what only those need to know whose request was refused.
    fn tell_what_helps(&self, climb: &Climb, shortage: &mut Shortage) {
        let request = self.request_of(climb);
        shortage.stuck = Some(self.stuck());
        shortage.fits_on_pages = self.fits_on_pages(&request, shortage.device_free.unwrap_or(0));
    }

    /// What there is that a request could be served from. `free` is what the device reports.
    pub(super) fn seen(&self, free: Option<u64>) -> Seen {
        let stats = self.counters.read(self.lanes);
        let room = self.room_of(free.unwrap_or(0));
        let available = stats.cached_bytes().saturating_add(room);
        Seen { room, available, largest: stats.largest_free_block() }
    }

    /// What is held now, by whom and for what. `before` is what was known before, if anything was.
    fn figures(&mut self, climb: &Climb, before: Option<Held>) -> Figures {
        let request = self.request_of(climb);
        let stats = self.counters.read(self.lanes);
        let private = |lane: &&LaneFigures| lane.pool != PoolId::DEFAULT;
        let (active, allocated) = (&stats.active_bytes.all, &stats.allocated_bytes.all);
        let free = self.driver.memory_info().ok().map(|info| info.free);
        let shortage = Shortage {
            receipt: 0,
            requested: request.requested,
            size: request.size,
            wanted: self.wanted_of(&request),
            stream: request.stream,
            pool: self.state.pools[request.pool].id,
            policy: self.state.policy,
            device_total: self.device.total,
            device_free: free,
            allowed: self.state.limit,
            reserved: stats.reserved_bytes.all.current,
            allocated: allocated.current,
            pending: active.current.saturating_sub(allocated.current),
            spilled: stats.spilled_bytes.current,
            others: free.map_or(0, |free| self.held_by_others(free)),
            stuck: None,
            fits_on_pages: false,
            private_free: stats.lanes.iter().filter(private).map(|lane| lane.free_bytes).sum(),
            largest_free: stats.largest_free_block(),
            recording: self.is_recording(),
            injected: climb.was_injected,
            ahead: climb.asked.ahead,
            budget: climb.deadline.saturating_sub(climb.started),
            tried: Vec::new(),
        };
        // That is a walk over all blocks.
        let spilled = stats.spilled_allocation.allocated + stats.spilled_allocation.freed;
        let as_of = [stats.allocation.all.allocated, stats.allocation.all.freed, spilled];
        let held = before.filter(|before| before.as_of == as_of).unwrap_or_else(|| {
            let (groups, holders) = self.who_holds_what();
            let tags = self.state.told_later.hold(&groups);
            Held { groups, holders, tags, as_of }
        });
        Figures { shortage, held }
    }
}
