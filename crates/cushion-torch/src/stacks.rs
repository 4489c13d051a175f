//! Python stacks, gathered at an allocation and kept once each.
//!
//! Gathering notes only which code runs and where in it; names and lines are looked up when somebody
//! reads them. Every distinct stack has a number, so that an event carries a number and no stack. The
//! code objects of kept stacks stay alive, so that their addresses stay theirs.
//!
//! Three functions of the interpreter that this takes are outside the stable interface, and are looked up
//! at run time; where one is missing, the attribute of the same meaning is read.

use std::cell::Cell;
use std::ffi::{CStr, c_int};
use std::num::NonZeroU32;
use std::ptr::NonNull;
use std::sync::{Mutex, OnceLock, PoisonError};

use pyo3::ffi::{self, PyFrameObject, PyObject};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use rustc_hash::FxHashMap;

use crate::gil;
use crate::symbols::Loaded;

/// The number of a kept stack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct StackId(pub(crate) NonZeroU32);

/// Frames beyond this are left out, the outermost first.
const MAX_FRAMES: usize = 256;
/// More distinct stacks than any program has; past it new ones are not kept.
const MAX_STACKS: usize = 1 << 22;

/// Code, by the address of its object, and the offset of the instruction in it.
type Frame = (usize, c_int);

#[derive(Debug, Default)]
struct Table {
    ids: FxHashMap<Box<[Frame]>, StackId>,
    stacks: Vec<Box<[Frame]>>,
}

static TABLE: Mutex<Option<Table>> = Mutex::new(None);

thread_local! {
    static FRAMES: Cell<Vec<Frame>> = const { Cell::new(Vec::new()) };
}

/// The stack of this thread, innermost frame first; none if no Python runs on it. Takes the
/// interpreter's lock, so no other lock may be held.
pub(crate) fn gather() -> Option<StackId> {
    if !gil::is_running() {
        return None;
    }
    gil::attach(|py| {
        // Taken, not borrowed: walking may collect garbage, which may free a tensor, which comes here.
        // A tensor that a thread frees at its very end finds none.
        let mut frames = FRAMES.try_with(Cell::take).unwrap_or_default();
        frames.clear();
        walk(py, &mut frames);
        let id = if frames.is_empty() { None } else { keep(&frames) };
        let _ = FRAMES.try_with(|kept| kept.set(frames));
        id
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

/// The number of a stack; a new one takes over the references to its code.
fn keep(frames: &[Frame]) -> Option<StackId> {
    let mut table = TABLE.lock().unwrap_or_else(PoisonError::into_inner);
    let table = table.get_or_insert_default();
    let known = table.ids.get(frames).copied();
    if known.is_none() && table.stacks.len() < MAX_STACKS {
        let id =
            u32::try_from(table.stacks.len() + 1).ok().and_then(NonZeroU32::new).map(StackId)?;
        table.stacks.push(frames.into());
        table.ids.insert(frames.into(), id);
        return Some(id);
    }
    for &(code, _) in frames {
        // SAFETY: `walk` took a reference, which nobody keeps. It is not the last: the frame has one.
        unsafe { ffi::Py_DecRef(object(code)) };
    }
    known
}

/// The frames of a kept stack as Python sees them: a list of `filename`, `line` and `name`.
pub(crate) fn show(py: Python<'_>, id: StackId) -> PyResult<Bound<'_, PyList>> {
    let list = PyList::empty(py);
    // Copied: Python runs below, and no lock of ours may be held while it does.
    let frames = {
        let table = TABLE.lock().unwrap_or_else(PoisonError::into_inner);
        let stacks = table.as_ref().map(|table| &table.stacks);
        stacks.and_then(|stacks| stacks.get(id.0.get() as usize - 1).cloned())
    };
    for (code, instruction) in frames.into_iter().flatten() {
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
