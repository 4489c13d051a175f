//! One type for every device: a GPU, or one that is simulated in memory.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cushion_core::driver::{
    Call, Capture, DriverResult, EventId, MemoryInfo, NodeId, PageHandle, Properties, SimMemory,
};
use cushion_core::{Driver, DriverError, Faults, Injection, SimConfig, SimDriver, StreamId};
use cushion_cuda::{CudaDriver, CudaError, GpuProcesses};

use crate::receipts::ReceiptLog;

/// A device behind the engine's [`Driver`]: a GPU, or one in memory. Which one it is matters where memory is got from
/// the device; the engine serves most allocations without asking.
#[derive(Debug)]
pub struct DeviceDriver {
    kind: Kind,
    /// Streams made here that nobody uses now. The engine knows streams by their handles, and may ask CUDA about one
    /// long after its last use: so none is destroyed before the device goes.
    idle: Mutex<Vec<StreamId>>,
    /// Streams of other makers that were used here, kept for the same reason.
    kept: Mutex<BTreeMap<StreamId, Arc<dyn Any + Send + Sync>>>,
    /// The last of them: most programs use one stream many times over.
    last_kept: AtomicU64,
    /// Calls that are made to fail, to test how a program takes it.
    faults: Faults,
    /// Whether any may be.
    has_faults: AtomicBool,
    /// Where the device's receipts go.
    receipts: Arc<ReceiptLog>,
}

#[derive(Debug)]
enum Kind {
    Cuda(Box<CudaDriver>),
    Simulated(Box<Simulated>),
}

/// A device in memory. Nobody can follow its addresses, but what a buffer holds can be written and read.
#[derive(Debug)]
struct Simulated {
    driver: SimDriver,
    memory: SimMemory,
    streams: AtomicU64,
}

/// Streams of simulated devices are multiples of this: CUDA has a meaning for some small numbers.
const STREAM_STEP: u64 = 16;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl DeviceDriver {
    /// The GPU with this index.
    pub fn cuda(index: u32) -> Result<Self, CudaError> {
        Ok(Self::of(Kind::Cuda(Box::new(CudaDriver::new(index)?))))
    }

    /// A simulated device of `capacity` bytes.
    #[must_use]
    pub fn simulated(device: u32, capacity: u64) -> Self {
        let config = SimConfig { device, ..SimConfig::with_capacity(capacity) };
        Self::of(Kind::Simulated(Box::new(Simulated {
            driver: SimDriver::new(config),
            memory: SimMemory::default(),
            streams: AtomicU64::new(0),
        })))
    }

    fn of(kind: Kind) -> Self {
        // The default stream needs no keeping.
        let last_kept = AtomicU64::new(0);
        Self {
            kind,
            idle: Mutex::default(),
            kept: Mutex::default(),
            last_kept,
            faults: Faults::default(),
            has_faults: AtomicBool::new(false),
            receipts: Arc::default(),
        }
    }

    /// Whether there is no GPU behind it.
    #[must_use]
    pub fn is_simulated(&self) -> bool {
        self.simulator().is_some()
    }

    /// The simulator, if it is one: to queue and finish work, and to make calls fail.
    #[must_use]
    pub fn simulator(&self) -> Option<&SimDriver> {
        match &self.kind {
            Kind::Cuda(_) => None,
            Kind::Simulated(device) => Some(&device.driver),
        }
    }

    /// Which other processes hold memory of the GPU, as [`CudaDriver::processes`] tells; nobody shares a simulated
    /// device.
    #[must_use]
    pub fn processes(&self) -> GpuProcesses {
        match &self.kind {
            Kind::Cuda(driver) => driver.processes(),
            Kind::Simulated(_) => GpuProcesses::default(),
        }
    }

    pub(crate) fn receipt_log(&self) -> &Arc<ReceiptLog> {
        &self.receipts
    }

    // ---- made-up failures ----

    /// Makes calls fail as the rules for the driver say, in the place of those before; `None` for none.
    pub(crate) fn inject(&self, injection: Option<&Injection>) {
        self.faults.replace(injection.map(Injection::driver_faults).unwrap_or_default());
        self.has_faults.store(injection.is_some(), Ordering::Relaxed);
    }

    /// The failure that strikes the method of this name, if one does.
    #[cold]
    fn strike(&self, method: &str) -> DriverResult<()> {
        let struck = call_of(method).and_then(|call| Some((call, self.faults.strike(call)?)));
        struck.map_or(Ok(()), |(call, fault)| Err(DriverError { call, fault }))
    }

    // ---- streams ----

    /// A stream for somebody's use, until [`stream_done`](Self::stream_done).
    pub(crate) fn stream(&self) -> Result<StreamId, CudaError> {
        if let Some(stream) = lock(&self.idle).pop() {
            return Ok(stream);
        }
        match &self.kind {
            Kind::Cuda(driver) => driver.stream_create(),
            Kind::Simulated(device) => {
                let number = device.streams.fetch_add(1, Ordering::Relaxed) + 1;
                Ok(StreamId(number * STREAM_STEP))
            }
        }
    }

    /// Nobody uses a stream of [`stream`](Self::stream) any more. Its work goes on.
    pub(crate) fn stream_done(&self, stream: StreamId) {
        lock(&self.idle).push(stream);
    }

    /// Keeps what owns a stream, if anything does, for as long as the device.
    pub(crate) fn keep(
        &self,
        stream: StreamId,
        owner: impl FnOnce() -> Option<Arc<dyn Any + Send + Sync>>,
    ) {
        if self.last_kept.load(Ordering::Relaxed) == stream.0 {
            return;
        }
        if let Some(owner) = owner() {
            lock(&self.kept).entry(stream).or_insert(owner);
            self.last_kept.store(stream.0, Ordering::Relaxed);
        }
    }

    pub(crate) fn stream_wait(&self, stream: StreamId) -> Result<(), CudaError> {
        match &self.kind {
            Kind::Cuda(driver) => driver.stream_wait(stream),
            Kind::Simulated(device) => {
                device.driver.finish(stream);
                Ok(())
            }
        }
    }

    // ---- what is in memory ----

    /// The memory is about to be nobody's.
    pub(crate) fn forget(&self, address: u64, bytes: usize) {
        if let Kind::Simulated(device) = &self.kind {
            device.memory.forget(address, bytes);
        }
    }

    // Each of these passes on what it asks of its caller.

    /// # Safety
    ///
    /// As [`CudaDriver::write`] asks.
    pub(crate) unsafe fn write(
        &self,
        to: u64,
        bytes: &[u8],
        stream: StreamId,
    ) -> Result<(), CudaError> {
        match &self.kind {
            // SAFETY: as the caller promises.
            Kind::Cuda(driver) => unsafe { driver.write(to, bytes, stream) },
            Kind::Simulated(device) => {
                device.memory.write(to, bytes);
                Ok(())
            }
        }
    }

    /// # Safety
    ///
    /// As [`CudaDriver::read`] asks.
    pub(crate) unsafe fn read(
        &self,
        from: u64,
        bytes: &mut [u8],
        stream: StreamId,
    ) -> Result<(), CudaError> {
        match &self.kind {
            // SAFETY: as the caller promises.
            Kind::Cuda(driver) => unsafe { driver.read(from, bytes, stream) },
            Kind::Simulated(device) => {
                device.memory.read(from, bytes);
                Ok(())
            }
        }
    }

    /// # Safety
    ///
    /// As [`CudaDriver::copy`] asks.
    pub(crate) unsafe fn copy(
        &self,
        from: u64,
        to: u64,
        bytes: usize,
        stream: StreamId,
    ) -> Result<(), CudaError> {
        match &self.kind {
            // SAFETY: as the caller promises.
            Kind::Cuda(driver) => unsafe { driver.copy(from, to, bytes, stream) },
            Kind::Simulated(device) => {
                device.memory.copy(from, to, bytes);
                Ok(())
            }
        }
    }

    /// # Safety
    ///
    /// As [`CudaDriver::fill`] asks.
    pub(crate) unsafe fn fill(
        &self,
        to: u64,
        bytes: usize,
        value: u8,
        stream: StreamId,
    ) -> Result<(), CudaError> {
        match &self.kind {
            // SAFETY: as the caller promises.
            Kind::Cuda(driver) => unsafe { driver.fill(to, bytes, value, stream) },
            Kind::Simulated(device) => {
                device.memory.fill(to, bytes, value);
                Ok(())
            }
        }
    }
}

