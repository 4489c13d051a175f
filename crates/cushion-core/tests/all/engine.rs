//! The engine's behaviour, one test each: layout, errors, streams.

#[cfg(test)]
mod tests {
    use cushion_core::driver::{Call, FailWhen, Fault};
    use cushion_core::size::{GIB, KIB, MIB};
    use cushion_core::{
        AddressError, AllocError, BlockUse, LastingStreams, Options, Policy, PoolError, PoolId,
        Rung, Tag,
    };

    use crate::common::*;

    // ---- sizes and layout ----

    #[test]
    fn block_and_segment_sizes_depend_on_the_size_class() {
        let divisions = "roundup_power2_divisions:4";
        for (conf, request, block, reserved) in [
            ("", 1, 512, 2),
            ("", 513, 1024, 2),
            ("", MIB, MIB, 2),
            ("", MIB + 1, MIB + 512, 20),
            ("", 10 * MIB - 512, 10 * MIB - 512, 20),
            ("", 10 * MIB, 10 * MIB, 10),
            ("", 10 * MIB + 1, 10 * MIB + 512, 12),
            // The remainder of a large block is split off only if it is larger than 1 MiB.
            ("", 11 * MIB + 1, 12 * MIB, 12),
            ("", 19 * MIB, 20 * MIB, 20),
            ("", 19 * MIB - 512, 19 * MIB - 512, 20),
            (divisions, 5 * MIB + 1, 6 * MIB, 20),
            ("large_segment_size_mb:32", 2 * MIB, 2 * MIB, 32),
            (EXPANDABLE, 1, 512, 2),
            // Page sizes are multiples of the device's granularity.
            ("expandable_segments:True,large_segment_size_mb:21", 11 * MIB, 11 * MIB, 22),
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
            assert_eq!(take(&gpu, 200 * KIB, S0), at(0), "the smallest block that fits");
            assert_eq!(take(&gpu, 56 * KIB, S0), at(200), "the remainder fits exactly");
            assert_eq!(gpu.stats().free_blocks(), 1);
            gpu.free(at(200)).unwrap();
            gpu.free(blocks[1]).unwrap();
            assert_eq!(gpu.stats().largest_free_block(), 696 * KIB, "merged with both neighbours");
            for address in [at(0), blocks[3], blocks[4]] {
                gpu.free(address).unwrap();
            }
            assert_eq!((gpu.stats().free_blocks(), gpu.stats().largest_free_block()), (1, 2 * MIB));
            // Of two blocks of the same size, the one with the lower address is used.
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
        assert_eq!(take(&gpu, 30 * MIB, S0), base + 15 * MIB, "the free end of the page is used");
        assert_eq!((calls(&gpu, Call::Reserve), reserved_mib(&gpu)), (1, 60));
        gpu.free(base + 15 * MIB).unwrap();
        gpu.empty_cache().unwrap();
        assert_eq!(reserved_mib(&gpu), 20, "the page that is partly in use stays");
        assert_eq!(gpu.stats().largest_free_block(), 5 * MIB);
        // New pages are mapped at the lowest address with room.
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
    fn holds_is_true_for_live_and_cached_addresses() {
        for conf in POLICIES {
            let gpu = gpu(100, conf);
            let address = take(&gpu, 3 * MIB, S0);
            assert!(gpu.holds(address) && gpu.holds(address + 3 * MIB - 1), "{conf}");
            assert!(!gpu.holds(address - 1) && !gpu.holds(0), "{conf}");
            gpu.free(address).unwrap();
            assert!(gpu.holds(address), "{conf}");
            gpu.empty_cache().unwrap();
            assert!(!gpu.holds(address), "{conf}");
        }
    }

    #[test]
    fn a_request_of_zero_bytes_returns_the_null_address() {
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
            let freed = cache(&gpu, MIB, S1);
            for bytes in [100 * MIB + 1, GIB, u64::MAX / 2, u64::MAX - 511, u64::MAX] {
                let (before, ooms) = (gpu.snapshot(), gpu.stats().num_ooms);
                let shortage = never_fits(gpu.alloc(bytes, S0));
                assert_eq!((gpu.snapshot(), gpu.stats().num_ooms), (before, ooms + 1));
                let rungs: Vec<_> = shortage.tried.iter().map(|tried| tried.rung).collect();
                assert_eq!(
                    rungs,
                    [Rung::Grow],
                    "no memory was released for a request that never fits"
                );
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
    fn errors_distinguish_full_now_never_fits_and_driver() {
        for conf in POLICIES {
            let gpu = gpu(100, conf);
            let first = take(&gpu, 60 * MIB, S0);
            let shortage = full_now(gpu.alloc(50 * MIB, S1));
            assert_eq!((shortage.requested, shortage.stream), (50 * MIB, S1));
            assert_eq!((shortage.reserved, shortage.allocated), (60 * MIB, 60 * MIB));
            assert_eq!((shortage.device_free, shortage.allowed), (Some(40 * MIB), None));
            let deeds: Vec<_> = shortage.deeds().map(ToString::to_string).collect();
            assert_eq!(deeds, ["asked for more memory"], "no cached memory could be released");
            let text = AllocError::FullNow(Box::new(shortage)).to_string();
            for part in ["out of memory", "50.00 MiB", "40.00 MiB of 100.00 MiB free", "60.00 MiB"]
            {
                assert!(text.contains(part), "{part}: {text}");
            }
            let text = gpu.alloc(200 * MIB, S1).unwrap_err().to_string();
            assert!(text.contains("never") && text.contains("200.00 MiB"), "{text}");
            let text = gpu.alloc(u64::MAX, S1).unwrap_err().to_string();
            assert!(text.contains("more than any device has"), "{text}");
            assert_eq!(gpu.stats().num_ooms, 3);

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
    fn a_free_whose_event_fails_is_accepted_and_completed_later() {
        for call in [Call::EventCreate, Call::EventRecord] {
            let gpu = gpu(100, "");
            gpu.set_lasting_streams(LastingStreams::All);
            let address = take(&gpu, MIB, S0);
            gpu.record_stream(address, S1).unwrap();
            gpu.driver().launch(S1);
            gpu.driver().fail(FailWhen::Nth(call, 1), Fault::Failed(7));
            assert!(matches!(gpu.free(address), Err(AddressError::Driver { .. })));
            assert_eq!(gpu.free(address), Err(AddressError::Unknown { address }));
            assert_ne!(take(&gpu, MIB, S0), address, "the event was recorded only by this request");
            gpu.driver().finish(S1);
            assert_eq!(take(&gpu, MIB, S0), address);
            gpu.check_invariants().unwrap();
        }
    }

    #[test]
    fn alloc_at_once_neither_waits_nor_releases_memory() {
        for conf in POLICIES {
            let gpu = gpu(100, conf);
            let at_once = |bytes| gpu.alloc_at_once_for(bytes, S0, Tag(7)).unwrap();
            assert_eq!(at_once(0), Some(0));
            let first = at_once(60 * MIB).expect("the driver has memory");
            assert_eq!(gpu.tag_of(first), Some(Tag(7)));
            let (base, size) = gpu.base_of(first).unwrap();
            assert!(base <= first && first + 60 * MIB <= base + size, "{conf}");
            gpu.free(first).unwrap();
            assert_eq!(at_once(60 * MIB), Some(first), "the free block serves");
            gpu.free(first).unwrap();

            let calls = gpu.driver().counts();
            assert_eq!(gpu.alloc_at_once_for(80 * MIB, S1, Tag::NONE).unwrap(), None);
            let (before, after) = (calls, gpu.driver().counts());
            for call in [Call::Free, Call::Unmap, Call::StreamSynchronize, Call::EventSynchronize] {
                assert_eq!(before.of(call), after.of(call), "{conf}: {call}");
            }
            assert_eq!(gpu.stats().num_ooms, 0, "no request was refused yet");
            take(&gpu, 80 * MIB, S1);
            assert_eq!(gpu.alloc_at_once_for(200 * MIB, S0, Tag::NONE).unwrap(), None);
            gpu.check_invariants().unwrap();
        }
        // Garbage collection comes before the driver call, and it may wait.
        let gpu = gpu(100, "garbage_collection_threshold:0.1,per_process_memory_fraction:0.9");
        assert_eq!(gpu.alloc_at_once_for(MIB, S0, Tag::NONE).unwrap(), None);
        let address = cache(&gpu, MIB, S0);
        assert_eq!(gpu.alloc_at_once_for(MIB, S0, Tag::NONE).unwrap(), Some(address));
    }

    /// Page sizes are rounded up only if the device has room for that.
    #[test]
    fn paged_serves_a_request_of_the_whole_device() {
        for mib in [2, 6, 90, 1000, 1022, 1024] {
            let gpu = gpu(mib, PAGED);
            let all = take(&gpu, mib * MIB, S0);
            assert_eq!(reserved_mib(&gpu), mib);
            gpu.free(all).unwrap();
            gpu.empty_cache().unwrap();
            let half = take(&gpu, mib / 2 * MIB, S0);
            let more = take(&gpu, mib / 2 * MIB, S0);
            assert_ne!(half, more);
            assert!(gpu.alloc(2 * MIB, S0).is_err());
            gpu.check_invariants().unwrap();
        }
    }

    #[test]
    fn set_options_replaces_every_option() {
        let gpu = gpu(
            100,
            "expandable_segments:True,per_process_memory_fraction:0.5,max_split_size_mb:30",
        );
        assert_eq!((gpu.policy(), gpu.memory_fraction()), (Policy::Expandable, 0.5));
        gpu.set_options(Options::default());
        assert_eq!((gpu.policy(), gpu.memory_fraction()), (Policy::Paged, 1.0));
        assert_eq!(gpu.options(), Options::default());
        assert_eq!(gpu.stats().max_split_size, u64::MAX);
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
            assert_eq!(calls(&gpu, Call::EventRecord), 2, "one event per stream");
            let stats = gpu.stats();
            assert_eq!((stats.allocation.all.current, stats.active.all.current), (0, 1));
            let use_ = gpu.snapshot().segments[0].blocks[0].use_;
            assert_eq!(use_, BlockUse::Pending);
            for done in [S2, S1] {
                assert_ne!(take(&gpu, MIB, S0), address, "{done:?} still uses the block");
                gpu.driver().finish(done);
            }
            assert_eq!(take(&gpu, MIB, S0), address, "{conf}");
        }
    }

    #[test]
    fn events_are_reused() {
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
            let first = cache(&gpu, MIB, S0);
            assert_ne!(take(&gpu, MIB, S1), first, "{conf}");
            assert_eq!(gpu.stats().misses, 2);
            assert_eq!(take(&gpu, MIB, S0), first, "{conf}");
            assert_eq!((gpu.stats().stream_bytes(S1), gpu.stats().stream_bytes(S2)), (MIB, 0));
        }
    }
}
