//! The locks of this library that a child made by fork may come to: the thread that forks holds them meanwhile, so that in
//! the child no thread has one that does not exist there (`crates/cushion/src/fork.rs`).

use std::any::Any;

use crate::{callbacks, futures, gil, receipts, recorder, refusal, settings, stacks};

/// Holds them in every fork from now on. Called as Python imports the module: no fork can come in between.
pub(crate) fn begin() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        cushion::hold_in_forks(take);
        // What is looked up at first use, and by threads that do not hold Python's lock, is looked up now: in a child nobody
        // would end a search that another thread had begun.
        gil::is_held();
    });
}

fn take() -> Box<dyn Any> {
    // First: whoever changes settings waits for engines that are being made, which wait for the callbacks.
    let settings = settings::hold();
    let of_shortages = (callbacks::hold(), receipts::hold(), refusal::hold(), futures::hold());
    Box::new((settings, of_shortages, recorder::hold(), stacks::hold()))
}
