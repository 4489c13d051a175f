//! The device of a random program: watched, and with somebody else who acts while it is waited for.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use crate::driver::{
    Capture, Driver, DriverResult, EventId, MemoryInfo, NodeId, PageHandle, Properties, StreamId,
};
use crate::{CheckedDriver, SimDriver};

/// What another thread does.
pub(super) type Deed = Box<dyn FnOnce() + Send>;

/// A simulated device under a [`CheckedDriver`].
pub(crate) struct Gpu {
    pub(super) checked: CheckedDriver<Arc<SimDriver>>,
    meanwhile: Mutex<Option<Deed>>,
    /// How often whoever waits lets other threads go first.
    takes: u64,
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gpu").field("checked", &self.checked).finish_non_exhaustive()
    }
}

impl Gpu {
    pub(super) fn new(sim: Arc<SimDriver>) -> Self {
        Self { checked: CheckedDriver::new(sim), meanwhile: Mutex::default(), takes: 0 }
    }

    /// One that a wait takes its time on, so that other threads meet who waits.
    pub(super) fn slow(sim: Arc<SimDriver>, takes: u64) -> Self {
        Self { takes, ..Self::new(sim) }
    }

    /// What is done when the device was next waited for, before who waited knows; `None` takes it back.
    pub(super) fn meanwhile(&self, deed: Option<Deed>) {
        *self.meanwhile.lock().unwrap_or_else(PoisonError::into_inner) = deed;
    }

    /// The engine holds no lock while it lets the driver wait: another thread may do anything.
    fn waited(&self) {
        (0..self.takes).for_each(|_| std::thread::yield_now());
        let deed = self.meanwhile.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(deed) = deed {
            deed();
        }
    }
}

macro_rules! watched {
    ($($name:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {
        impl Driver for Gpu {
            $(fn $name(&self, $($argument: $type),*) -> $result {
                let result = self.checked.$name($($argument),*);
                if matches!(stringify!($name), "stream_synchronize" | "event_synchronize" | "free") {
                    self.waited();
                }
                result
            })*
        }
    };
}

crate::driver_methods!(watched);
