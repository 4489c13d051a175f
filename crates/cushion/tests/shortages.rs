//! Shortages as Rust programs see them, on the simulated device.

#[cfg(test)]
mod tests {
    use std::fs;
    use std::pin::{Pin, pin};
    use std::sync::{Arc, Mutex};
    use std::task::{Context, Poll, Wake, Waker};
    use std::thread::{self, Thread};
    use std::time::Duration;

    use cushion::core::{Bell, Clock};
    use cushion::{
        AllocError, Buffer, BufferFuture, Device, Error, Outcome, Policy, Rung, Stream,
        SystemClock, Task, set_budget,
    };

    const MIB: usize = 1 << 20;

    fn gpu() -> Device {
        Device::simulated(1 << 30)
    }

    fn alloc(gpu: &Device, mib: usize) -> Result<Buffer<u8>, Error> {
        gpu.alloc_uninit(mib * MIB, &gpu.default_stream())
    }

    fn pause(millis: u64) {
        SystemClock::new().wait(Duration::from_millis(millis), &Bell::default());
    }

    /// Wakes a thread.
    struct Unparks(Thread);

    impl Wake for Unparks {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }

    fn block_on<F: Future>(future: F) -> F::Output {
        let waker = Waker::from(Arc::new(Unparks(thread::current())));
        let mut future = pin!(future);
        loop {
            match future.as_mut().poll(&mut Context::from_waker(&waker)) {
                Poll::Ready(output) => return output,
                Poll::Pending => thread::park(),
            }
        }
    }

    /// Polls once, with a waker that does nothing.
    fn poll<T>(future: &mut BufferFuture<'_, T>) -> Poll<Result<Buffer<T>, Error>> {
        Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
    }

    /// Starts a thread that holds `mib` MiB. The returned function makes it free them.
    fn holder(gpu: &Device, mib: usize) -> impl FnOnce() + use<> {
        let gpu = gpu.clone();
        let (has, had) = std::sync::mpsc::channel();
        let (drop_it, dropped) = std::sync::mpsc::channel::<()>();
        let thread = thread::spawn(move || {
            let buffer = alloc(&gpu, mib).unwrap();
            has.send(()).unwrap();
            let _ = dropped.recv();
            drop(buffer);
        });
        had.recv().unwrap();
        move || {
            drop(drop_it);
            thread.join().unwrap();
        }
    }

    #[test]
    fn a_callback_frees_memory_for_a_request() {
        let gpu = gpu();
        let spare = Arc::new(Mutex::new(Some(alloc(&gpu, 600).unwrap())));
        let pleas = Arc::new(Mutex::new(Vec::new()));
        let (held, heard) = (Arc::clone(&spare), Arc::clone(&pleas));
        let callback = gpu.on_shortage(0, move |plea| {
            heard.lock().unwrap().push((plea.device, plea.bytes));
            held.lock().unwrap().take();
        });
        drop(alloc(&gpu, 800).unwrap());
        assert!(spare.lock().unwrap().is_none());
        assert_eq!(*pleas.lock().unwrap(), [(0, 800 << 20)]);
        let receipts = gpu.receipts();
        assert_eq!(receipts[0].outcome, Outcome::Survived(Rung::Callbacks));
        let stats = gpu.stats();
        assert_eq!((stats.shortages, stats.shortages_survived), (1, 1));
        assert!(gpu.remove_callback(callback));
        assert!(!gpu.remove_callback(callback));
        let _most = alloc(&gpu, 600).unwrap();
        assert!(alloc(&gpu, 600).unwrap_err().is_out_of_memory());
        assert_eq!(pleas.lock().unwrap().len(), 1, "the callback is removed");
    }

    #[test]
    fn a_thread_waits_until_another_frees_memory() {
        let gpu = gpu();
        let give_back = holder(&gpu, 800);
        let waiting = gpu.clone();
        let waiter = thread::spawn(move || alloc(&waiting, 700).map(drop));
        pause(50);
        give_back();
        waiter.join().unwrap().unwrap();
        assert_eq!(gpu.receipts()[0].outcome, Outcome::Survived(Rung::Wait));
        assert_eq!(gpu.memory_allocated(), 0);
    }

