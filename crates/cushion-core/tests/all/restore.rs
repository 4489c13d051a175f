//! An engine that is restored from the state of another engine behaves like that engine.

#[cfg(test)]
mod tests {
    use cushion_core::size::MIB;
    use cushion_core::{
        BlockUse, HeldBlock, HeldSegment, PoolId, RestoreError, SegmentFigures, StreamId,
    };
    use proptest::collection::vec;
    use proptest::prelude::*;

    use crate::common::{EXPANDABLE, Gpu, PAGED, POLICIES, POOL, S0, S1, every_stream, gpu};

    /// Returns the state of one segment.
    fn held(segment: &SegmentFigures, range: Option<u64>) -> HeldSegment {
        let live = segment.blocks.iter().filter(|block| block.use_ == BlockUse::Live);
        HeldSegment {
            address: segment.address,
            size: segment.size,
            stream: segment.stream,
            pool: segment.pool,
            small: segment.small,
            range,
            live: live
                .map(|block| HeldBlock {
                    address: block.address,
                    size: block.size,
                    requested: block.requested,
                })
                .collect(),
        }
    }

    /// Returns the state of all segments. The first page of each address range must be mapped.
    fn all_held(gpu: &Gpu) -> Vec<HeldSegment> {
        let segments = gpu.snapshot().segments;
        let range = |of: &SegmentFigures| {
            let same = |s: &&SegmentFigures| {
                (s.stream, s.pool, s.small, s.paged) == (of.stream, of.pool, of.small, true)
            };
            segments.iter().filter(same).map(|segment| segment.address).min()
        };
        segments.iter().map(|s| held(s, range(s).filter(|_| s.paged))).collect()
    }

    /// Returns a new engine with the same memory at the same addresses.
    fn copy(gpu: &Gpu, conf: &str) -> Gpu {
        let copy = crate::common::gpu(4096, conf);
        // The simulated device assigns addresses in the order of the requests.
        let mut all = all_held(gpu);
        all.sort_by_key(|segment| (segment.range.unwrap_or(segment.address), segment.address));
        for (segment, base) in all.iter().zip(copy.restore(&all, |_| {})) {
            assert_eq!(base, Ok(segment.address));
        }
        copy.check_invariants().unwrap();
        copy
    }

    fn any_request() -> impl Strategy<Value = (u64, u64, usize)> {
        let size = prop_oneof![1..4_000_u64, 1..3 * MIB, 1..40 * MIB];
        (size, 0..2_u64, 0..64_usize)
    }

