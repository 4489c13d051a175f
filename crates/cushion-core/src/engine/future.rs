//! An allocation as a future of any runtime.

use std::pin::Pin;
use std::task::{Context as Polled, Poll, Waker};
use std::time::Duration;

use crate::core::attempt::Effort;
use crate::demand::asked::Asked;
use crate::driver::Driver;
use crate::outcome::error::AllocError;
use crate::shortage::Climber;
use crate::shortage::climb::{Climb, Progress, Served};

/// A future allocation: see [`Engine::alloc_async`](crate::Engine::alloc_async). It takes its place
/// in the queue when it is first polled.
#[derive(Debug)]
#[must_use = "a future does nothing unless it is polled"]
pub struct AllocFuture<'a, D: Driver> {
    climber: Climber<'a, D>,
    asked: Asked,
    climb: Option<Box<Climb>>,
    /// The latest alarm set on the clock: its time, and the waker.
    alarm: Option<(Duration, Waker)>,
    done: bool,
}

impl<'a, D: Driver> AllocFuture<'a, D> {
    pub(super) fn new(climber: Climber<'a, D>, asked: Asked) -> Self {
        Self { climber, asked, climb: None, alarm: None, done: false }
    }

    fn begin(&mut self) -> Poll<Result<u64, AllocError>> {
        if self.asked.bytes == 0 {
            return Poll::Ready(Ok(0));
        }
        match self.climber.serve(&self.asked, Effort::Poll)? {
            Served::At(address) => Poll::Ready(Ok(address)),
            Served::Later(climb) => {
                self.climb = Some(climb);
                Poll::Pending
            }
            Served::NotAtOnce => unreachable!("a future may wait"),
        }
    }
}

impl<D: Driver> Future for AllocFuture<'_, D> {
    type Output = Result<u64, AllocError>;

    /// # Panics
    ///
    /// If it is polled after it was ready.
    fn poll(mut self: Pin<&mut Self>, polled: &mut Polled<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        assert!(!this.done, "polled after it was ready");
        if this.climb.is_none()
            && let Poll::Ready(result) = this.begin()
        {
            this.done = true;
            return Poll::Ready(result);
        }
        let Some(climb) = &mut this.climb else { return Poll::Pending };
        match this.climber.advance(climb) {
            Progress::Done(result) => {
                this.done = true;
                this.climb = None;
                Poll::Ready(result)
            }
            Progress::Wait(at_most) => {
                let clock = &this.climber.shared.clock;
                let now = clock.now();
                let at = now.saturating_add(at_most);
                // An alarm cannot be cancelled; an earlier one for the same waker is enough.
                let will_do = |(set, waker): &(Duration, Waker)| {
                    now < *set && *set <= at && waker.will_wake(polled.waker())
                };
                if !this.alarm.as_ref().is_some_and(will_do) {
                    this.alarm = Some((at, polled.waker().clone()));
                    clock.wake_at(at, polled.waker().clone());
                }
                climb.bell().wakes(polled.waker());
                Poll::Pending
            }
        }
    }
}

impl<D: Driver> Drop for AllocFuture<'_, D> {
    /// Gives up its place in the queue.
    fn drop(&mut self) {
        if let Some(mut climb) = self.climb.take() {
            self.climber.abandon(&mut climb);
        }
    }
}