    #[test]
    fn a_budget_of_zero_refuses_at_once() {
        let gpu = gpu();
        let give_back = holder(&gpu, 800);
        set_budget(Some(Duration::ZERO));
        let refused = alloc(&gpu, 700).unwrap_err();
        set_budget(None);
        assert!(matches!(refused, Error::Alloc(AllocError::FullNow(_))), "{refused}");
        give_back();
        let gpu = Device::builder().conf("wait_ms:0").unwrap().simulated(1 << 30);
        let give_back = holder(&gpu, 800);
        assert!(alloc(&gpu, 700).unwrap_err().is_out_of_memory());
        give_back();
    }

    #[test]
    fn a_lone_task_is_told_to_split() {
        let gpu = gpu();
        let task = Task::new("batch", 0);
        let _working = task.enter();
        let _held = alloc(&gpu, 600).unwrap();
        let refused = alloc(&gpu, 600).unwrap_err();
        assert!(matches!(refused, Error::Alloc(AllocError::Split(_))), "{refused}");
        assert_eq!(gpu.receipts()[0].who, "task batch");
    }

    /// A buffer belongs to the thread that allocates it, wherever it is dropped, unless a task owns
    /// it.
    #[test]
    fn memory_of_a_task_is_waited_for() {
        let gpu = gpu();
        let batch = Task::new("batch", 0);
        let working = batch.enter();
        let buffer = alloc(&gpu, 800).unwrap();
        drop(working);
        let worker = thread::spawn(move || {
            let _working = batch.enter();
            pause(30);
            drop(buffer);
        });
        alloc(&gpu, 800).unwrap();
        worker.join().unwrap();
    }

    #[test]
    fn a_future_completes_when_another_thread_frees_memory() {
        let gpu = gpu();
        let stream = gpu.default_stream();
        let give_back = holder(&gpu, 800);
        let other = thread::spawn(move || {
            pause(20);
            give_back();
        });
        let buffer = block_on(gpu.alloc_zeros_async::<u32>(150 * MIB, &stream)).unwrap();
        assert_eq!(buffer.len(), 150 * MIB);
        other.join().unwrap();
        // A future that fits is ready at once.
        let mut small = gpu.alloc_zeros_async::<u32>(9, &stream);
        let Poll::Ready(Ok(small)) = poll(&mut small) else { panic!("there is room for it") };
        assert_eq!(small.to_vec(&stream).unwrap(), [0; 9]);
        drop((buffer, small));
        assert_eq!(gpu.memory_allocated(), 0);
    }

    /// Returns two futures that wait in this order. There is room for one of them at a time.
    fn two_waiting_futures(gpu: &Device) -> [BufferFuture<'_, u8>; 2] {
        let stream = gpu.default_stream();
        let mut both = [(); 2].map(|()| gpu.alloc_uninit_async::<u8>(600 * MIB, &stream));
        assert!(both.iter_mut().all(|future| poll(future).is_pending()));
        assert_eq!(gpu.engine().waiting(), 2);
        both
    }

    #[test]
    fn futures_are_served_in_the_order_of_their_first_polls() {
        let gpu = gpu();
        let give_back = holder(&gpu, 900);
        let [mut first, mut second] = two_waiting_futures(&gpu);
        give_back();
        assert!(poll(&mut second).is_pending(), "the first future is next");
        let Poll::Ready(Ok(buffer)) = poll(&mut first) else { panic!("the first future is next") };
        assert!(poll(&mut second).is_pending(), "there is no room");
        drop(buffer);
        let Poll::Ready(Ok(buffer)) = poll(&mut second) else { panic!("there is room now") };
        drop(buffer);
        assert_eq!((gpu.memory_allocated(), gpu.engine().waiting()), (0, 0));
    }

