//! Owners: threads, and tasks that several threads may work for.
//!
//! Every thread gets a number at its first allocation. A thread that enters a [`Task`] asks in the
//! task's name: the task owns the memory and the place in the queue. From the owners the engine can
//! tell that all owners of memory wait for each other.

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
    /// The owner of this thread's requests; zero before its first one.
    static CURRENT: Cell<u32> = const { Cell::new(0) };
    static PRIORITY: Cell<i32> = const { Cell::new(0) };
    /// The tasks that this thread has entered, latest last, and its own number and priority.
    static WORK: RefCell<Work> = const { RefCell::new(Work { own: (0, 0), tasks: Vec::new() }) };
    static BUDGET: Cell<Option<Duration>> = const { Cell::new(None) };
    static SKIPPED: Cell<RungSet> = const { Cell::new(RungSet::NONE) };
    static IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
    static WAITED_IN_CALLBACK: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    /// Dropped when the thread ends.
    static ALIVE: Cell<Option<Alive>> = const { Cell::new(None) };
}

/// Returns the owner of this thread's requests.
pub(crate) fn current() -> Owner {
    let number = CURRENT.get();
    if number != 0 { Owner(number) } else { first_use() }
}

static IS_FOLLOWER: OnceLock<fn() -> bool> = OnceLock::new();

/// Sets how follower threads are recognised, at their first allocation. A follower does nothing but
/// work that another thread waits for; its requests belong to the owner of the latest request
/// before them. PyTorch's gradient threads are followers: without this, a thread that runs out of
/// memory would wait for them while they wait for it. Only the first call has an effect.
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
    // In a thread that is ending, the cell is already gone, and nothing would remove the owner.
    if ALIVE.try_with(|alive| alive.set(Some(Alive(owner)))).is_err() {
        owners().all.remove(&owner.0);
    }
    CURRENT.set(owner.0);
    owner
}

/// Removes a thread's owner when the thread ends.
struct Alive(Owner);

impl Drop for Alive {
    fn drop(&mut self) {
        owners().all.remove(&self.0.0);
    }
}

/// The tasks that a thread works for.
struct Work {
    /// The thread's own number and priority, while it works for a task.
    own: (u32, i32),
    tasks: Vec<(u64, Task)>,
}

/// Priority, budget and skipped rungs of an owner's requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Wishes {
    pub(crate) priority: i32,
    /// How long each request may wait; `None` leaves that to the options.
    pub(crate) budget: Option<Duration>,
    /// Rungs skipped in addition to those of the options.
    pub(crate) skipped: RungSet,
}

impl Wishes {
    /// Returns these wishes, with `others` where these are unset.
    pub(crate) fn or(self, others: &Self) -> Self {
        Self {
            priority: if self.priority == 0 { others.priority } else { self.priority },
            budget: self.budget.or(others.budget),
            skipped: self.skipped.and(others.skipped),
        }
    }
}

/// Returns the wishes of this thread.
pub(crate) fn wishes() -> Wishes {
    Wishes { priority: PRIORITY.get(), budget: BUDGET.get(), skipped: SKIPPED.get() }
}

/// Returns the wishes that a thread of this owner set last.
pub(crate) fn wishes_of(owner: Owner) -> Wishes {
    owners().all.get(&owner.0).map(|known| known.wishes).unwrap_or_default()
}

/// Publishes this thread's wishes under its owner, for its followers.
fn tell_followers() {
    let owner = current();
    if let Some(known) = owners().all.get_mut(&owner.0) {
        known.wishes = wishes();
    }
}

/// Sets the priority of this thread's requests from now on. Of the requests that wait, the one with
/// the highest priority is served first. The default is zero.
pub fn set_priority(priority: i32) {
    PRIORITY.set(priority);
    tell_followers();
}

/// Returns the priority of this thread's requests.
#[must_use]
pub fn priority() -> i32 {
    PRIORITY.get()
}

/// Sets how long each request of this thread may wait, overriding the options; `None` restores
/// them. Returns the previous value.
pub fn set_budget(budget: Option<Duration>) -> Option<Duration> {
    let before = BUDGET.replace(budget);
    tell_followers();
    before
}

/// Returns how long each request of this thread may wait, if it was set.
#[must_use]
pub fn budget() -> Option<Duration> {
    BUDGET.get()
}

