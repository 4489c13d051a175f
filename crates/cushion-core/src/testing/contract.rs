//! The driver's contract as a suite of checks for any driver: the simulated device and a real GPU.
//!
//! The suite checks only what every driver promises. It uses only the default stream and little
//! memory. It allows a driver to round sizes, and other tenants to allocate a little memory
//! meanwhile. Each check frees everything that it allocated, unless it panics.

use crate::base::size::{GIB, MIB, MIN_BLOCK};
use crate::driver::{Driver, DriverResult, Fault, PageHandle, StreamId};

/// The most bytes that the checks hold: the device needs this much free memory.
pub const NEEDED: u64 = 256 * MIB;

/// The size of most allocations: much more than any driver rounds up by.
const CHUNK: u64 = 64 * MIB;
/// The tolerance for the reported free memory.
const SLACK: u64 = CHUNK / 4;

const STREAM: StreamId = StreamId(0);

/// CUDA's `CUDA_ERROR_NOT_SUPPORTED`.
const NOT_SUPPORTED: Fault = Fault::Failed(801);

/// Runs every check that makes only legal calls. These also pass under
/// [`CheckedDriver`](crate::CheckedDriver).
///
/// # Panics
///
/// If the driver breaks its contract. This applies to every check in this module.
pub fn check_driver(driver: &impl Driver) {
    check_properties(driver);
    check_plain_memory(driver);
    check_pages(driver);
    check_moved_page(driver);
    check_shared_page(driver);
    check_host_pages(driver);
    check_shortage(driver);
    check_events(driver);
}

/// Checks that the properties are valid, constant, and agree with the reported memory.
pub fn check_properties(driver: &impl Driver) {
    let properties = driver.properties();
    assert_eq!(properties, driver.properties(), "the properties changed");
    assert!(properties.granularity.is_power_of_two(), "{properties:?}");
    assert!(properties.granularity >= MIN_BLOCK && properties.granularity <= CHUNK / 4);
    let info = driver.memory_info().expect("the device reports its memory");
    assert_eq!(info.total, properties.total, "the device reports two sizes");
    assert!(info.free <= info.total, "{info:?}");
    assert!(info.free >= NEEDED, "too little memory is free for the checks: {info:?}");
}

/// Checks that plain allocations are aligned, do not overlap, and can be freed.
pub fn check_plain_memory(driver: &impl Driver) {
    let before = free_now(driver);
    let sizes = [512, MIB, 2 * MIB + 512, CHUNK];
    let mut taken: Vec<(u64, u64)> = Vec::new();
    for bytes in sizes {
        let address = driver.alloc(bytes).expect("memory is free");
        assert!(address != 0 && address.is_multiple_of(MIN_BLOCK), "{address:#x}");
        for &(other, size) in &taken {
            assert!(
                address + bytes <= other || other + size <= address,
                "{address:#x}+{bytes} and {other:#x}+{size} share bytes"
            );
        }
        taken.push((address, bytes));
    }
    assert_fell(driver, before, CHUNK, "alloc");
    for (address, _) in taken {
        driver.free(address).expect("the memory is allocated");
    }
    assert_back(driver, before, "free");
}

/// Checks that pages can be created, mapped, made accessible, unmapped and released, and that only
/// creation and release change the free memory.
pub fn check_pages(driver: &impl Driver) {
    let before = free_now(driver);
    let bytes = CHUNK / 4;
    let range = reserve(driver, 6 * bytes);
    assert_back(driver, before, "reserve");
    let pages: Vec<PageHandle> = (0..4).map(|_| create(driver, bytes)).collect();
    assert_fell(driver, before, CHUNK, "create");
    for (index, &page) in (0..).zip(&pages) {
        driver.map(range + index * bytes, bytes, page).expect("the range is not mapped");
    }
    driver.set_access(range, 4 * bytes).expect("all pages are mapped");
    // First one page from the middle, then the others, two of them in one call.
    driver.unmap(range + bytes, bytes).expect("a whole page is mapped");
    driver.unmap(range, bytes).expect("a whole page is mapped");
    driver.unmap(range + 2 * bytes, 2 * bytes).expect("two whole pages are mapped");
    assert_fell(driver, before, CHUNK, "unmap");
    for page in pages {
        driver.release(page).expect("the page is not mapped");
    }
    driver.unreserve(range, 6 * bytes).expect("the range is empty");
    assert_back(driver, before, "release");
}