    #[test]
    fn a_dropped_future_gives_up_its_place() {
        let gpu = gpu();
        let give_back = holder(&gpu, 900);
        let [first, second] = two_waiting_futures(&gpu);
        give_back();
        drop(first);
        assert_eq!(gpu.engine().waiting(), 1);
        let buffer = block_on(second).unwrap();
        assert_eq!(gpu.receipts()[0].outcome, Outcome::GivenUp);
        drop(buffer);
        assert_eq!(gpu.memory_allocated(), 0);
        // A future that was never polled has requested nothing.
        drop(gpu.alloc_zeros_async::<u8>(600 * MIB, &gpu.default_stream()));
        assert_eq!(gpu.receipts().len(), 1, "a future served in its turn has no receipt");
    }

    #[test]
    fn futures_cross_threads_and_report_wrong_arguments() {
        fn is_send(_: &impl Send) {}
        let (gpu, other) = (gpu(), gpu());
        let mut wrong = gpu.alloc_zeros_async::<u64>(1, &other.default_stream());
        is_send(&wrong);
        assert!(matches!(poll(&mut wrong), Poll::Ready(Err(Error::OtherDevice))));
        let stream = gpu.default_stream();
        let long = gpu.alloc_zeros_async::<u64>(usize::MAX / 4, &stream);
        assert!(matches!(block_on(long), Err(Error::TooLong { .. })));
        let never = gpu.alloc_zeros_async::<u8>(2 << 30, &stream);
        assert!(matches!(block_on(never), Err(Error::Alloc(AllocError::NeverFits(_)))));
        // A runtime takes futures that borrow nothing.
        let gpu = gpu.clone();
        let moved = async move {
            let stream: Stream = gpu.new_stream()?;
            let buffer = gpu.alloc_zeros_async::<u8>(100, &stream).await?;
            Ok::<_, Error>(buffer.len())
        };
        let thread = thread::spawn(move || block_on(moved));
        assert_eq!(thread.join().unwrap().unwrap(), 100);
    }

    #[test]
    fn prefetched_memory_serves_the_next_request() {
        for policy in Policy::ALL {
            let gpu = Device::builder().policy(policy).simulated(1 << 30);
            let stream = gpu.new_stream().unwrap();
            gpu.prefetch(300 << 20, &stream).unwrap();
            let reserved = gpu.memory_reserved();
            match policy {
                Policy::Segments => assert_eq!(reserved, 300 << 20),
                // The other policies reserve whole pages.
                _ => assert!((300 << 20..320 << 20).contains(&reserved), "{policy}: {reserved}"),
            }
            assert_eq!(gpu.memory_allocated(), 0);
            let misses = gpu.cache_stats().misses;
            let _buffer = gpu.alloc_uninit::<u8>(300 * MIB, &stream).unwrap();
            assert_eq!(gpu.cache_stats().misses, misses, "the device is not called");
            assert!(gpu.prefetch(900 << 20, &stream).unwrap_err().is_out_of_memory());
            let elsewhere = Device::simulated(1 << 30);
            assert!(matches!(
                gpu.prefetch(1, &elsewhere.default_stream()),
                Err(Error::OtherDevice)
            ));
        }
    }

    #[test]
    fn host_memory_serves_if_allowed() {
        let conf = "spill_limit_mb:512,spill_over_mb:1";
        let gpu = Device::builder().conf(conf).unwrap().simulated(1 << 30);
        let stream = gpu.default_stream();
        let _most = alloc(&gpu, 900).unwrap();
        let spilled = gpu.alloc_copy(&vec![7_u8; 300 * MIB], &stream).unwrap();
        assert_eq!(gpu.receipts()[0].outcome, Outcome::Survived(Rung::Spill));
        assert_eq!(gpu.stats().spilled_bytes.current, 300 << 20);
        assert_eq!(spilled.to_vec(&stream).unwrap(), vec![7; 300 * MIB]);
        drop(spilled);
        stream.synchronize().unwrap();
        gpu.engine().process_events().unwrap();
        assert_eq!(gpu.stats().spilled_bytes.current, 0);
    }

