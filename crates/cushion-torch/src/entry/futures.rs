//! Memory as a Python future: requests for which no thread waits.
//!
//! One thread polls all requests. A thread that frees memory only queues the requests that can
//! continue, and does not need Python's lock for that. When a request is served or refused, the
//! polling thread calls a Python function with the outcome.

use std::collections::VecDeque;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::task::{Context as Polled, Poll, Wake, Waker};

use cushion::DeviceDriver;
use cushion::core::{AllocError, AllocFuture, is_in_callback};
use pyo3::prelude::*;

use crate::history::recorder::Noted;
use crate::process::{lock, panic_text};
use crate::python::{exceptions, gil};
use crate::pytorch::throw::Failure;
use crate::shortage::refusal;

type Request = AllocFuture<'static, DeviceDriver>;

/// A request, until it ends.
struct Task {
    device: i64,
    /// The request and its notes. None after the request has ended.
    request: Mutex<Option<(Request, Noted)>>,
    /// The function that gets the outcome. None after it was called.
    done: Mutex<Option<Py<PyAny>>>,
    /// Whether the request is in the queue to be polled.
    queued: AtomicBool,
    cancelled: AtomicBool,
}

/// A request that can be cancelled.
#[pyclass(frozen)]
pub(crate) struct Pending(Arc<Task>);

#[pymethods]
impl Pending {
    /// Cancels the request, unless it has ended; `done(None, None, False)` reports that.
    fn cancel(&self) {
        self.0.cancelled.store(true, Ordering::Release);
        // The polling thread drops the request. Here it may be locked by a rung that needs Python's
        // lock, which this thread holds.
        Arc::clone(&self.0).wake();
    }
}

/// Polls the requests that can continue.
#[derive(Default)]
struct Executor {
    ready: Mutex<VecDeque<Arc<Task>>>,
    more: Condvar,
}

static EXECUTOR: OnceLock<Executor> = OnceLock::new();

/// Locks the queue while this process forks.
pub(crate) fn hold() -> impl Sized + 'static {
    EXECUTOR.get().map(|executor| lock(&executor.ready))
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        if self.queued.swap(true, Ordering::AcqRel) {
            return;
        }
        if let Some(executor) = EXECUTOR.get() {
            lock(&executor.ready).push_back(self);
            executor.more.notify_one();
        }
    }
}

/// Starts a request. Calls `done(address, None, False)` when it is served,
/// `done(None, why, is_out_of_memory)` when it is refused, and `done(None, None, False)` when it is
/// cancelled.
pub(crate) fn start(
    device: i64,
    request: (Request, Noted),
    done: Py<PyAny>,
) -> Result<Pending, Failure> {
    let task = Arc::new(Task {
        device,
        request: Mutex::new(Some(request)),
        done: Mutex::new(Some(done)),
        queued: AtomicBool::new(false),
        cancelled: AtomicBool::new(false),
    });
    if is_in_callback() {
        // A request of a callback never waits, so it is polled here. The polling thread may be the
        // one that waits for this callback.
        task.queued.store(true, Ordering::Release);
        Arc::clone(&task).go_on();
    } else {
        begin()?;
        Arc::clone(&task).wake();
    }
    Ok(Pending(task))
}

/// Starts the polling thread, if it does not run yet.
fn begin() -> Result<(), Failure> {
    static BEGUN: Mutex<bool> = Mutex::new(false);
    let mut begun = lock(&BEGUN);
    if !*begun {
        let executor = EXECUTOR.get_or_init(Executor::default);
        let thread = std::thread::Builder::new().name("cushion-futures".to_owned());
        thread.spawn(|| executor.run()).map_err(|error| {
            Failure::Other(format!("Cushion: the thread for futures cannot be started: {error}"))
        })?;
        *begun = true;
    }
    Ok(())
}

impl Executor {
    fn run(&self) {
        loop {
            let mut ready = lock(&self.ready);
            let task = loop {
                match ready.pop_front() {
                    Some(task) => break task,
                    None => ready = self.more.wait(ready).unwrap_or_else(PoisonError::into_inner),
                }
            };
            drop(ready);
            // A panic in one request must not end the thread, which all others need.
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| Arc::clone(&task).go_on())) {
                let what = panic_text(&*panic);
                let text = format!("Cushion: internal error, please report it: {what}");
                task.tell((None, Some(text), false));
            }
        }
    }
}

impl Task {
    /// Polls the request once.
    fn go_on(self: Arc<Self>) {
        self.queued.store(false, Ordering::Release);
        let mut request = lock(&self.request);
        if self.cancelled.load(Ordering::Acquire) {
            // Dropping the request gives up its place in the queue of the engine.
            *request = None;
            drop(request);
            self.tell((None, None, false));
            return;
        }
        let Some((asked, _)) = request.as_mut() else { return };
        let waker = Waker::from(Arc::clone(&self));
        let polled = Pin::new(asked).poll(&mut Polled::from_waker(&waker));
        let Poll::Ready(outcome) = polled else { return };
        *request = None;
        drop(request);
        match outcome {
            Ok(address) => self.tell((Some(address), None, false)),
            Err(error) if is_in_callback() => self.refuse(&error),
            Err(error) => {
                // On a thread of its own: a refusal may make the last calls of the program, and
                // other requests must not wait for them.
                let (task, theirs) = (Arc::clone(&self), error.clone());
                let thread = std::thread::Builder::new().name("cushion-refusal".to_owned());
                if thread.spawn(move || task.refuse(&theirs)).is_err() {
                    self.refuse(&error);
                }
            }
        }
    }

    fn refuse(&self, error: &AllocError) {
        match refusal::refused(self.device, error) {
            Failure::OutOfMemory { message, .. } => self.tell((None, Some(message), true)),
            Failure::Other(text) => self.tell((None, Some(text), false)),
        }
    }

    fn tell(&self, outcome: (Option<u64>, Option<String>, bool)) {
        gil::attach_ours(|py| {
            let done = lock(&self.done).take();
            if let Some(done) = done
                && let Err(error) = done.call1(py, outcome)
            {
                exceptions::show(py, error, done.bind(py));
            }
        });
    }
}
