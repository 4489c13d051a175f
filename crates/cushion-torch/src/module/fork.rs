//! The locks of this library, taken while the process forks.
//!
//! The forking thread holds them, so that in the child no lock belongs to a thread that does not
//! exist there (`crates/cushion/src/fork.rs`).

use std::any::Any;

use crate::entry::futures;
use crate::history::{recorder, stacks};
use crate::module::settings;
use crate::python::gil;
use crate::shortage::{callbacks, last_calls, receipts, refusal};

/// Takes the locks in every later fork. The module calls this while Python imports it, so that no
/// fork comes first.
pub(crate) fn begin() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        cushion::hold_in_forks(take);
        // Threads without Python's lock look this up at first use. It is looked up now: a lookup
        // that another thread has begun during a fork would never end in the child.
        gil::is_held();
    });
}

fn take() -> Box<dyn Any> {
    // The settings first: a thread that changes them waits for engines that are being made, and
    // those wait for the callbacks.
    let settings = settings::hold();
    let of_callbacks = (callbacks::hold(), last_calls::hold());
    let of_shortages = (receipts::hold(), refusal::hold(), futures::hold());
    Box::new((settings, of_callbacks, of_shortages, recorder::hold(), stacks::hold()))
}
