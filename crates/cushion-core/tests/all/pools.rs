//! The engine's behaviour, one test each: private pools, captures, releasing memory, limits, the
//! ladder.

#[cfg(test)]
mod tests {
    use cushion_core::driver::Call;
    use cushion_core::size::{KIB, MIB};
    use cushion_core::{Ladder, LastingStreams, Policy, PoolError, PoolId, Stat};

    use crate::common::*;

    // ---- private pools and captures ----

    #[test]
    fn private_pools_keep_their_memory_until_the_last_use_is_released() {
        for conf in POLICIES {
            let gpu = gpu(100, conf);
            let free_block = cache(&gpu, 30 * MIB, S0);
            gpu.begin_allocate_to_pool(POOL, Box::new(|stream| stream == S0)).unwrap();
            let again = gpu.begin_allocate_to_pool(POOL, every_stream());
            assert_eq!(again, Err(PoolError::AlreadyRecording(POOL)));
            gpu.create_pool(POOL).unwrap();
            assert_eq!(gpu.pool_uses(POOL), Ok(2));
            let private = take(&gpu, 30 * MIB, S0);
            assert_ne!(private, free_block, "a private pool does not use the default pool");
            gpu.empty_cache().unwrap();
            assert!(
                gpu.stats().cached_bytes() >= 30 * MIB,
                "nothing is released while a pool records"
            );
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
                assert_eq!(
                    private_free,
                    gpu.driver().held(),
                    "only the pool still reserves memory"
                );
                assert!(reserved_mib(&gpu) >= 30);
                gpu.release_pool(POOL).unwrap();
            }
            assert_eq!(gpu.release_pool(POOL), Err(PoolError::Released(POOL)));
            let begun = gpu.begin_allocate_to_pool(POOL, every_stream());
            assert_eq!(begun, Err(PoolError::Released(POOL)));
            gpu.empty_cache().unwrap();
            assert_eq!(reserved_mib(&gpu), 0, "{conf}");
            assert_eq!(gpu.pool_uses(POOL), Err(PoolError::Unknown(POOL)), "the pool is removed");

            let held = |gpu: &Gpu| gpu.stats().reserved_bytes_by_private_pools[&POOL].all;
            let (before, bytes) = (held(&gpu), held(&gpu).peak);
            assert!(bytes >= 30 * MIB, "{conf}: {before:?}");
            assert_eq!(before, Stat { current: 0, peak: bytes, allocated: bytes, freed: bytes });
            gpu.reset_peak_stats();
            assert_eq!(held(&gpu), Stat { peak: 0, ..before });
            gpu.reset_accumulated_stats();
            assert_eq!(held(&gpu), Stat::default());
        }
    }

    #[test]
    fn the_pool_that_began_last_is_used() {
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
        assert_eq!(held, Err(PoolError::StillRecording(POOL)), "the pool still records");
    }

    #[test]
    fn a_pool_with_use_on_oom_serves_other_requests_from_pages() {
        let gpu = gpu(100, EXPANDABLE);
        gpu.begin_allocate_to_pool(POOL, every_stream()).unwrap();
        let block = cache(&gpu, 60 * MIB, S0);
        gpu.end_allocate_to_pool(POOL).unwrap();
        full_now(gpu.alloc(55 * MIB, S0));
        gpu.set_use_on_oom(POOL, true).unwrap();
        assert_eq!(take(&gpu, 55 * MIB, S0), block);
    }

    #[test]
    fn a_pool_with_use_on_oom_serves_other_requests_and_respects_no_split() {
        for allow in [false, true] {
            let gpu = gpu(40, "");
            gpu.begin_allocate_to_pool(POOL, every_stream()).unwrap();
            let private = cache(&gpu, 30 * MIB, S0);
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
            assert_eq!(
                (lane.free_bytes, lane.active_bytes),
                (30 * MIB, 0),
                "the memory is back in its pool"
            );
            gpu.check_invariants().unwrap();
        }
    }

    /// A private pool without a capture: work on other streams runs, so frees must wait for it.
    #[test]
    fn frees_while_a_pool_records_are_deferred_until_it_has_ended() {
        let gpu = gpu(100, "");
        gpu.set_lasting_streams(LastingStreams::All);
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
        assert_eq!(gpu.stats().active.all.current, 2, "the other stream still uses the block");
        gpu.driver().finish(S1);
        gpu.process_events().unwrap();
        assert_eq!(gpu.stats().active.all.current, 1);
        gpu.check_invariants().unwrap();
    }

    /// In a capture, the order of the graph's nodes decides. The simulated device refuses every
    /// event query during a capture.
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
            assert_ne!(take(&gpu, MIB, S0), outside, "no event is queried during a capture");
            driver.end_capture(S0);
            gpu.end_allocate_to_pool(POOL).unwrap();

            assert_eq!(calls(&gpu, Call::EventQuery) + calls(&gpu, Call::EventSynchronize), 0);
            assert_eq!(calls(&gpu, Call::EventRecord), 1, "a captured use needs no event");
            gpu.process_events().unwrap();
            let active = gpu.stats().active.all.current;
            assert_eq!(active, 4, "three captured blocks and the pending one");
            driver.finish(S2);
            gpu.process_events().unwrap();
            assert_eq!(gpu.stats().active.all.current, active - 1);
            gpu.check_invariants().unwrap();
        }
    }

    #[test]
    fn no_memory_is_released_during_a_capture() {
        // Each case caches memory on one stream, captures another stream, and allocates.
        for (conf, device, fraction, first, second) in [
            ("garbage_collection_threshold:0.2", 200, 0.5, 20, None),
            ("max_split_size_mb:20", 60, 1.0, 20, Some(50)),
        ] {
            // PyTorch's ladder considers only the stream of the request.
            let torch = second.is_none().then_some(Ladder::Torch);
            for ladder in torch.into_iter().chain([Ladder::Graceful]) {
                let gpu = gpu_with(device, conf, ladder);
                gpu.set_memory_fraction(fraction).unwrap();
                cache(&gpu, 40 * MIB, S1);
                gpu.begin_allocate_to_pool(POOL, Box::new(|stream| stream == S0)).unwrap();
                gpu.driver().begin_capture(S0);
                take(&gpu, first * MIB, S0);
                if let Some(second) = second {
                    let shortage = full_now(gpu.alloc(second * MIB, S1));
                    assert!(shortage.recording);
                }
                assert_eq!(calls(&gpu, Call::Free), 0, "{conf}");
            }
        }
    }

    /// A private pool without a capture: the torch ladder collects garbage, as PyTorch does.
    #[test]
    fn only_the_torch_ladder_collects_garbage_while_a_pool_records() {
        for (ladder, freed) in [(Ladder::Torch, 1), (Ladder::Graceful, 0)] {
            let gpu = gpu_with(200, "garbage_collection_threshold:0.2", ladder);
            gpu.set_memory_fraction(0.5).unwrap();
            cache(&gpu, 40 * MIB, S0);
            gpu.begin_allocate_to_pool(POOL, every_stream()).unwrap();
            take(&gpu, 20 * MIB, S0);
            assert_eq!(calls(&gpu, Call::Free), freed, "{ladder}");
        }
    }

    #[test]
    fn empty_cache_does_nothing_during_a_capture() {
        let released = PoolId(0, 9);
        for conf in POLICIES {
            let gpu = gpu(200, conf);
            gpu.begin_allocate_to_pool(released, every_stream()).unwrap();
            cache(&gpu, 40 * MIB, S1);
            gpu.end_allocate_to_pool(released).unwrap();
            gpu.release_pool(released).unwrap();
            gpu.begin_allocate_to_pool(POOL, Box::new(|stream| stream == S0)).unwrap();
            gpu.driver().begin_capture(S0);
            gpu.empty_cache().unwrap();
            assert_eq!(reserved_mib(&gpu), 40, "{conf}");
            gpu.driver().end_capture(S0);
            gpu.end_allocate_to_pool(POOL).unwrap();
            gpu.empty_cache().unwrap();
            assert_eq!(reserved_mib(&gpu), 0, "{conf}");
        }
    }

    /// The order of a graph's nodes does not cover work that was queued before the capture.
    #[test]
    fn a_capture_does_not_reuse_memory_of_unfinished_earlier_work() {
        let gpu = gpu(200, "graph_capture_record_stream_reuse:True");
        gpu.set_lasting_streams(LastingStreams::All);
        let block = take(&gpu, 15 * MIB, S0);
        gpu.driver().launch(S1);
        gpu.record_stream(block, S1).unwrap();
        gpu.driver().begin_capture(S0);
        gpu.begin_allocate_to_pool(POOL, Box::new(|stream| stream == S0)).unwrap();
        gpu.driver().wait_for(S1, S0);
        gpu.free(block).unwrap();
        gpu.driver().wait_for(S0, S1);
        take(&gpu, 512, S0);
        gpu.driver().end_capture(S0);
        gpu.end_allocate_to_pool(POOL).unwrap();
        assert_ne!(take(&gpu, 15 * MIB, S0), block, "the work of the other stream is unfinished");
        gpu.driver().finish(S1);
        assert_eq!(take(&gpu, 15 * MIB, S0), block);
    }

    // ---- releasing memory, limits and the ladder ----

    #[test]
    fn empty_cache_waits_for_pending_frees_and_keeps_live_blocks() {
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
            assert!(gpu.driver().is_finished(S2, work), "empty_cache waited for the work");
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
            // Cached memory of another stream is released to stay within the limit.
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
            assert_eq!(
                take(&gpu, 40 * MIB, S1),
                second,
                "memory that is already reserved can be used"
            );
        }
    }

    #[test]
    fn garbage_collection_releases_old_blocks_only_if_there_is_a_limit() {
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
            assert_eq!(gpu.stats().num_alloc_retries, 0, "there was no shortage");
        }
    }

    #[test]
    fn a_shortage_releases_cached_memory_before_it_refuses() {
        for (ladder, conf) in [Ladder::Torch, Ladder::Graceful]
            .into_iter()
            .flat_map(|ladder| POLICIES.map(|conf| (ladder, conf)))
        {
            let gpu = gpu_with(100, conf, ladder);
            cache(&gpu, 40 * MIB, S0);
            assert!(gpu.driver().set_tenant(1, 60 * MIB));
            take(&gpu, 20 * MIB, S1);
            assert_eq!((gpu.stats().num_alloc_retries, gpu.stats().num_ooms), (1, 0));
            assert_eq!(reserved_mib(&gpu), 20);
            full_now(gpu.alloc(40 * MIB, S1));
            // The graceful ladder releases nothing if that does not help.
            let retries = if ladder == Ladder::Torch { 2 } else { 1 };
            assert_eq!((gpu.stats().num_alloc_retries, gpu.stats().num_ooms), (retries, 1));
            gpu.driver().set_tenant(1, 0);
            take(&gpu, 40 * MIB, S1);
            assert_eq!(gpu.stats().num_ooms, 1);
        }
    }

    #[test]
    fn no_more_unsplittable_blocks_are_released_than_needed() {
        let gpu = gpu(100, "max_split_size_mb:20");
        let [smaller, larger] = [40, 50].map(|mib| take(&gpu, mib * MIB, S0));
        gpu.free(larger).unwrap();
        gpu.free(smaller).unwrap();
        take(&gpu, 20 * MIB, S0);
        assert_eq!(gpu.snapshot().segments.iter().filter(|s| s.address == smaller).count(), 0);
        assert_eq!((reserved_mib(&gpu), gpu.stats().num_alloc_retries), (70, 0));
        assert_eq!(take(&gpu, 50 * MIB, S0), larger);
    }

    /// PyTorch waits for the pending free and cannot release its segment, which is split. It then
    /// refuses the request, although the freed block would serve it.
    #[test]
    fn the_graceful_ladder_serves_a_request_that_pytorch_refuses() {
        for ladder in [Ladder::Torch, Ladder::Graceful] {
            let gpu = gpu_with(32, "", ladder);
            cache(&gpu, 12 * MIB, S2);
            let [pending, _live] = [(); 2].map(|()| take(&gpu, 9 * MIB, S0));
            gpu.record_stream(pending, S1).unwrap();
            gpu.driver().launch(S1);
            gpu.free(pending).unwrap();
            // S2 is busy, so its cached memory cannot be borrowed.
            gpu.driver().launch(S2);
            let result = gpu.alloc(9 * MIB, S0);
            if ladder == Ladder::Torch {
                assert_eq!(full_now(result).largest_free, 9 * MIB, "the request would fit");
                assert_eq!(take(&gpu, 9 * MIB, S0), pending, "the next request is served");
            } else {
                assert_eq!(result.unwrap(), pending);
                assert_eq!(
                    (gpu.stats().num_ooms, calls(&gpu, Call::Free)),
                    (0, 0),
                    "served by waiting, not by releasing memory"
                );
            }
            gpu.check_invariants().unwrap();
        }
    }

    #[test]
    fn the_policy_can_change_while_memory_is_reserved() {
        let gpu = gpu(100, EXPANDABLE);
        let paged = take(&gpu, 4 * MIB, S0);
        gpu.configure("paged:False,max_split_size_mb:32").unwrap();
        assert_eq!((gpu.policy(), gpu.stats().max_split_size), (Policy::Segments, 32 * MIB));
        gpu.free(paged).unwrap();
        let plain = take(&gpu, 4 * MIB, S0);
        assert_ne!(plain, paged, "plain segments do not use pages");
        let kinds: Vec<bool> = gpu.snapshot().segments.iter().map(|s| s.paged).collect();
        assert!(kinds.contains(&true) && kinds.contains(&false));
        gpu.set_policy(Policy::Expandable);
        let more = take(&gpu, 20 * MIB, S0);
        assert_eq!(more, paged, "the free pages are used again");
        gpu.configure("").unwrap();
        assert_eq!((gpu.policy(), gpu.options().max_split_size), (Policy::Expandable, None));
        for address in [plain, more] {
            gpu.free(address).unwrap();
        }
        gpu.empty_cache().unwrap();
        assert_eq!(reserved_mib(&gpu), 0);
        assert_eq!((calls(&gpu, Call::Free), calls(&gpu, Call::Unreserve)), (1, 1));
    }
}
