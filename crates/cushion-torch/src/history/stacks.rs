//! Python stacks, gathered at an allocation. Each distinct stack is kept once, while a tag refers
//! to it.
//!
//! Gathering records only the code object and the instruction of each frame; names and lines are
//! looked up when the stack is read. Every distinct stack has a number, which an event carries. A
//! kept stack holds references to its code objects, so that their addresses stay unique.
//! `recorder.rs` sweeps the table.
//!
//! Three functions of the interpreter are outside the stable interface and are looked up at run
//! time. If one is missing, the attribute with the same meaning is read.

use std::cell::Cell;
use std::ffi::{CStr, c_int};
use std::num::NonZeroU32;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, OnceLock};

use pyo3::ffi::{self, PyFrameObject, PyObject};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use rustc_hash::FxHashSet;

use crate::history::kept::{Kept, Numbered, Sweep};
use crate::history::recorder;
use crate::process::lock;
use crate::process::symbols::Loaded;
use crate::python::gil;

/// The number of a kept stack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct StackId(pub(crate) NonZeroU32);

/// The most frames of a stack; the outermost ones beyond it are dropped.
const MAX_FRAMES: usize = 256;

/// The address of a code object, and the offset of an instruction in it.
type Frame = (usize, c_int);

/// A stack, innermost frame first. A kept stack holds a reference to the code of each frame.
pub(crate) type Stack = [Frame];

static STACKS: Mutex<Kept<Stack>> = Mutex::new(Kept::new());

thread_local! {
    static FRAMES: Cell<Vec<Frame>> = const { Cell::new(Vec::new()) };
}

/// Returns the stack of this thread; none if the thread runs no Python code. Takes Python's lock,
/// so the caller must not hold any lock of Cushion.
pub(crate) fn gather() -> Option<Numbered<Stack>> {
    if !gil::is_running() {
        return None;
    }
    gil::attach(|py| {
        // Taken, not borrowed: walking may collect garbage, which may free a tensor, and that calls
        // this function again. It fails while the thread ends and destroys its locals.
        let mut frames = FRAMES.try_with(Cell::take).unwrap_or_default();
        frames.clear();
        walk(py, &mut frames);
        let kept = if frames.is_empty() { None } else { keep(&frames) };
        let _ = FRAMES.try_with(|kept| kept.set(frames));
        if kept.is_some() && lock(&STACKS).is_full() {
            recorder::sweep(py);
        }
        kept
    })
}

/// Adds the frames of this thread to `frames`, with a new reference to each code object.
fn walk(py: Python<'_>, frames: &mut Vec<Frame>) {
    let interpreter = interpreter();
    // SAFETY: this thread holds Python's lock. The frame is a borrowed reference.
    let innermost = unsafe { ffi::PyEval_GetFrame() };
    let mut frame = NonNull::new(innermost);
    let mut ours = false;
    while let Some(at) = frame {
        if frames.len() < MAX_FRAMES {
            // SAFETY: the frame is alive, because it runs or `outer` returned a reference to it,
            // and this thread holds Python's lock. The code is a new reference.
            let code = unsafe { ffi::PyFrame_GetCode(at.as_ptr()) };
            frames.push((code.expose_provenance(), interpreter.instruction(py, at)));
        }
        let outer = (frames.len() < MAX_FRAMES).then(|| interpreter.outer(py, at)).flatten();
        if ours {
            // SAFETY: `outer` returned this reference, and it is not used after this. This thread
            // holds Python's lock.
            unsafe { ffi::Py_DecRef(at.as_ptr().cast()) };
        }
        (frame, ours) = (outer, true);
    }
}

/// Returns the stack with its number. A new stack takes over the references to its code.
fn keep(frames: &Stack) -> Option<Numbered<Stack>> {
    let known = {
        let mut stacks = lock(&STACKS);
        let known = stacks.find(frames);
        if known.is_none()
            && let Some(new) = stacks.add(frames.into())
        {
            return Some(new);
        }
        known
    };
    release(frames);
    known
}

/// Drops the references to the code of these frames.
///
/// The caller owns the references, holds Python's lock, and holds no lock of Cushion: dropping a
/// code object may run Python code.
fn release(frames: &Stack) {
    for &(code, _) in frames {
        // SAFETY: the caller owns the reference, does not use it after this, and holds Python's
        // lock.
        unsafe { ffi::Py_DecRef(object(code)) };
    }
}

/// Locks the stacks while this process forks.
pub(crate) fn hold() -> impl Sized + 'static {
    lock(&STACKS)
}

/// Returns the number of stacks that are kept.
pub(crate) fn kept() -> usize {
    lock(&STACKS).len()
}

/// Begins to remove the stacks that nothing refers to.
pub(crate) fn begin_sweep() -> Sweep {
    lock(&STACKS).begin_sweep()
}

/// Removes all stacks except those in `used`, which `looked_at` tags referred to, and those
/// requested since the sweep began.
pub(crate) fn end_sweep(
    _py: Python<'_>,
    sweep: Sweep,
    used: &FxHashSet<NonZeroU32>,
    looked_at: usize,
) {
    let gone = lock(&STACKS).end_sweep(sweep, used, looked_at);
    gone.iter().for_each(|stack| release(stack));
}