    #[test]
    fn receipts_are_appended_and_can_be_read() {
        let gpu = gpu();
        let folder = tempfile::tempdir().unwrap();
        let bad = gpu.write_receipts(folder.path().join("no/such.jsonl")).unwrap_err();
        assert!(bad.to_string().contains("no/such.jsonl"), "{bad}");
        let path = folder.path().join("receipts.jsonl");
        // A line that a killed process left unfinished.
        fs::write(&path, "{\"number\":1,\"dev").unwrap();
        gpu.write_receipts(&path).unwrap();
        let _most = alloc(&gpu, 900).unwrap();
        let read = || cushion_trace::read_receipts(&fs::read(&path).unwrap()[..]).unwrap();
        for count in 1..=3_u64 {
            let refused = alloc(&gpu, 200).unwrap_err();
            let Error::Alloc(refused) = refused else { panic!("{refused}") };
            assert_eq!(refused.shortage().unwrap().receipt, count);
            let receipts = read();
            assert_eq!((receipts.latest.len() as u64, receipts.torn), (count, 1));
            assert_eq!(
                receipts.latest.back().unwrap().shortage,
                gpu.receipts().last().unwrap().shortage
            );
        }
        // Another file replaces the first; a dropped device keeps no file open.
        let other = folder.path().join("other.jsonl");
        gpu.write_receipts(&other).unwrap();
        alloc(&gpu, 200).unwrap_err();
        assert_eq!(read().latest.len(), 3);
        assert_eq!(fs::read_to_string(&other).unwrap().lines().count(), 1);
        assert_eq!(gpu.lost_receipts().count, 0);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn lost_receipts_are_counted_and_fail_nothing() {
        let gpu = gpu();
        gpu.write_receipts("/dev/full").unwrap();
        let _most = alloc(&gpu, 900).unwrap();
        for count in 1..=2 {
            assert!(alloc(&gpu, 200).unwrap_err().is_out_of_memory());
            let lost = gpu.lost_receipts();
            assert_eq!(lost.count, count);
            assert!(lost.first.is_some_and(|why| why.contains("space")));
        }
    }

    #[test]
    fn failures_are_injected_by_rule() {
        let gpu = gpu();
        gpu.inject(&"every=3; over=512MiB,at=cached".parse().unwrap());
        assert!(alloc(&gpu, 1).is_ok() && alloc(&gpu, 1).is_ok());
        let refused = alloc(&gpu, 1).unwrap_err();
        assert!(refused.to_string().contains("injected"), "{refused}");
        assert!(alloc(&gpu, 600).is_ok(), "served at a rung");
        let receipts = gpu.receipts();
        assert_eq!(receipts[1].outcome, Outcome::Survived(Rung::Cached));
        assert!(receipts.iter().all(|receipt| receipt.shortage.injected));
        gpu.stop_injecting();
        assert!((0..9).all(|_| alloc(&gpu, 1).is_ok()));
    }

    #[test]
    fn driver_calls_fail_by_rule() {
        // With `segments`, each request makes one `alloc` call.
        let gpu = Device::builder().policy(Policy::Segments).simulated(1 << 30);
        gpu.inject(&"driver=alloc,nth=1; driver=alloc,nth=3,fault=999".parse().unwrap());
        let full = alloc(&gpu, 100).unwrap_err();
        assert!(full.is_out_of_memory(), "{full}");
        let _kept = alloc(&gpu, 100).unwrap();
        let broken = alloc(&gpu, 100).unwrap_err();
        assert!(matches!(broken, Error::Alloc(AllocError::Driver(_))), "{broken}");
        assert!(broken.to_string().contains("error 999"), "{broken}");
        gpu.stop_injecting();
        assert!(alloc(&gpu, 100).is_ok());
        gpu.engine().check_invariants().unwrap();
    }
}
