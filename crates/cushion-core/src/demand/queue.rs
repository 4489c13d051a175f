//! The queue of requests that wait for memory.
//!
//! The request with the highest priority is served first; among equals, the one that asked first. A
//! request that was passed over often enough moves to the front. A request whose owner holds memory
//! may pass requests ahead that do not fit yet, because its owner frees that memory only if it can
//! go on. A request whose owner holds no memory waits for its turn.
//!
//! When no owner is left that could free memory, waiting is pointless: the least valuable request
//! is refused at once.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use super::holdings::{holders, holdings};
use super::owner::{self, Standing};
use crate::base::clock::Bell;
use crate::base::names::Owner;
use crate::heap::Heap;
use crate::heap::pool::LaneId;
use crate::memory::Request;
use crate::outcome::receipt::Outcome;

/// How often a request may be passed over before it moves to the front.
const PASSES: u32 = 64;

/// How long after it was due an unpolled future loses its place, so that it does not block other
/// requests.
const LATE: Duration = Duration::from_secs(1);

/// After how many checks the tasks that gave way are checked against the holders of memory.
const CHECK_EVERY: u32 = 256;

/// How many waiters one change wakes. The others look by themselves, and each request that is
/// served wakes more.
const WOKEN: usize = 16;

/// A request as the queue sees it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Queued {
    /// Its order among requests of the same priority.
    pub(crate) ticket: u64,
    pub(crate) owner: Owner,
    pub(crate) priority: i32,
    /// Whether a thread blocks until it is served, as opposed to a future.
    pub(crate) blocks: bool,
    /// The lane whose free blocks may serve it at once.
    pub(crate) lane: LaneId,
}

#[derive(Debug)]
struct Waiter {
    queued: Queued,
    bell: Arc<Bell>,
    passed: u32,
    /// The count of changes when it last tried without success.
    tried: Option<u64>,
    verdict: Option<Outcome>,
    /// Whether it gave way. It does not block other requests then.
    held_back: bool,
    /// Whether it must try although others are ahead: otherwise it is refused.
    urged: bool,
    /// When it looks again by itself, at the latest.
    looks_by: Duration,
}

impl Waiter {
    /// Returns whether it is a future that is no longer polled.
    fn is_forgotten(&self, now: Duration) -> bool {
        !self.queued.blocks && now > self.looks_by.saturating_add(LATE)
    }

    fn is_starved(&self) -> bool {
        self.passed >= PASSES
    }

    /// Returns its rank: the lowest rank is first.
    fn rank(&self) -> (Reverse<bool>, Reverse<i32>, u64) {
        (Reverse(self.is_starved()), Reverse(self.queued.priority), self.queued.ticket)
    }
}

/// The requests that wait.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    /// By ticket.
    waiting: BTreeMap<u64, Waiter>,
    last_ticket: u64,
    /// The time of the latest look.
    now: Duration,
    changes: u64,
    /// Requests on the ladder. Changes are counted while there are any.
    climbers: u32,
    /// Tasks that were told to give way, each with the tasks that held memory then. While all of
    /// these still hold memory, a task that gave way and starts again would only have to give way
    /// again.
    gave_way: BTreeMap<Owner, BTreeSet<Owner>>,
    /// Owners whose memory another owner freed, with the latest such owner. A thread may hand
    /// memory to other threads, which free it while it waits.
    freed_by: BTreeMap<Owner, Owner>,
    /// Checks since the tasks that gave way were compared with the holders of memory.
    since_checked: u32,
}

/// The waiters to wake once no lock is held.
pub(crate) type Bells = Vec<Arc<Bell>>;

