//! Under `paged`, whichever call of the driver fails, and however, nothing is lost: one program that stitches, splits,
//! borrows, captures, trims and empties is run once for each call that it makes, with that call failing.

mod common;

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Arc;
    use std::time::Duration;

    use cushion_core::driver::{Bytes, Call, CallCounts, FailWhen, Fault};
    use cushion_core::size::{KIB, MIB};
    use cushion_core::{
        CheckedDriver, Clock, Engine, EngineConfig, LastingStreams, Options, PoolError, SimClock,
        SimConfig, SimDriver, StreamId,
    };

    use crate::common::{POOL, S0, S1, S2};

    const FAULTS: [Fault; 2] = [Fault::OutOfMemory, Fault::Failed(999)];

    /// What was seen of what the program is there for.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
    struct Seen {
        /// The most ranges at once.
        ranges: usize,
        /// Whether a page was split.
        split: bool,
        /// Whether a stream got another's memory.
        borrowed: bool,
        /// Bytes that went by themselves.
        trimmed: u64,
        /// Whether what was on its way back served a request.
        recalled: bool,
        /// Whether the graph was served from a range, too.
        stitched_in_pool: bool,
    }

    /// An allocation, and whose work is on it.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    struct Block {
        address: u64,
        size: u64,
        life: u64,
    }

    /// A device that may fail, and a program that goes on.
    struct Program {
        gpu: Engine<Arc<CheckedDriver<Arc<SimDriver>>>>,
        checked: Arc<CheckedDriver<Arc<SimDriver>>>,
        sim: Arc<SimDriver>,
        clock: Arc<SimClock>,
        live: Vec<Block>,
        lives: u64,
        /// What a graph uses when it is replayed.
        baked: Vec<(Block, Vec<Bytes>)>,
        seen: Seen,
    }

    impl Program {
        fn new() -> Self {
            let sim = Arc::new(SimDriver::new(SimConfig::with_capacity(512 * MIB)));
            let checked = Arc::new(CheckedDriver::new(Arc::clone(&sim)));
            let clock = Arc::new(SimClock::new(Arc::clone(&sim)));
            let its_clock: Arc<dyn Clock> = Arc::clone(&clock) as _;
            let conf = "paged:True,page_mb:16,trim_ms:1000,wait_ms:0";
            let options = Options::parse(conf).unwrap().options;
            let config = EngineConfig { options, clock: its_clock, ..EngineConfig::default() };
            let gpu = Engine::with_config(Arc::clone(&checked), config);
            gpu.set_lasting_streams(LastingStreams::These(BTreeSet::from([S1])));
            let (live, baked, seen) = (Vec::new(), Vec::new(), Seen::default());
            Self { gpu, checked, sim, clock, live, lives: 0, baked, seen }
        }

        /// Everything agrees with everything, and what a graph uses is where it was.
        fn check(&mut self) {
            self.gpu.check_invariants().unwrap();
            assert_eq!(self.gpu.stats().reserved_bytes.all.current, self.sim.held());
            assert_eq!(self.gpu.stats().allocation.all.current, self.live.len() as u64);
            for (block, memory) in &self.baked {
                assert_eq!(&self.checked.behind(block.address, block.size), memory);
            }
            self.seen.ranges = self.seen.ranges.max(self.gpu.page_figures().ranges);
        }

        /// Allocates and works on it, unless the driver fails.
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
            self.checked.work(block.address, block.size, stream, block.life);
        }

        /// Work on another stream, which the engine is told of.
        fn use_on(&mut self, block: Option<Block>, stream: StreamId) {
            if let Some(block) = block {
                self.gpu.record_stream(block.address, stream).unwrap();
                self.checked.wait(stream, S0);
                self.work(block, stream);
            }
            self.check();
        }

        fn free(&mut self, blocks: impl IntoIterator<Item = Block>) {
            for block in blocks {
                // One whose event could not be recorded is freed all the same, later.
                let _ = self.gpu.free(block.address);
                self.live.retain(|it| *it != block);
                self.check();
            }
        }

        fn once(&mut self, bytes: u64, stream: StreamId) {
            let block = self.take(bytes, stream);
            self.free(block);
        }

        fn looks(&mut self, count: usize) {
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

        /// Free pieces, none of them large, and what is stitched of them: on its own stream, with work of another on
        /// it, and as a loan.
        fn stitch(&mut self) -> Vec<Block> {
            let mut blocks: Vec<Block> = (0..30).filter_map(|_| self.take(7 * MIB, S0)).collect();
            // Until more was freed than is live: what is loaded is there.
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
            self.once(50 * MIB, S0);
            self.once(45 * MIB, S0);
            self.sim.finish(S0);
            self.once(20 * MIB, S1);
            self.sim.finish(S1);
            let _ = self.gpu.process_events();
            self.check();
            blocks
        }

        fn small(&mut self) {
            let small: Vec<Block> = (0..9).filter_map(|_| self.take(900 * KIB, S0)).collect();
            self.free(small.into_iter().skip(1));
            self.once(30 * MIB, S0);
        }

        /// A graph on a side stream, with memory of its own.
        fn capture(&mut self) {
            let filter = Box::new(|stream| stream == S2);
            if self.gpu.begin_allocate_to_pool(POOL, filter).is_err() {
                return;
            }
            self.sim.begin_capture(S2);
            let mut blocks = Vec::new();
            for mib in [12, 12, 12, 12, 30, 44] {
                let ranges = self.gpu.page_figures().ranges;
                if let Ok(address) = self.gpu.alloc(mib * MIB, S2) {
                    self.seen.stitched_in_pool |= self.gpu.page_figures().ranges > ranges;
                    self.lives += 1;
                    let size = self.gpu.size_of(address).unwrap().0;
                    let block = Block { address, size, life: self.lives };
                    self.live.push(block);
                    self.baked.push((block, self.checked.behind(address, size)));
                    blocks.push(block);
                }
                self.check();
                if blocks.len() == 4 {
                    let free: Vec<Block> = blocks.iter().copied().step_by(2).collect();
                    self.free(free);
                }
            }
            // What goes on beside it: a look, and memory of the default pool.
            self.looks(1);
            self.once(9 * MIB, S0);
            self.sim.end_capture(S2);
            self.gpu.end_allocate_to_pool(POOL).unwrap();
            let left: Vec<Block> =
                blocks.into_iter().filter(|block| self.live.contains(block)).collect();
            self.free(left);
        }

        /// Near the limit, pages are split.
        fn tight(&mut self) {
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

        /// Memory is on its way back when a request needs it.
        fn recall(&mut self) {
            let hits = |program: &Self, mib: u64| program.gpu.would_hit(mib * MIB, S0);
            let most = (1..200).rev().find(|&mib| hits(self, mib)).unwrap_or(1);
            for _ in 0..8 {
                if hits(self, most) {
                    self.looks(1);
                }
            }
            let is_out = !hits(self, most);
            let mapped = self.sim.counts().of(Call::Map);
            let block = self.take(most * MIB, S0);
            let is_back = block.is_some() && self.sim.counts().of(Call::Map) == mapped;
            self.seen.recalled |= is_out && is_back;
            self.free(block);
        }

        fn run(&mut self) {
            self.looks(1);
            let blocks = self.stitch();
            self.small();
            self.capture();
            self.tight();
            self.free(blocks.into_iter().step_by(2));
            self.sim.finish_all();
            self.recall();
            self.sim.finish_all();
            self.looks(12);
            self.released();
            self.looks(6);
            self.empty_cache();
            let _ = self.gpu.prefetch(60 * MIB, S1);
            self.check();
            self.once(60 * MIB, S1);
            self.stitch();
            self.empty_cache();
        }

        /// The graph is gone.
        fn released(&mut self) {
            self.baked.clear();
            match self.gpu.release_pool(POOL) {
                Ok(()) | Err(PoolError::Unknown(_) | PoolError::Released(_)) => {}
                Err(error) => panic!("{error}"),
            }
        }

        /// Everything is freed, and the driver works again: nothing is held.
        fn finish(mut self) -> (Seen, CallCounts) {
            self.sim.clear_failures();
            let live = self.live.clone();
            self.free(live);
            self.released();
            self.sim.finish_all();
            self.gpu.empty_cache().unwrap();
            self.check();
            assert_eq!(self.sim.held(), 0);
            assert_eq!(self.gpu.page_figures().pages, 0);
            assert_eq!(self.gpu.page_figures().ranges, 0);
            assert_eq!(self.gpu.pool_uses(POOL), Err(PoolError::Unknown(POOL)));
            let Self { gpu, checked, sim, seen, .. } = self;
            drop(gpu);
            drop(checked);
            (seen, sim.counts())
        }
    }

    /// How many of these calls there were more than of those, if one `failed`.
    fn left(counts: CallCounts, (make, take_back): (Call, Call), failed: Option<Call>) -> i64 {
        let of = |call| counts.of(call).cast_signed() - i64::from(failed == Some(call));
        of(make) - of(take_back)
    }

    /// Pages, addresses and events go back to the driver, but for what `failed`.
    fn assert_nothing_is_left(counts: CallCounts, failed: Option<Call>, what: &str) {
        for pair in [
            (Call::Create, Call::Release),
            (Call::Map, Call::Unmap),
            (Call::Reserve, Call::Unreserve),
            (Call::EventCreate, Call::EventDestroy),
        ] {
            assert_eq!(left(counts, pair, failed), 0, "{pair:?} are left: {what}");
        }
    }

    #[test]
    fn the_program_does_what_it_is_there_for() {
        let mut program = Program::new();
        program.run();
        let (seen, counts) = program.finish();
        assert!(seen.ranges >= 2 && seen.trimmed > 0, "{seen:?}");
        assert!(seen.split && seen.borrowed && seen.recalled && seen.stitched_in_pool, "{seen:?}");
        assert_nothing_is_left(counts, None, "nothing failed");
    }

    #[test]
    fn nothing_is_lost_whichever_call_fails() {
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
    fn nothing_is_lost_when_all_calls_of_a_kind_fail() {
        for (call, fault) in Call::ALL.into_iter().flat_map(|call| FAULTS.map(|it| (call, it))) {
            let mut program = Program::new();
            let blocks = program.stitch();
            program.sim.fail(FailWhen::Every(call), fault);
            program.small();
            program.tight();
            program.free(blocks);
            program.looks(12);
            program.empty_cache();
            program.stitch();
            program.finish();
        }
    }
}
