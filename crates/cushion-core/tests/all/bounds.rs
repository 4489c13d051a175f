//! The work of one call and the metadata that the engine keeps are bounded, for any number of
//! streams, pending frees, blocks and pools. The tests count; they do not measure time.

#[cfg(test)]
mod tests {
    use cushion_core::driver::Call;
    use cushion_core::size::{GIB, KIB, MIB};
    use cushion_core::{AllocError, PoolId, StreamId};
    use proptest::prelude::*;

    use crate::common::*;

    /// Returns how often `f` makes a driver call.
    fn calls_during(gpu: &Gpu, call: Call, f: impl FnOnce()) -> u64 {
        let before = calls(gpu, call);
        f();
        calls(gpu, call) - before
    }

    /// Allocates one block on the main stream for each of the streams from 1 to `streams`, lets
    /// that stream use the block, and frees all blocks. The frees are pending.
    fn pend(gpu: &Gpu, streams: u64, bytes: u64) -> Vec<u64> {
        let blocks: Vec<u64> = (0..streams).map(|_| gpu.alloc(bytes, S0).unwrap()).collect();
        for (&block, stream) in blocks.iter().zip(1..) {
            gpu.driver().launch(StreamId(stream));
            gpu.record_stream(block, StreamId(stream)).unwrap();
        }
        blocks.iter().for_each(|&block| gpu.free(block).unwrap());
        blocks
    }

    fn pair(gpu: &Gpu, bytes: u64) {
        cache(gpu, bytes, S0);
    }

    // ---- event queries ----

    #[test]
    fn an_allocation_queries_a_bounded_number_of_streams() {
        for conf in ALL_POLICIES {
            let gpu = gpu(64 << 10, conf);
            pair(&gpu, 8 * MIB);
            pend(&gpu, 3000, 4 * KIB);
            pair(&gpu, 4 * KIB);
            for _ in 0..100 {
                let queries = calls_during(&gpu, Call::EventQuery, || pair(&gpu, 4 * KIB));
                assert_eq!(queries, 16, "{conf}");
            }
            gpu.check_invariants().unwrap();
        }
    }

    #[test]
    fn an_allocation_queries_every_stream_if_there_are_at_most_64() {
        for conf in ALL_POLICIES {
            let gpu = gpu(1024, conf);
            pair(&gpu, 8 * MIB);
            pend(&gpu, 64, 4 * KIB);
            for _ in 0..3 {
                assert_eq!(
                    calls_during(&gpu, Call::EventQuery, || pair(&gpu, 4 * KIB)),
                    64,
                    "{conf}"
                );
            }
            gpu.driver().finish_all();
            pair(&gpu, 4 * KIB);
            assert_eq!(gpu.kept().pending_streams, 0, "{conf}");
            assert_eq!(gpu.stats().active_bytes.all.current, 0, "{conf}");
        }
    }

    #[test]
    fn allocations_query_the_streams_in_turn() {
        for conf in ALL_POLICIES {
            let gpu = gpu(1024, conf);
            pair(&gpu, 8 * MIB);
            pend(&gpu, 1000, 4 * KIB);
            // These include the last stream in the order, whichever stream comes first.
            for stream in [1000, 1, 500, 77, 999] {
                gpu.driver().finish(StreamId(stream));
                let before = gpu.kept().pending_streams;
                for _ in 0..1000_usize.div_ceil(16) {
                    pair(&gpu, 4 * KIB);
                }
                assert_eq!(gpu.kept().pending_streams, before - 1, "{conf}, stream {stream}");
            }
            gpu.check_invariants().unwrap();
        }
    }

    #[test]
    fn an_allocation_completes_a_bounded_number_of_frees() {
        for conf in ALL_POLICIES {
            let gpu = gpu(1024, conf);
            pair(&gpu, 8 * MIB);
            let blocks: Vec<u64> = (0..5000).map(|_| gpu.alloc(4 * KIB, S0).unwrap()).collect();
            gpu.driver().launch(S1);
            blocks.iter().for_each(|&block| gpu.record_stream(block, S1).unwrap());
            blocks.iter().for_each(|&block| gpu.free(block).unwrap());
            gpu.driver().finish_all();
            for left in [3976, 2952, 1928, 904, 0] {
                pair(&gpu, 4 * KIB);
                assert_eq!(gpu.stats().active.all.current, left, "{conf}");
            }
            gpu.check_invariants().unwrap();
        }
    }