/// The call that a method of [`Driver`] makes.
fn call_of(method: &str) -> Option<Call> {
    let name = method.replace('_', "");
    Call::ALL.into_iter().find(|call| call.to_string().eq_ignore_ascii_case(&name))
}

/// Writes each method once for all kinds of device. All but the first may be made to fail.
macro_rules! forward_driver {
    (
        properties() -> Properties;
        $($name:ident($($argument:ident: $type:ty),*) -> $result:ty;)*
    ) => {
        impl Driver for DeviceDriver {
            fn properties(&self) -> Properties {
                match &self.kind {
                    Kind::Cuda(driver) => driver.properties(),
                    Kind::Simulated(device) => device.driver.properties(),
                }
            }

            $(fn $name(&self, $($argument: $type),*) -> $result {
                if self.has_faults.load(Ordering::Relaxed) {
                    self.strike(stringify!($name))?;
                }
                match &self.kind {
                    Kind::Cuda(driver) => driver.$name($($argument),*),
                    Kind::Simulated(device) => device.driver.$name($($argument),*),
                }
            })*
        }

        #[cfg(test)]
        const METHODS: &[&str] = &[$(stringify!($name)),*];
    };
}

cushion_core::driver_methods!(forward_driver);

impl Drop for DeviceDriver {
    fn drop(&mut self) {
        let idle = std::mem::take(&mut *lock(&self.idle));
        if let Kind::Cuda(driver) = &self.kind {
            for stream in idle {
                // SAFETY: made by `stream_create`; nobody has it, and with the device goes all that may ask about it.
                let _ = unsafe { driver.stream_destroy(stream) };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_simulated_device_is_shared_with_nobody() {
        assert_eq!(DeviceDriver::simulated(0, 1 << 30).processes(), GpuProcesses::default());
    }

    #[test]
    fn every_method_has_a_call_of_its_own() {
        let calls: Vec<Call> = METHODS.iter().map(|method| call_of(method).unwrap()).collect();
        assert_eq!(calls.len(), Call::ALL.len());
        assert!(Call::ALL.iter().all(|call| calls.contains(call)));
    }
}