/// Sets the rungs that this thread's requests skip, in addition to those of the options. Returns
/// the previous value.
pub fn set_skipped_rungs(skipped: RungSet) -> RungSet {
    let before = SKIPPED.replace(skipped);
    tell_followers();
    before
}

/// Returns the rungs that this thread's requests skip, in addition to those of the options.
#[must_use]
pub fn skipped_rungs() -> RungSet {
    SKIPPED.get()
}

/// Returns whether this thread runs a shortage callback. Its requests are then served at once or
/// refused.
#[must_use]
pub fn is_in_callback() -> bool {
    IN_CALLBACK.get()
}

/// Runs `f` as part of a callback that another thread waits for: requests in it call no callbacks
/// and never wait.
pub fn in_callback<T>(f: impl FnOnce() -> T) -> T {
    let _inside = InCallback::enter();
    f()
}

/// Notes that a callback on this thread waited this long for something it does not control, such as
/// the lock of an interpreter. That time does not count as the callback's.
pub fn note_waiting_in_callback(waited: Duration) {
    WAITED_IN_CALLBACK.set(WAITED_IN_CALLBACK.get().saturating_add(waited));
}

/// Returns the time noted by [`note_waiting_in_callback`] and resets it.
pub(crate) fn take_waiting_in_callback() -> Duration {
    WAITED_IN_CALLBACK.replace(Duration::ZERO)
}

/// Returns the owner of this thread's requests, as receipts name it.
#[must_use]
pub fn current_owner() -> Owner {
    current()
}

/// Marks this thread as running a callback, until dropped.
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

/// A unit of work that allocates, frees and ends, such as one request to a server. It is registered
/// until dropped.
///
/// When every task that holds memory waits for more, no request could ever be served. Then the
/// request of the least valuable task fails at once, with an error that says so. The least valuable
/// task is the one with the lowest priority; among equals, the one registered last.
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

    /// Returns the task as an owner of memory.
    #[must_use]
    pub fn owner(&self) -> Owner {
        self.0.owner
    }

    /// Makes this thread work for the task until the returned guard is dropped. If a thread has
    /// entered several tasks, the latest counts.
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

/// This thread works for a task until this guard is dropped; then for the task entered before it,
/// or for itself.
#[derive(Debug)]
pub struct Working {
    task: Task,
    number: u64,
    /// Not `Send`: the guard belongs to one thread.
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
        // Followers of the thread use its own wishes again, if it has an owner yet.
        if CURRENT.get() != 0 {
            tell_followers();
        }
    }
}

/// An owner that still exists.
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

/// All owners that still exist. Touched only when memory runs out, when a thread makes its first
/// allocation or ends, and when a task is created, entered, left or dropped, or wishes change.
#[derive(Debug)]
struct Owners {
    all: BTreeMap<u32, Known>,
    last: u32,
}

static OWNERS: Mutex<Owners> = Mutex::new(Owners { all: BTreeMap::new(), last: 0 });

fn owners() -> MutexGuard<'static, Owners> {
    OWNERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The lock of the owner table, held until this is dropped.
#[doc(hidden)]
#[derive(Debug)]
pub struct OwnersHeld(
    #[expect(dead_code, reason = "held for its drop")] MutexGuard<'static, Owners>,
);

/// Takes the lock of the owner table, for a process that is about to fork. If another thread held
/// it during the fork, every use of it in the child would block forever. No code waits while it
/// holds this lock, so it may be taken last, with other locks held.
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

/// Whether an owner exists, and what kind it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Standing {
    /// The thread or task has ended: it will not free the memory it still holds.
    Gone,
    Thread,
    /// A task, and how many threads work for it now.
    Task {
        threads: u32,
    },
}

/// Returns the standing of each owner.
pub(crate) fn standings(of: impl Iterator<Item = Owner>) -> BTreeMap<Owner, Standing> {
    let owners = owners();
    let standing = |owner: Owner| match owners.all.get(&owner.0).map(|known| known.kind) {
        None => Standing::Gone,
        Some(Kind::Thread) => Standing::Thread,
        Some(Kind::Task { threads }) => Standing::Task { threads },
    };
    of.map(|owner| (owner, standing(owner))).collect()
}

/// Returns the name of an owner, for people.
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
    fn an_owner_is_gone_when_its_thread_ends() {
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
