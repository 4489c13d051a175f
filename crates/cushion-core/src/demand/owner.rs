//! Who asks for memory: a thread, or a task that several threads may work for.
//!
//! Every thread has a number of its own from its first allocation on. A thread that says that it works
//! for a [`Task`] asks in the task's name: what it gets is the task's, and so is its place in the queue.
//! That is what lets the engine see that all who hold memory wait for each other.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use crate::base::names::Owner;
use crate::options::ladder::RungSet;

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&name_of(*self))
    }
}

thread_local! {
    /// For whom this thread asks; zero until it does.
    static CURRENT: Cell<u32> = const { Cell::new(0) };
    static PRIORITY: Cell<i32> = const { Cell::new(0) };
    /// The tasks it works for, the latest last, with what it did before the first.
    static WORK: RefCell<Work> = const { RefCell::new(Work { own: (0, 0), tasks: Vec::new() }) };
    static BUDGET: Cell<Option<Duration>> = const { Cell::new(None) };
    static SKIPPED: Cell<RungSet> = const { Cell::new(RungSet::NONE) };
    static IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
    static WAITED_IN_CALLBACK: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    /// Held for its drop, when the thread ends.
    static ALIVE: Cell<Option<Alive>> = const { Cell::new(None) };
}

/// For whom this thread asks.
pub(crate) fn current() -> Owner {
    let number = CURRENT.get();
    if number != 0 { Owner(number) } else { first_use() }
}

static IS_FOLLOWER: OnceLock<fn() -> bool> = OnceLock::new();

/// Sets how threads are known, on their first allocation, that do nothing but what another thread waits for: what
/// they ask for is asked for by whoever asked last. PyTorch's threads for gradients are such, and without this a
/// thread that runs out of memory would wait for them, and they for it. Only the first call counts.
pub fn set_followers(is_follower: fn() -> bool) {
    let _ = IS_FOLLOWER.set(is_follower);
}

#[cold]
fn first_use() -> Owner {
    if IS_FOLLOWER.get().is_some_and(|is_follower| is_follower()) {
        CURRENT.set(Owner::FOLLOWER.0);
        return Owner::FOLLOWER;
    }
    let name = std::thread::current().name().map(str::to_owned);
    let owner = owners().open(Kind::Thread, name);
    // A thread that is ending has no cell any more: its number is then as good as any.
    if ALIVE.try_with(|alive| alive.set(Some(Alive(owner)))).is_err() {
        owners().all.remove(&owner.0);
    }
    CURRENT.set(owner.0);
    owner
}

/// A thread, until it ends.
struct Alive(Owner);

impl Drop for Alive {
    fn drop(&mut self) {
        owners().all.remove(&self.0.0);
    }
}

/// For whom a thread works.
struct Work {
    /// Its own number and priority, while it works for somebody.
    own: (u32, i32),
    tasks: Vec<(u64, Task)>,
}

/// What somebody wants for their requests, whatever the options say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Wishes {
    pub(crate) priority: i32,
    /// How long each may wait, if that was said.
    pub(crate) budget: Option<Duration>,
    /// Rungs that are left out, beside those of the options.
    pub(crate) skipped: RungSet,
}

impl Wishes {
    /// These, and where they say nothing, those.
    pub(crate) fn or(self, others: &Self) -> Self {
        Self {
            priority: if self.priority == 0 { others.priority } else { self.priority },
            budget: self.budget.or(others.budget),
            skipped: self.skipped.and(others.skipped),
        }
    }
}

/// What this thread wants.
pub(crate) fn wishes() -> Wishes {
    Wishes { priority: PRIORITY.get(), budget: BUDGET.get(), skipped: SKIPPED.get() }
}

/// What an owner wants: the latest that a thread of its said.
pub(crate) fn wishes_of(owner: Owner) -> Wishes {
    owners().all.get(&owner.0).map(|known| known.wishes).unwrap_or_default()
}

/// Lets those who ask in this thread's name know what it wants.
fn tell_followers() {
    let owner = current();
    if let Some(known) = owners().all.get_mut(&owner.0) {
        known.wishes = wishes();
    }
}

/// Sets how much this thread's requests matter, from now on: of those that wait, the highest is served
/// first. Zero to begin with.
pub fn set_priority(priority: i32) {
    PRIORITY.set(priority);
    tell_followers();
}

/// How much this thread's requests matter.
#[must_use]
pub fn priority() -> i32 {
    PRIORITY.get()
}

/// Sets how long each request of this thread may wait, in the place of what the options say; `None` for
/// what they say. Returns what was set before.
pub fn set_budget(budget: Option<Duration>) -> Option<Duration> {
    let before = BUDGET.replace(budget);
    tell_followers();
    before
}

/// How long each request of this thread may wait, if it set that.
#[must_use]
pub fn budget() -> Option<Duration> {
    BUDGET.get()
}