/// Checks that an unmapped page can be mapped at another address, and that another page can be
/// mapped at its old address.
pub fn check_moved_page(driver: &impl Driver) {
    let bytes = driver.properties().granularity;
    let range = reserve(driver, 4 * bytes);
    let (one, two) = (create(driver, bytes), create(driver, bytes));
    let map = |at, page| {
        driver.map(at, bytes, page).expect("the range is not mapped");
        driver.set_access(at, bytes).expect("the page is mapped");
    };
    map(range, one);
    driver.unmap(range, bytes).expect("the page is mapped");
    map(range + 2 * bytes, one);
    map(range, two);
    for at in [range, range + 2 * bytes] {
        driver.unmap(at, bytes).expect("the page is mapped");
    }
    for page in [one, two] {
        driver.release(page).expect("the page is not mapped");
    }
    driver.unreserve(range, 4 * bytes).expect("the range is empty");
}

/// Checks that one page can be mapped at several addresses, in one range or in two, and that its
/// memory counts once.
pub fn check_shared_page(driver: &impl Driver) {
    let before = free_now(driver);
    let ranges = [reserve(driver, 2 * CHUNK), reserve(driver, CHUNK)];
    let page = create(driver, CHUNK);
    let addresses = [ranges[0], ranges[0] + CHUNK, ranges[1]];
    for at in addresses {
        driver.map(at, CHUNK, page).expect("a page may be mapped several times");
        driver.set_access(at, CHUNK).expect("the page is mapped");
    }
    let fell = before.saturating_sub(free_now(driver));
    assert!(fell <= CHUNK + SLACK, "one page counts {fell} bytes");
    // The other mappings stay when one is unmapped.
    driver.unmap(addresses[1], CHUNK).expect("the page is mapped");
    driver.map(addresses[1], CHUNK, page).expect("the range is not mapped");
    for at in addresses {
        driver.unmap(at, CHUNK).expect("the page is mapped");
    }
    driver.release(page).expect("the page is not mapped");
    for (range, bytes) in ranges.into_iter().zip([2 * CHUNK, CHUNK]) {
        driver.unreserve(range, bytes).expect("the range is empty");
    }
    assert_back(driver, before, "release");
}

/// Checks that a page in host memory can be mapped like any page, also next to a device page, and
/// that it uses no device memory. Returns false, and checks nothing, if the driver reports that the
/// device does not support such pages.
pub fn check_host_pages(driver: &impl Driver) -> bool {
    let before = free_now(driver);
    // Twice the tolerance.
    let bytes = CHUNK / 2;
    let page = match driver.create_host(bytes) {
        Ok(page) => page,
        Err(refused) => {
            assert_eq!(refused.fault, NOT_SUPPORTED, "{refused}");
            return false;
        }
    };
    let range = reserve(driver, 2 * bytes);
    driver.map(range, bytes, page).expect("the range is not mapped");
    driver.set_access(range, bytes).expect("the page is mapped");
    assert_back(driver, before, "a page in host memory");
    driver.unmap(range, bytes).expect("the page is mapped");
    // A device page and the host page side by side, with one call for both.
    let unit = driver.properties().granularity;
    let other = create(driver, unit);
    driver.map(range, unit, other).expect("the range is not mapped");
    driver.map(range + unit, bytes, page).expect("the range is not mapped");
    driver.set_access(range, unit + bytes).expect("two pages are mapped");
    driver.unmap(range, unit + bytes).expect("two pages are mapped");
    for page in [page, other] {
        driver.release(page).expect("the page is not mapped");
    }
    driver.unreserve(range, 2 * bytes).expect("the range is empty");
    assert_back(driver, before, "release");
    true
}

/// Checks that a request for more memory than the device has fails with `OutOfMemory` and changes
/// nothing.
pub fn check_shortage(driver: &impl Driver) {
    let before = free_now(driver);
    let absurd = driver.properties().total.next_multiple_of(GIB) * 2;
    let refused = driver.alloc(absurd).expect_err("the device has less memory");
    assert_eq!(refused.fault, Fault::OutOfMemory, "{refused}");
    let refused = driver.create(absurd).expect_err("the device has less memory");
    assert_eq!(refused.fault, Fault::OutOfMemory, "{refused}");
    assert_back(driver, before, "a refusal");
    let address = driver.alloc(CHUNK).expect("memory is free after a refusal");
    driver.free(address).expect("the memory is allocated");
}

