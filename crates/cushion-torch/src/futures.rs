//! Memory as a future of Python's: requests that no thread waits for.
//!
//! One thread goes on with each request when something it waits for has happened: whoever gives memory back only
//! notes that, and never needs Python's lock for it. When a request is served or refused, a function of Python's is
//! called with the outcome.

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

use crate::recorder::Noted;
use crate::throw::Failure;
use crate::{callbacks, gil, lock, refusal};

type Request = AllocFuture<'static, DeviceDriver>;

/// A request on its way.
struct Task {
    device: i64,
    /// None once it is over. What is noted beside it stays as long.
    request: Mutex<Option<(Request, Noted)>>,
    /// What is called at the end, with the address, or none and why.
    done: Mutex<Option<Py<PyAny>>>,
    /// Whether it waits to be gone on with.
    queued: AtomicBool,
    cancelled: AtomicBool,
}

/// A request that can be given up.
#[pyclass(frozen)]
pub(crate) struct Pending(Arc<Task>);

#[pymethods]
impl Pending {
    /// Gives the request up, unless it is over; `done(None, None, False)` says that it was.
    fn cancel(&self) {
        self.0.cancelled.store(true, Ordering::Release);
        // Not here: the request may be at a rung that needs Python's lock, which this thread has.
        Arc::clone(&self.0).wake();
    }
}

/// Goes on with requests.
#[derive(Default)]
struct Executor {
    ready: Mutex<VecDeque<Arc<Task>>>,
    more: Condvar,
}

static EXECUTOR: OnceLock<Executor> = OnceLock::new();

/// Holds the requests to go on with, while this process forks.
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

/// Starts a request; calls `done(address, None, False)`, or `done(None, why, is_out_of_memory)`, when it is over, or
/// `done(None, None, False)` when it was given up.
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
        // It never waits; and the thread of futures may be the one that waits for this callback.
        task.queued.store(true, Ordering::Release);
        Arc::clone(&task).go_on();
    } else {
        begin()?;
        Arc::clone(&task).wake();
    }
    Ok(Pending(task))
}

fn begin() -> Result<(), Failure> {
    static BEGUN: Mutex<bool> = Mutex::new(false);
    let mut begun = lock(&BEGUN);
    if !*begun {
        let executor = EXECUTOR.get_or_init(Executor::default);
        let thread = std::thread::Builder::new().name("cushion-futures".to_owned());
        thread.spawn(|| executor.run()).map_err(|error| {
            Failure::Other(format!("Cushion: no thread for memory as a future: {error}"))
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
            // A bug of ours in one request is not to leave all others without an end.
            let failed = catch_unwind(AssertUnwindSafe(|| Arc::clone(&task).go_on())).is_err();
            if failed {
                let text = "Cushion: a bug of its own, please report it: a request panicked";
                task.tell((None, Some(text.to_owned()), false));
            }
        }
    }
}

impl Task {
    fn go_on(self: Arc<Self>) {
        self.queued.store(false, Ordering::Release);
        let mut request = lock(&self.request);
        if self.cancelled.load(Ordering::Acquire) {
            // Gives its place back.
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
                // A refusal may make the program's last calls: others are not to wait for those.
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
            Failure::OutOfMemory(text) => self.tell((None, Some(text), true)),
            Failure::Other(text) => self.tell((None, Some(text), false)),
        }
    }

    fn tell(&self, outcome: (Option<u64>, Option<String>, bool)) {
        gil::attach_ours(|py| {
            let done = lock(&self.done).take();
            if let Some(done) = done
                && let Err(error) = done.call1(py, outcome)
            {
                callbacks::show(py, error, done.bind(py));
            }
        });
    }
}