    /// Makes the requests, with a free after most of them; returns the allocated addresses.
    fn run(gpu: &Gpu, requests: &[(u64, u64, usize)], live: &mut Vec<u64>) -> Vec<u64> {
        let mut allocated = Vec::new();
        for &(size, stream, which) in requests {
            if let Ok(address) = gpu.alloc(size, StreamId(stream)) {
                allocated.push(address);
                live.push(address);
            }
            if which % 3 != 0 && !live.is_empty() {
                gpu.free(live.swap_remove(which % live.len())).unwrap();
            }
        }
        allocated
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1000))]
        #[test]
        fn a_restored_engine_behaves_like_the_first(
            before in vec(any_request(), 1..60),
            after in vec(any_request(), 1..60),
        ) {
            for conf in POLICIES {
                let first = gpu(4096, conf);
                let mut live = Vec::new();
                run(&first, &before, &mut live);
                let second = copy(&first, conf);
                prop_assert_eq!(second.live_and_reserved(), first.live_and_reserved());
                let blocks = |gpu: &Gpu| -> Vec<_> {
                    let all = gpu.snapshot().segments.into_iter().flat_map(|s| s.blocks);
                    all.map(|block| (block.address, block.size, block.use_)).collect()
                };
                prop_assert_eq!(blocks(&second), blocks(&first));
                let (mut live_too, expected) = (live.clone(), run(&first, &after, &mut live));
                prop_assert_eq!(run(&second, &after, &mut live_too), expected);
                second.check_invariants().unwrap();
                prop_assert_eq!(blocks(&second), blocks(&first));
            }
        }
    }

    #[test]
    fn private_pools_are_restored_with_one_use() {
        let first = gpu(4096, "");
        first.begin_allocate_to_pool(POOL, every_stream()).unwrap();
        let address = first.alloc(100, S1).unwrap();
        first.end_allocate_to_pool(POOL).unwrap();
        let second = copy(&first, "");
        assert_eq!(second.pool_uses(POOL), Ok(1));
        // Its free memory serves only the pool.
        second.free(address).unwrap();
        assert_ne!(second.alloc(100, S1).unwrap(), address);
        second.begin_allocate_to_pool(POOL, every_stream()).unwrap();
        assert_eq!(second.alloc(100, S1).unwrap(), address);
        second.check_invariants().unwrap();
    }

    #[test]
    fn segments_of_one_address_range_share_the_reservation() {
        let gpu = gpu(4096, EXPANDABLE);
        let segment = |address: u64| HeldSegment {
            address,
            size: 20 * MIB,
            stream: S0,
            pool: PoolId::DEFAULT,
            small: false,
            range: Some(1 << 40),
            live: Vec::new(),
        };
        let segments = [segment((1 << 40) + 20 * MIB), segment((1 << 40) + 80 * MIB)];
        let mut reserved = 0;
        let bases = gpu.restore(&segments, |_| reserved += 1);
        assert_eq!(reserved, 1);
        let bases: Vec<u64> = bases.into_iter().map(Result::unwrap).collect();
        assert_eq!(bases[1] - bases[0], 60 * MIB);
        gpu.check_invariants().unwrap();
        // The hole before the first segment is the lowest address with room.
        assert_eq!(gpu.alloc(38 * MIB, S0).unwrap(), bases[0] - 20 * MIB);
        gpu.check_invariants().unwrap();
    }

    #[test]
    fn memory_on_pages_of_any_size_is_restored() {
        for into in [PAGED, EXPANDABLE, ""] {
            let first = gpu(4096, PAGED);
            let live: Vec<u64> = (0..8).map(|i| first.alloc((3 + i) * MIB, S0).unwrap()).collect();
            first.alloc(1000, S0).unwrap();
            first.free(live[2]).unwrap();
            let all = all_held(&first);
            let second = gpu(4096, into);
            let restored = second.restore(&all, |_| {});
            assert!(restored.iter().all(Result::is_ok), "{restored:?}");
            assert_eq!(second.live_and_reserved(), first.live_and_reserved());
            second.check_invariants().unwrap();
            second.alloc(5 * MIB, S0).unwrap();
            second.alloc(500 * MIB, S0).unwrap();
            second.check_invariants().unwrap();
        }
    }

    #[test]
    fn an_address_inside_another_home_range_is_refused() {
        let gpu = gpu(256, PAGED);
        let range = 1 << 40;
        let held = |address: u64, range: u64| HeldSegment {
            address,
            size: 20 * MIB,
            stream: S0,
            pool: PoolId::DEFAULT,
            small: false,
            range: Some(range),
            live: vec![HeldBlock { address, size: 20 * MIB, requested: 20 * MIB }],
        };
        // The first range has 300 MiB. The request in the callback reserves homes after it, before
        // the second range is reserved.
        let all = [held(range, range), held(1 << 41, 1 << 41), held(range + 340 * MIB, range)];
        let mut placed = 0;
        let results = gpu.restore(&all, |_| {
            placed += 1;
            if placed == 2 {
                gpu.alloc(2 * MIB, S0).unwrap();
            }
        });
        let Err(RestoreError::Impossible { what, .. }) = &results[2] else { panic!("{results:?}") };
        assert!(what.contains("taken"), "{what}");
        gpu.check_invariants().unwrap();
    }

    #[test]
    fn an_impossible_state_is_refused_and_nothing_is_lost() {
        let valid = HeldSegment {
            address: 1 << 40,
            size: 20 * MIB,
            stream: S0,
            pool: PoolId::DEFAULT,
            small: false,
            range: None,
            live: vec![HeldBlock { address: 1 << 40, size: 512, requested: 3 }],
        };
        let block = valid.live[0];
        let with = |live: Vec<HeldBlock>| HeldSegment { live, ..valid.clone() };
        for (what, broken) in [
            ("size", HeldSegment { size: 0, ..valid.clone() }),
            ("size", HeldSegment { size: 700, ..valid.clone() }),
            ("end", HeldSegment { address: u64::MAX - 511, ..valid.clone() }),
            ("overlap", with(vec![block, block])),
            ("overlap", with(vec![HeldBlock { address: 512, ..block }])),
            ("overlap", with(vec![HeldBlock { size: 1 << 40, ..block }])),
            ("aligned", with(vec![HeldBlock { size: 100, ..block }])),
            ("aligned", with(vec![HeldBlock { address: (1 << 40) + 4, ..block }])),
            ("request", with(vec![HeldBlock { requested: 513, ..block }])),
            ("before", HeldSegment { range: Some(2 << 40), ..valid.clone() }),
            ("pages", HeldSegment { range: Some((1 << 40) - 512), ..valid.clone() }),
            ("too small", HeldSegment { range: Some(1), ..valid.clone() }),
        ] {
            let gpu = gpu(4096, EXPANDABLE);
            let results = gpu.restore(&[broken, valid.clone()], |_| {});
            let Err(RestoreError::Impossible { what: told, .. }) = &results[0] else {
                panic!("{what}: {:?}", results[0]);
            };
            assert!(told.contains(what), "{what}: {told}");
            assert!(results[1].is_ok(), "{what}");
            gpu.check_invariants().unwrap();
        }
        // A segment that is larger than the device is refused, and nothing is reserved.
        for (size, range) in
            [(1 << 60, None), (1 << 60, Some(1 << 40)), (40 * MIB, None), (40 * MIB, Some(1 << 40))]
        {
            let small = gpu(30, EXPANDABLE);
            let large = HeldSegment { size, range, ..valid.clone() };
            let full = small.restore(std::slice::from_ref(&large), |_| {});
            assert!(matches!(full[0], Err(RestoreError::Full { .. })), "{full:?}");
            small.check_invariants().unwrap();
            assert_eq!(small.driver().held(), 0);
        }
    }
}
