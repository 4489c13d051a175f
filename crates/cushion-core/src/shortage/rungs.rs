//! The rungs, except the two that wait (`wait.rs`).

use std::time::Duration;

use super::Climber;
use super::callbacks::{Plea, Situation};
use super::candidates::Enough;
use super::climb::Climb;
use super::ladder::{Legal, Then};
use crate::base::names::{PolicyIndex, PoolId};
use crate::core::Locked;
use crate::core::attempt::Attempt;
use crate::core::serve::Borrow;
use crate::demand::asked::Asked;
use crate::driver::{Driver, DriverResult};
use crate::memory::Request;
use crate::options::Policy;
use crate::options::ladder::{Ladder, Rung};
use crate::outcome::error::Ended;
use crate::streams::proof::Proof;

impl<D: Driver> Climber<'_, D> {
    /// Runs `f`, which lets the driver wait, while no capture is under way. The `torch` ladder,
    /// like PyTorch, gives memory back beside captures on other streams, too.
    pub(super) fn outside_capture<T>(self, climb: &Climb, f: impl FnOnce() -> T) -> Option<T> {
        let guard = match climb.ladder {
            Ladder::Torch => self.shared.no_capture_begins(),
            Ladder::Graceful => self.shared.outside_captures()?,
        };
        let result = f();
        drop(guard);
        Some(result)
    }

    /// Like [`outside_capture`](Self::outside_capture), for an `f` that gives memory back. Wakes
    /// the requests that wait if it did.
    fn giving_back<T>(
        self,
        climb: &Climb,
        f: impl FnOnce() -> DriverResult<(u64, T)>,
    ) -> Option<DriverResult<(u64, T)>> {
        let result = self.outside_capture(climb, f)?;
        // If the driver failed, it may have taken some of the memory; the rest is in its lanes
        // again.
        if !matches!(result, Ok((0, _))) {
            self.shared.wake();
        }
        Some(result)
    }

    pub(super) fn collect_garbage(self, climb: &Climb) -> Attempt {
        let given_back = self.giving_back(climb, || {
            let detached = self.shared.locked(|mut core| core.detach_garbage());
            Ok((self.shared.release(detached, climb.asked.tag)?, ()))
        });
        match given_back {
            None => Attempt::Nothing(Ended::Illegal),
            Some(Ok((won, ()))) => Attempt::Won(won),
            Some(Err(error)) => Attempt::Failed(error),
        }
    }

    pub(super) fn grow(self, climb: &mut Climb) -> Attempt {
        match self.shared.locked(|mut core| core.serve_new_to(climb)) {
            Ok(Some(address)) => Attempt::Served { address, won: 0 },
            Ok(None) => {
                if !climb.end.short {
                    self.fall_short(climb);
                }
                let wanted = self.shared.locked(|core| core.wanted(&core.request_of(climb)));
                if wanted > self.shared.device.total {
                    // No memory of the device could help.
                    climb.at = climb.last_before_spill();
                }
                Attempt::Nothing(Ended::Nothing)
            }
            Err(error) => Attempt::Failed(error),
        }
    }

    /// Returns whether the request needs more than the device, or the limit on it, could ever
    /// provide.
    pub(super) fn never_fits(self, climb: &Climb) -> bool {
        self.shared.locked(|core| core.wanted(&core.request_of(climb)) > core.mem.most())
    }

    pub(super) fn poll(self) -> DriverResult<Attempt> {
        let completed = self.shared.complete_frees()?;
        Ok(completed.map_or(Attempt::Nothing(Ended::Illegal), Attempt::Won))
    }

    pub(super) fn borrow(self, climb: &Climb) -> DriverResult<Attempt> {
        self.shared.locked(|mut core| {
            let request = core.request_of(climb);
            let served = match climb.ladder {
                // PyTorch does not search expandable segments here.
                Ladder::Torch => {
                    core.borrow_from_pools(&request, PolicyIndex::from(Policy::Segments))
                }
                Ladder::Graceful => {
                    let policy = core.policies.in_force();
                    match core.borrow_from_pools(&request, policy) {
                        None if !core.mem.is_recording() => {
                            core.borrow_from_streams(&request, Borrow::Whole, Proof::NONE)?
                        }
                        served => served,
                    }
                }
            };
            Ok(Attempt::served_or_nothing(served))
        })
    }

    pub(super) fn borrow_parts(self, climb: &Climb) -> DriverResult<Attempt> {
        let served = self.outside_capture(climb, || {
            let waits = self.shared.locked(|mut core| {
                let request = core.request_of(climb);
                core.lends_after_wait(&request)
            })?;
            let proof = if waits { self.shared.wait_for_device()? } else { Proof::NONE };
            self.shared.locked(|mut core| {
                let request = core.request_of(climb);
                core.borrow_from_streams(&request, Borrow::Cut, proof)
            })
        });
        let Some(served) = served else { return Ok(Attempt::Nothing(Ended::Illegal)) };
        Ok(Attempt::served_or_nothing(served?))
    }

    pub(super) fn give_back_oversize(self, climb: &Climb) -> Attempt {
        let given_back = self.giving_back(climb, || {
            let (detached, enough) = self.shared.locked(|mut core| {
                let request = core.request_of(climb);
                core.detach_oversize(&request)
            });
            Ok((self.shared.release(detached, climb.asked.tag)?, enough))
        });
        match given_back {
            None => Attempt::Nothing(Ended::Illegal),
            // PyTorch asks the driver only if this is enough.
            Some(Ok((0, false))) => Attempt::Nothing(Ended::Nothing),
            Some(Ok((_, false))) if climb.ladder == Ladder::Torch => {
                Attempt::Nothing(Ended::TooLittle)
            }
            Some(Ok((won, _))) => Attempt::Won(won),
            Some(Err(error)) => Attempt::Failed(error),
        }
    }

    /// Gives back cached memory, if that would be enough. PyTorch gives it back in any case, after
    /// it has waited for all pending frees.
    pub(super) fn give_back(self, climb: &Climb) -> DriverResult<Attempt> {
        let tag = climb.asked.tag;
        if climb.ladder == Ladder::Torch {
            let (_, before) = self.shared.active_and_reserved();
            self.shared.give_back_cached(PoolId::DEFAULT, tag)?;
            let (_, after) = self.shared.active_and_reserved();
            return Ok(Attempt::Won(before.saturating_sub(after)));
        }
        let given_back = self.giving_back(climb, || {
            let waits = self.shared.locked(|mut core| {
                let request = core.request_of(climb);
                core.waits_to_give_back(&request)
            })?;
            let Some(waits) = waits else { return Ok((0, ())) };
            let proof = if waits { self.shared.wait_for_device()? } else { Proof::NONE };
            let Enough { segments, pages } = self.shared.locked(|mut core| {
                let request = core.request_of(climb);
                core.enough_to_give_back(&request, proof)
            })?;
            // Pages first: detached segments would be lost if the driver failed.
            let (unmapped, _) = self.shared.unmap_blocks(pages, tag)?;
            let detached = self.shared.locked(|mut core| core.detach_segments(&segments));
            let released = self.shared.release(detached, tag)?;
            self.shared.locked(|mut core| core.close_empty_pools());
            Ok((unmapped + released, ()))
        });
        match given_back {
            None => Ok(Attempt::Nothing(Ended::Illegal)),
            Some(given_back) => match given_back? {
                (0, ()) => Ok(Attempt::Nothing(Ended::Nothing)),
                (won, ()) => Ok(Attempt::Won(won)),
            },
        }
    }

    /// Calls the program's callbacks, highest priority first, until the request could be served.
    pub(super) fn ask_callbacks(self, climb: &mut Climb) -> Attempt {
        if climb.asked.in_callback || climb.record.called == Some(0) {
            return Attempt::Nothing(Ended::Nothing);
        }
        let gives_back = !climb.options.skip_rungs.contains(Rung::Cached);
        let before = self.shared.active_and_reserved();
        let mut asking = Asking { climber: self, climb, gives_back, before };
        let answers = self.desk.callbacks.call(&mut asking);
        let won = asking.won();
        if answers.is_empty() {
            return Attempt::Nothing(Ended::Nothing);
        }
        let failed = answers.iter().any(|answer| answer.failed.is_some());
        let room = MOST_ANSWERS.saturating_sub(climb.record.answers.len());
        climb.record.answers.extend(answers.into_iter().take(room));
        climb.record.called = Some(won);
        if failed && won == 0 {
            return Attempt::Nothing(Ended::Failed);
        }
        // The freed memory may be usable only after the driver has laid it out anew.
        match self.then(climb, &[Then::Search]) {
            Ok(Some(address)) => Attempt::Served { address, won },
            Ok(None) if won > 0 && gives_back => {
                self.give_back(climb).map_or_else(Attempt::Failed, |_| Attempt::Won(won))
            }
            Ok(None) => Attempt::Won(won),
            Err(error) => Attempt::Failed(error),
        }
    }

    pub(super) fn spill(self, climb: &Climb) -> DriverResult<Attempt> {
        self.finish_awaiting_device(climb)?;
        self.shared.locked(|mut core| {
            if core.mem.is_recording() {
                return Ok(Attempt::Nothing(Ended::Illegal));
            }
            let request = core.request_of(climb);
            let served = core.mem.spill(&request, core.policies.in_force())?;
            Ok(Attempt::served_or_nothing(served))
        })
    }
}

