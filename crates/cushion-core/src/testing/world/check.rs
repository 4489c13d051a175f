//! What the engine promises, checked after every action.

use super::{Life, World};
use crate::{BlockUse, DriverError, Ladder};

impl World {
    /// The oracle: memory handed out is nobody else's, and nobody is still at work on it.
    pub(super) fn check_fresh(&mut self, life: &Life) {
        let overlaps = |other: &Life| {
            life.memory.iter().any(|bytes| other.memory.iter().any(|other| other.overlap(bytes)))
        };
        let taken = self.live.values().find(|other| overlaps(other));
        assert!(taken.is_none(), "{life:?} overlaps the live {taken:?}");
        let sim = &self.sim;
        self.past.retain(|old| old.work.iter().any(|&(s, work)| !sim.is_finished(s, work)));
        for old in self.past.iter().filter(|old| overlaps(old)) {
            let busy = old.work.iter().find(|&&(stream, work)| {
                stream != life.stream && !self.sim.is_finished(stream, work)
            });
            assert!(busy.is_none(), "{life:?} is handed out while {busy:?} uses it as {old:?}");
        }
    }

    /// A driver error is in order only where one was scripted, where a capture is under way that the engine was not told
    /// of, or where PyTorch's ladder gives memory back beside a capture on another stream, as PyTorch does.
    pub(super) fn may_fail(&self, error: Option<DriverError>) {
        if let Some(error) = error {
            let beside_capture = self.ladder == Ladder::Torch && self.capture.is_some();
            let unknown_capture = self.silent.is_some();
            assert!(self.failures_scripted || beside_capture || unknown_capture, "{error}");
        }
    }

    /// What the engine knows of a block agrees with what it was asked for.
    pub(super) fn ask(&self, index: u16) {
        let Some(life) = self.pick(index).and_then(|address| self.live.get(&address)) else {
            return;
        };
        let (engine, address) = (&self.engine, life.address);
        assert_eq!(engine.size_of(address), Some((life.size, life.requested)));
        // Of one that is borrowed it is the lender.
        assert!(engine.stream_of(address).is_some());
        assert_eq!(engine.is_spilled(address), life.spilled);
        assert!(engine.holds(address) && engine.holds(address + life.size - 1));
        let (base, size) = engine.base_of(address).expect("a live allocation");
        assert!(base <= address && address + life.size <= base + size, "not in its base");
        // All of it is mapped: others are given the whole by its base.
        drop(self.gpu.checked.behind(base, size));
        let _ = engine.would_hit(life.size, life.stream);
        let inside = address + 1;
        assert_eq!((engine.size_of(inside), engine.base_of(inside)), (None, None));
    }

    pub(super) fn check(&self) {
        if let Err(violation) = self.engine.check_invariants() {
            panic!("{violation}");
        }
        let stats = self.engine.stats();
        assert_eq!(stats.reserved_bytes.all.current, self.sim.held(), "reserved and held differ");
        let (spilled, on_device): (Vec<&Life>, Vec<&Life>) =
            self.live.values().partition(|life| life.spilled);
        assert_eq!(stats.allocation.all.current, on_device.len() as u64);
        let bytes: u64 = on_device.iter().map(|life| life.size).sum();
        assert_eq!(stats.allocated_bytes.all.current, bytes);
        let requested: u64 = on_device.iter().map(|life| life.requested).sum();
        assert!(stats.requested_bytes.all.current >= requested);
        assert_eq!(stats.spilled_allocation.current, spilled.len() as u64);
        assert_eq!(stats.spilled_bytes.current, self.sim.held_host(), "host memory astray");
        assert!(stats.spilled_bytes.current >= spilled.iter().map(|life| life.size).sum());
        assert_eq!(
            stats.shortages,
            stats.shortages_survived + stats.shortages_refused + stats.shortages_broken,
            "a shortage without an end"
        );
        assert!(self.engine.waiting() <= self.futures, "somebody waits for ever");
        for (start, size, memory) in self.baked.values().flatten() {
            let now = self.gpu.checked.behind(*start, *size);
            assert_eq!(&now, memory, "{start:#x} is another memory, but a graph uses it");
        }
    }

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
        assert_eq!(live, self.live.len());
        let on_device = snapshot.segments.iter().filter(|segment| !segment.spilled);
        let total: u64 = on_device.map(|segment| segment.size).sum();
        // Pages that the driver would not take back are behind no block.
        assert!(total <= snapshot.reserved, "a page counted twice");
        assert!(total == snapshot.reserved || self.failures_scripted, "a page not shown");
    }
}
