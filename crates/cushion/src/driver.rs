//! One driver type for every device: a GPU or a simulated one.

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

/// A device behind the engine's [`Driver`]: a GPU or a simulated one. The kind is looked up only
/// when memory is obtained from the device; the engine serves most allocations without calling it.
#[derive(Debug)]
pub struct DeviceDriver {
    kind: Kind,
    /// Streams made here that are not in use. The engine identifies streams by their handles and
    /// may query one long after its last use, so no stream is destroyed before the device.
    idle: Mutex<Vec<StreamId>>,
    /// Owners of foreign streams that were used here, kept for the same reason.
    kept: Mutex<BTreeMap<StreamId, Arc<dyn Any + Send + Sync>>>,
    /// The stream kept last: most programs use one stream many times.
    last_kept: AtomicU64,
    /// Calls to fail on purpose, for tests.
    faults: Faults,
    /// Whether `faults` may have rules.
    has_faults: AtomicBool,
    /// The file for this device's receipts.
    receipts: Arc<ReceiptLog>,
}

#[derive(Debug)]
enum Kind {
    Cuda(Box<CudaDriver>),
    Simulated(Box<Simulated>),
}

/// A simulated device. Its addresses cannot be dereferenced, but the content of buffers can be
/// written and read.
#[derive(Debug)]
struct Simulated {
    driver: SimDriver,
    memory: SimMemory,
    streams: AtomicU64,
}

/// Handles of simulated streams are multiples of this: CUDA gives some small numbers a meaning.
const STREAM_STEP: u64 = 16;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes each transfer once for all kinds of device.
macro_rules! forward_transfers {
    ($($name:ident($($argument:ident: $type:ty),*);)*) => {
        $(
            /// # Safety
            ///
            #[doc = concat!("As for [`CudaDriver::", stringify!($name), "`].")]
            pub(crate) unsafe fn $name(
                &self,
                $($argument: $type,)*
                stream: StreamId,
            ) -> Result<(), CudaError> {
                match &self.kind {
                    // SAFETY: the caller upholds the same contract.
                    Kind::Cuda(driver) => unsafe { driver.$name($($argument,)* stream) },
                    Kind::Simulated(device) => {
                        device.memory.$name($($argument),*);
                        Ok(())
                    }
                }
            }
        )*
    };
}

impl DeviceDriver {
    /// Opens the GPU with this index.
    pub fn cuda(index: u32) -> Result<Self, CudaError> {
        Ok(Self::of(Kind::Cuda(Box::new(CudaDriver::new(index)?))))
    }

    /// Makes a simulated device of `capacity` bytes.
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
        // Zero, the default stream, has no owner to keep.
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

    /// Returns whether the device is simulated.
    #[must_use]
    pub fn is_simulated(&self) -> bool {
        self.simulator().is_some()
    }

    /// Returns the simulator of a simulated device, to queue and finish work and to make calls
    /// fail.
    #[must_use]
    pub fn simulator(&self) -> Option<&SimDriver> {
        match &self.kind {
            Kind::Cuda(_) => None,
            Kind::Simulated(device) => Some(&device.driver),
        }
    }

    /// Returns the other processes that hold memory of the GPU, as [`CudaDriver::processes`] does.
    /// A simulated device has none.
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

    // ---- injected failures ----

    /// Makes calls fail by the driver rules of `injection`, replacing earlier rules; `None` removes
    /// them.
    pub(crate) fn inject(&self, injection: Option<&Injection>) {
        self.faults.replace(injection.map(Injection::driver_faults).unwrap_or_default());
        self.has_faults.store(injection.is_some(), Ordering::Relaxed);
    }

    /// Returns the error that a rule injects into this method, if any.
    #[cold]
    fn strike(&self, method: &str) -> DriverResult<()> {
        let struck = call_of(method).and_then(|call| Some((call, self.faults.strike(call)?)));
        struck.map_or(Ok(()), |(call, fault)| Err(DriverError { call, fault }))
    }

    // ---- streams ----

    /// Returns a stream for the caller's use, until [`stream_done`](Self::stream_done).
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

    /// Takes back a stream of [`stream`](Self::stream). Its work goes on.
    pub(crate) fn stream_done(&self, stream: StreamId) {
        lock(&self.idle).push(stream);
    }

    /// Keeps the owner of a stream, if it has one, as long as the device exists.
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

    // ---- content of memory ----

    /// Drops the content of memory that is about to be freed.
    pub(crate) fn forget(&self, address: u64, bytes: usize) {
        if let Kind::Simulated(device) = &self.kind {
            device.memory.forget(address, bytes);
        }
    }

    // Each method passes its preconditions on to its caller.
    forward_transfers! {
        write(to: u64, bytes: &[u8]);
        read(from: u64, bytes: &mut [u8]);
        copy(from: u64, to: u64, bytes: usize);
        fill(to: u64, bytes: usize, value: u8);
    }
}

/// Returns the driver call that a method of [`Driver`] makes.
fn call_of(method: &str) -> Option<Call> {
    let name = method.replace('_', "");
    Call::ALL.into_iter().find(|call| call.to_string().eq_ignore_ascii_case(&name))
}

/// Writes each method once for all kinds of device. Rules can make all but the first fail.
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
                // SAFETY: `stream_create` made the stream and nothing uses it; the engine that may
                // query it is dropped with the driver.
                let _ = unsafe { driver.stream_destroy(stream) };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_simulated_device_has_no_other_processes() {
        assert_eq!(DeviceDriver::simulated(0, 1 << 30).processes(), GpuProcesses::default());
    }

    #[test]
    fn every_method_has_its_own_call() {
        let calls: Vec<Call> = METHODS.iter().map(|method| call_of(method).unwrap()).collect();
        assert_eq!(calls.len(), Call::ALL.len());
        assert!(Call::ALL.iter().all(|call| calls.contains(call)));
    }
}
