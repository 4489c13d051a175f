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

use crate::block::{Block, BlockState};
use crate::clock::Bell;
use crate::driver::{Driver, StreamId};
use crate::locked::Locked;
use crate::owner::{self, Owner, Standing};
use crate::policy::Request;
use crate::pool::PoolIndex;

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
    pub(crate) lane: (PoolIndex, StreamId),
}

/// Why a request that waits is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Nothing more can come.
    InVain,
    /// All tasks that hold memory wait; this one is to give way.
    GiveWay,
    /// It is the only task that holds memory.
    Split,
}

#[derive(Debug)]
struct Waiter {
    asker: Asker,
    bell: Arc<Bell>,
    passed: u32,
    /// The count of changes when it last tried in vain.
    tried: Option<u64>,
    verdict: Option<Verdict>,
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
    pub(crate) fn leave(&mut self, ticket: u64) -> Bells {
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
    pub(crate) fn verdict(&self, ticket: u64) -> Option<Verdict> {
        self.waiting.get(&ticket).and_then(|waiter| waiter.verdict)
    }

    /// Decides about a request that waits; returns its bell.
    pub(crate) fn decide(&mut self, ticket: u64, verdict: Verdict) -> Option<Arc<Bell>> {
        let waiter = self.waiting.get_mut(&ticket)?;
        waiter.verdict = Some(verdict);
        Some(Arc::clone(&waiter.bell))
    }

    /// Refuses a request, if it has tried since the last change; if not, it is to try first.
    fn refuse(&mut self, least: Option<u64>, verdict: Verdict) -> Standstill {
        let changes = self.changes;
        match least.and_then(|ticket| self.waiting.get_mut(&ticket)) {
            None => Standstill::None,
            Some(least) if least.tried != Some(changes) => {
                least.urged = true;
                Standstill::TryAgain(vec![Arc::clone(&least.bell)])
            }
            Some(least) => Standstill::Refuse(least.asker.ticket, verdict),
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

/// Whether nobody can go on.
#[derive(Debug)]
pub(crate) enum Standstill {
    /// Somebody can, or something will come.
    None,
    /// Some were kept back for one that starved: they may try now.
    TryAgain(Bells),
    /// This request is to be refused.
    Refuse(u64, Verdict),
}

impl<D: Driver> Locked<'_, D> {
    pub(crate) fn live_blocks(&self) -> impl Iterator<Item = &Block> {
        self.state.blocks.iter().map(|(_, block)| block).filter(|b| b.state == BlockState::Live)
    }

    /// Whether a request may take what is free now, or has to wait for others first.
    pub(crate) fn may_try(&self, asker: &Asker) -> bool {
        let queue = &self.state.queue;
        let mut ahead = queue.ahead_of(asker).peekable();
        if ahead.peek().is_none() {
            return true;
        }
        if ahead.any(|waiter| waiter.is_starved() || waiter.asker.owner == asker.owner) {
            return false;
        }
        // Futures keep their order, but for tasks', each of which asks for one thing at a time.
        let is_task = || {
            let standing = owner::standings(std::iter::once(asker.owner));
            matches!(standing.get(&asker.owner), Some(Standing::Task { .. }))
        };
        (asker.blocks || is_task()) && self.live_blocks().any(|block| block.owner == asker.owner)
    }

    /// Whether a request that waits may take what is free in its own lane: whoever is ahead waits for other lanes.
    pub(crate) fn may_take_own(&self, asker: &Asker) -> bool {
        !self.state.queue.ahead_of(asker).any(|waiter| waiter.asker.lane == asker.lane)
    }

    /// A task was told to give way to those that hold memory now.
    pub(crate) fn gave_way(&mut self, owner: Owner) {
        let mut others = self.holders();
        others
            .retain(|&other, standing| other != owner && matches!(standing, Standing::Task { .. }));
        self.state.queue.gave_way.insert(owner, others.into_keys().collect());
    }

    /// Whether a task gave way to others, all of which still hold memory, and has given back its own.
    pub(crate) fn is_held_back(&mut self, owner: Owner) -> bool {
        if self.state.queue.gave_way.is_empty() {
            return false;
        }
        self.look_over_who_gave_way();
        let Some(others) = self.state.queue.gave_way.get(&owner) else { return false };
        let holders = self.holders();
        if holders.contains_key(&owner) {
            return false;
        }
        if !others.is_empty() && others.iter().all(|other| holders.contains_key(other)) {
            return true;
        }
        self.state.queue.gave_way.remove(&owner);
        false
    }

    /// Forgets those who gave way and are gone, or to somebody who is gone; now and then, to somebody who holds nothing
    /// any more: one who does not ask again is not to keep everybody on the slow path.
    fn look_over_who_gave_way(&mut self) {
        let gave_way = &self.state.queue.gave_way;
        let all = gave_way.iter().flat_map(|(owner, others)| others.iter().chain([owner]));
        let standings = owner::standings(all.copied());
        let is_there = |owner: &Owner| standings[owner] != Standing::Gone;
        let queue = &mut self.state.queue;
        queue.gave_way.retain(|owner, others| is_there(owner) && others.iter().all(is_there));
        queue.since_looked_over += 1;
        if queue.since_looked_over >= LOOKED_OVER {
            queue.since_looked_over = 0;
            let holders = self.holders();
            let holds = |owner: &Owner| holders.contains_key(owner);
            self.state.queue.gave_way.retain(|_, others| others.iter().all(holds));
        }
    }

    /// Who holds memory of the device and is still there, and how much.
    fn holdings(&self) -> BTreeMap<Owner, (Standing, u64)> {
        let mut bytes: BTreeMap<Owner, u64> = BTreeMap::new();
        // There can be very many blocks, and those made one after the other are mostly one owner's.
        let on_device = self.live_blocks().filter(|block| !Self::is_spill(block.pool));
        let mut run: Option<(Owner, u64)> = None;
        for block in on_device {
            match &mut run {
                Some((owner, held)) if *owner == block.owner => *held += block.size,
                _ => {
                    let before = run.replace((block.owner, block.size));
                    before
                        .into_iter()
                        .for_each(|(owner, held)| *bytes.entry(owner).or_default() += held);
                }
            }
        }
        run.into_iter().for_each(|(owner, held)| *bytes.entry(owner).or_default() += held);
        let standings = owner::standings(bytes.keys().copied());
        let is_there = standings.into_iter().filter(|(_, standing)| *standing != Standing::Gone);
        is_there.map(|(owner, standing)| (owner, (standing, bytes[&owner]))).collect()
    }

    fn holders(&self) -> BTreeMap<Owner, Standing> {
        self.holdings().into_iter().map(|(owner, (standing, _))| (owner, standing)).collect()
    }

    /// What may still come for a request that waits. `free` is what the device reports; `is_helped` says that a
    /// callback is under way, which may give back anybody's.
    pub(crate) fn sources(
        &mut self,
        asker: &Asker,
        request: &Request,
        free: Option<u64>,
        is_helped: bool,
    ) -> Sources {
        let work = !self.is_recording()
            && (!self.state.pending.is_empty() || self.events_help(request).unwrap_or(false));
        let needed = self.needed(request);
        let queue = &self.state.queue;
        // What those hold who may still free it, and what is free or will be by itself.
        let (mut held, mut by_others, mut givers) = (0_u64, is_helped, BTreeSet::new());
        for (owner, (standing, bytes)) in self.holdings() {
            let goes_on = !queue.is_waiting(owner, standing) || queue.may_be_freed_by_others(owner);
            by_others |= goes_on;
            // A task that waits can still be told to give way.
            let is_other_task = owner != asker.owner && matches!(standing, Standing::Task { .. });
            if goes_on || is_other_task || is_helped {
                held = held.saturating_add(bytes);
                givers.insert(owner);
            }
        }
        let room = self.room_of(free.unwrap_or(0));
        let by_itself = [room, self.cached(), self.pending_bytes()];
        let most = by_itself.into_iter().fold(held, u64::saturating_add);
        let is_enough =
            most >= needed || most >= request.size && self.may_leave_room(request, &givers);
        let to_try = |waiter: &Waiter| waiter.tried != Some(queue.changes);
        Sources {
            events: work && is_enough,
            owners: by_others && is_enough,
            processes: self.others_may_help(request, free),
            turn: queue.ahead_of(asker).any(to_try),
        }
    }

    /// Whether a block for the request may come free in a segment that one of `givers` holds memory in.
    fn may_leave_room(&self, request: &Request, givers: &BTreeSet<Owner>) -> bool {
        self.live_blocks().filter(|block| givers.contains(&block.owner)).any(|block| {
            let large_enough = self.state.segments[block.segment].size >= request.size;
            large_enough && self.state.pools[block.pool].small == request.small
        })
    }

    /// Bytes of a device that reports `free` bytes that are neither free nor this engine's, nor what every process
    /// costs.
    pub(crate) fn held_by_others(&self, free: u64) -> u64 {
        let used = self.device.total.saturating_sub(free);
        used.saturating_sub(self.reserved()).saturating_sub(self.device.process_overhead)
    }

    /// Whether the memory that other processes hold would be enough, and may be had.
    fn others_may_help(&self, request: &Request, free: Option<u64>) -> bool {
        let Some(free) = free else { return false };
        let others = self.held_by_others(free);
        // What is cached would be given back first.
        let in_use = self.reserved().saturating_sub(self.cached());
        let allowed = self.state.limit.map_or(u64::MAX, |limit| limit.saturating_sub(in_use));
        let wanted = self.wanted_of(request);
        others > 0
            && wanted <= allowed
            && wanted <= free.saturating_add(others).saturating_add(self.cached())
    }

    /// Whether those who hold memory all wait for each other, and what is to be done about it.
    pub(crate) fn standstill(&mut self, sources: Sources) -> Standstill {
        if sources.events || sources.turn {
            return Standstill::None;
        }
        let holders = self.holders();
        let queue = &mut self.state.queue;
        let is_task = |standing: &Standing| matches!(standing, Standing::Task { .. });
        let tasks: BTreeMap<_, _> =
            holders.iter().filter(|(_, standing)| is_task(standing)).collect();
        let all_wait = |queue: &Queue| tasks.iter().all(|(&&o, &&s)| queue.is_waiting(o, s));
        if tasks.is_empty() || !all_wait(queue) {
            let in_vain = !sources.owners && !sources.processes;
            let least = queue
                .undecided()
                .min_by_key(|waiter| (waiter.asker.priority, Reverse(waiter.asker.ticket)));
            let least = least.filter(|_| in_vain).map(|least| least.asker.ticket);
            return queue.refuse(least, Verdict::InVain);
        }
        // Those kept back for one that starves may fit.
        let mut kept_back = false;
        for waiter in queue.waiting.values_mut().filter(|waiter| waiter.is_starved()) {
            waiter.passed = 0;
            kept_back = true;
        }
        if kept_back {
            return Standstill::TryAgain(queue.changed());
        }
        let verdict = if tasks.len() > 1 { Verdict::GiveWay } else { Verdict::Split };
        let holds = |waiter: &&Waiter| tasks.contains_key(&waiter.asker.owner);
        let least = queue.undecided().filter(holds).min_by_key(|waiter| {
            let Asker { priority, owner, ticket, .. } = waiter.asker;
            (priority, Reverse(owner), Reverse(ticket))
        });
        let least = least.map(|least| least.asker.ticket);
        queue.refuse(least, verdict)
    }
}