/// How many results of callbacks a receipt holds at most.
const MOST_ANSWERS: usize = 16;

/// A request that calls callbacks.
struct Asking<'a, 'c, D: Driver> {
    climber: Climber<'a, D>,
    climb: &'c Climb,
    gives_back: bool,
    /// Active and reserved bytes before the callbacks.
    before: (u64, u64),
}

impl<D: Driver> Situation for Asking<'_, '_, D> {
    fn plea(&mut self, budget: Option<Duration>) -> Plea {
        let least = Duration::from_millis(self.climb.options.callback_ms);
        let time_left = budget.unwrap_or_else(|| self.climb.left(self.now()).max(least));
        let shared = self.climber.shared;
        let bytes = shared.locked(|core| core.wanted(&core.request_of(self.climb)));
        Plea { device: shared.device.device, bytes, time_left }
    }

    fn now(&mut self) -> Duration {
        self.climber.shared.clock.now()
    }

    /// Freed memory shows in one of the two figures, whether it was given back or not: the larger
    /// change counts.
    fn won(&mut self) -> u64 {
        let after = self.climber.shared.active_and_reserved();
        self.before.0.saturating_sub(after.0).max(self.before.1.saturating_sub(after.1))
    }

    fn enough(&mut self) -> bool {
        self.climber.shared.locked(|mut core| {
            let request = core.request_of(self.climb);
            core.would_serve(&request)
                || !core.mem.is_recording()
                    && self.gives_back
                    && core.giving_back_helps(&request).unwrap_or(false)
        })
    }
}