impl Queue {
    /// Returns whether no request waits, climbs or is held back.
    pub(crate) fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.gave_way.is_empty() && self.climbers == 0
    }

    /// Counts a request that fell short.
    pub(crate) fn begin_climb(&mut self) {
        self.climbers += 1;
    }

    /// Counts the end of its climb.
    pub(crate) fn end_climb(&mut self) {
        self.climbers -= 1;
    }

    /// Notes that `by` freed memory that `owner` had asked for.
    #[cold]
    pub(crate) fn note_freed_by(&mut self, owner: Owner, by: Owner) {
        /// From this many entries on, threads that have ended are removed.
        const MOST: usize = 1024;
        if owner == Owner::NOBODY || by == Owner::NOBODY || by == Owner::FOLLOWER {
            return;
        }
        if self.freed_by.len() >= MOST && !self.freed_by.contains_key(&owner) {
            let standings = owner::standings(self.freed_by.keys().copied());
            self.freed_by.retain(|owner, _| standings[owner] != Standing::Gone);
        }
        self.freed_by.insert(owner, by);
    }

    /// Returns a new ticket, for a request that has just fallen short.
    pub(crate) fn ticket(&mut self) -> u64 {
        self.last_ticket += 1;
        self.last_ticket
    }

    /// Returns the number of changes so far that may help a request. Counted while a request is
    /// short of memory.
    pub(crate) fn changes(&self) -> u64 {
        self.changes
    }

    /// Adds the request to the queue, if it is not there yet. It looks again by `looks_by`.
    pub(crate) fn join(&mut self, queued: Queued, bell: &Arc<Bell>, looks_by: Duration) {
        let waiter = self.waiting.entry(queued.ticket).or_insert_with(|| {
            let bell = Arc::clone(bell);
            Waiter {
                queued,
                bell,
                passed: 0,
                tried: None,
                verdict: None,
                held_back: false,
                urged: false,
                looks_by,
            }
        });
        waiter.looks_by = looks_by;
    }

    /// Notes the time of a look at the queue.
    pub(crate) fn look(&mut self, now: Duration) {
        self.now = now;
    }

    /// Removes the request from the queue. Returns the waiters to wake.
    pub(crate) fn remove(&mut self, ticket: u64) -> Bells {
        if self.waiting.remove(&ticket).is_some() { self.changed() } else { Vec::new() }
    }

    /// Notes that a request was served that did not find memory at once.
    pub(crate) fn served(&mut self, queued: &Queued) {
        self.passed_over(queued.ticket);
        // A task that gave way has started again.
        self.gave_way.remove(&queued.owner);
    }

    /// Notes that a request was served: requests with an earlier ticket were passed over.
    pub(crate) fn passed_over(&mut self, ticket: u64) {
        for (_, waiter) in self.waiting.range_mut(..ticket) {
            waiter.passed = waiter.passed.saturating_add(1);
        }
    }

    /// Notes a change that may help requests that wait. Returns the waiters to wake.
    pub(crate) fn changed(&mut self) -> Bells {
        self.changes += 1;
        if self.waiting.is_empty() {
            return Vec::new();
        }
        // A verdict that its request has not read yet may no longer hold.
        self.waiting.values_mut().for_each(|waiter| waiter.verdict = None);
        let mut order: Vec<_> = self.waiting.values().collect();
        order.sort_unstable_by_key(|waiter| waiter.rank());
        order.into_iter().take(WOKEN).map(|waiter| Arc::clone(&waiter.bell)).collect()
    }

    /// Notes that the request has tried without success since the last change.
    pub(crate) fn tried(&mut self, ticket: u64) {
        if let Some(waiter) = self.waiting.get_mut(&ticket) {
            waiter.tried = Some(self.changes);
            waiter.urged = false;
        }
    }

    /// Returns whether the request must try although others are ahead.
    pub(crate) fn is_urged(&self, ticket: u64) -> bool {
        self.waiting.get(&ticket).is_some_and(|waiter| waiter.urged)
    }

    /// Sets whether the request is held back.
    pub(crate) fn hold_back(&mut self, ticket: u64, held_back: bool) {
        if let Some(waiter) = self.waiting.get_mut(&ticket) {
            waiter.held_back = held_back;
        }
    }

    /// Returns the verdict on a request that waits, if there is one.
    pub(crate) fn verdict(&self, ticket: u64) -> Option<Outcome> {
        self.waiting.get(&ticket).and_then(|waiter| waiter.verdict)
    }

    /// Sets the verdict on a request that waits; returns its bell.
    pub(crate) fn decide(&mut self, ticket: u64, verdict: Outcome) -> Option<Arc<Bell>> {
        let waiter = self.waiting.get_mut(&ticket)?;
        waiter.verdict = Some(verdict);
        Some(Arc::clone(&waiter.bell))
    }

    /// Refuses a request if it has tried since the last change. Otherwise it must try first:
    /// returns its bell.
    fn refuse(&mut self, least: Option<u64>, verdict: Outcome) -> Standstill {
        let changes = self.changes;
        match least.and_then(|ticket| self.waiting.get_mut(&ticket)) {
            None => Standstill::default(),
            Some(least) if least.tried != Some(changes) => {
                least.urged = true;
                Standstill { refused: None, bells: vec![Arc::clone(&least.bell)] }
            }
            Some(least) => {
                Standstill { refused: Some((least.queued.ticket, verdict)), bells: Bells::new() }
            }
        }
    }

    /// Returns how many requests wait.
    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    fn rank_of(&self, queued: &Queued) -> (Reverse<bool>, Reverse<i32>, u64) {
        let known = self.waiting.get(&queued.ticket).map(Waiter::rank);
        known.unwrap_or((Reverse(false), Reverse(queued.priority), queued.ticket))
    }

    /// Returns the waiters without a verdict, except unpolled futures.
    fn undecided(&self) -> impl Iterator<Item = &Waiter> {
        let is_there = |waiter: &&Waiter| !waiter.is_forgotten(self.now);
        self.waiting.values().filter(|waiter| waiter.verdict.is_none()).filter(is_there)
    }

    /// Returns the waiters ahead of a request. A thread does not wait for its own future: perhaps
    /// no other thread polls it.
    fn ahead_of(&self, queued: &Queued) -> impl Iterator<Item = &Waiter> {
        let rank = self.rank_of(queued);
        let (owner, ticket, blocks) = (queued.owner, queued.ticket, queued.blocks);
        self.undecided().filter(move |waiter| {
            let own_future = blocks && !waiter.queued.blocks && waiter.queued.owner == owner;
            let is_ahead = waiter.queued.ticket != ticket && waiter.rank() < rank;
            is_ahead && !own_future && !waiter.held_back
        })
    }

    /// Returns whether an owner that does not wait has freed memory of this owner before.
    fn may_be_freed_by_others(&self, owner: Owner) -> bool {
        let Some(&by) = self.freed_by.get(&owner) else { return false };
        let standing = owner::standings(std::iter::once(by))[&by];
        standing != Standing::Gone && !self.is_waiting(by, standing)
    }

    /// Returns whether all threads of the owner wait.
    fn is_waiting(&self, owner: Owner, standing: Standing) -> bool {
        let mut own = self.undecided().filter(|waiter| waiter.queued.owner == owner);
        match standing {
            Standing::Gone => true,
            Standing::Thread => own.any(|waiter| waiter.queued.blocks),
            Standing::Task { threads } => own.count() >= threads.max(1) as usize,
        }
    }
}

