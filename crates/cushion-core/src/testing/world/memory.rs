//! Allocations, work on them, and frees.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::World;
use crate::base::random::Random;
use crate::driver::Bytes;
use crate::{AddressError, AllocError, StreamId, Tag};

/// The model of the program's allocations.
#[derive(Debug, Default)]
pub(super) struct Memory {
    /// Live allocations by address.
    pub(super) live: BTreeMap<u64, Life>,
    /// Freed allocations whose work may be unfinished.
    pub(super) past: Vec<Life>,
    /// The number of allocations and replays so far.
    lives: u64,
}

/// One allocation.
#[derive(Debug, Clone)]
pub(super) struct Life {
    pub(super) id: u64,
    pub(super) address: u64,
    pub(super) size: u64,
    pub(super) requested: u64,
    pub(super) spilled: bool,
    pub(super) stream: StreamId,
    /// The physical memory behind the allocation; it may be mapped at another address later.
    pub(super) memory: Vec<Bytes>,
    /// Work on the allocation: stream and work number.
    pub(super) work: Vec<(StreamId, u64)>,
    /// Whether a capture used the allocation.
    pub(super) captured: bool,
    /// Streams that the program recorded for the allocation.
    pub(super) others: BTreeSet<StreamId>,
}

impl Memory {
    /// Returns a number that no other allocation or replay has.
    pub(super) fn next_life(&mut self) -> u64 {
        self.lives += 1;
        self.lives
    }

    /// Returns the address of a live allocation; `None` if none is live.
    pub(super) fn pick(&self, index: u16) -> Option<u64> {
        let count = self.live.len().max(1);
        self.live.keys().nth(usize::from(index) % count).copied()
    }
}

/// Allocations.
impl World {
    pub(super) fn alloc(&mut self, size: u64, stream: StreamId) {
        if self.captures.silent != Some(stream) {
            self.request(size, stream);
        }
    }

    /// Allocates `size` bytes. Returns the address unless the engine refuses.
    pub(super) fn request(&mut self, size: u64, stream: StreamId) -> Option<u64> {
        let before = self.engine.stats().allocation.all.current;
        let result = self.engine.alloc(size, stream);
        self.take(size, stream, before, result)
    }

    /// Allocates as PyTorch does: first only from memory that is available at once, then by the
    /// ladder.
    pub(super) fn alloc_at_once(&mut self, size: u64, stream: StreamId) {
        if self.captures.silent == Some(stream) {
            return;
        }
        let before = self.engine.stats().allocation.all.current;
        let at_once = self.engine.alloc_at_once_for(size, stream, Tag::NONE);
        let result = match at_once {
            Ok(Some(address)) => Ok(address),
            Ok(None) => self.engine.alloc_for(size, stream, Tag::NONE),
            Err(error) => Err(error),
        };
        self.take(size, stream, before, result);
    }

    /// Checks the result of a request and adds the allocation to the model. `before` is the number
    /// of allocations that were live when the request began.
    pub(super) fn take(
        &mut self,
        size: u64,
        stream: StreamId,
        before: u64,
        result: Result<u64, AllocError>,
    ) -> Option<u64> {
        let undisturbed = !self.settle();
        match result {
            Ok(0) => assert_eq!(size, 0, "null for a size that is not zero"),
            Ok(address) => {
                let (block, requested) = self.engine.size_of(address).expect("a live allocation");
                assert_eq!(requested, size);
                assert!(block >= size && block.is_multiple_of(512) && address.is_multiple_of(512));
                let mut life = Life {
                    id: self.memory.next_life(),
                    address,
                    size: block,
                    requested: size,
                    spilled: self.engine.is_spilled(address),
                    stream,
                    memory: self.gpu.checked.behind(address, block),
                    work: Vec::new(),
                    captured: false,
                    others: BTreeSet::new(),
                };
                self.check_fresh(&life);
                self.work(&mut life, stream);
                self.bake(&life);
                self.memory.live.insert(address, life);
                return Some(address);
            }
            Err(AllocError::Driver(error)) => self.may_fail(Some(error)),
            Err(refused) => {
                let shortage = refused.shortage().expect("a shortage");
                assert_eq!(shortage.requested, size);
                let after = self.engine.stats().allocation.all.current;
                assert!(after == before || !undisturbed, "a refusal leaks");
            }
        }
        None
    }

