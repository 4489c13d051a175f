//! The allocator behind the entry points: what PyTorch asks, in terms of the engine.
//!
//! Failures are returned: `abi.rs` turns them into what C++ expects.

use std::sync::atomic::{AtomicI64, Ordering};

use cushion::core::{AddressError, AllocError, PoolId, StreamFilter, StreamId};
use cushion::{DeviceEngine, devices};

use crate::gil;
use crate::profiler::{self, Totals};
use crate::recorder::{self, Level, Noted};
use crate::refusal;
use crate::threads;
use crate::throw::Failure;

/// How many devices PyTorch counted.
static DEVICE_COUNT: AtomicI64 = AtomicI64::new(0);

/// How many devices PyTorch has.
pub(crate) fn device_count() -> usize {
    let told = usize::try_from(DEVICE_COUNT.load(Ordering::Relaxed)).unwrap_or(0);
    let used = devices().made().map(|(device, _)| device + 1).max().unwrap_or(0);
    told.max(used)
}

/// Memory for a tensor.
pub(crate) fn alloc(bytes: u64, device: i64, stream: StreamId) -> Result<u64, Failure> {
    alloc_for(bytes, device, stream, &recorder::note(Level::State))
}

/// As [`alloc`], with what is to be noted beside it.
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

/// A thread with Python's lock takes what can be had at once; before it waits for more it gives the lock up.
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

/// A tensor is gone. Called from destructors, so it cannot fail: an address that is not ours is left
/// alone, and a free whose event could not be recorded is completed by the engine later.
pub(crate) fn free(address: u64, device: i64) {
    let Some(engine) = devices().get(device) else { return };
    if address == 0 {
        return;
    }
    report(engine, address, device, -1);
    let noted = recorder::note(Level::All);
    let _ = engine.free_for(address, noted.tag());
}

/// Gives back what [`alloc_for`] gave on any device. An address that is not live is an error; a free whose event could
/// not be recorded is none, as above.
pub(crate) fn free_for(address: u64, noted: &Noted) -> Result<(), AddressError> {
    // In a child made by fork there is nothing to give back.
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

/// Tells the profiler, if it records, of an allocation (`sign` 1) or a free (-1).
fn report(engine: &DeviceEngine, address: u64, device: i64, sign: i64) {
    let Some(profiler) = profiler::recording() else { return };
    let Some((size, _)) = engine.size_of(address) else { return };
    let stats = engine.stats();
    let freed = if sign < 0 { size } else { 0 };
    let allocated = stats.allocated_bytes.all.current.saturating_sub(freed);
    let totals = Totals { allocated, reserved: stats.reserved_bytes.all.current };
    profiler.usage(address, sign * i64::try_from(size).unwrap_or(i64::MAX), device, totals);
}

/// Work on `stream` uses the allocation at `address`, which may be anybody's.
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

/// PyTorch starts.
pub(crate) fn init(count: i64) {
    threads::know();
    DEVICE_COUNT.fetch_max(count, Ordering::Relaxed);
}

/// Gives back what is cached, on every device.
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

/// Where the memory around an allocation begins, and its size.
pub(crate) fn base_of(address: u64) -> Option<(u64, u64)> {
    devices().made().find_map(|(_, engine)| engine.base_of(address))
}

/// Allocations of the streams that `filter` accepts go to `pool` from now on.
pub(crate) fn begin_pool(device: i64, pool: PoolId, filter: StreamFilter) -> Result<(), Failure> {
    engine(device)?.begin_allocate_to_pool(pool, filter).map_err(pool_failure)
}

/// Allocations go to `pool` no longer.
pub(crate) fn end_pool(device: i64, pool: PoolId) -> Result<(), Failure> {
    engine(device)?.end_allocate_to_pool(pool).map_err(pool_failure)
}

/// A use of `pool` is over. Called from destructors, so it cannot fail: a pool that is not there is not
/// used either.
pub(crate) fn release_pool(device: i64, pool: PoolId) {
    if let Some(engine) = devices().get(device) {
        let _ = engine.release_pool(pool);
    }
}

/// An error of the driver with the driver's own name for it.
pub(crate) fn explain(error: &AllocError) -> String {
    match error {
        AllocError::Driver(error) => match error.fault {
            cushion::core::driver::Fault::Failed(code) => match cushion::error_name(code) {
                Some(name) => format!("the CUDA driver's call {} failed with {name}", error.call),
                None => error.to_string(),
            },
            cushion::core::driver::Fault::OutOfMemory => error.to_string(),
        },
        other => other.to_string(),
    }
}

fn engine(device: i64) -> Result<&'static DeviceEngine, Failure> {
    devices().get_or_make(device).map_err(|error| refusal::no_device(device, &error))
}

fn pool_failure(error: cushion::core::PoolError) -> Failure {
    Failure::Other(format!("Cushion: {error}"))
}