/// Memory that may serve a request without a free by another thread.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Supply {
    /// Bytes that the driver must have for the request.
    pub(crate) needed: u64,
    /// Bytes free on the device, cached or pending.
    pub(crate) by_itself: u64,
    /// Whether frees are pending, or other streams are at work on free memory that would help.
    pub(crate) work: bool,
    /// Whether memory of other processes would be enough.
    pub(crate) processes: bool,
}

/// The sources from which memory for a request may still come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sources {
    /// Pending frees, and free memory that other streams are at work on.
    pub(crate) events: bool,
    /// Memory of other threads and tasks.
    pub(crate) owners: bool,
    /// Memory of other processes.
    pub(crate) processes: bool,
    /// Its turn: requests ahead of it have still to try.
    pub(crate) turn: bool,
}

impl Sources {
    pub(crate) fn any(self) -> bool {
        self.events || self.owners || self.processes || self.turn
    }
}

/// What to do if no request can go on.
#[derive(Debug, Default)]
pub(crate) struct Standstill {
    /// The request to refuse, and its outcome.
    pub(crate) refused: Option<(u64, Outcome)>,
    /// Requests that were kept back and may try now.
    pub(crate) bells: Bells,
}

impl Queue {
    /// Returns whether a request may take free memory now, before it waits for others.
    pub(crate) fn may_try(&self, heap: &Heap, queued: &Queued) -> bool {
        let mut ahead = self.ahead_of(queued).peekable();
        if ahead.peek().is_none() {
            return true;
        }
        if ahead.any(|waiter| waiter.is_starved() || waiter.queued.owner == queued.owner) {
            return false;
        }
        // Futures keep their order, except those of tasks: a task makes one request at a time.
        let is_task = || {
            let standing = owner::standings(std::iter::once(queued.owner));
            matches!(standing.get(&queued.owner), Some(Standing::Task { .. }))
        };
        (queued.blocks || is_task())
            && heap.live_blocks().any(|block| block.holder.owner == queued.owner)
    }

    /// Returns whether a request that waits may take a free block of its own lane: all requests
    /// ahead wait for other lanes.
    pub(crate) fn may_take_own(&self, queued: &Queued) -> bool {
        !self.ahead_of(queued).any(|waiter| waiter.queued.lane == queued.lane)
    }

    /// Notes that a task was told to give way to the tasks that hold memory now.
    pub(crate) fn note_gave_way(&mut self, heap: &Heap, owner: Owner) {
        let mut others = holders(heap);
        others
            .retain(|&other, standing| other != owner && matches!(standing, Standing::Task { .. }));
        self.gave_way.insert(owner, others.into_keys().collect());
    }

    /// Returns whether a task gave way to others that all still hold memory, and has freed its own.
    pub(crate) fn is_held_back(&mut self, heap: &Heap, owner: Owner) -> bool {
        if self.gave_way.is_empty() {
            return false;
        }
        self.forget_gave_way(heap);
        let Some(others) = self.gave_way.get(&owner) else { return false };
        let holders = holders(heap);
        if holders.contains_key(&owner) {
            return false;
        }
        if !others.is_empty() && others.iter().all(|other| holders.contains_key(other)) {
            return true;
        }
        self.gave_way.remove(&owner);
        false
    }

