//! Events at the worst moment: between a wait and the lock that follows it, while a callback runs,
//! while another request is first in the queue. Each test covers a former bug, or a step of the
//! climb that must not be left out.

#[cfg(test)]
mod tests {
    use std::fmt;
    use std::future::Future;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::pin::pin;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    use std::sync::{Arc, Barrier, Mutex, OnceLock, Weak};
    use std::task::{Context, Waker};
    use std::time::Duration;

    use cushion_core::driver::{
        Call, Capture, DriverResult, EventId, FailWhen, Fault, MemoryInfo, NodeId, PageHandle,
        Properties,
    };
    use cushion_core::size::MIB;
    use cushion_core::{
        AllocError, Bell, CallbackId, Clock, Driver, Ended, Engine, EngineConfig, Ladder, Rung,
        SimClock, SimConfig, SimDriver, StreamId, Tag, Task, set_budget,
    };

    use crate::common::*;

    /// A closure that runs once, at a chosen moment.
    #[derive(Default)]
    struct Hook {
        what: OnceLock<Box<dyn Fn() + Send + Sync>>,
        done: AtomicBool,
    }

    impl fmt::Debug for Hook {
        fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
            out.debug_struct("Hook").field("done", &self.done).finish_non_exhaustive()
        }
    }

    impl Hook {
        fn set(&self, what: impl Fn() + Send + Sync + 'static) {
            assert!(self.what.set(Box::new(what)).is_ok(), "a hook is set only once");
        }

        fn fire(&self) {
            if let Some(what) = self.what.get()
                && !self.done.swap(true, Ordering::Relaxed)
            {
                what();
            }
        }

        fn has_fired(&self) -> bool {
            self.done.load(Ordering::Relaxed)
        }
    }

    /// Runs a closure on another thread, and waits for that thread.
    fn on_another_thread(what: impl FnOnce() + Send) {
        std::thread::scope(|scope| scope.spawn(what).join().unwrap());
    }

    // ---- between a wait for the device and the lock that follows it ----

    /// A driver that fires a hook after it has waited for an event.
    #[derive(Debug)]
    struct HookAfterWait {
        sim: Arc<SimDriver>,
        hook: Hook,
    }

    macro_rules! forward {
        ($($name:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {
            impl Driver for HookAfterWait {
                $(fn $name(&self, $($argument: $type),*) -> $result {
                    let result = self.sim.$name($($argument),*);
                    if stringify!($name) == "event_synchronize" {
                        self.hook.fire();
                    }
                    result
                })*
            }
        };
    }

    cushion_core::driver_methods!(forward);

    /// Another free reuses the event that was waited for, before the lock is taken again.
    #[test]
    fn an_event_that_is_reused_during_a_wait_does_not_complete_the_later_free() {
        for conf in POLICIES {
            let sim = Arc::new(SimDriver::new(SimConfig::with_capacity(100 * MIB)));
            let driver = Arc::new(HookAfterWait { sim: Arc::clone(&sim), hook: Hook::default() });
            let clock = Arc::new(SimClock::new(Arc::clone(&sim)));
            let options = options(conf);
            let config = EngineConfig { options, clock, ..EngineConfig::default() };
            let gpu = Arc::new(Engine::with_config(Arc::clone(&driver), config));
            let use_on_another_stream = |gpu: &Engine<Arc<HookAfterWait>>| {
                let address = gpu.alloc(20 * MIB, S0).unwrap();
                gpu.record_stream(address, S1).unwrap();
                gpu.driver().sim.launch(S1);
                gpu.free(address).unwrap();
            };
            use_on_another_stream(&gpu);
            let engine = Arc::downgrade(&gpu);
            driver.hook.set(move || {
                on_another_thread(|| use_on_another_stream(&engine.upgrade().unwrap()));
            });
            gpu.empty_cache().unwrap();
            assert!(driver.hook.has_fired());
            let held = gpu.stats().reserved_bytes.all.current;
            assert!(
                sim.is_finished(S1, 2) || held > 0,
                "{conf}: memory was released while the device used it"
            );
            gpu.check_invariants().unwrap();
        }
    }

    // ---- while a request climbs or waits ----

    /// A clock that fires a hook at its n-th reading, or when a thread waits.
    #[derive(Debug)]
    struct HookClock {
        inner: SimClock,
        readings: AtomicU64,
        at: AtomicU64,
        on_wait: AtomicBool,
        hook: Hook,
    }

    impl Clock for HookClock {
        fn now(&self) -> Duration {
            if self.readings.fetch_add(1, Ordering::Relaxed) == self.at.load(Ordering::Relaxed) {
                self.hook.fire();
            }
            self.inner.now()
        }

        fn wait(&self, at_most: Duration, bell: &Bell) {
            if self.on_wait.load(Ordering::Relaxed) {
                self.hook.fire();
            }
            self.inner.wait(at_most, bell);
        }

        fn wake_at(&self, at: Duration, waker: Waker) {
            self.inner.wake_at(at, waker);
        }
    }

    impl HookClock {
        fn fire_at(&self, reading: u64, what: impl Fn() + Send + Sync + 'static) {
            self.hook.set(what);
            self.readings.store(0, Ordering::Relaxed);
            self.at.store(reading, Ordering::Relaxed);
        }

        fn fire_on_wait(&self, what: impl Fn() + Send + Sync + 'static) {
            self.hook.set(what);
            self.on_wait.store(true, Ordering::Relaxed);
        }
    }

    /// Returns an engine on a [`HookClock`], and that clock.
    fn hook_gpu(mib: u64, conf: &str) -> (Arc<Gpu>, Arc<HookClock>) {
        let mut made = None;
        let gpu = gpu_on(mib, conf, Ladder::Graceful, |sim| {
            let clock = Arc::new(HookClock {
                inner: SimClock::new(Arc::clone(sim)),
                readings: AtomicU64::new(0),
                at: AtomicU64::new(u64::MAX),
                on_wait: AtomicBool::new(false),
                hook: Hook::default(),
            });
            Arc::clone(made.insert(clock)) as _
        });
        (Arc::new(gpu), made.unwrap())
    }

    /// Runs a test once for each reading of the clock during a climb, with the hook at that
    /// reading.
    fn at_every_reading(conf: &str, mut test: impl FnMut(Arc<Gpu>, &HookClock, u64)) {
        for reading in 0.. {
            let (gpu, clock) = hook_gpu(100, conf);
            test(Arc::clone(&gpu), &clock, reading);
            gpu.check_invariants().unwrap();
            if !clock.hook.has_fired() {
                assert!(reading > 5, "a climb reads the clock more often");
                return;
            }
        }
    }

    #[test]
    fn a_capture_may_begin_at_any_moment_of_a_climb() {
        for conf in POLICIES {
            at_every_reading(conf, |gpu, clock, reading| {
                let cached = take(&gpu, 60 * MIB, S1);
                let pending = take(&gpu, 20 * MIB, S1);
                gpu.record_stream(pending, S2).unwrap();
                gpu.driver().launch(S2);
                gpu.free(pending).unwrap();
                gpu.driver().launch(S1);
                gpu.free(cached).unwrap();
                let engine = Arc::downgrade(&gpu);
                clock.fire_at(reading, move || {
                    let gpu = engine.upgrade().unwrap();
                    let captured = StreamId(9);
                    gpu.begin_allocate_to_pool(POOL, Box::new(move |s| s == captured)).unwrap();
                    gpu.driver().begin_capture(captured);
                });
                // The request is served, or refused for lack of memory. A driver call that is
                // illegal during a capture would be a driver error.
                let result = gpu.alloc(90 * MIB, S0);
                assert!(
                    !matches!(result, Err(AllocError::Driver(_))),
                    "{conf} {reading}: {result:?}"
                );
            });
        }
    }

    #[test]
    fn a_free_at_any_moment_of_a_climb_serves() {
        for conf in POLICIES {
            at_every_reading(conf, |gpu, clock, reading| {
                let kept = take(&gpu, 60 * MIB, S1);
                let engine = Arc::downgrade(&gpu);
                clock.fire_at(reading, move || {
                    on_another_thread(|| engine.upgrade().unwrap().free(kept).unwrap());
                });
                let result = gpu.alloc(60 * MIB, S0);
                // The last four readings come after the last rung that can serve the request.
                let too_late = reading + 4 >= clock.readings.load(Ordering::Relaxed);
                assert!(result.is_ok() || too_late, "{conf} {reading}: {result:?}");
            });
        }
    }

    #[test]
    fn no_memory_is_released_after_a_capture_begins_in_a_callback() {
        let gpu = Arc::new(gpu(100, "skip_rungs:borrow+pieces"));
        let kept = take(&gpu, 60 * MIB, S1);
        take(&gpu, 20 * MIB, S0);
        let engine = Arc::downgrade(&gpu);
        let hook = Hook::default();
        hook.set(move || {
            let gpu = engine.upgrade().unwrap();
            gpu.free(kept).unwrap();
            gpu.begin_allocate_to_pool(POOL, Box::new(|s| s == S2)).unwrap();
            gpu.driver().begin_capture(S2);
        });
        gpu.on_shortage(0, move |_| on_another_thread(|| hook.fire()));
        full_now(gpu.alloc(70 * MIB, S0));
        assert_eq!(calls(&gpu, Call::Free), 0, "a driver free waits for the device");
    }

    #[test]
    fn a_part_of_the_memory_that_a_callback_frees_serves() {
        let gpu = Arc::new(gpu(100, ""));
        cache(&gpu, 96 * MIB, S1);
        take(&gpu, 20 * MIB, S1);
        let kept = take(&gpu, 76 * MIB, S1);
        let engine = Arc::downgrade(&gpu);
        let hook = Hook::default();
        hook.set(move || engine.upgrade().unwrap().free(kept).unwrap());
        gpu.on_shortage(0, move |_| hook.fire());
        // The segment has a live block, and its free block belongs to another stream.
        take(&gpu, 60 * MIB, S0);
        assert_eq!(
            ended(&gpu, Rung::Callbacks),
            (Ended::TooLittle, 76),
            "the rung `pieces` serves the request"
        );
    }

    #[test]
    fn memory_that_a_callback_frees_and_releases_counts_once() {
        let gpu = Arc::new(gpu(100, ""));
        let kept = take(&gpu, 60 * MIB, S0);
        let engine = Arc::downgrade(&gpu);
        gpu.on_shortage(0, move |_| {
            let gpu = engine.upgrade().unwrap();
            gpu.free(kept).unwrap();
            gpu.empty_cache().unwrap();
        });
        take(&gpu, 80 * MIB, S0);
        assert_eq!(ended(&gpu, Rung::Callbacks), (Ended::Served, 60));
    }

    #[test]
    fn a_waiting_request_is_served_if_another_process_frees_enough() {
        for (kept, serves) in [(0, true), (70, false)] {
            let (gpu, clock) = hook_gpu(100, "");
            assert!(gpu.driver().set_tenant(1, 90 * MIB));
            let engine = Arc::downgrade(&gpu);
            clock.fire_on_wait(move || {
                assert!(engine.upgrade().unwrap().driver().set_tenant(1, kept * MIB));
            });
            assert_eq!(gpu.alloc(40 * MIB, S0).is_ok(), serves);
            let (how, took) = (ended(&gpu, Rung::Wait).0, last(&gpu).took);
            let expected = if serves { Ended::Nothing } else { Ended::TimeIsUp };
            assert_eq!((how, took == Duration::from_secs(3)), (expected, !serves));
        }
    }

    #[test]
    fn memory_that_another_process_frees_during_a_wait_for_events_serves() {
        let (gpu, clock) = hook_gpu(120, "");
        assert!(gpu.driver().set_tenant(1, 60 * MIB));
        cache(&gpu, 40 * MIB, S0);
        let [pending, _live] = [20, 20].map(|mib| take(&gpu, mib * MIB, S0));
        gpu.record_stream(pending, S1).unwrap();
        (0..3).for_each(|_| _ = gpu.driver().launch(S1));
        gpu.free(pending).unwrap();
        let engine = Arc::downgrade(&gpu);
        clock.fire_on_wait(move || _ = engine.upgrade().unwrap().driver().set_tenant(1, 0));
        take(&gpu, 40 * MIB, S0);
        assert!(clock.hook.has_fired());
    }

    #[test]
    fn a_request_waits_for_the_busy_pages_of_a_released_pool() {
        let gpu = gpu(100, EXPANDABLE);
        gpu.begin_allocate_to_pool(POOL, every_stream()).unwrap();
        let address = take(&gpu, 80 * MIB, S1);
        gpu.driver().launch(S1);
        gpu.free(address).unwrap();
        gpu.end_allocate_to_pool(POOL).unwrap();
        gpu.release_pool(POOL).unwrap();
        take(&gpu, 60 * MIB, S0);
        assert!(gpu.driver().is_finished(S1, 1));
    }

    // ---- which memory a request waits for ----

    #[test]
    fn a_request_does_not_wait_for_a_tiny_block_of_another_thread() {
        let gpu = gpu(100, "");
        take(&gpu, 512, S0);
        on_another_thread(|| {
            take(&gpu, 90 * MIB, S0);
            full_now(gpu.alloc(50 * MIB, S0));
        });
        assert_eq!(
            gpu.receipts()[0].took,
            Duration::ZERO,
            "512 bytes do not help a request of 50 MiB"
        );
    }

    #[test]
    fn a_request_does_not_wait_for_a_tiny_pending_block() {
        let gpu = gpu(100, "");
        let tiny = take(&gpu, 512, S0);
        gpu.record_stream(tiny, S1).unwrap();
        (0..10_000).for_each(|_| _ = gpu.driver().launch(S1));
        gpu.free(tiny).unwrap();
        take(&gpu, 90 * MIB, S0);
        full_now(gpu.alloc(50 * MIB, S0));
        assert_eq!(
            gpu.receipts()[0].took,
            Duration::ZERO,
            "512 bytes do not help a request of 50 MiB"
        );
    }

    #[test]
    fn a_request_waits_for_other_processes_only_if_the_limit_allows_it() {
        let gpu = gpu(100, "skip_rungs:borrow+pieces");
        gpu.set_memory_limit(Some(60 * MIB));
        take(&gpu, 10 * MIB, S0);
        cache(&gpu, 30 * MIB, S1);
        assert!(gpu.driver().set_tenant(1, 60 * MIB));
        full_now(gpu.alloc(40 * MIB, S0));
        assert_eq!(
            gpu.receipts()[0].took,
            Duration::from_secs(3),
            "10 + 40 MiB are within the limit"
        );
        full_now(gpu.alloc(55 * MIB, S0));
        assert_eq!(gpu.receipts()[1].took, Duration::ZERO, "10 + 55 MiB are not");
    }

    #[test]
    fn raising_the_limit_serves_a_waiting_request() {
        let gpu = real_gpu(100, "wait_ms:60000,per_process_memory_fraction:0.5");
        take(&gpu, 40 * MIB, S0);
        let held = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| gpu.alloc(40 * MIB, S1));
            until_waiting(&gpu, 1);
            gpu.configure("per_process_memory_fraction:1.0").unwrap();
            held.lock().unwrap().push(waiter.join().unwrap().unwrap());
        });
        assert_eq!(gpu.stats().shortages_survived, 1);
    }

    #[test]
    fn a_device_without_host_pages_refuses_with_full_now() {
        let gpu = gpu(100, "spill_limit_mb:1000");
        take(&gpu, 90 * MIB, S0);
        gpu.driver().fail(FailWhen::Nth(Call::CreateHost, 1), Fault::Failed(801));
        full_now(gpu.alloc(40 * MIB, S0));
    }

    /// A request of 5 MiB needs a segment of 20 MiB.
    #[test]
    fn memory_too_small_for_a_segment_is_neither_released_nor_waited_for() {
        let gpu = gpu(26, "");
        take(&gpu, 20 * MIB, S0);
        let gate = Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let small = [(); 6].map(|()| take(&gpu, MIB, S0));
                gate.wait();
                gate.wait();
                small.into_iter().for_each(|address| gpu.free(address).unwrap());
            });
            gate.wait();
            full_now(gpu.alloc(5 * MIB, S0));
            gate.wait();
        });
        full_now(gpu.alloc(5 * MIB, S0));
        assert_eq!(reserved_mib(&gpu), 26, "the cached memory stays");
        for receipt in gpu.receipts() {
            assert_eq!(receipt.took, Duration::ZERO);
        }
    }

    #[test]
    fn a_request_waits_for_memory_that_a_running_callback_will_free() {
        let gpu = Arc::new(real_gpu(100, "wait_ms:60000"));
        let spare = AtomicU64::new(take(&gpu, 90 * MIB, S0));
        let engine = Arc::downgrade(&gpu);
        let running = Arc::new(AtomicBool::new(false));
        let runs = Arc::clone(&running);
        gpu.on_shortage(0, move |_| {
            let gpu = engine.upgrade().unwrap();
            runs.store(true, Ordering::Relaxed);
            // Wait until the other thread waits for memory, too.
            until_waiting(&gpu, 1);
            let _ = gpu.free(spare.swap(0, Ordering::Relaxed));
        });
        std::thread::scope(|scope| {
            let other = scope.spawn(|| gpu.alloc(40 * MIB, S0));
            while !running.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
            gpu.alloc(40 * MIB, S0).unwrap();
            other.join().unwrap().unwrap();
        });
    }

    #[test]
    fn a_driver_error_during_a_wait_is_returned() {
        let rungs = "garbage+poll+borrow+events+oversize+cached+pieces+callbacks+spill";
        let gpu = gpu(100, &format!("skip_rungs:{rungs}"));
        let held = take(&gpu, 60 * MIB, S0);
        gpu.record_stream(held, S1).unwrap();
        gpu.driver().launch(S1);
        gpu.free(held).unwrap();
        gpu.driver().fail(FailWhen::Nth(Call::EventQuery, 2), Fault::Failed(7));
        assert_driver_error(gpu.alloc(60 * MIB, S0));
        assert_eq!(ended(&gpu, Rung::Wait).0, Ended::Failed);
        gpu.driver().finish_all();
        take(&gpu, 60 * MIB, S0);
    }

    /// The default pool may wait while another stream is captured; the captured pool may not. The
    /// message says which of the two happened.
    #[test]
    fn the_message_says_whether_a_request_waited_during_a_capture() {
        let gpu = gpu(100, "");
        gpu.begin_allocate_to_pool(POOL, Box::new(|s| s == S2)).unwrap();
        take(&gpu, 90 * MIB, S0);
        let of_default_pool = |gpu: &Gpu| gpu.alloc(50 * MIB, S1).unwrap_err().to_string();
        let text =
            std::thread::scope(|scope| scope.spawn(|| of_default_pool(&gpu)).join().unwrap());
        assert!(text.contains("so nothing could be given back. "), "{text}");
        assert!(text.contains("waited for others to give memory back (3000 ms)"), "{text}");
        let of_pool = gpu.alloc(50 * MIB, S2).unwrap_err().to_string();
        assert!(of_pool.contains("nothing could be given back or waited for"), "{of_pool}");
    }

    #[test]
    fn prefetched_memory_belongs_to_the_requesting_stream() {
        for conf in POLICIES {
            let gpu = gpu(100, conf);
            let cached = take(&gpu, 60 * MIB, S0);
            gpu.driver().launch(S0);
            gpu.free(cached).unwrap();
            gpu.prefetch(60 * MIB, S1).unwrap();
            assert!(gpu.would_hit(60 * MIB, S1), "{conf}");
        }
    }

    // ---- tasks that gave way ----

    /// Two tasks hold 40 MiB each and request 40 MiB more. The second is told to give way and frees
    /// its block, which serves the first. Returns the two blocks of the first task.
    fn give_way(gpu: &Gpu, first: &Task, second: &Task) -> [u64; 2] {
        let request = |task: &Task| {
            let _working = task.enter();
            gpu.alloc(40 * MIB, S0)
        };
        let held = [request(first).unwrap(), request(second).unwrap()];
        std::thread::scope(|scope| {
            let more = scope.spawn(|| request(first));
            until_waiting(gpu, 1);
            let refused = request(second);
            assert!(matches!(refused, Err(AllocError::GiveWay(_))), "{refused:?}");
            gpu.free(held[1]).unwrap();
            [held[0], more.join().unwrap().unwrap()]
        })
    }

    /// The first task never frees one of its blocks, like a model's weights.
    #[test]
    fn a_task_that_gave_way_is_delayed_only_once() {
        let gpu = real_gpu(100, "wait_ms:200");
        let (first, second) = (Task::new("first", 0), Task::new("second", 0));
        let [_weights, more] = give_way(&gpu, &first, &second);
        gpu.free(more).unwrap();
        let _working = second.enter();
        let waited = gpu.waited().total();
        for _ in 0..3 {
            cache(&gpu, 20 * MIB, S0);
        }
        let waited = gpu.waited().total() - waited;
        assert!(
            waited < Duration::from_millis(400),
            "{waited:?}: the task was delayed more than once"
        );
    }

    #[test]
    fn a_task_that_gave_way_and_stops_does_not_delay_others() {
        for first_ends in [true, false] {
            let gpu = real_gpu(100, "wait_ms:60000");
            let (first, second) = (Task::new("first", 0), Task::new("second", 0));
            for held in give_way(&gpu, &first, &second) {
                gpu.free(held).unwrap();
            }
            if first_ends {
                drop(first);
            }
            for _ in 0..300 {
                cache(&gpu, MIB, S0);
            }
            let at_once = gpu.alloc_at_once_for(MIB, S0, Tag::NONE).unwrap();
            assert!(at_once.is_some(), "{first_ends}: no request waits or is delayed");
        }
    }

    // ---- behind a waiting request ----

    /// Runs `of_thread` on another thread while a large request waits. 20 MiB are free in the lane
    /// of stream 1.
    fn behind_a_large_request<T: Send>(conf: &str, of_thread: impl FnOnce(&Gpu) -> T + Send) -> T {
        let gpu = real_gpu(100, &format!("wait_ms:60000,{conf}"));
        let held = take(&gpu, 50 * MIB, S0);
        cache(&gpu, 20 * MIB, S1);
        std::thread::scope(|scope| {
            let large = scope.spawn(|| gpu.alloc(75 * MIB, S0).map(|address| gpu.free(address)));
            until_waiting(&gpu, 1);
            let result = scope.spawn(|| of_thread(&gpu)).join().unwrap();
            gpu.free(held).unwrap();
            large.join().unwrap().unwrap().unwrap();
            result
        })
    }

    #[test]
    fn a_request_with_a_short_budget_is_served_from_free_memory() {
        for budget in [0, 10] {
            behind_a_large_request("", |gpu| {
                set_budget(Some(Duration::from_millis(budget)));
                cache(gpu, MIB, S1);
            });
        }
    }

    #[test]
    fn a_request_that_a_free_block_serves_is_not_spilled() {
        let spilled = behind_a_large_request("spill_limit_mb:100,spill_over_mb:1", |gpu| {
            set_budget(Some(Duration::from_millis(10)));
            let address = gpu.alloc(2 * MIB, S1).unwrap();
            let spilled = gpu.is_spilled(address);
            gpu.free(address).unwrap();
            spilled
        });
        assert!(!spilled);
    }

    #[test]
    fn hits_behind_a_waiting_request_are_not_shortages() {
        let gpu = real_gpu(100, "wait_ms:60000");
        let held = take(&gpu, 80 * MIB, S0);
        take(&gpu, 1024, S0);
        std::thread::scope(|scope| {
            let large = scope.spawn(|| gpu.alloc(60 * MIB, S1));
            until_waiting(&gpu, 1);
            for _ in 0..200 {
                cache(&gpu, 1024, S0);
            }
            gpu.free(held).unwrap();
            large.join().unwrap().unwrap();
        });
        assert_eq!(gpu.stats().shortages, 1);
    }

    // ---- futures ----

    #[test]
    fn an_alarm_wakes_the_waker_of_the_last_poll() {
        let (gpu, clock) = virtual_gpu(100, "");
        assert!(
            gpu.driver().set_tenant(1, 90 * MIB),
            "a request looks for memory that other processes free"
        );
        let mut future = pin!(gpu.alloc_async(40 * MIB, S0));
        assert!(future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        let wakes = Arc::new(WakeCount::default());
        let waker = wakes.waker();
        assert!(future.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        clock.advance(Duration::from_secs(3600));
        assert!(wakes.take() > 0);
    }

    #[test]
    fn an_unpolled_future_does_not_delay_other_requests() {
        let (gpu, clock) = virtual_gpu(100, "");
        let held = take(&gpu, 100 * MIB, S0);
        let mut future = pin!(gpu.alloc_async(60 * MIB, S0));
        assert!(future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        gpu.free(held).unwrap();
        let at_once = || {
            let before = clock.now();
            on_another_thread(|| {
                cache(&gpu, MIB, S0);
            });
            clock.now() == before
        };
        clock.advance(Duration::from_secs(2));
        assert!(at_once(), "the future has lost its place in the queue");
        // The next poll gives the future its place and its budget back.
        assert!(future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready());
    }

    #[test]
    fn a_refused_request_wakes_no_future() {
        let (gpu, _clock) = virtual_gpu(100, "");
        take(&gpu, 100 * MIB, S0);
        let wakes = Arc::new(WakeCount::default());
        let waker = wakes.waker();
        let mut future = pin!(gpu.alloc_async(60 * MIB, S0));
        assert!(future.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        let before = set_budget(Some(Duration::ZERO));
        full_now(gpu.alloc(50 * MIB, S0));
        set_budget(before);
        assert_eq!(wakes.take(), 0);
    }

    #[test]
    fn a_future_has_the_priority_of_the_task_that_created_it() {
        let gpu = gpu(100, "skip_rungs:borrow+cached+pieces");
        let held = take(&gpu, 90 * MIB, S0);
        let future_of = |name, priority| {
            let task = Task::new(name, priority);
            let _working = task.enter();
            Box::pin(gpu.alloc_async(90 * MIB, S0))
        };
        let (mut plain, mut urgent) = (future_of("plain", 0), future_of("urgent", 7));
        let mut polled = Context::from_waker(Waker::noop());
        assert!(plain.as_mut().poll(&mut polled).is_pending());
        assert!(urgent.as_mut().poll(&mut polled).is_pending());
        gpu.free(held).unwrap();
        assert!(plain.as_mut().poll(&mut polled).is_pending());
        assert!(urgent.as_mut().poll(&mut polled).is_ready());
    }

    #[test]
    fn the_last_pause_of_a_dropped_future_counts_as_waited() {
        let (gpu, clock) = virtual_gpu(100, "");
        assert!(gpu.driver().set_tenant(1, 90 * MIB));
        {
            let mut future = pin!(gpu.alloc_async(40 * MIB, S0));
            assert!(future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
            clock.advance(Duration::from_secs(2));
        }
        assert_eq!(gpu.receipts()[0].took, Duration::from_secs(2));
        assert_eq!(gpu.waited().total(), Duration::from_secs(2));
    }

    // ---- panics and drops in the program's code ----

    #[test]
    fn a_request_that_panics_leaves_the_queue() {
        let (gpu, clock) = hook_gpu(100, "");
        assert!(gpu.driver().set_tenant(1, 90 * MIB));
        clock.fire_on_wait(|| panic!("on purpose"));
        assert!(catch_unwind(AssertUnwindSafe(|| gpu.alloc(40 * MIB, S0))).is_err());
        assert!(gpu.driver().set_tenant(1, 0));
        assert_eq!(gpu.waiting(), 0);
        take(&gpu, MIB, S0);
    }

    /// Empties the cache when it is dropped.
    struct EmptiesWhenDropped(Weak<Gpu>);

    impl Drop for EmptiesWhenDropped {
        fn drop(&mut self) {
            if let Some(gpu) = self.0.upgrade() {
                // This call takes every lock of the engine.
                gpu.empty_cache().unwrap();
            }
        }
    }

    #[test]
    fn a_filter_is_dropped_without_a_lock() {
        let gpu = Arc::new(gpu(100, ""));
        let filter = || {
            let empties = EmptiesWhenDropped(Arc::downgrade(&gpu));
            Box::new(move |_| empties.0.strong_count() > 0)
        };
        gpu.begin_allocate_to_pool(POOL, filter()).unwrap();
        assert!(gpu.begin_allocate_to_pool(POOL, filter()).is_err());
        gpu.end_allocate_to_pool(POOL).unwrap();
    }

    #[test]
    fn the_drop_of_a_callback_may_remove_another_callback() {
        struct RemovesWhenDropped(Weak<Gpu>, CallbackId);
        impl Drop for RemovesWhenDropped {
            fn drop(&mut self) {
                if let Some(gpu) = self.0.upgrade() {
                    gpu.remove_callback(self.1);
                }
            }
        }
        let gpu = Arc::new(gpu(100, "wait_ms:0"));
        let called = Arc::new(AtomicU64::new(0));
        let counts = Arc::clone(&called);
        let first = gpu.on_shortage(0, move |_| _ = counts.fetch_add(1, Ordering::Relaxed));
        let removes = RemovesWhenDropped(Arc::downgrade(&gpu), first);
        let second = gpu.on_shortage(0, move |_| assert!(removes.0.strong_count() > 0));
        full_now(gpu.alloc(99 * MIB, S0).and_then(|_| gpu.alloc(99 * MIB, S0)));
        assert_eq!(called.load(Ordering::Relaxed), 1);
        gpu.remove_callback(second);
        full_now(gpu.alloc(99 * MIB, S0));
        assert_eq!(called.load(Ordering::Relaxed), 1, "both callbacks are removed");
    }

    #[test]
    fn guards_of_tasks_may_be_dropped_in_any_order() {
        let gpu = gpu(100, "");
        let (one, two) = (Task::new("one", 0), Task::new("two", 5));
        let working_for_one = one.enter();
        let working_for_two = two.enter();
        drop(working_for_one);
        assert_eq!(cushion_core::priority(), 5, "the thread still works for the second task");
        drop(working_for_two);
        take(&gpu, 90 * MIB, S0);
        full_now(gpu.alloc(90 * MIB, S0));
        let who = &gpu.receipts()[0].who;
        assert!(who.starts_with("thread"), "{who}");
    }
}
