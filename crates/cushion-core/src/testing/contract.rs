//! The driver's contract as a suite of checks, for any driver: the simulated device, and a real GPU.
//!
//! It keeps to what every driver promises. It uses the default stream only, asks for little memory,
//! and allows that a driver rounds sizes and that other tenants move a little memory meanwhile. Each
//! check gives back all it took, unless it panics.

use crate::base::size::{GIB, MIB, MIN_BLOCK};
use crate::driver::{Driver, DriverResult, Fault, PageHandle, StreamId};

/// How much the checks hold at most: the device needs this much free.
pub const NEEDED: u64 = 256 * MIB;

/// One piece of memory: much more than any driver rounds up by.
const PIECE: u64 = 64 * MIB;
/// How far the figure of free memory may be off.
const SLACK: u64 = PIECE / 4;

const STREAM: StreamId = StreamId(0);

/// CUDA's `CUDA_ERROR_NOT_SUPPORTED`.
const NOT_SUPPORTED: Fault = Fault::Failed(801);

/// Every check that makes legal calls only, and so also passes under
/// [`CheckedDriver`](crate::CheckedDriver).
///
/// # Panics
///
/// If the driver breaks its contract. The same holds for every check here.
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

/// The properties are sane, do not change, and agree with what the device reports.
pub fn check_properties(driver: &impl Driver) {
    let properties = driver.properties();
    assert_eq!(properties, driver.properties(), "properties do not change");
    assert!(properties.granularity.is_power_of_two(), "{properties:?}");
    assert!(properties.granularity >= MIN_BLOCK && properties.granularity <= PIECE / 4);
    let info = driver.memory_info().expect("a device that reports its memory");
    assert_eq!(info.total, properties.total, "one size of the device");
    assert!(info.free <= info.total, "{info:?}");
    assert!(info.free >= NEEDED, "too little memory is free for the checks: {info:?}");
}

/// Plain allocations are aligned, apart from each other, and come back.
pub fn check_plain_memory(driver: &impl Driver) {
    let before = free_now(driver);
    let sizes = [512, MIB, 2 * MIB + 512, PIECE];
    let mut taken: Vec<(u64, u64)> = Vec::new();
    for bytes in sizes {
        let address = driver.alloc(bytes).expect("memory that is free");
        assert!(address != 0 && address.is_multiple_of(MIN_BLOCK), "{address:#x}");
        for &(other, size) in &taken {
            assert!(
                address + bytes <= other || other + size <= address,
                "{address:#x}+{bytes} and {other:#x}+{size} share bytes"
            );
        }
        taken.push((address, bytes));
    }
    assert_fell(driver, before, PIECE, "alloc");
    for (address, _) in taken {
        driver.free(address).expect("what was allocated");
    }
    assert_back(driver, before, "free");
}

/// Pages are created, put behind a range, made usable, taken away and released. Only creating and
/// releasing them moves memory.
pub fn check_pages(driver: &impl Driver) {
    let before = free_now(driver);
    let bytes = PIECE / 4;
    let range = reserve(driver, 6 * bytes);
    assert_back(driver, before, "reserve");
    let pages: Vec<PageHandle> = (0..4).map(|_| create(driver, bytes)).collect();
    assert_fell(driver, before, PIECE, "create");
    for (index, &page) in (0..).zip(&pages) {
        driver.map(range + index * bytes, bytes, page).expect("an empty place");
    }
    driver.set_access(range, 4 * bytes).expect("a range of mapped pages");
    // One page out of the middle, then the rest, of which two in one call.
    driver.unmap(range + bytes, bytes).expect("one whole page");
    driver.unmap(range, bytes).expect("one whole page");
    driver.unmap(range + 2 * bytes, 2 * bytes).expect("two whole pages");
    assert_fell(driver, before, PIECE, "unmap does not give pages back");
    for page in pages {
        driver.release(page).expect("a page that is mapped nowhere");
    }
    driver.unreserve(range, 6 * bytes).expect("an empty range");
    assert_back(driver, before, "release");
}

/// A page that was unmapped can be mapped elsewhere, and its place be filled with another.
pub fn check_moved_page(driver: &impl Driver) {
    let bytes = driver.properties().granularity;
    let range = reserve(driver, 4 * bytes);
    let (one, two) = (create(driver, bytes), create(driver, bytes));
    let map = |at, page| {
        driver.map(at, bytes, page).expect("an empty place");
        driver.set_access(at, bytes).expect("a mapped page");
    };
    map(range, one);
    driver.unmap(range, bytes).expect("a mapped page");
    map(range + 2 * bytes, one);
    map(range, two);
    for at in [range, range + 2 * bytes] {
        driver.unmap(at, bytes).expect("a mapped page");
    }
    for page in [one, two] {
        driver.release(page).expect("a page that is mapped nowhere");
    }
    driver.unreserve(range, 4 * bytes).expect("an empty range");
}

/// One page may be behind two addresses at once, in one range or in two, and counts once.
pub fn check_shared_page(driver: &impl Driver) {
    let before = free_now(driver);
    let ranges = [reserve(driver, 2 * PIECE), reserve(driver, PIECE)];
    let page = create(driver, PIECE);
    let addresses = [ranges[0], ranges[0] + PIECE, ranges[1]];
    for at in addresses {
        driver.map(at, PIECE, page).expect("a page may be mapped several times");
        driver.set_access(at, PIECE).expect("a mapped page");
    }
    let fell = before.saturating_sub(free_now(driver));
    assert!(fell <= PIECE + SLACK, "one page counts {fell} bytes");
    // The others stay when one goes.
    driver.unmap(addresses[1], PIECE).expect("a mapped page");
    driver.map(addresses[1], PIECE, page).expect("an empty place");
    for at in addresses {
        driver.unmap(at, PIECE).expect("a mapped page");
    }
    driver.release(page).expect("a page that is mapped nowhere");
    for (range, bytes) in ranges.into_iter().zip([2 * PIECE, PIECE]) {
        driver.unreserve(range, bytes).expect("an empty range");
    }
    assert_back(driver, before, "release");
}