/// Sets which rungs of the ladder this thread's requests leave out, beside those that the options leave out.
/// Returns what was set before.
pub fn set_skipped_rungs(skipped: RungSet) -> RungSet {
    let before = SKIPPED.replace(skipped);
    tell_followers();
    before
}

/// Which rungs this thread's requests leave out, beside those of the options.
#[must_use]
pub fn skipped_rungs() -> RungSet {
    SKIPPED.get()
}

/// Whether this thread is in a callback of a shortage. What it asks for then is served at once or refused.
#[must_use]
pub fn is_in_callback() -> bool {
    IN_CALLBACK.get()
}

/// Runs `f` as a part of a callback that another thread waits for: what it asks for asks no callbacks, and never waits.
pub fn in_callback<T>(f: impl FnOnce() -> T) -> T {
    let _inside = InCallback::enter();
    f()
}

/// Notes that a callback on this thread has waited so long for something that is not its own, such as a lock of the
/// language it is written in: that does not count as its time.
pub fn note_waiting_in_callback(waited: Duration) {
    WAITED_IN_CALLBACK.set(WAITED_IN_CALLBACK.get().saturating_add(waited));
}

/// How long that was, and begins again.
pub(crate) fn take_waiting_in_callback() -> Duration {
    WAITED_IN_CALLBACK.replace(Duration::ZERO)
}

/// For whom this thread asks, as in receipts.
#[must_use]
pub fn current_owner() -> Owner {
    current()
}

/// Notes that this thread is in a callback, until it is dropped.
pub(crate) struct InCallback {
    before: bool,
}

impl InCallback {
    pub(crate) fn enter() -> Self {
        Self { before: IN_CALLBACK.replace(true) }
    }
}

impl Drop for InCallback {
    fn drop(&mut self) {
        IN_CALLBACK.set(self.before);
    }
}

/// A piece of work that allocates, frees and ends, such as one request to a server. Registered until it
/// is dropped.
///
/// When every task that holds memory waits for more, none of them would ever be served: the least
/// valuable one's request fails at once then, and says so. Least valuable is the lowest priority, and of
/// those alike the task registered last.
///
/// ```
/// use cushion_core::{Engine, SimConfig, SimDriver, StreamId, Task};
///
/// let gpu = Engine::new(SimDriver::new(SimConfig::with_capacity(1 << 30)));
/// let task = Task::new("batch 7", 0);
/// std::thread::scope(|scope| {
///     scope.spawn(|| {
///         let _working = task.enter();
///         let address = gpu.alloc(3 << 20, StreamId(0)).unwrap();
///         gpu.free(address).unwrap();
///     });
/// });
/// ```
#[derive(Debug, Clone)]
pub struct Task(Arc<Registered>);

#[derive(Debug)]
struct Registered {
    owner: Owner,
    priority: i32,
}

impl Drop for Registered {
    fn drop(&mut self) {
        owners().all.remove(&self.owner.0);
    }
}

impl Task {
    /// Registers a task.
    #[must_use]
    pub fn new(name: impl Into<String>, priority: i32) -> Self {
        let owner = owners().open(Kind::Task { threads: 0 }, Some(name.into()));
        Self(Arc::new(Registered { owner, priority }))
    }

    /// The task as an owner of memory.
    #[must_use]
    pub fn owner(&self) -> Owner {
        self.0.owner
    }

    /// This thread works for the task until what is returned is dropped. Of several, the latest counts.
    #[must_use]
    pub fn enter(&self) -> Working {
        owners().count_threads(self.0.owner, 1);
        let number = WORK.with_borrow_mut(|work| {
            if work.tasks.is_empty() {
                work.own = (CURRENT.get(), PRIORITY.get());
            }
            let number = work.tasks.last().map_or(0, |(last, _)| last + 1);
            work.tasks.push((number, self.clone()));
            number
        });
        CURRENT.set(self.0.owner.0);
        PRIORITY.set(self.0.priority);
        tell_followers();
        Working { task: self.clone(), number, here: std::marker::PhantomData }
    }
}

/// This thread works for a task, until this is dropped; then for whom else it works, or for itself.
#[derive(Debug)]
pub struct Working {
    task: Task,
    number: u64,
    /// It is about one thread.
    here: std::marker::PhantomData<*const ()>,
}

impl Drop for Working {
    fn drop(&mut self) {
        let left = WORK.with_borrow_mut(|work| {
            let index = work.tasks.iter().position(|(number, _)| *number == self.number);
            let left = index.map(|index| work.tasks.remove(index));
            let latest = work.tasks.last().map(|(_, task)| (task.0.owner.0, task.0.priority));
            let (owner, priority) = latest.unwrap_or(work.own);
            CURRENT.set(owner);
            PRIORITY.set(priority);
            left
        });
        owners().count_threads(self.task.0.owner, -1);
        drop(left);
        // The thread's own followers, if it has an owner yet, know what it wants now.
        if CURRENT.get() != 0 {
            tell_followers();
        }
    }
}

/// What is known of an owner that is still there.
#[derive(Debug)]
struct Known {
    kind: Kind,
    name: Option<String>,
    wishes: Wishes,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Thread,
    Task {
        /// How many threads work for it now.
        threads: u32,
    },
}