    /// Before a miss asks the driver for memory, it queries every stream with pending frees.
    #[test]
    fn a_miss_queries_every_stream() {
        for conf in ALL_POLICIES {
            let gpu = gpu(8 << 10, conf);
            let blocks = pend(&gpu, 1000, 2 * MIB);
            // Use up all other memory that the engine holds.
            while gpu.would_hit(2 * MIB, S0) {
                gpu.alloc(2 * MIB, S0).unwrap();
            }
            pair(&gpu, 4 * KIB);
            let held = gpu.stats().reserved_bytes.all.current;
            gpu.driver().finish(StreamId(998));
            let queries = calls_during(&gpu, Call::EventQuery, || {
                assert_eq!(gpu.alloc(2 * MIB, S0).unwrap(), blocks[997], "{conf}");
            });
            assert!(queries <= 64 + 1001, "{conf}: {queries}");
            assert_eq!(gpu.stats().reserved_bytes.all.current, held, "{conf}");
            gpu.check_invariants().unwrap();
        }
    }

    /// Before the engine refuses a request it queries every stream, a bounded number at a time.
    #[test]
    fn no_request_is_refused_while_a_finished_free_is_unseen() {
        for conf in ALL_POLICIES {
            let gpu = gpu(5000 * 2 + 20, conf);
            gpu.configure("wait_ms:0").unwrap();
            let blocks = pend(&gpu, 5000, 2 * MIB);
            // Use up the rest of the device.
            while gpu.alloc(2 * MIB, S0).is_ok() {}
            for stream in [4999, 3000, 1, 5000] {
                gpu.driver().finish(StreamId(stream));
                let index = usize::try_from(stream).unwrap() - 1;
                assert_eq!(gpu.alloc(2 * MIB, S0).unwrap(), blocks[index], "{conf}");
            }
            gpu.check_invariants().unwrap();
        }
    }

    #[test]
    fn empty_cache_waits_for_each_event_once() {
        for conf in ALL_POLICIES {
            let gpu = gpu(1024, conf);
            pend(&gpu, 3000, 4 * KIB);
            let queries = calls_during(&gpu, Call::EventQuery, || {
                let waits =
                    calls_during(&gpu, Call::EventSynchronize, || gpu.empty_cache().unwrap());
                assert_eq!(waits, 3000, "{conf}");
            });
            assert_eq!(queries, 3000, "{conf}");
            assert_eq!(gpu.stats().reserved_bytes.all.current, 0, "{conf}");
        }
    }

    #[test]
    fn emptying_one_pool_does_not_complete_the_frees_of_other_pools() {
        for conf in ALL_POLICIES {
            let gpu = gpu(1024, conf);
            gpu.begin_allocate_to_pool(POOL, Box::new(|stream| stream == S2)).unwrap();
            gpu.end_allocate_to_pool(POOL).unwrap();
            let other = gpu.alloc(4 * KIB, S0).unwrap();
            let mut own = Vec::new();
            gpu.create_pool(POOL).unwrap();
            gpu.begin_allocate_to_pool(POOL, Box::new(|_| true)).unwrap();
            own.extend((0..2000).map(|_| gpu.alloc(4 * KIB, S0).unwrap()));
            gpu.end_allocate_to_pool(POOL).unwrap();
            for uses in (0..3).rev() {
                gpu.release_pool(POOL).unwrap();
                assert_eq!(gpu.pool_uses(POOL).unwrap(), uses);
            }
            gpu.driver().launch(S1);
            for &block in std::iter::once(&other).chain(&own) {
                gpu.record_stream(block, S1).unwrap();
                gpu.free(block).unwrap();
            }
            gpu.empty_cache_of(POOL).unwrap();
            assert_eq!(gpu.stats().active.all.current, 1, "{conf}");
            assert!(gpu.pool_uses(POOL).is_err(), "{conf}: the pool still exists");
            gpu.check_invariants().unwrap();
        }
    }

    // ---- refusals ----