/// A page in host memory is put behind a range as others are, and beside them, and takes nothing of the
/// device's memory.
/// False, and nothing was checked, where the driver says that the device cannot use them.
pub fn check_host_pages(driver: &impl Driver) -> bool {
    let before = free_now(driver);
    // Twice what the figure of free memory may be off.
    let bytes = PIECE / 2;
    let page = match driver.create_host(bytes) {
        Ok(page) => page,
        Err(refused) => {
            assert_eq!(refused.fault, NOT_SUPPORTED, "{refused}");
            return false;
        }
    };
    let range = reserve(driver, 2 * bytes);
    driver.map(range, bytes, page).expect("an empty place");
    driver.set_access(range, bytes).expect("a mapped page");
    assert_back(driver, before, "a page in host memory");
    driver.unmap(range, bytes).expect("a mapped page");
    // With one of the device's in front of it, in one call for both.
    let unit = driver.properties().granularity;
    let other = create(driver, unit);
    driver.map(range, unit, other).expect("an empty place");
    driver.map(range + unit, bytes, page).expect("an empty place");
    driver.set_access(range, unit + bytes).expect("two mapped pages");
    driver.unmap(range, unit + bytes).expect("two mapped pages");
    for page in [page, other] {
        driver.release(page).expect("a page that is mapped nowhere");
    }
    driver.unreserve(range, 2 * bytes).expect("an empty range");
    assert_back(driver, before, "release");
    true
}

/// More than the device has is refused as a shortage, and the refusal changes nothing.
pub fn check_shortage(driver: &impl Driver) {
    let before = free_now(driver);
    let absurd = driver.properties().total.next_multiple_of(GIB) * 2;
    let refused = driver.alloc(absurd).expect_err("more than the device");
    assert_eq!(refused.fault, Fault::OutOfMemory, "{refused}");
    let refused = driver.create(absurd).expect_err("more than the device");
    assert_eq!(refused.fault, Fault::OutOfMemory, "{refused}");
    assert_back(driver, before, "a refusal");
    let address = driver.alloc(PIECE).expect("memory that is free after a refusal");
    driver.free(address).expect("what was allocated");
}

/// Events are done once their stream is, can be used again, and need no work to wait for. An idle
/// stream is not being captured.
pub fn check_events(driver: &impl Driver) {
    assert_eq!(driver.capture(STREAM), Ok(None), "nobody captures the default stream");
    let events = [(); 2].map(|()| driver.event_create().expect("a new event"));
    assert_ne!(events[0], events[1]);
    for event in events {
        assert_eq!(driver.event_query(event), Ok(true), "an event without a mark");
        for _ in 0..3 {
            driver.event_record(event, STREAM).expect("a known event");
            driver.stream_synchronize(STREAM).expect("a stream");
            assert_eq!(driver.event_query(event), Ok(true), "the stream was waited for");
            driver.event_record(event, STREAM).expect("a known event");
            driver.event_synchronize(event).expect("a known event");
            assert_eq!(driver.event_query(event), Ok(true), "the event was waited for");
        }
    }
    for event in events {
        driver.event_destroy(event).expect("a known event");
    }
}

/// Illegal calls that every driver refuses. A refusal is no shortage, and changes nothing. Not for a
/// [`CheckedDriver`](crate::CheckedDriver), which panics at them.
pub fn check_refusals(driver: &impl Driver) {
    let before = free_now(driver);
    let unit = driver.properties().granularity;
    let bytes = 2 * unit;
    let range = reserve(driver, 2 * bytes);
    let (page, other) = (create(driver, bytes), create(driver, bytes));
    assert_refused(driver.set_access(range, bytes), "access to what is not mapped");
    driver.map(range, bytes, page).expect("an empty place");
    assert_refused(driver.map(range, bytes, other), "map over a mapped range");
    assert_refused(driver.map(range + unit, bytes, other), "map over half a mapped range");
    assert_refused(driver.unmap(range, unit), "unmap of half a page");
    // What was there still works, and so does what was refused, where it is legal.
    driver.map(range + bytes, bytes, other).expect("an empty place");
    driver.set_access(range, 2 * bytes).expect("two mapped pages");
    driver.unmap(range, 2 * bytes).expect("two mapped pages");
    for page in [page, other] {
        driver.release(page).expect("a page that is mapped nowhere");
    }
    driver.unreserve(range, 2 * bytes).expect("an empty range");

    let address = driver.alloc(PIECE).expect("memory that is free");
    driver.free(address).expect("what was allocated");
    assert_refused(driver.free(address), "free of what is free");
    assert_back(driver, before, "refusals");
}

fn reserve(driver: &impl Driver, bytes: u64) -> u64 {
    let address = driver.reserve(bytes).expect("addresses");
    let unit = driver.properties().granularity;
    assert!(address != 0 && address.is_multiple_of(unit), "{address:#x} is not a place for a page");
    address
}

fn create(driver: &impl Driver, bytes: u64) -> PageHandle {
    driver.create(bytes).expect("memory that is free")
}

fn free_now(driver: &impl Driver) -> u64 {
    driver.memory_info().expect("a device that reports its memory").free
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
        Err(error) => assert!(!error.is_out_of_memory(), "{what} is no shortage: {error}"),
    }
}
