//! The end of a climb: the request is served or refused, the shortage is counted, a receipt is
//! filed.

use std::sync::Arc;
use std::time::Duration;

use super::Climber;
use super::climb::{Climb, Seen};
use crate::backing::Backing;
use crate::base::names::{PoolId, Tag};
use crate::core::{Locked, ring};
use crate::demand::holdings::largest_holders;
use crate::demand::owner;
use crate::driver::{Driver, DriverError};
use crate::ledger::change::{Change, Ending};
use crate::ledger::lanes::LaneFigures;
use crate::ledger::stats::Stats;
use crate::options::ladder::Rung;
use crate::outcome::error::{AllocError, Ended, Shortage};
use crate::outcome::receipt::{Group, Holder, Outcome, Receipt};

/// The figures of one moment of a shortage.
#[derive(Debug)]
pub(super) struct Figures {
    shortage: Shortage,
    held: Held,
}

/// The groups and owners of live memory.
#[derive(Debug)]
struct Held {
    groups: Vec<Group>,
    holders: Vec<Holder>,
    /// The tags of the groups. They count as referenced until the receipt is filed.
    tags: Arc<[Tag]>,
    /// Counts of allocations and frees: while they are unchanged, the groups are still valid.
    as_of: [u64; 3],
}

impl<D: Driver> Climber<'_, D> {
    /// Marks the request as short of memory: neither a free block nor the driver serves it.
    pub(super) fn fall_short(self, climb: &mut Climb) {
        climb.end.short = true;
        let figures = self.shared.locked(|mut core| {
            let stats = self.shared.stats();
            core.demand.queue.begin_climb();
            core.demand.update_attention();
            let figures = core.figures(climb, None, &stats);
            climb.tries.seen = Some(core.seen(&stats, figures.shortage.device_free));
            figures
        });
        climb.record.figures = Some(Box::new(figures));
    }

    /// Removes the request from the queue, however it ended.
    pub(super) fn leave(self, climb: &mut Climb) {
        if std::mem::replace(&mut climb.end.ended, true) {
            return;
        }
        ring(self.shared.locked(|core| {
            if climb.end.short {
                core.demand.queue.end_climb();
            }
            let bells = core.demand.queue.remove(climb.queued.ticket);
            core.demand.update_attention();
            bells
        }));
    }

    pub(super) fn survive(
        self,
        climb: &mut Climb,
        by: Rung,
        address: u64,
    ) -> Result<u64, AllocError> {
        if climb.end.short {
            // If the driver served it after a wait, the receipt names the rung that waited.
            let by = climb.tries.sent_by.filter(|_| by == Rung::Grow).unwrap_or(by);
            self.end(climb, Outcome::Survived(by));
        } else {
            // The driver provided memory: a miss, not a shortage.
            self.shared.locked(|mut core| {
                core.mem.ledger.apply(Change::Miss);
                core.demand.queue.served(&climb.queued);
            });
            self.leave(climb);
        }
        Ok(address)
    }

    pub(super) fn refuse(self, climb: &mut Climb) -> Result<u64, AllocError> {
        if !climb.end.short {
            self.fall_short(climb);
        }
        if let Some(error) = climb.end.fault {
            self.end(climb, Outcome::Driver);
            return Err(error.into());
        }
        let outcome = match climb.end.verdict {
            _ if self.never_fits(climb) => Outcome::NeverFits,
            verdict => verdict.unwrap_or(Outcome::Full),
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
        self,
        climb: &mut Climb,
        at: Rung,
        error: DriverError,
    ) -> Result<u64, AllocError> {
        climb.note(at, Ended::Failed, 0, Duration::ZERO);
        if climb.end.short {
            self.end(climb, Outcome::Driver);
        } else {
            self.leave(climb);
        }
        Err(error.into())
    }

    /// Removes the request from the queue, counts the shortage, and files its receipt.
    pub(super) fn end(self, climb: &mut Climb, outcome: Outcome) -> Shortage {
        let took = self.shared.clock.now().saturating_sub(climb.time.started);
        let number = self.desk.receipts.number();
        let (figures, bells) = self.shared.locked(|mut core| {
            if outcome.is_survived() {
                core.mem.ledger.apply(Change::Miss);
                core.demand.queue.served(&climb.queued);
            }
            climb.end.ended = true;
            core.demand.queue.end_climb();
            let bells = core.demand.queue.remove(climb.queued.ticket);
            if outcome == Outcome::GiveWay {
                core.demand.queue.note_gave_way(core.mem.heap, climb.queued.owner);
            }
            core.demand.update_attention();
            // If it was served, the figures of the moment when it fell short; otherwise those of
            // now.
            let before = climb.record.figures.take();
            let mut figures = match before {
                Some(before) if outcome.is_survived() => *before,
                before => {
                    let stats = self.shared.stats();
                    core.figures(climb, before.map(|before| before.held), &stats)
                }
            };
            if !outcome.is_survived() {
                core.tell_what_helps(climb, &mut figures.shortage);
            }
            figures.shortage.receipt = number;
            figures.shortage.tried = climb.record.rungs.clone();
            core.count_shortage(&figures.shortage, climb, outcome, took);
            (figures, bells)
        });
        ring(bells);
        let Figures { shortage, held: Held { groups, holders, tags, .. } } = figures;
        self.desk.receipts.file(Receipt {
            number,
            device: self.shared.device.device,
            at: climb.time.started,
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
            answers: std::mem::take(&mut climb.record.answers),
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
        let ending = match outcome {
            Outcome::Survived(_) => Ending::Survived,
            Outcome::GivenUp | Outcome::Driver => Ending::Broken,
            _ => {
                let request = self.request_of(climb);
                Ending::Refused {
                    free: shortage.device_free.unwrap_or(0),
                    bytes: request.size,
                    place: self.mem.heap.place(request.lane),
                    tag: climb.asked.tag,
                }
            }
        };
        self.mem.ledger.apply(Change::ShortageEnded(ending, took));
    }

    /// Adds the figures that only a refused request reports.
    fn tell_what_helps(&self, climb: &Climb, shortage: &mut Shortage) {
        let request = self.request_of(climb);
        shortage.stuck = Some(self.pinned());
        let rules = self.policies.rules(self.policies.in_force());
        let free = shortage.device_free.unwrap_or(0);
        shortage.fits_on_pages = rules.would_fit_on_pages(&self.mem, &request, free);
    }

    /// Returns the memory that could serve a request. The device reports `free` bytes.
    pub(super) fn seen(&self, stats: &Stats, free: Option<u64>) -> Seen {
        let room = self.mem.room_of(free.unwrap_or(0));
        let available = stats.cached_bytes().saturating_add(room);
        Seen { room, available, largest: stats.largest_free_block() }
    }

    /// Returns the bytes of the device that are neither free, nor reserved by this engine, nor the
    /// fixed cost of a process. The device reports `free` bytes.
    pub(super) fn held_by_others(&self, free: u64) -> u64 {
        let used = self.mem.device.total.saturating_sub(free);
        used.saturating_sub(self.mem.reserved()).saturating_sub(self.mem.device.process_overhead)
    }

    /// Returns the figures of now. `before` are groups and owners that were collected earlier, if
    /// any.
    fn figures(&mut self, climb: &Climb, before: Option<Held>, stats: &Stats) -> Figures {
        let request = self.request_of(climb);
        let private = |lane: &&LaneFigures| lane.pool != PoolId::DEFAULT;
        let (active, allocated) = (&stats.active_bytes.all, &stats.allocated_bytes.all);
        let free = Backing::device_free(self.mem.driver).ok();
        let shortage = Shortage {
            receipt: 0,
            requested: request.requested,
            size: request.size,
            wanted: self.wanted(&request),
            stream: request.lane.stream,
            pool: self.mem.heap[request.lane.pool].id,
            policy: self.setup.policy,
            device_total: self.mem.device.total,
            device_free: free,
            allowed: self.mem.backing.limit(),
            reserved: stats.reserved_bytes.all.current,
            allocated: allocated.current,
            pending: active.current.saturating_sub(allocated.current),
            spilled: stats.spilled_bytes.current,
            others: free.map_or(0, |free| self.held_by_others(free)),
            stuck: None,
            fits_on_pages: false,
            private_free: stats.lanes.iter().filter(private).map(|lane| lane.free_bytes).sum(),
            largest_free: stats.largest_free_block(),
            recording: self.mem.is_recording(),
            injected: climb.injected.was,
            ahead: climb.asked.ahead,
            budget: climb.time.deadline.saturating_sub(climb.time.started),
            tried: Vec::new(),
        };
        // This walks over all blocks, so it is not repeated if nothing was allocated or freed
        // since.
        let spilled = stats.spilled_allocation.allocated + stats.spilled_allocation.freed;
        let as_of = [stats.allocation.all.allocated, stats.allocation.all.freed, spilled];
        let held = before.filter(|before| before.as_of == as_of).unwrap_or_else(|| {
            let (groups, holders) = largest_holders(self.mem.heap);
            let tags = self.setup.told_later.hold(&groups);
            Held { groups, holders, tags, as_of }
        });
        Figures { shortage, held }
    }
}
