//! Every rung, alone and in order: it wins enough, wins too little, wins nothing, fails, is
//! switched off, is illegal during a capture.

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Duration;

    use cushion_core::driver::{Call, FailWhen, Fault};
    use cushion_core::size::MIB;
    use cushion_core::{
        AllocError, Ended, Injection, Ladder, LastingStreams, Outcome, Policy, Remedy, Rung,
        StreamId, set_budget,
    };

    use crate::common::*;

    /// Returns a conf string that skips every rung that can be skipped, except `rung`.
    fn only(rung: Rung) -> String {
        let others = Rung::ALL.into_iter().filter(|&other| other != rung && other.can_be_skipped());
        format!("skip_rungs:{}", others.map(Rung::name).collect::<Vec<_>>().join("+"))
    }

    fn gpu_only(mib: u64, rung: Rung, conf: &str) -> Gpu {
        gpu(mib, &format!("{},{conf}", only(rung)))
    }

    /// Returns the rung that served the latest shortage.
    fn survived(gpu: &Gpu) -> Option<Rung> {
        match last(gpu).outcome {
            Outcome::Survived(rung) => Some(rung),
            _ => None,
        }
    }

    /// Frees a block while unfinished work of another stream uses it.
    fn free_pending(gpu: &Gpu, address: u64, user: StreamId) {
        gpu.record_stream(address, user).unwrap();
        gpu.driver().launch(user);
        gpu.free(address).unwrap();
    }

    // ---- each rung alone ----

    #[test]
    fn garbage() {
        let conf = "garbage_collection_threshold:0.5,per_process_memory_fraction:0.9";
        // Old blocks are released before the driver call, so there is no shortage.
        let enough = gpu_only(100, Rung::Garbage, conf);
        let old = take(&enough, 40 * MIB, S0);
        let _live = take(&enough, 20 * MIB, S0);
        enough.free(old).unwrap();
        take(&enough, 50 * MIB, S1);
        assert_eq!((enough.receipts().len(), reserved_mib(&enough)), (0, 70));
        // Nothing is left to collect: this request is refused.
        full_now(enough.alloc(60 * MIB, S1));
        assert_eq!(ended(&enough, Rung::Garbage), (Ended::Nothing, 0));

        let too_little = gpu_only(100, Rung::Garbage, conf);
        let _live = take(&too_little, 40 * MIB, S0);
        cache(&too_little, 20 * MIB, S0);
        full_now(too_little.alloc(60 * MIB, S0));
        assert_eq!(ended(&too_little, Rung::Garbage), (Ended::TooLittle, 20));

        let fails = gpu_only(100, Rung::Garbage, conf);
        cache(&fails, 60 * MIB, S0);
        fails.driver().fail(FailWhen::Nth(Call::Free, 1), Fault::Failed(7));
        assert_driver_error(fails.alloc(50 * MIB, S1));
        assert_eq!((ended(&fails, Rung::Garbage).0, reserved_mib(&fails)), (Ended::Failed, 60));

        let off = gpu(100, &format!("{conf},skip_rungs:garbage+borrow+oversize+cached+pieces"));
        cache(&off, 60 * MIB, S0);
        full_now(off.alloc(50 * MIB, S1));
        assert_eq!(ended(&off, Rung::Garbage), (Ended::Off, 0));

        let illegal = gpu_only(100, Rung::Garbage, conf);
        cache(&illegal, 60 * MIB, S0);
        illegal.begin_allocate_to_pool(POOL, every_stream()).unwrap();
        let shortage = full_now(illegal.alloc(50 * MIB, S1));
        assert_eq!(ended(&illegal, Rung::Garbage), (Ended::Illegal, 0));
        assert!(
            shortage.recording && shortage.to_string().contains("a graph capture may be under")
        );
    }

    #[test]
    fn poll() {
        // The free is pending, so polling wins nothing.
        let gpu = gpu_only(40, Rung::Poll, "");
        let [pending, _live] = [(); 2].map(|()| take(&gpu, 20 * MIB, S0));
        free_pending(&gpu, pending, S1);
        full_now(gpu.alloc(20 * MIB, S0));
        assert_eq!(ended(&gpu, Rung::Poll), (Ended::Nothing, 0));
        gpu.driver().fail(FailWhen::Nth(Call::EventQuery, 2), Fault::Failed(7));
        assert_driver_error(gpu.alloc(20 * MIB, S0));
        assert_eq!(ended(&gpu, Rung::Poll), (Ended::Failed, 0));
        gpu.driver().finish_all();
        assert_eq!(take(&gpu, 20 * MIB, S0), pending, "every allocation completes finished frees");

        let off = gpu_with_all_off();
        full_now(off.alloc(60 * MIB, S0));
        assert_eq!(ended(&off, Rung::Poll), (Ended::Off, 0));

        let illegal = gpu_only(40, Rung::Poll, "");
        take(&illegal, 40 * MIB, S0);
        illegal.begin_allocate_to_pool(POOL, every_stream()).unwrap();
        full_now(illegal.alloc(20 * MIB, S0));
        assert_eq!(ended(&illegal, Rung::Poll), (Ended::Illegal, 0));
    }

    /// Returns an engine that skips every rung that can be skipped, with 80 of 100 MiB live.
    fn gpu_with_all_off() -> Gpu {
        let all = Rung::ALL.into_iter().filter(|rung| rung.can_be_skipped());
        let gpu =
            gpu(100, &format!("skip_rungs:{}", all.map(Rung::name).collect::<Vec<_>>().join("+")));
        take(&gpu, 80 * MIB, S0);
        gpu
    }

    #[test]
    fn a_refusal_with_only_poll_reports_the_pending_bytes() {
        let gpu = gpu_only(60, Rung::Poll, EXPANDABLE);
        let [pending, _live] = [(); 2].map(|()| take(&gpu, 20 * MIB, S0));
        let plain = gpu.driver().counts();
        free_pending(&gpu, pending, S1);
        assert_eq!(gpu.driver().counts().of(Call::Create), plain.of(Call::Create));
        let refused = full_now(gpu.alloc(40 * MIB, S0));
        assert_eq!((refused.pending, refused.reserved), (20 * MIB, 40 * MIB));
    }

    #[test]
    fn borrow() {
        for conf in POLICIES {
            let enough = gpu_only(100, Rung::Borrow, conf);
            enough.set_lasting_streams(LastingStreams::These(BTreeSet::from([S1])));
            let cached = cache(&enough, 60 * MIB, S0);
            let got = take(&enough, 60 * MIB, S1);
            assert_eq!((got, survived(&enough)), (cached, Some(Rung::Borrow)), "{conf}");
            assert_eq!(reserved_mib(&enough), 60, "no memory was released");
            // The block is free for S0 only when S1 is done with it.
            enough.driver().launch(S1);
            enough.free(got).unwrap();
            full_now(enough.alloc(60 * MIB, S0));
            enough.driver().finish(S1);
            assert_eq!(take(&enough, 60 * MIB, S0), cached);

            // A block is borrowed whole or not at all: the driver can use the rest better.
            let nothing = gpu_only(100, Rung::Borrow, conf);
            cache(&nothing, 60 * MIB, S0);
            full_now(nothing.alloc(50 * MIB, S1));
            assert_eq!(ended(&nothing, Rung::Borrow), (Ended::Nothing, 0));
            full_now(nothing.alloc(70 * MIB, S1));
            assert_eq!(ended(&nothing, Rung::Borrow), (Ended::Nothing, 0));
            check_use_of_other_streams(Rung::Borrow, 60, conf);
        }
    }

    #[test]
    fn pieces() {
        for conf in POLICIES {
            let enough = gpu_only(100, Rung::Pieces, conf);
            let cached = cache(&enough, 60 * MIB, S0);
            let got = take(&enough, 50 * MIB, S1);
            assert_eq!((got, survived(&enough)), (cached, Some(Rung::Pieces)), "{conf}");
            assert_eq!(
                take(&enough, 10 * MIB, S0),
                cached + 50 * MIB,
                "the rest still belongs to S0"
            );

            let too_little = gpu_only(100, Rung::Pieces, conf);
            cache(&too_little, 60 * MIB, S0);
            full_now(too_little.alloc(70 * MIB, S1));
            assert_eq!(ended(&too_little, Rung::Pieces), (Ended::Nothing, 0));
            check_use_of_other_streams(Rung::Pieces, 50, conf);
        }
    }

    /// Checks what the two rungs that use memory of other streams have in common.
    fn check_use_of_other_streams(rung: Rung, mib: u64, conf: &str) {
        // The stream of the free block is still busy.
        let busy = gpu_only(100, rung, conf);
        let cached = take(&busy, 60 * MIB, S0);
        busy.driver().launch(S0);
        busy.free(cached).unwrap();
        full_now(busy.alloc(mib * MIB, S1));
        assert_eq!(ended(&busy, rung), (Ended::Nothing, 0));

        let fails = gpu_only(100, rung, conf);
        cache(&fails, 60 * MIB, S0);
        fails.driver().fail(FailWhen::Nth(Call::EventQuery, 1), Fault::Failed(7));
        assert_driver_error(fails.alloc(mib * MIB, S1));
        assert_eq!(ended(&fails, rung), (Ended::Failed, 0));
        take(&fails, mib * MIB, S1);

        let off = gpu(100, &format!("skip_rungs:borrow+pieces+cached,{conf}"));
        cache(&off, 60 * MIB, S0);
        full_now(off.alloc(mib * MIB, S1));
        assert_eq!(ended(&off, rung), (Ended::Off, 0));

        // A private pool does not borrow. During a capture no stream may be queried.
        let illegal = gpu_only(100, rung, conf);
        cache(&illegal, 60 * MIB, S0);
        illegal.begin_allocate_to_pool(POOL, Box::new(|stream| stream == S2)).unwrap();
        full_now(illegal.alloc(mib * MIB, S1));
        full_now(illegal.alloc(mib * MIB, S2));
        assert_eq!(calls(&illegal, Call::EventQuery), 0);
        // `borrow` is legal, because a private pool with `use_on_oom` could serve the request.
        let how = if rung == Rung::Pieces { Ended::Illegal } else { Ended::Nothing };
        assert_eq!(ended(&illegal, rung), (how, 0));
    }

    #[test]
    fn small_requests_borrow_from_large_blocks_and_large_ones_from_small_blocks() {
        for conf in POLICIES {
            let gpu = gpu_only(20, Rung::Pieces, conf);
            let large = cache(&gpu, 20 * MIB, S0);
            let small = take(&gpu, 1000, S0);
            assert_eq!((small, survived(&gpu)), (large, Some(Rung::Pieces)));
            gpu.free(small).unwrap();
            assert_eq!(take(&gpu, 20 * MIB, S0), large);
        }
        let gpu = gpu_only(22, Rung::Pieces, "");
        take(&gpu, 20 * MIB, S0);
        let small = cache(&gpu, MIB, S0);
        assert_eq!(take(&gpu, MIB + 1, S0), small);
    }

    #[test]
    fn events() {
        for conf in POLICIES {
            // The rung waits for just enough frees, oldest first.
            let enough = gpu_only(60, Rung::Events, conf);
            let blocks = [(); 3].map(|()| take(&enough, 20 * MIB, S0));
            for (index, &block) in blocks.iter().enumerate() {
                free_pending(&enough, block, [S1, S2, StreamId(3)][index]);
            }
            let got = take(&enough, 20 * MIB, S0);
            assert_eq!((got, survived(&enough)), (blocks[0], Some(Rung::Events)), "{conf}");
            assert_eq!(ended(&enough, Rung::Events), (Ended::Served, 20));
            assert!(!enough.driver().is_finished(S2, 1), "the rung waited for S2");
            let waits =
                calls(&enough, Call::EventSynchronize) + calls(&enough, Call::StreamSynchronize);
            assert_eq!(waits, 0, "the rung waited for an event or the device");
            assert!(last(&enough).took > Duration::ZERO);

            // All pending frees together are not enough: the rung does not wait.
            let too_little = gpu_only(60, Rung::Events, conf);
            let pending = take(&too_little, 20 * MIB, S0);
            take(&too_little, 40 * MIB, S0);
            free_pending(&too_little, pending, S1);
            full_now(too_little.alloc(40 * MIB, S0));
            assert_eq!(ended(&too_little, Rung::Events), (Ended::Nothing, 0));
            assert_eq!(last(&too_little).took, Duration::ZERO, "refused at once");

            // The budget ends before the work is done.
            let slow = gpu_only(60, Rung::Events, &format!("wait_ms:1,wait_base_us:600,{conf}"));
            let [pending, _live] = [(); 2].map(|()| take(&slow, 20 * MIB, S0));
            free_pending(&slow, pending, S1);
            (0..10_000).for_each(|_| _ = slow.driver().launch(S1));
            slow.record_stream(_live, S1).unwrap();
            slow.free(_live).unwrap();
            full_now(slow.alloc(60 * MIB, S0));
            assert_eq!(ended(&slow, Rung::Events).0, Ended::TimeIsUp);

            let fails = gpu_only(40, Rung::Events, conf);
            let [pending, _live] = [(); 2].map(|()| take(&fails, 20 * MIB, S0));
            free_pending(&fails, pending, S1);
            // The request makes the first query, the rung the second.
            fails.driver().fail(FailWhen::Nth(Call::EventQuery, 2), Fault::Failed(7));
            assert_driver_error(fails.alloc(20 * MIB, S0));
            assert_eq!(ended(&fails, Rung::Events), (Ended::Failed, 0));
            assert_eq!(take(&fails, 20 * MIB, S0), pending);

            let off = gpu(40, &format!("skip_rungs:events+wait,{conf}"));
            let [pending, _live] = [(); 2].map(|()| take(&off, 20 * MIB, S0));
            free_pending(&off, pending, S1);
            full_now(off.alloc(20 * MIB, S0));
            assert_eq!(ended(&off, Rung::Events), (Ended::Off, 0));

            let illegal = gpu_only(40, Rung::Events, conf);
            let [pending, _live] = [(); 2].map(|()| take(&illegal, 20 * MIB, S0));
            free_pending(&illegal, pending, S1);
            illegal.begin_allocate_to_pool(POOL, every_stream()).unwrap();
            let queried = calls(&illegal, Call::EventQuery);
            full_now(illegal.alloc(20 * MIB, S0));
            assert_eq!(ended(&illegal, Rung::Events), (Ended::Illegal, 0));
            assert_eq!(calls(&illegal, Call::EventQuery), queried);
        }
    }

    #[test]
    fn oversize() {
        let conf = "max_split_size_mb:20";
        let enough = gpu_only(100, Rung::Oversize, conf);
        let [smaller, larger] = [40, 50].map(|mib| take(&enough, mib * MIB, S0));
        enough.free(smaller).unwrap();
        enough.free(larger).unwrap();
        take(&enough, 20 * MIB, S0);
        assert_eq!(
            ended(&enough, Rung::Oversize),
            (Ended::Served, 40),
            "only the smaller block is released"
        );

        let too_little = gpu_only(100, Rung::Oversize, conf);
        let cached = take(&too_little, 30 * MIB, S0);
        take(&too_little, 60 * MIB, S0);
        too_little.free(cached).unwrap();
        full_now(too_little.alloc(60 * MIB, S0));
        assert_eq!(ended(&too_little, Rung::Oversize), (Ended::TooLittle, 30));

        let nothing = gpu_only(100, Rung::Oversize, conf);
        take(&nothing, 90 * MIB, S0);
        full_now(nothing.alloc(60 * MIB, S0));
        assert_eq!(ended(&nothing, Rung::Oversize), (Ended::Nothing, 0));

        let fails = gpu_only(100, Rung::Oversize, conf);
        cache(&fails, 90 * MIB, S0);
        fails.driver().fail(FailWhen::Nth(Call::Free, 1), Fault::Failed(7));
        assert_driver_error(fails.alloc(30 * MIB, S0));
        assert_eq!((ended(&fails, Rung::Oversize).0, reserved_mib(&fails)), (Ended::Failed, 90));
        take(&fails, 30 * MIB, S0);

        let off = gpu(100, &format!("{conf},skip_rungs:oversize+cached"));
        cache(&off, 90 * MIB, S0);
        full_now(off.alloc(30 * MIB, S0));
        assert_eq!(ended(&off, Rung::Oversize), (Ended::Off, 0));

        let illegal = gpu_only(100, Rung::Oversize, conf);
        cache(&illegal, 90 * MIB, S0);
        illegal.begin_allocate_to_pool(POOL, every_stream()).unwrap();
        full_now(illegal.alloc(30 * MIB, S0));
        assert_eq!(
            (ended(&illegal, Rung::Oversize), reserved_mib(&illegal)),
            ((Ended::Illegal, 0), 90)
        );
    }

    #[test]
    fn cached() {
        for conf in POLICIES {
            let enough = gpu_only(140, Rung::Cached, conf);
            let [small, large] = [(S0, 40), (S1, 60)].map(|(s, mib)| take(&enough, mib * MIB, s));
            enough.free(small).unwrap();
            enough.free(large).unwrap();
            take(&enough, 80 * MIB, S2);
            assert_eq!(ended(&enough, Rung::Cached), (Ended::Served, 100), "{conf}");
            assert_eq!(survived(&enough), Some(Rung::Cached));

            let too_little = gpu_only(100, Rung::Cached, conf);
            let cached = take(&too_little, 40 * MIB, S0);
            take(&too_little, 40 * MIB, S1);
            too_little.free(cached).unwrap();
            full_now(too_little.alloc(80 * MIB, S2));
            assert_eq!(ended(&too_little, Rung::Cached), (Ended::Nothing, 0));
            assert_eq!(
                reserved_mib(&too_little),
                80,
                "no memory is released if that does not help"
            );

            let fails = gpu_only(100, Rung::Cached, conf);
            cache(&fails, 80 * MIB, S0);
            let call = if conf.is_empty() { Call::Free } else { Call::Unmap };
            fails.driver().fail(FailWhen::Nth(call, 1), Fault::Failed(7));
            assert_driver_error(fails.alloc(60 * MIB, S1));
            assert_eq!((ended(&fails, Rung::Cached).0, reserved_mib(&fails)), (Ended::Failed, 80));
            take(&fails, 60 * MIB, S1);

            let off = gpu(100, &format!("skip_rungs:cached+borrow+pieces,{conf}"));
            cache(&off, 80 * MIB, S0);
            full_now(off.alloc(60 * MIB, S1));
            assert_eq!(ended(&off, Rung::Cached), (Ended::Off, 0));

            let illegal = gpu_only(100, Rung::Cached, conf);
            cache(&illegal, 80 * MIB, S0);
            illegal.begin_allocate_to_pool(POOL, every_stream()).unwrap();
            let text = illegal.alloc(60 * MIB, S1).unwrap_err().to_string();
            assert_eq!(ended(&illegal, Rung::Cached), (Ended::Illegal, 0));
            assert!(text.contains("nothing could be given back or waited for"), "{text}");
            assert!(last(&illegal).shortage.remedies().contains(&Remedy::OutsideCapture));
        }
    }

    #[test]
    fn pages_of_a_busy_stream_are_released_after_its_work_is_done() {
        let gpu = gpu(100, EXPANDABLE);
        let cached = take(&gpu, 80 * MIB, S0);
        gpu.driver().launch(S0);
        gpu.free(cached).unwrap();
        take(&gpu, 100 * MIB, S1);
        assert_eq!(survived(&gpu), Some(Rung::Cached));
        assert!(gpu.driver().is_finished(S0, 1));
        assert_eq!(calls(&gpu, Call::StreamSynchronize), 0, "the rung polls and does not block");
    }

    /// The handle of a stream that may have been destroyed is never used. The engine waits for the
    /// device once instead.
    #[test]
    fn a_rung_waits_for_the_device_if_a_stream_may_be_destroyed() {
        for (conf, rung) in
            [(EXPANDABLE, Rung::Cached), ("", Rung::Pieces), (EXPANDABLE, Rung::Pieces)]
        {
            let gpu = gpu_only(100, rung, conf);
            let cached = take(&gpu, 80 * MIB, S1);
            gpu.driver().launch(S1);
            gpu.free(cached).unwrap();
            let records = calls(&gpu, Call::EventRecord);
            take(&gpu, 60 * MIB, S2);
            assert_eq!(survived(&gpu), Some(rung), "{conf}");
            assert_eq!(calls(&gpu, Call::StreamSynchronize), 1);
            assert_eq!(
                calls(&gpu, Call::EventRecord),
                records,
                "the handle of the stream was used"
            );
            assert!(gpu.driver().is_finished(S1, 1));
        }
    }

    #[test]
    fn callbacks() {
        for conf in POLICIES {
            let gpu = Arc::new(gpu_only(100, Rung::Callbacks, conf));
            let kept = Arc::new(AtomicU64::new(take(&gpu, 60 * MIB, S0)));
            let told = Arc::new(std::sync::Mutex::new(Vec::new()));
            let (engine, slot, seen) = (Arc::downgrade(&gpu), Arc::clone(&kept), Arc::clone(&told));
            let frees = gpu.on_shortage(1, move |plea| {
                seen.lock().unwrap().push(*plea);
                if let Some(engine) = engine.upgrade() {
                    // A shortage inside the callback does not call the callback again.
                    assert!(engine.alloc(200 * MIB, S2).is_err());
                    let _ = engine.free(slot.swap(0, Ordering::Relaxed));
                }
            });
            let later = Arc::new(AtomicU64::new(0));
            let count = Arc::clone(&later);
            gpu.on_shortage(0, move |_| _ = count.fetch_add(1, Ordering::Relaxed));

            take(&gpu, 60 * MIB, S0);
            assert_eq!(survived(&gpu), Some(Rung::Callbacks), "{conf}");
            assert!(ended(&gpu, Rung::Callbacks).1 >= 60);
            assert_eq!(later.load(Ordering::Relaxed), 0, "the first callback freed enough");
            let plea = told.lock().unwrap()[0];
            assert_eq!((plea.device, plea.bytes), (0, 60 * MIB));
            assert_eq!(plea.time_left, Duration::from_secs(3));

            // The callbacks have nothing to free: each is called once.
            full_now(gpu.alloc(60 * MIB, S1));
            assert_eq!(ended(&gpu, Rung::Callbacks), (Ended::Nothing, 0));
            assert_eq!((told.lock().unwrap().len(), later.load(Ordering::Relaxed)), (2, 1));

            // A callback that panics wins nothing, and the next one is called.
            assert!(gpu.remove_callback(frees) && !gpu.remove_callback(frees));
            gpu.on_shortage(5, |_| panic!("a callback's own mistake"));
            full_now(gpu.alloc(60 * MIB, S1));
            assert_eq!(ended(&gpu, Rung::Callbacks), (Ended::Failed, 0));
            assert_eq!(later.load(Ordering::Relaxed), 2);

            gpu.begin_allocate_to_pool(POOL, every_stream()).unwrap();
            full_now(gpu.alloc(60 * MIB, S1));
            assert_eq!(ended(&gpu, Rung::Callbacks), (Ended::Illegal, 0));
            assert_eq!(later.load(Ordering::Relaxed), 2);
        }
        // Memory that a callback frees is released to the driver if only that helps, unless the
        // rung `cached` is skipped.
        for (conf, serves) in [("", true), ("skip_rungs:cached", false)] {
            let gpu = Arc::new(gpu(100, conf));
            let kept = take(&gpu, 60 * MIB, S0);
            let engine = Arc::downgrade(&gpu);
            gpu.on_shortage(0, move |_| _ = engine.upgrade().map(|engine| engine.free(kept)));
            assert_eq!(gpu.alloc(80 * MIB, S0).is_ok(), serves, "{conf}");
            assert_eq!(calls(&gpu, Call::Free), u64::from(serves), "{conf}");
        }
        let off = gpu(100, "skip_rungs:callbacks");
        off.on_shortage(0, |_| panic!("switched off"));
        take(&off, 100 * MIB, S0);
        full_now(off.alloc(60 * MIB, S1));
        assert_eq!(ended(&off, Rung::Callbacks), (Ended::Off, 0));
    }

    #[test]
    fn callbacks_may_free_too_little() {
        let gpu = Arc::new(gpu_only(100, Rung::Callbacks, ""));
        let kept = take(&gpu, 20 * MIB, S0);
        take(&gpu, 80 * MIB, S0);
        let engine = Arc::downgrade(&gpu);
        gpu.on_shortage(0, move |_| _ = engine.upgrade().map(|engine| engine.free(kept)));
        full_now(gpu.alloc(60 * MIB, S1));
        assert_eq!(ended(&gpu, Rung::Callbacks), (Ended::TooLittle, 20));
    }

    #[test]
    fn wait_for_another_process() {
        for conf in POLICIES {
            // The other process keeps its memory. `races.rs` tests that it frees some.
            let gpu = gpu_only(100, Rung::Wait, conf);
            assert!(gpu.driver().set_tenant(1, 90 * MIB));
            full_now(gpu.alloc(40 * MIB, S0));
            assert_eq!(ended(&gpu, Rung::Wait).0, Ended::TimeIsUp, "{conf}");
            let receipt = last(&gpu);
            assert_eq!(
                receipt.took,
                Duration::from_secs(3),
                "the request waits for exactly its budget"
            );
            assert!(receipt.shortage.remedies().contains(&Remedy::Others(90 * MIB)));
            let stats = gpu.stats();
            assert_eq!((stats.shortages, stats.shortages_refused), (1, 1));
            assert!((stats.milliseconds_lost() - 3000.0).abs() < 1e-6);

            // The memory of the other process is too little, or the limit forbids its use: the
            // request is refused at once.
            let hopeless = gpu_only(100, Rung::Wait, conf);
            take(&hopeless, 80 * MIB, S0);
            assert!(hopeless.driver().set_tenant(1, 20 * MIB));
            full_now(hopeless.alloc(40 * MIB, S0));
            assert_eq!(ended(&hopeless, Rung::Wait), (Ended::Nothing, 0));
            assert_eq!(last(&hopeless).took, Duration::ZERO);
            let limited = gpu_only(100, Rung::Wait, conf);
            limited.set_memory_limit(Some(60 * MIB));
            take(&limited, 40 * MIB, S0);
            assert!(limited.driver().set_tenant(1, 60 * MIB));
            full_now(limited.alloc(40 * MIB, S0));
            assert_eq!(last(&limited).took, Duration::ZERO);

            // There is nothing to wait for; then, there is no time to wait.
            let alone = gpu_only(100, Rung::Wait, conf);
            take(&alone, 80 * MIB, S0);
            full_now(alone.alloc(40 * MIB, S0));
            assert_eq!(last(&alone).took, Duration::ZERO);
            let before = set_budget(Some(Duration::ZERO));
            full_now(gpu.alloc(40 * MIB, S0));
            set_budget(before);
            assert_eq!(
                (ended(&gpu, Rung::Wait).0, last(&gpu).took),
                (Ended::TimeIsUp, Duration::ZERO)
            );

            let off = gpu_with_all_off();
            assert!(off.driver().set_tenant(1, 20 * MIB));
            full_now(off.alloc(20 * MIB, S0));
            assert_eq!(ended(&off, Rung::Wait), (Ended::Off, 0));

            gpu.begin_allocate_to_pool(POOL, every_stream()).unwrap();
            full_now(gpu.alloc(40 * MIB, S0));
            assert_eq!(
                (ended(&gpu, Rung::Wait), last(&gpu).took),
                ((Ended::Illegal, 0), Duration::ZERO)
            );
        }
    }

    #[test]
    fn all_requests_together_wait_at_most_wait_total_ms() {
        let gpu = gpu_only(100, Rung::Wait, "wait_total_ms:4000");
        assert!(gpu.driver().set_tenant(1, 90 * MIB));
        for seconds in [3, 1, 0] {
            full_now(gpu.alloc(40 * MIB, S0));
            assert_eq!(last(&gpu).took, Duration::from_secs(seconds));
        }
        assert_eq!(gpu.waited().total(), Duration::from_secs(4));
    }

    #[test]
    fn spill() {
        for conf in POLICIES {
            let conf = format!("spill_limit_mb:100,spill_over_mb:10,{conf}");
            let gpu = gpu_only(100, Rung::Spill, &conf);
            take(&gpu, 100 * MIB, S0);
            let spilled = take(&gpu, 41 * MIB, S0);
            assert_eq!(survived(&gpu), Some(Rung::Spill));
            let stats = gpu.stats();
            assert_eq!(
                (stats.spilled_bytes.current, stats.spilled_allocation.current),
                (42 * MIB, 1)
            );
            assert_eq!((stats.allocated_bytes.all.current, reserved_mib(&gpu)), (100 * MIB, 100));
            assert_eq!(gpu.driver().held_host(), 42 * MIB);
            let segments = gpu.snapshot().segments;
            let segment = segments.iter().find(|s| s.address == spilled).unwrap();
            assert!(segment.spilled && segments.iter().filter(|s| s.spilled).count() == 1);
            assert_eq!(gpu.size_of(spilled), Some((42 * MIB, 41 * MIB)));

            // A request over the limit or below the minimum size is refused. The message counts
            // host memory separately.
            take(&gpu, 21 * MIB, S0);
            let text = full_now(gpu.alloc(60 * MIB, S0)).to_string();
            assert!(text.contains("64.00 MiB more are in host memory"), "{text}");
            full_now(gpu.alloc(9 * MIB, S0));
            assert_eq!(ended(&gpu, Rung::Spill), (Ended::Nothing, 0));

            // A freed block is released once its stream is done, and is never reused.
            gpu.driver().launch(S0);
            gpu.free(spilled).unwrap();
            assert_eq!(gpu.stats().spilled_bytes.current, 64 * MIB);
            gpu.driver().finish(S0);
            gpu.process_events().unwrap();
            assert_eq!(gpu.stats().spilled_bytes.current, 22 * MIB);
            assert_eq!(gpu.stats().reserved_bytes.all.current, 100 * MIB);
            let again = take(&gpu, 41 * MIB, S0);
            assert_eq!(gpu.driver().held_host(), 64 * MIB);
            gpu.free(again).unwrap();
            gpu.empty_cache().unwrap();
            assert_eq!(gpu.driver().held_host(), 22 * MIB);

            gpu.begin_allocate_to_pool(POOL, every_stream()).unwrap();
            full_now(gpu.alloc(41 * MIB, S0));
            assert_eq!(ended(&gpu, Rung::Spill), (Ended::Illegal, 0));
        }
        let off = gpu(100, "spill_limit_mb:100,skip_rungs:spill");
        take(&off, 80 * MIB, S0);
        full_now(off.alloc(41 * MIB, S0));
        assert_eq!(ended(&off, Rung::Spill), (Ended::Off, 0));
        let without = gpu(100, "");
        take(&without, 80 * MIB, S0);
        full_now(without.alloc(41 * MIB, S0));
        assert_eq!(without.driver().held_host(), 0, "spilling is off by default");
    }

    #[test]
    fn spill_loses_no_memory_if_any_one_call_fails() {
        for fault in [Fault::OutOfMemory, Fault::Failed(801)] {
            for nth in 1..40 {
                let gpu = gpu(100, "spill_limit_mb:100");
                take(&gpu, 80 * MIB, S0);
                gpu.driver().fail(FailWhen::NthOfAny(nth), fault);
                if let Ok(address) = gpu.alloc(41 * MIB, S0) {
                    gpu.record_stream(address, S1).unwrap();
                    let _ = gpu.free(address);
                }
                gpu.check_invariants().unwrap();
                gpu.driver().clear_failures();
                gpu.process_events().unwrap();
                gpu.empty_cache().unwrap();
                gpu.check_invariants().unwrap();
                assert_eq!(gpu.driver().held_host(), 0, "call {nth}, {fault:?}");
                assert_eq!(gpu.stats().spilled_allocation.current, 0);
            }
        }
    }

    // ---- the rungs in order ----

    #[test]
    fn rungs_are_tried_in_order_and_the_receipt_has_all_of_them() {
        let gpu = gpu(100, "max_split_size_mb:90,spill_limit_mb:1000");
        gpu.on_shortage(0, |_| {});
        take(&gpu, 100 * MIB, S0);
        let address = take(&gpu, 50 * MIB, S0);
        let receipt = last(&gpu);
        let rungs: Vec<Rung> = receipt.shortage.tried.iter().map(|tried| tried.rung).collect();
        let expected: Vec<Rung> = Ladder::Graceful.rungs().skip(1).collect();
        assert_eq!(rungs, expected, "all rungs but `garbage`, which is off by default");
        assert_eq!(receipt.outcome, Outcome::Survived(Rung::Spill));
        assert_eq!((receipt.number, receipt.shortage.requested), (1, 50 * MIB));
        assert_eq!(receipt.groups[0].bytes, 100 * MIB);
        assert_eq!(receipt.holders.len(), 1);
        assert_eq!((gpu.stats().shortages, gpu.stats().shortages_survived), (1, 1));
        assert_eq!(gpu.stats().num_ooms, 0);
        gpu.free(address).unwrap();
    }

    /// In each case, all rungs before the named one win nothing.
    #[test]
    fn the_first_rung_that_can_serve_the_request_serves_it() {
        type Case = (Rung, StreamId, fn(&Gpu));
        let cases: [Case; 5] = [
            (Rung::Borrow, S1, |gpu| {
                cache(gpu, 60 * MIB, S0);
            }),
            (Rung::Events, S0, |gpu| {
                let pending = take(gpu, 90 * MIB, S0);
                free_pending(gpu, pending, S1);
            }),
            (Rung::Cached, S0, |gpu| {
                let blocks = [(); 2].map(|()| take(gpu, 40 * MIB, S1));
                blocks.iter().for_each(|&block| gpu.free(block).unwrap());
            }),
            (Rung::Pieces, S0, |gpu| {
                // Most of the segment is free, but it cannot be released.
                cache(gpu, 95 * MIB, S1);
                take(gpu, 20 * MIB, S1);
            }),
            (Rung::Spill, S0, |gpu| {
                take(gpu, 90 * MIB, S1);
            }),
        ];
        for (rung, stream, prepare) in cases {
            let gpu = gpu(100, "spill_limit_mb:1000");
            prepare(&gpu);
            take(&gpu, 60 * MIB, stream);
            assert_eq!(survived(&gpu), Some(rung));
        }
    }

    #[test]
    fn a_miss_that_the_driver_serves_is_not_a_shortage() {
        for ladder in [Ladder::Torch, Ladder::Graceful] {
            let gpu = gpu_with(100, "", ladder);
            take(&gpu, 50 * MIB, S0);
            assert_eq!(
                (gpu.stats().shortages, gpu.receipts().len(), gpu.stats().misses),
                (0, 0, 1)
            );
        }
    }

    #[test]
    fn receipts_are_kept_in_a_ring_and_passed_to_listeners() {
        let gpu = gpu(100, "wait_ms:0");
        let told = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&told);
        gpu.on_receipt(move |receipt| {
            count.fetch_max(receipt.number, Ordering::Relaxed);
            panic!("a listener's own mistake");
        });
        take(&gpu, 100 * MIB, S0);
        gpu.keep_receipts(3);
        for _ in 0..5 {
            full_now(gpu.alloc(10 * MIB, S0));
        }
        let numbers: Vec<u64> = gpu.receipts().iter().map(|receipt| receipt.number).collect();
        assert_eq!((numbers, told.load(Ordering::Relaxed)), (vec![3, 4, 5], 5));
        assert!(gpu.receipt(4).is_some() && gpu.receipt(1).is_none());
        assert_eq!(gpu.stats().shortages_refused, 5);
    }

    #[test]
    fn remedies_start_with_the_smallest_change() {
        // Pages between live blocks can be released; segments with a live block cannot.
        let fragmented = |conf| {
            let gpu = gpu(100, conf);
            let large = [50, 50].map(|mib| take(&gpu, mib * MIB, S0));
            for block in large {
                gpu.free(block).unwrap();
                take(&gpu, 10 * MIB, S0);
            }
            gpu.alloc(60 * MIB, S0)
        };
        let remedies = full_now(fragmented("")).remedies();
        assert_eq!(remedies, [Remedy::Policy(Policy::Expandable), Remedy::More(10 * MIB)]);
        fragmented(EXPANDABLE).unwrap();
        // Here every page has a live block, too.
        let gpu = gpu(100, "wait_ms:0");
        let blocks: Vec<u64> = (0..10).map(|_| take(&gpu, 9 * MIB, S0)).collect();
        for block in blocks.iter().step_by(2) {
            gpu.free(*block).unwrap();
        }
        let shortage = full_now(gpu.alloc(40 * MIB, S0));
        let texts: Vec<String> = shortage.remedies().iter().map(ToString::to_string).collect();
        assert_eq!(texts, ["needs 40.00 MiB more"]);
        let shortage = full_now(gpu.alloc(80 * MIB, S0));
        let texts: Vec<String> = shortage.remedies().iter().map(ToString::to_string).collect();
        assert_eq!(texts, ["needs 80.00 MiB more"], "the cached memory is between live blocks");
        let shortage = never_fits(gpu.alloc(130 * MIB, S0));
        assert_eq!(shortage.remedies(), [Remedy::More(30 * MIB)]);
    }

    /// In this program every rung has something to do. It runs once for each of its driver calls,
    /// with that call failing. Afterwards no memory is lost, and a request of the whole device is
    /// served.
    #[test]
    fn nothing_is_lost_if_any_one_call_fails() {
        let conf = "max_split_size_mb:30,spill_limit_mb:64,spill_over_mb:1";
        for (policy, fault) in POLICIES.into_iter().flat_map(|policy| {
            [Fault::OutOfMemory, Fault::Failed(719)].map(|fault| (policy, fault))
        }) {
            let mut calls_made = u64::MAX;
            let mut nth = 0;
            while nth < calls_made {
                nth += 1;
                let gpu = Arc::new(gpu(100, &format!("{conf},{policy}")));
                gpu.driver().fail(FailWhen::NthOfAny(nth), fault);
                let spare = Arc::new(AtomicU64::new(0));
                let (engine, slot) = (Arc::downgrade(&gpu), Arc::clone(&spare));
                gpu.on_shortage(0, move |_| {
                    let address = slot.swap(0, Ordering::Relaxed);
                    _ = engine.upgrade().map(|engine| engine.free(address));
                });
                let mut live = Vec::new();
                let mut keep = |result: Result<u64, AllocError>| live.extend(result.ok());
                for (size, stream) in [(40, S0), (31, S1), (9, S0), (9, S0), (5, S2)] {
                    keep(gpu.alloc(size * MIB, stream));
                }
                for address in live.drain(..) {
                    let _ = gpu.record_stream(address, S2);
                    gpu.driver().launch(S2);
                    let _ = gpu.free(address);
                }
                for (size, stream) in [(60, S0), (35, S1), (50, S2), (20, S0), (30, S1)] {
                    match gpu.alloc(size * MIB, stream) {
                        Ok(address) if spare.load(Ordering::Relaxed) == 0 => {
                            spare.store(address, Ordering::Relaxed);
                        }
                        other => live.extend(other.ok()),
                    }
                    gpu.check_invariants().unwrap();
                }
                calls_made = gpu.driver().counts().total();
                gpu.driver().clear_failures();
                live.push(spare.swap(0, Ordering::Relaxed));
                for address in live {
                    let _ = gpu.free(address);
                }
                gpu.driver().finish_all();
                gpu.empty_cache().unwrap();
                gpu.check_invariants().unwrap();
                assert_eq!(
                    (gpu.driver().held(), gpu.driver().held_host()),
                    (0, 0),
                    "{policy}, call {nth}, {fault:?}"
                );
                take(&gpu, 100 * MIB, S0);
            }
            assert!(calls_made > 50, "{calls_made}");
        }
    }

    // ---- injection ----

    #[test]
    fn injected_failures_hit_the_named_request_and_rung() {
        for conf in POLICIES {
            let gpu = gpu(100, conf);
            let inject = |rules: &str| gpu.inject(Some(rules.parse::<Injection>().unwrap()));
            inject("nth=2");
            let first = take(&gpu, MIB, S0);
            let refused = full_now(gpu.alloc(MIB, S0));
            assert!(refused.injected && refused.to_string().contains("injected"), "{refused}");
            gpu.free(first).unwrap();
            assert_eq!(take(&gpu, MIB, S0), first);
            gpu.free(first).unwrap();

            for rung in [Rung::Poll, Rung::Cached, Rung::Callbacks, Rung::Wait, Rung::Spill] {
                inject(&format!("nth=1,at={rung}"));
                // `spill` is off, so the failure has no effect there.
                let result = gpu.alloc(MIB, S0);
                if rung == Rung::Spill {
                    assert_eq!(result.unwrap(), first);
                } else {
                    assert_eq!((result.unwrap(), survived(&gpu)), (first, Some(rung)));
                    assert_eq!(ended(&gpu, Rung::Grow).0, Ended::Injected);
                }
                gpu.free(first).unwrap();
            }
            gpu.inject(None);
            let before = gpu.stats().shortages;
            let again = take(&gpu, MIB, S0);
            assert_eq!((again, gpu.stats().shortages), (first, before));
            gpu.check_invariants().unwrap();
        }
    }

    #[test]
    fn a_request_after_prefetch_makes_no_driver_call() {
        for conf in POLICIES {
            let gpu = gpu(100, conf);
            gpu.prefetch(60 * MIB, S0).unwrap();
            let calls = gpu.driver().counts().total();
            take(&gpu, 60 * MIB, S0);
            assert_eq!(
                gpu.driver().counts().total(),
                calls,
                "{conf}: the request made a driver call"
            );
            gpu.prefetch(0, S0).unwrap();
            assert!(matches!(gpu.prefetch(60 * MIB, S0), Err(AllocError::FullNow(_))));
        }
    }
}
