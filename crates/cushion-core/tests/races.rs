//! What happens at the worst moment: between a wait and the lock that follows it, while a callback runs, while
//! somebody else stands ahead. Each of these went wrong once, or would if a step of the climb were left out.

mod common;

#[cfg(test)]
mod tests {
    use std::fmt;
    use std::future::Future;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::pin::pin;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    use std::sync::{Arc, Barrier, Mutex, OnceLock, Weak};
    use std::task::{Context, Wake, Waker};
    use std::time::Duration;

    use cushion_core::driver::{
        Call, Capture, DriverResult, EventId, FailWhen, Fault, MemoryInfo, NodeId, PageHandle,
        Properties,
    };
    use cushion_core::size::MIB;
    use cushion_core::{
        AllocError, Bell, CallbackId, Clock, Driver, Ended, Engine, EngineConfig, Ladder, Rung,
        SimClock, SimConfig, SimDriver, StreamId, Tag, Task, VirtualClock, set_budget,
    };

    use crate::common::*;

    /// Something to be done, once, at a chosen moment.
    #[derive(Default)]
    struct Trick {
        what: OnceLock<Box<dyn Fn() + Send + Sync>>,
        done: AtomicBool,
    }

    impl fmt::Debug for Trick {
        fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
            out.debug_struct("Trick").field("done", &self.done).finish_non_exhaustive()
        }
    }

    impl Trick {
        fn set(&self, what: impl Fn() + Send + Sync + 'static) {
            assert!(self.what.set(Box::new(what)).is_ok(), "one trick at a time");
        }

        fn play(&self) {
            if let Some(what) = self.what.get()
                && !self.done.swap(true, Ordering::Relaxed)
            {
                what();
            }
        }

        fn was_played(&self) -> bool {
            self.done.load(Ordering::Relaxed)
        }
    }

    /// Does something on a thread of its own, and waits for it: what another thread does at this moment.
    fn elsewhere(what: impl FnOnce() + Send) {
        std::thread::scope(|scope| scope.spawn(what).join().unwrap());
    }

    // ---- between a wait for the device and the lock that follows it ----

    /// A driver after whose wait for an event something happens.
    #[derive(Debug)]
    struct AfterWaits {
        sim: Arc<SimDriver>,
        trick: Trick,
    }

    macro_rules! forward {
        ($($name:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {
            impl Driver for AfterWaits {
                $(fn $name(&self, $($argument: $type),*) -> $result {
                    let result = self.sim.$name($($argument),*);
                    if stringify!($name) == "event_synchronize" {
                        self.trick.play();
                    }
                    result
                })*
            }
        };
    }

    cushion_core::driver_methods!(forward);

    /// The event that was waited for is recycled for a later free before the lock is taken again.
    #[test]
    fn an_event_used_again_at_once_is_not_taken_for_the_one_waited_for() {
        for conf in POLICIES {
            let sim = Arc::new(SimDriver::new(SimConfig::with_capacity(100 * MIB)));
            let driver = Arc::new(AfterWaits { sim: Arc::clone(&sim), trick: Trick::default() });
            let clock = Arc::new(SimClock::new(Arc::clone(&sim)));
            let options = options(conf);
            let config = EngineConfig { options, clock, ..EngineConfig::default() };
            let gpu = Arc::new(Engine::with_config(Arc::clone(&driver), config));
            let use_on_another_stream = |gpu: &Engine<Arc<AfterWaits>>| {
                let address = gpu.alloc(20 * MIB, S0).unwrap();
                gpu.record_stream(address, S1).unwrap();
                gpu.driver().sim.launch(S1);
                gpu.free(address).unwrap();
            };
            use_on_another_stream(&gpu);
            let engine = Arc::downgrade(&gpu);
            driver.trick.set(move || {
                elsewhere(|| use_on_another_stream(&engine.upgrade().unwrap()));
            });
            gpu.empty_cache().unwrap();
            assert!(driver.trick.was_played());
            let held = gpu.stats().reserved_bytes.all.current;
            assert!(sim.is_finished(S1, 2) || held > 0, "{conf}: given back while it is used");
            gpu.check_invariants().unwrap();
        }
    }

    // ---- while a request climbs or waits ----

    /// A clock that plays a trick at its n-th look, or when somebody waits.
    #[derive(Debug)]
    struct TrickClock {
        inner: SimClock,
        looks: AtomicU64,
        at: AtomicU64,
        on_wait: AtomicBool,
        trick: Trick,
    }

    impl Clock for TrickClock {
        fn now(&self) -> Duration {
            if self.looks.fetch_add(1, Ordering::Relaxed) == self.at.load(Ordering::Relaxed) {
                self.trick.play();
            }
            self.inner.now()
        }

        fn wait(&self, at_most: Duration, bell: &Bell) {
            if self.on_wait.load(Ordering::Relaxed) {
                self.trick.play();
            }
            self.inner.wait(at_most, bell);
        }

        fn wake_at(&self, at: Duration, waker: Waker) {
            self.inner.wake_at(at, waker);
        }
    }

    impl TrickClock {
        fn play_at(&self, look: u64, what: impl Fn() + Send + Sync + 'static) {
            self.trick.set(what);
            self.looks.store(0, Ordering::Relaxed);
            self.at.store(look, Ordering::Relaxed);
        }

        fn play_on_wait(&self, what: impl Fn() + Send + Sync + 'static) {
            self.trick.set(what);
            self.on_wait.store(true, Ordering::Relaxed);
        }
    }

    fn trick_gpu(mib: u64, conf: &str) -> (Arc<Gpu>, Arc<TrickClock>) {
        let mut made = None;
        let gpu = gpu_on(mib, conf, Ladder::Graceful, |sim| {
            let clock = Arc::new(TrickClock {
                inner: SimClock::new(Arc::clone(sim)),
                looks: AtomicU64::new(0),
                at: AtomicU64::new(u64::MAX),
                on_wait: AtomicBool::new(false),
                trick: Trick::default(),
            });
            Arc::clone(made.insert(clock)) as _
        });
        (Arc::new(gpu), made.unwrap())
    }

    /// Plays at each look at the clock in turn, until a climb looks no more.
    fn at_every_moment(conf: &str, mut play: impl FnMut(Arc<Gpu>, &TrickClock, u64)) {
        for look in 0.. {
            let (gpu, clock) = trick_gpu(100, conf);
            play(Arc::clone(&gpu), &clock, look);
            gpu.check_invariants().unwrap();
            if !clock.trick.was_played() {
                assert!(look > 5, "a climb looks at the clock");
                return;
            }
        }
    }

    #[test]
    fn a_capture_may_begin_at_any_moment_of_a_climb() {
        for conf in POLICIES {
            at_every_moment(conf, |gpu, clock, look| {
                let cached = take(&gpu, 60 * MIB, S1);
                let pending = take(&gpu, 20 * MIB, S1);
                gpu.record_stream(pending, S2).unwrap();
                gpu.driver().launch(S2);
                gpu.free(pending).unwrap();
                gpu.driver().launch(S1);
                gpu.free(cached).unwrap();
                let engine = Arc::downgrade(&gpu);
                clock.play_at(look, move || {
                    let gpu = engine.upgrade().unwrap();
                    let captured = StreamId(9);
                    gpu.begin_allocate_to_pool(POOL, Box::new(move |s| s == captured)).unwrap();
                    gpu.driver().begin_capture(captured);
                });
                // Served, or refused for want of memory; a call that breaks a capture is the driver's error.
                let result = gpu.alloc(90 * MIB, S0);
                assert!(!matches!(result, Err(AllocError::Driver(_))), "{conf} {look}: {result:?}");
            });
        }
    }

    #[test]
    fn a_free_at_any_moment_of_a_climb_is_seen() {
        for conf in POLICIES {
            at_every_moment(conf, |gpu, clock, look| {
                let kept = take(&gpu, 60 * MIB, S1);
                let engine = Arc::downgrade(&gpu);
                clock.play_at(look, move || {
                    elsewhere(|| engine.upgrade().unwrap().free(kept).unwrap());
                });
                let result = gpu.alloc(60 * MIB, S0);
                // At the last four looks the last rung that may serve is behind it.
                let too_late = look + 4 >= clock.looks.load(Ordering::Relaxed);
                assert!(result.is_ok() || too_late, "{conf} {look}: {result:?}");
            });
        }
    }

    #[test]
    fn a_capture_that_begins_in_a_callback_is_not_made_to_wait() {
        let gpu = Arc::new(gpu(100, "skip_rungs:borrow+pieces"));
        let kept = take(&gpu, 60 * MIB, S1);
        take(&gpu, 20 * MIB, S0);
        let engine = Arc::downgrade(&gpu);
        let trick = Trick::default();
        trick.set(move || {
            let gpu = engine.upgrade().unwrap();
            gpu.free(kept).unwrap();
            gpu.begin_allocate_to_pool(POOL, Box::new(|s| s == S2)).unwrap();
            gpu.driver().begin_capture(S2);
        });
        gpu.on_shortage(0, move |_| elsewhere(|| trick.play()));
        full_now(gpu.alloc(70 * MIB, S0));
        assert_eq!(calls(&gpu, Call::Free), 0, "to free waits for the device");
    }

    #[test]
    fn a_piece_of_what_a_callback_frees_serves() {
        let gpu = Arc::new(gpu(100, ""));
        let whole = take(&gpu, 96 * MIB, S1);
        gpu.free(whole).unwrap();
        take(&gpu, 20 * MIB, S1);
        let kept = take(&gpu, 76 * MIB, S1);
        let engine = Arc::downgrade(&gpu);
        let trick = Trick::default();
        trick.set(move || engine.upgrade().unwrap().free(kept).unwrap());
        gpu.on_shortage(0, move |_| trick.play());
        // The segment is in use, and the free block another stream's.
        take(&gpu, 60 * MIB, S0);
        assert_eq!(
            ended(&gpu, Rung::Callbacks),
            (Ended::TooLittle, 76),
            "another rung cuts it out"
        );
    }

    #[test]
    fn what_a_callback_frees_and_gives_back_is_won_once() {
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
    fn another_process_that_lets_go_serves_if_it_lets_go_of_enough() {
        for (keeps, serves) in [(0, true), (70, false)] {
            let (gpu, clock) = trick_gpu(100, "");
            assert!(gpu.driver().set_tenant(1, 90 * MIB));
            let engine = Arc::downgrade(&gpu);
            clock.play_on_wait(move || {
                assert!(engine.upgrade().unwrap().driver().set_tenant(1, keeps * MIB));
            });
            assert_eq!(gpu.alloc(40 * MIB, S0).is_ok(), serves);
            let (how, took) = (ended(&gpu, Rung::Wait).0, last(&gpu).took);
            let expected = if serves { Ended::Nothing } else { Ended::TimeIsUp };
            assert_eq!((how, took == Duration::from_secs(3)), (expected, !serves));
        }
    }

    #[test]
    fn room_that_another_process_makes_during_the_wait_for_events_serves() {
        let (gpu, clock) = trick_gpu(120, "");
        assert!(gpu.driver().set_tenant(1, 60 * MIB));
        let whole = take(&gpu, 40 * MIB, S0);
        gpu.free(whole).unwrap();
        let [pending, _live] = [20, 20].map(|mib| take(&gpu, mib * MIB, S0));
        gpu.record_stream(pending, S1).unwrap();
        (0..3).for_each(|_| _ = gpu.driver().launch(S1));
        gpu.free(pending).unwrap();
        let engine = Arc::downgrade(&gpu);
        clock.play_on_wait(move || _ = engine.upgrade().unwrap().driver().set_tenant(1, 0));
        take(&gpu, 40 * MIB, S0);
        assert!(clock.trick.was_played());
    }

    #[test]
    fn pages_of_a_released_pool_are_waited_for_while_their_stream_is_at_work() {
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

    // ---- what is waited for, and what is not ----

    #[test]
    fn a_trifle_that_another_thread_holds_is_not_waited_for() {
        let gpu = gpu(100, "");
        take(&gpu, 512, S0);
        elsewhere(|| {
            take(&gpu, 90 * MIB, S0);
            full_now(gpu.alloc(50 * MIB, S0));
        });
        assert_eq!(gpu.receipts()[0].took, Duration::ZERO, "512 bytes are no help with 50 MiB");
    }

    #[test]
    fn a_trifle_that_is_pending_is_not_waited_for() {
        let gpu = gpu(100, "");
        let trifle = take(&gpu, 512, S0);
        gpu.record_stream(trifle, S1).unwrap();
        (0..10_000).for_each(|_| _ = gpu.driver().launch(S1));
        gpu.free(trifle).unwrap();
        take(&gpu, 90 * MIB, S0);
        full_now(gpu.alloc(50 * MIB, S0));
        assert_eq!(gpu.receipts()[0].took, Duration::ZERO, "512 bytes are no help with 50 MiB");
    }

    /// The limit leaves room for what other processes would give back.
    #[test]
    fn other_processes_are_waited_for_as_far_as_a_limit_allows() {
        let gpu = gpu(100, "skip_rungs:borrow+pieces");
        gpu.set_memory_limit(Some(60 * MIB));
        take(&gpu, 10 * MIB, S0);
        let cached = take(&gpu, 30 * MIB, S1);
        gpu.free(cached).unwrap();
        assert!(gpu.driver().set_tenant(1, 60 * MIB));
        full_now(gpu.alloc(40 * MIB, S0));
        assert_eq!(gpu.receipts()[0].took, Duration::from_secs(3), "10 and 40 MiB are allowed");
        full_now(gpu.alloc(55 * MIB, S0));
        assert_eq!(gpu.receipts()[1].took, Duration::ZERO, "10 and 55 MiB are not");
    }

    #[test]
    fn a_limit_that_an_option_lifts_serves_who_waits() {
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
    fn a_device_that_cannot_use_host_memory_is_short_of_memory_and_not_broken() {
        let gpu = gpu(100, "spill_limit_mb:1000");
        take(&gpu, 90 * MIB, S0);
        gpu.driver().fail(FailWhen::Nth(Call::CreateHost, 1), Fault::Failed(801));
        full_now(gpu.alloc(40 * MIB, S0));
    }

    /// A segment for 5 MiB takes 20 from the device.
    #[test]
    fn what_is_too_little_for_a_segment_is_neither_given_back_nor_waited_for() {
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
        assert_eq!(reserved_mib(&gpu), 26, "the cache stays");
        for receipt in gpu.receipts() {
            assert_eq!(receipt.took, Duration::ZERO);
        }
    }

    #[test]
    fn what_anothers_callback_is_about_to_free_is_waited_for() {
        let gpu = Arc::new(real_gpu(100, "wait_ms:60000"));
        let spare = AtomicU64::new(take(&gpu, 90 * MIB, S0));
        let engine = Arc::downgrade(&gpu);
        let running = Arc::new(AtomicBool::new(false));
        let runs = Arc::clone(&running);
        gpu.on_shortage(0, move |_| {
            let gpu = engine.upgrade().unwrap();
            runs.store(true, Ordering::Relaxed);
            // Until the other thread is short of memory, too.
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
    fn a_driver_that_fails_while_others_are_waited_for_is_told() {
        let rungs = "garbage+poll+borrow+events+oversize+cached+pieces+callbacks+spill";
        let gpu = gpu(100, &format!("skip_rungs:{rungs}"));
        let held = take(&gpu, 60 * MIB, S0);
        gpu.record_stream(held, S1).unwrap();
        gpu.driver().launch(S1);
        gpu.free(held).unwrap();
        gpu.driver().fail(FailWhen::Nth(Call::EventQuery, 2), Fault::Failed(7));
        let result = gpu.alloc(60 * MIB, S0);
        assert!(matches!(result, Err(AllocError::Driver(_))), "{result:?}");
        assert_eq!(ended(&gpu, Rung::Wait).0, Ended::Failed);
        gpu.driver().finish_all();
        take(&gpu, 60 * MIB, S0);
    }

    /// The message says what was done, and nothing against that.
    #[test]
    fn beside_a_capture_others_are_waited_for_and_the_message_says_so() {
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
    fn what_is_prepared_is_for_its_own_stream() {
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

    /// Two tasks of 40 MiB each ask for as much again; the second gives way, gives back, and the first is served:
    /// returns what the first holds.
    fn give_way(gpu: &Gpu, first: &Task, second: &Task) -> [u64; 2] {
        let own = |task: &Task| {
            let _working = task.enter();
            gpu.alloc(40 * MIB, S0)
        };
        let held = [own(first).unwrap(), own(second).unwrap()];
        std::thread::scope(|scope| {
            let more = scope.spawn(|| own(first));
            until_waiting(gpu, 1);
            let told = own(second);
            assert!(matches!(told, Err(AllocError::GiveWay(_))), "{told:?}");
            gpu.free(held[1]).unwrap();
            [held[0], more.join().unwrap().unwrap()]
        })
    }

    /// The first keeps some for good, as weights are kept.
    #[test]
    fn a_task_that_gave_way_is_held_back_once() {
        let gpu = real_gpu(100, "wait_ms:200");
        let (first, second) = (Task::new("first", 0), Task::new("second", 0));
        let [_weights, more] = give_way(&gpu, &first, &second);
        gpu.free(more).unwrap();
        let _working = second.enter();
        let waited = gpu.waited().total();
        for _ in 0..3 {
            let address = take(&gpu, 20 * MIB, S0);
            gpu.free(address).unwrap();
        }
        let waited = gpu.waited().total() - waited;
        assert!(waited < Duration::from_millis(400), "{waited:?} of 200 ms once");
    }

    #[test]
    fn one_that_gave_way_and_asks_no_more_slows_nobody_down() {
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
                let address = take(&gpu, MIB, S0);
                gpu.free(address).unwrap();
            }
            let at_once = gpu.alloc_at_once_for(MIB, S0, Tag::NONE).unwrap();
            assert!(at_once.is_some(), "{first_ends}: nobody waits, and nobody is held back");
        }
    }

    // ---- while somebody stands ahead ----

    /// While a large request waits, what a thread with so many milliseconds is given from 20 MiB that lie
    /// free in its own lane.
    fn behind_a_large_one<T: Send>(conf: &str, of_thread: impl FnOnce(&Gpu) -> T + Send) -> T {
        let gpu = real_gpu(100, &format!("wait_ms:60000,{conf}"));
        let held = take(&gpu, 50 * MIB, S0);
        let cached = take(&gpu, 20 * MIB, S1);
        gpu.free(cached).unwrap();
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
    fn a_short_budget_is_served_from_free_memory_as_one_of_none_is() {
        for budget in [0, 10] {
            behind_a_large_one("", |gpu| {
                set_budget(Some(Duration::from_millis(budget)));
                let address = gpu.alloc(MIB, S1).unwrap();
                gpu.free(address).unwrap();
            });
        }
    }

    #[test]
    fn host_memory_is_not_for_what_lies_free() {
        let spilled = behind_a_large_one("spill_limit_mb:100,spill_over_mb:1", |gpu| {
            set_budget(Some(Duration::from_millis(10)));
            let address = gpu.alloc(2 * MIB, S1).unwrap();
            let spilled = gpu.is_spilled(address);
            gpu.free(address).unwrap();
            spilled
        });
        assert!(!spilled);
    }

    #[test]
    fn hits_behind_one_that_waits_are_no_shortages() {
        let gpu = real_gpu(100, "wait_ms:60000");
        let held = take(&gpu, 80 * MIB, S0);
        take(&gpu, 1024, S0);
        std::thread::scope(|scope| {
            let large = scope.spawn(|| gpu.alloc(60 * MIB, S1));
            until_waiting(&gpu, 1);
            for _ in 0..200 {
                let small = take(&gpu, 1024, S0);
                gpu.free(small).unwrap();
            }
            gpu.free(held).unwrap();
            large.join().unwrap().unwrap();
        });
        assert_eq!(gpu.stats().shortages, 1);
    }

    // ---- futures ----

    #[derive(Default)]
    struct Wakes(AtomicU64);

    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn virtual_gpu() -> (Gpu, Arc<VirtualClock>) {
        let clock = Arc::new(VirtualClock::new());
        (gpu_on(100, "", Ladder::Graceful, |_| Arc::clone(&clock) as _), clock)
    }

    #[test]
    fn an_alarm_wakes_whoever_polled_last() {
        let (gpu, clock) = virtual_gpu();
        assert!(gpu.driver().set_tenant(1, 90 * MIB), "another process: its memory is looked for");
        let mut future = pin!(gpu.alloc_async(40 * MIB, S0));
        assert!(future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        let wakes = Arc::new(Wakes::default());
        let waker = Waker::from(Arc::clone(&wakes));
        assert!(future.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        clock.advance(Duration::from_secs(3600));
        assert!(wakes.0.load(Ordering::Relaxed) > 0);
    }

    #[test]
    fn a_future_that_nobody_polls_any_more_keeps_nobody_waiting() {
        let (gpu, clock) = virtual_gpu();
        let held = take(&gpu, 100 * MIB, S0);
        let mut future = pin!(gpu.alloc_async(60 * MIB, S0));
        assert!(future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        gpu.free(held).unwrap();
        let at_once = || {
            let before = clock.now();
            elsewhere(|| {
                let address = take(&gpu, MIB, S0);
                gpu.free(address).unwrap();
            });
            clock.now() == before
        };
        clock.advance(Duration::from_secs(2));
        assert!(at_once(), "it would have looked long ago");
        // It has its place again when it is polled, and its budget.
        assert!(future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready());
    }

    #[test]
    fn a_request_that_won_nothing_wakes_nobody() {
        let (gpu, _clock) = virtual_gpu();
        take(&gpu, 100 * MIB, S0);
        let wakes = Arc::new(Wakes::default());
        let waker = Waker::from(Arc::clone(&wakes));
        let mut future = pin!(gpu.alloc_async(60 * MIB, S0));
        assert!(future.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        let before = set_budget(Some(Duration::ZERO));
        full_now(gpu.alloc(50 * MIB, S0));
        set_budget(before);
        assert_eq!(wakes.0.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_future_has_the_priority_of_the_task_it_was_made_for() {
        let gpu = gpu(100, "skip_rungs:borrow+cached+pieces");
        let held = take(&gpu, 90 * MIB, S0);
        let made_for = |name, priority| {
            let task = Task::new(name, priority);
            let _working = task.enter();
            Box::pin(gpu.alloc_async(90 * MIB, S0))
        };
        let (mut plain, mut urgent) = (made_for("plain", 0), made_for("urgent", 7));
        let mut polled = Context::from_waker(Waker::noop());
        assert!(plain.as_mut().poll(&mut polled).is_pending());
        assert!(urgent.as_mut().poll(&mut polled).is_pending());
        gpu.free(held).unwrap();
        assert!(plain.as_mut().poll(&mut polled).is_pending());
        assert!(urgent.as_mut().poll(&mut polled).is_ready());
    }

    #[test]
    fn the_pause_of_a_dropped_future_counts_as_waited() {
        let (gpu, clock) = virtual_gpu();
        assert!(gpu.driver().set_tenant(1, 90 * MIB));
        {
            let mut future = pin!(gpu.alloc_async(40 * MIB, S0));
            assert!(future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
            clock.advance(Duration::from_secs(2));
        }
        assert_eq!(gpu.receipts()[0].took, Duration::from_secs(2));
        assert_eq!(gpu.waited().total(), Duration::from_secs(2));
    }

    // ---- what others' code does ----

    #[test]
    fn a_panic_on_the_way_leaves_no_place_in_the_queue() {
        let (gpu, clock) = trick_gpu(100, "");
        assert!(gpu.driver().set_tenant(1, 90 * MIB));
        clock.play_on_wait(|| panic!("on purpose"));
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
                // Takes every lock there is.
                gpu.empty_cache().unwrap();
            }
        }
    }

    #[test]
    fn what_a_filter_owns_is_dropped_with_no_lock_held() {
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
    fn a_callback_may_take_another_away_when_it_is_dropped() {
        struct TakesAway(Weak<Gpu>, CallbackId);
        impl Drop for TakesAway {
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
        let takes_away = TakesAway(Arc::downgrade(&gpu), first);
        let second = gpu.on_shortage(0, move |_| assert!(takes_away.0.strong_count() > 0));
        full_now(gpu.alloc(99 * MIB, S0).and_then(|_| gpu.alloc(99 * MIB, S0)));
        assert_eq!(called.load(Ordering::Relaxed), 1);
        gpu.remove_callback(second);
        full_now(gpu.alloc(99 * MIB, S0));
        assert_eq!(called.load(Ordering::Relaxed), 1, "both are gone");
    }

    #[test]
    fn guards_of_tasks_may_be_dropped_in_any_order() {
        let gpu = gpu(100, "");
        let (one, two) = (Task::new("one", 0), Task::new("two", 5));
        let working_for_one = one.enter();
        let working_for_two = two.enter();
        drop(working_for_one);
        assert_eq!(cushion_core::priority(), 5, "still at work for the second");
        drop(working_for_two);
        take(&gpu, 90 * MIB, S0);
        full_now(gpu.alloc(90 * MIB, S0));
        let who = &gpu.receipts()[0].who;
        assert!(who.starts_with("thread"), "{who}");
    }
}
