//! The driver contract on a real device, and the engine over it. This is a program of its own, so
//! that it can be copied to a machine that has a GPU but no compiler. Without a GPU it reports that
//! and passes.

#![expect(clippy::print_stdout, reason = "a program that prints its results")]

mod support;

use std::process::ExitCode;
use std::sync::Arc;

use cushion_core::driver::PageHandle;
use cushion_core::size::MIB;
use cushion_core::testing::churn::Churn;
use cushion_core::testing::{RealClock, contract};
use cushion_core::{
    CheckedDriver, Driver, Engine, EngineConfig, Options, Outcome, Policy, Rung, Snapshot, StreamId,
};
use cushion_cuda::{CudaDriver, CudaError, GpuProcess, device_count, driver_version, name};

use support::Lib;

const PAGE: u64 = 2 * MIB;
/// Enough to keep the device busy for a while.
const WORK: u64 = 64 * MIB;

type Check = fn(&CudaDriver, &Lib);

fn main() -> ExitCode {
    let driver = match CudaDriver::new(0) {
        Ok(driver) => driver,
        Err(
            reason @ (CudaError::NoLibrary { .. }
            | CudaError::NoFunction { .. }
            | CudaError::NoDevice),
        ) => {
            println!("gpu_contract: SKIPPED: {reason}");
            return ExitCode::SUCCESS;
        }
        Err(error) => panic!("the GPU cannot be used: {error}"),
    };
    let (major, minor) = driver_version().expect("a version");
    println!(
        "gpu_contract: {} of {}, CUDA {major}.{minor}, {:?}",
        driver.device_name().expect("a name"),
        device_count().expect("devices"),
        driver.properties()
    );
    let lib = Lib::open();
    assert_eq!(lib.cuCtxSetCurrent(0), 0);

    let checks: [(&str, Check); 23] = [
        ("properties", |driver, _| contract::check_properties(driver)),
        ("plain memory", |driver, _| contract::check_plain_memory(driver)),
        ("pages", |driver, _| contract::check_pages(driver)),
        ("a moved page", |driver, _| contract::check_moved_page(driver)),
        ("a shared page", |driver, _| contract::check_shared_page(driver)),
        ("pages in host memory", |driver, _| {
            if !contract::check_host_pages(driver) {
                println!("gpu_contract: skipped: the device cannot use pages in host memory");
            }
        }),
        ("a shortage", |driver, _| contract::check_shortage(driver)),
        ("events", |driver, _| contract::check_events(driver)),
        ("refusals", |driver, _| contract::check_refusals(driver)),
        ("all of it, policed", |_, _| contract::check_driver(&CheckedDriver::new(device()))),
        ("all of it, on a thread without a context", |driver, _| {
            std::thread::scope(|scope| {
                scope.spawn(|| contract::check_driver(driver)).join().expect("no panic");
            });
        }),
        ("names of errors", |_, _| {
            assert_eq!(name(2).as_deref(), Some("CUDA_ERROR_OUT_OF_MEMORY"));
            assert_eq!(name(12345), None);
        }),
        ("mapped memory keeps its content", |driver, lib| {
            mapped_memory_holds(driver, lib, driver.create(PAGE).expect("memory"));
        }),
        ("mapped host memory keeps its content", |driver, lib| {
            // An earlier check covers whether the device has host pages.
            if let Ok(page) = driver.create_host(PAGE) {
                mapped_memory_holds(driver, lib, page);
            }
        }),
        ("a side stream", side_stream),
        ("a capture", capture),
        ("the engine, segments", |_, lib| engine_churns(lib, Policy::Segments)),
        ("the engine, expandable", |_, lib| engine_churns(lib, Policy::Expandable)),
        ("the engine, paged", |_, lib| engine_churns(lib, Policy::Paged)),
        ("a shortage survived, segments", |_, lib| engine_survives(lib, Policy::Segments)),
        ("a shortage survived, expandable", |_, lib| engine_survives(lib, Policy::Expandable)),
        ("a destroyed stream", destroyed_stream),
        ("other processes", other_processes),
    ];
    let mut failed = 0;
    for (what, check) in checks {
        let checked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            check(&driver, &lib);
            assert_eq!(lib.current(), 0, "a context was left behind");
        }));
        failed += u8::from(checked.is_err());
        println!("gpu_contract: {}: {what}", if checked.is_ok() { "ok" } else { "FAILED" });
    }
    println!("gpu_contract: {}", if failed == 0 { "PASSED" } else { "FAILED" });
    ExitCode::from(failed)
}