    /// Forgets tasks that gave way and have ended, and tasks that gave way to an owner that has
    /// ended. Every [`CHECK_EVERY`] calls, also those that gave way to an owner that holds no
    /// memory any more. A task that does not ask again must not keep every request on the slow
    /// path.
    fn forget_gave_way(&mut self, heap: &Heap) {
        let all = self.gave_way.iter().flat_map(|(owner, others)| others.iter().chain([owner]));
        let standings = owner::standings(all.copied());
        let is_there = |owner: &Owner| standings[owner] != Standing::Gone;
        self.gave_way.retain(|owner, others| is_there(owner) && others.iter().all(is_there));
        self.since_checked += 1;
        if self.since_checked >= CHECK_EVERY {
            self.since_checked = 0;
            let holders = holders(heap);
            let holds = |owner: &Owner| holders.contains_key(owner);
            self.gave_way.retain(|_, others| others.iter().all(holds));
        }
    }

    /// Returns the sources from which memory may still come for a request that waits. `is_helped`
    /// says that a callback is running, which may free memory of any owner.
    pub(crate) fn sources(
        &self,
        heap: &Heap,
        queued: &Queued,
        request: &Request,
        supply: Supply,
        is_helped: bool,
    ) -> Sources {
        // Bytes of owners that may still free them, and bytes that are free or will be by
        // themselves.
        let (mut held, mut by_others, mut givers) = (0_u64, is_helped, BTreeSet::new());
        for (owner, (standing, bytes)) in holdings(heap) {
            let goes_on = !self.is_waiting(owner, standing) || self.may_be_freed_by_others(owner);
            by_others |= goes_on;
            // A task that waits can still be told to give way.
            let is_other_task = owner != queued.owner && matches!(standing, Standing::Task { .. });
            if goes_on || is_other_task || is_helped {
                held = held.saturating_add(bytes);
                givers.insert(owner);
            }
        }
        let most = held.saturating_add(supply.by_itself);
        let is_enough =
            most >= supply.needed || most >= request.size && may_leave_room(heap, request, &givers);
        let to_try = |waiter: &Waiter| waiter.tried != Some(self.changes);
        Sources {
            events: supply.work && is_enough,
            owners: by_others && is_enough,
            processes: supply.processes,
            turn: self.ahead_of(queued).any(to_try),
        }
    }

    /// Returns what to do if all owners of memory wait for each other.
    pub(crate) fn standstill(&mut self, heap: &Heap, sources: Sources) -> Standstill {
        if sources.events || sources.turn {
            return Standstill::default();
        }
        let holders = holders(heap);
        let is_task = |standing: &Standing| matches!(standing, Standing::Task { .. });
        let tasks: BTreeMap<_, _> =
            holders.iter().filter(|(_, standing)| is_task(standing)).collect();
        let all_wait = |queue: &Self| tasks.iter().all(|(&&o, &&s)| queue.is_waiting(o, s));
        if tasks.is_empty() || !all_wait(self) {
            let in_vain = !sources.owners && !sources.processes;
            let least = self
                .undecided()
                .min_by_key(|waiter| (waiter.queued.priority, Reverse(waiter.queued.ticket)));
            let least = least.filter(|_| in_vain).map(|least| least.queued.ticket);
            return self.refuse(least, Outcome::Full);
        }
        // Requests kept back for a starved request may fit.
        let mut kept_back = false;
        for waiter in self.waiting.values_mut().filter(|waiter| waiter.is_starved()) {
            waiter.passed = 0;
            kept_back = true;
        }
        if kept_back {
            return Standstill { refused: None, bells: self.changed() };
        }
        let verdict = if tasks.len() > 1 { Outcome::GiveWay } else { Outcome::Split };
        let holds = |waiter: &&Waiter| tasks.contains_key(&waiter.queued.owner);
        let least = self.undecided().filter(holds).min_by_key(|waiter| {
            let Queued { priority, owner, ticket, .. } = waiter.queued;
            (priority, Reverse(owner), Reverse(ticket))
        });
        let least = least.map(|least| least.queued.ticket);
        self.refuse(least, verdict)
    }
}

/// Returns whether a block for the request may become free in a segment in which one of `givers`
/// holds memory.
fn may_leave_room(heap: &Heap, request: &Request, givers: &BTreeSet<Owner>) -> bool {
    heap.live_blocks().filter(|block| givers.contains(&block.holder.owner)).any(|block| {
        let large_enough = heap[block.segment].size >= request.size;
        large_enough && heap[block.lane.pool].small == request.small
    })
}
