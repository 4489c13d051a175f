//! Cushion as PyTorch's allocator. One library is both the plug-in that PyTorch loads and the
//! Python module `cushion._cushion`. Both share their statics, so that the module configures the
//! plug-in.
//!
//! Each folder uses only the folders below it in this list (`tests/rooms.rs`):
//!
//! - `module/`: the functions of the Python module, by subject.
//! - `entry/`: how requests reach the engine, from PyTorch and as Python futures.
//! - `shortage/`: callbacks, receipts, and the error of a refused allocation.
//! - `history/`: recorded stacks and metadata, and snapshots.
//! - `pytorch/`: PyTorch's C++ side: exceptions, functions, the profiler, its threads.
//! - `python/`: the interpreter's lock and its exceptions.
//! - `process/`: loaded libraries, mutexes, panics.

#![expect(unreachable_pub, reason = "PyTorch finds the entry points by their names")]

mod entry;
mod history;
mod module;
mod process;
mod python;
mod pytorch;
mod shortage;

use pyo3::prelude::*;

/// The Rust half of the package `cushion`. The Python half calls only these functions.
#[pymodule]
mod _cushion {
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::entry::futures::Pending;
    #[pymodule_export]
    use crate::module::history::{
        allocation_traceback, kept_notes, memory_snapshot, metadata, record_memory_history,
        set_metadata,
    };
    #[pymodule_export]
    use crate::module::memory::{
        add_lasting_stream, allocate, allocate_later, bytes_of, deallocate, device_of,
        devices_in_use, memory_info, prefetch, stream_of,
    };
    #[pymodule_export]
    use crate::module::package::{command, hooks, is_simulated, simulate, stop};
    #[pymodule_export]
    use crate::module::requests::{inject, observe_refusals, set_wishes, wishes};
    #[pymodule_export]
    use crate::module::settings::{
        PySettings, change_settings, conf, configure, gather_settings, start, without_backend,
    };
    #[pymodule_export]
    use crate::module::statistics::{
        check_invariants, empty_cache, memory_fraction, memory_stats,
        reset_accumulated_memory_stats, reset_peak_memory_stats, stats,
    };
    #[pymodule_export]
    use crate::shortage::callbacks::{add_callback, is_callback_on, remove_callback};
    #[pymodule_export]
    use crate::shortage::last_calls::{
        add_last_call, expect_refusals, refuse_after_all, remove_last_call,
    };
    #[pymodule_export]
    use crate::shortage::receipts::{keep_receipts, observe_receipts, receipt_for, receipts};

    #[pymodule_export]
    #[allow(non_upper_case_globals, reason = "Python packages name their version so")]
    const __version__: &str = env!("CARGO_PKG_VERSION");

    #[pymodule_init]
    fn init(_module: &Bound<'_, PyModule>) -> PyResult<()> {
        crate::module::fork::begin();
        crate::shortage::receipts::begin();
        Ok(())
    }
}
