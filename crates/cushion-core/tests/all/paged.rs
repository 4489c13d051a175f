//! The behaviour of the policy `paged`, one test each.

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use cushion_core::driver::{Call, FailWhen, Fault};
    use cushion_core::size::{GIB, MIB};
    use cushion_core::{Engine, LastingStreams, Options, Policy, SimConfig, SimDriver, StreamId};

    use crate::common::*;

    // ---- steps that repeat ----

    /// Runs one step of a program: allocations and frees in an order that depends only on `seed`.
    fn step(gpu: &CheckedGpu, seed: u64) {
        let mut random = seed;
        let mut next = |below: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) % below
        };
        let mut live = Vec::new();
        for _ in 0..200 {
            if next(5) < 2 && !live.is_empty() {
                let index = usize::try_from(next(live.len() as u64)).unwrap();
                gpu.free(live.swap_remove(index)).unwrap();
            }
            let size = if next(8) == 0 { (40 + next(400)) * MIB } else { MIB + next(30 * MIB) };
            live.push(gpu.alloc(size, S0).unwrap());
        }
        live.into_iter().for_each(|block| gpu.free(block).unwrap());
        gpu.check_invariants().unwrap();
    }

    #[test]
    fn a_step_that_repeats_makes_no_driver_call() {
        for seed in 1..=20 {
            let (gpu, _) = checked_gpu(64 * 1024, PAGED);
            let _weights: Vec<u64> =
                (0..50).map(|n| gpu.alloc((1 + n % 7) * 10 * MIB, S0).unwrap()).collect();
            step(&gpu, seed);
            // These blocks stay live, in memory that the first step used.
            let _state: Vec<u64> =
                (0..30).map(|n| gpu.alloc((1 + n % 5) * 9 * MIB, S0).unwrap()).collect();
            step(&gpu, seed);
            let before = gpu.driver_changes();
            (0..3).for_each(|_| step(&gpu, seed));
            assert_eq!(
                gpu.driver_changes(),
                before,
                "seed {seed}: the third step and later ones make no driver call"
            );
        }
    }

    #[test]
    fn two_kinds_of_steps_repeat_without_a_driver_call() {
        let (gpu, _) = checked_gpu(64 * 1024, PAGED);
        for seed in [1, 2, 1, 2] {
            step(&gpu, seed);
        }
        let before = gpu.driver_changes();
        for seed in [2, 1, 1, 2] {
            step(&gpu, seed);
        }
        assert_eq!(gpu.driver_changes(), before);
    }

    // ---- stitches ----

    /// Returns an engine with six free blocks of 64 MiB that are not neighbours.
    fn fragmented() -> (CheckedGpu, Arc<SimDriver>) {
        let (gpu, sim) = checked_gpu(2048, "paged:True,page_mb:16");
        let blocks: Vec<u64> = (0..12).map(|_| gpu.alloc(64 * MIB, S0).unwrap()).collect();
        load(&gpu, 64 * MIB);
        free_every_second(&gpu, &blocks);
        (gpu, sim)
    }

    #[test]
    fn a_stitch_serves_a_large_request_and_is_reused_without_a_driver_call() {
        let (gpu, sim) = fragmented();
        let held = sim.held();
        let large = gpu.alloc(200 * MIB, S0).unwrap();
        assert_eq!(sim.held(), held, "no page was created");
        assert_eq!(gpu.page_figures().ranges, 1);
        assert_eq!(gpu.stats().reserved_bytes.all.current, held, "every page is counted once");
        gpu.check_invariants().unwrap();
        gpu.free(large).unwrap();
        let calls = sim.counts().total();
        let again = gpu.alloc(200 * MIB, S0).unwrap();
        assert_eq!((again, sim.counts().total()), (large, calls));
        // While the stitch is in use, its pages serve no other request.
        let other = gpu.alloc(300 * MIB, S0).unwrap();
        assert!(sim.held() > held);
        [again, other].into_iter().for_each(|block| gpu.free(block).unwrap());
        gpu.check_invariants().unwrap();
    }

    #[test]
    fn without_addresses_for_a_stitch_the_homes_grow() {
        let (gpu, sim) = fragmented();
        sim.fail(FailWhen::Nth(Call::Reserve, 1), Fault::OutOfMemory);
        gpu.alloc(200 * MIB, S0).unwrap();
        assert_eq!((gpu.page_figures().ranges, gpu.stats().shortages), (0, 0));
        gpu.check_invariants().unwrap();
    }

    #[test]
    fn a_stitch_that_another_stream_uses_is_pending_until_that_stream_is_done() {
        let (gpu, sim) = fragmented();
        let large = gpu.alloc(200 * MIB, S0).unwrap();
        sim.launch(S1);
        gpu.record_stream(large, S1).unwrap();
        gpu.free(large).unwrap();
        assert!(!gpu.would_hit(200 * MIB, S0), "the other stream still uses the stitch");
        let others: Vec<u64> = (0..6)
            .filter(|_| gpu.would_hit(64 * MIB, S0))
            .map(|_| gpu.alloc(64 * MIB, S0).unwrap())
            .collect();
        assert!(others.len() < 6, "its pages are not free at home either");
        others.into_iter().for_each(|block| gpu.free(block).unwrap());
        sim.finish_all();
        gpu.process_events().unwrap();
        assert!(gpu.would_hit(200 * MIB, S0));
        gpu.check_invariants().unwrap();
    }

    /// Creates this many stitches of growing sizes from every second page of 2 MiB, while the
    /// stream has work queued. Returns the blocks between these pages, which stay live.
    fn many_stitches(
        gpu: &CheckedGpu,
        sim: &SimDriver,
        stream: StreamId,
        stitches: usize,
    ) -> Vec<u64> {
        load(gpu, 4 * MIB);
        let blocks: Vec<u64> = (0..1400).map(|_| gpu.alloc(2 * MIB, stream).unwrap()).collect();
        load(gpu, 2 * MIB);
        let kept = free_every_second(gpu, &blocks);
        sim.launch(stream);
        let mut made = 0;
        for pages in 2.. {
            let count = (690 / pages).min(stitches - made);
            let bytes = pages as u64 * 2 * MIB;
            let all: Vec<u64> = (0..count).map(|_| gpu.alloc(bytes, stream).unwrap()).collect();
            all.into_iter().for_each(|block| gpu.free(block).unwrap());
            made += count;
            if made == stitches {
                break;
            }
        }
        kept
    }

    #[test]
    fn old_stitches_are_removed_once_their_work_is_done() {
        let (gpu, sim) = checked_gpu(16 * 1024, "paged:True,page_mb:2");
        let kept = many_stitches(&gpu, &sim, S0, 1200);
        assert!(gpu.page_figures().ranges > 1024, "the stream still uses them");
        sim.finish_all();
        // A miss removes at least one stitch, and creates at most one.
        for size in (1300..1700).step_by(2) {
            let before = gpu.page_figures().ranges;
            let more = gpu.alloc(size * MIB, S0).unwrap();
            assert!(gpu.page_figures().ranges <= before.max(1025), "{:?}", gpu.page_figures());
            gpu.free(more).unwrap();
        }
        assert!(gpu.page_figures().ranges <= 1025, "{:?}", gpu.page_figures());
        gpu.check_invariants().unwrap();
        kept.into_iter().for_each(|block| gpu.free(block).unwrap());
        gpu.empty_cache().unwrap();
        assert_eq!((sim.held(), gpu.page_figures().ranges), (0, 0));
    }

    #[test]
    fn stitches_of_one_stream_do_not_prevent_those_of_another() {
        for stitches in [900, 1040] {
            let (gpu, sim) = checked_gpu(16 * 1024, "paged:True,page_mb:2");
            let _kept = many_stitches(&gpu, &sim, S1, stitches);
            let blocks: Vec<u64> = (0..64).map(|_| gpu.alloc(2 * MIB, S2).unwrap()).collect();
            let _kept = free_every_second(&gpu, &blocks);
            let step = || {
                let both = [24, 30].map(|mib| gpu.alloc(mib * MIB, S2).unwrap());
                both.into_iter().for_each(|block| gpu.free(block).unwrap());
                cache(&gpu, 50 * MIB, S2);
            };
            (0..20).for_each(|_| step());
            let before = gpu.driver_changes();
            (0..50).for_each(|_| step());
            assert_eq!(gpu.driver_changes(), before, "with {stitches} stitches of another stream");
        }
    }

    /// Fills a device of 64 MiB with blocks of 2 MiB, frees two of every three, and releases the
    /// pages of the freed blocks.
    fn with_holes(gpu: &Gpu) -> Vec<u64> {
        load(gpu, 4 * MIB);
        load(gpu, 4 * MIB);
        gpu.empty_cache().unwrap();
        let blocks: Vec<u64> = (0..32).map(|_| take(gpu, 2 * MIB, S0)).collect();
        for (_, &block) in blocks.iter().enumerate().filter(|(index, _)| index % 3 != 0) {
            gpu.free(block).unwrap();
        }
        gpu.empty_cache().unwrap();
        blocks
    }

    #[test]
    fn adjacent_home_ranges_are_separate_segments() {
        let gpu = gpu(64, "wait_ms:0,paged:True");
        let blocks = with_holes(&gpu);
        let low = take(&gpu, 4 * MIB, S0);
        let first = take(&gpu, 10 * MIB, S0);
        let second = take(&gpu, 12 * MIB, S0);
        assert_eq!(second, first + 10 * MIB, "the next home range starts where the full one ends");
        [low, first, second].into_iter().for_each(|block| gpu.free(block).unwrap());
        gpu.set_memory_limit(Some(gpu.driver().held()));
        let across = take(&gpu, 26 * MIB, S0);
        gpu.check_invariants().unwrap();
        gpu.free(across).unwrap();
        blocks.into_iter().step_by(3).for_each(|block| gpu.free(block).unwrap());
        gpu.empty_cache().unwrap();
        gpu.check_invariants().unwrap();
        assert_eq!(gpu.driver().held(), 0);
    }

    // ---- the last pages of a device ----

    #[test]
    fn one_request_can_have_a_whole_empty_device() {
        for conf in ALL_POLICIES {
            for mib in [100, 1000, 24_000] {
                let gpu = gpu(mib, &format!("wait_ms:0,{conf}"));
                assert!(gpu.alloc(mib * MIB, S0).is_ok(), "{conf}: {mib} MiB");
            }
        }
    }

    #[test]
    fn the_last_memory_beside_other_processes_can_be_used() {
        for conf in ALL_POLICIES {
            let small = gpu(1024, &format!("wait_ms:0,{conf}"));
            (0..40).for_each(|_| _ = take(&small, MIB, S0));
            small.driver().set_tenant(1, 1018 * MIB - small.driver().held());
            (0..4).for_each(|_| assert!(small.alloc(MIB, S0).is_ok(), "{conf}"));

            let large = gpu(16 * 1024, &format!("wait_ms:0,{conf}"));
            (0..10).for_each(|_| _ = take(&large, 100 * MIB, S0));
            while large.would_hit(30 * MIB, S0) {
                take(&large, 30 * MIB, S0);
            }
            large.driver().set_tenant(1, 16 * GIB - 60 * MIB - large.driver().held());
            assert!(large.alloc(30 * MIB, S0).is_ok(), "{conf}");
        }
    }

    #[test]
    fn an_unsplittable_block_serves_a_request_before_it_is_refused() {
        for conf in ALL_POLICIES {
            let gpu = gpu(1000, &format!("wait_ms:0,max_split_size_mb:32,{conf}"));
            take(&gpu, 400 * MIB, S0);
            take(&gpu, 8 * MIB, S0);
            let free = take(&gpu, 40 * MIB, S0);
            for bytes in [20 * MIB, 2 * MIB] {
                while gpu.alloc(bytes, S0).is_ok() {}
            }
            gpu.free(free).unwrap();
            assert!(gpu.alloc(20 * MIB, S0).is_ok(), "{conf}");
        }
    }

    #[test]
    fn a_pool_without_splits_reserves_little_more_than_is_live() {
        for conf in ALL_POLICIES {
            let gpu = gpu(8192, conf);
            gpu.create_pool(POOL).unwrap();
            gpu.set_no_split(POOL).unwrap();
            gpu.begin_allocate_to_pool(POOL, every_stream()).unwrap();
            let blocks: Vec<u64> = (0..100).map(|_| take(&gpu, 20 * MIB, S0)).collect();
            assert!(gpu.driver().held() < 2200 * MIB, "{conf}");
            blocks.into_iter().for_each(|block| gpu.free(block).unwrap());
            let one = take(&gpu, 20 * MIB, S0);
            // PyTorch's expandable segments hand out the whole free block.
            assert!(conf == EXPANDABLE || gpu.size_of(one).unwrap().0 == 20 * MIB, "{conf}");
        }
    }

    #[test]
    fn paged_splits_blocks_of_a_pool_without_splits() {
        let gpu = gpu(8192, PAGED);
        gpu.create_pool(POOL).unwrap();
        gpu.set_no_split(POOL).unwrap();
        gpu.begin_allocate_to_pool(POOL, every_stream()).unwrap();
        cache(&gpu, 40 * MIB, S0);
        let held = gpu.driver().held();
        let halves = [(); 2].map(|()| take(&gpu, 20 * MIB, S0));
        assert_eq!(halves.map(|half| gpu.size_of(half).unwrap().0), [20 * MIB; 2]);
        assert_eq!(gpu.driver().held(), held, "the remainder served the second request");
    }

    // ---- near the limit ----

    #[test]
    fn a_busy_stream_is_queried_once_before_a_page_is_split() {
        let gpu = gpu(4096, PAGED);
        cache(&gpu, 3 * GIB, S0);
        gpu.driver().launch(S0);
        cache(&gpu, 3 * GIB + 200 * MIB, S0);
        let (before, hits) = (gpu.driver().counts().total(), gpu.stats().hits);
        for _ in 0..100 {
            cache(&gpu, 5 * MIB, S0);
        }
        assert_eq!(gpu.stats().hits - hits, 100);
        let calls = gpu.driver().counts().total() - before;
        assert!(calls <= 4, "one capture query, and one event create, record and query");
    }

    #[test]
    fn one_miss_near_the_limit_splits_one_page() {
        let gpu = gpu(80 * 1024, PAGED);
        let all: Vec<u64> = (0..74).map(|_| take(&gpu, GIB, S0)).collect();
        let _kept = free_every_second(&gpu, &all);
        for step in 1..=8 {
            let released = calls(&gpu, Call::Release);
            let block = take(&gpu, GIB + 100 * MIB * step, S0);
            assert!(calls(&gpu, Call::Release) - released <= 1);
            gpu.free(block).unwrap();
            (0..150).for_each(|_| _ = take(&gpu, MIB, S0));
        }
        gpu.check_invariants().unwrap();
    }

    // ---- streams ----

    #[test]
    fn a_stream_borrows_memory_of_an_idle_stream() {
        let gpu = gpu(1024, PAGED);
        gpu.set_lasting_streams(LastingStreams::All);
        cache(&gpu, 256 * MIB, S0);
        let borrowed = take(&gpu, 64 * MIB, S1);
        assert_eq!(gpu.stream_of(borrowed), Some(S0));
        gpu.driver().launch(S0);
        let own = take(&gpu, 64 * MIB, S2);
        assert_eq!(gpu.stream_of(own), Some(S2), "S0 is busy");
    }

    #[test]
    fn a_stream_whose_blocks_others_use_does_not_borrow() {
        let gpu = gpu(1024, PAGED);
        gpu.set_lasting_streams(LastingStreams::All);
        let side = take(&gpu, 8 * MIB, S1);
        gpu.record_stream(side, S0).unwrap();
        cache(&gpu, 256 * MIB, S0);
        let own = take(&gpu, 64 * MIB, S1);
        assert_eq!(gpu.stream_of(own), Some(S1));
    }

    #[test]
    fn no_memory_is_borrowed_by_prefetch_or_without_the_borrow_rung() {
        let gpu = |conf: &str| {
            let gpu = gpu(1024, conf);
            gpu.set_lasting_streams(LastingStreams::All);
            cache(&gpu, 256 * MIB, S0);
            gpu
        };
        let off = gpu("paged:True,skip_rungs:borrow+pieces");
        let own = take(&off, 64 * MIB, S1);
        assert_eq!(off.stream_of(own), Some(S1));
        let later = gpu(PAGED);
        later.prefetch(64 * MIB, S1).unwrap();
        assert!(later.would_hit(64 * MIB, S1));
    }

    #[test]
    fn a_failed_event_record_before_borrowing_fails_no_request() {
        let gpu = gpu(1024, PAGED);
        gpu.set_lasting_streams(LastingStreams::All);
        cache(&gpu, 256 * MIB, S0);
        gpu.driver().fail(FailWhen::Nth(Call::EventRecord, 1), Fault::Failed(999));
        assert!(gpu.alloc(64 * MIB, S1).is_ok());
    }

    // ---- devices ----

    #[test]
    fn a_device_without_pages_uses_the_policy_segments() {
        let config = SimConfig { has_pages: false, ..SimConfig::with_capacity(1024 * MIB) };
        let gpu = Engine::new(Arc::new(SimDriver::new(config)));
        let block = gpu.alloc(20 * MIB, S0).unwrap();
        assert_eq!(gpu.policy(), Policy::Segments);
        for policy in Policy::ALL {
            gpu.set_policy(policy);
            gpu.configure(PAGED).unwrap();
            assert_eq!(gpu.policy(), Policy::Segments);
        }
        gpu.free(block).unwrap();
        gpu.check_invariants().unwrap();
    }

    #[test]
    fn the_policy_of_the_options_is_used() {
        let options = Options { policy: Policy::Expandable, ..Options::default() };
        assert_eq!(Policy::of(&options), Policy::Expandable);
    }

    // ---- addresses ----

    #[test]
    fn a_refused_stream_unreserves_its_addresses() {
        for conf in ON_PAGES {
            let gpu = gpu(256, &format!("wait_ms:0,{conf}"));
            gpu.set_memory_limit(Some(128 * MIB));
            let all = take(&gpu, 128 * MIB, S0);
            for stream in 1..=100 {
                assert!(gpu.alloc(20 * MIB, StreamId(stream)).is_err());
            }
            gpu.free(all).unwrap();
            gpu.empty_cache().unwrap();
            assert_eq!(calls(&gpu, Call::Reserve), calls(&gpu, Call::Unreserve), "{conf}");
        }
    }

    #[test]
    fn a_private_pool_without_memory_is_removed() {
        for conf in ALL_POLICIES {
            let gpu = gpu(256, &format!("wait_ms:0,{conf}"));
            gpu.set_memory_limit(Some(128 * MIB));
            let all = take(&gpu, 128 * MIB, S0);
            gpu.begin_allocate_to_pool(POOL, every_stream()).unwrap();
            assert!(gpu.alloc(20 * MIB, S1).is_err());
            gpu.end_allocate_to_pool(POOL).unwrap();
            while gpu.pool_uses(POOL).unwrap() > 0 {
                gpu.release_pool(POOL).unwrap();
            }
            gpu.free(all).unwrap();
            gpu.empty_cache().unwrap();
            assert!(gpu.pool_uses(POOL).is_err(), "{conf}");
        }
    }
}
