//! A thread that gives back what the program has not needed for a while.
//!
//! It is there from the first GPU on, looks now and then, and does nothing as long as there is nothing to give back. In a
//! child made by fork it does not exist, and no engine can be reached.

use std::sync::Once;
use std::time::Duration;

use cushion_core::{Bell, Clock as _};

use crate::clock::SystemClock;
use crate::devices::devices;

/// How often it looks. Each engine knows itself when its time is up.
const LOOKS: Duration = Duration::from_secs(2);

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
                for (_, engine) in devices().made() {
                    // A driver that fails here fails the next request, too, and that one tells.
                    let _ = engine.trim();
                }
            }
        });
    });
}