/// Checks that an event is done once the work of its stream is done, that it can be recorded again,
/// and that it needs no work. Checks that an idle stream is not being captured.
pub fn check_events(driver: &impl Driver) {
    assert_eq!(driver.capture(STREAM), Ok(None), "the default stream is not being captured");
    let events = [(); 2].map(|()| driver.event_create().expect("events can be created"));
    assert_ne!(events[0], events[1]);
    for event in events {
        assert_eq!(driver.event_query(event), Ok(true), "an event that was not recorded");
        for _ in 0..3 {
            driver.event_record(event, STREAM).expect("the event is known");
            driver.stream_synchronize(STREAM).expect("the stream exists");
            assert_eq!(driver.event_query(event), Ok(true), "the stream was waited for");
            driver.event_record(event, STREAM).expect("the event is known");
            driver.event_synchronize(event).expect("the event is known");
            assert_eq!(driver.event_query(event), Ok(true), "the event was waited for");
        }
    }
    for event in events {
        driver.event_destroy(event).expect("the event is known");
    }
}

/// Checks illegal calls that every driver refuses. The error is not `OutOfMemory`, and the call
/// changes nothing. Not for a [`CheckedDriver`](crate::CheckedDriver), which panics at illegal
/// calls.
pub fn check_refusals(driver: &impl Driver) {
    let before = free_now(driver);
    let unit = driver.properties().granularity;
    let bytes = 2 * unit;
    let range = reserve(driver, 2 * bytes);
    let (page, other) = (create(driver, bytes), create(driver, bytes));
    assert_refused(driver.set_access(range, bytes), "access to a range that is not mapped");
    driver.map(range, bytes, page).expect("the range is not mapped");
    assert_refused(driver.map(range, bytes, other), "map over a mapped range");
    assert_refused(driver.map(range + unit, bytes, other), "map over half a mapped range");
    assert_refused(driver.unmap(range, unit), "unmap of half a page");
    // The first mapping still works, and the refused page can be mapped where that is legal.
    driver.map(range + bytes, bytes, other).expect("the range is not mapped");
    driver.set_access(range, 2 * bytes).expect("two pages are mapped");
    driver.unmap(range, 2 * bytes).expect("two pages are mapped");
    for page in [page, other] {
        driver.release(page).expect("the page is not mapped");
    }
    driver.unreserve(range, 2 * bytes).expect("the range is empty");

    let address = driver.alloc(CHUNK).expect("memory is free");
    driver.free(address).expect("the memory is allocated");
    assert_refused(driver.free(address), "free of memory that is free");
    assert_back(driver, before, "refusals");
}

fn reserve(driver: &impl Driver, bytes: u64) -> u64 {
    let address = driver.reserve(bytes).expect("addresses are free");
    let unit = driver.properties().granularity;
    assert!(address != 0 && address.is_multiple_of(unit), "{address:#x} is not aligned for a page");
    address
}

fn create(driver: &impl Driver, bytes: u64) -> PageHandle {
    driver.create(bytes).expect("memory is free")
}

fn free_now(driver: &impl Driver) -> u64 {
    driver.memory_info().expect("the device reports its memory").free
}

fn assert_fell(driver: &impl Driver, before: u64, bytes: u64, what: &str) {
    let fell = before.saturating_sub(free_now(driver));
    assert!(
        fell + SLACK >= bytes,
        "{what}: {bytes} bytes are held, but free memory fell by {fell}"
    );
}

fn assert_back(driver: &impl Driver, before: u64, what: &str) {
    let now = free_now(driver);
    assert!(now + SLACK >= before, "{what}: {before} bytes were free, now {now}");
}

fn assert_refused(result: DriverResult<()>, what: &str) {
    match result {
        Ok(()) => panic!("{what} was not refused"),
        Err(error) => assert!(!error.is_out_of_memory(), "{what} reports a shortage: {error}"),
    }
}
