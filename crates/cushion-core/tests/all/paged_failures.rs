//! Under `paged`, a failed driver call loses no memory, no addresses and no events. One program
//! stitches, splits, borrows, captures, trims and empties the cache. It runs once for each driver
//! call that it makes, with that call failing.

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Arc;
    use std::time::Duration;

    use cushion_core::driver::{Bytes, Call, CallCounts, FailWhen, Fault};
    use cushion_core::size::{KIB, MIB};
    use cushion_core::{LastingStreams, PoolError, SimClock, SimDriver, StreamId};

    use crate::common::{CheckedGpu, POOL, S0, S1, S2, checked_gpu_with_clock};

    const FAULTS: [Fault; 2] = [Fault::OutOfMemory, Fault::Failed(999)];

    /// Which mechanisms the program exercised.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
    struct Seen {
        /// The most stitches at one time.
        stitches: usize,
        /// Whether a page was split.
        split: bool,
        /// Whether a stream borrowed memory of another stream.
        borrowed: bool,
        /// Bytes that `trim` released.
        trimmed: u64,
        /// Whether detached memory served a request.
        recalled: bool,
        /// Whether a stitch served a request of the private pool.
        stitched_in_pool: bool,
    }

    /// An allocation. `life` identifies it for the checked driver.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    struct Block {
        address: u64,
        size: u64,
        life: u64,
    }

    /// A program that continues after every failed call.
    struct Program {
        gpu: CheckedGpu,
        sim: Arc<SimDriver>,
        clock: Arc<SimClock>,
        live: Vec<Block>,
        lives: u64,
        /// The blocks that the captured graph uses, and the memory behind them.
        captured: Vec<(Block, Vec<Bytes>)>,
        seen: Seen,
    }

    impl Program {
        fn new() -> Self {
            let conf = "paged:True,page_mb:16,trim_ms:1000,wait_ms:0";
            let (gpu, sim, clock) = checked_gpu_with_clock(512, conf);
            gpu.set_lasting_streams(LastingStreams::These(BTreeSet::from([S1])));
            let (live, captured, seen) = (Vec::new(), Vec::new(), Seen::default());
            Self { gpu, sim, clock, live, lives: 0, captured, seen }
        }

        /// Checks the invariants and the statistics, and that the graph's memory has not moved.
        fn check(&mut self) {
            self.gpu.check_invariants().unwrap();
            assert_eq!(self.gpu.stats().reserved_bytes.all.current, self.sim.held());
            assert_eq!(self.gpu.stats().allocation.all.current, self.live.len() as u64);
            for (block, memory) in &self.captured {
                assert_eq!(&self.gpu.driver().behind(block.address, block.size), memory);
            }
            self.seen.stitches = self.seen.stitches.max(self.gpu.page_figures().ranges);
        }

        /// Allocates a block and queues work on it, unless the driver fails.
        fn take(&mut self, bytes: u64, stream: StreamId) -> Option<Block> {
            let address = self.gpu.alloc(bytes, stream).ok();
            let block = address.map(|address| {
                self.lives += 1;
                let size = self.gpu.size_of(address).unwrap().0;
                let block = Block { address, size, life: self.lives };
                self.live.push(block);
                self.seen.borrowed |= self.gpu.stream_of(address) != Some(stream);
                self.work(block, stream);
                block
            });
            self.check();
            block
        }

        fn work(&self, block: Block, stream: StreamId) {
            self.sim.launch(stream);
            self.gpu.driver().work(block.address, block.size, stream, block.life);
        }

        /// Queues work on another stream, after `record_stream`.
        fn use_on(&mut self, block: Option<Block>, stream: StreamId) {
            if let Some(block) = block {
                self.gpu.record_stream(block.address, stream).unwrap();
                self.gpu.driver().wait(stream, S0);
                self.work(block, stream);
            }
            self.check();
        }

        fn free(&mut self, blocks: impl IntoIterator<Item = Block>) {
            for block in blocks {
                // If an event cannot be recorded, the free completes later.
                let _ = self.gpu.free(block.address);
                self.live.retain(|it| *it != block);
                self.check();
            }
        }

        fn take_and_free(&mut self, bytes: u64, stream: StreamId) {
            let block = self.take(bytes, stream);
            self.free(block);
        }

        /// Calls `trim` this often, with half a second before each call.
        fn trim(&mut self, count: usize) {
            for _ in 0..count {
                self.clock.advance(Duration::from_millis(500));
                self.seen.trimmed += self.gpu.trim().unwrap_or(0);
                self.check();
            }
        }

        fn empty_cache(&mut self) {
            let _ = self.gpu.empty_cache();
            self.check();
        }

        /// Frees every third block, and allocates stitches of the free pages: on their own stream,
        /// with work of another stream, and borrowed by another stream. Returns the live blocks.
        fn stitch(&mut self) -> Vec<Block> {
            let mut blocks: Vec<Block> = (0..30).filter_map(|_| self.take(7 * MIB, S0)).collect();
            // After that more is freed than live: the engine assumes that the program is loaded.
            for _ in 0..40 {
                if let Ok(address) = self.gpu.alloc(7 * MIB, S0) {
                    let _ = self.gpu.free(address);
                }
            }
            let free: Vec<Block> = blocks.iter().copied().skip(1).step_by(3).collect();
            blocks.retain(|block| !free.contains(block));
            self.free(free);
            let large = self.take(50 * MIB, S0);
            self.use_on(large, S2);
            self.free(large);
            self.sim.finish(S2);
            let _ = self.gpu.process_events();
            self.take_and_free(50 * MIB, S0);
            self.take_and_free(45 * MIB, S0);
            self.sim.finish(S0);
            self.take_and_free(20 * MIB, S1);
            self.sim.finish(S1);
            let _ = self.gpu.process_events();
            self.check();
            blocks
        }

        fn small(&mut self) {
            let small: Vec<Block> = (0..9).filter_map(|_| self.take(900 * KIB, S0)).collect();
            self.free(small.into_iter().skip(1));
            self.take_and_free(30 * MIB, S0);
        }

        /// Captures a graph on another stream, with a private pool.
        fn capture(&mut self) {
            let filter = Box::new(|stream| stream == S2);
            if self.gpu.begin_allocate_to_pool(POOL, filter).is_err() {
                return;
            }
            self.sim.begin_capture(S2);
            let mut blocks = Vec::new();
            for mib in [12, 12, 12, 12, 30, 44] {
                let stitches = self.gpu.page_figures().ranges;
                if let Ok(address) = self.gpu.alloc(mib * MIB, S2) {
                    self.seen.stitched_in_pool |= self.gpu.page_figures().ranges > stitches;
                    self.lives += 1;
                    let size = self.gpu.size_of(address).unwrap().0;
                    let block = Block { address, size, life: self.lives };
                    self.live.push(block);
                    self.captured.push((block, self.gpu.driver().behind(address, size)));
                    blocks.push(block);
                }
                self.check();
                if blocks.len() == 4 {
                    let free: Vec<Block> = blocks.iter().copied().step_by(2).collect();
                    self.free(free);
                }
            }
            // During the capture: a trim, and a request of the default pool.
            self.trim(1);
            self.take_and_free(9 * MIB, S0);
            self.sim.end_capture(S2);
            self.gpu.end_allocate_to_pool(POOL).unwrap();
            let left: Vec<Block> =
                blocks.into_iter().filter(|block| self.live.contains(block)).collect();
            self.free(left);
        }

        /// Allocates near the limit, so that pages are split.
        fn near_limit(&mut self) {
            let held = self.sim.held();
            self.gpu.set_memory_limit(Some(held + 8 * MIB));
            for mib in [33, 5, 21, 3, 41, 5] {
                self.sim.finish(S0);
                let before = self.sim.counts();
                let pages = self.gpu.page_figures().pages;
                let block = self.take(mib * MIB, S0);
                let unmapped = self.sim.counts().of(Call::Unmap) > before.of(Call::Unmap);
                self.seen.split |= unmapped && self.gpu.page_figures().pages > pages;
                if mib % 2 == 1 && mib > 20 {
                    self.free(block);
                }
            }
            self.gpu.set_memory_limit(None);
        }

        /// Trims until pages are detached, then allocates them again.
        fn recall(&mut self) {
            let hits = |program: &Self, mib: u64| program.gpu.would_hit(mib * MIB, S0);
            let largest = (1..200).rev().find(|&mib| hits(self, mib)).unwrap_or(1);
            for _ in 0..8 {
                if hits(self, largest) {
                    self.trim(1);
                }
            }
            let is_detached = !hits(self, largest);
            let mapped = self.sim.counts().of(Call::Map);
            let block = self.take(largest * MIB, S0);
            let is_recalled = block.is_some() && self.sim.counts().of(Call::Map) == mapped;
            self.seen.recalled |= is_detached && is_recalled;
            self.free(block);
        }

        fn run(&mut self) {
            self.trim(1);
            let blocks = self.stitch();
            self.small();
            self.capture();
            self.near_limit();
            self.free(blocks.into_iter().step_by(2));
            self.sim.finish_all();
            self.recall();
            self.sim.finish_all();
            self.trim(12);
            self.release_pool();
            self.trim(6);
            self.empty_cache();
            let _ = self.gpu.prefetch(60 * MIB, S1);
            self.check();
            self.take_and_free(60 * MIB, S1);
            self.stitch();
            self.empty_cache();
        }

        /// Releases the private pool, as a program does that destroys its graph.
        fn release_pool(&mut self) {
            self.captured.clear();
            match self.gpu.release_pool(POOL) {
                Ok(()) | Err(PoolError::Unknown(_) | PoolError::Released(_)) => {}
                Err(error) => panic!("{error}"),
            }
        }

        /// Ends the scripted failures, frees everything, and asserts that no memory is reserved.
        fn finish(mut self) -> (Seen, CallCounts) {
            self.sim.clear_failures();
            let live = self.live.clone();
            self.free(live);
            self.release_pool();
            self.sim.finish_all();
            self.gpu.empty_cache().unwrap();
            self.check();
            assert_eq!(self.sim.held(), 0);
            assert_eq!(self.gpu.page_figures().pages, 0);
            assert_eq!(self.gpu.page_figures().ranges, 0);
            assert_eq!(self.gpu.pool_uses(POOL), Err(PoolError::Unknown(POOL)));
            let Self { gpu, sim, seen, .. } = self;
            drop(gpu);
            (seen, sim.counts())
        }
    }

    /// Returns how many more successful `create` calls than `destroy` calls there were, if one call
    /// of the kind `failed` failed.
    fn left(counts: CallCounts, (create, destroy): (Call, Call), failed: Option<Call>) -> i64 {
        let of = |call| counts.of(call).cast_signed() - i64::from(failed == Some(call));
        of(create) - of(destroy)
    }

    /// Asserts that all pages, mappings, addresses and events were returned to the driver.
    fn assert_nothing_is_left(counts: CallCounts, failed: Option<Call>, what: &str) {
        for pair in [
            (Call::Create, Call::Release),
            (Call::Map, Call::Unmap),
            (Call::Reserve, Call::Unreserve),
            (Call::EventCreate, Call::EventDestroy),
        ] {
            assert_eq!(left(counts, pair, failed), 0, "unequal numbers of {pair:?}: {what}");
        }
    }

    #[test]
    fn the_program_exercises_every_mechanism() {
        let mut program = Program::new();
        program.run();
        let (seen, counts) = program.finish();
        assert!(seen.stitches >= 2 && seen.trimmed > 0, "{seen:?}");
        assert!(seen.split && seen.borrowed && seen.recalled && seen.stitched_in_pool, "{seen:?}");
        assert_nothing_is_left(counts, None, "nothing failed");
    }

    #[test]
    fn nothing_is_lost_if_any_one_call_fails() {
        let mut program = Program::new();
        program.run();
        let made = program.sim.counts();
        program.finish();
        for call in Call::ALL {
            for (nth, fault) in (1..=made.of(call)).flat_map(|nth| FAULTS.map(|it| (nth, it))) {
                let mut program = Program::new();
                program.sim.fail(FailWhen::Nth(call, nth), fault);
                program.run();
                let (_, counts) = program.finish();
                let what = format!("call {nth} of {call:?}, {fault:?}");
                assert_nothing_is_left(counts, Some(call), &what);
            }
        }
    }

    #[test]
    fn nothing_is_lost_if_all_calls_of_a_kind_fail() {
        for (call, fault) in Call::ALL.into_iter().flat_map(|call| FAULTS.map(|it| (call, it))) {
            let mut program = Program::new();
            let blocks = program.stitch();
            program.sim.fail(FailWhen::Every(call), fault);
            program.small();
            program.near_limit();
            program.free(blocks);
            program.trim(12);
            program.empty_cache();
            program.stitch();
            program.finish();
        }
    }
}
