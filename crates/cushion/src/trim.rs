//! A thread that gives back what the program has not needed for a while.
//!
//! It is there from the first GPU on, looks now and then, and does nothing as long as there is nothing to give back. It
//! never waits for a device. In a child made by fork it does not exist, and no engine of the process can be reached.

use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError, Weak};
use std::time::Duration;

use cushion_core::{Bell, Clock as _};

use crate::clock::SystemClock;
use crate::devices::{DeviceEngine, devices};

/// How often it looks. Each engine knows itself when its time is up.
const LOOKS: Duration = Duration::from_secs(2);

/// Engines that are not the process's: each goes with its last user.
static OWN: Mutex<Vec<Weak<DeviceEngine>>> = Mutex::new(Vec::new());

fn own() -> MutexGuard<'static, Vec<Weak<DeviceEngine>>> {
    OWN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Holds the list of those engines, while this process forks.
pub(crate) fn hold() -> impl Sized + 'static {
    own()
}

/// Looks after an engine that is not the process's, too.
pub(crate) fn begin_with(engine: &Arc<DeviceEngine>) {
    own().push(Arc::downgrade(engine));
    begin();
}

/// Begins to look, if nobody does yet.
pub(crate) fn begin() {
    static BEGUN: Once = Once::new();
    BEGUN.call_once(|| {
        let thread = std::thread::Builder::new().name("cushion-trim".to_owned());
        // Without a thread memory is given back when it is asked for, as with PyTorch.
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
    // A driver that fails here fails the next request, too, and that one tells.
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
    fn engines_of_their_own_are_looked_after_and_not_kept() {
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