fn device() -> CudaDriver {
    CudaDriver::new(0).expect("the device")
}

/// Runs with the device's context current, as in a CUDA program.
fn in_context<T>(lib: &Lib, run: impl FnOnce() -> T) -> T {
    assert_eq!(lib.cuCtxSetCurrent(lib.primary(0)), 0);
    let result = run();
    assert_eq!(lib.cuCtxSetCurrent(0), 0);
    result
}

/// Checks a page of size [`PAGE`], and releases it.
fn mapped_memory_holds(driver: &CudaDriver, lib: &Lib, page: PageHandle) {
    let range = driver.reserve(4 * PAGE).expect("addresses");
    // The page is mapped at two addresses: data written at one is read at the other.
    for at in [range, range + 2 * PAGE] {
        driver.map(at, PAGE, page).expect("an empty place");
        driver.set_access(at, PAGE).expect("a mapped page");
    }
    let mut read = [0_u8; 4096];
    in_context(lib, || {
        let bytes = usize::try_from(PAGE).expect("a size");
        assert_eq!(lib.cuMemsetD8Async(range, 0xa5, bytes, 0), 0);
        assert_eq!(lib.cuMemcpyDtoH_v2(read.as_mut_ptr(), range + 2 * PAGE, read.len()), 0);
    });
    assert_eq!(read, [0xa5; 4096]);
    for at in [range, range + 2 * PAGE] {
        driver.unmap(at, PAGE).expect("a mapped page");
    }
    driver.release(page).expect("a page");
    driver.unreserve(range, 4 * PAGE).expect("an empty range");
}

/// Queues work on a stream that takes a moment.
fn launch(lib: &Lib, address: u64, stream: u64) {
    let bytes = usize::try_from(WORK).expect("a size");
    for value in 0..64 {
        assert_eq!(lib.cuMemsetD8Async(address, value, bytes, stream), 0);
    }
}

fn side_stream(driver: &CudaDriver, lib: &Lib) {
    let stream = in_context(lib, || lib.stream());
    let address = driver.alloc(WORK).expect("memory");
    let event = driver.event_create().expect("an event");
    for _ in 0..3 {
        in_context(lib, || launch(lib, address, stream));
        driver.event_record(event, StreamId(stream)).expect("a stream");
        driver.event_query(event).expect("done or not");
        driver.event_synchronize(event).expect("an event");
        assert_eq!(driver.event_query(event), Ok(true));
    }
    assert_eq!(driver.capture(StreamId(stream)), Ok(None));
    in_context(lib, || launch(lib, address, stream));
    driver.event_record(event, StreamId(stream)).expect("a stream");
    driver.stream_synchronize(StreamId(stream)).expect("a stream");
    assert_eq!(driver.event_query(event), Ok(true));
    driver.event_destroy(event).expect("an event");
    driver.free(address).expect("memory");
    assert_eq!(lib.cuStreamDestroy_v2(stream), 0);
}

