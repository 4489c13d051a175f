//! The engine while its lock is held: the path of an allocation that finds a free block, and of a
//! free that nobody waits for. Everything slower is in the files named after it.

use rustc_hash::FxHashMap;

use crate::block::{BlockId, BlockState, BlockTable};
use crate::clock::Clock;
use crate::driver::{Driver, DriverResult, Properties, StreamId};
use crate::error::{AddressError, AllocError};
use crate::history::{Action, History, Tag};
use crate::homes::{Found, Homes};
use crate::inject::{Injected, Injection};
use crate::ladder::{Ladder, Rung};
use crate::layout::Layout;
use crate::looked_at::Looks;
use crate::options::Options;
use crate::owner::{self, Owner, Wishes};
use crate::pages::PageTable;
use crate::pending::Pending;
use crate::policy::{Policy, Request, View};
use crate::pool::{PoolIndex, PoolTable};
use crate::private::Recording;
use crate::proof::{LastingStreams, Moments};
use crate::queue::{Asker, Queue};
use crate::segment::{Backing, SegmentTable};
use crate::size::{block_size, is_small, segment_size};
use crate::stats::{Counters, Lanes};
use crate::stitch::Stitches;
use crate::tags::ToldLater;

/// Everything the lock protects.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) options: Options,
    /// The policy in force.
    pub(crate) policy: Policy,
    pub(crate) ladder: Ladder,
    pub(crate) blocks: BlockTable,
    pub(crate) segments: SegmentTable,
    pub(crate) pools: PoolTable,
    pub(crate) pages: PageTable,
    pub(crate) stitches: Stitches,
    pub(crate) homes: Homes,
    pub(crate) layout: Layout,
    /// Blocks handed out, by address.
    pub(crate) live: FxHashMap<u64, BlockId>,
    /// In what order memory was freed.
    pub(crate) moments: Moments,
    pub(crate) pending: Pending,
    /// Private pools that allocations go to now, the latest last.
    pub(crate) recording: Vec<Recording>,
    /// The most this engine may hold, if there is a limit below the device's own.
    pub(crate) limit: Option<u64>,
    pub(crate) history: History,
    pub(crate) told_later: ToldLater,
    /// What of the page table is in the figures already.
    pub(crate) pages_counted: [u64; 3],
    /// Bytes of plain segments on their way back to the driver.
    pub(crate) leaving: u64,
    /// Ranges of addresses that no block is in, and that the driver would not take back so far.
    pub(crate) left_ranges: Vec<(u64, u64)>,
    pub(crate) queue: Queue,
    pub(crate) lasting: LastingStreams,
    /// Who asked last, of those who ask for themselves.
    pub(crate) leader: Owner,
    /// What is made to fail, if anything.
    pub(crate) injection: Option<Injection>,
    /// Whether an allocation has to look whether somebody waits, or a failure is injected.
    pub(crate) attention: bool,
    pub(crate) looks: Looks,
}

/// What somebody asked for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked {
    /// Not zero.
    pub(crate) bytes: u64,
    pub(crate) stream: StreamId,
    pub(crate) tag: Tag,
    pub(crate) owner: Owner,
    /// A thread waits for it and does nothing else, as opposed to a future.
    pub(crate) blocks: bool,
    /// It is for later: memory of others, and of the host, would not help.
    pub(crate) ahead: bool,
    /// What who made a future wants; what a thread wants is looked up when it is needed.
    pub(crate) of_maker: Option<Wishes>,
    /// It is asked for in a callback: it asks none, and never waits.
    pub(crate) in_callback: bool,
}

impl Asked {
    /// For this thread, which waits for it.
    pub(crate) fn by_thread(bytes: u64, stream: StreamId, tag: Tag) -> Self {
        let owner = owner::current();
        let in_callback = owner::is_in_callback();
        Self { bytes, stream, tag, owner, blocks: true, ahead: false, of_maker: None, in_callback }
    }

