//! The checks of the engine's promises.

use super::World;
use super::memory::Life;
use crate::{BlockUse, DriverError, Ladder};

impl World {
    /// Checks a new allocation: no other live allocation shares its memory, and no other stream
    /// still works on it.
    pub(super) fn check_fresh(&mut self, life: &Life) {
        let overlaps = |other: &Life| {
            life.memory.iter().any(|bytes| other.memory.iter().any(|other| other.overlap(bytes)))
        };
        let taken = self.memory.live.values().find(|other| overlaps(other));
        assert!(taken.is_none(), "{life:?} overlaps the live {taken:?}");
        let (sim, past) = (&self.sim, &mut self.memory.past);
        past.retain(|old| old.work.iter().any(|&(stream, work)| !sim.is_finished(stream, work)));
        for old in past.iter().filter(|old| overlaps(old)) {
            let busy = old
                .work
                .iter()
                .find(|&&(stream, work)| stream != life.stream && !sim.is_finished(stream, work));
            assert!(busy.is_none(), "{life:?} is handed out while {busy:?} uses it as {old:?}");
        }
    }

    /// Checks that a driver error is expected. It is if a failure was scripted, during a capture
    /// that the engine was not told of, and if PyTorch's ladder returns memory to the driver while
    /// another stream is being captured, as PyTorch does.
    pub(super) fn may_fail(&self, error: Option<DriverError>) {
        if let Some(error) = error {
            let beside_capture = self.ladder == Ladder::Torch && self.captures.current.is_some();
            let unknown_capture = self.captures.silent.is_some();
            assert!(self.failures_scripted || beside_capture || unknown_capture, "{error}");
        }
    }

    /// Checks what the engine reports about one live allocation.
    pub(super) fn ask(&self, index: u16) {
        let picked = self.memory.pick(index);
        let Some(life) = picked.and_then(|address| self.memory.live.get(&address)) else { return };
        let (engine, address) = (&self.engine, life.address);
        assert_eq!(engine.size_of(address), Some((life.size, life.requested)));
        // For a borrowed block it is the stream of the lender.
        assert!(engine.stream_of(address).is_some());
        assert_eq!(engine.is_spilled(address), life.spilled);
        assert!(engine.holds(address) && engine.holds(address + life.size - 1));
        let (base, size) = engine.base_of(address).expect("a live allocation");
        assert!(base <= address && address + life.size <= base + size, "not in its base");
        // All of the base is mapped: other processes receive the whole base.
        drop(self.gpu.checked.behind(base, size));
        let _ = engine.would_hit(life.size, life.stream);
        let inside = address + 1;
        assert_eq!((engine.size_of(inside), engine.base_of(inside)), (None, None));
    }

    /// Checks the engine's invariants, and its statistics against the model.
    pub(super) fn check(&self) {
        if let Err(violation) = self.engine.check_invariants() {
            panic!("{violation}");
        }
        let stats = self.engine.stats();
        assert_eq!(stats.reserved_bytes.all.current, self.sim.held(), "reserved and held differ");
        let (spilled, on_device): (Vec<&Life>, Vec<&Life>) =
            self.memory.live.values().partition(|life| life.spilled);
        assert_eq!(stats.allocation.all.current, on_device.len() as u64);
        let bytes: u64 = on_device.iter().map(|life| life.size).sum();
        assert_eq!(stats.allocated_bytes.all.current, bytes);
        let requested: u64 = on_device.iter().map(|life| life.requested).sum();
        assert!(stats.requested_bytes.all.current >= requested);
        assert_eq!(stats.spilled_allocation.current, spilled.len() as u64);
        assert_eq!(stats.spilled_bytes.current, self.sim.held_host(), "spilled and held differ");
        assert!(stats.spilled_bytes.current >= spilled.iter().map(|life| life.size).sum());
        assert_eq!(
            stats.shortages,
            stats.shortages_survived + stats.shortages_refused + stats.shortages_broken,
            "a shortage has no outcome"
        );
        assert!(self.engine.waiting() <= self.futures, "a request without a future waits");
        for (start, size, memory) in self.pools.baked.values().flatten() {
            let now = self.gpu.checked.behind(*start, *size);
            assert_eq!(&now, memory, "the memory at {start:#x} changed, but a graph uses it");
        }
    }

    /// Checks that a snapshot is complete and counts each page once.
    pub(super) fn check_snapshot(&self) {
        let snapshot = self.engine.snapshot();
        let mut end = 0;
        let mut live = 0;
        for segment in &snapshot.segments {
            assert!(segment.address >= end, "segments overlap or are out of order");
            end = segment.address;
            for block in &segment.blocks {
                assert_eq!(block.address, end, "a gap in a segment");
                end += block.size;
                live += usize::from(block.use_ == BlockUse::Live);
            }
            assert_eq!(end, segment.address + segment.size);
        }
        assert_eq!(live, self.memory.live.len());
        let on_device = snapshot.segments.iter().filter(|segment| !segment.spilled);
        let total: u64 = on_device.map(|segment| segment.size).sum();
        // No block shows a page whose release the driver refused.
        assert!(total <= snapshot.reserved, "a page is counted twice");
        assert!(total == snapshot.reserved || self.failures_scripted, "a page is missing");
    }
}
