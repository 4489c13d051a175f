//! What a program does not need goes back by itself, and never to anybody's harm.

mod common;

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Arc;
    use std::time::Duration;

    use cushion_core::driver::{Call, FailWhen, Fault};
    use cushion_core::size::MIB;
    use cushion_core::{
        CheckedDriver, Clock, Engine, EngineConfig, LastingStreams, Options, SimClock, SimConfig,
        SimDriver, StreamId,
    };

    use crate::common::{POOL, S0, S1, every_stream};

    /// How often somebody looks.
    const LOOK: Duration = Duration::from_secs(2);

    /// How many looks it takes from the last need to the last page, with the 30 seconds of the default: windows of
    /// 15 seconds end at every eighth look, the third that ends finds the surplus, and one look later it goes.
    const LOOKS: usize = 3 * 8 + 1;

    /// A device, and somebody who looks.
    struct Trimmed {
        gpu: Engine<Arc<CheckedDriver<Arc<SimDriver>>>>,
        sim: Arc<SimDriver>,
        clock: Arc<SimClock>,
    }

    fn trimmed(mib: u64, conf: &str) -> Trimmed {
        let sim = Arc::new(SimDriver::new(SimConfig::with_capacity(mib * MIB)));
        let driver = Arc::new(CheckedDriver::new(Arc::clone(&sim)));
        let clock = Arc::new(SimClock::new(Arc::clone(&sim)));
        let options = Options::parse(&format!("paged:True{conf}")).unwrap().options;
        let its_clock: Arc<dyn Clock> = Arc::clone(&clock) as _;
        let config = EngineConfig { options, clock: its_clock, ..EngineConfig::default() };
        Trimmed { gpu: Engine::with_config(driver, config), sim, clock }
    }

    impl Trimmed {
        fn take(&self, mib: u64, stream: StreamId) -> u64 {
            self.gpu.alloc(mib * MIB, stream).unwrap()
        }

        fn free(&self, addresses: impl IntoIterator<Item = u64>) {
            addresses.into_iter().for_each(|address| self.gpu.free(address).unwrap());
        }

        /// So much was needed once.
        fn once(&self, mib: u64, stream: StreamId) {
            let address = self.take(mib, stream);
            self.free([address]);
        }

        /// Time passes, and somebody looks; what was given back, in MiB.
        fn look(&self) -> u64 {
            self.clock.advance(LOOK);
            let given_back = self.gpu.trim().unwrap();
            self.gpu.check_invariants().unwrap();
            assert_eq!(self.gpu.stats().reserved_bytes.all.current, self.sim.held());
            given_back / MIB
        }

        fn looks(&self, count: usize) -> u64 {
            (0..count).map(|_| self.look()).sum()
        }

        /// Looks until pages are out of their lanes: a request for them would find nothing.
        fn until_leaving(&self, mib: u64, stream: StreamId) {
            for _ in 0..LOOKS {
                if !self.gpu.would_hit(mib * MIB, stream) {
                    return;
                }
                assert_eq!(self.look(), 0);
            }
            panic!("nothing leaves");
        }

        fn held(&self) -> u64 {
            self.sim.held() / MIB
        }

        fn calls(&self, call: Call) -> u64 {
            self.sim.counts().of(call)
        }
    }

    #[test]
    fn what_is_not_needed_any_more_goes_in_time() {
        let it = trimmed(4096, "");
        it.gpu.trim().unwrap();
        let kept = it.take(40, S0);
        it.once(1000, S0);
        let held = it.held();
        // Not before it was not needed for 30 seconds.
        assert_eq!(it.looks(15), 0);
        assert_eq!(it.held(), held);
        assert!(it.looks(LOOKS - 15) > 0);
        assert!(it.held() <= 140, "{} MiB are held", it.held());
        // And what is left stays.
        let held = it.held();
        assert_eq!(it.looks(100), 0);
        assert_eq!(it.held(), held);
        it.free([kept]);
        it.looks(LOOKS + 8);
        assert_eq!(it.held(), 0);
    }

    #[test]
    fn it_can_be_looked_seldom() {
        let it = trimmed(4096, ",trim_ms:1000");
        it.gpu.trim().unwrap();
        it.once(1000, S0);
        let given_back: Vec<bool> = (0..4).map(|_| it.look() > 0).collect();
        assert_eq!(given_back, [false, false, false, true]);
        assert_eq!(it.held(), 0);
    }

    #[test]
    fn nothing_waits_for_the_device() {
        let it = trimmed(1024, "");
        it.once(500, S0);
        it.looks(2 * LOOKS);
        assert_eq!(it.held(), 0);
        let waits = [Call::StreamSynchronize, Call::EventSynchronize];
        assert_eq!(waits.map(|call| it.calls(call)), [0, 0]);
    }

    #[test]
    fn memory_with_work_on_it_stays() {
        let it = trimmed(1024, "");
        let address = it.take(500, S0);
        let work = it.sim.launch(S0);
        it.gpu.driver().work(address, 500 * MIB, S0, 1);
        it.free([address]);
        let held = it.held();
        assert_eq!(it.looks(3 * LOOKS), 0);
        assert_eq!(it.held(), held);
        assert!(!it.sim.is_finished(S0, work));
        it.sim.finish_all();
        it.looks(1);
        assert_eq!(it.held(), 0);
    }

    #[test]
    fn memory_in_use_stays() {
        let it = trimmed(1024, "");
        let blocks: Vec<u64> = (0..30).map(|_| it.take(16, S0)).collect();
        let (kept, freed): (Vec<_>, Vec<_>) =
            blocks.iter().enumerate().partition(|(i, _)| i % 5 == 0);
        it.free(freed.iter().map(|(_, address)| **address));
        let behind = || -> Vec<_> {
            kept.iter().map(|(_, address)| it.gpu.driver().behind(**address, 16 * MIB)).collect()
        };
        let before = behind();
        it.looks(3 * LOOKS);
        assert_eq!(behind(), before);
        it.free(kept.iter().map(|(_, address)| **address));
    }

    #[test]
    fn a_request_that_misses_takes_back_what_is_leaving() {
        let it = trimmed(4096, "");
        it.gpu.trim().unwrap();
        it.once(1000, S0);
        it.until_leaving(1000, S0);
        let (before, hits) = (it.sim.counts(), it.gpu.stats().hits);
        let address = it.take(1000, S0);
        assert_eq!(it.sim.counts(), before, "no driver call");
        assert_eq!(it.gpu.stats().hits, hits + 1);
        // It was needed: nothing goes before it was not for as long again.
        it.free([address]);
        assert_eq!(it.looks(15), 0);
        it.looks(2 * LOOKS);
        assert_eq!(it.held(), 0);
    }

    #[test]
    fn no_request_is_refused_because_memory_is_leaving() {
        for (small, large) in [(200, 200), (100, 230), (1, 240)] {
            let it = trimmed(256, ",wait_ms:3000");
            it.gpu.trim().unwrap();
            it.once(small, S0);
            it.once(200, S0);
            it.until_leaving(200, S0);
            let address = it.take(large, S0);
            it.free([address]);
        }
        // On another stream, too, and for what has to be got at once.
        let it = trimmed(256, ",wait_ms:0");
        it.gpu.trim().unwrap();
        it.once(200, S0);
        it.until_leaving(200, S0);
        let address = it.take(200, S1);
        it.free([address]);
        let it = trimmed(256, ",wait_ms:0");
        it.gpu.trim().unwrap();
        it.once(200, S0);
        it.until_leaving(200, S0);
        let tag = cushion_core::Tag::NONE;
        assert!(it.gpu.alloc_at_once_for(200 * MIB, S0, tag).unwrap().is_some());
    }

    #[test]
    fn a_program_that_goes_on_with_less_comes_down() {
        let it = trimmed(4096, "");
        it.gpu.trim().unwrap();
        let weights = it.take(100, S0);
        let step = |blocks: usize| {
            let live: Vec<u64> = (0..blocks).map(|i| it.take(10 + i as u64 % 7, S0)).collect();
            it.sim.launch(S0);
            it.sim.finish_all();
            it.free(live);
        };
        (0..3).for_each(|_| step(100));
        assert!(it.held() > 1300);
        let mut calls = 0;
        for look in 1..=LOOKS {
            let before = it.sim.counts();
            (0..50).for_each(|_| step(20));
            let after = it.sim.counts();
            calls += after.of(Call::Map) + after.of(Call::Create)
                - before.of(Call::Map)
                - before.of(Call::Create);
            it.look();
            if look < 15 {
                assert!(it.held() > 1300);
            }
        }
        // 100 MiB of weights and 20 blocks of 10 to 16 MiB, a page more at most.
        assert!(it.held() <= 100 + 257 + 100, "{} MiB are held", it.held());
        assert_eq!(calls, 0, "and pays nothing for it");
        it.free([weights]);
    }

    #[test]
    fn a_program_that_needs_what_it_holds_now_and_then_is_left_alone() {
        let it = trimmed(4096, "");
        it.gpu.trim().unwrap();
        // A block that is needed for a moment between two looks, too short for the peaks to tell.
        it.once(1000, S0);
        it.until_leaving(1000, S0);
        let mut recalled = 0;
        let before = it.sim.counts();
        for _ in 0..40 {
            recalled += u64::from(!it.gpu.would_hit(1000 * MIB, S0));
            it.once(1000, S0);
            it.look();
        }
        let after = it.sim.counts();
        assert_eq!(after.of(Call::Unmap), before.of(Call::Unmap));
        assert_eq!(after.of(Call::Map), before.of(Call::Map));
        assert_eq!(recalled, 1);
    }

    #[test]
    fn nothing_is_done_during_a_capture() {
        let it = trimmed(1024, "");
        it.gpu.trim().unwrap();
        it.once(500, S0);
        it.until_leaving(500, S0);
        it.gpu.begin_allocate_to_pool(POOL, every_stream()).unwrap();
        it.sim.begin_capture(S1);
        let before = it.sim.counts();
        assert_eq!(it.looks(3 * LOOKS), 0);
        assert_eq!(it.sim.counts(), before);
        // What is leaving can be had all the same.
        it.gpu.end_allocate_to_pool(POOL).unwrap();
        it.gpu.begin_allocate_to_pool(POOL, Box::new(|stream| stream == S1)).unwrap();
        let before = it.sim.counts();
        let address = it.take(500, S0);
        assert_eq!(it.sim.counts(), before);
        it.free([address]);
        it.sim.end_capture(S1);
        it.gpu.end_allocate_to_pool(POOL).unwrap();
        it.looks(2 * LOOKS);
        assert_eq!(it.held(), 0);
    }

    #[test]
    fn a_capture_can_begin_at_any_time() {
        let it = trimmed(1024, "");
        it.gpu.trim().unwrap();
        let address = it.take(500, S0);
        it.sim.launch(S0);
        it.free([address]);
        // Work that ends only once the capture has begun.
        for _ in 0..2 * LOOKS {
            it.look();
            it.gpu.begin_allocate_to_pool(POOL, every_stream()).unwrap();
            it.gpu.end_allocate_to_pool(POOL).unwrap();
        }
        assert!(it.held() > 0);
        it.sim.finish_all();
        it.looks(2);
        assert_eq!(it.held(), 0);
    }

    #[test]
    fn a_capture_that_nobody_announced_is_left_alone() {
        let it = trimmed(1024, "");
        it.gpu.set_lasting_streams(LastingStreams::All);
        it.gpu.trim().unwrap();
        it.once(500, S1);
        it.sim.begin_capture(S1);
        it.looks(2 * LOOKS);
        assert!(it.held() >= 500);
        assert_eq!([Call::EventRecord, Call::EventQuery].map(|call| it.calls(call)), [0, 0]);
        it.sim.end_capture(S1);
        it.until_leaving(500, S1);
        it.sim.begin_capture(S1);
        assert_eq!(it.looks(LOOKS), 0);
        assert_eq!(it.calls(Call::EventQuery), 0);
        it.sim.end_capture(S1);
        it.looks(LOOKS);
        assert_eq!(it.held(), 0);
    }

    #[test]
    fn a_private_pool_keeps_its_memory_until_the_cache_is_emptied() {
        let it = trimmed(1024, "");
        it.gpu.trim().unwrap();
        it.gpu.begin_allocate_to_pool(POOL, every_stream()).unwrap();
        it.once(500, S0);
        it.gpu.end_allocate_to_pool(POOL).unwrap();
        let held = it.held();
        assert_eq!(it.looks(2 * LOOKS), 0);
        assert_eq!(it.held(), held);
        while it.gpu.pool_uses(POOL).unwrap() > 0 {
            it.gpu.release_pool(POOL).unwrap();
        }
        // A graph may still run, on any stream.
        assert_eq!(it.looks(2 * LOOKS), 0);
        assert_eq!(it.held(), held);
        it.gpu.empty_cache().unwrap();
        assert_eq!(it.held(), 0);
        assert!(it.gpu.pool_uses(POOL).is_err(), "the pool is still there");
    }

    #[test]
    fn memory_of_streams_that_may_be_gone_stays() {
        let it = trimmed(1024, "");
        it.gpu.set_lasting_streams(LastingStreams::These(BTreeSet::from([StreamId(5)])));
        it.gpu.trim().unwrap();
        it.once(100, S0);
        it.once(300, S1);
        it.once(200, StreamId(5));
        it.looks(2 * LOOKS);
        assert!((300..400).contains(&it.held()), "{}", it.held());
        it.gpu.empty_cache().unwrap();
        assert_eq!(it.held(), 0);
    }

    #[test]
    fn trimming_can_be_turned_off() {
        let it = trimmed(1024, ",trim_ms:0");
        it.once(500, S0);
        let before = it.sim.counts();
        assert_eq!(it.looks(5 * LOOKS), 0);
        assert_eq!(it.sim.counts(), before);
        // Also while something leaves.
        let it = trimmed(1024, "");
        it.gpu.trim().unwrap();
        let address = it.take(500, S0);
        it.sim.launch(S0);
        it.free([address]);
        it.until_leaving(500, S0);
        it.gpu.configure("trim_ms:0").unwrap();
        assert_eq!(it.look(), 0);
        assert!(it.gpu.would_hit(500 * MIB, S0));
    }

    #[test]
    fn other_policies_keep_what_pytorch_keeps() {
        for conf in [",expandable_segments:True,paged:False", ",paged:False"] {
            let it = trimmed(1024, conf);
            it.once(500, S0);
            let before = it.sim.counts();
            assert_eq!(it.looks(3 * LOOKS), 0);
            assert_eq!(it.sim.counts(), before);
        }
    }

    #[test]
    fn what_is_leaving_goes_with_all_that_is_cached() {
        let it = trimmed(1024, "");
        it.gpu.trim().unwrap();
        it.once(500, S0);
        it.until_leaving(500, S0);
        assert_eq!(it.gpu.page_figures().free, it.sim.held());
        it.gpu.empty_cache().unwrap();
        it.gpu.check_invariants().unwrap();
        assert_eq!(it.held(), 0);
    }

    #[test]
    fn nothing_is_left_of_an_engine_that_ends_while_memory_is_leaving() {
        let it = trimmed(1024, "");
        it.gpu.trim().unwrap();
        it.once(500, S0);
        it.until_leaving(500, S0);
        let Trimmed { gpu, sim, .. } = it;
        drop(gpu);
        assert_eq!(sim.held(), 0);
        let counts = sim.counts();
        assert_eq!(counts.of(Call::EventCreate), counts.of(Call::EventDestroy));
    }

    #[test]
    fn a_driver_that_fails_loses_nothing() {
        for call in
            [Call::EventCreate, Call::EventRecord, Call::EventQuery, Call::Unmap, Call::Release]
        {
            for nth in 1..4 {
                let it = trimmed(1024, ",page_mb:16");
                it.gpu.trim().unwrap();
                let address = it.take(500, S0);
                it.free([address]);
                it.sim.fail(FailWhen::Nth(call, nth), Fault::Failed(999));
                for _ in 0..2 * LOOKS {
                    it.clock.advance(LOOK);
                    let _ = it.gpu.trim();
                    it.gpu.check_invariants().unwrap();
                }
                it.sim.clear_failures();
                it.gpu.empty_cache().unwrap();
                assert_eq!(it.held(), 0, "{call:?} {nth}");
            }
        }
    }
}
