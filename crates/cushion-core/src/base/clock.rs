//! Time and waiting, behind a trait: the engine never reads a clock of its own, so budgets and
//! backoff can be tested by seed on virtual time.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::Duration;

/// Where the engine gets the time from, and how it waits.
pub trait Clock: Debug + Send + Sync {
    /// Time since an origin of the clock's own choosing; never goes back.
    fn now(&self) -> Duration;

    /// Returns after `at_most` has passed on this clock, or as soon as the bell is rung. Never called
    /// with a lock held.
    fn wait(&self, at_most: Duration, bell: &Bell);

    /// Wakes a future once the clock shows `at`.
    fn wake_at(&self, at: Duration, waker: Waker);
}

/// What a waiting request is woken by, be it a thread or a future.
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

    /// Wakes who waits; one who is about to wait does not. Runs a future's waker, so that no lock may be held.
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

    /// Whether it was rung since this was last asked.
    pub fn take(&self) -> bool {
        std::mem::take(&mut self.inner().rung)
    }

    /// Waits for a ring, at most this long of real time: for clocks that show real time.
    pub fn wait_at_most(&self, at_most: Duration) {
        let mut inner = self.inner();
        if !inner.rung {
            let waited = self.rung.wait_timeout_while(inner, at_most, |inner| !inner.rung);
            inner = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        inner.rung = false;
    }

    /// The next ring wakes this future; if it was rung already, at once.
    pub(crate) fn wakes(&self, waker: &Waker) {
        // Cloned and dropped with no lock held: a waker is a runtime's own code.
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

/// A clock that moves only when told to, or when somebody waits on it.
#[derive(Debug, Default)]
pub struct VirtualClock {
    state: Mutex<Virtual>,
}

#[derive(Debug, Default)]
struct Virtual {
    now: Duration,
    alarms: BTreeMap<(Duration, u64), Waker>,
    set: u64,
}

impl VirtualClock {
    /// A clock at zero.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn state(&self) -> MutexGuard<'_, Virtual> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Moves the clock forward, and wakes whom that concerns.
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

    /// When the next future is to be woken.
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
        assert_eq!(clock.now(), Duration::from_millis(10), "a ring is heard once");
    }

    #[derive(Default)]
    struct Count(AtomicU32);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn alarms_go_off_when_their_time_has_come() {
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
        assert_eq!(count.0.load(Ordering::Relaxed), 3, "the past is now");
    }

    #[test]
    fn a_bell_wakes_threads_and_futures_and_forgets_no_ring() {
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
        assert_eq!(count.0.load(Ordering::Relaxed), 2, "rung while nobody listened");
    }
}
