//! Exceptions that a Python function raises when Cushion calls it: nothing in Python can catch
//! them.
//!
//! Cushion shows such an exception, or writes it into a receipt. A `KeyboardInterrupt` is meant for
//! the program, so the main thread gets it afterwards.

use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;

use crate::python::gil;

/// Whether a Python function that Cushion called has raised `KeyboardInterrupt`.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Notes that an exception is a `KeyboardInterrupt`, for [`pass_on_interrupt`].
pub(crate) fn note_interrupt(py: Python<'_>, error: &PyErr) {
    if error.is_instance_of::<PyKeyboardInterrupt>(py) {
        INTERRUPTED.store(true, Ordering::Relaxed);
    }
}

/// Makes the main thread raise `KeyboardInterrupt` when it next runs Python, if one was noted.
///
/// An entry point calls this last, so that no other function that Cushion calls gets the interrupt.
pub(crate) fn pass_on_interrupt() {
    if INTERRUPTED.load(Ordering::Relaxed)
        && INTERRUPTED.swap(false, Ordering::Relaxed)
        && gil::is_running()
    {
        // SAFETY: the function only sets a flag. It has no precondition while the interpreter runs.
        unsafe { pyo3::ffi::PyErr_SetInterrupt() };
    }
}

/// Shows an exception through `sys.unraisablehook`.
pub(crate) fn show(py: Python<'_>, error: PyErr, raised_by: &Bound<'_, PyAny>) {
    note_interrupt(py, &error);
    error.write_unraisable(py, Some(raised_by));
}

/// Describes an exception in one line: its class, its text, and the place that raised it.
pub(crate) fn explain(py: Python<'_>, error: &PyErr) -> String {
    let class = error.get_type(py).name().map(|name| name.to_string());
    let class = class.unwrap_or_else(|_| "an exception".to_owned());
    let text = error.value(py).str().map(|text| text.to_string_lossy().into_owned());
    let mut line = match text.unwrap_or_default() {
        text if text.is_empty() => class,
        text => format!("{class}: {text}"),
    };
    if let Some(at) = raised_at(py, error) {
        line.push_str(&at);
    }
    line
}

fn raised_at(py: Python<'_>, error: &PyErr) -> Option<String> {
    let mut trace = error.traceback(py)?.into_any();
    while let Ok(next) = trace.getattr("tb_next")
        && !next.is_none()
    {
        trace = next;
    }
    let line: i64 = trace.getattr("tb_lineno").ok()?.extract().ok()?;
    let code = trace.getattr("tb_frame").ok()?.getattr("f_code").ok()?;
    let file: String = code.getattr("co_filename").ok()?.extract().ok()?;
    Some(format!(" ({file}:{line})"))
}
