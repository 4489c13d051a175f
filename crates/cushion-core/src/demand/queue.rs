//! Who waits for memory, in what order, and what for.
//!
//! Of those that wait, the highest priority is served first, and of those alike the one that asked first.
//! Nobody is passed over for ever: who has been passed over often enough comes before everybody. A request
//! of somebody who holds memory may pass those ahead that do not fit yet, because only if its owner goes on
//! will that memory ever be given back; a request of somebody who holds nothing queues up.
//!
//! When nobody who holds memory is left to give any back, waiting is in vain: the least valuable request is
//! told so at once.

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

/// How often a request may be passed over before it comes before everybody.
const PASSES: u32 = 64;

/// How much later than it would look by itself a future may look before it loses its place: who makes a future and
/// polls it no more keeps nobody waiting.
const LATE: Duration = Duration::from_secs(1);

/// After how many requests those who gave way are looked over.
const LOOKED_OVER: u32 = 256;

/// How many are woken at a time. The others look by themselves, and each that is served wakes more.
const WOKEN: usize = 16;

/// A request that may have to wait.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asker {
    /// Its place among those of its priority.
    pub(crate) ticket: u64,
    pub(crate) owner: Owner,
    pub(crate) priority: i32,
    /// A thread waits for it and does nothing else, as opposed to a future.
    pub(crate) blocks: bool,
    /// Where the free blocks are that may serve it at once.
    pub(crate) lane: LaneId,
}

#[derive(Debug)]
struct Waiter {
    asker: Asker,
    bell: Arc<Bell>,
    passed: u32,
    /// The count of changes when it last tried in vain.
    tried: Option<u64>,
    verdict: Option<Outcome>,
    /// It gave way, and keeps nobody else waiting.
    held_back: bool,
    /// It is to try, whoever is ahead: it would be refused otherwise.
    urged: bool,
    /// When it looks again by itself, at the latest.
    looks_by: Duration,
}

impl Waiter {
    /// Whether it is a future that nobody polls any more.
    fn is_forgotten(&self, now: Duration) -> bool {
        !self.asker.blocks && now > self.looks_by.saturating_add(LATE)
    }

    fn is_starved(&self) -> bool {
        self.passed >= PASSES
    }

    /// Who comes first has the lowest.
    fn rank(&self) -> (Reverse<bool>, Reverse<i32>, u64) {
        (Reverse(self.is_starved()), Reverse(self.asker.priority), self.asker.ticket)
    }
}

/// Who waits.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    /// By ticket.
    waiting: BTreeMap<u64, Waiter>,
    last_ticket: u64,
    /// When somebody last looked.
    now: Duration,
    changes: u64,
    /// Requests that fell short and are on their way up: what changes is counted from then on.
    climbers: u32,
    /// Tasks that were told to give way, each with those that held memory then. Until one of these holds none
    /// any more, a task that gave way and begins again would only have to give way once more.
    gave_way: BTreeMap<Owner, BTreeSet<Owner>>,
    /// Whose memory was given back by somebody else, and by whom last: what a thread hands on to others, they may
    /// free while it waits.
    freed_by: BTreeMap<Owner, Owner>,
    /// Requests since those who gave way were looked over.
    since_looked_over: u32,
}

/// Those to wake, once no lock is held.
pub(crate) type Bells = Vec<Arc<Bell>>;

