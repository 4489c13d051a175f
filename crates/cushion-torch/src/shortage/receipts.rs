//! Receipts for Python, as JSON with Python stacks: those that are kept, and each new one.

use std::cell::RefCell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cushion::core::{Receipt, Tag};
use cushion::{DeviceEngine, devices};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString};

use crate::history::{recorder, stacks};
use crate::process::lock;
use crate::python::{exceptions, gil};
use crate::shortage::{callbacks, refusal};

/// How long a thread that was short of memory waits for Python's lock before it skips the observer.
const PATIENCE: Duration = Duration::from_secs(1);

/// The most frames of a stack in a receipt.
const MOST_FRAMES: usize = 24;

/// The most characters of a frame.
const LONGEST_FRAME: usize = 256;

/// How many receipts each engine keeps, if the program has set it.
static KEPT: AtomicUsize = AtomicUsize::new(UNSAID);
const UNSAID: usize = usize::MAX;
/// How many receipts an engine keeps by default.
const DEFAULT: usize = 256;
/// The latest refusals of each device whose exceptions find their receipt, even if fewer receipts
/// are kept.
const FEWEST: usize = 16;

thread_local! {
    /// The latest receipt of a refusal of this thread. The message needs it even if no receipts are
    /// kept.
    static LATEST: RefCell<Option<Arc<Receipt>>> = const { RefCell::new(None) };
}

/// Prepares every engine, also those made later: stacks in receipts, the observer of receipts, the
/// number of receipts to keep, and the callbacks of the program.
pub(crate) fn begin() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        devices().for_each(|engine| {
            engine.explain_tags(stacks_of);
            engine.on_receipt(|receipt| {
                if !receipt.outcome.is_survived() {
                    LATEST.set(Some(Arc::new(receipt.clone())));
                }
                tell(receipt);
            });
            if KEPT.load(Ordering::Relaxed) != UNSAID {
                engine.keep_receipts(KEPT.load(Ordering::Relaxed));
            }
            callbacks::add_to(engine);
        });
    });
}

/// Returns the number of refusals of each device whose exceptions find their receipt.
pub(crate) fn most() -> usize {
    match KEPT.load(Ordering::Relaxed) {
        UNSAID => DEFAULT,
        kept => kept.max(FEWEST),
    }
}

/// Returns the receipt with this number, if the engine keeps it or if it is the latest one of this
/// thread.
pub(crate) fn find(engine: &DeviceEngine, number: u64) -> Option<Arc<Receipt>> {
    use cushion::core::Driver as _;

    let device = engine.driver().properties().device;
    let is_it = |receipt: &Arc<Receipt>| (receipt.device, receipt.number) == (device, number);
    // The engine's own first: it is shared, and the latest one is a copy.
    engine.receipt(number).or_else(|| LATEST.with_borrow(|latest| latest.clone().filter(is_it)))
}

/// Returns a receipt as JSON: as in files, with its text and its remedies in words.
pub(crate) fn json(receipt: &Receipt) -> String {
    let mut value = serde_json::to_value(receipt).unwrap_or_default();
    if let Some(object) = value.as_object_mut() {
        let remedies = receipt.shortage.remedies();
        let remedies = remedies.iter().map(|remedy| remedy.to_string().into()).collect();
        object.insert("text".to_owned(), receipt.to_string().into());
        object.insert("remedies".to_owned(), serde_json::Value::Array(remedies));
    }
    value.to_string()
}

/// Returns the kept receipts of a device, or of all devices, as JSON, oldest first.
#[pyfunction]
#[pyo3(signature = (device=None))]
pub(crate) fn receipts(py: Python<'_>, device: Option<i64>) -> Vec<String> {
    py.detach(|| {
        let of = |(index, _): &(usize, _)| {
            device.is_none_or(|device| usize::try_from(device).is_ok_and(|it| it == *index))
        };
        let kept = devices().made().filter(of).flat_map(|(_, engine)| engine.receipts());
        let mut kept: Vec<_> = kept.collect();
        kept.sort_by_key(|receipt| receipt.at + receipt.took);
        kept.iter().map(|receipt| json(receipt)).collect()
    })
}

/// Returns the receipt, as JSON, of the refusal that the text of an exception belongs to.
#[pyfunction]
pub(crate) fn receipt_for(text: &Bound<'_, PyString>) -> Option<String> {
    refusal::receipt_of(text).map(|receipt| json(&receipt))
}

/// Keeps this many receipts of each device.
#[pyfunction]
pub(crate) fn keep_receipts(py: Python<'_>, count: usize) -> PyResult<()> {
    const MOST: usize = 1 << 20;
    if count > MOST {
        return Err(PyValueError::new_err(format!(
            "{count} receipts are too many: at most {MOST}"
        )));
    }
    KEPT.store(count, Ordering::Relaxed);
    py.detach(|| devices().made().for_each(|(_, engine)| engine.keep_receipts(count)));
    Ok(())
}

static OBSERVER: Mutex<Option<Py<PyAny>>> = Mutex::new(None);

/// Locks the observer while this process forks.
pub(crate) fn hold() -> impl Sized + 'static {
    lock(&OBSERVER)
}

/// Calls `observer(text)` with every later receipt, on the thread that was short of memory. `None`
/// ends that.
#[pyfunction]
#[pyo3(signature = (observer=None))]
pub(crate) fn observe_receipts(observer: Option<Py<PyAny>>) {
    let before = std::mem::replace(&mut *lock(&OBSERVER), observer);
    // After the lock is released: dropping a Python object may run any Python code.
    drop(before);
}

fn tell(receipt: &Receipt) {
    if lock(&OBSERVER).is_none() {
        return;
    }
    let text = json(receipt);
    gil::attach_within(PATIENCE, PATIENCE, |py| {
        let told = lock(&OBSERVER).as_ref().map(|observer| observer.clone_ref(py));
        if let Some(told) = told
            && let Err(error) = told.call1(py, (text,))
        {
            exceptions::show(py, error, told.bind(py));
        }
    });
}

/// Returns the Python stack of each tag; nothing if no tag has one.
fn stacks_of(tags: &[Tag]) -> Vec<Vec<String>> {
    let has_stack = |tag: &Tag| recorder::stack_of(*tag).is_some();
    if !tags.iter().any(has_stack) {
        return Vec::new();
    }
    let tags = tags.to_vec();
    let told = gil::attach_within(PATIENCE, PATIENCE, move |py| {
        tags.iter().map(|&tag| stack_of(py, tag).unwrap_or_default()).collect()
    });
    told.unwrap_or_default()
}

fn stack_of(py: Python<'_>, tag: Tag) -> PyResult<Vec<String>> {
    let Some(stack) = recorder::stack_of(tag) else { return Ok(Vec::new()) };
    let frames: Bound<'_, PyList> = stacks::show(py, stack)?;
    let mut lines = Vec::new();
    for frame in frames.iter().take(MOST_FRAMES) {
        let frame = frame.cast_into::<PyDict>()?;
        let part = |name: &str| -> PyResult<String> {
            let value = frame.get_item(name)?;
            Ok(value.map(|value| value.to_string()).unwrap_or_default())
        };
        let line = format!("{}:{} {}", part("filename")?, part("line")?, part("name")?);
        // Cuts the folders in front, and keeps the end.
        let cut = line.chars().count().saturating_sub(LONGEST_FRAME);
        lines.push(line.chars().skip(cut).collect());
    }
    Ok(lines)
}
