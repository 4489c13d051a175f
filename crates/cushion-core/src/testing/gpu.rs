//! The device of a random program: all calls are checked, and another thread can act while the
//! engine waits for the device.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use crate::driver::{
    Capture, Driver, DriverResult, EventId, MemoryInfo, NodeId, PageHandle, Properties, StreamId,
};
use crate::{CheckedDriver, SimDriver};

/// An action of another thread.
pub(super) type Deed = Box<dyn FnOnce() + Send>;

/// A simulated device under a [`CheckedDriver`].
pub(crate) struct Gpu {
    pub(super) checked: CheckedDriver<Arc<SimDriver>>,
    meanwhile: Mutex<Option<Deed>>,
    /// How often a waiting thread yields to other threads.
    yields: u64,
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gpu").field("checked", &self.checked).finish_non_exhaustive()
    }
}

impl Gpu {
    pub(super) fn new(sim: Arc<SimDriver>) -> Self {
        Self { checked: CheckedDriver::new(sim), meanwhile: Mutex::default(), yields: 0 }
    }

    /// Creates a device on which every wait yields `yields` times, so that other threads run during
    /// it.
    pub(super) fn slow(sim: Arc<SimDriver>, yields: u64) -> Self {
        Self { yields, ..Self::new(sim) }
    }

    /// Sets the action that runs in the next wait for the device, before the wait returns; `None`
    /// removes it.
    pub(super) fn meanwhile(&self, deed: Option<Deed>) {
        *self.meanwhile.lock().unwrap_or_else(PoisonError::into_inner) = deed;
    }

    /// Runs the action of the other thread. The engine holds no lock while the driver waits, so
    /// another thread may call it.
    fn waited(&self) {
        (0..self.yields).for_each(|_| std::thread::yield_now());
        let deed = self.meanwhile.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(deed) = deed {
            deed();
        }
    }
}

/// The driver calls that wait for the device.
const WAITING_CALLS: [&str; 3] = ["stream_synchronize", "event_synchronize", "free"];

macro_rules! checked_calls {
    ($($name:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {
        impl Driver for Gpu {
            $(fn $name(&self, $($argument: $type),*) -> $result {
                let result = self.checked.$name($($argument),*);
                if WAITING_CALLS.contains(&stringify!($name)) {
                    self.waited();
                }
                result
            })*
        }
    };
}

crate::driver_methods!(checked_calls);
