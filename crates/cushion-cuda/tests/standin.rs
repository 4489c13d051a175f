//! [`CudaDriver`] on the CUDA stand-in: the contract, contexts, captures, peers, and a missing or
//! failing CUDA. Each test runs in its own process.

#![cfg(target_os = "linux")]

mod support;

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use cushion_core::driver::{Call, Capture, EventId, Fault, NodeId, PageHandle};
    use cushion_core::size::{GIB, MIB};
    use cushion_core::testing::churn::Churn;
    use cushion_core::testing::contract;
    use cushion_core::{
        AddressError, CheckedDriver, Driver, DriverError, Engine, EngineConfig, Options, Policy,
        StreamId,
    };
    use cushion_cuda::{CudaDriver, CudaError, device_count, driver_version, name};

    use super::support::{Lib, with_library, with_standin};

    const PAGE: u64 = 2 * MIB;
    const S1: StreamId = StreamId(0x1000);
    const S2: StreamId = StreamId(0x2000);

    fn device(index: u32) -> CudaDriver {
        CudaDriver::new(index).expect("a device of the stand-in")
    }

    // ---- what every driver does ----

    #[test]
    fn the_contract_holds() {
        with_standin(&[], |_| {
            contract::check_driver(&device(0));
            contract::check_refusals(&device(0));
            contract::check_driver(&CheckedDriver::new(device(0)));
        });
    }

    #[test]
    fn the_contract_holds_on_each_device_and_thread() {
        with_standin(&[("STANDIN_DEVICES", "3"), ("STANDIN_PEERS", "all")], |_| {
            assert_eq!(device_count(), Ok(3));
            std::thread::scope(|scope| {
                for index in 0..3 {
                    scope.spawn(move || {
                        let driver = device(index);
                        assert_eq!(driver.properties().device, index);
                        contract::check_driver(&driver);
                        contract::check_refusals(&driver);
                    });
                }
            });
        });
    }

    #[test]
    fn a_device_reports_its_properties() {
        with_standin(&[("STANDIN_DEVICES", "2"), ("STANDIN_CAPACITY", "536870912")], |_| {
            let driver = device(1);
            let properties = driver.properties();
            assert_eq!(
                (properties.device, properties.total, properties.granularity),
                (1, GIB / 2, PAGE)
            );
            assert_eq!(driver.device_name().unwrap(), "Stand-in 1");
            assert_eq!(driver_version(), Ok((13, 0)));
            assert_eq!(name(2).as_deref(), Some("CUDA_ERROR_OUT_OF_MEMORY"));
            assert_eq!(name(12345), None);
        });
    }

    // ---- content of memory ----

    #[test]
    fn bytes_round_trip() {
        with_standin(&[], |_| {
            let driver = device(0);
            let stream = driver.stream_create().unwrap();
            let address = driver.alloc(MIB).unwrap();
            let bytes: Vec<u8> = (0..200).collect();
            let mut read = vec![9; 300];
            // SAFETY: the range is inside the allocation, and no other stream uses it.
            unsafe { driver.fill(address, 300, 0, stream) }.unwrap();
            // SAFETY: as above.
            unsafe { driver.write(address + 10, &bytes, stream) }.unwrap();
            // SAFETY: as above.
            unsafe { driver.copy(address, address + 4096, 300, stream) }.unwrap();
            // SAFETY: as above.
            unsafe { driver.read(address + 4096, &mut read, stream) }.unwrap();
            assert_eq!(
                (&read[..10], &read[10..210], &read[210..]),
                (&[0; 10][..], &bytes[..], &[0; 90][..])
            );
            driver.stream_wait(stream).unwrap();
            // SAFETY: the range ends outside of the allocation, and the stand-in refuses it.
            let failed = unsafe { driver.fill(address + MIB - 1, 2, 0, stream) };
            assert!(failed.unwrap_err().to_string().contains("cuMemsetD8Async"));
            // SAFETY: `stream_create` made the stream, and it is not used any more.
            unsafe { driver.stream_destroy(stream) }.unwrap();
            assert!(driver.stream_wait(stream).is_err());
            driver.free(address).unwrap();
        });
    }

    // ---- missing devices ----

    #[test]
    fn a_library_that_cannot_be_loaded_is_reported() {
        let broken = tempfile::NamedTempFile::new().unwrap();
        with_library(broken.path(), || {
            let error = CudaDriver::new(0).unwrap_err();
            assert!(matches!(error, CudaError::NoLibrary { .. }), "{error:?}");
            let text = error.to_string();
            assert!(text.contains("install the NVIDIA driver"), "{text}");
            assert!(text.contains("/libcuda.so.1"), "the loader's message is missing: {text}");
            assert_eq!(device_count(), Err(error));
            assert!(driver_version().is_err());
            assert_eq!(name(2), None);
        });
    }

    #[test]
    fn a_library_without_the_functions_is_reported() {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let other = maps.split_whitespace().find(|word| word.contains("/libc.so")).unwrap();
        with_library(other.as_ref(), || {
            let error = CudaDriver::new(0).unwrap_err();
            assert!(matches!(error, CudaError::NoFunction { .. }), "{error:?}");
            assert!(error.to_string().contains("install an NVIDIA driver"), "{error}");
        });
    }

    #[test]
    fn no_device_is_reported() {
        with_standin(&[("STANDIN_DEVICES", "0")], |_| {
            assert_eq!(device_count(), Ok(0));
            let error = CudaDriver::new(0).unwrap_err();
            assert_eq!(error, CudaError::NoDevice);
            assert!(error.to_string().contains("nvidia-smi"), "{error}");
        });
    }

    #[test]
    fn an_index_out_of_range_is_reported() {
        with_standin(&[("STANDIN_DEVICES", "2")], |lib| {
            for index in [2, 7, u32::MAX] {
                let error = CudaDriver::new(index).unwrap_err();
                assert_eq!(error, CudaError::NoSuchDevice { device: index, count: 2 });
                assert!(error.to_string().contains("sees 2, numbered from 0"), "{error}");
            }
            assert_eq!(lib.standin_contexts(), 0);
        });
    }

    #[test]
    fn a_failing_start_reports_the_call_and_holds_nothing() {
        with_standin(&[("STANDIN_DEVICES", "2"), ("STANDIN_PEERS", "all")], |lib| {
            let count = || lib.standin_calls(std::ptr::null());
            let before = count();
            drop(device(0));
            let mut failed = 0;
            for nth in 1..=count() - before {
                lib.standin_fail(nth, 3);
                let started = CudaDriver::new(0);
                lib.standin_fail(0, 0);
                match started {
                    // Failed queries do not fail `new`: a device that cannot be queried is not a
                    // peer, a feature that cannot be queried is not supported, and a state that
                    // cannot be restored is left.
                    Ok(driver) => drop(driver),
                    Err(CudaError::Failed { code, name, function }) => {
                        assert_eq!((code, name.as_str()), (3, "CUDA_ERROR_NOT_INITIALIZED"));
                        assert!(function.starts_with("cu"), "{function}");
                        failed += 1;
                    }
                    Err(error) => panic!("call {nth}: {error:?}"),
                }
                assert_eq!(lib.standin_contexts(), 0, "call {nth}: a context is lost");
            }
            assert!(failed >= 8, "{failed} calls");
        });
    }

    #[test]
    fn calls_after_cuda_has_shut_down_fail() {
        with_standin(&[], |lib| {
            let engine = Engine::new(device(0));
            let address = engine.alloc(MIB, StreamId(0)).unwrap();
            lib.standin_shut_down();
            let failed = DriverError { call: Call::Alloc, fault: Fault::Failed(4) };
            assert_eq!(engine.driver().alloc(MIB), Err(failed));
            assert!(engine.alloc(100 * MIB, StreamId(0)).is_err());
            engine.free(address).unwrap();
            engine.check_invariants().unwrap();
            drop(engine);
            let error = CudaDriver::new(0).unwrap_err();
            assert!(error.to_string().contains("CUDA has shut down"), "{error}");
        });
    }

    // ---- contexts ----

    #[test]
    fn only_the_primary_context_is_retained_and_then_released() {
        with_standin(&[("STANDIN_DEVICES", "3"), ("STANDIN_PEERS", "all")], |lib| {
            let driver = device(1);
            contract::check_driver(&driver);
            assert_eq!(lib.standin_contexts(), 0b010);
            assert_eq!(lib.current(), 0, "a context was left behind");
            let second = device(1);
            drop(driver);
            contract::check_driver(&second);
            drop(second);
            assert_eq!(lib.standin_contexts(), 0);
        });
    }

    #[test]
    fn the_threads_own_context_stays_current() {
        with_standin(&[("STANDIN_DEVICES", "2")], |lib| {
            let driver = Arc::new(device(0));
            let other = lib.primary(1);
            let own = lib.primary(0);
            for context in [0, other, own] {
                let driver = Arc::clone(&driver);
                let check = move || {
                    let lib = Lib::open();
                    assert_eq!(lib.cuCtxSetCurrent(context), 0);
                    contract::check_driver(&driver);
                    contract::check_refusals(&driver);
                    assert_eq!(lib.current(), context);
                };
                std::thread::spawn(check).join().unwrap();
            }
            assert_eq!(lib.standin_held(1), 0, "memory was allocated on another device");
        });
    }

    // ---- pages ----

    #[test]
    fn access_is_granted_to_every_peer() {
        let peers = "0>1,2>1,1>3,0>2";
        with_standin(&[("STANDIN_DEVICES", "4"), ("STANDIN_PEERS", peers)], |lib| {
            for (index, granted) in [(0, 0b0001), (1, 0b0111), (2, 0b0101), (3, 0b1010)] {
                let driver = device(index);
                let range = driver.reserve(2 * PAGE).unwrap();
                let page = driver.create(PAGE).unwrap();
                driver.map(range, PAGE, page).unwrap();
                assert_eq!(lib.standin_access(range), 0);
                driver.set_access(range, PAGE).unwrap();
                assert_eq!(lib.standin_access(range), granted, "device {index}");
                assert_eq!(lib.standin_access(range + PAGE), 0);
                assert_eq!(lib.standin_contexts(), 1 << index, "a context on a peer");
                driver.unmap(range, PAGE).unwrap();
                driver.release(page).unwrap();
                driver.unreserve(range, 2 * PAGE).unwrap();
            }
        });
    }

    const FILE: u32 = 1;
    const FABRIC: u32 = 8;
    const RDMA: u32 = 1 << 31;

    /// Returns the handle types of a new page.
    fn kind(lib: &Lib, driver: &CudaDriver) -> u32 {
        let page = driver.create(PAGE).unwrap();
        let kind = lib.standin_page_kind(page.0);
        driver.release(page).unwrap();
        kind
    }

    #[test]
    fn pages_have_the_best_kind_that_is_not_refused() {
        with_standin(&[], |lib| {
            let cases = [
                (0, 0, FILE | FABRIC | RDMA, 1),
                (FABRIC, 0, FILE | RDMA, 2),
                (FILE, 0, RDMA, 3),
                (FABRIC, 1, 0, 4),
            ];
            for code in [800, 801, 1] {
                for (handles, rdma, expected, tries) in cases {
                    lib.standin_refuse_pages(0, 0, 0);
                    let driver = device(0);
                    lib.standin_refuse_pages(handles, rdma, code);
                    let calls = || lib.standin_calls(c"cuMemCreate".as_ptr());
                    let before = calls();
                    assert_eq!(kind(lib, &driver), expected);
                    assert_eq!(calls() - before, tries);
                    assert_eq!(kind(lib, &driver), expected);
                    assert_eq!(calls() - before, tries + 1, "the kind is found once");
                    contract::check_driver(&driver);
                }
            }
        });
    }

    #[test]
    fn other_errors_are_reported_and_keep_the_kind() {
        with_standin(&[], |lib| {
            let driver = device(0);
            let failed = |fault| Err(DriverError { call: Call::Create, fault });
            assert_eq!(
                driver.create(MIB),
                failed(Fault::Failed(1)),
                "not a multiple of the granularity"
            );
            assert_eq!(driver.create(2 * GIB), failed(Fault::OutOfMemory));
            lib.standin_refuse_pages(FABRIC, 0, 999);
            assert_eq!(driver.create(PAGE), failed(Fault::Failed(999)));
            lib.standin_refuse_pages(0, 0, 0);
            assert_eq!(kind(lib, &driver), FILE | FABRIC | RDMA);
        });
    }

    #[test]
    fn unsupported_kinds_are_not_tried() {
        with_standin(&[("STANDIN_WITHOUT", "fabric,rdma")], |lib| {
            assert_eq!(kind(lib, &device(0)), FILE);
            assert_eq!(lib.standin_calls(c"cuMemCreate".as_ptr()), 1);
        });
    }

    #[test]
    fn a_device_without_pages_still_has_plain_memory() {
        with_standin(&[("STANDIN_WITHOUT", "pages")], |_| {
            let driver = device(0);
            assert_eq!(driver.properties().granularity, PAGE);
            contract::check_plain_memory(&driver);
            contract::check_events(&driver);
            let refused = DriverError { call: Call::Create, fault: Fault::Failed(801) };
            assert_eq!(driver.create(PAGE), Err(refused));
            assert!(!contract::check_host_pages(&driver), "the device has no host pages");
        });
    }

    /// Returns the NUMA node of a new page in host memory.
    fn node(lib: &Lib, driver: &CudaDriver) -> i32 {
        let page = driver.create_host(PAGE).unwrap();
        let node = lib.standin_page_node(page.0);
        assert_eq!(lib.standin_page_kind(page.0), 0, "it is not shared");
        driver.release(page).unwrap();
        node
    }

    #[test]
    fn host_pages_are_near_their_device_and_take_none_of_its_memory() {
        with_standin(&[("STANDIN_NUMA", "3"), ("STANDIN_HOST", "8388608")], |lib| {
            let driver = device(0);
            let held = || (lib.standin_held(0) / MIB, lib.standin_held_host(0) / MIB);
            assert_eq!(node(lib, &driver), 3);
            let near = driver.create(PAGE).unwrap();
            assert_eq!(lib.standin_page_node(near.0), -1);
            let far = driver.create_host(2 * PAGE).unwrap();
            assert_eq!(held(), (2, 4));
            let failed = |fault| Err(DriverError { call: Call::CreateHost, fault });
            assert_eq!(driver.create_host(4 * PAGE), failed(Fault::OutOfMemory));
            assert_eq!(
                driver.create_host(MIB),
                failed(Fault::Failed(1)),
                "not a multiple of the granularity"
            );
            assert_eq!(held(), (2, 4));
            driver.release(far).unwrap();
            assert!(driver.release(far).is_err(), "the page is released");
            driver.release(near).unwrap();
            assert_eq!(held(), (0, 0));
        });
    }

    #[test]
    fn a_host_without_numa_uses_node_zero() {
        with_standin(&[("STANDIN_NUMA", "-1")], |lib| {
            assert_eq!(node(lib, &device(0)), 0);
            assert!(contract::check_host_pages(&device(0)));
        });
    }

    #[test]
    fn host_pages_need_support_of_all_peers() {
        let refused = DriverError { call: Call::CreateHost, fault: Fault::Failed(801) };
        let peers = ("STANDIN_PEERS", "2>0,1>2");
        let machine = [("STANDIN_DEVICES", "3"), peers, ("STANDIN_WITHOUT", "host@1")];
        with_standin(&machine, |lib| {
            assert_eq!(device(1).create_host(PAGE), Err(refused));
            assert_eq!(device(2).create_host(PAGE), Err(refused), "a peer could not use it");
            assert_eq!(lib.standin_calls(c"cuMemCreate".as_ptr()), 0, "CUDA is not called");
            let driver = device(0);
            let (range, page) = (driver.reserve(PAGE).unwrap(), driver.create_host(PAGE).unwrap());
            driver.map(range, PAGE, page).unwrap();
            driver.set_access(range, PAGE).unwrap();
            assert_eq!(lib.standin_access(range), 0b101);
            for index in 0..3 {
                contract::check_driver(&device(index));
            }
        });
    }

    #[test]
    fn unknown_handles_do_not_reach_cuda() {
        with_standin(&[], |lib| {
            let (driver, other) = (device(0), device(0));
            let (page, event) = (other.create(PAGE).unwrap(), other.event_create().unwrap());
            let range = driver.reserve(PAGE).unwrap();
            let calls = |name: &std::ffi::CStr| lib.standin_calls(name.as_ptr());
            for page in [page, PageHandle(0), PageHandle(u64::MAX)] {
                assert!(driver.release(page).is_err() && driver.map(range, PAGE, page).is_err());
            }
            for event in [event, EventId(0), EventId(7)] {
                assert!(driver.event_record(event, S1).is_err());
                assert!(driver.event_query(event).is_err());
                assert!(driver.event_synchronize(event).is_err());
                assert!(driver.event_destroy(event).is_err());
            }
            assert_eq!((calls(c"cuMemRelease"), calls(c"cuMemMap")), (0, 0));
            assert_eq!((calls(c"cuEventRecord"), calls(c"cuEventDestroy_v2")), (0, 0));
            other.release(page).unwrap();
            other.event_destroy(event).unwrap();
            assert!(other.event_destroy(event).is_err() && other.release(page).is_err());
        });
    }

    // ---- streams and events ----

    #[test]
    fn events_tell_whether_work_is_done() {
        with_standin(&[], |lib| {
            let driver = device(0);
            let event = driver.event_create().unwrap();
            lib.standin_launch(0, S1.0);
            driver.event_record(event, S1).unwrap();
            assert_eq!(driver.event_query(event), Ok(false));
            lib.standin_finish(0, S1.0);
            assert_eq!(driver.event_query(event), Ok(true));
            lib.standin_launch(0, S1.0);
            driver.event_record(event, S1).unwrap();
            assert_eq!(driver.event_query(event), Ok(false));
            driver.event_synchronize(event).unwrap();
            assert_eq!(driver.event_query(event), Ok(true));
        });
    }

    #[test]
    fn a_destroyed_stream_leaves_nothing_pending() {
        with_standin(&[("STANDIN_DEVICES", "3"), ("STANDIN_PEERS", "1>0,2>0")], |lib| {
            let engine = Engine::new(device(0));
            lib.primary(1);
            let address = engine.alloc(30 * MIB, S1).unwrap();
            // Work of the destroyed stream, and of a device that it could have belonged to.
            lib.standin_launch(0, S2.0);
            engine.record_stream(address, S2).unwrap();
            lib.standin_destroy_stream(S2.0);
            let before = lib.standin_calls(c"cuCtxSynchronize".as_ptr());
            engine.free(address).unwrap();
            engine.process_events().unwrap();
            let waits = lib.standin_calls(c"cuCtxSynchronize".as_ptr()) - before;
            assert_eq!(waits, 2, "this device, and the one peer that has a context");
            assert_eq!(lib.standin_contexts(), 0b011);
            assert_eq!(engine.stats().active_bytes.all.current, 0, "a block stays pending");
            engine.check_invariants().unwrap();
            engine.empty_cache().unwrap();
            assert_eq!(lib.standin_held(0), 0);
        });
    }

    #[test]
    fn a_stream_of_another_device_gets_an_event_of_that_device() {
        with_standin(&[("STANDIN_DEVICES", "2"), ("STANDIN_PEERS", "all")], |lib| {
            let driver = device(0);
            lib.cuCtxSetCurrent(lib.primary(1));
            let theirs = lib.stream();
            let event = driver.event_create().unwrap();
            lib.standin_launch(1, theirs);
            driver.event_record(event, StreamId(theirs)).unwrap();
            assert_eq!(lib.standin_calls(c"cuCtxSynchronize".as_ptr()), 0, "no wait is needed");
            assert_eq!(driver.event_query(event), Ok(false));
            lib.standin_finish(1, theirs);
            assert_eq!(driver.event_query(event), Ok(true));
            // The event can be used on a stream of this device again, and both events are destroyed
            // once.
            driver.event_record(event, S1).unwrap();
            driver.event_record(event, StreamId(theirs)).unwrap();
            driver.event_destroy(event).unwrap();
            let calls = |name: &std::ffi::CStr| lib.standin_calls(name.as_ptr());
            assert_eq!(calls(c"cuEventCreate"), 3);
            assert_eq!(calls(c"cuEventDestroy_v2"), 3);
        });
    }

    // ---- captures ----

    #[test]
    fn memory_calls_are_legal_while_a_graph_is_captured() {
        with_standin(&[], |lib| {
            let driver = device(0);
            lib.standin_begin_capture(0, S1.0);
            let mut address = 0;
            lib.cuCtxSetCurrent(lib.primary(0));
            assert_eq!(lib.cuMemAlloc_v2(&raw mut address, 512), 900, "the stand-in is strict");
            for _ in 0..2 {
                let plain = driver.alloc(PAGE).unwrap();
                let range = driver.reserve(PAGE).unwrap();
                for page in [driver.create(PAGE).unwrap(), driver.create_host(PAGE).unwrap()] {
                    driver.map(range, PAGE, page).unwrap();
                    driver.set_access(range, PAGE).unwrap();
                    driver.unmap(range, PAGE).unwrap();
                    driver.release(page).unwrap();
                }
                driver.unreserve(range, PAGE).unwrap();
                driver.memory_info().unwrap();
                assert_ne!(plain, 0);
            }
            assert_eq!(lib.cuMemAlloc_v2(&raw mut address, 512), 900, "the mode was put back");
            lib.standin_end_capture(0, S1.0);
            assert_eq!(lib.cuMemAlloc_v2(&raw mut address, 512), 0);
        });
    }

    #[test]
    fn a_capture_is_reported_with_its_nodes() {
        with_standin(&[], |lib| {
            let driver = device(0);
            assert_eq!(driver.capture(S1), Ok(None));
            lib.standin_begin_capture(0, S1.0);
            let begun = driver.capture(S1).unwrap().expect("a capture");
            assert!(begun.id != 0 && begun.terminals.is_empty(), "{begun:?}");
            lib.standin_launch(0, S1.0);
            let one = driver.capture(S1).unwrap().unwrap();
            assert_eq!((one.id, one.terminals.len()), (begun.id, 1));
            assert_eq!(driver.dependencies(one.terminals[0]), Ok(vec![]));
            lib.standin_wait_for(0, S2.0, S1.0);
            lib.standin_launch(0, S2.0);
            lib.standin_launch(0, S1.0);
            lib.standin_wait_for(0, S1.0, S2.0);
            let joined = driver.capture(S1).unwrap().unwrap();
            assert_eq!((joined.id, joined.terminals.len()), (begun.id, 2));
            for &node in &joined.terminals {
                assert_eq!(driver.dependencies(node), Ok(one.terminals.clone()));
            }
            assert_eq!(driver.capture(S2).unwrap().map(|capture| capture.id), Some(begun.id));
            assert_eq!(driver.capture(StreamId(0)), Ok(None));
            lib.standin_end_capture(0, S1.0);
            assert_eq!(driver.capture(S1), Ok(None));
            assert!(driver.dependencies(NodeId(1)).is_err());
        });
    }

    #[test]
    fn implicit_and_invalidated_captures_are_reported() {
        with_standin(&[], |lib| {
            let driver = device(0);
            for answer in [1, 2] {
                lib.standin_odd_capture(0, answer);
                let told = Some(Capture { id: 0, terminals: vec![] });
                assert_eq!(driver.capture(StreamId(0)), Ok(told));
            }
            lib.standin_odd_capture(0, 0);
            assert_eq!(driver.capture(StreamId(0)), Ok(None));
        });
    }

    // ---- the engine ----

    fn engine(policy: Policy) -> Engine<CudaDriver> {
        let mut options = Options::default();
        options.ask_for(policy);
        Engine::with_config(device(0), EngineConfig { options, ..EngineConfig::default() })
    }

    #[test]
    fn the_engine_runs_on_the_standin() {
        with_standin(&[], |lib| {
            for policy in Policy::ALL {
                let engine = engine(policy);
                let mut churn = Churn::new(&engine, 200);
                for _ in 0..2000 {
                    churn.pair();
                }
                engine.check_invariants().unwrap();
                assert_eq!(lib.standin_held(0), engine.stats().reserved_bytes.all.current);
                for segment in engine.snapshot().segments {
                    for block in segment.blocks {
                        let _ = engine.free(block.address);
                    }
                }
                engine.empty_cache().unwrap();
                assert_eq!(lib.standin_held(0), 0);
            }
        });
    }

    /// Allocates blocks on two streams, some used by a third, destroys one stream, and finally
    /// requests too much.
    fn program(lib: &Lib, engine: &Engine<CudaDriver>) {
        let mut live = Vec::new();
        for round in 0..6_u64 {
            for stream in [S1, S2] {
                let bytes = (1 + round * 7) * MIB;
                live.extend(engine.alloc(bytes, stream));
                live.extend(engine.alloc(1000, stream));
            }
            let used = live.swap_remove(0);
            let by = StreamId(0x3000 + round);
            lib.standin_launch(0, by.0);
            let _ = engine.record_stream(used, by);
            if round == 3 {
                lib.standin_destroy_stream(by.0);
            }
            free(engine, used);
            lib.standin_finish(0, by.0);
        }
        let _ = engine.empty_cache();
        let _ = engine.alloc(1000 * MIB, S1);
        for address in live {
            free(engine, address);
        }
        let _ = engine.process_events();
    }

    /// Frees a block. If CUDA fails, the block is free as soon as CUDA works again.
    fn free(engine: &Engine<CudaDriver>, address: u64) {
        match engine.free(address) {
            Ok(()) | Err(AddressError::Driver { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }

    fn fail_every_call(lib: &Lib, policy: Policy, code: i32) {
        let count = || lib.standin_calls(std::ptr::null());
        let mut nth = 0;
        loop {
            nth += 1;
            let engine = engine(policy);
            let before = count();
            lib.standin_fail(nth, code);
            program(lib, &engine);
            let made = count() - before;
            lib.standin_fail(0, 0);
            engine.check_invariants().unwrap_or_else(|v| panic!("{policy:?}, call {nth}: {v}"));
            lib.standin_finish_all();
            engine.empty_cache().expect("CUDA works again");
            engine.check_invariants().unwrap_or_else(|v| panic!("{policy:?}, call {nth}: {v}"));
            assert_eq!(lib.standin_held(0), 0, "{policy:?}, call {nth}: memory is lost");
            if nth > made {
                break;
            }
        }
        assert!(nth > 100, "{nth} calls failed");
    }

    #[test]
    fn any_call_may_fail() {
        with_standin(&[], |lib| {
            for policy in Policy::ALL {
                for code in [999, 2, 400] {
                    fail_every_call(lib, policy, code);
                }
            }
        });
    }
}
