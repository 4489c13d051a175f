//! One action of another thread, run while the engine waits for the device.

use std::sync::{Arc, Mutex, PoisonError};

use super::World;
use crate::testing::Action;
use crate::{PoolId, StreamId};

/// The other thread.
#[derive(Debug, Default)]
pub(super) struct OtherThread {
    /// What the thread does when an action next waits for the device.
    armed: Option<Armed>,
    /// What the thread has done and the model does not contain yet.
    happened: Arc<Mutex<Option<Armed>>>,
}

/// What another thread does while the engine waits for the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Armed {
    Replay { pool: PoolId, stream: StreamId },
    Free { address: u64 },
}

impl World {
    pub(super) fn replay_meanwhile(&mut self, pool: PoolId, stream: StreamId) {
        self.other_thread.armed = Some(Armed::Replay { pool, stream });
    }

    pub(super) fn free_meanwhile(&mut self, index: u16) {
        let address = self.memory.pick(index);
        self.other_thread.armed = address.map(|address| Armed::Free { address });
    }

    /// Whether a program may still do what the other thread is about to do.
    fn is_still_legal(&self, armed: Armed) -> bool {
        match armed {
            Armed::Replay { pool, stream } => {
                let pools = &self.pools;
                let is_last = pools.uses.get(&pool) == Some(&1) && !pools.open.contains(&pool);
                is_last && self.streams.exists(stream) && self.may_replay(pool, stream)
            }
            Armed::Free { address } => {
                self.memory.live.contains_key(&address) && self.may_free(address)
            }
        }
    }

    /// Prepares the other thread to act if this action waits for the device. Only some actions
    /// allow that.
    pub(super) fn arm(&mut self, action: &Action) {
        let waits = matches!(
            action,
            Action::Alloc { .. }
                | Action::AllocAtOnce { .. }
                | Action::Future { .. }
                | Action::PollFuture { .. }
                | Action::EmptyCache
                | Action::EmptyPool { .. }
                | Action::Prefetch { .. }
        );
        let Some(armed) = self.other_thread.armed.filter(|_| waits) else { return };
        if !self.is_still_legal(armed) {
            self.other_thread.armed = None;
            return;
        }
        let engine = Arc::clone(&self.engine);
        let happened = Arc::clone(&self.other_thread.happened);
        let life = self.memory.next_life();
        let replay = match armed {
            Armed::Replay { pool, stream } => Some(self.replay_as(pool, stream, life)),
            Armed::Free { .. } => None,
        };
        self.gpu.meanwhile(Some(Box::new(move || {
            match armed {
                Armed::Replay { pool, .. } => {
                    replay.into_iter().for_each(|replay| replay());
                    engine.release_pool(pool).expect("the pool is in use");
                }
                // The engine handles a failure to record the events.
                Armed::Free { address } => drop(engine.free(address)),
            }
            *happened.lock().unwrap_or_else(PoisonError::into_inner) = Some(armed);
        })));
    }

    /// Adds to the model what the other thread has done. Returns whether it has done anything.
    pub(super) fn settle(&mut self) -> bool {
        let happened =
            self.other_thread.happened.lock().unwrap_or_else(PoisonError::into_inner).take();
        if happened.is_some() {
            self.other_thread.armed = None;
        }
        match happened {
            None => return false,
            Some(Armed::Replay { pool, .. }) => self.released(pool),
            Some(Armed::Free { address }) => {
                let named = self.memory.live.get(&address).map(|life| life.others.clone());
                self.streams.deferred.extend(named.into_iter().flatten());
                self.freed(address, &Ok(()));
            }
        }
        true
    }
}
