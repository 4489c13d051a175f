//! Measures the engine's own time: the time of the simulated driver's calls is subtracted.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use cushion_core::driver::{
    Capture, DriverResult, EventId, MemoryInfo, NodeId, PageHandle, Properties,
};
use cushion_core::{Driver, Engine, SimConfig, SimDriver, StreamId, driver_methods};

pub(crate) type Gpu = Engine<Timed>;

/// A simulated driver that measures how long its calls take.
#[derive(Debug)]
pub(crate) struct Timed {
    sim: SimDriver,
    nanos: AtomicU64,
}

impl Timed {
    pub(crate) fn new(config: SimConfig) -> Self {
        Self { sim: SimDriver::new(config), nanos: AtomicU64::new(0) }
    }

    /// Returns the microseconds of all calls so far.
    fn micros(&self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "a time")]
        let nanos = self.nanos.load(Ordering::Relaxed) as f64;
        nanos / 1e3
    }
}

impl std::ops::Deref for Timed {
    type Target = SimDriver;

    fn deref(&self) -> &SimDriver {
        &self.sim
    }
}

macro_rules! time_calls {
    ($($name:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {
        impl Driver for Timed {
            $(fn $name(&self, $($argument: $type),*) -> $result {
                let start = Instant::now();
                let result = self.sim.$name($($argument),*);
                let nanos = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
                self.nanos.fetch_add(nanos, Ordering::Relaxed);
                result
            })*
        }
    };
}
driver_methods!(time_calls);

/// Returns the microseconds that `run` takes, without the driver.
pub(crate) fn own_micros(gpu: &Gpu, run: impl FnOnce()) -> f64 {
    let before = gpu.driver().micros();
    let start = Instant::now();
    run();
    let all = start.elapsed().as_secs_f64() * 1e6;
    all - (gpu.driver().micros() - before)
}

pub(crate) fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