    /// What is wanted for it. One that follows wants what `leader` wants, in whose name it asks, unless it says
    /// otherwise itself.
    pub(crate) fn wishes(&self, leader: Owner) -> Wishes {
        let own = self.of_maker.unwrap_or_else(owner::wishes);
        if self.owner == Owner::FOLLOWER { own.or(&owner::wishes_of(leader)) } else { own }
    }
}

/// How far a request got with the lock held.
#[derive(Debug)]
pub(crate) enum Attempt {
    Served(u64),
    /// No free block serves it.
    Miss,
    /// Others who wait come first.
    Queue,
    /// It is made to fail.
    Injected(Injected),
}

/// The engine, locked.
#[derive(Debug)]
pub(crate) struct Locked<'a, D> {
    pub(crate) state: &'a mut State,
    pub(crate) driver: &'a D,
    pub(crate) clock: &'a dyn Clock,
    pub(crate) counters: &'a Counters,
    pub(crate) lanes: &'a Lanes,
    pub(crate) device: Properties,
}

impl State {
    /// Somebody waits who did not, or the other way round; or what is injected changed.
    pub(crate) fn pay_attention(&mut self) {
        self.attention = !self.queue.is_idle() || self.injection.is_some();
    }

    /// Gives back what the tables do not need: for moments at which nobody is in a hurry.
    pub(crate) fn shrink(&mut self) {
        self.blocks.shrink();
        self.segments.shrink();
        self.stitches.shrink();
        self.pools.shrink();
        let live = self.live.len();
        if self.live.capacity() / 8 > live.max(128) {
            self.live.shrink_to(2 * live);
        }
    }

    pub(crate) fn view(&self, device: Properties) -> View<'_> {
        let Self { blocks, segments, pages, options, .. } = self;
        View { blocks, segments, pages, options, device }
    }
}