/// Makes memory calls and queries while this thread captures in the strictest mode. The capture
/// must stay valid.
fn capture(driver: &CudaDriver, lib: &Lib) {
    const GLOBAL: u32 = 0;
    let stream = in_context(lib, || lib.stream());
    let target = driver.alloc(PAGE).expect("memory");
    let event = driver.event_create().expect("an event");
    driver.event_record(event, StreamId(0)).expect("a stream");
    let mut taken = Vec::new();
    in_context(lib, || {
        assert_eq!(lib.cuStreamBeginCapture_v2(stream, GLOBAL), 0);
        let begun = driver.capture(StreamId(stream)).expect("an answer").expect("a capture");
        assert!(begun.terminals.is_empty(), "{begun:?}");
        for value in 0..2 {
            assert_eq!(lib.cuMemsetD8Async(target, value, 4096, stream), 0);
            taken.push(driver.alloc(PAGE).expect("memory during a capture"));
        }
        let capture = driver.capture(StreamId(stream)).expect("an answer").expect("a capture");
        assert_eq!((capture.id, capture.terminals.len()), (begun.id, 1));
        let before = driver.dependencies(capture.terminals[0]).expect("a node");
        assert_eq!(before.len(), 1);
        assert_eq!(driver.dependencies(before[0]), Ok(vec![]));
        assert_eq!(driver.capture(StreamId(0)), Ok(None), "the default stream takes no part");
        let range = driver.reserve(PAGE).expect("addresses during a capture");
        let page = driver.create(PAGE).expect("a page during a capture");
        driver.map(range, PAGE, page).expect("mapping during a capture");
        driver.set_access(range, PAGE).expect("access during a capture");
        driver.unmap(range, PAGE).expect("unmapping during a capture");
        driver.release(page).expect("releasing during a capture");
        driver.unreserve(range, PAGE).expect("unreserving during a capture");
        let _ = driver.event_query(event).expect("a query in relaxed mode");
        let mut graph = 0;
        assert_eq!(lib.cuStreamEndCapture(stream, &raw mut graph), 0, "the capture was broken");
        assert_eq!(lib.cuGraphDestroy(graph), 0);
    });
    for address in taken.into_iter().chain([target]) {
        driver.free(address).expect("memory");
    }
    driver.event_destroy(event).expect("an event");
    assert_eq!(lib.cuStreamDestroy_v2(stream), 0);
}

fn engine(policy: Policy) -> Engine<CudaDriver> {
    let mut options = Options::default();
    options.ask_for(policy);
    Engine::with_config(device(), EngineConfig { options, ..EngineConfig::default() })
}

fn free_everything(engine: &Engine<CudaDriver>) {
    let Snapshot { segments, .. } = engine.snapshot();
    for block in segments.iter().flat_map(|segment| &segment.blocks) {
        // A free block is refused; this test need not tell the two apart.
        let _ = engine.free(block.address);
    }
    engine.empty_cache().expect("a working driver");
    engine.check_invariants().expect("a consistent engine");
    assert_eq!(engine.stats().reserved_bytes.all.current, 0);
}

fn engine_churns(lib: &Lib, policy: Policy) {
    let engine = engine(policy);
    let mut churn = Churn::new(&engine, 500);
    for _ in 0..20_000 {
        churn.pair();
    }
    engine.check_invariants().expect("a consistent engine");
    let stream = in_context(lib, || lib.stream());
    for _ in 0..20 {
        // Work on a second stream keeps a block pending until it is done.
        let address = engine.alloc(WORK, StreamId(0)).expect("memory");
        in_context(lib, || launch(lib, address, stream));
        engine.record_stream(address, StreamId(stream)).expect("a live block");
        engine.free(address).expect("a live block");
        churn.pair();
    }
    engine.check_invariants().expect("a consistent engine");
    let total = engine.driver().properties().total;
    let refused = engine.alloc(2 * total, StreamId(0));
    assert!(refused.is_err(), "twice the memory of the device was allocated");
    free_everything(&engine);
    assert_eq!(lib.cuStreamDestroy_v2(stream), 0);
}