    #[test]
    fn a_refusal_visits_each_pending_block_at_most_ten_times() {
        const COUNT: u64 = 8000;
        for conf in ALL_POLICIES {
            let gpu = gpu(COUNT * 2 + 64, conf);
            gpu.configure("wait_ms:0").unwrap();
            let blocks: Vec<u64> = (0..COUNT).map(|_| gpu.alloc(2 * MIB, S0).unwrap()).collect();
            // Each block is pending on two streams.
            for stream in [S1, S2] {
                gpu.driver().launch(stream);
                blocks.iter().for_each(|&block| gpu.record_stream(block, stream).unwrap());
            }
            // One block in the middle is free; all others are pending.
            gpu.driver().finish_all();
            gpu.free(blocks[4000]).unwrap();
            gpu.process_events().unwrap();
            for stream in [S1, S2] {
                gpu.driver().launch(stream);
            }
            for (at, &block) in blocks.iter().enumerate() {
                if at != 4000 {
                    gpu.free(block).unwrap();
                }
            }
            let before = gpu.kept().looks_at_pending;
            let refused = gpu.alloc((COUNT * 2 + 40) * MIB, S0);
            assert!(matches!(refused, Err(AllocError::FullNow(_))), "{conf}: {refused:?}");
            let looks = gpu.kept().looks_at_pending - before;
            assert!(looks <= 10 * COUNT, "{conf}: {looks}");
            gpu.check_invariants().unwrap();
        }
    }

    // ---- metadata ----

    #[test]
    fn no_metadata_of_unused_streams_is_kept() {
        for conf in ALL_POLICIES {
            let gpu = gpu(1 << 20, conf);
            let mut live = Vec::new();
            for stream in (1..=50_000).map(StreamId) {
                live.push(gpu.alloc(4 * KIB, stream).unwrap());
                if stream.0 % 10 == 0 {
                    live.push(gpu.alloc(3 * MIB, stream).unwrap());
                }
                if stream.0 % 5_000 == 0 {
                    assert!(gpu.kept().lanes >= 5_500, "{conf}");
                    live.drain(..).for_each(|block| gpu.free(block).unwrap());
                    gpu.empty_cache().unwrap();
                    assert_eq!(gpu.kept().lanes, 0, "{conf}");
                }
            }
            let kept = gpu.kept();
            assert_eq!((kept.lanes, kept.lane_figures), (0, 0), "{conf}");
            assert_eq!((kept.blocks, kept.segments), (0, 0), "{conf}");
            assert_eq!(kept.addresses, 0, "{conf}");
            assert!(kept.room_for_lane_figures <= 100, "{conf}: {kept:?}");
            assert!(kept.room_for_blocks <= 1024, "{conf}: {kept:?}");
            assert!(kept.room_for_segments <= 1024, "{conf}: {kept:?}");
            assert!(gpu.stats().lanes.is_empty(), "{conf}");
            assert_eq!(gpu.driver().reserved_addresses(), 0, "{conf}");
            // The same streams can be used again.
            for stream in (1..=50).map(StreamId) {
                let block = gpu.alloc(4 * KIB, stream).unwrap();
                gpu.record_stream(block, S0).unwrap();
                gpu.free(block).unwrap();
            }
            gpu.check_invariants().unwrap();
        }
    }

    #[test]
    fn metadata_of_a_million_freed_blocks_is_released() {
        for conf in ALL_POLICIES {
            let gpu = gpu(4 << 10, conf);
            // One early block stays live.
            let first = gpu.alloc(KIB, S0).unwrap();
            let blocks: Vec<u64> = (0..1_000_000).map(|_| gpu.alloc(KIB, S0).unwrap()).collect();
            blocks.iter().step_by(2).for_each(|&block| gpu.free(block).unwrap());
            blocks.iter().skip(1).step_by(2).for_each(|&block| gpu.free(block).unwrap());
            assert!(gpu.kept().room_for_blocks >= 1_000_000, "{conf}");
            gpu.empty_cache().unwrap();
            let kept = gpu.kept();
            assert!(kept.blocks <= 3, "{conf}: {kept:?}");
            assert!(kept.room_for_live <= 1024, "{conf}: {kept:?}");
            gpu.free(first).unwrap();
            gpu.empty_cache().unwrap();
            assert_eq!(gpu.kept().blocks, 0, "{conf}");
            // Small blocks can be allocated again, in the lowest slots of the tables.
            let blocks: Vec<u64> = (0..1000).map(|_| gpu.alloc(KIB, S0).unwrap()).collect();
            blocks.iter().for_each(|&block| gpu.free(block).unwrap());
            gpu.check_invariants().unwrap();
        }
    }

