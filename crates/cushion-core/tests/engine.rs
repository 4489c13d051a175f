//! What users of the engine rely on, one behaviour at a time, on the simulated device.

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    use cushion_core::driver::{Call, FailWhen, Fault};
    use cushion_core::size::{GIB, KIB, MIB};
    use cushion_core::{
        Action, AddressError, AllocError, BlockUse, Context, Driver, Engine, EngineConfig, Ladder,
        Options, Policy, PoolError, PoolId, Shortage, SimConfig, SimDriver, StreamFilter, StreamId,
        VirtualClock,
    };

    type Gpu = Engine<SimDriver>;

    const S0: StreamId = StreamId(0);
    const S1: StreamId = StreamId(1);
    const S2: StreamId = StreamId(2);
    const POOL: PoolId = PoolId(0, 7);
    const EXPANDABLE: &str = "expandable_segments:True";
    /// A conf string for each policy.
    const POLICIES: [&str; 2] = ["", EXPANDABLE];

    /// A device of so many MiB.
    fn gpu(mib: u64, conf: &str) -> Gpu {
        gpu_with(mib, conf, Ladder::Graceful)
    }

    fn gpu_with(mib: u64, conf: &str, ladder: Ladder) -> Gpu {
        let options = Options::parse(conf).unwrap().options;
        let config = EngineConfig { options, ladder, ..EngineConfig::default() };
        Engine::with_config(SimDriver::new(SimConfig::with_capacity(mib * MIB)), config)
    }

    /// Allocates what must fit.
    fn take(gpu: &Gpu, bytes: u64, stream: StreamId) -> u64 {
        gpu.alloc(bytes, stream).unwrap()
    }

    fn calls(gpu: &Gpu, call: Call) -> u64 {
        gpu.driver().counts().of(call)
    }

    fn reserved_mib(gpu: &Gpu) -> u64 {
        gpu.check_invariants().unwrap();
        assert_eq!(gpu.stats().reserved_bytes.all.current, gpu.driver().held());
        gpu.driver().held() / MIB
    }

    fn every_stream() -> StreamFilter {
        Box::new(|_| true)
    }

    fn full_now(result: Result<u64, AllocError>) -> Shortage {
        match result {
            Err(AllocError::FullNow(shortage)) => *shortage,
            other => panic!("not full now: {other:?}"),
        }
    }

    fn never_fits(result: Result<u64, AllocError>) -> Shortage {
        match result {
            Err(AllocError::NeverFits(shortage)) => *shortage,
            other => panic!("fits: {other:?}"),
        }
    }

    /// Runs what must leave no trace.
    fn unchanged<T>(gpu: &Gpu, action: impl FnOnce() -> T) -> T {
        let before = (gpu.stats(), gpu.snapshot(), gpu.driver().counts());
        let result = action();
        assert_eq!((gpu.stats(), gpu.snapshot(), gpu.driver().counts()), before);
        gpu.check_invariants().unwrap();
        result
    }

    // ---- sizes and layout ----

    #[test]
    fn requests_get_the_block_and_segment_of_their_class() {
        let divisions = "roundup_power2_divisions:4";
        for (conf, request, block, reserved) in [
            ("", 1, 512, 2),
            ("", 513, 1024, 2),
            ("", MIB, MIB, 2),
            ("", MIB + 1, MIB + 512, 20),
            ("", 10 * MIB - 512, 10 * MIB - 512, 20),
            ("", 10 * MIB, 10 * MIB, 10),
            ("", 10 * MIB + 1, 10 * MIB + 512, 12),
            // A rest of a large block is not split off unless it is over 1 MiB.
            ("", 11 * MIB + 1, 12 * MIB, 12),
            ("", 19 * MIB, 20 * MIB, 20),
            ("", 19 * MIB - 512, 19 * MIB - 512, 20),
            (divisions, 5 * MIB + 1, 6 * MIB, 20),
            ("large_segment_size_mb:32", 2 * MIB, 2 * MIB, 32),
            (EXPANDABLE, 1, 512, 2),
            (EXPANDABLE, 10 * MIB, 10 * MIB, 20),
            (EXPANDABLE, 11 * MIB + 1, 11 * MIB + 512, 20),
            (EXPANDABLE, 20 * MIB - 512, 20 * MIB - 512, 20),
            (EXPANDABLE, 20 * MIB + 1, 20 * MIB + 512, 40),
        ] {
            let gpu = gpu(100, conf);
            let address = take(&gpu, request, S0);
            assert!(address.is_multiple_of(512));
            assert_eq!(gpu.size_of(address), Some((block, request)), "{conf} {request}");
            assert_eq!(reserved_mib(&gpu), reserved, "{conf} {request}");
            gpu.free(address).unwrap();
            assert_eq!(gpu.size_of(address), None);
        }
    }

    #[test]
    fn best_fit_splits_from_the_front_and_frees_merge() {
        for conf in POLICIES {
            let gpu = gpu(100, conf);
            let sizes = [256, 128, 512, 128, 1024];
            let blocks = sizes.map(|kib| take(&gpu, kib * KIB, S0));
            let base = blocks[0];
            let offsets = blocks.map(|block| (block - base) / KIB);
            assert_eq!(offsets, [0, 256, 384, 896, 1024], "{conf}");
            let at = |kib| base + kib * KIB;

            for index in [0, 2] {
                gpu.free(blocks[index]).unwrap();
            }
            assert_eq!(take(&gpu, 200 * KIB, S0), at(0), "the smallest that is large enough");
            assert_eq!(take(&gpu, 56 * KIB, S0), at(200), "the rest of it fits exactly");
            assert_eq!(gpu.stats().free_blocks(), 1);
            gpu.free(at(200)).unwrap();
            gpu.free(blocks[1]).unwrap();
            assert_eq!(gpu.stats().largest_free_block(), 696 * KIB, "merged to both sides");
            for address in [at(0), blocks[3], blocks[4]] {
                gpu.free(address).unwrap();
            }
            assert_eq!((gpu.stats().free_blocks(), gpu.stats().largest_free_block()), (1, 2 * MIB));
            // Of two that fit alike, the lower address.
            let blocks = [4, 4, 4, 4].map(|kib| take(&gpu, kib * KIB, S0));
            gpu.free(blocks[2]).unwrap();
            gpu.free(blocks[0]).unwrap();
            assert_eq!(take(&gpu, 4 * KIB, S0), blocks[0]);
            gpu.check_invariants().unwrap();
        }
    }

    #[test]
    fn expandable_segments_grow_in_place_and_shrink_by_whole_pages() {
        let gpu = gpu(100, EXPANDABLE);
        let base = take(&gpu, 15 * MIB, S0);
        assert_eq!(take(&gpu, 30 * MIB, S0), base + 15 * MIB, "the free end of a page is used");
        assert_eq!((calls(&gpu, Call::Reserve), reserved_mib(&gpu)), (1, 60));
        gpu.free(base + 15 * MIB).unwrap();
        gpu.empty_cache().unwrap();
        assert_eq!(reserved_mib(&gpu), 20, "the page that is half in use stays");
        assert_eq!(gpu.stats().largest_free_block(), 5 * MIB);
        // Pages come back at the lowest address that has room.
        let high = take(&gpu, 25 * MIB, S0);
        assert_eq!(high, base + 15 * MIB);
        let end = take(&gpu, 20 * MIB, S0);
        assert_eq!(end, base + 40 * MIB);
        gpu.free(base).unwrap();
        gpu.free(high).unwrap();
        gpu.empty_cache().unwrap();
        assert_eq!(reserved_mib(&gpu), 20);
        assert_eq!(take(&gpu, 12 * MIB, S0), base);
        assert_eq!((calls(&gpu, Call::Reserve), calls(&gpu, Call::Alloc)), (1, 0));
        gpu.free(base).unwrap();
        gpu.free(end).unwrap();
        gpu.empty_cache().unwrap();
        assert_eq!((calls(&gpu, Call::Unreserve), reserved_mib(&gpu)), (1, 0));
    }

    #[test]
    fn unsplittable_blocks_serve_only_requests_of_nearly_their_size() {
        for (more, request, taken_whole) in [
            ("", 5, false),
            ("", 20, false),
            ("", 21, true),
            ("", 40, true),
            ("", 41, false),
            (",max_non_split_rounding_mb:30", 19, false),
            (",max_non_split_rounding_mb:30", 20, true),
        ] {
            let gpu = gpu(200, &format!("max_split_size_mb:20{more}"));
            let big = take(&gpu, 40 * MIB, S0);
            assert_eq!(gpu.stats().oversize_allocations.current, 1);
            gpu.free(big).unwrap();
            let address = take(&gpu, request * MIB, S0);
            assert_eq!(address == big, taken_whole, "{request} MiB{more}");
            if taken_whole {
                assert_eq!(gpu.size_of(address), Some((40 * MIB, request * MIB)));
            }
            let (block, _) = gpu.size_of(address).unwrap();
            let oversize = u64::from(block >= 20 * MIB);
            assert_eq!(gpu.stats().oversize_allocations.current, oversize);
            gpu.check_invariants().unwrap();
        }
    }

    // ---- errors ----

    #[test]
    fn zero_bytes_are_null() {
        let gpu = gpu(100, "");
        unchanged(&gpu, || {
            assert_eq!(take(&gpu, 0, S0), 0);
            assert_eq!(gpu.free(0), Ok(()));
            assert_eq!(gpu.size_of(0), None);
        });
    }

    #[test]
    fn bad_input_is_refused_and_changes_nothing() {
        for conf in POLICIES {
            let gpu = gpu(100, conf);
            let live = take(&gpu, 3 * MIB, S0);
            let freed = take(&gpu, MIB, S1);
            gpu.free(freed).unwrap();
            for bytes in [100 * MIB + 1, GIB, u64::MAX / 2, u64::MAX - 511, u64::MAX] {
                let shortage = unchanged(&gpu, || never_fits(gpu.alloc(bytes, S0)));
                assert_eq!((shortage.requested, shortage.device_total), (bytes, 100 * MIB));
            }
            for address in [freed, live + 512, 1, u64::MAX] {
                let unknown = Err(AddressError::Unknown { address });
                unchanged(&gpu, || {
                    assert_eq!(gpu.free(address), unknown);
                    assert_eq!(gpu.record_stream(address, S1), unknown);
                });
            }
            unchanged(&gpu, || {
                let default = PoolId::DEFAULT;
                let begin = |pool| gpu.begin_allocate_to_pool(pool, every_stream());
                assert_eq!(gpu.create_pool(default), Err(PoolError::Default(default)));
                assert_eq!(begin(default), Err(PoolError::Default(default)));
                for pool in [POOL, default] {
                    let unknown = PoolError::Unknown(pool);
                    assert_eq!(gpu.end_allocate_to_pool(pool), Err(PoolError::NotRecording(pool)));
                    assert_eq!(gpu.release_pool(pool).unwrap_err(), unknown);
                    assert_eq!(gpu.pool_uses(pool).unwrap_err(), unknown);
                    assert_eq!(gpu.set_use_on_oom(pool, true).unwrap_err(), unknown);
                    assert_eq!(gpu.set_no_split(pool).unwrap_err(), unknown);
                }
            });
            for fraction in [-0.1, 1.1, f64::NAN, f64::INFINITY] {
                unchanged(&gpu, || gpu.set_memory_fraction(fraction).unwrap_err());
            }
            let before = gpu.options();
            unchanged(&gpu, || gpu.configure("max_split_size_mb:20,nonsense:1").unwrap_err());
            assert_eq!(gpu.options(), before);
            gpu.free(live).unwrap();
        }
    }

    #[test]
    fn full_now_never_and_a_broken_driver_are_told_apart() {
        for conf in POLICIES {
            let gpu = gpu(100, conf);
            let first = take(&gpu, 60 * MIB, S0);
            let shortage = full_now(gpu.alloc(50 * MIB, S1));
            assert_eq!((shortage.requested, shortage.stream), (50 * MIB, S1));
            assert_eq!((shortage.reserved, shortage.allocated), (60 * MIB, 60 * MIB));
            assert_eq!((shortage.device_free, shortage.allowed), (Some(40 * MIB), None));
            let text = AllocError::FullNow(Box::new(shortage)).to_string();
            for part in ["out of memory", "50.00 MiB", "40.00 MiB of 100.00 MiB free", "60.00 MiB"]
            {
                assert!(text.contains(part), "{part}: {text}");
            }
            let text = gpu.alloc(200 * MIB, S1).unwrap_err().to_string();
            assert!(text.contains("never") && text.contains("200.00 MiB"), "{text}");
            let text = gpu.alloc(u64::MAX, S1).unwrap_err().to_string();
            assert!(text.contains("more than any device has"), "{text}");
            assert_eq!(gpu.stats().num_ooms, 1, "what never fits is no shortage");

            for call in [Call::Alloc, Call::Reserve, Call::Create, Call::Map, Call::SetAccess] {
                gpu.driver().fail(FailWhen::Every(call), Fault::Failed(719));
            }
            let error = gpu.alloc(20 * MIB, S1).unwrap_err();
            assert!(matches!(error, AllocError::Driver(_)), "{error}");
            assert!(error.to_string().contains("error 719"), "{error}");
            gpu.driver().clear_failures();
            assert_eq!(reserved_mib(&gpu), 60);
            gpu.free(first).unwrap();
            take(&gpu, 80 * MIB, S0);
            assert_eq!(gpu.free(4096).unwrap_err().to_string().matches("0x1000").count(), 1);
        }
    }

    #[test]
    fn a_free_whose_event_fails_is_taken_and_completed_later() {
        for call in [Call::EventCreate, Call::EventRecord] {
            let gpu = gpu(100, "");
            let address = take(&gpu, MIB, S0);
            gpu.record_stream(address, S1).unwrap();
            gpu.driver().launch(S1);
            gpu.driver().fail(FailWhen::Nth(call, 1), Fault::Failed(7));
            assert!(matches!(gpu.free(address), Err(AddressError::Driver { .. })));
            assert_eq!(gpu.free(address), Err(AddressError::Unknown { address }));
            assert_ne!(take(&gpu, MIB, S0), address, "its event was recorded only now");
            gpu.driver().finish(S1);
            assert_eq!(take(&gpu, MIB, S0), address);
            gpu.check_invariants().unwrap();
        }
    }

    // ---- streams ----

    #[test]
    fn the_hot_path_makes_no_driver_call() {
        for conf in POLICIES {
            let gpu = gpu(100, conf);
            let warm = [512, 3 * MIB].map(|bytes| take(&gpu, bytes, S0));
            warm.into_iter().for_each(|address| gpu.free(address).unwrap());
            let (counts, stats) = (gpu.driver().counts(), gpu.stats());
            for turn in 0..10_000 {
                let bytes = if turn % 2 == 0 { 512 + turn } else { 3 * MIB };
                let address = take(&gpu, bytes, S0);
                gpu.record_stream(address, S0).unwrap();
                gpu.free(address).unwrap();
            }
            assert_eq!(gpu.driver().counts(), counts, "{conf}");
            assert_eq!(gpu.stats().hits - stats.hits, 10_000);
            assert_eq!(gpu.stats().misses, 2);
        }
    }

    #[test]
    fn memory_used_on_other_streams_waits_for_each_of_them() {
        for conf in POLICIES {
            let gpu = gpu(100, conf);
            let address = take(&gpu, MIB, S0);
            for stream in [S1, S2, S1] {
                gpu.record_stream(address, stream).unwrap();
                gpu.driver().launch(stream);
            }
            gpu.free(address).unwrap();
            assert_eq!(calls(&gpu, Call::EventRecord), 2, "one event for each stream");
            let stats = gpu.stats();
            assert_eq!((stats.allocation.all.current, stats.active.all.current), (0, 1));
            let use_ = gpu.snapshot().segments[0].blocks[0].use_;
            assert_eq!(use_, BlockUse::Pending);
            for done in [S2, S1] {
                assert_ne!(take(&gpu, MIB, S0), address, "{done:?} is still at work");
                gpu.driver().finish(done);
            }
            assert_eq!(take(&gpu, MIB, S0), address, "{conf}");
        }
    }

    #[test]
    fn events_are_used_again() {
        let gpu = gpu(100, "");
        for _ in 0..1000 {
            let address = take(&gpu, MIB, S0);
            gpu.record_stream(address, S1).unwrap();
            gpu.driver().launch(S1);
            gpu.free(address).unwrap();
            gpu.driver().finish(S1);
        }
        assert_eq!(calls(&gpu, Call::EventRecord), 1000);
        assert_eq!(calls(&gpu, Call::EventCreate), 1);
        assert_eq!(calls(&gpu, Call::EventDestroy), 0);
    }

    #[test]
    fn an_unfinished_stream_does_not_hide_a_finished_one() {
        let gpu = gpu(100, "");
        let blocks = [S1, S2].map(|stream| {
            let address = take(&gpu, MIB, S0);
            gpu.record_stream(address, stream).unwrap();
            gpu.driver().launch(stream);
            address
        });
        blocks.into_iter().for_each(|address| gpu.free(address).unwrap());
        gpu.driver().finish(S2);
        gpu.process_events().unwrap();
        assert_eq!(take(&gpu, MIB, S0), blocks[1]);
    }

    #[test]
    fn streams_do_not_share_free_memory() {
        for conf in POLICIES {
            let gpu = gpu(100, conf);
            let first = take(&gpu, MIB, S0);
            gpu.free(first).unwrap();
            assert_ne!(take(&gpu, MIB, S1), first, "{conf}");
            assert_eq!(gpu.stats().misses, 2);
            assert_eq!(take(&gpu, MIB, S0), first, "{conf}");
            assert_eq!((gpu.stats().stream_bytes(S1), gpu.stats().stream_bytes(S2)), (MIB, 0));
        }
    }

    // ---- private pools and captures ----

    #[test]
    fn private_pools_keep_their_memory_until_the_last_use_is_released() {
        for conf in POLICIES {
            let gpu = gpu(100, conf);
            let free_block = take(&gpu, 30 * MIB, S0);
            gpu.free(free_block).unwrap();
            gpu.begin_allocate_to_pool(POOL, Box::new(|stream| stream == S0)).unwrap();
            let again = gpu.begin_allocate_to_pool(POOL, every_stream());
            assert_eq!(again, Err(PoolError::AlreadyRecording(POOL)));
            gpu.create_pool(POOL).unwrap();
            assert_eq!(gpu.pool_uses(POOL), Ok(2));
            let private = take(&gpu, 30 * MIB, S0);
            assert_ne!(private, free_block, "a private pool has memory of its own");
            gpu.empty_cache().unwrap();
            assert!(gpu.stats().cached_bytes() >= 30 * MIB, "nothing is given back meanwhile");
            gpu.end_allocate_to_pool(POOL).unwrap();
            assert_eq!(take(&gpu, 30 * MIB, S0), free_block);
            gpu.free(free_block).unwrap();
            gpu.free(private).unwrap();

            for uses in [2, 1] {
                assert_eq!(gpu.pool_uses(POOL), Ok(uses));
                gpu.empty_cache().unwrap();
                gpu.empty_cache_of(POOL).unwrap();
                let private_free: u64 =
                    gpu.stats().lanes.iter().filter(|l| l.pool == POOL).map(|l| l.free_bytes).sum();
                assert_eq!(private_free, gpu.driver().held(), "only the pool's memory is left");
                assert!(reserved_mib(&gpu) >= 30);
                gpu.release_pool(POOL).unwrap();
            }
            assert_eq!(gpu.release_pool(POOL), Err(PoolError::Released(POOL)));
            let begun = gpu.begin_allocate_to_pool(POOL, every_stream());
            assert_eq!(begun, Err(PoolError::Released(POOL)));
            gpu.empty_cache().unwrap();
            assert_eq!(reserved_mib(&gpu), 0, "{conf}");
            assert_eq!(gpu.pool_uses(POOL), Err(PoolError::Unknown(POOL)), "it is forgotten");
        }
    }

    #[test]
    fn the_latest_pool_begun_wins() {
        let gpu = gpu(100, "");
        let pools = [POOL, PoolId(0, 8)];
        gpu.begin_allocate_to_pool(pools[0], every_stream()).unwrap();
        gpu.begin_allocate_to_pool(pools[1], Box::new(|stream| stream == S1)).unwrap();
        take(&gpu, MIB, S0);
        take(&gpu, MIB, S1);
        let found = gpu.snapshot().segments;
        assert_eq!(
            found.iter().map(|s| (s.pool, s.stream)).collect::<Vec<_>>(),
            [(pools[0], S0), (pools[1], S1)]
        );
        let held = gpu.release_pool(POOL);
        assert_eq!(held, Err(PoolError::AlreadyRecording(POOL)), "allocations go to it");
    }

    #[test]
    fn a_pool_may_help_out_and_may_keep_its_blocks_whole() {
        for allow in [false, true] {
            let gpu = gpu(40, "");
            gpu.begin_allocate_to_pool(POOL, every_stream()).unwrap();
            let private = take(&gpu, 30 * MIB, S0);
            gpu.free(private).unwrap();
            gpu.end_allocate_to_pool(POOL).unwrap();
            gpu.set_use_on_oom(POOL, allow).unwrap();
            if allow {
                assert_eq!(take(&gpu, 20 * MIB, S0), private);
                assert_eq!(gpu.size_of(private), Some((20 * MIB, 20 * MIB)));
                gpu.free(private).unwrap();
                gpu.set_no_split(POOL).unwrap();
                assert_eq!(take(&gpu, 20 * MIB, S0), private);
                assert_eq!(gpu.size_of(private), Some((30 * MIB, 20 * MIB)));
                gpu.free(private).unwrap();
            } else {
                let shortage = full_now(gpu.alloc(20 * MIB, S0));
                assert_eq!((shortage.private_free, shortage.largest_free), (30 * MIB, 30 * MIB));
                assert!(shortage.to_string().contains("30.00 MiB are free in private pools"));
            }
            let lane = gpu.stats().lanes.into_iter().find(|lane| lane.pool == POOL).unwrap();
            assert_eq!((lane.free_bytes, lane.active_bytes), (30 * MIB, 0), "back in its pool");
            gpu.check_invariants().unwrap();
        }
    }

    /// A pool of the user's own is no capture: work on other streams really runs.
    #[test]
    fn frees_while_a_pool_is_recorded_wait_until_it_has_ended() {
        let gpu = gpu(100, "");
        gpu.begin_allocate_to_pool(POOL, every_stream()).unwrap();
        let address = take(&gpu, MIB, S0);
        gpu.record_stream(address, S1).unwrap();
        gpu.driver().launch(S1);
        gpu.free(address).unwrap();
        gpu.process_events().unwrap();
        assert_ne!(take(&gpu, MIB, S0), address);
        assert_eq!(calls(&gpu, Call::EventRecord) + calls(&gpu, Call::EventQuery), 0);
        gpu.end_allocate_to_pool(POOL).unwrap();
        gpu.process_events().unwrap();
        assert_eq!(gpu.stats().active.all.current, 2, "the other stream is still at work");
        gpu.driver().finish(S1);
        gpu.process_events().unwrap();
        assert_eq!(gpu.stats().active.all.current, 1);
        gpu.check_invariants().unwrap();
    }

    /// In a capture the order of the graph decides; the simulated device refuses every query then.
    #[test]
    fn a_capture_reuses_memory_only_where_the_graph_allows_it() {
        for reuse in ["False", "True"] {
            let gpu = gpu(100, &format!("graph_capture_record_stream_reuse:{reuse}"));
            let (outside, driver) = (take(&gpu, MIB, S0), gpu.driver());
            gpu.record_stream(outside, S2).unwrap();
            driver.launch(S2);
            gpu.free(outside).unwrap();

            driver.begin_capture(S0);
            gpu.begin_allocate_to_pool(POOL, Box::new(|stream| stream == S0)).unwrap();
            let address = take(&gpu, MIB, S0);
            driver.launch(S0);
            driver.wait_for(S1, S0);
            driver.launch(S1);
            gpu.record_stream(address, S1).unwrap();
            gpu.free(address).unwrap();
            assert_ne!(take(&gpu, MIB, S0), address, "the other branch may still use it");
            driver.wait_for(S0, S1);
            assert_eq!(take(&gpu, MIB, S0) == address, reuse == "True", "the branches joined");
            assert_ne!(take(&gpu, MIB, S0), outside, "its event is not queried now");
            driver.end_capture(S0);
            gpu.end_allocate_to_pool(POOL).unwrap();

            assert_eq!(calls(&gpu, Call::EventQuery) + calls(&gpu, Call::EventSynchronize), 0);
            assert_eq!(calls(&gpu, Call::EventRecord), 1, "captured uses need no event");
            gpu.process_events().unwrap();
            let active = gpu.stats().active.all.current;
            assert_eq!(active, 4, "three captured, and the one outside waits");
            driver.finish(S2);
            gpu.process_events().unwrap();
            assert_eq!(gpu.stats().active.all.current, active - 1);
            gpu.check_invariants().unwrap();
        }
    }

    // ---- giving back, limits and the ladder ----

    #[test]
    fn empty_cache_waits_for_pending_frees_and_keeps_what_is_in_use() {
        for (conf, kept) in [("", 22), (EXPANDABLE, 22)] {
            let gpu = gpu(200, conf);
            let small = [take(&gpu, MIB, S0), take(&gpu, KIB, S0)];
            let large = [take(&gpu, 8 * MIB, S0), take(&gpu, 8 * MIB, S0)];
            let own = [take(&gpu, 40 * MIB, S1), take(&gpu, 40 * MIB, S1)];
            gpu.record_stream(own[1], S2).unwrap();
            let work = gpu.driver().launch(S2);
            for address in [small[0], large[0], own[0], own[1]] {
                gpu.free(address).unwrap();
            }
            gpu.empty_cache().unwrap();
            assert!(gpu.driver().is_finished(S2, work), "it was waited for");
            assert_eq!(reserved_mib(&gpu), kept, "{conf}");
            for address in [small[1], large[1]] {
                gpu.free(address).unwrap();
            }
            gpu.empty_cache().unwrap();
            assert_eq!((reserved_mib(&gpu), gpu.stats().blocks()), (0, 0), "{conf}");
        }
    }

    #[test]
    fn limits_hold_and_can_be_lifted() {
        for conf in POLICIES {
            let gpu = gpu(100, conf);
            gpu.set_memory_fraction(0.6).unwrap();
            assert_eq!(gpu.memory_fraction(), 0.6);
            let first = take(&gpu, 40 * MIB, S0);
            let shortage = full_now(gpu.alloc(40 * MIB, S0));
            assert_eq!((shortage.allowed, shortage.device_free), (Some(60 * MIB), Some(60 * MIB)));
            assert!(shortage.to_string().contains("may hold 60.00 MiB"), "{shortage}");
            never_fits(gpu.alloc(80 * MIB, S0));
            // What is cached elsewhere is given back to stay within the limit.
            gpu.free(first).unwrap();
            let second = take(&gpu, 40 * MIB, S1);
            assert_eq!(reserved_mib(&gpu), 40);
            gpu.set_memory_limit(Some(80 * MIB));
            take(&gpu, 40 * MIB, S0);
            full_now(gpu.alloc(20 * MIB, S0));
            gpu.set_memory_fraction(1.0).unwrap();
            take(&gpu, 20 * MIB, S0);
            gpu.configure("per_process_memory_fraction:0.25").unwrap();
            assert_eq!(gpu.memory_fraction(), 0.25);
            gpu.free(second).unwrap();
            assert_eq!(take(&gpu, 40 * MIB, S1), second, "what is held may be used");
        }
    }

    #[test]
    fn garbage_collection_gives_back_old_blocks_and_only_under_a_limit() {
        for (fraction, collected) in [(0.5, true), (1.0, false)] {
            let gpu = gpu(200, "garbage_collection_threshold:0.6");
            gpu.set_memory_fraction(fraction).unwrap();
            let [old, young, _live] = [(); 3].map(|()| take(&gpu, 20 * MIB, S0));
            take(&gpu, 2 * MIB, S1);
            gpu.free(old).unwrap();
            take(&gpu, 2 * MIB, S1);
            gpu.free(young).unwrap();
            take(&gpu, 30 * MIB, S0);
            assert_eq!(reserved_mib(&gpu), if collected { 90 } else { 110 });
            let held: Vec<u64> = gpu.snapshot().segments.iter().map(|s| s.address).collect();
            assert_eq!((held.contains(&old), held.contains(&young)), (!collected, true));
            assert_eq!(gpu.stats().num_alloc_retries, 0, "before memory ran out");
        }
    }

    #[test]
    fn a_shortage_gives_back_what_is_cached_before_it_refuses() {
        for (ladder, conf) in [Ladder::Torch, Ladder::Graceful]
            .into_iter()
            .flat_map(|ladder| POLICIES.map(|conf| (ladder, conf)))
        {
            let gpu = gpu_with(100, conf, ladder);
            let cached = take(&gpu, 40 * MIB, S0);
            gpu.free(cached).unwrap();
            assert!(gpu.driver().set_tenant(1, 60 * MIB));
            take(&gpu, 20 * MIB, S1);
            assert_eq!((gpu.stats().num_alloc_retries, gpu.stats().num_ooms), (1, 0));
            assert_eq!(reserved_mib(&gpu), 20);
            full_now(gpu.alloc(40 * MIB, S1));
            assert_eq!((gpu.stats().num_alloc_retries, gpu.stats().num_ooms), (2, 1));
            gpu.driver().set_tenant(1, 0);
            take(&gpu, 40 * MIB, S1);
            assert_eq!(gpu.stats().num_ooms, 1);
        }
    }

    #[test]
    fn unsplittable_blocks_are_given_back_just_enough() {
        let gpu = gpu(100, "max_split_size_mb:20");
        let [smaller, larger] = [40, 50].map(|mib| take(&gpu, mib * MIB, S0));
        gpu.free(larger).unwrap();
        gpu.free(smaller).unwrap();
        take(&gpu, 20 * MIB, S0);
        assert_eq!(gpu.snapshot().segments.iter().filter(|s| s.address == smaller).count(), 0);
        assert_eq!((reserved_mib(&gpu), gpu.stats().num_alloc_retries), (70, 0));
        assert_eq!(take(&gpu, 50 * MIB, S0), larger);
    }

    /// PyTorch waits for the pending free, cannot give its split segment back, and refuses without
    /// looking at what has become free.
    #[test]
    fn the_graceful_ladder_serves_what_pytorch_refuses() {
        for ladder in [Ladder::Torch, Ladder::Graceful] {
            let gpu = gpu_with(32, "", ladder);
            let cached = take(&gpu, 12 * MIB, S2);
            gpu.free(cached).unwrap();
            let [pending, _live] = [(); 2].map(|()| take(&gpu, 9 * MIB, S0));
            gpu.record_stream(pending, S1).unwrap();
            gpu.driver().launch(S1);
            gpu.free(pending).unwrap();
            let result = gpu.alloc(9 * MIB, S0);
            if ladder == Ladder::Torch {
                assert_eq!(full_now(result).largest_free, 9 * MIB, "it would fit");
                assert_eq!(take(&gpu, 9 * MIB, S0), pending, "and does when asked again");
            } else {
                assert_eq!(result.unwrap(), pending);
                assert_eq!((gpu.stats().num_ooms, calls(&gpu, Call::Free)), (0, 0), "by waiting");
            }
            gpu.check_invariants().unwrap();
        }
    }

    #[test]
    fn the_policy_can_change_while_memory_of_both_kinds_is_held() {
        let gpu = gpu(100, EXPANDABLE);
        let paged = take(&gpu, 4 * MIB, S0);
        gpu.configure("expandable_segments:False,max_split_size_mb:32").unwrap();
        assert_eq!((gpu.policy(), gpu.stats().max_split_size), (Policy::Segments, 32 * MIB));
        gpu.free(paged).unwrap();
        let plain = take(&gpu, 4 * MIB, S0);
        assert_ne!(plain, paged, "plain segments do not use pages");
        let kinds: Vec<bool> = gpu.snapshot().segments.iter().map(|s| s.paged).collect();
        assert!(kinds.contains(&true) && kinds.contains(&false));
        gpu.set_policy(Policy::Expandable);
        let more = take(&gpu, 20 * MIB, S0);
        assert_eq!(more, paged, "pages are used again");
        gpu.configure("").unwrap();
        assert_eq!((gpu.policy(), gpu.options().max_split_size), (Policy::Expandable, None));
        for address in [plain, more] {
            gpu.free(address).unwrap();
        }
        gpu.empty_cache().unwrap();
        assert_eq!(reserved_mib(&gpu), 0);
        assert_eq!((calls(&gpu, Call::Free), calls(&gpu, Call::Unreserve)), (1, 1));
    }

    // ---- figures ----

    #[test]
    fn figures_agree_with_each_other_and_can_be_reset() {
        let gpu = gpu(100, "");
        let a = take(&gpu, 700, S0);
        let b = take(&gpu, 3 * MIB, S1);
        gpu.free(a).unwrap();
        let c = take(&gpu, 100, S0);
        let stats = gpu.stats();
        let flat: BTreeMap<String, i64> = stats.flat().into_iter().collect();
        assert_eq!(flat.len(), 123);
        let mib = 1 << 20;
        for (key, value) in [
            ("allocation.all.current", 2),
            ("allocation.all.allocated", 3),
            ("allocation.small_pool.freed", 1),
            ("allocated_bytes.small_pool.current", 512),
            ("allocated_bytes.small_pool.peak", 1024),
            ("allocated_bytes.large_pool.current", 3 * mib),
            ("requested_bytes.all.current", 100 + 3 * mib),
            ("reserved_bytes.all.current", 22 * mib),
            ("segment.large_pool.current", 1),
            ("inactive_split_bytes.large_pool.current", 17 * mib),
            ("inactive_split.all.current", 2),
            ("num_device_alloc", 2),
            ("num_ooms", 0),
            ("max_split_size", -1),
        ] {
            assert_eq!(flat.get(key), Some(&value), "{key}");
        }
        for key in flat.keys().filter(|key| key.contains(".all.")) {
            let [small, large] =
                [".small_pool.", ".large_pool."].map(|p| flat[&key.replace(".all.", p)]);
            let peak = key.ends_with(".peak");
            assert!(if peak { flat[key] <= small + large } else { flat[key] == small + large });
        }
        assert_eq!((stats.hits, stats.misses), (1, 2));
        assert_eq!((stats.blocks(), stats.free_blocks()), (4, 2));
        assert_eq!((stats.stream_bytes(S0), stats.stream_bytes(S1)), (512, 3 * MIB));
        assert_eq!(stats.largest_free_block(), 17 * MIB);
        assert_eq!(stats.cached_bytes(), 19 * MIB - 512);

        gpu.free(b).unwrap();
        gpu.reset_peak_stats();
        assert_eq!(gpu.stats().allocated_bytes.all.peak, 512);
        gpu.reset_accumulated_stats();
        let stats = gpu.stats();
        assert_eq!((stats.allocation.all.allocated, stats.allocation.all.freed), (0, 0));
        assert_eq!((stats.allocation.all.current, stats.hits, stats.num_device_alloc), (1, 0, 0));
        gpu.free(c).unwrap();
        gpu.check_invariants().unwrap();
    }

    /// A filter runs with the lock held, so this would hang if reading took the lock.
    #[test]
    fn figures_can_be_read_while_the_engine_is_locked() {
        let gpu = Arc::new(gpu(100, ""));
        let (reader, seen) = (Arc::downgrade(&gpu), Arc::new(AtomicU64::new(0)));
        let note = Arc::clone(&seen);
        let filter: StreamFilter = Box::new(move |_| {
            note.store(reader.upgrade().unwrap().stats().allocation.all.current, Relaxed);
            true
        });
        take(&gpu, MIB, S0);
        gpu.begin_allocate_to_pool(POOL, filter).unwrap();
        take(&gpu, MIB, S0);
        assert_eq!(seen.load(Relaxed), 1);
    }

    #[test]
    fn history_tells_what_happened_in_order() {
        use Action::{
            Alloc, FreeCompleted, FreeRequested, OutOfMemory, SegmentAlloc, SegmentFree,
            SegmentMap, SegmentUnmap, Snapshot,
        };
        for (conf, got, lost) in
            [("", SegmentAlloc, SegmentFree), (EXPANDABLE, SegmentMap, SegmentUnmap)]
        {
            let clock = Arc::new(VirtualClock::new());
            let options = Options::parse(conf).unwrap().options;
            let config = EngineConfig { options, clock: clock.clone(), ..EngineConfig::default() };
            let sim = SimDriver::new(SimConfig::with_capacity(100 * MIB));
            let gpu = Engine::with_config(sim, config);
            take(&gpu, MIB, S0);
            assert_eq!(gpu.history(), (vec![], 0), "off unless asked for");

            gpu.record_history(100);
            clock.advance(Duration::from_secs(3));
            let address = gpu.alloc_for(19 * MIB + 1, S1, Context(5)).unwrap();
            gpu.free(address).unwrap();
            clock.advance(Duration::from_secs(4));
            full_now(gpu.alloc(100 * MIB, S1));
            let _ = gpu.snapshot();
            let (entries, dropped) = gpu.history();
            let actions: Vec<Action> = entries.iter().map(|entry| entry.action).collect();
            let start = [got, Alloc, FreeRequested, FreeCompleted, lost, OutOfMemory, Snapshot];
            assert_eq!((&actions[..], dropped), (&start[..], 0), "{conf}");
            assert_eq!((entries[0].size, entries[1].size), (20 * MIB, 19 * MIB + 1));
            assert_eq!((entries[1].address, entries[1].stream), (address, S1));
            assert_eq!((entries[1].context, entries[2].context), (Context(5), Context(5)));
            assert_eq!((entries[5].address, entries[5].size), (98 * MIB, 100 * MIB));
            let times = [entries[1].time, entries[5].time].map(|time| time.as_secs());
            assert_eq!(times, [3, 7]);

            gpu.record_history(3);
            for _ in 0..4 {
                gpu.free(take(&gpu, MIB, S0)).unwrap();
            }
            let (entries, dropped) = gpu.history();
            let actions: Vec<Action> = entries.iter().map(|entry| entry.action).collect();
            assert_eq!((&actions[..], dropped), (&[Alloc, FreeRequested, FreeCompleted][..], 9));
        }
    }

    #[test]
    fn a_snapshot_shows_every_byte_once() {
        for conf in POLICIES {
            let gpu = gpu(200, conf);
            let kept: Vec<u64> =
                [700, MIB, 5 * MIB, 30 * MIB].map(|bytes| take(&gpu, bytes, S0)).to_vec();
            let pending = take(&gpu, 2 * MIB, S0);
            gpu.record_stream(pending, S1).unwrap();
            gpu.driver().launch(S1);
            gpu.free(pending).unwrap();
            gpu.free(kept[1]).unwrap();
            let (snapshot, stats) = (gpu.snapshot(), gpu.stats());
            let total: u64 = snapshot.segments.iter().map(|segment| segment.size).sum();
            assert_eq!((total, snapshot.reserved), (gpu.driver().held(), gpu.driver().held()));
            assert!(snapshot.segments.is_sorted_by_key(|segment| segment.address));
            assert!(snapshot.segments.iter().all(|s| s.paged == (conf == EXPANDABLE)));
            let mut bytes = BTreeMap::new();
            for segment in &snapshot.segments {
                let mut end = segment.address;
                for block in &segment.blocks {
                    assert_eq!(block.address, end, "blocks tile their segment");
                    end += block.size;
                    *bytes.entry(block.use_.name()).or_insert(0) += block.size;
                    if block.use_ == BlockUse::Live {
                        let sizes = Some((block.size, block.requested));
                        assert_eq!(gpu.size_of(block.address), sizes);
                    }
                }
                assert_eq!(end, segment.address + segment.size);
            }
            assert_eq!(bytes["active_allocated"], stats.allocated_bytes.all.current);
            assert_eq!(bytes["active_pending_free"], 2 * MIB);
            assert_eq!(bytes["inactive"], stats.cached_bytes());
        }
    }

    // ---- threads and the end ----

    /// Threads with a stream of their own and one they share take and free on a device that is too
    /// small for all; no byte is ever handed out twice, and all of it comes back.
    #[test]
    fn threads_share_an_engine() {
        fn is_shared<T: Send + Sync>(_: &T) {}
        for conf in POLICIES {
            let gpu = gpu(512, conf);
            is_shared(&gpu);
            let taken = Mutex::new(BTreeMap::<u64, u64>::new());
            let worker = |thread: u64| {
                let mut random = thread.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
                let mut next = move |below: u64| {
                    random ^= random << 13;
                    random ^= random >> 7;
                    random ^= random << 17;
                    random % below
                };
                let release = |address: u64| {
                    taken.lock().unwrap().remove(&address);
                    gpu.free(address).unwrap();
                };
                let mut live = Vec::new();
                for _ in 0..3000 {
                    let stream = StreamId(if next(3) == 0 { 100 } else { thread });
                    let most = [64 * KIB, 24 * MIB][usize::from(next(4) == 0)];
                    let bytes = 1 + next(most);
                    match gpu.alloc(bytes, stream) {
                        Ok(address) => {
                            let (size, _) = gpu.size_of(address).unwrap();
                            let mut taken = taken.lock().unwrap();
                            let below = taken.range(..address + size).next_back();
                            assert!(below.is_none_or(|(start, size)| start + size <= address));
                            taken.insert(address, size);
                            live.push(address);
                        }
                        Err(error) => assert!(matches!(error, AllocError::FullNow(_)), "{error}"),
                    }
                    if next(8) == 0
                        && let Some(&address) = live.last()
                    {
                        let other = StreamId(next(8));
                        gpu.record_stream(address, other).unwrap();
                        gpu.driver().launch(other);
                    }
                    if next(16) == 0 {
                        gpu.driver().finish_all();
                    }
                    if live.len() > 12 || (next(2) == 0 && !live.is_empty()) {
                        let index = usize::try_from(next(live.len() as u64)).unwrap();
                        release(live.swap_remove(index));
                    }
                    let stats = gpu.stats();
                    assert!(stats.reserved_bytes.all.current <= 512 * MIB);
                }
                live.into_iter().for_each(release);
            };
            std::thread::scope(|scope| {
                for thread in 0..8 {
                    scope.spawn(move || worker(thread));
                }
            });
            gpu.check_invariants().unwrap();
            let stats = gpu.stats();
            assert_eq!(stats.hits + stats.misses, stats.allocation.all.allocated);
            assert_eq!(stats.allocation.all.allocated, stats.allocation.all.freed);
            gpu.empty_cache().unwrap();
            assert_eq!((reserved_mib(&gpu), gpu.stats().blocks()), (0, 0));
        }
    }

    #[test]
    fn dropping_an_engine_gives_back_what_is_cached() {
        for (conf, kept) in [("", 30 * MIB), (EXPANDABLE, 40 * MIB)] {
            let sim = Arc::new(SimDriver::new(SimConfig::with_capacity(200 * MIB)));
            let gpu = Engine::new(Arc::clone(&sim));
            gpu.configure(conf).unwrap();
            let live = gpu.alloc(30 * MIB, S0).unwrap();
            let [cached, pending] = [(); 2].map(|()| gpu.alloc(40 * MIB, S0).unwrap());
            gpu.record_stream(pending, S1).unwrap();
            sim.launch(S1);
            gpu.free(pending).unwrap();
            gpu.free(cached).unwrap();
            drop(gpu);
            assert_eq!(sim.held(), kept, "what is live is its owner's: {conf}");
            let counts = sim.counts();
            assert_eq!(counts.of(Call::EventDestroy), counts.of(Call::EventCreate));
            if conf.is_empty() {
                sim.free(live).unwrap();
                assert_eq!(sim.held(), 0);
            }
        }
    }
}