impl<D: Driver> Locked<'_, D> {
    // ---- allocation ----

    /// Serves a request from a free block, if there is one.
    pub(crate) fn alloc(&mut self, asked: &Asked) -> Result<Attempt, AllocError> {
        self.begin(asked.stream)?;
        let owner = self.lead(asked.owner);
        if self.state.attention
            && let Some(held_up) = self.hold_up(asked, owner)
        {
            return Ok(held_up);
        }
        let request = self.request(asked.bytes, asked.stream, owner);
        match self.serve_hit(&request, asked.tag)? {
            Some(address) => Ok(Attempt::Served(address)),
            None if self.state.attention && self.must_queue(asked, &request) => Ok(Attempt::Queue),
            None => Ok(Attempt::Miss),
        }
    }

    /// Serves a request from memory that is free in its own lane, whoever waits: nobody else can be served from there
    /// without a rung of the ladder.
    fn serve_hit(&mut self, request: &Request, tag: Tag) -> DriverResult<Option<u64>> {
        let policy = self.state.policy;
        let Some(found) = self.search_all(request, policy)? else { return Ok(None) };
        if self.state.attention {
            self.state.queue.passed_over(u64::MAX);
        }
        self.counters.hits.add(1);
        Ok(Some(self.hand_out(found, policy, request, tag)))
    }

    /// As [`alloc`](Self::alloc), and asks the driver too; but `None` where more is needed than that.
    pub(crate) fn alloc_at_once(&mut self, asked: &Asked) -> Result<Option<u64>, AllocError> {
        let &Asked { bytes, stream, tag, .. } = asked;
        self.begin(stream)?;
        let owner = self.lead(asked.owner);
        if self.state.attention && (self.state.injection.is_some() || self.is_held_back(owner)) {
            // What is injected strikes once.
            return Ok(None);
        }
        let request = self.request(bytes, stream, owner);
        if let Some(address) = self.serve_hit(&request, tag)? {
            return Ok(Some(address));
        }
        if self.state.attention {
            // Whoever waits may have to come first.
            return Ok(None);
        }
        let policy = self.state.policy;
        if self.is_collecting_garbage() || request.wanted > self.device.total {
            // Memory may have to be given back before the driver is asked.
            return Ok(None);
        }
        let skipped = self.state.options.skip_rungs.and(asked.wishes(owner).skipped);
        let may_borrow = !skipped.contains(Rung::Borrow);
        let served = self.serve_new(&request, policy, may_borrow, tag)?;
        if served.is_some() {
            self.counters.misses.add(1);
        }
        Ok(served)
    }

    /// Who asks: somebody, or, for one that follows, whoever asked last.
    pub(crate) fn lead(&mut self, owner: Owner) -> Owner {
        if owner != Owner::FOLLOWER {
            self.state.leader = owner;
        }
        self.state.leader
    }

    /// Completes frees that other streams are done with.
    pub(crate) fn begin(&mut self, stream: StreamId) -> DriverResult<()> {
        if self.is_recording() {
            // Events may not be queried during a capture.
            if self.state.options.graph_capture_record_stream_reuse {
                self.free_captured_blocks(stream)?;
            }
        } else if !self.state.pending.is_empty() {
            self.process_events()?;
        }
        Ok(())
    }

    /// Whether a failure is injected here, or the request is one of a task that gave way to others.
    #[cold]
    fn hold_up(&mut self, asked: &Asked, owner: Owner) -> Option<Attempt> {
        if asked.in_callback {
            return None;
        }
        if let Some(injection) = &mut self.state.injection
            && let Some(injected) = injection.strike(asked.bytes)
        {
            return Some(Attempt::Injected(injected));
        }
        if !self.may_wait(&asked.wishes(owner)) {
            return None;
        }
        let held_back = self.is_held_back(owner);
        self.state.pay_attention();
        held_back.then_some(Attempt::Queue)
    }

    /// Whether a request that no free block serves has to wait for others before the driver is asked.
    #[cold]
    fn must_queue(&mut self, asked: &Asked, request: &Request) -> bool {
        let &Request { pool, stream, owner, .. } = request;
        let wishes = asked.wishes(owner);
        if asked.in_callback || !self.may_wait(&wishes) {
            return false;
        }
        let (priority, blocks, lane) = (wishes.priority, asked.blocks, (pool, stream));
        !self.may_try(&Asker { ticket: u64::MAX, owner, priority, blocks, lane })
    }

    /// Whether a request of somebody who wants this waits at all.
    fn may_wait(&self, wishes: &Wishes) -> bool {
        let options = &self.state.options;
        wishes.budget.map_or(options.wait_ms > 0, |budget| !budget.is_zero())
            && self.state.ladder == Ladder::Graceful
            && !options.skip_rungs.and(wishes.skipped).contains(Rung::Wait)
    }

    /// Sizes and pool of a request; sizes that overflow are the largest there are.
    pub(crate) fn request(&self, requested: u64, stream: StreamId, owner: Owner) -> Request {
        let options = &self.state.options;
        let size = block_size(requested, options);
        let wanted = size.and_then(|size| segment_size(size, options));
        let small = size.is_some_and(is_small);
        Request {
            requested,
            size: size.unwrap_or(u64::MAX),
            wanted: wanted.unwrap_or(u64::MAX),
            stream,
            pool: self.pool_for(small, stream),
            small,
            owner,
        }
    }

    /// As [`search`](Self::search), also among what is free as soon as somebody asks.
    fn search_all(&mut self, request: &Request, policy: Policy) -> DriverResult<Option<Found>> {
        match self.search(request, policy) {
            None if self.state.pending.has_more() && !self.is_recording() => {
                self.process_many_events()?;
                Ok(self.find(request, policy))
            }
            found => Ok(found),
        }
    }

    /// What serves a request without the driver, still in its lane.
    pub(crate) fn search(&mut self, request: &Request, policy: Policy) -> Option<Found> {
        self.count_search(request);
        let found = self.find(request, policy);
        let found = found.or_else(|| self.find_recalled(request, policy))?;
        if self.state.homes.is_tight && self.unpin(found, request) {
            return self.find(request, policy);
        }
        Some(found)
    }

    /// What serves a request without the driver: a free block, or what the policy makes of several.
    pub(crate) fn find(&self, request: &Request, policy: Policy) -> Option<Found> {
        if policy.rules().stitches()
            && let Some(found) = self.served_before(request)
        {
            return Some(found);
        }
        self.find_best(request, policy)
    }

    /// As [`find`](Self::find), wherever it was served before.
    pub(crate) fn find_best(&self, request: &Request, policy: Policy) -> Option<Found> {
        match self.choose(request, policy) {
            Some(block) => Some(Found::Block(block)),
            None if policy.rules().stitches() => self.look_again(request),
            None => None,
        }
    }

    fn count_search(&mut self, request: &Request) {
        if self.is_collecting_garbage() {
            self.state.pools[request.pool].searches += 1;
        }
    }

    pub(crate) fn choose(&self, request: &Request, policy: Policy) -> Option<BlockId> {
        let lane = self.state.pools[request.pool].lane(request.stream)?;
        policy.rules().choose(self.state.view(self.device), lane, request.size)
    }

    pub(crate) fn would_hit(&self, requested: u64, stream: StreamId) -> bool {
        let request = self.request(requested, stream, Owner::NOBODY);
        self.find(&request, self.state.policy).is_some()
    }

    /// Cuts the block to size, if the policy splits it, and hands it out.
    pub(crate) fn hand_out(
        &mut self,
        found: Found,
        policy: Policy,
        request: &Request,
        tag: Tag,
    ) -> u64 {
        let id = match found {
            Found::Block(id) => id,
            Found::Piece { block, address } => {
                if self.state.blocks[block].address != address {
                    self.cut_free(block, address, address + request.size);
                    self.insert_free(block);
                }
                block
            }
            Found::Range(range) => self.lend(range, request.size),
        };
        if policy.rules().stitches() {
            self.remember(request, id);
        }
        let view = self.state.view(self.device);
        let block = &view.blocks[id];
        let small = self.state.pools[block.pool].small;
        let splits = block.size > request.size
            && policy.rules().splits(view, block, request.size, small)
            && (policy.rules().stitches() || !self.state.pools.is_no_split(block.pool));
        self.take(id, splits, request, tag)
    }

    /// Hands out a free block: its first `request.size` bytes if it is to be split, else all of it.
    pub(crate) fn take(&mut self, id: BlockId, splits: bool, request: &Request, tag: Tag) -> u64 {
        let block = &self.state.blocks[id];
        let (pool, address, whole) = (block.pool, block.address, block.size);
        let was_split = block.is_split();
        let plain = self.state.segments[block.segment].is_plain();
        let small = self.state.pools[pool].small;

        let State { blocks, pools, .. } = &mut *self.state;
        let pool = &mut pools[pool];
        let searches = pool.searches;
        let lane = pool.lane_mut(request.stream);
        lane.remove_free(whole, address);
        let id = if splits {
            let front = blocks.split_front(id, request.size, BlockState::Live);
            let rest = &mut blocks[id];
            rest.free_since = searches;
            lane.insert_free(rest.size, rest.address, id);
            if plain && was_split {
                self.counters.inactive_split_bytes.decrease(small, request.size);
            } else if plain {
                self.counters.inactive_split_bytes.increase(small, rest.size);
                self.counters.inactive_split.increase(small, 1);
            }
            front
        } else {
            if plain && was_split {
                self.counters.inactive_split_bytes.decrease(small, whole);
                self.counters.inactive_split.decrease(small, 1);
            }
            id
        };
        let block = &mut blocks[id];
        block.state = BlockState::Live;
        block.requested = request.requested;
        block.tag = tag;
        block.owner = request.owner;
        let (size, pool) = (block.size, block.pool);
        lane.activated(address, size);
        lane.changed(whole, address..address + size);
        self.state.live.insert(address, id);
        if Self::is_spill(pool) {
            self.counters.spilled_allocation.increase(1);
            self.record_block(Action::Alloc, id, tag);
            return address;
        }
        self.counters.allocation.increase(small, 1);
        self.counters.allocated_bytes.increase(small, size);
        self.counters.active.increase(small, 1);
        let live = self.counters.active_bytes.increase(small, size);
        self.state.homes.windows.peak = self.state.homes.windows.peak.max(live);
        self.counters.requested_bytes.increase(small, request.requested);
        if self.is_oversize(size) {
            self.counters.oversize_allocations.increase(1);
        }
        self.record_block(Action::Alloc, id, tag);
        address
    }

    // ---- free ----

    /// Takes a block back from its owner.
    pub(crate) fn free(&mut self, address: u64, by: Owner, tag: Tag) -> Result<(), AddressError> {
        let id = self.state.live.remove(&address).ok_or(AddressError::Unknown { address })?;
        let State { blocks, queue, pools, .. } = &mut *self.state;
        let block = &mut blocks[id];
        block.state = BlockState::Pending;
        if block.owner != by {
            queue.note_freed_by(block.owner, by);
        }
        if Self::is_spill(block.pool) {
            return self.free_spilled(id, tag);
        }
        let (size, used_elsewhere) = (block.size, block.uses.is_some());
        let small = pools[block.pool].small;
        self.counters.allocation.decrease(small, 1);
        self.counters.allocated_bytes.decrease(small, size);
        if self.is_oversize(size) {
            self.counters.oversize_allocations.decrease(1);
        }
        self.record_block(Action::FreeRequested, id, tag);
        if used_elsewhere {
            return self
                .free_when_done(id)
                .map_err(|source| AddressError::Driver { address, source });
        }
        self.complete_free(id, tag);
        Ok(())
    }

    /// The block is free for reuse on its stream: merges it with its neighbours.
    pub(crate) fn complete_free(&mut self, id: BlockId, tag: Tag) {
        self.record_block(Action::FreeCompleted, id, tag);
        let block = &self.state.blocks[id];
        debug_assert!(block.state == BlockState::Pending && block.events == 0);
        let (size, requested, stream) = (block.size, block.requested, block.stream);
        let (address, pool) = (block.address, block.pool);
        if Self::is_spill(pool) {
            self.give_back_spill(id);
            return;
        }
        let backing = self.state.segments[block.segment].backing;
        self.state.blocks[id].freed = self.state.moments.next();
        let small = self.state.pools[pool].small;
        if let Backing::Stitched(range) = backing {
            self.return_home(range);
        } else {
            let (merged, merged_bytes) = self.merge_free(id);
            if backing == Backing::Plain {
                self.count_split_change(id, small, merged, merged_bytes);
            }
        }
        self.state.pools[pool].lane_mut(stream).deactivated(address, size);
        self.counters.active.decrease(small, 1);
        self.counters.active_bytes.decrease(small, size);
        self.counters.requested_bytes.decrease(small, requested);
    }

    // ---- small questions ----

    pub(crate) fn pool_for(&self, small: bool, stream: StreamId) -> PoolIndex {
        if !self.state.recording.is_empty()
            && let Some(pool) = self.recorded_pool(small, stream)
        {
            return pool;
        }
        if small { PoolTable::SMALL } else { PoolTable::LARGE }
    }

    pub(crate) fn is_oversize(&self, size: u64) -> bool {
        self.state.options.max_split_size.is_some_and(|limit| size >= limit)
    }

    pub(crate) fn is_collecting_garbage(&self) -> bool {
        self.state.limit.is_some() && self.state.options.garbage_collection_threshold > 0.0
    }

    pub(crate) fn reserved(&self) -> u64 {
        self.counters.reserved_bytes.current()
    }
}
