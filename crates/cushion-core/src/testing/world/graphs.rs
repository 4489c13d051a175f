//! Private pools, captures into them, and replays of what was captured.

use std::collections::BTreeSet;
use std::sync::{Arc, MutexGuard, PoisonError};

use super::{Life, World};
use crate::testing::gpu::Deed;
use crate::{PoolError, PoolId, StreamFilter, StreamId};

impl World {
    pub(super) fn joined(&self) -> MutexGuard<'_, BTreeSet<StreamId>> {
        self.joined.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // ---- captures ----

    pub(super) fn begin_capture(&mut self, pool: PoolId, stream: StreamId) {
        let joined = Arc::clone(&self.joined);
        let filter = move |stream| joined.lock().is_ok_and(|all| all.contains(&stream));
        if self.capture.is_none()
            && self.silent != Some(stream)
            && self.begin_pool(pool, Box::new(filter))
        {
            self.sim.begin_capture(stream);
            self.gpu.checked.begin_capture(stream);
            self.capture = Some((pool, stream));
            self.joined().insert(stream);
        }
    }

    pub(super) fn join_capture(&mut self, stream: StreamId) {
        if let Some((_, captured)) = self.capture.filter(|_| self.silent != Some(stream)) {
            self.sim.wait_for(stream, captured);
            self.gpu.checked.begin_capture(stream);
            self.joined().insert(stream);
        }
    }

    pub(super) fn end_capture(&mut self) {
        if let Some((pool, stream)) = self.capture.take() {
            for stream in std::mem::take(&mut *self.joined()) {
                self.gpu.checked.end_capture(stream);
            }
            self.sim.end_capture(stream);
            self.end_pool(pool);
        }
    }

    /// Captures a whole graph: blocks with holes between them, what fits only into several of these, and perhaps
    /// something that outlives the capture.
    pub(super) fn graph(&mut self, pool: PoolId, stream: StreamId, kind: u8) {
        if self.capture.is_some() {
            return;
        }
        self.begin_capture(pool, stream);
        if self.capture.is_none() {
            return;
        }
        let piece = u64::from(2 + kind % 6) << 20;
        let count = 3 + usize::from(kind / 8 % 4);
        let mut held: Vec<u64> = (0..count).filter_map(|_| self.ask_for(piece, stream)).collect();
        let holes: Vec<u64> = held.iter().copied().step_by(2).collect();
        held.retain(|address| !holes.contains(address));
        holes.iter().for_each(|&address| self.free(address));
        held.extend(self.ask_for(piece * holes.len() as u64, stream));
        if kind & 0x80 == 0 {
            held.drain(..).for_each(|address| self.free(address));
        }
        self.end_capture();
    }

    /// Nobody uses the stream meanwhile; the default one cannot be captured, and an event that the engine still has to
    /// record on it for the program would break the capture.
    pub(super) fn begin_silent_capture(&mut self, stream: StreamId) {
        if self.silent.is_none()
            && stream != StreamId(0)
            && !self.joined().contains(&stream)
            && !self.streams.deferred.contains(&stream)
        {
            self.sim.begin_capture(stream);
            self.gpu.checked.begin_capture(stream);
            self.silent = Some(stream);
        }
    }

    pub(super) fn end_silent_capture(&mut self) {
        if let Some(stream) = self.silent.take() {
            self.gpu.checked.end_capture(stream);
            self.sim.end_capture(stream);
        }
    }

    /// Memory that a pool handed out during a capture is used by each replay.
    pub(super) fn bake(&mut self, life: &Life) {
        // A pool begun later takes the request instead; its owner keeps it as long as needed.
        if let Some((pool, _)) = self.capture.filter(|_| life.captured)
            && self.open.last() == Some(&pool)
        {
            let memory = (life.address, life.size, life.memory.clone());
            self.baked.entry(pool).or_default().push(memory);
        }
    }

    // ---- replays ----