    pub(super) fn prefetch(&mut self, size: u64, stream: StreamId) {
        if self.captures.silent == Some(stream) {
            return;
        }
        let prefetched = self.engine.prefetch(size, stream);
        if let Err(AllocError::Driver(error)) = prefetched {
            self.may_fail(Some(error));
        }
    }

    /// Runs a step of a training loop several times.
    pub(super) fn repeat(&mut self, kind: u8, stream: StreamId, times: u8) {
        if self.captures.silent == Some(stream) {
            return;
        }
        for _ in 0..=times % 4 {
            let mut random = Random(u64::from(kind % 8));
            let mut held = Vec::new();
            for index in 0..3 + kind % 5 {
                let size = (1 << 20) + random.next() % (20 << 20);
                held.extend(self.request(size, stream));
                if index % 3 == 2 && held.len() > 1 {
                    self.free(held.remove(0));
                }
                self.check();
            }
            for address in held {
                self.free(address);
                self.check();
            }
        }
    }
}

/// Work on allocations.
impl World {
    /// Queues work that uses an allocation.
    fn work(&self, life: &mut Life, stream: StreamId) {
        let captured = self.captures.joined().contains(&stream);
        let work = self.sim.launch(stream);
        if captured {
            life.captured = true;
        } else {
            self.gpu.checked.work(life.address, life.size, stream, life.id);
            life.work.push((stream, work));
        }
    }

    /// Uses an allocation on another stream, which is recorded with the engine.
    pub(super) fn use_on(&mut self, index: u16, stream: StreamId) {
        let silent = self.captures.silent == Some(stream);
        let Some(address) = self.memory.pick(index).filter(|_| !silent) else {
            return;
        };
        let Some(mut life) = self.memory.live.remove(&address) else { return };
        self.engine.record_stream(address, stream).expect("a live allocation");
        // A correct program orders its uses of one allocation. It also orders uses of a graph's
        // outputs after the replays.
        if life.captured {
            self.gpu.checked.wait_for_all(stream);
        } else {
            self.gpu.checked.wait(stream, life.stream);
        }
        life.others.insert(stream);
        self.work(&mut life, stream);
        self.memory.live.insert(address, life);
    }

    pub(super) fn record_unknown(&self, address: u64) {
        if !self.memory.live.contains_key(&address) {
            let unknown = Err(AddressError::Unknown { address });
            assert_eq!(self.engine.record_stream(address, StreamId(1)), unknown);
        }
    }
}

/// Frees.
impl World {
    pub(super) fn free_one(&mut self, index: u16) {
        if let Some(address) = self.memory.pick(index) {
            self.free(address);
        }
    }

    /// Whether the program may free an allocation now. A free records an event on each stream that
    /// the program recorded for the allocation; a silent capture of such a stream would break.
    pub(super) fn may_free(&self, address: u64) -> bool {
        let named = self.memory.live.get(&address).map(|life| &life.others);
        self.captures.silent.is_none_or(|silent| named.is_none_or(|named| !named.contains(&silent)))
    }

    /// Frees an allocation, and checks that a second free is refused.
    pub(super) fn free(&mut self, address: u64) {
        if !self.may_free(address) {
            return;
        }
        let freed = self.engine.free(address);
        let again = self.engine.free(address);
        assert_eq!(again, Err(AddressError::Unknown { address }), "freed twice");
        self.freed(address, &freed);
    }

    /// Moves a freed allocation to the past.
    pub(super) fn freed(&mut self, address: u64, freed: &Result<(), AddressError>) {
        let life = self.memory.live.remove(&address).expect("a live allocation");
        if !self.pools.open.is_empty() || freed.is_err() {
            // The engine records the events of this free later.
            self.streams.deferred.extend(life.others.iter().copied());
        }
        self.memory.past.push(life);
        match freed {
            Ok(()) => {}
            Err(AddressError::Driver { source, .. }) => self.may_fail(Some(*source)),
            Err(error) => panic!("a live allocation is not freed: {error}"),
        }
    }

    pub(super) fn free_unknown(&self, address: u64) {
        if address != 0 && !self.memory.live.contains_key(&address) {
            let unknown = Err(AddressError::Unknown { address });
            assert_eq!(self.engine.free(address), unknown);
        }
    }

    pub(super) fn empty_cache(&mut self) {
        let emptied = self.engine.empty_cache();
        self.events_recorded(emptied.is_ok());
        self.may_fail(emptied.err());
    }

    pub(super) fn trim(&mut self, after: Duration) {
        self.clock.advance(after);
        self.may_fail(self.engine.trim().err());
    }
}
