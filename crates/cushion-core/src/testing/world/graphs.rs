//! Captures of graphs, and replays of captured graphs.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::World;
use super::memory::Life;
use crate::testing::gpu::Deed;
use crate::{PoolId, StreamId};

/// The captures under way.
#[derive(Debug, Default)]
pub(super) struct Captures {
    /// The capture that the engine knows: its pool, and the stream that it began on.
    pub(super) current: Option<(PoolId, StreamId)>,
    /// The streams of that capture.
    joined: Arc<Mutex<BTreeSet<StreamId>>>,
    /// The stream of a capture that the engine was not told of.
    pub(super) silent: Option<StreamId>,
}

impl Captures {
    pub(super) fn joined(&self) -> MutexGuard<'_, BTreeSet<StreamId>> {
        self.joined.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the current capture, unless `stream` is being captured silently.
    fn current_beside(&self, stream: StreamId) -> Option<(PoolId, StreamId)> {
        self.current.filter(|_| self.silent != Some(stream))
    }
}

/// Captures.
impl World {
    pub(super) fn begin_capture(&mut self, pool: PoolId, stream: StreamId) {
        let joined = Arc::clone(&self.captures.joined);
        let filter = move |stream| joined.lock().is_ok_and(|all| all.contains(&stream));
        if self.captures.current.is_none()
            && self.captures.silent != Some(stream)
            && self.begin_pool(pool, Box::new(filter))
        {
            self.sim.begin_capture(stream);
            self.gpu.checked.begin_capture(stream);
            self.captures.current = Some((pool, stream));
            self.captures.joined().insert(stream);
        }
    }

    pub(super) fn join_capture(&mut self, stream: StreamId) {
        if let Some((_, captured)) = self.captures.current_beside(stream) {
            self.sim.wait_for(stream, captured);
            self.gpu.checked.begin_capture(stream);
            self.captures.joined().insert(stream);
        }
    }

    pub(super) fn follow_stream(&self, stream: StreamId) {
        if let Some((_, captured)) = self.captures.current_beside(stream) {
            self.sim.wait_for(captured, stream);
        }
    }

    pub(super) fn end_capture(&mut self) {
        if let Some((pool, stream)) = self.captures.current.take() {
            for stream in std::mem::take(&mut *self.captures.joined()) {
                self.gpu.checked.end_capture(stream);
            }
            self.sim.end_capture(stream);
            self.end_pool(pool);
        }
    }

    /// Captures a whole graph: blocks with holes between them, a block that fits only into several
    /// of these holes, and, for some kinds, blocks that stay live after the capture.
    pub(super) fn graph(&mut self, pool: PoolId, stream: StreamId, kind: u8) {
        if self.captures.current.is_some() {
            return;
        }
        self.begin_capture(pool, stream);
        if self.captures.current.is_none() {
            return;
        }
        let size = u64::from(2 + kind % 6) << 20;
        let count = 3 + usize::from(kind / 8 % 4);
        let mut held: Vec<u64> = (0..count).filter_map(|_| self.request(size, stream)).collect();
        let holes: Vec<u64> = held.iter().copied().step_by(2).collect();
        held.retain(|address| !holes.contains(address));
        holes.iter().for_each(|&address| self.free(address));
        held.extend(self.request(size * holes.len() as u64, stream));
        if kind & 0x80 == 0 {
            held.drain(..).for_each(|address| self.free(address));
        }
        self.end_capture();
    }

    /// Begins a capture that the engine is not told of. The default stream cannot be captured. An
    /// event that the engine still has to record on the stream would break the capture.
    pub(super) fn begin_silent_capture(&mut self, stream: StreamId) {
        if self.captures.silent.is_none()
            && stream != StreamId(0)
            && !self.captures.joined().contains(&stream)
            && !self.streams.deferred.contains(&stream)
        {
            self.sim.begin_capture(stream);
            self.gpu.checked.begin_capture(stream);
            self.captures.silent = Some(stream);
        }
    }

    pub(super) fn end_silent_capture(&mut self) {
        if let Some(stream) = self.captures.silent.take() {
            self.gpu.checked.end_capture(stream);
            self.sim.end_capture(stream);
        }
    }

    /// Notes memory that a pool handed out during a capture: every replay uses it.
    pub(super) fn bake(&mut self, life: &Life) {
        // A pool that was begun later than the capture's serves the request instead. The program
        // keeps that pool as long as needed.
        if let Some((pool, _)) = self.captures.current.filter(|_| life.captured)
            && self.pools.open.last() == Some(&pool)
        {
            let memory = (life.address, life.size, life.memory.clone());
            self.pools.baked.entry(pool).or_default().push(memory);
        }
    }
}

/// Replays.
impl World {
    /// Whether a program may replay the graphs of a pool: it may not while a capture uses the pool.
    pub(super) fn may_replay(&self, pool: PoolId, stream: StreamId) -> bool {
        self.pools.baked.contains_key(&pool)
            && !self.pools.impure.contains(&pool)
            && self.captures.current.is_none_or(|(captured, _)| captured != pool)
            && self.captures.silent != Some(stream)
            && !self.captures.joined().contains(&stream)
    }

    pub(super) fn replay(&mut self, pool: PoolId, stream: StreamId) {
        if self.may_replay(pool, stream) {
            let life = self.memory.next_life();
            self.replay_as(pool, stream, life)();
        }
    }

    /// Returns a replay that can be launched at any time. For the checks, the replay is an
    /// allocation with the number `life`. A correct program orders it after all earlier uses of its
    /// memory.
    pub(super) fn replay_as(&self, pool: PoolId, stream: StreamId, life: u64) -> Deed {
        let (sim, gpu) = (Arc::clone(&self.sim), Arc::clone(&self.gpu));
        let baked = self.pools.baked.get(&pool).into_iter().flatten();
        let baked: Vec<(u64, u64)> = baked.map(|&(address, size, _)| (address, size)).collect();
        Box::new(move || {
            gpu.checked.wait_for_all(stream);
            sim.launch(stream);
            for (address, size) in baked {
                gpu.checked.work(address, size, stream, life);
            }
        })
    }
}