impl Queue {
    /// Whether nobody waits and nobody is held back.
    pub(crate) fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.gave_way.is_empty() && self.climbers == 0
    }

    /// A request fell short.
    pub(crate) fn begin_climb(&mut self) {
        self.climbers += 1;
    }

    /// It is no longer on its way.
    pub(crate) fn end_climb(&mut self) {
        self.climbers -= 1;
    }

    /// Somebody gave back what another owner had asked for.
    #[cold]
    pub(crate) fn note_freed_by(&mut self, owner: Owner, by: Owner) {
        /// From this number on, threads that have ended are forgotten.
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

    /// A place in the queue, for a request that has just fallen short.
    pub(crate) fn ticket(&mut self) -> u64 {
        self.last_ticket += 1;
        self.last_ticket
    }

    /// Counts what may help somebody, as long as somebody is short of memory.
    pub(crate) fn changes(&self) -> u64 {
        self.changes
    }

    /// The request waits from now on, if it did not already.
    /// It looks again by `looks_by`.
    pub(crate) fn join(&mut self, asker: Asker, bell: &Arc<Bell>, looks_by: Duration) {
        let waiter = self.waiting.entry(asker.ticket).or_insert_with(|| {
            let bell = Arc::clone(bell);
            Waiter {
                asker,
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

    /// Somebody looks at who waits.
    pub(crate) fn look(&mut self, now: Duration) {
        self.now = now;
    }

    /// The request waits no longer.
    pub(crate) fn remove(&mut self, ticket: u64) -> Bells {
        if self.waiting.remove(&ticket).is_some() { self.changed() } else { Vec::new() }
    }

    /// A request that did not find memory at once was served.
    pub(crate) fn served(&mut self, asker: &Asker) {
        self.passed_over(asker.ticket);
        // A task that gave way has begun again.
        self.gave_way.remove(&asker.owner);
    }

    /// A request was served: those who asked before it were passed over.
    pub(crate) fn passed_over(&mut self, ticket: u64) {
        for (_, waiter) in self.waiting.range_mut(..ticket) {
            waiter.passed = waiter.passed.saturating_add(1);
        }
    }

    /// Something changed that may help those who wait: returns whom to wake.
    pub(crate) fn changed(&mut self) -> Bells {
        self.changes += 1;
        if self.waiting.is_empty() {
            return Vec::new();
        }
        // What was decided and not yet heard may be otherwise now.
        self.waiting.values_mut().for_each(|waiter| waiter.verdict = None);
        let mut order: Vec<_> = self.waiting.values().collect();
        order.sort_unstable_by_key(|waiter| waiter.rank());
        order.into_iter().take(WOKEN).map(|waiter| Arc::clone(&waiter.bell)).collect()
    }

    /// The request has tried in vain since the last change.
    pub(crate) fn tried(&mut self, ticket: u64) {
        if let Some(waiter) = self.waiting.get_mut(&ticket) {
            waiter.tried = Some(self.changes);
            waiter.urged = false;
        }
    }

    /// Whether the request is to try, whoever is ahead.
    pub(crate) fn is_urged(&self, ticket: u64) -> bool {
        self.waiting.get(&ticket).is_some_and(|waiter| waiter.urged)
    }

    /// Whether the request is held back.
    pub(crate) fn hold_back(&mut self, ticket: u64, held_back: bool) {
        if let Some(waiter) = self.waiting.get_mut(&ticket) {
            waiter.held_back = held_back;
        }
    }

    /// What was decided about a request that waits.
    pub(crate) fn verdict(&self, ticket: u64) -> Option<Outcome> {
        self.waiting.get(&ticket).and_then(|waiter| waiter.verdict)
    }

    /// Decides about a request that waits; returns its bell.
    pub(crate) fn decide(&mut self, ticket: u64, verdict: Outcome) -> Option<Arc<Bell>> {
        let waiter = self.waiting.get_mut(&ticket)?;
        waiter.verdict = Some(verdict);
        Some(Arc::clone(&waiter.bell))
    }

    /// Refuses a request, if it has tried since the last change. If not, it is to try first: returns its bell.
    fn refuse(&mut self, least: Option<u64>, verdict: Outcome) -> Standstill {
        let changes = self.changes;
        match least.and_then(|ticket| self.waiting.get_mut(&ticket)) {
            None => Standstill::default(),
            Some(least) if least.tried != Some(changes) => {
                least.urged = true;
                Standstill { refused: None, bells: vec![Arc::clone(&least.bell)] }
            }
            Some(least) => {
                Standstill { refused: Some((least.asker.ticket, verdict)), bells: Bells::new() }
            }
        }
    }

    /// How many wait.
    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    fn rank_of(&self, asker: &Asker) -> (Reverse<bool>, Reverse<i32>, u64) {
        let known = self.waiting.get(&asker.ticket).map(Waiter::rank);
        known.unwrap_or((Reverse(false), Reverse(asker.priority), asker.ticket))
    }

    /// Those nobody has decided about yet.
    fn undecided(&self) -> impl Iterator<Item = &Waiter> {
        let is_there = |waiter: &&Waiter| !waiter.is_forgotten(self.now);
        self.waiting.values().filter(|waiter| waiter.verdict.is_none()).filter(is_there)
    }

    /// Those who come before a request. A thread does not wait for a future of its own, which nobody else
    /// may be going to poll.
    fn ahead_of(&self, asker: &Asker) -> impl Iterator<Item = &Waiter> {
        let rank = self.rank_of(asker);
        let (owner, ticket, blocks) = (asker.owner, asker.ticket, asker.blocks);
        self.undecided().filter(move |waiter| {
            let own_future = blocks && !waiter.asker.blocks && waiter.asker.owner == owner;
            let is_ahead = waiter.asker.ticket != ticket && waiter.rank() < rank;
            is_ahead && !own_future && !waiter.held_back
        })
    }

    /// Whether somebody who does not wait has given back what this owner had asked for.
    fn may_be_freed_by_others(&self, owner: Owner) -> bool {
        let Some(&by) = self.freed_by.get(&owner) else { return false };
        let standing = owner::standings(std::iter::once(by))[&by];
        standing != Standing::Gone && !self.is_waiting(by, standing)
    }

    /// Whether the owner can do nothing but wait.
    fn is_waiting(&self, owner: Owner, standing: Standing) -> bool {
        let mut own = self.undecided().filter(|waiter| waiter.asker.owner == owner);
        match standing {
            Standing::Gone => true,
            Standing::Thread => own.any(|waiter| waiter.asker.blocks),
            Standing::Task { threads } => own.count() >= threads.max(1) as usize,
        }
    }
}

/// Memory that may serve a request without a free of another thread.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Supply {
    /// What the driver has to have for the request.
    pub(crate) needed: u64,
    /// What is free on the device, cached or pending.
    pub(crate) by_itself: u64,
    /// Whether frees are pending, or other streams are at work on free memory that would help.
    pub(crate) work: bool,
    /// Whether memory of other processes would be enough.
    pub(crate) processes: bool,
}

/// What may still come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sources {
    /// Frees that wait for other streams, and free memory that other streams are at work on.
    pub(crate) events: bool,
    /// What other threads and tasks hold.
    pub(crate) owners: bool,
    /// What other processes hold.
    pub(crate) processes: bool,
    /// The turn of this request, after others that have still to try.
    pub(crate) turn: bool,
}

impl Sources {
    pub(crate) fn any(self) -> bool {
        self.events || self.owners || self.processes || self.turn
    }
}

/// What follows from whether anybody can go on.
#[derive(Debug, Default)]
pub(crate) struct Standstill {
    /// The request to be refused, and as what.
    pub(crate) refused: Option<(u64, Outcome)>,
    /// Requests that were kept back and may try now.
    pub(crate) bells: Bells,
}

impl Queue {
    /// Whether a request may take what is free now, or has to wait for others first.
    pub(crate) fn may_try(&self, heap: &Heap, asker: &Asker) -> bool {
        let mut ahead = self.ahead_of(asker).peekable();
        if ahead.peek().is_none() {
            return true;
        }
        if ahead.any(|waiter| waiter.is_starved() || waiter.asker.owner == asker.owner) {
            return false;
        }
        // Futures keep their order, but for those of tasks: a task asks for one thing at a time.
        let is_task = || {
            let standing = owner::standings(std::iter::once(asker.owner));
            matches!(standing.get(&asker.owner), Some(Standing::Task { .. }))
        };
        (asker.blocks || is_task())
            && heap.live_blocks().any(|block| block.holder.owner == asker.owner)
    }

    /// Whether a request that waits may take what is free in its own lane: those ahead wait for other lanes.
    pub(crate) fn may_take_own(&self, asker: &Asker) -> bool {
        !self.ahead_of(asker).any(|waiter| waiter.asker.lane == asker.lane)
    }

    /// A task was told to give way to those that hold memory now.
    pub(crate) fn note_gave_way(&mut self, heap: &Heap, owner: Owner) {
        let mut others = holders(heap);
        others
            .retain(|&other, standing| other != owner && matches!(standing, Standing::Task { .. }));
        self.gave_way.insert(owner, others.into_keys().collect());
    }

    /// Whether a task gave way to others, all of which still hold memory, and has freed its own.
    pub(crate) fn is_held_back(&mut self, heap: &Heap, owner: Owner) -> bool {
        if self.gave_way.is_empty() {
            return false;
        }
        self.forget_who_gave_way(heap);
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

    /// Forgets tasks that gave way and are gone, or gave way to an owner that is gone; now and then, to an owner that holds
    /// nothing any more. A task that does not ask again must not keep every request on the slow path.
    fn forget_who_gave_way(&mut self, heap: &Heap) {
        let all = self.gave_way.iter().flat_map(|(owner, others)| others.iter().chain([owner]));
        let standings = owner::standings(all.copied());
        let is_there = |owner: &Owner| standings[owner] != Standing::Gone;
        self.gave_way.retain(|owner, others| is_there(owner) && others.iter().all(is_there));
        self.since_looked_over += 1;
        if self.since_looked_over >= LOOKED_OVER {
            self.since_looked_over = 0;
            let holders = holders(heap);
            let holds = |owner: &Owner| holders.contains_key(owner);
            self.gave_way.retain(|_, others| others.iter().all(holds));
        }
    }

    /// What may still come for a request that waits. `is_helped` says that a callback is under way, which may free memory of
    /// any owner.
    pub(crate) fn sources(
        &self,
        heap: &Heap,
        asker: &Asker,
        request: &Request,
        supply: Supply,
        is_helped: bool,
    ) -> Sources {
        // The bytes of owners that may still free them, and what is free or will be by itself.
        let (mut held, mut by_others, mut givers) = (0_u64, is_helped, BTreeSet::new());
        for (owner, (standing, bytes)) in holdings(heap) {
            let goes_on = !self.is_waiting(owner, standing) || self.may_be_freed_by_others(owner);
            by_others |= goes_on;
            // A task that waits can still be told to give way.
            let is_other_task = owner != asker.owner && matches!(standing, Standing::Task { .. });
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
            turn: self.ahead_of(asker).any(to_try),
        }
    }

    /// Whether those who hold memory all wait for each other, and what is to be done about it.
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
                .min_by_key(|waiter| (waiter.asker.priority, Reverse(waiter.asker.ticket)));
            let least = least.filter(|_| in_vain).map(|least| least.asker.ticket);
            return self.refuse(least, Outcome::Full);
        }
        // Those kept back for a request that starves may fit.
        let mut kept_back = false;
        for waiter in self.waiting.values_mut().filter(|waiter| waiter.is_starved()) {
            waiter.passed = 0;
            kept_back = true;
        }
        if kept_back {
            return Standstill { refused: None, bells: self.changed() };
        }
        let verdict = if tasks.len() > 1 { Outcome::GiveWay } else { Outcome::Split };
        let holds = |waiter: &&Waiter| tasks.contains_key(&waiter.asker.owner);
        let least = self.undecided().filter(holds).min_by_key(|waiter| {
            let Asker { priority, owner, ticket, .. } = waiter.asker;
            (priority, Reverse(owner), Reverse(ticket))
        });
        let least = least.map(|least| least.asker.ticket);
        self.refuse(least, verdict)
    }
}

/// Whether a block for the request may come free in a segment that one of `givers` holds memory in.
fn may_leave_room(heap: &Heap, request: &Request, givers: &BTreeSet<Owner>) -> bool {
    heap.live_blocks().filter(|block| givers.contains(&block.holder.owner)).any(|block| {
        let large_enough = heap[block.segment].size >= request.size;
        large_enough && heap[block.lane.pool].small == request.small
    })
}