    /// A proof that a stream is idle must not apply to a new lane of that stream.
    #[test]
    fn a_lane_that_is_created_again_is_a_different_lane() {
        for conf in ALL_POLICIES {
            let gpu = gpu(1024, conf);
            for _ in 0..10 {
                for _ in 0..5 {
                    for bytes in [4 * KIB, 3 * MIB, 30 * MIB] {
                        let block = gpu.alloc(bytes, S1).unwrap();
                        gpu.driver().launch(S1);
                        gpu.free(block).unwrap();
                    }
                }
                gpu.check_invariants().unwrap();
                gpu.empty_cache().unwrap();
                assert_eq!(gpu.kept().lanes, 0, "{conf}");
                gpu.check_invariants().unwrap();
            }
        }
    }

    // ---- addresses ----

    const DEVICE: u64 = 140 * GIB;

    fn device_mib() -> u64 {
        DEVICE / MIB
    }

    /// Allocates blocks of these sizes in the private pool `number`, as a graph capture does.
    fn graph(gpu: &Gpu, number: u64, sizes: &[u64]) -> Vec<u64> {
        let pool = PoolId(0, number);
        gpu.begin_allocate_to_pool(pool, Box::new(|_| true)).unwrap();
        let blocks = sizes.iter().map(|&bytes| gpu.alloc(bytes, S0).unwrap()).collect();
        gpu.end_allocate_to_pool(pool).unwrap();
        blocks
    }

    #[test]
    fn reserved_addresses_are_bounded_by_a_multiple_of_the_device() {
        for (conf, constant) in [(PAGED, 0), (EXPANDABLE, 1024 * GIB)] {
            let gpu = gpu(device_mib(), conf);
            let mut live = Vec::new();
            for number in 1..=1000 {
                live.extend(graph(&gpu, number, &[2 * MIB, 4 * KIB]));
            }
            for stream in (1..=10_000).map(StreamId) {
                live.push(gpu.alloc(4 * KIB, stream).unwrap());
                // `expandable` rounds each large block up to 20 MiB: 10,000 of them do not fit.
                if conf == PAGED || stream.0 <= 4000 {
                    live.push(gpu.alloc(3 * MIB, stream).unwrap());
                }
            }
            let addresses = gpu.driver().reserved_addresses();
            assert!(addresses <= 4 * DEVICE + constant, "{conf}: {} GiB", addresses / GIB);
            assert_eq!(addresses, gpu.kept().addresses, "{conf}");
            gpu.check_invariants().unwrap();
            // Every lane can grow beyond its first address range, several times.
            for number in [1, 2, 3, 500, 1000] {
                let sizes = [30 * MIB, 3 * MIB, 70 * MIB, 4 * KIB, MIB, 5 * MIB, 200 * MIB];
                live.extend(graph(&gpu, number, &sizes));
            }
            for stream in [1, 2, 3, 9, 4000].map(StreamId) {
                for bytes in [9 * MIB, 2 * MIB, 40 * MIB, 4 * KIB, 100 * MIB] {
                    live.push(gpu.alloc(bytes, stream).unwrap());
                }
            }
            gpu.check_invariants().unwrap();
            live.iter().for_each(|&block| gpu.free(block).unwrap());
            for number in 1..=1000 {
                gpu.release_pool(PoolId(0, number)).unwrap();
            }
            gpu.check_invariants().unwrap();
        }
    }

    #[test]
    fn the_first_streams_reserve_as_many_addresses_as_in_pytorch() {
        for conf in ON_PAGES {
            let gpu = gpu(device_mib(), conf);
            let whole = (DEVICE + DEVICE / 8).next_multiple_of(20 * MIB);
            for stream in 0..2 {
                let before = gpu.driver().reserved_addresses();
                gpu.alloc(3 * MIB, StreamId(stream)).unwrap();
                let more = gpu.driver().reserved_addresses() - before;
                assert!(more >= DEVICE + DEVICE / 8 && more <= whole, "{conf}: {more}");
            }
        }
    }

