//! Demand: who asks for memory, who waits for it and in what order, and whose requests are made to fail.

pub(crate) mod asked;
pub(crate) mod backoff;
pub(crate) mod holdings;
pub(crate) mod owner;
pub(crate) mod queue;

use self::queue::Queue;
use crate::base::check::{Violation, ensure};
use crate::base::names::Owner;
use crate::options::inject::{Injected, Injection};

/// What requests have to look at before they take memory.
#[derive(Debug)]
pub(crate) struct Demand {
    pub(crate) queue: Queue,
    /// The owner of the latest request that was not a follower's.
    leader: Owner,
    /// Requests that are made to fail, if any.
    injection: Option<Injection>,
    /// Whether a request waits or a failure is injected: a hit looks at nothing else.
    attention: bool,
}

impl Default for Demand {
    fn default() -> Self {
        let (queue, leader) = (Queue::default(), Owner::NOBODY);
        Self { queue, leader, injection: None, attention: false }
    }
}

impl Demand {
    /// Whether a request has to look whether others wait, or a failure is injected.
    pub(crate) fn needs_attention(&self) -> bool {
        self.attention
    }

    /// To be called whenever a request begins or ends to wait, or injected failures change.
    pub(crate) fn update_attention(&mut self) {
        self.attention = !self.queue.is_idle() || self.injection.is_some();
    }

    /// The owner of a request: for a follower, the owner of the latest request that was not a follower's.
    pub(crate) fn lead(&mut self, owner: Owner) -> Owner {
        if owner != Owner::FOLLOWER {
            self.leader = owner;
        }
        self.leader
    }

    /// Makes requests fail from now on; `None` ends that.
    pub(crate) fn inject(&mut self, injection: Option<Injection>) {
        self.injection = injection;
        self.update_attention();
    }

    /// Whether failures are injected.
    pub(crate) fn is_injecting(&self) -> bool {
        self.injection.is_some()
    }

    /// The failure that strikes a request for `bytes` bytes, if any.
    pub(crate) fn strike(&mut self, bytes: u64) -> Option<Injected> {
        self.injection.as_mut()?.strike(bytes)
    }

    /// Its part of the invariant check: waiting requests and injected failures are seen by every request.
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
