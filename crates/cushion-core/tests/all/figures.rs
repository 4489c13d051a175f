//! The engine's behaviour, one test each: statistics, history, snapshots, threads, drop.

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    use cushion_core::driver::Call;
    use cushion_core::size::{KIB, MIB};
    use cushion_core::{
        Action, AllocError, BlockUse, Driver, Engine, EngineConfig, SimConfig, SimDriver,
        StreamFilter, StreamId, Tag, VirtualClock,
    };

    use crate::common::*;

    // ---- statistics, history, snapshots ----

    #[test]
    fn statistics_are_consistent_and_can_be_reset() {
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

    /// A stream filter runs with the engine's lock held: the test hangs if `stats` takes the lock.
    #[test]
    fn stats_does_not_take_the_lock() {
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
    fn history_has_every_action_in_order() {
        use Action::{
            Alloc, FreeCompleted, FreeRequested, OutOfMemory, SegmentAlloc, SegmentFree,
            SegmentMap, SegmentUnmap, Snapshot,
        };
        for (conf, obtained, released) in
            [("", SegmentAlloc, SegmentFree), (EXPANDABLE, SegmentMap, SegmentUnmap)]
        {
            let clock = Arc::new(VirtualClock::new());
            let options = options(conf);
            let config = EngineConfig { options, clock: clock.clone(), ..EngineConfig::default() };
            let sim = Arc::new(SimDriver::new(SimConfig::with_capacity(100 * MIB)));
            let gpu = Engine::with_config(sim, config);
            take(&gpu, MIB, S0);
            assert_eq!(gpu.history(), (vec![], 0), "history is off by default");

            gpu.record_history(100);
            clock.advance(Duration::from_secs(3));
            let address = gpu.alloc_for(19 * MIB + 1, S1, Tag(5)).unwrap();
            gpu.free(address).unwrap();
            clock.advance(Duration::from_secs(4));
            full_now(gpu.alloc(100 * MIB, S1));
            gpu.empty_cache().unwrap();
            let _ = gpu.snapshot();
            let (entries, dropped) = gpu.history();
            let actions: Vec<Action> = entries.iter().map(|entry| entry.action).collect();
            let expected =
                [obtained, Alloc, FreeRequested, FreeCompleted, OutOfMemory, released, Snapshot];
            assert_eq!((&actions[..], dropped), (&expected[..], 0), "{conf}");
            assert_eq!((entries[0].size, entries[1].size), (20 * MIB, 19 * MIB + 1));
            assert_eq!((entries[1].address, entries[1].stream), (address, S1));
            assert_eq!((entries[1].tag, entries[2].tag), (Tag(5), Tag(5)));
            assert_eq!((entries[4].address, entries[4].size), (78 * MIB, 100 * MIB));
            let times = [entries[1].time, entries[4].time].map(|time| time.as_secs());
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
    fn a_snapshot_has_every_byte_once() {
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
                    assert_eq!(block.address, end, "the blocks of a segment are contiguous");
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

    // ---- threads and drop ----

    /// Each thread allocates and frees on its own stream and on a shared one. The device is too
    /// small for all threads. No byte is handed out twice, and all memory can be released at the
    /// end.
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
    fn drop_releases_cached_memory() {
        for (conf, kept) in [("", 30 * MIB), (EXPANDABLE, 40 * MIB)] {
            let sim = Arc::new(SimDriver::new(SimConfig::with_capacity(200 * MIB)));
            let gpu = Engine::new(Arc::clone(&sim));
            gpu.set_options(options(conf));
            let live = gpu.alloc(30 * MIB, S0).unwrap();
            let [cached, pending] = [(); 2].map(|()| gpu.alloc(40 * MIB, S0).unwrap());
            gpu.record_stream(pending, S1).unwrap();
            sim.launch(S1);
            gpu.free(pending).unwrap();
            gpu.free(cached).unwrap();
            gpu.begin_allocate_to_pool(POOL, every_stream()).unwrap();
            cache(&gpu, 20 * MIB, S0);
            drop(gpu);
            assert_eq!(sim.held(), kept, "live memory stays allocated: {conf}");
            let counts = sim.counts();
            assert_eq!(counts.of(Call::EventDestroy), counts.of(Call::EventCreate));
            if conf.is_empty() {
                sim.free(live).unwrap();
                assert_eq!(sim.held(), 0);
            }
        }
    }
}
