//! The engine's clock, on real time.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, Mutex, MutexGuard, Once, PoisonError};
use std::task::Waker;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use cushion_core::{Bell, Clock};

/// Time since the Unix epoch. The system's clock is read once, when this clock is made; from then
/// on time never goes backwards, even if the system's clock is set.
#[derive(Debug, Clone, Copy)]
pub struct SystemClock {
    made: Instant,
    made_at: Duration,
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl SystemClock {
    /// Makes a clock that starts now.
    #[must_use]
    #[expect(clippy::disallowed_methods, reason = "all other code reads this clock")]
    pub fn new() -> Self {
        let made_at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { made: Instant::now(), made_at }
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Duration {
        self.made_at + self.made.elapsed()
    }

    fn wait(&self, at_most: Duration, bell: &Bell) {
        bell.wait_at_most(at_most);
    }

    fn wake_at(&self, at: Duration, waker: Waker) {
        let at = at.saturating_sub(self.made_at);
        match self.made.checked_add(at) {
            Some(at) => ALARMS.set(at, waker),
            // The time is too far away to represent; nothing will wait that long.
            None => drop(waker),
        }
    }
}

/// Futures to wake, each at its time. One thread, started with the first alarm, wakes them; a
/// runtime's own timers would tie an allocation to that runtime.
#[derive(Debug)]
struct Alarms {
    waiting: Mutex<Waiting>,
    sooner: Condvar,
    thread: Once,
}

#[derive(Debug)]
struct Waiting {
    alarms: BTreeMap<(Instant, u64), Waker>,
    set: u64,
}

static ALARMS: Alarms = Alarms {
    waiting: Mutex::new(Waiting { alarms: BTreeMap::new(), set: 0 }),
    sooner: Condvar::new(),
    thread: Once::new(),
};

/// Locks the list of alarms while this process forks.
pub(crate) fn hold_alarms() -> impl Sized + 'static {
    ALARMS.waiting()
}

impl Alarms {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&'static self, at: Instant, waker: Waker) {
        let is_next = {
            let mut waiting = self.waiting();
            waiting.set += 1;
            let key = (at, waiting.set);
            waiting.alarms.insert(key, waker);
            waiting.alarms.first_key_value().is_some_and(|(first, _)| *first == key)
        };
        if is_next {
            self.sooner.notify_one();
        }
        self.thread.call_once(|| {
            let thread = std::thread::Builder::new().name("cushion-alarms".to_owned());
            // Without the thread, frees still wake the futures, but their budgets are not kept.
            let _ = thread.spawn(|| self.run());
        });
    }

    #[expect(clippy::disallowed_methods, reason = "all other code reads this clock")]
    fn run(&self) {
        let mut waiting = self.waiting();
        loop {
            let now = Instant::now();
            let later = waiting.alarms.split_off(&(now, u64::MAX));
            let due = std::mem::replace(&mut waiting.alarms, later);
            if !due.is_empty() {
                drop(waiting);
                for waker in due.into_values() {
                    // A waker that panics must not stop the alarms of other futures.
                    let _ = catch_unwind(AssertUnwindSafe(|| waker.wake()));
                }
                waiting = self.waiting();
                continue;
            }
            let next = waiting.alarms.first_key_value().map(|(&(at, _), _)| at);
            let for_long = Duration::from_secs(3600);
            let pause = next.map_or(for_long, |at| at.saturating_duration_since(now));
            let waited = self.sooner.wait_timeout(waiting, pause);
            waiting = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_is_current_and_advances() {
        let clock = SystemClock::new();
        let before = clock.now();
        assert!(before > Duration::from_secs(1_600_000_000));
        clock.wait(Duration::from_millis(2), &Bell::default());
        assert!(clock.now() >= before + Duration::from_millis(2));
    }

    /// Wakes by sending its number.
    struct Sends(u32, std::sync::mpsc::Sender<u32>);

    impl std::task::Wake for Sends {
        fn wake(self: std::sync::Arc<Self>) {
            let _ = self.1.send(self.0);
        }
    }

    #[test]
    fn alarms_go_off_in_the_order_of_their_times() {
        let clock = SystemClock::new();
        let (sender, receiver) = std::sync::mpsc::channel();
        let now = clock.now();
        for (number, millis) in [(3, 30), (1, 0), (2, 10)] {
            let waker = std::sync::Arc::new(Sends(number, sender.clone())).into();
            clock.wake_at(now + Duration::from_millis(millis), waker);
        }
        clock.wake_at(Duration::MAX, std::sync::Arc::new(Sends(4, sender)).into());
        assert_eq!(receiver.iter().take(3).collect::<Vec<_>>(), [1, 2, 3]);
    }
}
