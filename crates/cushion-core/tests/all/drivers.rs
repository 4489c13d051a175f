//! The two drivers that need no GPU. Both keep the driver's contract. The simulated device follows
//! its script. The checked driver panics at every breach of the contract that it checks.

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Arc;

    use cushion_core::driver::{
        Call, DriverResult, EventId, FailWhen, Fault, NodeId, PageHandle, Properties, price,
    };
    use cushion_core::size::{GIB, KIB, MIB};
    use cushion_core::testing::contract;
    use cushion_core::{CheckedDriver, Driver, DriverError, SimConfig, SimDriver, StreamId};

    const S1: StreamId = StreamId(1);
    const S2: StreamId = StreamId(2);
    /// The page size of the tests.
    const PAGE: u64 = 2 * MIB;

    fn sim() -> SimDriver {
        SimDriver::new(SimConfig::with_capacity(GIB))
    }

    fn failed<T>(call: Call, code: i32) -> DriverResult<T> {
        Err(DriverError { call, fault: Fault::Failed(code) })
    }

    fn full<T>(call: Call) -> DriverResult<T> {
        Err(DriverError { call, fault: Fault::OutOfMemory })
    }

    // ---- the contract ----

    #[test]
    fn every_driver_keeps_the_contract() {
        contract::check_driver(&sim());
        contract::check_driver(&Arc::new(sim()));
        contract::check_driver(&CheckedDriver::new(sim()));
        contract::check_driver(&SimDriver::new(SimConfig {
            device: 3,
            total: contract::NEEDED,
            capacity: contract::NEEDED,
            granularity: 64 * KIB,
            has_pages: true,
            host: contract::NEEDED,
        }));
        assert!(contract::check_host_pages(&sim()), "the simulated device supports host pages");
        let without = sim();
        without.fail(FailWhen::Every(Call::CreateHost), Fault::Failed(801));
        contract::check_driver(&without);
        assert!(
            !contract::check_host_pages(&without),
            "a device without host pages is not checked"
        );
    }

    #[test]
    fn the_simulated_device_refuses_what_every_driver_refuses() {
        contract::check_refusals(&sim());
        contract::check_refusals(&Arc::new(sim()));
        // A real driver accepts this call.
        let driver = sim();
        let range = driver.reserve(4 * MIB).unwrap();
        assert!(driver.unmap(range, 2 * MIB).is_err(), "unmapped a range that is not mapped");
    }

    /// The contract suite must detect a broken driver.
    #[test]
    fn a_driver_whose_calls_fail_does_not_pass_the_contract() {
        for call in Call::ALL.into_iter().filter(|&call| call != Call::Dependencies) {
            let driver = sim();
            driver.fail(FailWhen::Nth(call, 1), Fault::Failed(999));
            let checked = catch_unwind(AssertUnwindSafe(|| {
                contract::check_driver(&driver);
                contract::check_refusals(&driver);
            }));
            assert!(checked.is_err(), "the suite did not notice that {call} fails");
        }
    }

    // ---- the simulated device ----

    #[test]
    fn capacity_is_shared_with_tenants_and_never_exceeded() {
        let driver = SimDriver::new(SimConfig {
            device: 5,
            granularity: MIB,
            ..SimConfig::with_capacity(100 * MIB)
        });
        let properties = Properties {
            device: 5,
            total: 100 * MIB,
            granularity: MIB,
            has_pages: true,
            process_overhead: 0,
        };
        assert_eq!(driver.properties(), properties);
        let free = || driver.memory_info().unwrap().free / MIB;

        let plain = driver.alloc(30 * MIB).unwrap();
        let page = driver.create(20 * MIB).unwrap();
        assert_eq!((driver.held() / MIB, free()), (50, 50));
        assert!(driver.set_tenant(1, 30 * MIB) && driver.set_tenant(2, 15 * MIB));
        assert_eq!((driver.held() / MIB, free()), (50, 5));
        assert!(!driver.set_tenant(1, 36 * MIB), "a tenant got more memory than is free");
        assert_eq!(free(), 5);
        assert_eq!(driver.alloc(5 * MIB + 1), full(Call::Alloc));
        assert_eq!(driver.create(6 * MIB), full(Call::Create));
        assert!(driver.set_tenant(1, 35 * MIB) && driver.set_tenant(2, 0));
        assert_eq!(free(), 15);
        driver.free(plain).unwrap();
        driver.release(page).unwrap();
        assert_eq!((driver.held(), free()), (0, 65));
    }

    #[test]
    fn host_memory_is_counted_separately_and_is_limited() {
        let driver =
            SimDriver::new(SimConfig { host: 10 * MIB, ..SimConfig::with_capacity(2 * PAGE) });
        let held = || (driver.held() / MIB, driver.held_host() / MIB);
        let free = || driver.memory_info().unwrap().free / MIB;
        let (near, far) = (driver.create(2 * PAGE).unwrap(), driver.create_host(3 * PAGE).unwrap());
        assert_eq!((held(), free()), ((4, 6), 0));
        assert_eq!(
            driver.create(PAGE),
            full(Call::Create),
            "host memory does not serve device pages"
        );
        assert_eq!(driver.create_host(3 * PAGE), full(Call::CreateHost));
        assert_eq!(driver.create_host(MIB), failed(Call::CreateHost, 1));
        let refused = driver.create_host(3 * PAGE).unwrap_err().to_string();
        assert_eq!(refused, "the driver call CreateHost failed: out of host memory");
        let rest = driver.create_host(2 * PAGE).unwrap();
        assert_eq!((held(), free()), ((4, 10), 0));

        let range = driver.reserve(5 * PAGE).unwrap();
        driver.map(range, 2 * PAGE, near).unwrap();
        driver.map(range + 2 * PAGE, 3 * PAGE, far).unwrap();
        driver.set_access(range, 5 * PAGE).unwrap();
        assert_eq!(driver.release(far), failed(Call::Release, 1), "the page is still mapped");
        driver.unmap(range, 5 * PAGE).unwrap();
        driver.release(far).unwrap();
        assert_eq!((held(), free()), ((4, 4), 0));
        driver.release(near).unwrap();
        driver.release(rest).unwrap();
        assert_eq!((held(), free()), ((0, 0), 4));
        assert!(driver.create_host(5 * PAGE).is_ok(), "all host memory is free again");
    }

    #[test]
    fn sizes_and_addresses_of_pages_are_multiples_of_the_granularity() {
        let driver = sim();
        for bytes in [0, 1, MIB, PAGE + 512] {
            assert_eq!(driver.create(bytes), failed(Call::Create, 1), "{bytes}");
            assert_eq!(driver.reserve(bytes), failed(Call::Reserve, 1), "{bytes}");
        }
        assert_eq!(driver.alloc(0), failed(Call::Alloc, 1));
        let (range, page) = (driver.reserve(2 * PAGE).unwrap(), driver.create(PAGE).unwrap());
        assert_eq!(driver.map(range + MIB, PAGE, page), failed(Call::Map, 1));
        assert_eq!(driver.map(range + 2 * PAGE, PAGE, page), failed(Call::Map, 1));
        assert_eq!(driver.map(range, PAGE, PageHandle(999)), failed(Call::Map, 1));
        driver.map(range, PAGE, page).unwrap();
        assert_eq!(driver.release(page), failed(Call::Release, 1));
        assert_eq!(driver.unreserve(range, 2 * PAGE), failed(Call::Unreserve, 1));
        driver.unmap(range, PAGE).unwrap();
        assert_eq!(driver.unreserve(range, PAGE), failed(Call::Unreserve, 1));
        driver.release(page).unwrap();
        driver.unreserve(range, 2 * PAGE).unwrap();
    }

    #[test]
    fn work_finishes_on_command_and_so_do_its_events() {
        let driver = sim();
        let [early, late, other] = [(); 3].map(|()| driver.event_create().unwrap());
        let query = |events: [EventId; 3]| events.map(|event| driver.event_query(event).unwrap());
        assert_eq!((driver.launch(S1), driver.launch(S1)), (1, 2));
        driver.event_record(early, S1).unwrap();
        assert_eq!((driver.launch(S1), driver.launch(S2)), (3, 1));
        driver.event_record(late, S1).unwrap();
        driver.event_record(other, S2).unwrap();
        let all = [early, late, other];
        assert_eq!(query(all), [false, false, false]);
        driver.finish_until(S1, 1);
        assert_eq!(query(all), [false, false, false]);
        driver.finish_until(S1, 2);
        assert_eq!(query(all), [true, false, false]);
        assert!(driver.is_finished(S1, 2) && !driver.is_finished(S1, 3));
        driver.event_synchronize(other).unwrap();
        assert_eq!(query(all), [true, false, true]);
        driver.finish(S1);
        assert_eq!(query(all), [true, true, true]);
        // Recording an event again replaces its first record. `stream_synchronize` waits for the
        // whole device.
        driver.launch(S1);
        driver.launch(S2);
        driver.event_record(early, S2).unwrap();
        driver.event_record(late, S1).unwrap();
        driver.finish(S1);
        assert_eq!(query([early, late, late]), [false, true, true]);
        driver.stream_synchronize(S1).unwrap();
        assert!(driver.event_query(early).unwrap());
        // A plain free waits for the whole device.
        let plain = driver.alloc(MIB).unwrap();
        let work = driver.launch(S2);
        driver.free(plain).unwrap();
        assert!(driver.is_finished(S2, work));
    }

    #[test]
    fn the_work_of_a_destroyed_stream_continues() {
        let driver = sim();
        let event = driver.event_create().unwrap();
        let work = driver.launch(S1);
        driver.event_record(event, S1).unwrap();
        driver.destroy_stream(S1);
        assert_eq!(driver.event_query(event), Ok(false));
        assert_eq!(driver.event_record(event, S1), failed(Call::EventRecord, 1));
        assert_eq!(driver.capture(S1).map(|_| ()), failed(Call::Capture, 1));
        driver.stream_synchronize(S1).unwrap();
        assert!(driver.is_finished(S1, work));
        assert_eq!(driver.event_query(event), Ok(true));
    }

    #[test]
    fn finish_oldest_finishes_work_in_launch_order_across_streams() {
        let driver = sim();
        assert!(!driver.finish_oldest(), "no work was queued");
        let event = driver.event_create().unwrap();
        // Launch order by stream: 1, 2, 2, 1, 3, 1. Captured work does not count.
        let s3 = StreamId(3);
        for stream in [S1, S2, S2, S1] {
            driver.launch(stream);
        }
        driver.begin_capture(s3);
        driver.launch(s3);
        driver.end_capture(s3);
        driver.launch(s3);
        driver.event_record(event, s3).unwrap();
        driver.launch(S1);
        let done = || {
            [S1, S2, s3]
                .map(|stream| (1..=3).take_while(|&work| driver.is_finished(stream, work)).count())
        };
        assert_eq!(done(), [0, 0, 0]);
        assert!(driver.finish_oldest());
        assert_eq!(done(), [1, 0, 0]);
        assert!(driver.finish_oldest());
        assert_eq!(done(), [1, 1, 0]);
        // Work that is already finished is skipped.
        driver.finish_until(S1, 2);
        driver.finish(S2);
        assert_eq!(done(), [2, 2, 0]);
        assert_eq!(driver.event_query(event), Ok(false));
        assert!(driver.finish_oldest());
        assert_eq!((done(), driver.event_query(event)), ([2, 2, 1], Ok(true)));
        driver.launch(S2);
        assert!(driver.finish_oldest());
        assert_eq!(done(), [3, 2, 1]);
        driver.event_record(event, S2).unwrap();
        driver.event_synchronize(event).unwrap();
        assert_eq!(done(), [3, 3, 1]);
        assert!(!driver.finish_oldest(), "all work is finished");
        for stream in [S1, S2] {
            driver.launch(stream);
        }
        driver.finish(S1);
        driver.finish_all();
        assert!(!driver.finish_oldest(), "all work is finished");
        driver.launch(s3);
        assert!(driver.finish_oldest() && driver.is_finished(s3, 2));
    }

    #[test]
    fn a_capture_forbids_waiting_and_records_a_graph() {
        let driver = sim();
        let (plain, event) = (driver.alloc(MIB).unwrap(), driver.event_create().unwrap());
        driver.begin_capture(S1);
        let refused = [
            driver.event_query(event).map(|_| ()),
            driver.event_synchronize(event),
            driver.stream_synchronize(S2),
            driver.free(plain),
        ];
        let calls = [Call::EventQuery, Call::EventSynchronize, Call::StreamSynchronize, Call::Free];
        assert_eq!(refused, calls.map(|call| failed(call, 900)));
        assert_eq!(driver.held(), MIB, "a refused free changes nothing");

        let terminals = |stream| Some(driver.capture(stream).unwrap()?.terminals);
        assert_eq!((terminals(S1), terminals(S2)), (Some(vec![]), None));
        assert_eq!(driver.launch(S1), 0, "captured work never runs");
        let first = terminals(S1).unwrap();
        driver.wait_for(S2, S1);
        assert_eq!(driver.capture(S1), driver.capture(S2), "the other stream joined the capture");
        driver.launch(S2);
        let second = terminals(S2).unwrap();
        assert_eq!(driver.dependencies(second[0]), Ok(first.clone()));
        assert_eq!(terminals(S1), Some(first.clone()));
        driver.wait_for(S1, S2);
        assert_eq!(terminals(S1), Some([first, second].concat()));
        driver.end_capture(S2);
        assert_eq!((driver.capture(S1), driver.capture(S2)), (Ok(None), Ok(None)));
        assert_eq!(driver.dependencies(NodeId(1)), failed(Call::Dependencies, 1));
        assert_eq!(driver.event_query(event), Ok(true));
        driver.free(plain).unwrap();
    }

    /// Prepares the arguments of one legal call, and returns a closure that makes the call.
    fn prepare(driver: &SimDriver, call: Call) -> Box<dyn Fn() -> DriverResult<()> + '_> {
        let mapped = || {
            let (range, page) = (driver.reserve(PAGE).unwrap(), driver.create(PAGE).unwrap());
            driver.map(range, PAGE, page).unwrap();
            range
        };
        let event = || driver.event_create().unwrap();
        match call {
            Call::Alloc => Box::new(|| driver.alloc(MIB).map(|_| ())),
            Call::Free => {
                let address = driver.alloc(MIB).unwrap();
                Box::new(move || driver.free(address))
            }
            Call::Reserve => Box::new(|| driver.reserve(PAGE).map(|_| ())),
            Call::Unreserve => {
                let range = driver.reserve(PAGE).unwrap();
                Box::new(move || driver.unreserve(range, PAGE))
            }
            Call::Create => Box::new(|| driver.create(PAGE).map(|_| ())),
            Call::CreateHost => Box::new(|| driver.create_host(PAGE).map(|_| ())),
            Call::Release => {
                let page = driver.create(PAGE).unwrap();
                Box::new(move || driver.release(page))
            }
            Call::Map => {
                let (range, page) = (driver.reserve(PAGE).unwrap(), driver.create(PAGE).unwrap());
                Box::new(move || driver.map(range, PAGE, page))
            }
            Call::SetAccess => {
                let range = mapped();
                Box::new(move || driver.set_access(range, PAGE))
            }
            Call::Unmap => {
                let range = mapped();
                Box::new(move || driver.unmap(range, PAGE))
            }
            Call::EventCreate => Box::new(|| driver.event_create().map(|_| ())),
            Call::EventDestroy => {
                let event = event();
                Box::new(move || driver.event_destroy(event))
            }
            Call::EventRecord => {
                let event = event();
                Box::new(move || driver.event_record(event, S1))
            }
            Call::EventQuery => {
                let event = event();
                Box::new(move || driver.event_query(event).map(|_| ()))
            }
            Call::EventSynchronize => {
                let event = event();
                Box::new(move || driver.event_synchronize(event))
            }
            Call::StreamSynchronize => Box::new(|| driver.stream_synchronize(S1)),
            Call::MemoryInfo => Box::new(|| driver.memory_info().map(|_| ())),
            Call::Capture => Box::new(|| driver.capture(S1).map(|_| ())),
            Call::Dependencies => {
                driver.begin_capture(S2);
                driver.launch(S2);
                let node = driver.capture(S2).unwrap().unwrap().terminals[0];
                Box::new(move || driver.dependencies(node).map(|_| ()))
            }
        }
    }

    /// A scripted failure hits exactly the scripted calls. The same call succeeds afterwards, so
    /// the failure changed nothing.
    #[test]
    fn scripted_failures_hit_every_kind_of_call_and_change_nothing() {
        for (call, fault) in
            Call::ALL.into_iter().flat_map(|c| [(c, Fault::OutOfMemory), (c, Fault::Failed(7))])
        {
            let driver = sim();
            let failure = Err(DriverError { call, fault });
            let actions: Vec<_> = (0..5).map(|_| prepare(&driver, call)).collect();
            let made = driver.counts().of(call);
            let (held, held_host) = (driver.held(), driver.held_host());

            driver.fail(FailWhen::Nth(call, 2), fault);
            assert_eq!(actions[0](), Ok(()), "{call}");
            let between = (driver.held(), driver.held_host());
            assert_eq!(actions[1](), failure);
            assert_eq!((driver.held(), driver.held_host()), between, "{call}");
            assert_eq!(actions[1](), Ok(()), "{call} fails only once");

            driver.fail(FailWhen::NthOfAny(1), fault);
            assert_eq!(actions[2](), failure);
            assert_eq!(actions[2](), Ok(()), "{call}");

            driver.fail(FailWhen::Every(call), fault);
            assert_eq!((actions[3](), actions[3]()), (failure, failure));
            driver.clear_failures();
            assert_eq!(actions[3](), Ok(()), "{call}");

            // A script for another kind of call does not apply. `NthOfAny` counts every kind.
            let other = if call == Call::Capture { Call::MemoryInfo } else { Call::Capture };
            driver.fail(FailWhen::Nth(other, 1), fault);
            driver.fail(FailWhen::NthOfAny(2), fault);
            assert_eq!(actions[4](), Ok(()), "{call}");
            driver.clear_failures();
            assert_eq!(driver.counts().of(call) - made, 9, "failed calls are counted too");
            let step = match call {
                Call::Alloc => MIB,
                Call::Create => PAGE,
                Call::Free => MIB.wrapping_neg(),
                Call::Release => PAGE.wrapping_neg(),
                _ => 0,
            };
            assert_eq!(driver.held(), held.wrapping_add(step.wrapping_mul(5)), "{call}");
            let step = if call == Call::CreateHost { PAGE } else { 0 };
            assert_eq!(driver.held_host(), held_host + 5 * step, "{call}");
        }
    }

    #[test]
    fn calls_are_counted_and_priced() {
        let driver = sim();
        let plain = driver.alloc(20 * MIB).unwrap();
        driver.free(plain).unwrap();
        let range = driver.reserve(22 * MIB).unwrap();
        let pages = [driver.create(PAGE).unwrap(), driver.create(20 * MIB).unwrap()];
        driver.map(range, PAGE, pages[0]).unwrap();
        driver.map(range + PAGE, 20 * MIB, pages[1]).unwrap();
        driver.set_access(range, 22 * MIB).unwrap();
        driver.unmap(range, 22 * MIB).unwrap();
        pages.into_iter().for_each(|page| driver.release(page).unwrap());
        driver.unreserve(range, 22 * MIB).unwrap();
        let event = driver.event_create().unwrap();
        driver.event_record(event, S1).unwrap();
        driver.event_query(event).unwrap();
        driver.event_synchronize(event).unwrap();
        driver.event_destroy(event).unwrap();
        driver.memory_info().unwrap();
        driver.capture(S1).unwrap();

        let counts = driver.counts();
        let by_page = [Call::Create, Call::Map, Call::SetAccess, Call::Unmap, Call::Release];
        let pages: u64 = by_page.map(|c| price(c, PAGE) + price(c, 20 * MIB)).iter().sum();
        let plain = price(Call::Alloc, 20 * MIB) + price(Call::Free, 20 * MIB);
        assert_eq!((plain, pages), (115_000, 162_800));
        assert_eq!(counts.nanos, plain + pages + 240 + 300 + 310 + 6_200 + 70);
        assert_eq!((counts.of(Call::Create), counts.of(Call::SetAccess)), (2, 1));
        assert_eq!((counts.of(Call::EventQuery), counts.of(Call::Dependencies)), (1, 0));
        assert_eq!(counts.total(), 19);
    }

    #[test]
    fn scripted_addresses_are_used_if_they_are_free() {
        let driver = sim();
        driver.place_alloc(MIB, 0x7000_0000);
        driver.place_reserve(0x9000_0000);
        assert!(driver.alloc(PAGE).unwrap() >= 1 << 48, "the script is for another size");
        let first = driver.alloc(MIB).unwrap();
        assert_eq!(first, 0x7000_0000);
        assert_eq!(driver.reserve(PAGE), Ok(0x9000_0000), "a scripted reserve applies to any size");
        for taken in [0x7000_0000, 0x7000_0000 + MIB / 2, 0x9000_0000] {
            driver.place_alloc(MIB, taken);
            assert!(driver.alloc(MIB).unwrap() >= 1 << 48, "{taken:#x} is taken");
        }
        driver.free(first).unwrap();
        driver.place_alloc(MIB, first);
        assert_eq!(driver.alloc(MIB), Ok(first), "the address is free again");
        driver.place_alloc(MIB, 0x5000_0000);
        driver.clear_placements();
        assert!(driver.alloc(MIB).unwrap() >= 1 << 48);
    }

    // ---- the checked driver ----

    type Gpu = CheckedDriver<SimDriver>;

    /// Returns a driver with a reserved range of four pages and one accessible page at its start.
    fn with_page() -> (Gpu, u64, PageHandle) {
        let gpu = CheckedDriver::new(sim());
        let (range, page) = (gpu.reserve(4 * PAGE).unwrap(), gpu.create(PAGE).unwrap());
        gpu.map(range, PAGE, page).unwrap();
        gpu.set_access(range, PAGE).unwrap();
        (gpu, range, page)
    }

    fn ignore<T>(_: DriverResult<T>) {}

    type Case = (&'static str, fn(&Gpu, u64, PageHandle));

    /// Runs a case on a new driver; returns the panic message, if the case panicked.
    fn run((_, case): Case) -> Option<String> {
        let (gpu, range, page) = with_page();
        let panic = catch_unwind(AssertUnwindSafe(|| case(&gpu, range, page))).err()?;
        let message = panic.downcast_ref::<String>().map(String::as_str);
        Some(message.or(panic.downcast_ref::<&str>().copied()).unwrap_or("?").to_owned())
    }

    /// The last call of each case breaks one rule, and the checked driver must panic, whatever the
    /// inner driver would return.
    #[test]
    fn breaches_of_the_contract_are_caught() {
        let cases: &[Case] = &[
            ("over a mapped range", |gpu, range, _| {
                let other = gpu.create(PAGE).unwrap();
                let _ = gpu.map(range, PAGE, other);
            }),
            ("over a mapped range", |gpu, range, _| {
                let large = gpu.create(2 * PAGE).unwrap();
                gpu.map(range + 2 * PAGE, 2 * PAGE, large).unwrap();
                let other = gpu.create(2 * PAGE).unwrap();
                let _ = gpu.map(range + PAGE, 2 * PAGE, other);
            }),
            ("a page is mapped whole", |gpu, range, page| {
                let _ = gpu.map(range + PAGE, 2 * PAGE, page);
            }),
            ("outside every reserved range", |gpu, range, page| {
                let _ = gpu.map(range + 4 * PAGE, PAGE, page);
            }),
            ("map of an unknown page", |gpu, range, _| {
                let _ = gpu.map(range + PAGE, PAGE, PageHandle(999));
            }),
            ("a page of 512 bytes", |gpu, _, _| ignore(gpu.create(512))),
            ("a page of 512 bytes", |gpu, _, _| ignore(gpu.create_host(512))),
            ("over a mapped range", |gpu, range, _| {
                let host = gpu.create_host(PAGE).unwrap();
                let _ = gpu.map(range, PAGE, host);
            }),
            ("still mapped", |gpu, range, _| {
                let host = gpu.create_host(PAGE).unwrap();
                gpu.map(range + PAGE, PAGE, host).unwrap();
                let _ = gpu.release(host);
            }),
            ("a page is unmapped while work", |gpu, range, _| {
                let host = gpu.create_host(PAGE).unwrap();
                gpu.map(range + PAGE, PAGE, host).unwrap();
                gpu.set_access(range + PAGE, PAGE).unwrap();
                gpu.work(range + PAGE, 512, S1, 1);
                let _ = gpu.unmap(range + PAGE, PAGE);
            }),
            ("still mapped", |gpu, _, page| ignore(gpu.release(page))),
            ("release of an unknown page", |gpu, range, page| {
                gpu.unmap(range, PAGE).unwrap();
                gpu.release(page).unwrap();
                let _ = gpu.release(page);
            }),
            ("not whole mapped pages", |gpu, range, _| {
                gpu.unmap(range, PAGE).unwrap();
                let _ = gpu.unmap(range, PAGE);
            }),
            ("not whole mapped pages", |gpu, range, _| ignore(gpu.unmap(range, MIB))),
            ("not all of it is mapped", |gpu, range, page| {
                gpu.map(range + 2 * PAGE, PAGE, page).unwrap();
                let _ = gpu.unmap(range, 3 * PAGE);
            }),
            ("not whole mapped pages", |gpu, range, _| ignore(gpu.set_access(range, 2 * PAGE))),
            ("with a page in it", |gpu, range, _| ignore(gpu.unreserve(range, 4 * PAGE))),
            ("not a reserved range", |gpu, range, _| {
                gpu.unmap(range, PAGE).unwrap();
                let _ = gpu.unreserve(range, PAGE);
            }),
            ("not allocated", |gpu, range, _| ignore(gpu.free(range))),
            ("not allocated", |gpu, _, _| {
                let plain = gpu.alloc(MIB).unwrap();
                gpu.free(plain).unwrap();
                let _ = gpu.free(plain);
            }),
            ("destroy of an unknown event", |gpu, _, _| ignore(gpu.event_destroy(EventId(999)))),
            ("record of an unknown event", |gpu, _, _| ignore(gpu.event_record(EventId(999), S1))),
            ("used but not mapped", |gpu, range, _| gpu.work(range + PAGE, 512, S1, 1)),
            ("used but not mapped", |gpu, range, _| gpu.work(range, PAGE + 512, S1, 1)),
            ("used without access", |gpu, range, page| {
                gpu.map(range + PAGE, PAGE, page).unwrap();
                gpu.work(range + PAGE, 512, S1, 1);
            }),
            ("leaves its allocation", |gpu, _, _| {
                let plain = gpu.alloc(MIB).unwrap();
                gpu.work(plain, MIB + 512, S1, 1);
            }),
            ("a page is unmapped while work", |gpu, range, _| {
                gpu.work(range, 512, S1, 1);
                let _ = gpu.unmap(range, PAGE);
            }),
            // The engine must observe that the work is done: an idle device is not enough.
            ("a page is unmapped while work", |gpu, range, _| {
                gpu.work(range, 512, S1, 1);
                gpu.inner().finish_all();
                let event = gpu.event_create().unwrap();
                gpu.event_record(event, S2).unwrap();
                assert_eq!(gpu.event_query(event), Ok(true));
                let _ = gpu.unmap(range, PAGE);
            }),
            ("an event is recorded on StreamId(1), which was destroyed", |gpu, _, _| {
                let event = gpu.event_create().unwrap();
                gpu.event_record(event, S1).unwrap();
                gpu.destroy_stream(S1);
                let _ = gpu.event_record(event, S1);
            }),
            ("a capture is asked for on StreamId(1), which was destroyed", |gpu, _, _| {
                gpu.destroy_stream(S1);
                let _ = gpu.capture(S1);
            }),
            ("an event is recorded on StreamId(1), which is being captured", |gpu, _, _| {
                let event = gpu.event_create().unwrap();
                gpu.begin_capture(S1);
                gpu.end_capture(S1);
                gpu.event_record(event, S1).unwrap();
                gpu.begin_capture(S1);
                let _ = gpu.event_record(event, S1);
            }),
            // An event does not cover work that was queued after its record.
            ("a page is unmapped while work", |gpu, range, _| {
                let event = gpu.event_create().unwrap();
                gpu.event_record(event, S1).unwrap();
                gpu.work(range, 512, S1, 1);
                gpu.event_synchronize(event).unwrap();
                let _ = gpu.unmap(range, PAGE);
            }),
            ("before the work of an earlier allocation", |gpu, range, _| {
                gpu.work(range, MIB, S1, 1);
                gpu.work(range + 512, 512, S2, 2);
            }),
            ("before the work of an earlier allocation", |gpu, _, _| {
                let plain = gpu.alloc(MIB).unwrap();
                gpu.work(plain, 1024, S1, 1);
                gpu.work(plain + 512, 1024, S2, 2);
            }),
            // A page is the same memory at all its addresses.
            ("before the work of an earlier allocation", |gpu, range, page| {
                gpu.map(range + PAGE, PAGE, page).unwrap();
                gpu.set_access(range + PAGE, PAGE).unwrap();
                gpu.work(range, 512, S1, 1);
                gpu.work(range + PAGE, 512, S2, 2);
            }),
            // A wait orders only work that was queued before it.
            ("before the work of an earlier allocation", |gpu, range, _| {
                gpu.wait(S2, S1);
                gpu.work(range, 512, S1, 1);
                gpu.work(range, 512, S2, 2);
            }),
        ];
        for &case in cases {
            let message = run(case).unwrap_or_else(|| panic!("`{}` was not caught", case.0));
            assert!(message.contains(case.0), "`{}` expected, but: {message}", case.0);
        }
    }

    #[test]
    fn calls_that_the_contract_allows_are_accepted() {
        let cases: &[Case] = &[
            ("the same stream", |gpu, range, _| {
                gpu.work(range, MIB, S1, 1);
                gpu.work(range, MIB, S1, 2);
            }),
            ("one allocation on two streams", |gpu, range, _| {
                gpu.work(range, MIB, S1, 1);
                gpu.work(range, MIB, S2, 1);
            }),
            ("other bytes of the page", |gpu, range, _| {
                gpu.work(range, 512, S1, 1);
                gpu.work(range + 512, 512, S2, 2);
            }),
            ("a stream that waits for the other", |gpu, range, _| {
                gpu.work(range, MIB, S1, 1);
                gpu.wait(S2, S1);
                gpu.work(range, MIB, S2, 2);
            }),
            ("a stream that waits for one that waits", |gpu, range, _| {
                gpu.work(range, MIB, S1, 1);
                gpu.wait(StreamId(3), S1);
                gpu.wait(S2, StreamId(3));
                gpu.work(range, MIB, S2, 2);
            }),
            ("an event that was waited for", |gpu, range, _| {
                let event = gpu.event_create().unwrap();
                gpu.work(range, MIB, S1, 1);
                gpu.event_record(event, S1).unwrap();
                gpu.event_synchronize(event).unwrap();
                gpu.work(range, MIB, S2, 2);
            }),
            ("an event that was seen done", |gpu, range, _| {
                let event = gpu.event_create().unwrap();
                gpu.work(range, MIB, S1, 1);
                gpu.event_record(event, S1).unwrap();
                assert_eq!(gpu.event_query(event), Ok(true));
                gpu.unmap(range, PAGE).unwrap();
            }),
            ("a stream that waits for all", |gpu, range, _| {
                gpu.work(range, MIB, S1, 1);
                gpu.wait_for_all(S2);
                gpu.work(range, MIB, S2, 2);
            }),
            // The wait covers the whole device, even through the handle of a destroyed stream.
            ("a device that was waited for", |gpu, range, page| {
                gpu.work(range, MIB, S1, 1);
                gpu.destroy_stream(S2);
                gpu.stream_synchronize(S2).unwrap();
                gpu.unmap(range, PAGE).unwrap();
                gpu.release(page).unwrap();
                gpu.unreserve(range, 4 * PAGE).unwrap();
            }),
            ("a plain free, which waits for the device", |gpu, range, _| {
                let plain = gpu.alloc(MIB).unwrap();
                gpu.work(range, MIB, S1, 1);
                gpu.work(plain, MIB, S2, 2);
                gpu.free(plain).unwrap();
                gpu.unmap(range, PAGE).unwrap();
            }),
        ];
        for &case in cases {
            assert_eq!(run(case), None, "{}", case.0);
        }
    }

    #[test]
    fn a_query_of_an_unfinished_event_proves_nothing() {
        let (gpu, range, _) = with_page();
        let event = gpu.event_create().unwrap();
        gpu.work(range, MIB, S1, 1);
        gpu.inner().launch(S1);
        gpu.event_record(event, S1).unwrap();
        assert_eq!(gpu.event_query(event), Ok(false));
        let unmapped = catch_unwind(AssertUnwindSafe(|| gpu.unmap(range, PAGE)));
        assert!(unmapped.is_err(), "the work is not known to be done");
        gpu.inner().finish(S1);
        assert_eq!(gpu.event_query(event), Ok(true));
        gpu.unmap(range, PAGE).unwrap();
    }

    /// A failed call changes nothing, so the checked driver must not record it.
    #[test]
    fn failed_calls_are_not_recorded() {
        let (gpu, range, page) = with_page();
        let mut tries = 0;
        let mut twice = |call, action: &dyn Fn() -> DriverResult<()>| {
            gpu.inner().fail(FailWhen::Nth(call, 1), Fault::Failed(7));
            assert_eq!(action(), failed(call, 7));
            assert_eq!(action(), Ok(()), "{call}");
            tries += 1;
        };
        twice(Call::Map, &|| gpu.map(range + PAGE, PAGE, page));
        twice(Call::SetAccess, &|| gpu.set_access(range + PAGE, PAGE));
        twice(Call::Unmap, &|| gpu.unmap(range, 2 * PAGE));
        twice(Call::Release, &|| gpu.release(page));
        twice(Call::Unreserve, &|| gpu.unreserve(range, 4 * PAGE));
        let plain = gpu.alloc(MIB).unwrap();
        twice(Call::Free, &|| gpu.free(plain));
        let event = gpu.event_create().unwrap();
        twice(Call::EventDestroy, &|| gpu.event_destroy(event));
        assert_eq!(tries, 7);
    }
}
