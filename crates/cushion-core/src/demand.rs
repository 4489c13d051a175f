//! Demand: the owners of requests, the queue of requests that wait, and injected failures.

pub(crate) mod asked;
pub(crate) mod backoff;
pub(crate) mod holdings;
pub(crate) mod owner;
pub(crate) mod queue;

use self::queue::Queue;
use crate::base::check::{Violation, ensure};
use crate::base::names::Owner;
use crate::options::inject::{Injected, Injection};

/// What every request checks before it takes memory.
#[derive(Debug)]
pub(crate) struct Demand {
    pub(crate) queue: Queue,
    /// The owner of the latest request that was not a follower's.
    leader: Owner,
    /// Requests that are made to fail, if any.
    injection: Option<Injection>,
    /// Whether a request waits or a failure is injected. A hit checks only this flag.
    attention: bool,
}

impl Default for Demand {
    fn default() -> Self {
        let (queue, leader) = (Queue::default(), Owner::NOBODY);
        Self { queue, leader, injection: None, attention: false }
    }
}

impl Demand {
    /// Returns whether a request must check the queue and the injected failures.
    pub(crate) fn needs_attention(&self) -> bool {
        self.attention
    }

    /// Recomputes the flag. Call it whenever a request starts or stops waiting, or injected
    /// failures change.
    pub(crate) fn update_attention(&mut self) {
        self.attention = !self.queue.is_idle() || self.injection.is_some();
    }

    /// Returns the owner of a request. For a follower, that is the owner of the latest request that
    /// was not a follower's.
    pub(crate) fn lead(&mut self, owner: Owner) -> Owner {
        if owner != Owner::FOLLOWER {
            self.leader = owner;
        }
        self.leader
    }

    /// Makes requests fail from now on; `None` stops that.
    pub(crate) fn inject(&mut self, injection: Option<Injection>) {
        self.injection = injection;
        self.update_attention();
    }

    /// Returns whether failures are injected.
    pub(crate) fn is_injecting(&self) -> bool {
        self.injection.is_some()
    }

    /// Returns the failure injected into a request for `bytes` bytes, if any.
    pub(crate) fn strike(&mut self, bytes: u64) -> Option<Injected> {
        self.injection.as_mut()?.strike(bytes)
    }

    /// Its share of the invariant check: the flag is set if requests wait or failures are injected.
    pub(crate) fn check(&self) -> Result<(), Violation> {
        ensure!(
            self.attention == (!self.queue.is_idle() || self.injection.is_some()),
            "{} requests wait, but attention is {}",
            self.queue.len(),
            self.attention
        );
        Ok(())
    }
}