/// All owners that are still there. Nothing here is touched unless memory runs out, a thread makes its
/// first allocation, or a task comes or goes.
#[derive(Debug)]
struct Owners {
    all: BTreeMap<u32, Known>,
    last: u32,
}

static OWNERS: Mutex<Owners> = Mutex::new(Owners { all: BTreeMap::new(), last: 0 });

fn owners() -> MutexGuard<'static, Owners> {
    OWNERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The lock of threads and tasks, held until this is dropped.
#[doc(hidden)]
#[derive(Debug)]
pub struct OwnersHeld(
    #[expect(dead_code, reason = "held for its drop")] MutexGuard<'static, Owners>,
);

/// Holds the lock of threads and tasks: for a process that is about to fork. In the child the thread that held it at that
/// moment would be no more, and the first to begin or end there, or to ask for whom it works, would wait for ever. Nothing is
/// waited for with this lock held, so it may be taken last, whatever else is held.
#[doc(hidden)]
#[must_use]
pub fn hold_owners() -> OwnersHeld {
    OwnersHeld(owners())
}

impl Owners {
    fn open(&mut self, kind: Kind, name: Option<String>) -> Owner {
        loop {
            self.last = self.last.wrapping_add(1);
            let taken = [Owner::NOBODY.0, Owner::FOLLOWER.0].contains(&self.last);
            if !taken && !self.all.contains_key(&self.last) {
                self.all.insert(self.last, Known { kind, name, wishes: Wishes::default() });
                return Owner(self.last);
            }
        }
    }

    fn count_threads(&mut self, owner: Owner, change: i32) {
        if let Some(Known { kind: Kind::Task { threads }, .. }) = self.all.get_mut(&owner.0) {
            *threads = threads.saturating_add_signed(change);
        }
    }
}

/// What an owner is to the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Standing {
    /// A thread or task that is no more: nobody will free what it left.
    Gone,
    Thread,
    /// A task, and how many threads work for it now.
    Task {
        threads: u32,
    },
}

/// What these owners are to the others.
pub(crate) fn standings(of: impl Iterator<Item = Owner>) -> BTreeMap<Owner, Standing> {
    let owners = owners();
    let standing = |owner: Owner| match owners.all.get(&owner.0).map(|known| known.kind) {
        None => Standing::Gone,
        Some(Kind::Thread) => Standing::Thread,
        Some(Kind::Task { threads }) => Standing::Task { threads },
    };
    of.map(|owner| (owner, standing(owner))).collect()
}

/// The name of an owner, for people.
pub(crate) fn name_of(owner: Owner) -> String {
    if owner == Owner::NOBODY {
        return "nobody".to_owned();
    }
    let owners = owners();
    let number = owner.0;
    match owners.all.get(&number) {
        Some(Known { kind: Kind::Thread, name: Some(name), .. }) => {
            format!("thread {number} ({name})")
        }
        Some(Known { kind: Kind::Thread, name: None, .. }) => format!("thread {number}"),
        Some(Known { kind: Kind::Task { .. }, name, .. }) => {
            format!("task {}", name.as_deref().unwrap_or_default())
        }
        None => format!("{number}, which has ended"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn standing(owner: Owner) -> Standing {
        standings(std::iter::once(owner))[&owner]
    }

    #[test]
    fn threads_come_and_go() {
        let here = current();
        assert_eq!((here, standing(here)), (current(), Standing::Thread));
        let there = std::thread::Builder::new()
            .name("loader".into())
            .spawn(|| (current(), name_of(current())))
            .unwrap()
            .join()
            .unwrap();
        assert_ne!(there.0, here);
        assert_eq!(there.1, format!("thread {} (loader)", there.0.0));
        assert_eq!(standing(there.0), Standing::Gone);
    }

    #[test]
    fn a_thread_works_for_a_task_and_then_for_itself_again() {
        let own = current();
        set_priority(3);
        let outer = Task::new("outer", 7);
        let inner = Task::new("inner", -1);
        {
            let _outer = outer.enter();
            assert_eq!((current(), priority()), (outer.owner(), 7));
            {
                let _inner = inner.enter();
                assert_eq!((current(), priority()), (inner.owner(), -1));
                assert_eq!(standing(outer.owner()), Standing::Task { threads: 1 });
            }
            assert_eq!(current(), outer.owner());
        }
        assert_eq!((current(), priority()), (own, 3));
        assert_eq!(standing(outer.owner()), Standing::Task { threads: 0 });
        let owner = outer.owner();
        drop(outer);
        assert_eq!(standing(owner), Standing::Gone);
    }

    #[test]
    fn budgets_are_a_threads_own() {
        assert_eq!(set_budget(Some(Duration::ZERO)), None);
        assert_eq!(std::thread::spawn(budget).join().unwrap(), None);
        assert_eq!(set_budget(None), Some(Duration::ZERO));
    }
}