    #[test]
    fn a_refused_stream_keeps_no_addresses() {
        for conf in ON_PAGES {
            let gpu = gpu(64, conf);
            let all = gpu.alloc(60 * MIB, S0).unwrap();
            let before = gpu.kept();
            for stream in (1..100).map(StreamId) {
                assert!(gpu.alloc(20 * MIB, stream).is_err(), "{conf}");
            }
            let after = gpu.kept();
            assert_eq!((after.addresses, after.lanes), (before.addresses, before.lanes), "{conf}");
            gpu.free(all).unwrap();
        }
    }

    /// A lane of several short address ranges serves requests, grows, is emptied and grows again.
    #[test]
    fn a_lane_of_many_address_ranges_works() {
        for conf in ON_PAGES {
            let gpu = gpu(20 << 10, conf);
            // Other streams have reserved many addresses before.
            let _others: Vec<u64> =
                (1..80).map(|stream| gpu.alloc(3 * MIB, StreamId(stream)).unwrap()).collect();
            let own = StreamId(100);
            let (mut live, mut reserved) = (Vec::new(), 0);
            for round in 0..3 {
                for at in 0..600_u64 {
                    let bytes = (1 + at * 7919 % 13) * MIB + at % 5 * 512;
                    reserved += calls_during(&gpu, Call::Reserve, || {
                        live.push(gpu.alloc(bytes, own).unwrap());
                    });
                    if at % 3 == 0 {
                        let index = usize::try_from(at * 31).unwrap() % live.len();
                        gpu.free(live.swap_remove(index)).unwrap();
                    }
                    if at % 50 == 0 {
                        gpu.check_invariants().unwrap();
                    }
                }
                if conf == EXPANDABLE {
                    // Each range is twice as large as all earlier ones together.
                    assert!(reserved <= 10 * (round + 1), "{conf}: {reserved}");
                }
                live.drain(..).for_each(|block| gpu.free(block).unwrap());
                if round == 1 {
                    gpu.empty_cache().unwrap();
                }
                gpu.check_invariants().unwrap();
            }
            cache(&gpu, 8 * GIB, own);
            gpu.check_invariants().unwrap();
        }
    }

    /// Runs the program on a stream that is created after `others` other streams. Returns the
    /// offsets of its blocks from the first one, up to the first block that does not fit into the
    /// stream's first address range.
    fn layout(others: u64, program: &[(u64, usize)]) -> Vec<u64> {
        let gpu = gpu(16 << 10, EXPANDABLE);
        for stream in 1..=others {
            gpu.alloc(3 * MIB, StreamId(stream)).unwrap();
        }
        let own = StreamId(100);
        let before = gpu.driver().reserved_addresses();
        let first = gpu.alloc(3 * MIB, own).unwrap();
        let is_long = gpu.driver().reserved_addresses() - before >= 18 * GIB;
        assert_eq!(is_long, others == 0, "a late stream reserves fewer addresses");
        let ranges = calls(&gpu, Call::Reserve);
        let (mut live, mut at) = (Vec::new(), Vec::new());
        for &(bytes, choice) in program {
            let block = gpu.alloc(bytes, own).unwrap();
            if calls(&gpu, Call::Reserve) > ranges {
                break;
            }
            live.push(block);
            at.push(block - first);
            if choice % 3 > 0 {
                gpu.free(live.swap_remove(choice % live.len())).unwrap();
            }
            if choice % 17 == 0 {
                gpu.empty_cache().unwrap();
            }
        }
        at
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        /// PyTorch reserves the same number of addresses for every stream. Cushion reserves fewer
        /// for later streams, with the same layout.
        #[test]
        fn a_short_address_range_has_the_layout_of_a_long_one(
            program in prop::collection::vec((2 * MIB..120 * MIB, any::<usize>()), 1..120),
        ) {
            let (long, short) = (layout(0, &program), layout(59, &program));
            prop_assert_eq!(&long[..short.len()], &short[..]);
            prop_assert!(short.len() == program.len() || short.len() >= 5, "{}", short.len());
        }
    }
}