/// Ends a sweep and removes nothing.
pub(crate) fn give_up_sweep(sweep: Sweep) {
    lock(&STACKS).give_up_sweep(sweep);
}

/// Returns the frames of a kept stack as a list of dicts with `filename`, `line` and `name`.
pub(crate) fn show(py: Python<'_>, id: StackId) -> PyResult<Bound<'_, PyList>> {
    let list = PyList::empty(py);
    // Copied, because Python runs below, and no lock of Cushion may be held then. The reference
    // keeps the stack from being swept.
    let stack: Option<Arc<Stack>> = lock(&STACKS).get(id.0);
    for &(code, instruction) in stack.iter().flat_map(|stack| stack.iter()) {
        // SAFETY: `stack` is kept and holds a reference to this code object, and `py` proves that
        // this thread holds Python's lock.
        let code = unsafe { Bound::from_borrowed_ptr(py, object(code)) };
        let frame = PyDict::new(py);
        frame.set_item("filename", code.getattr("co_filename")?)?;
        frame.set_item("line", interpreter().line(&code, instruction)?)?;
        frame.set_item("name", code.getattr("co_name")?)?;
        list.append(frame)?;
    }
    Ok(list)
}

fn object(address: usize) -> *mut PyObject {
    std::ptr::with_exposed_provenance_mut(address)
}

type GetBack = unsafe extern "C" fn(*mut PyFrameObject) -> *mut PyFrameObject;
type GetLasti = unsafe extern "C" fn(*mut PyFrameObject) -> c_int;
type Addr2Line = unsafe extern "C" fn(*mut PyObject, c_int) -> c_int;

/// The functions that are outside the stable interface.
#[derive(Debug)]
struct Interpreter {
    get_back: Option<GetBack>,
    get_lasti: Option<GetLasti>,
    addr2line: Option<Addr2Line>,
}

fn interpreter() -> &'static Interpreter {
    static INTERPRETER: OnceLock<Interpreter> = OnceLock::new();
    INTERPRETER.get_or_init(|| {
        let process = Loaded::process();
        // SAFETY: the interpreter defines `PyFrameObject *PyFrame_GetBack(PyFrameObject *)`.
        let get_back = unsafe { process.function(c"PyFrame_GetBack") };
        // SAFETY: the interpreter defines `int PyFrame_GetLasti(PyFrameObject *)`.
        let get_lasti = unsafe { process.function(c"PyFrame_GetLasti") };
        // SAFETY: the interpreter defines `int PyCode_Addr2Line(PyCodeObject *, int)`.
        let addr2line = unsafe { process.function(c"PyCode_Addr2Line") };
        Interpreter { get_back, get_lasti, addr2line }
    })
}

impl Interpreter {
    /// Returns the frame that called this one, as a new reference.
    fn outer(
        &self,
        py: Python<'_>,
        frame: NonNull<PyFrameObject>,
    ) -> Option<NonNull<PyFrameObject>> {
        match self.get_back {
            // SAFETY: the frame is alive, and `py` proves that this thread holds Python's lock.
            Some(get_back) => NonNull::new(unsafe { get_back(frame.as_ptr()) }),
            None => {
                let outer = attribute(py, frame, c"f_back").filter(|outer| !outer.is_none());
                outer.and_then(|outer| NonNull::new(outer.into_ptr().cast()))
            }
        }
    }

    /// Returns the offset of the instruction that a frame runs.
    fn instruction(&self, py: Python<'_>, frame: NonNull<PyFrameObject>) -> c_int {
        if let Some(get_lasti) = self.get_lasti {
            // SAFETY: the frame is alive, and `py` proves that this thread holds Python's lock.
            return unsafe { get_lasti(frame.as_ptr()) };
        }
        attribute(py, frame, c"f_lasti").and_then(|value| value.extract().ok()).unwrap_or(-1)
    }

    fn line(&self, code: &Bound<'_, PyAny>, instruction: c_int) -> PyResult<c_int> {
        match self.addr2line {
            // SAFETY: `code` is a code object, and it proves that this thread holds Python's lock.
            Some(addr2line) => Ok(unsafe { addr2line(code.as_ptr(), instruction) }),
            None => code.getattr("co_firstlineno")?.extract(),
        }
    }
}

fn attribute<'py>(
    py: Python<'py>,
    frame: NonNull<PyFrameObject>,
    name: &CStr,
) -> Option<Bound<'py, PyAny>> {
    // SAFETY: the frame is alive, the name ends with a nul, and `py` proves that this thread holds
    // Python's lock.
    let value = unsafe { ffi::PyObject_GetAttrString(frame.as_ptr().cast(), name.as_ptr()) };
    // SAFETY: a pointer that is not null is a new reference. Null means that an error is set, which
    // is taken and dropped.
    unsafe { Bound::from_owned_ptr_or_err(py, value) }.ok()
}