impl<D: Driver> Locked<'_, D> {
    pub(super) fn request_of(&self, climb: &Climb) -> Request {
        let &Asked { bytes, stream, owner, tag, .. } = &climb.asked;
        self.mem.request(bytes, stream, owner, tag)
    }

    /// Serves the request from a free block of its pool.
    pub(super) fn serve_free(&mut self, climb: &Climb) -> Option<u64> {
        let request = self.request_of(climb);
        let policy = self.policies.in_force();
        let found = self.search(&request, policy)?;
        Some(self.hand_out(found, policy, &request))
    }

    /// Serves the request from memory that the driver provides now.
    pub(super) fn serve_new_to(&mut self, climb: &Climb) -> DriverResult<Option<u64>> {
        let request = self.request_of(climb);
        // Prefetched memory must belong to the stream itself.
        let may_borrow = !climb.asked.ahead && !climb.options.skip_rungs.contains(Rung::Borrow);
        self.serve_new(&request, may_borrow)
    }

    pub(super) fn is_legal(&self, legal: Legal, asked: &Asked) -> DriverResult<bool> {
        Ok(match legal {
            Legal::Always => true,
            Legal::OutsidePools => !self.mem.is_recording(),
            Legal::OfDefaultPool => {
                let &Asked { bytes, stream, owner, tag, .. } = asked;
                let request = self.mem.request(bytes, stream, owner, tag);
                self.mem.heap[request.lane.pool].id == PoolId::DEFAULT
            }
            Legal::OutsideCapture => {
                !self.mem.is_recording() || self.mem.driver.capture(asked.stream)?.is_none()
            }
        })
    }
}
