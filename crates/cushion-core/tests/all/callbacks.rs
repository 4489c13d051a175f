//! Callbacks: their names, time budgets and answers in receipts; and the options that a thread sets
//! for its own requests.

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Duration;

    use cushion_core::size::MIB;
    use cushion_core::{
        Callback, Ended, Outcome, Reply, Rung, RungSet, Tag, VirtualClock, set_budget,
        set_skipped_rungs,
    };

    use crate::common::{
        Gpu, S0, S1, cache, ended, full_now, gpu, last, real_gpu, take, until_waiting, virtual_gpu,
    };

    /// Returns an engine on a full device, and its clock, which callbacks can advance.
    fn full(conf: &str) -> (Gpu, Arc<VirtualClock>) {
        let (gpu, clock) = virtual_gpu(100, conf);
        take(&gpu, 100 * MIB, S0);
        (gpu, clock)
    }

    #[test]
    fn the_receipt_has_the_answer_of_each_callback() {
        let (gpu, _) = full("");
        let add = |name: &str, priority, reply: Reply| {
            gpu.add_callback(Arc::new(Callback::new(name, priority, move |_| reply.clone())));
        };
        add("quiet", 3, Reply::Nothing);
        add("talks", 2, Reply::Said("nothing to free".to_owned()));
        add("fails", 1, Reply::Failed("no disk".to_owned()));
        gpu.on_shortage(0, |_| panic!("a callback's own mistake"));
        full_now(gpu.alloc(MIB, S1));
        let receipt = last(&gpu);
        let answers: Vec<_> = receipt.answers.iter().map(ToString::to_string).collect();
        assert_eq!(answers[..3], ["quiet", "talks said: nothing to free", "fails failed: no disk"]);
        assert!(answers[3].ends_with("failed: a callback's own mistake"), "{}", answers[3]);
        assert!(answers[3].contains("callbacks::tests"), "named after its source: {}", answers[3]);
        assert_eq!(ended(&gpu, Rung::Callbacks), (Ended::Failed, 0));
    }

    #[test]
    fn the_receipt_has_the_bytes_that_each_callback_freed() {
        let gpu = Arc::new(gpu(100, ""));
        let mine: Vec<u64> = [30, 50].map(|mib| take(&gpu, mib * MIB, S0)).to_vec();
        for (index, address) in mine.into_iter().enumerate() {
            let engine = Arc::downgrade(&gpu);
            let callback = Callback::new(format!("{index}"), 0, move |_| {
                engine.upgrade().map(|engine| engine.free(address));
                Reply::Nothing
            });
            gpu.add_callback(Arc::new(callback));
        }
        take(&gpu, 90 * MIB, S0);
        let receipt = last(&gpu);
        assert_eq!(receipt.outcome, Outcome::Survived(Rung::Callbacks));
        let won: Vec<u64> = receipt.answers.iter().map(|answer| answer.won / MIB).collect();
        assert_eq!(won, [30, 50]);
    }

    #[test]
    fn a_callback_that_exceeds_its_budget_is_switched_off() {
        // The default budget is the request's time to wait, but at least `callback_ms`. A callback
        // can have a budget of its own.
        let cases = [
            ("", None, 3000),
            ("wait_ms:0", None, 1000),
            ("wait_ms:0,callback_ms:50", None, 50),
            ("", Some(200), 200),
            ("wait_ms:0", Some(5000), 5000),
        ];
        for (conf, budget, allowed) in cases {
            for (took, switched_off) in [(allowed, false), (allowed + 1, true)] {
                let (gpu, clock) = full(conf);
                let calls = Arc::new(AtomicU64::new(0));
                let count = Arc::clone(&calls);
                let callback = Callback::new("slow", 0, move |plea| {
                    count.fetch_add(1, Ordering::Relaxed);
                    assert_eq!(plea.time_left, Duration::from_millis(allowed));
                    clock.advance(Duration::from_millis(took));
                    Reply::Nothing
                });
                let callback = Arc::new(match budget {
                    Some(ms) => callback.with_budget(Duration::from_millis(ms)),
                    None => callback,
                });
                gpu.add_callback(Arc::clone(&callback));
                full_now(gpu.alloc(MIB, S1));
                let answer = last(&gpu).answers[0].clone();
                assert_eq!(answer.took, Duration::from_millis(took), "{conf}");
                assert_eq!(answer.switched_off, switched_off, "{conf} {took}");
                assert_eq!(callback.is_off(), switched_off);
                full_now(gpu.alloc(MIB, S1));
                let expected = if switched_off { 1 } else { 2 };
                assert_eq!(calls.load(Ordering::Relaxed), expected, "{conf} {took}");
                assert_eq!(last(&gpu).answers.len(), if switched_off { 0 } else { 1 });
            }
        }
    }

    #[test]
    fn a_callback_that_could_not_be_called_is_not_switched_off() {
        let (gpu, clock) = full("wait_ms:0");
        let callback = Arc::new(Callback::new("locked out", 0, move |_| {
            clock.advance(Duration::from_secs(5));
            Reply::NotCalled("its lock is taken".to_owned())
        }));
        gpu.add_callback(Arc::clone(&callback));
        full_now(gpu.alloc(MIB, S1));
        assert!(!callback.is_off() && !last(&gpu).answers[0].switched_off);
        assert_eq!(last(&gpu).answers[0].failed.as_deref(), Some("its lock is taken"));
    }

    #[test]
    fn a_callback_that_is_switched_off_is_dropped() {
        let (gpu, _) = full("wait_ms:0");
        let held = Arc::new(());
        let theirs = Arc::clone(&held);
        let callback = Arc::new(Callback::new("", 0, move |_| {
            let _ = &theirs;
            Reply::Nothing
        }));
        gpu.add_callback(Arc::clone(&callback));
        callback.switch_off();
        drop(callback);
        full_now(gpu.alloc(MIB, S1));
        assert_eq!(Arc::strong_count(&held), 1);
    }

    #[test]
    fn a_callback_of_two_engines_is_not_reentered() {
        let (one, other) = (Arc::new(gpu(100, "")), Arc::new(gpu(100, "")));
        for gpu in [&one, &other] {
            take(gpu, 100 * MIB, S0);
        }
        let calls = Arc::new(AtomicU64::new(0));
        let (count, inner) = (Arc::clone(&calls), Arc::downgrade(&other));
        let callback = Arc::new(Callback::new("both", 0, move |_| {
            count.fetch_add(1, Ordering::Relaxed);
            if let Some(other) = inner.upgrade() {
                // A shortage of the other device on another thread does not call this callback.
                let asks = std::thread::spawn(move || full_now(other.alloc(MIB, S1)));
                asks.join().unwrap();
            }
            Reply::Nothing
        }));
        one.add_callback(Arc::clone(&callback));
        other.add_callback(callback);
        full_now(one.alloc(MIB, S1));
        assert_eq!(calls.load(Ordering::Relaxed), 1);
        assert_eq!(last(&other).answers, []);
    }

    #[test]
    fn the_answer_of_a_callback_is_truncated() {
        let (gpu, _) = full("");
        let said = "ä".repeat(100_000);
        let callback = Callback::new("endless", 0, move |_| Reply::Said(said.clone()));
        gpu.add_callback(Arc::new(callback));
        full_now(gpu.alloc(MIB, S1));
        let text = last(&gpu).answers[0].said.clone().unwrap();
        assert_eq!(text.chars().count(), 1001);
    }

    #[test]
    fn a_request_served_after_a_wait_survives_by_the_wait_rung() {
        // Another process frees its memory while the request waits.
        let gpu = real_gpu(100, "wait_ms:600000");
        assert!(gpu.driver().set_tenant(1, 90 * MIB));
        std::thread::scope(|scope| {
            let asks = scope.spawn(|| take(&gpu, 40 * MIB, S0));
            until_waiting(&gpu, 1);
            assert!(gpu.driver().set_tenant(1, 0));
            asks.join().unwrap();
        });
        let receipt = last(&gpu);
        assert_eq!(receipt.outcome, Outcome::Survived(Rung::Wait));
        assert_eq!(receipt.shortage.budget, Duration::from_secs(600));
    }

    #[test]
    fn a_future_created_in_a_callback_never_waits() {
        let gpu = Arc::new(real_gpu(100, "wait_ms:600000"));
        let kept = take(&gpu, 60 * MIB, S0);
        let engine = Arc::downgrade(&gpu);
        gpu.on_shortage(0, move |_| {
            let Some(engine) = engine.upgrade() else { return };
            let mut future = std::pin::pin!(engine.alloc_async(90 * MIB, S0));
            let waker = std::task::Waker::noop();
            let polled = future.as_mut().poll(&mut std::task::Context::from_waker(waker));
            assert!(matches!(polled, std::task::Poll::Ready(Err(_))));
            engine.free(kept).unwrap();
        });
        take(&gpu, 80 * MIB, S0);
        assert_eq!(last(&gpu).outcome, Outcome::Survived(Rung::Callbacks));
    }

    #[test]
    fn receipts_have_the_stacks_of_tags() {
        let gpu = gpu(100, "");
        gpu.explain_tags(|tags| {
            tags.iter().map(|tag| vec![format!("line {}", tag.0), "main".to_owned()]).collect()
        });
        gpu.alloc_for(60 * MIB, S0, Tag(7)).unwrap();
        full_now(gpu.alloc_for(60 * MIB, S0, Tag(8)));
        let receipt = last(&gpu);
        assert_eq!(receipt.stack, ["line 8", "main"]);
        assert_eq!(receipt.groups[0].stack, ["line 7", "main"]);
        // An explainer that panics, or returns too few stacks, fails no request.
        gpu.explain_tags(|_| panic!("no stacks"));
        full_now(gpu.alloc_for(60 * MIB, S0, Tag(8)));
        gpu.explain_tags(|_| Vec::new());
        full_now(gpu.alloc_for(60 * MIB, S0, Tag(8)));
        assert_eq!(last(&gpu).stack, [""; 0]);
    }

    #[test]
    fn a_thread_can_skip_rungs() {
        let gpu = gpu(100, "skip_rungs:borrow");
        cache(&gpu, 60 * MIB, S0);
        assert_eq!(set_skipped_rungs([Rung::Cached].into_iter().collect()), RungSet::NONE);
        full_now(gpu.alloc(80 * MIB, S0));
        assert_eq!(ended(&gpu, Rung::Cached), (Ended::Off, 0));
        assert_eq!(ended(&gpu, Rung::Borrow), (Ended::Off, 0));
        // Another thread does not skip them.
        std::thread::scope(|scope| scope.spawn(|| take(&gpu, 80 * MIB, S0)).join().unwrap());
        let before = set_skipped_rungs(RungSet::NONE);
        assert_eq!(before.iter().collect::<Vec<_>>(), [Rung::Cached]);
    }

    #[test]
    fn a_follower_thread_has_the_budget_of_its_leader() {
        cushion_core::set_followers(|| std::thread::current().name() == Some("gradients"));
        let gpu = real_gpu(100, "wait_ms:600000");
        let kept = take(&gpu, 50 * MIB, S0);
        let gate = std::sync::Barrier::new(2);
        let ask = || {
            std::thread::scope(|scope| {
                // Another thread holds memory, so that a request can wait for it.
                let other = scope.spawn(|| {
                    let address = take(&gpu, 40 * MIB, S0);
                    gate.wait();
                    gpu.free(address).unwrap();
                });
                while gpu.stats().allocated_bytes.all.current < 90 * MIB {
                    std::thread::yield_now();
                }
                // The follower follows the thread that allocated last: this one.
                cache(&gpu, MIB, S0);
                let gradients = std::thread::Builder::new().name("gradients".to_owned());
                let follower = gradients.spawn_scoped(scope, || gpu.alloc(30 * MIB, S0)).unwrap();
                if cushion_core::budget() != Some(Duration::ZERO) {
                    until_waiting(&gpu, 1);
                }
                let asked = if cushion_core::budget() == Some(Duration::ZERO) {
                    let asked = follower.join().unwrap();
                    gate.wait();
                    asked
                } else {
                    gate.wait();
                    follower.join().unwrap()
                };
                other.join().unwrap();
                asked
            })
        };
        let served = ask().unwrap();
        gpu.free(served).unwrap();
        set_budget(Some(Duration::ZERO));
        full_now(ask());
        assert_eq!(ended(&gpu, Rung::Wait).0, Ended::TimeIsUp);
        set_budget(None);
        gpu.free(kept).unwrap();
    }
}
