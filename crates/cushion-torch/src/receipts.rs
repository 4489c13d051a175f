//! Receipts for Python: as JSON, with the Python stacks that tags stand for, and as they come.

use std::cell::RefCell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cushion::core::{Receipt, Tag};
use cushion::{DeviceEngine, devices};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::{callbacks, gil, lock, recorder, stacks};

/// How long a thread that was short of memory waits for Python's lock to tell of it.
const PATIENCE: Duration = Duration::from_secs(1);

/// How many frames of a stack a receipt has at most.
const MOST_FRAMES: usize = 24;

/// How many characters of a frame.
const LONGEST_FRAME: usize = 256;

/// How many receipts an engine keeps; what it keeps by itself if nobody has said.
static KEPT: AtomicUsize = AtomicUsize::new(UNSAID);
const UNSAID: usize = usize::MAX;

thread_local! {
    /// The latest receipt of this thread, kept for the message even where none are.
    static LATEST: RefCell<Option<Arc<Receipt>>> = const { RefCell::new(None) };
}

/// Every engine has its receipts explained, tells who wants to know, and asks the program's callbacks.
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

/// The receipt of this number, of the shortage that this thread has just had, or of those that are kept.
pub(crate) fn find(engine: &DeviceEngine, number: u64) -> Option<Arc<Receipt>> {
    use cushion::core::Driver as _;

    let device = engine.driver().properties().device;
    let is_it = |receipt: &Arc<Receipt>| (receipt.device, receipt.number) == (device, number);
    LATEST.with_borrow(|latest| latest.clone().filter(is_it)).or_else(|| engine.receipt(number))
}

/// A receipt as Python gets it: as in files, with its line for people and what would help in words.
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

/// The receipts kept of a device, or of all, as JSON, oldest first.
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

/// One receipt as JSON, if it is still kept.
#[pyfunction]
pub(crate) fn receipt(py: Python<'_>, device: i64, number: u64) -> Option<String> {
    py.detach(|| find(devices().get(device)?, number).map(|receipt| json(&receipt)))
}

/// Keeps so many receipts of each device.
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

// ---- as they come ----

static OBSERVER: Mutex<Option<Py<PyAny>>> = Mutex::new(None);

/// Holds the observer, while this process forks.
pub(crate) fn hold() -> impl Sized + 'static {
    lock(&OBSERVER)
}

/// Calls `observer(text)` with every receipt from now on, on the thread that was short of memory; `None` ends it.
#[pyfunction]
#[pyo3(signature = (observer=None))]
pub(crate) fn observe_receipts(observer: Option<Py<PyAny>>) {
    let before = std::mem::replace(&mut *lock(&OBSERVER), observer);
    // With the lock above let go: what it holds of Python's may do anything as it goes.
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
            callbacks::show(py, error, told.bind(py));
        }
    });
}

// ---- words ----

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
        // The end says more than the folders before it.
        let cut = line.chars().count().saturating_sub(LONGEST_FRAME);
        lines.push(line.chars().skip(cut).collect());
    }
    Ok(lines)
}

/// An exception in one line: its class, its text, and where it was raised.
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
