//! What a refused allocation says, and who is told of it.
//!
//! The message begins in PyTorch's own form, which programs match against; what Cushion tried follows.

use std::fmt::Write as _;
use std::sync::{Mutex, PoisonError};

use cushion::DeviceError;
use cushion::core::size::display;
use cushion::core::{AllocError, Policy, Remedy, Shortage};
use pyo3::prelude::*;

use crate::profiler::{self, Totals};
use crate::throw::Failure;
use crate::{gil, plugin};

/// PyTorch refuses requests of this size and more in other words.
const EXBIBYTE: u64 = 1 << 60;

static OBSERVERS: Mutex<Vec<Py<PyAny>>> = Mutex::new(Vec::new());

/// Calls `observer(device, bytes, limit, free)` at every refusal from now on, before the error is raised.
pub(crate) fn observe(observer: Py<PyAny>) {
    OBSERVERS.lock().unwrap_or_else(PoisonError::into_inner).push(observer);
}

/// A request of a device that cannot be used.
#[cold]
pub(crate) fn no_device(device: i64, error: &DeviceError) -> Failure {
    Failure::Other(format!("Cushion cannot use GPU {device}: {error}"))
}

/// A request was refused. No lock of Cushion's is held.
#[cold]
pub(crate) fn refused(device: i64, error: &AllocError) -> Failure {
    let Some(shortage) = error.shortage() else {
        return Failure::Other(format!("Cushion on GPU {device}: {}", plugin::explain(error)));
    };
    if let Some(profiler) = profiler::recording() {
        let &Shortage { allocated, reserved, .. } = shortage;
        profiler.out_of_memory(shortage.wanted, device, Totals { allocated, reserved });
    }
    let free = shortage.device_free.unwrap_or(0);
    let limit = shortage.allowed.unwrap_or(shortage.device_total);
    tell(device, shortage.wanted, limit, free);
    Failure::OutOfMemory(message(device, error, shortage))
}

/// Tells the observers. What they raise is shown by Python as errors that nobody can catch are, and the
/// refusal goes on: the program is to see that memory ran out.
fn tell(device: i64, bytes: u64, limit: u64, free: u64) {
    let observers = || OBSERVERS.lock().unwrap_or_else(PoisonError::into_inner);
    // With nobody to tell, Python's lock is not taken: the caller may hold what its owner waits for.
    if observers().is_empty() || !gil::is_running() {
        return;
    }
    gil::attach(|py| {
        // Copied: Python runs below, and no lock of ours may be held while it does.
        let told: Vec<_> = observers().iter().map(|observer| observer.clone_ref(py)).collect();
        for observer in told {
            if let Err(error) = observer.call1(py, (device, bytes, limit, free)) {
                error.write_unraisable(py, Some(observer.bind(py)));
            }
        }
    });
}

fn message(device: i64, error: &AllocError, shortage: &Shortage) -> String {
    if shortage.requested >= EXBIBYTE {
        return "CUDA out of memory. Tried to allocate more than 1EB memory.".to_owned();
    }
    let Shortage { device_total, device_free, allowed, reserved, allocated, private_free, .. } =
        *shortage;
    let device_free = device_free.unwrap_or(0);
    let mut text = format!(
        "CUDA out of memory. Tried to allocate {}. GPU {device} has a total capacity of {} of which {} \
         is free. ",
        display(shortage.wanted),
        display(device_total),
        display(device_free),
    );
    // Writing to a string cannot fail, here and below.
    if let Some(allowed) = allowed {
        let _ = write!(text, "{} allowed; ", display(allowed));
    }
    let in_pools = allocated + private_free;
    let _ = write!(text, "Of the allocated memory {} is allocated by PyTorch, ", display(in_pools));
    if private_free > 0 {
        let private = display(private_free);
        let _ = write!(text, "with {private} allocated in private pools (e.g., CUDA Graphs), ");
    }
    let cached = reserved.saturating_sub(in_pools);
    let _ = write!(text, "and {} is reserved by PyTorch but unallocated.", display(cached));
    add_what_was_tried(&mut text, shortage);
    match error {
        AllocError::GiveWay(_) => text.push_str(
            " All tasks that hold memory wait for each other, and this is the least valuable one: give \
             back what it holds, and begin again.",
        ),
        AllocError::Split(_) => {
            text.push_str(" No other task holds memory that could be waited for: ask for less at a time.");
        }
        _ => {}
    }
    add_hint(&mut text, shortage);
    text
}

fn add_what_was_tried(text: &mut String, shortage: &Shortage) {
    if shortage.wanted > shortage.device_total {
        text.push_str(
            " Cushion gave nothing back: this can never fit on this GPU, whatever is freed.",
        );
        return;
    }
    let deeds: Vec<_> = shortage.deeds().map(ToString::to_string).collect();
    let _ = write!(text, " Cushion {}; it was not enough.", deeds.join(", then "));
    if shortage.allowed.is_some_and(|allowed| shortage.wanted > allowed) {
        text.push_str(" It can never fit into what this process is allowed, whatever is freed.");
    }
    if shortage.recording {
        text.push_str(
            " Allocations go to a private pool, where a graph capture may be under way: nothing can be \
             given back then.",
        );
    }
    let _ = write!(text, " The largest free block is {}", display(shortage.largest_free));
    if shortage.pending > 0 {
        let _ = write!(text, "; {} wait for other streams", display(shortage.pending));
    }
    if shortage.spilled > 0 {
        let _ = write!(text, "; {} more are in host memory", display(shortage.spilled));
    }
    text.push('.');
}

fn add_hint(text: &mut String, shortage: &Shortage) {
    if shortage.remedies().contains(&Remedy::Policy(Policy::Expandable)) {
        text.push_str(
            " Cached memory would be enough if it lay together: cushion.install(policy=\"expandable\"), or \
             CUSHION_POLICY=expandable, lets it.",
        );
        return;
    }
    let others = shortage.others;
    if others >= shortage.wanted {
        let _ = write!(
            text,
            " {} of this GPU are held by other processes, or by this one past its allocator.",
            display(others)
        );
    }
}
