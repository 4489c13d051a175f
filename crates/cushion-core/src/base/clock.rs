//! Time and waiting behind a trait. The engine reads no other clock, so tests run budgets and
//! backoff on virtual time with reproducible results.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::Duration;

/// The engine's source of time, and its way to wait.
pub trait Clock: Debug + Send + Sync {
    /// Returns the time since an origin that the clock chooses. It never decreases.
    fn now(&self) -> Duration;

    /// Returns after `at_most` has passed on this clock, or as soon as the bell is rung. The caller
    /// holds no lock.
    fn wait(&self, at_most: Duration, bell: &Bell);

    /// Wakes a future when the clock shows `at`.
    fn wake_at(&self, at: Duration, waker: Waker);
}

/// Wakes a waiting request, which is a thread or a future.
#[derive(Debug, Default)]
pub struct Bell {
    inner: Mutex<Inner>,
    rung: Condvar,
}

#[derive(Debug, Default)]
struct Inner {
    rung: bool,
    waker: Option<Waker>,
}

impl Bell {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the waiter; if none waits yet, the next wait returns at once. The caller must hold no
    /// lock, because this runs a future's waker.
    pub(crate) fn ring(&self) {
        let waker = {
            let mut inner = self.inner();
            inner.rung = true;
            self.rung.notify_all();
            inner.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Returns whether the bell was rung since the last call or wait.
    pub fn take(&self) -> bool {
        std::mem::take(&mut self.inner().rung)
    }

    /// Waits in real time until the bell is rung, for at most `at_most`. Clocks that show real time
    /// use this.
    pub fn wait_at_most(&self, at_most: Duration) {
        let mut inner = self.inner();
        if !inner.rung {
            let waited = self.rung.wait_timeout_while(inner, at_most, |inner| !inner.rung);
            inner = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        inner.rung = false;
    }

    /// Registers a future that the next ring wakes. If the bell was rung already, wakes it at once.
    pub(crate) fn wakes(&self, waker: &Waker) {
        // Cloned and dropped without the lock: a waker runs code of the async runtime.
        let new = waker.clone();
        let (rung, _old) = {
            let mut inner = self.inner();
            let rung = std::mem::take(&mut inner.rung);
            (rung, if rung { Some(new) } else { inner.waker.replace(new) })
        };
        if rung {
            waker.wake_by_ref();
        }
    }
}

/// A clock that moves only by [`advance`](Self::advance), and by waits.
#[derive(Debug, Default)]
pub struct VirtualClock {
    state: Mutex<Virtual>,
}

#[derive(Debug, Default)]
struct Virtual {
    now: Duration,
    alarms: BTreeMap<(Duration, u64), Waker>,
    /// The number of alarms set so far; distinguishes alarms of the same time.
    set: u64,
}

impl VirtualClock {
    /// Creates a clock that shows zero.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn state(&self) -> MutexGuard<'_, Virtual> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Moves the clock forward and wakes all futures that are due.
    pub fn advance(&self, duration: Duration) {
        let due = {
            let mut state = self.state();
            state.now = state.now.saturating_add(duration);
            let later = (state.now, u64::MAX);
            let kept = state.alarms.split_off(&later);
            std::mem::replace(&mut state.alarms, kept)
        };
        due.into_values().for_each(Waker::wake);
    }

    /// Returns the time when the next future is due.
    #[must_use]
    pub fn next_alarm(&self) -> Option<Duration> {
        self.state().alarms.keys().next().map(|&(at, _)| at)
    }
}

impl Clock for VirtualClock {
    fn now(&self) -> Duration {
        self.state().now
    }

    fn wait(&self, at_most: Duration, bell: &Bell) {
        if !bell.take() {
            self.advance(at_most);
        }
    }

    fn wake_at(&self, at: Duration, waker: Waker) {
        let mut state = self.state();
        if at > state.now {
            state.set += 1;
            let key = (at, state.set);
            state.alarms.insert(key, waker);
            return;
        }
        drop(state);
        waker.wake();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::task::Wake;

    use super::*;

    #[test]
    fn virtual_time_moves_only_by_waiting() {
        let clock = VirtualClock::new();
        let bell = Bell::default();
        assert_eq!(clock.now(), Duration::ZERO);
        clock.wait(Duration::from_millis(3), &bell);
        clock.advance(Duration::from_millis(4));
        assert_eq!(clock.now(), Duration::from_millis(7));
        bell.ring();
        clock.wait(Duration::from_millis(3), &bell);
        assert_eq!(clock.now(), Duration::from_millis(7), "rung before");
        clock.wait(Duration::from_millis(3), &bell);
        assert_eq!(clock.now(), Duration::from_millis(10), "a ring ends one wait only");
    }

    #[derive(Default)]
    struct Count(AtomicU32);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn futures_are_woken_when_they_are_due() {
        let clock = VirtualClock::new();
        let count = Arc::new(Count::default());
        for millis in [5, 5, 9] {
            clock.wake_at(Duration::from_millis(millis), Arc::clone(&count).into());
        }
        assert_eq!(clock.next_alarm(), Some(Duration::from_millis(5)));
        clock.advance(Duration::from_millis(4));
        assert_eq!(count.0.load(Ordering::Relaxed), 0);
        clock.advance(Duration::from_millis(1));
        assert_eq!(count.0.load(Ordering::Relaxed), 2);
        clock.wake_at(Duration::from_millis(2), Arc::clone(&count).into());
        assert_eq!(count.0.load(Ordering::Relaxed), 3, "a time in the past is due at once");
    }

    #[test]
    fn a_bell_wakes_threads_and_futures_and_loses_no_ring() {
        let bell = Arc::new(Bell::default());
        let ringer = Arc::clone(&bell);
        let thread = std::thread::spawn(move || ringer.ring());
        bell.wait_at_most(Duration::from_secs(60));
        thread.join().unwrap();
        let count = Arc::new(Count::default());
        bell.wakes(&Arc::clone(&count).into());
        assert_eq!(count.0.load(Ordering::Relaxed), 0);
        bell.ring();
        assert_eq!(count.0.load(Ordering::Relaxed), 1);
        bell.wakes(&Arc::clone(&count).into());
        assert_eq!(count.0.load(Ordering::Relaxed), 2, "rung before the future registered");
    }
}