/// Memory runs out while other streams use freed memory: the engine waits for just enough of it. A
/// request that still does not fit goes to host memory, if the device can use it.
fn engine_survives(lib: &Lib, policy: Policy) {
    let mut options = Options { spill_limit: 4 * WORK, ..Options::default() };
    options.ask_for(policy);
    let clock = Arc::new(RealClock::default());
    let config = EngineConfig { options, clock, ..EngineConfig::default() };
    let engine = Engine::with_config(device(), config);
    // Room for four blocks with either policy; `expandable` maps pages of 20 MiB.
    engine.set_memory_limit(Some(280 * MIB));
    let stream = in_context(lib, || lib.stream());
    let blocks: Vec<u64> =
        (0..4).map(|_| engine.alloc(WORK, StreamId(0)).expect("memory")).collect();
    for &address in &blocks[..2] {
        in_context(lib, || launch(lib, address, stream));
        engine.record_stream(address, StreamId(stream)).expect("a live block");
        engine.free(address).expect("a live block");
    }
    let again = engine.alloc(WORK, StreamId(0)).expect("memory that was waited for");
    let by = engine.receipts().last().map(|receipt| receipt.outcome);
    // A fast device may finish before the first poll.
    assert!(matches!(by, None | Some(Outcome::Survived(Rung::Poll | Rung::Events))), "{by:?}");
    assert_eq!(again, blocks[0], "the oldest first");

    let mut more = vec![again, engine.alloc(WORK, StreamId(0)).expect("memory")];
    match engine.alloc(WORK, StreamId(0)) {
        Ok(spilled) => {
            assert!(engine.is_spilled(spilled));
            let mut read = [0_u8; 4096];
            in_context(lib, || {
                let bytes = usize::try_from(WORK).expect("a size");
                assert_eq!(lib.cuMemsetD8Async(spilled, 0x5a, bytes, 0), 0);
                assert_eq!(lib.cuMemcpyDtoH_v2(read.as_mut_ptr(), spilled + 4096, read.len()), 0);
            });
            assert_eq!(read, [0x5a; 4096]);
            more.push(spilled);
        }
        Err(error) => {
            println!("gpu_contract: skipped: the device cannot use pages in host memory");
            assert!(engine.driver().create_host(PAGE).is_err(), "{error}");
        }
    }
    for address in more.into_iter().chain(blocks[2..].iter().copied()) {
        engine.free(address).expect("a live block");
    }
    engine.empty_cache().expect("a working driver");
    engine.check_invariants().expect("a consistent engine");
    let stats = engine.stats();
    assert_eq!((stats.reserved_bytes.all.current, stats.spilled_bytes.current), (0, 0));
    assert_eq!(lib.cuStreamDestroy_v2(stream), 0);
}

/// The other processes may be anything; this process is not among them if it is known.
fn other_processes(driver: &CudaDriver, _: &Lib) {
    let address = driver.alloc(WORK).expect("memory");
    let found = driver.processes();
    driver.free(address).expect("memory");
    println!("gpu_contract: {found:?}");
    // An impossible size was read from the wrong place.
    let total = driver.properties().total;
    for GpuProcess { pid, bytes, .. } in found.all {
        assert_ne!(pid, std::process::id());
        assert!(bytes.is_none_or(|bytes| bytes <= total), "process {pid}: {bytes:?}");
    }
}

/// A stream may be destroyed while blocks wait for its work, and while it owns free memory.
fn destroyed_stream(_: &CudaDriver, lib: &Lib) {
    for policy in Policy::ALL {
        for _ in 0..20 {
            let stream = in_context(lib, || lib.stream());
            let engine = engine(policy);
            let used = engine.alloc(WORK, StreamId(0)).expect("memory");
            let owned = engine.alloc(WORK, StreamId(stream)).expect("memory");
            in_context(lib, || launch(lib, used, stream));
            engine.record_stream(used, StreamId(stream)).expect("a live block");
            engine.free(used).expect("a live block");
            engine.free(owned).expect("a live block");
            assert_eq!(lib.cuStreamDestroy_v2(stream), 0);
            engine.empty_cache().expect("a working driver");
            let stats = engine.stats();
            assert_eq!(stats.active_bytes.all.current, 0, "a block stays pending");
            assert_eq!(stats.reserved_bytes.all.current, 0, "memory is lost with its stream");
        }
    }
}
