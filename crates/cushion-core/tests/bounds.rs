//! What one call may do, and what stays behind, is bounded: however many streams, pending frees, blocks and pools there
//! are. Everything is counted, and nothing is timed.

mod common;

#[cfg(test)]
mod tests {
    use cushion_core::driver::Call;
    use cushion_core::size::{GIB, KIB, MIB};
    use cushion_core::{AllocError, PoolId, StreamId};
    use proptest::prelude::*;

    use crate::common::*;

    const ALL: [&str; 3] = ["", EXPANDABLE, PAGED];

    fn count(gpu: &Gpu, call: Call) -> u64 {
        gpu.driver().counts().of(call)
    }

    /// How many of a call `f` makes.
    fn calls(gpu: &Gpu, call: Call, f: impl FnOnce()) -> u64 {
        let before = count(gpu, call);
        f();
        count(gpu, call) - before
    }

    /// A block of the main stream that other streams, from 1 on, work on one each, freed.
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
        let block = gpu.alloc(bytes, S0).unwrap();
        gpu.free(block).unwrap();
    }

    // ---- asking for events ----

    #[test]
    fn an_allocation_asks_a_bounded_number_of_streams() {
        for conf in ALL {
            let gpu = gpu(64 << 10, conf);
            pair(&gpu, 8 * MIB);
            pend(&gpu, 3000, 4 * KIB);
            pair(&gpu, 4 * KIB);
            for _ in 0..100 {
                let asked = calls(&gpu, Call::EventQuery, || pair(&gpu, 4 * KIB));
                assert_eq!(asked, 16, "{conf}");
            }
            gpu.check_invariants().unwrap();
        }
    }

    #[test]
    fn up_to_64_streams_all_are_asked_from_the_first_on() {
        for conf in ALL {
            let gpu = gpu(1024, conf);
            pair(&gpu, 8 * MIB);
            pend(&gpu, 64, 4 * KIB);
            for _ in 0..3 {
                assert_eq!(calls(&gpu, Call::EventQuery, || pair(&gpu, 4 * KIB)), 64, "{conf}");
            }
            gpu.driver().finish_all();
            pair(&gpu, 4 * KIB);
            assert_eq!(gpu.kept().pending_streams, 0, "{conf}");
            assert_eq!(gpu.stats().active_bytes.all.current, 0, "{conf}");
        }
    }

    #[test]
    fn every_stream_has_its_turn() {
        for conf in ALL {
            let gpu = gpu(1024, conf);
            pair(&gpu, 8 * MIB);
            pend(&gpu, 1000, 4 * KIB);
            // The last that anybody would come to, whichever was asked first.
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
        for conf in ALL {
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

    /// What is done, but was not asked for, comes before the driver.
    #[test]
    fn a_miss_asks_all() {
        for conf in ALL {
            let gpu = gpu(8 << 10, conf);
            let blocks = pend(&gpu, 1000, 2 * MIB);
            // All the rest that is held is in use.
            while gpu.would_hit(2 * MIB, S0) {
                gpu.alloc(2 * MIB, S0).unwrap();
            }
            pair(&gpu, 4 * KIB);
            let held = gpu.stats().reserved_bytes.all.current;
            gpu.driver().finish(StreamId(998));
            let asked = calls(&gpu, Call::EventQuery, || {
                assert_eq!(gpu.alloc(2 * MIB, S0).unwrap(), blocks[997], "{conf}");
            });
            assert!(asked <= 64 + 1001, "{conf}: {asked}");
            assert_eq!(gpu.stats().reserved_bytes.all.current, held, "{conf}");
            gpu.check_invariants().unwrap();
        }
    }

    /// Before a request is refused all streams are asked, a bounded number at a time.
    #[test]
    fn no_request_is_refused_for_what_was_not_asked_for() {
        for conf in ALL {
            let gpu = gpu(5000 * 2 + 20, conf);
            gpu.configure("wait_ms:0").unwrap();
            let blocks = pend(&gpu, 5000, 2 * MIB);
            // The rest of the device.
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
    fn emptying_waits_for_each_event_once() {
        for conf in ALL {
            let gpu = gpu(1024, conf);
            pend(&gpu, 3000, 4 * KIB);
            let queries = calls(&gpu, Call::EventQuery, || {
                let waits = calls(&gpu, Call::EventSynchronize, || gpu.empty_cache().unwrap());
                assert_eq!(waits, 3000, "{conf}");
            });
            assert_eq!(queries, 3000, "{conf}");
            assert_eq!(gpu.stats().reserved_bytes.all.current, 0, "{conf}");
        }
    }

    #[test]
    fn emptying_one_pool_leaves_the_pending_frees_of_others() {
        for conf in ALL {
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
            assert!(gpu.pool_uses(POOL).is_err(), "{conf}: the pool is gone");
            gpu.check_invariants().unwrap();
        }
    }

    // ---- refusals ----

    /// A refusal looks at each pending block a few times, wherever they lie.
    #[test]
    fn a_refusal_looks_at_pending_blocks_a_few_times() {
        const COUNT: u64 = 8000;
        for conf in ALL {
            let gpu = gpu(COUNT * 2 + 64, conf);
            gpu.configure("wait_ms:0").unwrap();
            let blocks: Vec<u64> = (0..COUNT).map(|_| gpu.alloc(2 * MIB, S0).unwrap()).collect();
            // Two streams, so that each block comes up twice.
            for stream in [S1, S2] {
                gpu.driver().launch(stream);
                blocks.iter().for_each(|&block| gpu.record_stream(block, stream).unwrap());
            }
            // The last is free, and so is one in the middle.
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

    // ---- what stays ----

    #[test]
    fn nothing_stays_of_streams_that_came_and_went() {
        for conf in ALL {
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
            // They may come again.
            for stream in (1..=50).map(StreamId) {
                let block = gpu.alloc(4 * KIB, stream).unwrap();
                gpu.record_stream(block, S0).unwrap();
                gpu.free(block).unwrap();
            }
            gpu.check_invariants().unwrap();
        }
    }

    #[test]
    fn little_stays_of_a_million_blocks() {
        for conf in ALL {
            let gpu = gpu(4 << 10, conf);
            // One that is there from the beginning stays.
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
            // Small ones again, now in the lowest places.
            let blocks: Vec<u64> = (0..1000).map(|_| gpu.alloc(KIB, S0).unwrap()).collect();
            blocks.iter().for_each(|&block| gpu.free(block).unwrap());
            gpu.check_invariants().unwrap();
        }
    }

    /// A stream whose lane went and came again is not taken for the one that was waited for.
    #[test]
    fn a_lane_that_comes_again_is_another_one() {
        for conf in ALL {
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

    fn large() -> u64 {
        DEVICE / MIB
    }

    /// A graph's pool, with something in it.
    fn graph(gpu: &Gpu, number: u64, sizes: &[u64]) -> Vec<u64> {
        let pool = PoolId(0, number);
        gpu.begin_allocate_to_pool(pool, Box::new(|_| true)).unwrap();
        let blocks = sizes.iter().map(|&bytes| gpu.alloc(bytes, S0).unwrap()).collect();
        gpu.end_allocate_to_pool(pool).unwrap();
        blocks
    }

    #[test]
    fn addresses_grow_with_use() {
        for (conf, constant) in [(PAGED, 0), (EXPANDABLE, 1024 * GIB)] {
            let gpu = gpu(large(), conf);
            let mut live = Vec::new();
            for number in 1..=1000 {
                live.extend(graph(&gpu, number, &[2 * MIB, 4 * KIB]));
            }
            for stream in (1..=10_000).map(StreamId) {
                live.push(gpu.alloc(4 * KIB, stream).unwrap());
                // What each large one takes of PyTorch's pages is more than the device has for all.
                if conf == PAGED || stream.0 <= 4000 {
                    live.push(gpu.alloc(3 * MIB, stream).unwrap());
                }
            }
            let addresses = gpu.driver().reserved_addresses();
            assert!(addresses <= 4 * DEVICE + constant, "{conf}: {} GiB", addresses / GIB);
            assert_eq!(addresses, gpu.kept().addresses, "{conf}");
            gpu.check_invariants().unwrap();
            // All of them can grow: beyond their first addresses, and again.
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
    fn addresses_are_as_ever_for_a_few_streams() {
        for conf in [PAGED, EXPANDABLE] {
            let gpu = gpu(large(), conf);
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
        for conf in [PAGED, EXPANDABLE] {
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

    /// A lane with several ranges of few addresses each serves, grows, gives back and grows again.
    #[test]
    fn a_lane_of_many_ranges_works() {
        for conf in [PAGED, EXPANDABLE] {
            let gpu = gpu(20 << 10, conf);
            // Others took plenty of addresses before.
            let _others: Vec<u64> =
                (1..80).map(|stream| gpu.alloc(3 * MIB, StreamId(stream)).unwrap()).collect();
            let own = StreamId(100);
            let (mut live, mut reserved) = (Vec::new(), 0);
            for round in 0..3 {
                for at in 0..600_u64 {
                    let bytes = (1 + at * 7919 % 13) * MIB + at % 5 * 512;
                    reserved += calls(&gpu, Call::Reserve, || {
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
                    // Each range is twice as large as all before it.
                    assert!(reserved <= 10 * (round + 1), "{conf}: {reserved}");
                }
                live.drain(..).for_each(|block| gpu.free(block).unwrap());
                if round == 1 {
                    gpu.empty_cache().unwrap();
                }
                gpu.check_invariants().unwrap();
            }
            let block = gpu.alloc(8 * GIB, own).unwrap();
            gpu.free(block).unwrap();
            gpu.check_invariants().unwrap();
        }
    }

    /// Where the program's blocks lie, from the first one on, in a stream that comes after `others`; up to the first that
    /// has no room in the stream's first range.
    fn layout(others: u64, program: &[(u64, usize)]) -> Vec<u64> {
        let gpu = gpu(16 << 10, EXPANDABLE);
        for stream in 1..=others {
            gpu.alloc(3 * MIB, StreamId(stream)).unwrap();
        }
        let own = StreamId(100);
        let before = gpu.driver().reserved_addresses();
        let first = gpu.alloc(3 * MIB, own).unwrap();
        let is_whole = gpu.driver().reserved_addresses() - before >= 18 * GIB;
        assert_eq!(is_whole, others == 0, "it has fewer addresses if others have plenty");
        let ranges = count(&gpu, Call::Reserve);
        let (mut live, mut at) = (Vec::new(), Vec::new());
        for &(bytes, choice) in program {
            let block = gpu.alloc(bytes, own).unwrap();
            if count(&gpu, Call::Reserve) > ranges {
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

        /// PyTorch reserves as many addresses for each stream. A later one gets fewer here, and is laid out the same.
        #[test]
        fn fewer_addresses_are_laid_out_as_pytorchs(
            program in prop::collection::vec((2 * MIB..120 * MIB, any::<usize>()), 1..120),
        ) {
            let (whole, fewer) = (layout(0, &program), layout(59, &program));
            prop_assert_eq!(&whole[..fewer.len()], &fewer[..]);
            prop_assert!(fewer.len() == program.len() || fewer.len() >= 5, "{}", fewer.len());
        }
    }
}
