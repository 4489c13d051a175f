//! A thread that releases memory which the program has not needed for a while.
//!
//! The thread starts with the first GPU. It wakes periodically, and does nothing if no memory is
//! idle. It never waits for a device. In a child made by fork the thread does not exist, and no
//! engine can be reached.

use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError, Weak};
use std::time::Duration;

use cushion_core::{Bell, Clock as _};

use crate::clock::SystemClock;
use crate::devices::{DeviceEngine, devices};

/// How often the thread wakes. Each engine tracks by itself when its memory has been idle long
/// enough.
const LOOKS: Duration = Duration::from_secs(2);

/// Engines of devices with their own cache; each is dropped with its last user.
static OWN: Mutex<Vec<Weak<DeviceEngine>>> = Mutex::new(Vec::new());

fn own() -> MutexGuard<'static, Vec<Weak<DeviceEngine>>> {
    OWN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Locks the list of these engines while this process forks.
pub(crate) fn hold() -> impl Sized + 'static {
    own()
}

/// Trims an engine of a device with its own cache, too.
pub(crate) fn begin_with(engine: &Arc<DeviceEngine>) {
    own().push(Arc::downgrade(engine));
    begin();
}

/// Starts the thread, once.
pub(crate) fn begin() {
    static BEGUN: Once = Once::new();
    BEGUN.call_once(|| {
        let thread = std::thread::Builder::new().name("cushion-trim".to_owned());
        // Without the thread, memory is released only on request, as PyTorch does.
        let _ = thread.spawn(|| {
            let (clock, nobody_rings) = (SystemClock::new(), Bell::default());
            loop {
                clock.wait(LOOKS, &nobody_rings);
                look();
            }
        });
    });
}

fn look() {
    // A driver that fails here also fails the next request, which reports it.
    for (_, engine) in devices().made() {
        let _ = engine.trim();
    }
    let engines = {
        let mut own = own();
        own.retain(|engine| engine.strong_count() > 0);
        own.clone()
    };
    for engine in engines.iter().filter_map(Weak::upgrade) {
        let _ = engine.trim();
    }
}

#[cfg(test)]
mod tests {
    use cushion_core::{Engine, EngineConfig, Options, StreamId};

    use super::*;
    use crate::driver::DeviceDriver;

    #[test]
    fn own_engines_are_trimmed_and_not_kept_alive() {
        let clock = Arc::new(SystemClock::new());
        let options = Options::parse("paged:True,trim_ms:2").unwrap().options;
        let config = EngineConfig { options, clock: clock.clone(), ..EngineConfig::default() };
        let engine = Arc::new(Engine::with_config(DeviceDriver::simulated(0, 1 << 30), config));
        begin_with(&engine);
        let address = engine.alloc(100 << 20, StreamId(0)).unwrap();
        engine.free(address).unwrap();
        assert!(engine.live_and_reserved().1 > 0);
        for _ in 0..6 {
            look();
            clock.wait(Duration::from_millis(2), &Bell::default());
        }
        assert_eq!(engine.live_and_reserved().1, 0);
        let weak = Arc::downgrade(&engine);
        drop(engine);
        look();
        assert!(!own().iter().any(|it| it.ptr_eq(&weak)));
    }
}
