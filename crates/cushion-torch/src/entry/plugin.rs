//! The allocator behind the entry points: it passes PyTorch's calls to the engines.
//!
//! The functions return failures; `abi.rs` turns them into C++ exceptions.

use std::sync::atomic::{AtomicI64, Ordering};

use cushion::core::{AddressError, AllocError, PoolError, PoolId, StreamFilter, StreamId};
use cushion::{DeviceEngine, devices};

use crate::history::recorder::{self, Level, Noted};
use crate::python::gil;
use crate::pytorch::profiler::{self, Totals};
use crate::pytorch::threads;
use crate::pytorch::throw::Failure;
use crate::shortage::refusal;

/// The number of devices that PyTorch has reported.
static DEVICE_COUNT: AtomicI64 = AtomicI64::new(0);

/// Returns the number of devices: those that PyTorch reported, or those in use if there are more.
pub(crate) fn device_count() -> usize {
    let told = usize::try_from(DEVICE_COUNT.load(Ordering::Relaxed)).unwrap_or(0);
    let used = devices().made().map(|(device, _)| device + 1).max().unwrap_or(0);
    told.max(used)
}

/// Allocates memory for a tensor.
pub(crate) fn alloc(bytes: u64, device: i64, stream: StreamId) -> Result<u64, Failure> {
    alloc_for(bytes, device, stream, &recorder::note(Level::State))
}

/// Allocates memory as [`alloc`] does, with these notes.
pub(crate) fn alloc_for(
    bytes: u64,
    device: i64,
    stream: StreamId,
    noted: &Noted,
) -> Result<u64, Failure> {
    if bytes == 0 {
        return Ok(0);
    }
    let engine = engine(device)?;
    match serve(engine, bytes, stream, noted) {
        Ok(address) => {
            report(engine, address, device, 1);
            Ok(address)
        }
        Err(error) => Err(refusal::refused(device, &error)),
    }
}

/// Allocates. A thread that holds Python's lock first tries without waiting, and releases the lock
/// before it waits.
fn serve(
    engine: &DeviceEngine,
    bytes: u64,
    stream: StreamId,
    noted: &Noted,
) -> Result<u64, AllocError> {
    if !gil::is_held() {
        return engine.alloc_for(bytes, stream, noted.tag());
    }
    if let Some(address) = engine.alloc_at_once_for(bytes, stream, noted.tag())? {
        return Ok(address);
    }
    let _released = gil::release();
    engine.alloc_for(bytes, stream, noted.tag())
}

/// Frees the memory of a tensor.
///
/// Destructors call it, so it cannot fail: it ignores an address that is not Cushion's, and the
/// engine completes a free later if it cannot record the event now.
pub(crate) fn free(address: u64, device: i64) {
    let Some(engine) = devices().get(device) else { return };
    if address == 0 {
        return;
    }
    report(engine, address, device, -1);
    let noted = recorder::note(Level::All);
    let _ = engine.free_for(address, noted.tag());
}

/// Frees memory of [`alloc_for`] on any device. An address that is not live is an error; a free
/// whose event cannot be recorded now is not, as in [`free`].
pub(crate) fn free_for(address: u64, noted: &Noted) -> Result<(), AddressError> {
    // A child made by fork has no memory to free.
    if address == 0 || devices().is_abandoned() {
        return Ok(());
    }
    for (device, engine) in devices().made() {
        report(engine, address, i64::try_from(device).unwrap_or(i64::MAX), -1);
        match engine.free_for(address, noted.tag()) {
            Err(AddressError::Unknown { .. }) => {}
            _ => return Ok(()),
        }
    }
    Err(AddressError::Unknown { address })
}

/// Reports an allocation (`sign` 1) or a free (-1) to the profiler, if it records.
fn report(engine: &DeviceEngine, address: u64, device: i64, sign: i64) {
    let Some(profiler) = profiler::recording() else { return };
    let Some((size, _)) = engine.size_of(address) else { return };
    let stats = engine.stats();
    let freed = if sign < 0 { size } else { 0 };
    let allocated = stats.allocated_bytes.all.current.saturating_sub(freed);
    let totals = Totals { allocated, reserved: stats.reserved_bytes.all.current };
    profiler.usage(address, sign * i64::try_from(size).unwrap_or(i64::MAX), device, totals);
}

/// Records that work on `stream` uses the allocation at `address`. Ignores an address that is not
/// Cushion's.
pub(crate) fn record_stream(address: u64, stream: StreamId) -> Result<(), Failure> {
    for (_, engine) in devices().made() {
        match engine.record_stream(address, stream) {
            Ok(()) => return Ok(()),
            Err(AddressError::Unknown { .. }) => {}
            Err(error) => return Err(Failure::Other(format!("Cushion: {error}"))),
        }
    }
    Ok(())
}

/// Notes the number of devices, when PyTorch starts.
pub(crate) fn init(count: i64) {
    threads::know();
    DEVICE_COUNT.fetch_max(count, Ordering::Relaxed);
}

/// Releases cached memory on every device.
pub(crate) fn empty_cache() -> Result<(), Failure> {
    let _released = gil::release();
    for (device, engine) in devices().made() {
        engine.empty_cache().map_err(|error| {
            Failure::Other(format!("Cushion: empty_cache() on GPU {device}: {error}"))
        })?;
    }
    Ok(())
}

/// Limits this process to a fraction of a device.
pub(crate) fn set_memory_fraction(fraction: f64, device: i64) -> Result<(), Failure> {
    let set = engine(device)?.set_memory_fraction(fraction);
    set.map_err(|error| Failure::Other(format!("Cushion: {error}")))
}

/// Returns the start and the size of the memory around an allocation.
pub(crate) fn base_of(address: u64) -> Option<(u64, u64)> {
    devices().made().find_map(|(_, engine)| engine.base_of(address))
}

/// Sends later allocations of the streams that `filter` accepts to `pool`.
pub(crate) fn begin_pool(device: i64, pool: PoolId, filter: StreamFilter) -> Result<(), Failure> {
    engine(device)?.begin_allocate_to_pool(pool, filter).map_err(pool_failure)
}

/// Stops sending allocations to `pool`.
pub(crate) fn end_pool(device: i64, pool: PoolId) -> Result<(), Failure> {
    engine(device)?.end_allocate_to_pool(pool).map_err(pool_failure)
}

/// Ends one use of `pool`. Destructors call it, so it cannot fail: it ignores an unknown pool.
pub(crate) fn release_pool(device: i64, pool: PoolId) {
    if let Some(engine) = devices().get(device) {
        let _ = engine.release_pool(pool);
    }
}

fn engine(device: i64) -> Result<&'static DeviceEngine, Failure> {
    devices().get_or_make(device).map_err(|error| refusal::no_device(device, &error))
}

fn pool_failure(error: PoolError) -> Failure {
    Failure::Other(format!("Cushion: {error}"))
}
