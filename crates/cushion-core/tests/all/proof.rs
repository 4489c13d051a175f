//! No memory is unmapped, released or given to another stream while the device may still use it.
//! The cases: graphs that are replayed on any stream and destroyed at once, destroyed streams,
//! captures without a private pool, and other threads that continue while one waits for the device.

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fmt;
    use std::pin::pin;
    use std::sync::{Arc, Mutex, OnceLock, Weak};
    use std::task::{self, Poll, Waker};

    use cushion_core::driver::{
        Call, Capture, DriverResult, EventId, MemoryInfo, NodeId, PageHandle, Properties,
    };
    use cushion_core::size::MIB;
    use cushion_core::{
        CheckedDriver, Clock, Driver, Engine, EngineConfig, LastingStreams, PoolId, SimClock,
        SimConfig, SimDriver, StreamId, driver_methods,
    };

    use crate::common::{ALL_POLICIES, ON_PAGES, S0, S1, S2, cache, free_every_second};

    type Gpu = Engine<Arc<Watched>>;

    /// A closure that runs once, while the driver waits for the device.
    #[derive(Default)]
    struct Meanwhile(Mutex<Option<Box<dyn FnOnce() + Send>>>);

    impl fmt::Debug for Meanwhile {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("Meanwhile")
        }
    }

    /// A checked driver that runs a closure during a wait for the device, and counts the driver
    /// calls in each hold of the engine's lock.
    #[derive(Debug)]
    struct Watched {
        checked: CheckedDriver<Arc<SimDriver>>,
        meanwhile: Meanwhile,
        engine: OnceLock<Weak<Gpu>>,
        /// The number of the last hold of the lock with slow calls, the slow calls in that hold,
        /// and the most slow calls in any hold.
        holds: Mutex<(u64, u64, u64)>,
    }

    impl Watched {
        /// Counts a slow call.
        fn before(&self, call: Call) {
            let is_slow = matches!(call, Call::Unmap | Call::Release | Call::Unreserve);
            if let Some(engine) = self.engine.get().and_then(Weak::upgrade)
                && is_slow
            {
                let (hold, calls, most) = &mut *self.holds.lock().unwrap();
                let now = engine.times_locked();
                *calls = if *hold == now { *calls + 1 } else { 1 };
                (*hold, *most) = (now, (*most).max(*calls));
            }
        }
    }

    macro_rules! watch {
        ($($name:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {
            impl Driver for Watched {
                $(fn $name(&self, $($argument: $type),*) -> $result {
                    self.before(match stringify!($name) {
                        "unmap" => Call::Unmap,
                        "release" => Call::Release,
                        "unreserve" => Call::Unreserve,
                        _ => Call::MemoryInfo,
                    });
                    let result = self.checked.$name($($argument),*);
                    if stringify!($name) == "stream_synchronize" {
                        let meanwhile = self.meanwhile.0.lock().unwrap().take();
                        meanwhile.into_iter().for_each(|meanwhile| meanwhile());
                    }
                    result
                })*
            }
        };
    }
    driver_methods!(watch);

    struct World {
        gpu: Arc<Gpu>,
        watched: Arc<Watched>,
        sim: Arc<SimDriver>,
    }

    fn world(mib: u64, conf: &str) -> World {
        let sim = Arc::new(SimDriver::new(SimConfig::with_capacity(mib * MIB)));
        let watched = Arc::new(Watched {
            checked: CheckedDriver::new(Arc::clone(&sim)),
            meanwhile: Meanwhile::default(),
            engine: OnceLock::new(),
            holds: Mutex::default(),
        });
        let clock: Arc<dyn Clock> = Arc::new(SimClock::new(Arc::clone(&sim)));
        let config = EngineConfig { clock, ..EngineConfig::default() };
        let gpu = Arc::new(Engine::with_config(Arc::clone(&watched), config));
        gpu.configure(conf).unwrap();
        watched.engine.set(Arc::downgrade(&gpu)).unwrap();
        World { gpu, watched, sim }
    }

    impl World {
        /// Captures a graph that uses `bytes` bytes of a private pool. Afterwards the memory is
        /// free in the pool, and the graph may use it until the pool is released. Returns address
        /// and size.
        fn capture(&self, pool: PoolId, stream: StreamId, bytes: u64) -> (u64, u64) {
            let filter = Box::new(move |it| it == stream);
            self.gpu.begin_allocate_to_pool(pool, filter).unwrap();
            self.sim.begin_capture(stream);
            let address = self.gpu.alloc(bytes, stream).unwrap();
            let (size, _) = self.gpu.size_of(address).unwrap();
            self.sim.launch(stream);
            self.gpu.free(address).unwrap();
            self.sim.end_capture(stream);
            self.gpu.end_allocate_to_pool(pool).unwrap();
            (address, size)
        }

        /// Queues work on a stream that uses this memory.
        fn work(&self, (address, size): (u64, u64), stream: StreamId, life: u64) {
            self.watched.checked.work(address, size, stream, life);
            self.sim.launch(stream);
        }

        /// Sets the closure that runs during the next wait for the device.
        fn meanwhile(&self, f: impl FnOnce(World) + Send + 'static) {
            let Self { gpu, watched, sim } = self;
            let world =
                World { gpu: Arc::clone(gpu), watched: Arc::clone(watched), sim: Arc::clone(sim) };
            *self.watched.meanwhile.0.lock().unwrap() = Some(Box::new(|| f(world)));
        }

        fn free(&self, addresses: &[u64]) {
            addresses.iter().for_each(|&address| self.gpu.free(address).unwrap());
        }

        fn finish(&self) {
            self.sim.finish_all();
            self.gpu.empty_cache().unwrap();
            self.gpu.check_invariants().unwrap();
        }
    }

    // ---- graphs ----

    #[test]
    fn a_graph_that_is_replayed_and_destroyed_during_the_wait_keeps_its_memory() {
        for conf in ON_PAGES {
            let world = world(256, conf);
            let (capturing, replaying) = (StreamId(5), StreamId(7));
            let [first, second] = [PoolId(0, 1), PoolId(0, 2)];
            world.capture(first, capturing, 100 * MIB);
            let used = world.capture(second, capturing, 40 * MIB);
            world.gpu.release_pool(first).unwrap();
            world.meanwhile(move |world| {
                // graph.replay(); del graph
                world.work(used, replaying, 1);
                world.gpu.release_pool(second).unwrap();
            });
            // The request fits once the memory of the first graph is released.
            let served = world.gpu.alloc(180 * MIB, S0);
            assert!(served.is_ok(), "{conf}: {served:?}");
            world.gpu.free(served.unwrap()).unwrap();
            world.finish();
            assert_eq!(world.sim.held(), 0, "{conf}: memory stays after the replay is done");
        }
    }

    #[test]
    fn a_stitch_of_a_released_graph_outlives_its_replay() {
        let world = world(256, "paged:True,page_mb:2,trim_ms:0,wait_ms:0");
        let (gpu, stream, pool, replaying) = (&world.gpu, StreamId(3), PoolId(0, 1), StreamId(7));
        gpu.set_lasting_streams(LastingStreams::All);
        gpu.set_most_ranges(8);
        for _ in 0..12 {
            cache(gpu, 8 * MIB, stream);
        }
        gpu.empty_cache().unwrap();
        // In the capture, two holes of 12 MiB serve 20 MiB together.
        gpu.begin_allocate_to_pool(pool, Box::new(move |it| it == stream)).unwrap();
        world.sim.begin_capture(stream);
        let blocks: Vec<u64> = (0..4).map(|_| gpu.alloc(12 * MIB, stream).unwrap()).collect();
        world.free(&[blocks[0], blocks[2]]);
        let stitched = gpu.alloc(20 * MIB, stream).unwrap();
        assert_eq!(gpu.page_figures().ranges, 1, "the block is a stitch");
        world.sim.launch(stream);
        world.free(&[stitched, blocks[1], blocks[3]]);
        world.sim.end_capture(stream);
        gpu.end_allocate_to_pool(pool).unwrap();
        world.work((stitched, 20 * MIB), replaying, 1);
        gpu.release_pool(pool).unwrap();
        // The program continues on the stream of the capture, with changing sizes.
        let mut live: Vec<u64> = (0..10).map(|_| gpu.alloc(12 * MIB, stream).unwrap()).collect();
        gpu.set_memory_limit(Some(gpu.stats().reserved_bytes.all.current));
        for round in 0..300_usize {
            let holes = 3 + round % 5;
            for slot in (0..holes).map(|hole| (hole * 7 + round) % 10) {
                gpu.free(std::mem::take(&mut live[slot])).unwrap();
            }
            let freed = live.iter().filter(|&&address| address == 0).count() as u64;
            if let Ok(address) = gpu.alloc(freed * 12 * MIB, stream) {
                gpu.free(address).unwrap();
            }
            for slot in live.iter_mut().filter(|slot| **slot == 0) {
                *slot = gpu.alloc(12 * MIB, stream).unwrap();
            }
            gpu.check_invariants().unwrap();
        }
        assert!(gpu.page_figures().ranges <= 18, "{:?}", gpu.page_figures());
    }

    // ---- requests during a wait ----

    #[test]
    fn memory_that_is_used_and_freed_during_the_wait_stays() {
        for conf in ALL_POLICIES {
            let world = world(256, conf);
            let stream = StreamId(5);
            cache(&world.gpu, 100 * MIB, stream);
            world.meanwhile(move |world| {
                let address = world.gpu.alloc(100 * MIB, stream).unwrap();
                world.work((address, 100 * MIB), stream, 1);
                world.gpu.free(address).unwrap();
            });
            // First by the rung that releases memory, then by `empty_cache`.
            let _ = world.gpu.alloc(200 * MIB, S0);
            world.gpu.check_invariants().unwrap();
            world.meanwhile(move |world| {
                if let Ok(address) = world.gpu.alloc(50 * MIB, stream) {
                    world.work((address, 50 * MIB), stream, 2);
                    world.gpu.free(address).unwrap();
                }
            });
            world.gpu.empty_cache().unwrap();
            world.gpu.check_invariants().unwrap();
        }
    }

    #[test]
    fn emptying_a_pool_during_a_capture_does_not_wait_for_the_device() {
        for conf in ON_PAGES {
            let world = world(256, conf);
            let (released, captured) = (PoolId(0, 1), PoolId(0, 2));
            world.capture(released, S1, 20 * MIB);
            world.gpu.release_pool(released).unwrap();
            let (held, waits) = (world.sim.held(), world.sim.counts().of(Call::StreamSynchronize));
            world.gpu.begin_allocate_to_pool(captured, Box::new(|it| it == S2)).unwrap();
            world.sim.begin_capture(S2);
            world.gpu.empty_cache_of(released).unwrap();
            assert_eq!(world.sim.counts().of(Call::StreamSynchronize), waits, "{conf}");
            assert_eq!(
                world.sim.held(),
                held,
                "{conf}: pages stay until they are known to be idle"
            );
            world.sim.end_capture(S2);
            world.gpu.end_allocate_to_pool(captured).unwrap();
            world.gpu.empty_cache_of(released).unwrap();
            assert!(world.sim.held() < held, "{conf}");
            world.gpu.check_invariants().unwrap();
        }
    }

    // ---- destroyed streams ----

    /// Fills the device. Stream 9 borrows a block of stream 0, queues work on it and is destroyed.
    /// Returns the borrowed block and the other one.
    fn borrowed_by_a_destroyed_stream(world: &World, conf: &str) -> (u64, u64) {
        let (gpu, mine) = (&world.gpu, StreamId(9));
        let free = gpu.alloc(20 * MIB, S0).unwrap();
        let pin = gpu.alloc(40 * MIB, S0).unwrap();
        gpu.free(free).unwrap();
        let tensor = gpu.alloc(20 * MIB, mine).unwrap();
        assert_eq!(
            (tensor, gpu.stream_of(tensor)),
            (free, Some(S0)),
            "{conf}: the block is borrowed"
        );
        world.work((tensor, 20 * MIB), mine, 1);
        world.watched.checked.destroy_stream(mine);
        world.sim.destroy_stream(mine);
        (tensor, pin)
    }

    #[test]
    fn a_stream_may_be_destroyed_before_a_borrowed_block_is_freed() {
        for conf in ALL_POLICIES {
            let world = world(64, &format!("{conf},skip_rungs:cached"));
            let (tensor, pin) = borrowed_by_a_destroyed_stream(&world, conf);
            world.gpu.free(tensor).unwrap();
            world.gpu.check_invariants().unwrap();
            // The shortage waits for the device. Then the block is free for its own stream.
            let again = world.gpu.alloc(20 * MIB, S0).unwrap();
            assert_eq!(again, tensor, "{conf}");
            world.work((again, 20 * MIB), S0, 2);
            world.free(&[again, pin]);
            world.finish();
            assert_eq!(world.sim.held(), 0, "{conf}");
        }
    }

    #[test]
    fn a_waiting_request_is_served_by_a_free_that_waits_for_the_device() {
        for conf in ALL_POLICIES {
            let world = world(64, &format!("{conf},skip_rungs:cached"));
            let (tensor, pin) = borrowed_by_a_destroyed_stream(&world, conf);
            let mut waits = pin!(world.gpu.alloc_async(20 * MIB, S0));
            let mut poll = || waits.as_mut().poll(&mut task::Context::from_waker(Waker::noop()));
            assert!(poll().is_pending(), "{conf}: all memory is in use");
            world.gpu.free(tensor).unwrap();
            let Poll::Ready(Ok(again)) = poll() else {
                panic!("{conf}: the request did not wait for the device")
            };
            assert_eq!(again, tensor, "{conf}");
            world.work((again, 20 * MIB), S0, 2);
            world.free(&[again, pin]);
            world.finish();
        }
    }

    #[test]
    fn a_borrowing_stream_that_was_recorded_has_its_event() {
        let world = world(64, "paged:False,skip_rungs:cached");
        let (gpu, mine) = (&world.gpu, StreamId(9));
        let free = gpu.alloc(20 * MIB, S0).unwrap();
        let pin = gpu.alloc(40 * MIB, S0).unwrap();
        gpu.free(free).unwrap();
        let tensor = gpu.alloc(20 * MIB, mine).unwrap();
        gpu.record_stream(tensor, mine).unwrap();
        world.work((tensor, 20 * MIB), mine, 1);
        gpu.free(tensor).unwrap();
        let waits = world.sim.counts().of(Call::StreamSynchronize);
        world.sim.finish(mine);
        assert_eq!(gpu.alloc(20 * MIB, S0).unwrap(), free);
        assert_eq!(world.sim.counts().of(Call::StreamSynchronize), waits, "an event was enough");
        gpu.free(pin).unwrap();
    }

    #[test]
    fn a_stream_may_be_destroyed_before_its_spilled_block_is_freed() {
        for conf in ON_PAGES {
            let world = world(64, &format!("{conf},spill_limit_mb:128,spill_over_mb:1,wait_ms:0"));
            let (gpu, mine) = (&world.gpu, StreamId(9));
            for round in 0..3 {
                let tensor = gpu.alloc(100 * MIB, mine).unwrap();
                assert!(gpu.is_spilled(tensor));
                world.work((tensor, 100 * MIB), mine, round);
                if round == 0 {
                    world.watched.checked.destroy_stream(mine);
                    world.sim.destroy_stream(mine);
                }
                gpu.free(tensor).unwrap();
                gpu.check_invariants().unwrap();
                // The next block does not fit: the shortage waits for the device first.
            }
            world.finish();
            assert_eq!(world.sim.held_host(), 0);
        }
    }

    // ---- captures without a private pool ----

    #[test]
    fn no_event_is_recorded_on_a_stream_that_is_being_captured() {
        for conf in ALL_POLICIES {
            let world = world(256, &format!("{conf},page_mb:2,trim_ms:1,wait_ms:0"));
            let (gpu, captured, mine) = (&world.gpu, StreamId(3), StreamId(4));
            gpu.set_lasting_streams(LastingStreams::All);
            for _ in 0..3 {
                cache(gpu, 100 * MIB, captured);
            }
            let shared = gpu.alloc(20 * MIB, mine).unwrap();
            gpu.record_stream(shared, captured).unwrap();
            world.watched.checked.begin_capture(captured);
            world.sim.begin_capture(captured);
            // A miss that could borrow, a free that waits for the captured stream, and a trim.
            let more: Vec<u64> = (0..2).map(|_| gpu.alloc(30 * MIB, mine).unwrap()).collect();
            gpu.free(shared).unwrap();
            let _ = gpu.trim();
            gpu.check_invariants().unwrap();
            world.watched.checked.end_capture(captured);
            world.sim.end_capture(captured);
            world.free(&more);
            world.finish();
            assert_eq!(
                gpu.stats().active_bytes.all.current,
                0,
                "{conf}: the free completes after the capture"
            );
        }
    }

    // ---- how long the lock is held ----

    #[test]
    fn one_hold_of_the_lock_makes_few_slow_driver_calls() {
        let world = world(4096, "paged:True,page_mb:2,trim_ms:0,wait_ms:0");
        let gpu = &world.gpu;
        for _ in 0..3 {
            cache(gpu, 1024 * MIB, S0);
        }
        gpu.empty_cache().unwrap();
        let blocks: Vec<u64> = (0..170).map(|_| gpu.alloc(6 * MIB, S0).unwrap()).collect();
        let kept = free_every_second(gpu, &blocks);
        for size in (10..400).step_by(2) {
            cache(gpu, size * MIB, S0);
        }
        let figures = gpu.page_figures();
        assert!(figures.ranges > 100 && figures.pages > 400, "{figures:?}");
        *world.watched.holds.lock().unwrap() = (0, 0, 0);
        let before = world.sim.counts().of(Call::Unmap);
        gpu.empty_cache().unwrap();
        let unmaps = world.sim.counts().of(Call::Unmap) - before;
        let (_, _, most) = *world.watched.holds.lock().unwrap();
        assert!(unmaps > 5_000, "each page is in many stitches: {unmaps}");
        assert!(most <= 32, "{most} calls in one hold of the lock");
        // A shortage also releases memory.
        world.free(&kept);
        cache(gpu, 4094 * MIB, S1);
        world.finish();
        assert_eq!((world.sim.held(), gpu.page_figures().ranges), (0, 0));
    }

    #[test]
    fn huge_requests_are_refused() {
        let world = world(64, "paged:True,wait_ms:0");
        cache(&world.gpu, 20 * MIB, S2);
        for size in [u64::MAX, u64::MAX - 511, u64::MAX / 2, 1 << 63] {
            for _ in 0..3 {
                assert!(world.gpu.alloc(size, S2).is_err());
                assert!(!world.gpu.would_hit(size, S2));
            }
        }
        world.gpu.check_invariants().unwrap();
    }

    #[test]
    fn a_stream_that_is_no_longer_lasting_is_not_queried() {
        let world = world(256, "paged:True,page_mb:2,trim_ms:1,wait_ms:0");
        let (gpu, other) = (&world.gpu, StreamId(3));
        gpu.set_lasting_streams(LastingStreams::These(BTreeSet::from([other])));
        let address = gpu.alloc(100 * MIB, other).unwrap();
        world.work((address, 100 * MIB), other, 1);
        gpu.free(address).unwrap();
        let _ = gpu.trim();
        gpu.set_lasting_streams(LastingStreams::Unknown);
        world.watched.checked.destroy_stream(other);
        world.sim.destroy_stream(other);
        let _ = gpu.trim();
        cache(gpu, 200 * MIB, S0);
        world.finish();
        assert_eq!(world.sim.held(), 0);
    }
}
