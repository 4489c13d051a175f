//! Trimming releases memory that a program has not needed for a while. It never waits, and no
//! request is refused because of it.

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Arc;
    use std::time::Duration;

    use cushion_core::driver::{Call, FailWhen, Fault};
    use cushion_core::size::MIB;
    use cushion_core::{LastingStreams, SimClock, SimDriver, StreamId};

    use crate::common::{CheckedGpu, POOL, S0, S1, checked_gpu_with_clock, every_stream};

    /// Time between two calls of `trim`.
    const PERIOD: Duration = Duration::from_secs(2);

    /// Number of `trim` calls from the last use of a page to its release, with the default
    /// `trim_ms` of 30 seconds. A window of 15 seconds ends at every eighth call. The end of the
    /// third window finds the surplus, and the next call releases it.
    const TRIMS: usize = 3 * 8 + 1;

    /// An engine, its simulated device and its clock.
    struct Trimmed {
        gpu: CheckedGpu,
        sim: Arc<SimDriver>,
        clock: Arc<SimClock>,
    }

    fn trimmed(mib: u64, conf: &str) -> Trimmed {
        let (gpu, sim, clock) = checked_gpu_with_clock(mib, &format!("paged:True{conf}"));
        Trimmed { gpu, sim, clock }
    }

    impl Trimmed {
        fn take(&self, mib: u64, stream: StreamId) -> u64 {
            self.gpu.alloc(mib * MIB, stream).unwrap()
        }

        fn free(&self, addresses: impl IntoIterator<Item = u64>) {
            addresses.into_iter().for_each(|address| self.gpu.free(address).unwrap());
        }

        fn take_and_free(&self, mib: u64, stream: StreamId) {
            let address = self.take(mib, stream);
            self.free([address]);
        }

        /// Advances the clock by one period and calls `trim`; returns the MiB that it released.
        fn trim(&self) -> u64 {
            self.clock.advance(PERIOD);
            let released = self.gpu.trim().unwrap();
            self.gpu.check_invariants().unwrap();
            assert_eq!(self.gpu.stats().reserved_bytes.all.current, self.sim.held());
            released / MIB
        }

        fn trims(&self, count: usize) -> u64 {
            (0..count).map(|_| self.trim()).sum()
        }

        /// Trims until pages are detached: a request of `mib` MiB is then not a hit.
        fn until_detached(&self, mib: u64, stream: StreamId) {
            for _ in 0..TRIMS {
                if !self.gpu.would_hit(mib * MIB, stream) {
                    return;
                }
                assert_eq!(self.trim(), 0);
            }
            panic!("no page was detached");
        }

        fn held(&self) -> u64 {
            self.sim.held() / MIB
        }

        fn calls(&self, call: Call) -> u64 {
            self.sim.counts().of(call)
        }
    }

    #[test]
    fn unneeded_memory_is_released_after_a_while() {
        let it = trimmed(4096, "");
        it.gpu.trim().unwrap();
        let kept = it.take(40, S0);
        it.take_and_free(1000, S0);
        let held = it.held();
        // Memory stays for 30 seconds after its last use.
        assert_eq!(it.trims(15), 0);
        assert_eq!(it.held(), held);
        assert!(it.trims(TRIMS - 15) > 0);
        assert!(it.held() <= 140, "{} MiB are held", it.held());
        // The remaining memory stays.
        let held = it.held();
        assert_eq!(it.trims(100), 0);
        assert_eq!(it.held(), held);
        it.free([kept]);
        it.trims(TRIMS + 8);
        assert_eq!(it.held(), 0);
    }

    #[test]
    fn trim_works_if_it_is_called_rarely() {
        let it = trimmed(4096, ",trim_ms:1000");
        it.gpu.trim().unwrap();
        it.take_and_free(1000, S0);
        let released: Vec<bool> = (0..4).map(|_| it.trim() > 0).collect();
        assert_eq!(released, [false, false, false, true]);
        assert_eq!(it.held(), 0);
    }

    #[test]
    fn trim_does_not_wait_for_the_device() {
        let it = trimmed(1024, "");
        it.take_and_free(500, S0);
        it.trims(2 * TRIMS);
        assert_eq!(it.held(), 0);
        let waits = [Call::StreamSynchronize, Call::EventSynchronize];
        assert_eq!(waits.map(|call| it.calls(call)), [0, 0]);
    }

    #[test]
    fn memory_with_unfinished_work_stays() {
        let it = trimmed(1024, "");
        let address = it.take(500, S0);
        let work = it.sim.launch(S0);
        it.gpu.driver().work(address, 500 * MIB, S0, 1);
        it.free([address]);
        let held = it.held();
        assert_eq!(it.trims(3 * TRIMS), 0);
        assert_eq!(it.held(), held);
        assert!(!it.sim.is_finished(S0, work));
        it.sim.finish_all();
        it.trims(1);
        assert_eq!(it.held(), 0);
    }

    #[test]
    fn live_memory_stays() {
        let it = trimmed(1024, "");
        let blocks: Vec<u64> = (0..30).map(|_| it.take(16, S0)).collect();
        let (kept, freed): (Vec<_>, Vec<_>) =
            blocks.iter().enumerate().partition(|(i, _)| i % 5 == 0);
        it.free(freed.iter().map(|(_, address)| **address));
        let behind = || -> Vec<_> {
            kept.iter().map(|(_, address)| it.gpu.driver().behind(**address, 16 * MIB)).collect()
        };
        let before = behind();
        it.trims(3 * TRIMS);
        assert_eq!(behind(), before);
        it.free(kept.iter().map(|(_, address)| **address));
    }

    #[test]
    fn detached_memory_serves_a_request_as_a_hit() {
        let it = trimmed(4096, "");
        it.gpu.trim().unwrap();
        it.take_and_free(1000, S0);
        it.until_detached(1000, S0);
        let (before, hits) = (it.sim.counts(), it.gpu.stats().hits);
        let address = it.take(1000, S0);
        assert_eq!(it.sim.counts(), before, "no driver call");
        assert_eq!(it.gpu.stats().hits, hits + 1);
        // The memory was needed: it stays for another 30 seconds.
        it.free([address]);
        assert_eq!(it.trims(15), 0);
        it.trims(2 * TRIMS);
        assert_eq!(it.held(), 0);
    }

    #[test]
    fn no_request_is_refused_because_memory_is_detached() {
        for (small, large) in [(200, 200), (100, 230), (1, 240)] {
            let it = trimmed(256, ",wait_ms:3000");
            it.gpu.trim().unwrap();
            it.take_and_free(small, S0);
            it.take_and_free(200, S0);
            it.until_detached(200, S0);
            it.take_and_free(large, S0);
        }
        // The same on another stream, and with `alloc_at_once_for`.
        let it = trimmed(256, ",wait_ms:0");
        it.gpu.trim().unwrap();
        it.take_and_free(200, S0);
        it.until_detached(200, S0);
        it.take_and_free(200, S1);
        let it = trimmed(256, ",wait_ms:0");
        it.gpu.trim().unwrap();
        it.take_and_free(200, S0);
        it.until_detached(200, S0);
        let tag = cushion_core::Tag::NONE;
        assert!(it.gpu.alloc_at_once_for(200 * MIB, S0, tag).unwrap().is_some());
    }

    #[test]
    fn a_program_that_needs_less_reserves_less_without_driver_calls() {
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
        for count in 1..=TRIMS {
            let before = it.sim.counts();
            (0..50).for_each(|_| step(20));
            let after = it.sim.counts();
            calls += after.of(Call::Map) + after.of(Call::Create)
                - before.of(Call::Map)
                - before.of(Call::Create);
            it.trim();
            if count < 15 {
                assert!(it.held() > 1300);
            }
        }
        // 100 MiB of weights, 20 blocks of 10 to 16 MiB, and at most one page more.
        assert!(it.held() <= 100 + 257 + 100, "{} MiB are held", it.held());
        assert_eq!(calls, 0, "no page was mapped or created meanwhile");
        it.free([weights]);
    }

    #[test]
    fn memory_that_is_needed_from_time_to_time_is_not_released() {
        let it = trimmed(4096, "");
        it.gpu.trim().unwrap();
        // The program needs the block only for a moment between two trims.
        it.take_and_free(1000, S0);
        it.until_detached(1000, S0);
        let mut recalled = 0;
        let before = it.sim.counts();
        for _ in 0..40 {
            recalled += u64::from(!it.gpu.would_hit(1000 * MIB, S0));
            it.take_and_free(1000, S0);
            it.trim();
        }
        let after = it.sim.counts();
        assert_eq!(after.of(Call::Unmap), before.of(Call::Unmap));
        assert_eq!(after.of(Call::Map), before.of(Call::Map));
        assert_eq!(recalled, 1);
    }

    #[test]
    fn trim_makes_no_driver_call_during_a_capture() {
        let it = trimmed(1024, "");
        it.gpu.trim().unwrap();
        it.take_and_free(500, S0);
        it.until_detached(500, S0);
        it.gpu.begin_allocate_to_pool(POOL, every_stream()).unwrap();
        it.sim.begin_capture(S1);
        let before = it.sim.counts();
        assert_eq!(it.trims(3 * TRIMS), 0);
        assert_eq!(it.sim.counts(), before);
        // Detached memory still serves requests.
        it.gpu.end_allocate_to_pool(POOL).unwrap();
        it.gpu.begin_allocate_to_pool(POOL, Box::new(|stream| stream == S1)).unwrap();
        let before = it.sim.counts();
        let address = it.take(500, S0);
        assert_eq!(it.sim.counts(), before);
        it.free([address]);
        it.sim.end_capture(S1);
        it.gpu.end_allocate_to_pool(POOL).unwrap();
        it.trims(2 * TRIMS);
        assert_eq!(it.held(), 0);
    }

    #[test]
    fn captures_between_trims_do_not_disturb_trimming() {
        let it = trimmed(1024, "");
        it.gpu.trim().unwrap();
        let address = it.take(500, S0);
        it.sim.launch(S0);
        it.free([address]);
        // The work of the stream is unfinished during all these captures.
        for _ in 0..2 * TRIMS {
            it.trim();
            it.gpu.begin_allocate_to_pool(POOL, every_stream()).unwrap();
            it.gpu.end_allocate_to_pool(POOL).unwrap();
        }
        assert!(it.held() > 0);
        it.sim.finish_all();
        it.trims(2);
        assert_eq!(it.held(), 0);
    }

    #[test]
    fn a_stream_captured_without_a_private_pool_is_not_queried() {
        let it = trimmed(1024, "");
        it.gpu.set_lasting_streams(LastingStreams::All);
        it.gpu.trim().unwrap();
        it.take_and_free(500, S1);
        it.sim.begin_capture(S1);
        it.trims(2 * TRIMS);
        assert!(it.held() >= 500);
        assert_eq!([Call::EventRecord, Call::EventQuery].map(|call| it.calls(call)), [0, 0]);
        it.sim.end_capture(S1);
        it.until_detached(500, S1);
        it.sim.begin_capture(S1);
        assert_eq!(it.trims(TRIMS), 0);
        assert_eq!(it.calls(Call::EventQuery), 0);
        it.sim.end_capture(S1);
        it.trims(TRIMS);
        assert_eq!(it.held(), 0);
    }

    #[test]
    fn a_private_pool_keeps_its_memory_until_the_cache_is_emptied() {
        let it = trimmed(1024, "");
        it.gpu.trim().unwrap();
        it.gpu.begin_allocate_to_pool(POOL, every_stream()).unwrap();
        it.take_and_free(500, S0);
        it.gpu.end_allocate_to_pool(POOL).unwrap();
        let held = it.held();
        assert_eq!(it.trims(2 * TRIMS), 0);
        assert_eq!(it.held(), held);
        while it.gpu.pool_uses(POOL).unwrap() > 0 {
            it.gpu.release_pool(POOL).unwrap();
        }
        // A graph may still be running, on any stream.
        assert_eq!(it.trims(2 * TRIMS), 0);
        assert_eq!(it.held(), held);
        it.gpu.empty_cache().unwrap();
        assert_eq!(it.held(), 0);
        assert!(it.gpu.pool_uses(POOL).is_err(), "the pool still exists");
    }

    #[test]
    fn memory_of_streams_that_may_be_destroyed_stays() {
        let it = trimmed(1024, "");
        it.gpu.set_lasting_streams(LastingStreams::These(BTreeSet::from([StreamId(5)])));
        it.gpu.trim().unwrap();
        it.take_and_free(100, S0);
        it.take_and_free(300, S1);
        it.take_and_free(200, StreamId(5));
        it.trims(2 * TRIMS);
        assert!((300..400).contains(&it.held()), "{}", it.held());
        it.gpu.empty_cache().unwrap();
        assert_eq!(it.held(), 0);
    }

    #[test]
    fn trimming_can_be_turned_off() {
        let it = trimmed(1024, ",trim_ms:0");
        it.take_and_free(500, S0);
        let before = it.sim.counts();
        assert_eq!(it.trims(5 * TRIMS), 0);
        assert_eq!(it.sim.counts(), before);
        // Turning it off returns detached pages to their lanes.
        let it = trimmed(1024, "");
        it.gpu.trim().unwrap();
        let address = it.take(500, S0);
        it.sim.launch(S0);
        it.free([address]);
        it.until_detached(500, S0);
        it.gpu.configure("trim_ms:0").unwrap();
        assert_eq!(it.trim(), 0);
        assert!(it.gpu.would_hit(500 * MIB, S0));
    }

    #[test]
    fn other_policies_do_not_trim() {
        for conf in [",expandable_segments:True,paged:False", ",paged:False"] {
            let it = trimmed(1024, conf);
            it.take_and_free(500, S0);
            let before = it.sim.counts();
            assert_eq!(it.trims(3 * TRIMS), 0);
            assert_eq!(it.sim.counts(), before);
        }
    }

    #[test]
    fn empty_cache_releases_detached_memory() {
        let it = trimmed(1024, "");
        it.gpu.trim().unwrap();
        it.take_and_free(500, S0);
        it.until_detached(500, S0);
        assert_eq!(it.gpu.page_figures().free, it.sim.held());
        it.gpu.empty_cache().unwrap();
        it.gpu.check_invariants().unwrap();
        assert_eq!(it.held(), 0);
    }

    #[test]
    fn drop_releases_detached_memory() {
        let it = trimmed(1024, "");
        it.gpu.trim().unwrap();
        it.take_and_free(500, S0);
        it.until_detached(500, S0);
        let Trimmed { gpu, sim, .. } = it;
        drop(gpu);
        assert_eq!(sim.held(), 0);
        let counts = sim.counts();
        assert_eq!(counts.of(Call::EventCreate), counts.of(Call::EventDestroy));
    }

    #[test]
    fn no_memory_is_lost_if_a_driver_call_fails() {
        for call in
            [Call::EventCreate, Call::EventRecord, Call::EventQuery, Call::Unmap, Call::Release]
        {
            for nth in 1..4 {
                let it = trimmed(1024, ",page_mb:16");
                it.gpu.trim().unwrap();
                it.take_and_free(500, S0);
                it.sim.fail(FailWhen::Nth(call, nth), Fault::Failed(999));
                for _ in 0..2 * TRIMS {
                    it.clock.advance(PERIOD);
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
