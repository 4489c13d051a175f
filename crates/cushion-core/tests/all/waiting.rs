//! Waiting for memory: by threads and by futures, in order, without deadlock, and without a lock.

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::{Pin, pin};
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::{Arc, Barrier, Condvar, Mutex, mpsc};
    use std::task::{Context, Poll};
    use std::time::Duration;

    use cushion_core::driver::{
        Capture, DriverResult, EventId, MemoryInfo, NodeId, PageHandle, Properties,
    };
    use cushion_core::size::MIB;
    use cushion_core::{
        AllocError, Clock, Driver, Engine, Outcome, Policy, Rung, SimConfig, SimDriver, StreamId,
        Tag, Task, VirtualClock, set_budget, set_priority,
    };

    use crate::common::*;

    // ---- real threads on real time ----

    /// Longer than any of these tests takes, but short enough that a failing test ends.
    const PATIENT: &str = "wait_ms:60000";

    #[test]
    fn a_free_by_another_thread_serves_a_waiting_request() {
        for conf in POLICIES {
            let gpu = real_gpu(100, &format!("{PATIENT},{conf}"));
            let held = take(&gpu, 80 * MIB, S0);
            std::thread::scope(|scope| {
                let waiter = scope.spawn(|| gpu.alloc(60 * MIB, S1));
                until_waiting(&gpu, 1);
                gpu.free(held).unwrap();
                waiter.join().unwrap().unwrap();
            });
            assert_eq!((gpu.waiting(), gpu.stats().shortages_survived), (0, 1), "{conf}");
            gpu.check_invariants().unwrap();
        }
    }

    #[test]
    fn a_request_does_not_wait_for_memory_of_an_ended_thread() {
        let gpu = gpu(100, "");
        std::thread::scope(|scope| {
            // Join the thread: a scope returns before its threads have ended completely.
            scope.spawn(|| take(&gpu, 80 * MIB, S0)).join().unwrap();
        });
        full_now(gpu.alloc(60 * MIB, S0));
        assert_eq!(gpu.receipts()[0].took, Duration::ZERO, "refused at once");
        // A running thread may still free its memory: the request waits for its whole budget.
        let gate = Barrier::new(2);
        let freed = gpu.snapshot().segments[0].address;
        gpu.free(freed).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                take(&gpu, 80 * MIB, S0);
                gate.wait();
                gate.wait();
            });
            gate.wait();
            full_now(gpu.alloc(60 * MIB, S0));
            gate.wait();
        });
        assert_eq!(gpu.receipts()[1].took, Duration::from_secs(3));
    }

    /// A loader thread allocates, and a worker thread frees.
    #[test]
    fn a_thread_waits_for_its_own_memory_if_another_thread_frees_it() {
        let gpu = real_gpu(100, PATIENT);
        let (sender, receiver) = mpsc::channel::<u64>();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut first = true;
                for address in receiver {
                    if !first {
                        until_waiting(&gpu, 1);
                    }
                    first = false;
                    gpu.free(address).unwrap();
                }
            });
            // The engine sees that another thread frees the first block.
            sender.send(take(&gpu, 60 * MIB, S0)).unwrap();
            while gpu.stats().allocation.all.current > 0 {
                std::thread::yield_now();
            }
            // From then on the worker frees a block only when the next request waits.
            for _ in 0..5 {
                sender.send(take(&gpu, 60 * MIB, S0)).unwrap();
            }
            let last = take(&gpu, 60 * MIB, S0);
            drop(sender);
            gpu.free(last).unwrap();
        });
        assert_eq!(gpu.stats().shortages_survived, 5);
    }

    #[test]
    fn a_follower_thread_allocates_for_the_thread_that_allocated_last() {
        cushion_core::set_followers(|| std::thread::current().name() == Some("gradients"));
        let gpu = gpu(100, "");
        let first = take(&gpu, 40 * MIB, S0);
        // The follower keeps running. Neither thread waits for the other.
        let gate = Barrier::new(2);
        std::thread::scope(|scope| {
            let gradients = std::thread::Builder::new().name("gradients".to_owned());
            let follower = gradients.spawn_scoped(scope, || {
                take(&gpu, 40 * MIB, S0);
                full_now(gpu.alloc(40 * MIB, S0));
                gate.wait();
                gate.wait();
            });
            gate.wait();
            full_now(gpu.alloc(40 * MIB, S0));
            gate.wait();
            follower.unwrap().join().unwrap();
        });
        for receipt in gpu.receipts() {
            assert_eq!((receipt.took, receipt.holders.len()), (Duration::ZERO, 1));
        }
        gpu.free(first).unwrap();
    }

    /// Lets five threads of these priorities wait for one block each, frees one block at a time,
    /// and returns the order in which the threads are served.
    fn order_of_service(priorities: [i32; 5]) -> Vec<usize> {
        let gpu = real_gpu(100, &format!("{PATIENT},skip_rungs:borrow+cached"));
        let held: Vec<u64> = (0..5).map(|_| take(&gpu, 20 * MIB, S0)).collect();
        let (sender, served) = mpsc::channel();
        std::thread::scope(|scope| {
            for (index, priority) in priorities.into_iter().enumerate() {
                let (gpu, sender) = (&gpu, sender.clone());
                scope.spawn(move || {
                    set_priority(priority);
                    let address = gpu.alloc(20 * MIB, S0).unwrap();
                    sender.send(index).unwrap();
                    address
                });
                until_waiting(gpu, index + 1);
            }
            held.iter()
                .map(|&address| {
                    gpu.free(address).unwrap();
                    served.recv().unwrap()
                })
                .collect()
        })
    }

    #[test]
    fn requests_are_served_by_priority_then_by_arrival() {
        assert_eq!(order_of_service([0; 5]), [0, 1, 2, 3, 4]);
        assert_eq!(order_of_service([0, 1, 0, 2, 1]), [3, 1, 4, 0, 2]);
    }

    #[test]
    fn only_a_thread_that_holds_memory_may_pass_a_waiting_request() {
        let gpu = real_gpu(100, PATIENT);
        let [large, small] = [60, 20].map(|mib| take(&gpu, mib * MIB, S0));
        cache(&gpu, MIB, S1);
        std::thread::scope(|scope| {
            let first = scope.spawn(|| gpu.alloc(80 * MIB, S0));
            until_waiting(&gpu, 1);
            // The driver has memory for this request, but another request came first.
            let second = scope.spawn(|| gpu.alloc(12 * MIB, S1));
            until_waiting(&gpu, 2);
            // This thread holds the memory that the first request waits for, so it may pass.
            let passed = gpu.alloc(12 * MIB, S2).unwrap();
            assert_eq!(gpu.waiting(), 2);
            gpu.free(passed).unwrap();
            gpu.empty_cache().unwrap();
            for address in [large, small] {
                gpu.free(address).unwrap();
            }
            first.join().unwrap().unwrap();
            second.join().unwrap().unwrap();
        });
        gpu.check_invariants().unwrap();
    }

    #[test]
    fn a_free_block_in_the_own_lane_serves_without_waiting() {
        for conf in ALL_POLICIES {
            let gpu = real_gpu(100, &format!("{PATIENT},{conf}"));
            let held = take(&gpu, 60 * MIB, S0);
            let cached = [take(&gpu, 4096, S1), take(&gpu, 3 * MIB, S1)];
            cached.into_iter().for_each(|address| gpu.free(address).unwrap());
            std::thread::scope(|scope| {
                let first = scope.spawn(|| gpu.alloc(90 * MIB, S0));
                until_waiting(&gpu, 1);
                // This thread holds no memory. It allocates more often than a waiting request may
                // be passed over.
                let other = scope.spawn(|| {
                    for _ in 0..200 {
                        for (bytes, expected) in [4096, 3 * MIB].into_iter().zip(cached) {
                            let address = gpu.alloc(bytes, S1).unwrap();
                            assert_eq!(address, expected, "{conf}");
                            gpu.free(address).unwrap();
                            let at_once = gpu.alloc_at_once_for(bytes, S1, Tag::NONE);
                            assert_eq!(at_once.unwrap(), Some(expected), "{conf}");
                            gpu.free(expected).unwrap();
                        }
                    }
                });
                other.join().unwrap();
                assert_eq!(gpu.waiting(), 1, "{conf}: the first still waits");
                gpu.free(held).unwrap();
                first.join().unwrap().unwrap();
            });
            gpu.check_invariants().unwrap();
        }
    }

    #[test]
    fn a_thread_with_a_budget_of_zero_does_not_queue() {
        let gpu = real_gpu(100, PATIENT);
        let held = take(&gpu, 90 * MIB, S0);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| gpu.alloc(80 * MIB, S0));
            until_waiting(&gpu, 1);
            scope
                .spawn(|| {
                    set_budget(Some(Duration::ZERO));
                    let address = gpu.alloc(MIB, S1).unwrap();
                    full_now(gpu.alloc(80 * MIB, S1));
                    gpu.free(address).unwrap();
                })
                .join()
                .unwrap();
            gpu.free(held).unwrap();
            waiter.join().unwrap().unwrap();
        });
    }

    // ---- tasks ----

    #[test]
    fn in_a_deadlock_the_task_of_least_priority_gives_way() {
        for (priorities, loser) in [([0, 0], 1), ([0, 1], 0), ([1, 0], 1)] {
            let gpu = real_gpu(100, &format!("{PATIENT},skip_rungs:borrow"));
            let tasks = [Task::new("first", priorities[0]), Task::new("second", priorities[1])];
            let both_hold = Barrier::new(2);
            let outcomes: Vec<bool> = std::thread::scope(|scope| {
                let threads: Vec<_> = tasks
                    .iter()
                    .map(|task| {
                        let (gpu, both_hold) = (&gpu, &both_hold);
                        scope.spawn(move || {
                            let _working = task.enter();
                            let held = take(gpu, 40 * MIB, S0);
                            both_hold.wait();
                            let more = gpu.alloc(40 * MIB, S0);
                            match &more {
                                Err(AllocError::GiveWay(shortage)) => {
                                    assert_eq!(shortage.requested, 40 * MIB);
                                    // This task starts again after the other has finished.
                                    gpu.free(held).unwrap();
                                    let again = [(); 2].map(|()| take(gpu, 40 * MIB, S0));
                                    again.iter().for_each(|&address| gpu.free(address).unwrap());
                                }
                                Err(other) => panic!("{other}"),
                                Ok(address) => {
                                    gpu.free(*address).unwrap();
                                    gpu.free(held).unwrap();
                                }
                            }
                            more.is_err()
                        })
                    })
                    .collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            let expected: Vec<bool> = (0..2).map(|index| index == loser).collect();
            assert_eq!(outcomes, expected, "{priorities:?}");
            let gave_way = gpu.receipts().iter().filter(|r| r.outcome == Outcome::GiveWay).count();
            assert_eq!(gave_way, 1);
            gpu.check_invariants().unwrap();
        }
    }

    #[test]
    fn the_only_task_that_holds_memory_is_told_to_split() {
        for conf in POLICIES {
            let gpu = gpu(100, &format!("wait_ms:60000,{conf}"));
            let task = Task::new("alone", 0);
            let _working = task.enter();
            take(&gpu, 60 * MIB, S0);
            let error = gpu.alloc(60 * MIB, S0).unwrap_err();
            assert!(matches!(error, AllocError::Split(_)), "{error}");
            assert_eq!(gpu.receipts()[0].took, Duration::ZERO, "refused at once");
            (0..2).for_each(|_| _ = take(&gpu, 20 * MIB, S0));
        }
    }

    #[test]
    fn a_task_is_blocked_only_if_all_its_threads_wait() {
        let gpu = real_gpu(100, PATIENT);
        let task = Task::new("two threads", 0);
        let held = {
            let _working = task.enter();
            take(&gpu, 80 * MIB, S0)
        };
        let _working = task.enter();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                let _working = task.enter();
                gpu.alloc(60 * MIB, S0)
            });
            until_waiting(&gpu, 1);
            gpu.free(held).unwrap();
            waiter.join().unwrap().unwrap();
        });
    }

    // ---- callbacks and locks ----

    #[test]
    fn other_threads_continue_while_a_callback_runs() {
        let gpu = Arc::new(real_gpu(100, "wait_ms:0"));
        take(&gpu, 90 * MIB, S0);
        let running = Arc::new(AtomicU64::new(0));
        let (engine, count) = (Arc::downgrade(&gpu), Arc::clone(&running));
        gpu.on_shortage(0, move |_| {
            assert_eq!(count.fetch_add(1, Ordering::SeqCst), 0, "the callback was re-entered");
            let engine = engine.upgrade().unwrap();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    cache(&engine, MIB, S1);
                    // This shortage does not call the callback again.
                    full_now(engine.alloc(50 * MIB, S1));
                });
            });
            count.fetch_sub(1, Ordering::SeqCst);
        });
        full_now(gpu.alloc(50 * MIB, S0));
        assert_eq!(running.load(Ordering::SeqCst), 0);
    }

    /// A driver whose `free` blocks until the test opens the gate, like a real `free` that waits
    /// for the device.
    #[derive(Debug)]
    struct SlowToFree {
        sim: SimDriver,
        /// Whether a `free` has begun, and whether the gate is open.
        gate: Mutex<(bool, bool)>,
        changed: Condvar,
    }

    macro_rules! forward {
        ($($name:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {
            impl Driver for SlowToFree {
                $(fn $name(&self, $($argument: $type),*) -> $result {
                    if stringify!($name) == "free" {
                        let mut gate = self.gate.lock().unwrap();
                        gate.0 = true;
                        self.changed.notify_all();
                        drop(self.changed.wait_while(gate, |gate| !gate.1).unwrap());
                    }
                    self.sim.$name($($argument),*)
                })*
            }
        };
    }

    cushion_core::driver_methods!(forward);

    #[test]
    fn other_threads_continue_while_the_driver_waits_for_the_device() {
        let driver = SlowToFree {
            sim: SimDriver::new(SimConfig::with_capacity(100 * MIB)),
            gate: Mutex::default(),
            changed: Condvar::new(),
        };
        let gpu = Engine::new(driver);
        gpu.set_policy(Policy::Segments);
        cache(&gpu, 90 * MIB, S0);
        std::thread::scope(|scope| {
            let slow = scope.spawn(|| gpu.empty_cache());
            let gate = &gpu.driver().gate;
            drop(gpu.driver().changed.wait_while(gate.lock().unwrap(), |it| !it.0).unwrap());
            let address = gpu.alloc(MIB, S0).unwrap();
            assert_eq!(gpu.stats().reserved_bytes.all.current, 2 * MIB);
            assert!(gpu.holds(address));
            gpu.check_invariants().unwrap();
            gate.lock().unwrap().1 = true;
            gpu.driver().changed.notify_all();
            slow.join().unwrap().unwrap();
        });
        assert_eq!(gpu.driver().sim.held(), 2 * MIB);
    }

    // ---- futures on virtual time ----

    struct World {
        gpu: Gpu,
        clock: Arc<VirtualClock>,
        wakes: Arc<WakeCount>,
    }

    impl World {
        fn new(mib: u64, conf: &str) -> Self {
            let (gpu, clock) = virtual_gpu(mib, conf);
            Self { gpu, clock, wakes: Arc::default() }
        }

        fn poll<F: Future>(&self, future: Pin<&mut F>) -> Poll<F::Output> {
            future.poll(&mut Context::from_waker(&self.wakes.waker()))
        }

        /// Returns how often the futures were woken since the last call.
        fn wakes(&self) -> u64 {
            self.wakes.take()
        }
    }

    fn ready(poll: Poll<Result<u64, AllocError>>) -> u64 {
        match poll {
            Poll::Ready(result) => result.unwrap(),
            Poll::Pending => panic!("the future is pending"),
        }
    }

    #[test]
    fn futures_complete_in_the_order_of_their_first_poll() {
        let world = World::new(100, "");
        let gpu = &world.gpu;
        let held: Vec<u64> = (0..5).map(|_| take(gpu, 20 * MIB, S0)).collect();
        let mut large = pin!(gpu.alloc_async(40 * MIB, S0));
        let mut small = pin!(gpu.alloc_async(20 * MIB, S0));
        assert!(world.poll(large.as_mut()).is_pending());
        assert!(world.poll(small.as_mut()).is_pending());
        world.wakes();
        gpu.free(held[0]).unwrap();
        assert!(world.wakes() >= 1, "the free wakes the future at once");
        assert!(
            world.poll(small.as_mut()).is_pending(),
            "the small request would fit, but came later"
        );
        assert!(world.poll(large.as_mut()).is_pending());
        gpu.free(held[1]).unwrap();
        assert!(world.poll(small.as_mut()).is_pending());
        let first = ready(world.poll(large.as_mut()));
        assert!(world.poll(small.as_mut()).is_pending());
        gpu.free(held[2]).unwrap();
        let second = ready(world.poll(small.as_mut()));
        assert_eq!(gpu.waiting(), 0);
        for address in [first, second, held[3], held[4]] {
            gpu.free(address).unwrap();
        }
        gpu.check_invariants().unwrap();
    }

    #[test]
    fn a_dropped_future_leaves_the_queue() {
        let world = World::new(100, "");
        let gpu = &world.gpu;
        let held = take(gpu, 80 * MIB, S0);
        let mut second = pin!(gpu.alloc_async(20 * MIB + 1, S0));
        {
            let mut first = pin!(gpu.alloc_async(100 * MIB, S0));
            assert!(world.poll(first.as_mut()).is_pending());
            assert!(world.poll(second.as_mut()).is_pending());
            assert_eq!(gpu.waiting(), 2);
            world.wakes();
        }
        assert_eq!((gpu.waiting(), world.wakes() > 0), (1, true), "the next future is woken");
        assert_eq!(gpu.receipts()[0].outcome, Outcome::GivenUp);
        gpu.free(held).unwrap();
        let address = ready(world.poll(second.as_mut()));
        gpu.free(address).unwrap();
        // A future that was never polled, or is done, has no place in the queue.
        drop(gpu.alloc_async(MIB, S0));
        assert_eq!(ready(world.poll(pin!(gpu.alloc_async(0, S0)))), 0);
        gpu.check_invariants().unwrap();
        assert_eq!(gpu.stats().allocation.all.current, 0);
    }

    #[test]
    fn alarms_wake_a_future_until_its_budget_is_spent() {
        let world = World::new(100, "");
        let gpu = &world.gpu;
        take(gpu, 80 * MIB, S0);
        let mut future = pin!(gpu.alloc_async(60 * MIB, S0));
        let mut polls = 0;
        let refused = loop {
            polls += 1;
            match world.poll(future.as_mut()) {
                Poll::Ready(result) => break result,
                Poll::Pending => {
                    let next = world.clock.next_alarm().expect("an alarm");
                    world.clock.advance(next - world.clock.now());
                    assert!(world.wakes() > 0);
                }
            }
        };
        full_now(refused);
        assert_eq!(world.clock.now(), Duration::from_secs(3));
        assert!(polls < 100, "{polls} polls: the pauses must grow");
        assert_eq!(gpu.waiting(), 0);
    }

    #[test]
    fn max_tries_limits_how_often_a_request_climbs() {
        // The freed blocks are large enough together, but none of them serves the request.
        let world = World::new(180, "max_tries:2");
        let gpu = &world.gpu;
        let blocks: Vec<u64> = (0..18).map(|_| take(gpu, 9 * MIB, S0)).collect();
        let mut future = pin!(gpu.alloc_async(60 * MIB, S0));
        let mut frees = 0;
        for block in blocks.into_iter().step_by(2) {
            if let Poll::Ready(result) = world.poll(future.as_mut()) {
                let shortage = full_now(result);
                let wait = shortage.tried.iter().find(|tried| tried.rung == Rung::Wait).unwrap();
                assert_eq!(wait.ended, cushion_core::Ended::TimeIsUp);
                break;
            }
            frees += 1;
            gpu.free(block).unwrap();
        }
        // Five blocks and the rest of the device make 60 MiB. Before that, the request does not
        // try.
        assert_eq!(frees, 7);
        assert_eq!(gpu.waiting(), 0);
    }

    /// A request of low priority waits, while requests of high priority keep coming.
    #[test]
    fn a_request_is_passed_over_at_most_64_times() {
        let world = World::new(100, "skip_rungs:borrow+cached");
        let gpu = &world.gpu;
        let mut held: Vec<u64> = (0..5).map(|_| take(gpu, 20 * MIB, S0)).collect();
        set_priority(0);
        let mut low = pin!(gpu.alloc_async(20 * MIB, S0));
        assert!(world.poll(low.as_mut()).is_pending());
        set_priority(1);
        let mut passed = 0;
        let served = loop {
            let mut high = Box::pin(gpu.alloc_async(20 * MIB, S0));
            assert!(world.poll(high.as_mut()).is_pending());
            gpu.free(held.remove(0)).unwrap();
            if let Poll::Ready(result) = world.poll(low.as_mut()) {
                break result.unwrap();
            }
            held.push(ready(world.poll(high.as_mut())));
            passed += 1;
            assert!(passed < 100, "the request of low priority starves");
        };
        set_priority(0);
        gpu.free(served).unwrap();
        assert_eq!(passed, 64);
    }

    #[test]
    fn a_thread_does_not_queue_behind_its_own_future() {
        let world = World::new(100, "");
        let gpu = &world.gpu;
        let held = take(gpu, 40 * MIB, S0);
        let mut future = pin!(gpu.alloc_async(80 * MIB, S0));
        assert!(world.poll(future.as_mut()).is_pending());
        let blocking = gpu.alloc(20 * MIB, StreamId(9)).unwrap();
        for address in [held, blocking] {
            gpu.free(address).unwrap();
        }
        ready(world.poll(future.as_mut()));
    }
}
