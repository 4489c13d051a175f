//! Python stacks, gathered at an allocation and kept once each, while somebody refers to them.
//!
//! Gathering notes only which code runs and where in it; names and lines are looked up when somebody
//! reads them. Every distinct stack has a number, so that an event carries a number and no stack. The
//! code objects of kept stacks stay alive, so that their addresses stay theirs. What is kept is swept by `recorder.rs`.
//!
//! Three functions of the interpreter that this takes are outside the stable interface, and are looked up
//! at run time; where one is missing, the attribute of the same meaning is read.

use std::cell::Cell;
use std::ffi::{CStr, c_int};
use std::num::NonZeroU32;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, OnceLock};

use pyo3::ffi::{self, PyFrameObject, PyObject};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use rustc_hash::FxHashSet;

use crate::kept::{Kept, Numbered, Sweep};
use crate::symbols::Loaded;
use crate::{gil, lock, recorder};

/// The number of a kept stack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct StackId(pub(crate) NonZeroU32);

/// Frames beyond this are left out, the outermost first.
const MAX_FRAMES: usize = 256;

/// Code, by the address of its object, and the offset of the instruction in it.
type Frame = (usize, c_int);

/// A stack, innermost frame first. One that is kept has a reference to the code of each frame.
pub(crate) type Stack = [Frame];

static STACKS: Mutex<Kept<Stack>> = Mutex::new(Kept::new());

thread_local! {
    static FRAMES: Cell<Vec<Frame>> = const { Cell::new(Vec::new()) };
}

/// The stack of this thread; none if no Python runs on it. Takes the interpreter's lock, so no other lock may be held.
pub(crate) fn gather() -> Option<Numbered<Stack>> {
    if !gil::is_running() {
        return None;
    }
    gil::attach(|py| {
        // Taken, not borrowed: walking may collect garbage, which may free a tensor, which comes here.
        // A tensor that a thread frees at its very end finds none.
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

/// Notes the frames of this thread. Each code object noted has a reference of ours.
fn walk(py: Python<'_>, frames: &mut Vec<Frame>) {
    let interpreter = interpreter();
    // SAFETY: this thread holds the interpreter's lock. The frame is borrowed.
    let innermost = unsafe { ffi::PyEval_GetFrame() };
    let mut frame = NonNull::new(innermost);
    let mut ours = false;
    while let Some(at) = frame {
        if frames.len() < MAX_FRAMES {
            // SAFETY: the frame is alive: it runs, or we hold a reference. The code is a new reference.
            let code = unsafe { ffi::PyFrame_GetCode(at.as_ptr()) };
            frames.push((code.expose_provenance(), interpreter.instruction(py, at)));
        }
        let outer = (frames.len() < MAX_FRAMES).then(|| interpreter.outer(py, at)).flatten();
        if ours {
            // SAFETY: the reference is ours, from `outer`.
            unsafe { ffi::Py_DecRef(at.as_ptr().cast()) };
        }
        (frame, ours) = (outer, true);
    }
}

/// A stack with its number; a new one takes over the references to its code.
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

/// Gives up the references to the code of these frames, which were ours. The interpreter's lock is held, and none of ours:
/// code that goes may have Python run something.
fn release(frames: &Stack) {
    for &(code, _) in frames {
        // SAFETY: the caller has a reference, which nobody uses after this, and holds the interpreter's lock.
        unsafe { ffi::Py_DecRef(object(code)) };
    }
}

/// Holds the stacks, while this process forks.
pub(crate) fn hold() -> impl Sized + 'static {
    lock(&STACKS)
}

/// How many stacks are kept.
pub(crate) fn kept() -> usize {
    lock(&STACKS).len()
}

/// Begins to forget the stacks that nobody refers to.
pub(crate) fn begin_sweep() -> Sweep {
    lock(&STACKS).begin_sweep()
}

/// Forgets all but those used, of which `looked_at` tags told, and those asked for since.
pub(crate) fn end_sweep(
    _py: Python<'_>,
    sweep: Sweep,
    used: &FxHashSet<NonZeroU32>,
    looked_at: usize,
) {
    let gone = lock(&STACKS).end_sweep(sweep, used, looked_at);
    gone.iter().for_each(|stack| release(stack));
}

/// Forgets none this time.
pub(crate) fn give_up_sweep(sweep: Sweep) {
    lock(&STACKS).give_up_sweep(sweep);
}

/// The frames of a kept stack as Python sees them: a list of `filename`, `line` and `name`.
pub(crate) fn show(py: Python<'_>, id: StackId) -> PyResult<Bound<'_, PyList>> {
    let list = PyList::empty(py);
    // Python runs below, and no lock of ours may be held while it does. As long as we have the stack, nobody sweeps it.
    let stack: Option<Arc<Stack>> = lock(&STACKS).get(id.0);
    for &(code, instruction) in stack.iter().flat_map(|stack| stack.iter()) {
        // SAFETY: kept stacks hold a reference to their code, and the lock is held.
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

/// What is outside the stable interface.
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
        // SAFETY: the interpreter defines each with this type.
        let get_back = unsafe { process.function(c"PyFrame_GetBack") };
        // SAFETY: as above.
        let get_lasti = unsafe { process.function(c"PyFrame_GetLasti") };
        // SAFETY: as above.
        let addr2line = unsafe { process.function(c"PyCode_Addr2Line") };
        Interpreter { get_back, get_lasti, addr2line }
    })
}

impl Interpreter {
    /// The frame that called this one, as a new reference.
    fn outer(
        &self,
        py: Python<'_>,
        frame: NonNull<PyFrameObject>,
    ) -> Option<NonNull<PyFrameObject>> {
        match self.get_back {
            // SAFETY: the frame is alive and the lock is held.
            Some(get_back) => NonNull::new(unsafe { get_back(frame.as_ptr()) }),
            None => {
                let outer = attribute(py, frame, c"f_back").filter(|outer| !outer.is_none());
                outer.and_then(|outer| NonNull::new(outer.into_ptr().cast()))
            }
        }
    }

    /// Where in its code a frame is.
    fn instruction(&self, py: Python<'_>, frame: NonNull<PyFrameObject>) -> c_int {
        if let Some(get_lasti) = self.get_lasti {
            // SAFETY: the frame is alive and the lock is held.
            return unsafe { get_lasti(frame.as_ptr()) };
        }
        attribute(py, frame, c"f_lasti").and_then(|value| value.extract().ok()).unwrap_or(-1)
    }

    fn line(&self, code: &Bound<'_, PyAny>, instruction: c_int) -> PyResult<c_int> {
        match self.addr2line {
            // SAFETY: it is a code object, and the lock is held.
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
    // SAFETY: the frame is alive, the name ends with a nul, and the lock is held.
    let value = unsafe { ffi::PyObject_GetAttrString(frame.as_ptr().cast(), name.as_ptr()) };
    // SAFETY: the reference is ours; null means that an error is set, which is taken and dropped.
    unsafe { Bound::from_owned_ptr_or_err(py, value) }.ok()
}