    /// Whether a program may replay what was captured into a pool. While it is captured into again it may not.
    pub(super) fn may_replay(&self, pool: PoolId, stream: StreamId) -> bool {
        self.baked.contains_key(&pool)
            && !self.impure.contains(&pool)
            && self.capture.is_none_or(|(captured, _)| captured != pool)
            && self.silent != Some(stream)
            && !self.joined().contains(&stream)
    }

    /// A replay as an allocation of its own, to be launched at any time. A correct program lets it follow what was done
    /// with the memory before.
    pub(super) fn replay(&self, pool: PoolId, stream: StreamId, life: u64) -> Deed {
        let (sim, gpu) = (Arc::clone(&self.sim), Arc::clone(&self.gpu));
        let baked = self.baked.get(&pool).into_iter().flatten();
        let baked: Vec<(u64, u64)> = baked.map(|&(address, size, _)| (address, size)).collect();
        Box::new(move || {
            gpu.checked.wait_for_all(stream);
            sim.launch(stream);
            for (address, size) in baked {
                gpu.checked.work(address, size, stream, life);
            }
        })
    }

    // ---- pools ----

    /// A pool of the program's own, with no capture. One that graphs use is theirs alone.
    pub(super) fn begin_own_pool(&mut self, pool: PoolId, only: Option<StreamId>) {
        if !self.baked.contains_key(&pool) {
            let filter = move |stream| only.is_none_or(|only| only == stream);
            self.begin_pool(pool, Box::new(filter));
            self.impure.insert(pool);
        }
    }

    pub(super) fn begin_pool(&mut self, pool: PoolId, filter: StreamFilter) -> bool {
        match self.engine.begin_allocate_to_pool(pool, filter) {
            Ok(()) => {
                assert!(!self.open.contains(&pool));
                self.open.push(pool);
                if !self.uses.contains_key(&pool) {
                    // It is a new one, with nothing in it.
                    self.impure.remove(&pool);
                }
                *self.uses.entry(pool).or_default() += 1;
                true
            }
            Err(PoolError::AlreadyRecording(_)) => {
                assert!(self.open.contains(&pool));
                false
            }
            Err(PoolError::Released(_)) => {
                assert!(!self.uses.contains_key(&pool));
                false
            }
            Err(error) => panic!("{error}"),
        }
    }

    pub(super) fn end_pool(&mut self, pool: PoolId) {
        if self.capture.is_some_and(|(captured, _)| captured == pool) {
            return;
        }
        let was_open = self.open.contains(&pool);
        let ended = self.engine.end_allocate_to_pool(pool);
        assert_eq!(ended.is_ok(), was_open, "{ended:?}");
        self.open.retain(|&open| open != pool);
    }

    pub(super) fn release_pool(&mut self, pool: PoolId) {
        match self.engine.release_pool(pool) {
            Ok(()) => self.released(pool),
            Err(PoolError::Unknown(_) | PoolError::Released(_)) => {
                assert!(!self.uses.contains_key(&pool));
            }
            Err(PoolError::StillRecording(_)) => assert!(self.open.contains(&pool)),
            Err(error) => panic!("{error}"),
        }
    }

    /// One use of a pool has ended. What was replayed before still runs.
    pub(super) fn released(&mut self, pool: PoolId) {
        let uses = self.uses.get_mut(&pool).expect("a pool in use");
        *uses -= 1;
        if *uses == 0 {
            self.uses.remove(&pool);
            self.baked.remove(&pool);
        }
    }

    /// A pool that graphs use helps nobody out: who got its memory would have it written over.
    pub(super) fn use_on_oom(&mut self, pool: PoolId, allow: bool) {
        if self.baked.contains_key(&pool) {
            return;
        }
        let result = self.engine.set_use_on_oom(pool, allow);
        assert!(result.is_ok() || result == Err(PoolError::Unknown(pool)));
        if result.is_ok() && allow {
            self.impure.insert(pool);
        }
    }
}
